"""Requests: the bodies of the endpoints, checked field by field.

Unknown fields are ignored, as clients expect, and reported (:meth:`Body.unread`); known fields that cannot be
honoured are refused, so that nobody gets something else than requested.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictBool,
    ValidationInfo,
    field_validator,
    model_validator,
)
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from medusa.base.sampling_advice import SamplingAdvice
from medusa.conversations import written_call

MAX_STOPS, MAX_STOP_LENGTH = 16, 512
MAX_CHOICES = 16
MAX_TOOLS = 128
MAX_FUNCTION_NAME = 256
"""Characters of a function's name, behind that of its namespace."""
MAX_MESSAGES, MAX_PARTS, MAX_CALLS = 2048, 1024, 128
MAX_BIASES = 4096
MAX_FIELDS, MAX_NAME = 512, 64
"""Largest numbers of an object's fields, known or not, and of reported characters of a name."""
MAX_TOKENS = 2**20
MAX_PROMPTS = 64
MAX_TEXTS = 2048
"""Texts of a request for embeddings, as many as OpenAI takes."""
TYPE_NAME = re.compile(r"str|int|float|bool|[a-z-]+\[.*\]|[A-Z]\w*")
"""Suffixes that pydantic appends to a field with several types."""
TOKEN_ID = re.compile(r"[0-9]{1,10}")
TEMPLATE_PARAMETERS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""Arguments of rendering a conversation besides template variables."""
LEAST_TEMPERATURE = 1e-5
"""Less is 0: clients write such numbers for it, and logits that are divided by them are no numbers."""
SEEDS = 2**62
"""Different seeds: what clients send, which has 64 bits and a sign, is taken modulo this."""

FIRST_ALONE = Field(fail_fast=True)
"""For lists: one wrong item is enough, and a million of them would take gigabytes to list."""


def _as_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class NotFinite(ValueError):
    """A number that JSON cannot hold."""


def json_value(text: str | bytes) -> Any:
    """The value of ``text`` as JSON with finite numbers: 1e400 would be written as ``Infinity`` again.

    Raises:
        ValueError: it is no JSON; :class:`NotFinite` for such a number.
        RecursionError: it is too deep.
    """
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise NotFinite(f"numbers must be finite, got {shortened(number)}; JSON has no other")
    return value


def shortened(name: str) -> str:
    """A client's name, shortened for replies and logs."""
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."


def _few(fields: Any) -> Any:
    """Not more fields than anybody has, before any of them is looked at."""
    if isinstance(fields, dict) and len(fields) > MAX_FIELDS:
        raise ValueError(f"at most {MAX_FIELDS} fields, got {len(fields)}; leave out what nobody reads")
    return fields


def _for_the_template(arguments: dict[str, Any]) -> dict[str, Any]:
    taken = TEMPLATE_PARAMETERS.intersection(arguments)
    if taken:
        raise ValueError(f"must leave {min(taken)} out, which is the server's to say")
    return arguments


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ValueError("properties must be an object, and required a list")
    if not all(isinstance(name, str) for name in required):
        raise ValueError("required must be a list of names")
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(_of_an_object)]
"""The schema of a function's arguments."""
TemplateArguments = Annotated[dict[str, Any], BeforeValidator(_few), AfterValidator(_for_the_template)]
"""Chat template variables of a client."""
Token = Annotated[int, Field(strict=True)]
Whole = Annotated[int, BeforeValidator(_as_whole), Field(strict=True)]
"""Also 4.0, which is the same number in JSON."""
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2)]


class Body(BaseModel):
    """A part of a request. null leaves a field out: clients send it for fields that they do not use."""

    model_config = ConfigDict(extra="allow")
    passes_extra_fields: ClassVar[bool] = False
    """Fields that are not named here are for the chat template."""
    _as_sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keeping_what_came(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        body = handler(fields)
        if isinstance(fields, dict):
            body._as_sent = fields
        return body

    @property
    def keep_seconds(self) -> float | None:
        """How long the model stays in memory after this request; None is what the server says."""
        return None

    @property
    def as_sent(self) -> dict[str, Any]:
        """The part as it came, in the order of its keys, which a chat template may show to the model."""
        return self._as_sent

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(_few(fields), dict):
            return fields
        return {
            name: value for name, value in fields.items() if value is not None or not cls._has_value(name)
        }

    @classmethod
    def _has_value(cls, name: str) -> bool:
        """Whether this is a field, with a value where it is left out."""
        named = (field for key, field in cls.model_fields.items() if name == (field.alias or key))
        field = next(named, None)
        return field is not None and not field.is_required() and field.default is not None

    def unread(self, place: str = "") -> dict[str, None]:
        """The fields that came and are not read, as a client writes them, each once: ``messages[].audio``."""
        extra_fields = {} if self.passes_extra_fields else self.model_extra or {}
        unread = {
            f"{place}{shortened(name)}": None for name, value in extra_fields.items() if value is not None
        }
        fields = self.__class__.model_fields
        for name in self.model_fields_set & fields.keys():
            value = getattr(self, name)
            named = fields[name].alias or name
            inner = f"{place}{named}[]." if isinstance(value, list) else f"{place}{named}."
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Body):
                    unread |= part.unread(inner)
        return unread


class StreamOptions(Body):
    """Additional content of a stream."""

    include_usage: StrictBool = False
    include_depths: StrictBool = False
    """Our own: ``medusa`` in each choice, the text in pieces with the depth of each."""


FormKind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class TextForm:
    """A form that a text must keep to."""

    kind: FormKind
    constraint: Any
    """The schema, the regular expression, the texts, or the grammar."""
    field: str
    """Where a client has written it."""


class JsonSchema(Body):
    """The required format of an answer. OpenAI's ``strict`` changes nothing here: schemas are always kept."""

    name: str = ""
    strict: StrictBool | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """The form of an answer, as OpenAI names it."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs json_schema: {'schema': {...}}")
        return self

    @property
    def text_form(self) -> TextForm | None:
        """None for text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return TextForm("json", self.json_schema.schema_, "response_format")
        return TextForm("json", {"type": "object"}, "response_format") if self.type == "json_object" else None


class StructuredOutputs(Body):
    """The form of an answer, as vLLM names it: one of these."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    json_object: StrictBool | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), FIRST_ALONE] | None = (
        None
    )
    grammar: Annotated[str, Field(min_length=1)] | None = None

    @property
    def _forms(self) -> list[TextForm]:
        is_object = {"type": "object"} if self.json_object else None
        named: list[tuple[FormKind, Any]] = [("json", self.json_), ("json", is_object)]
        named += [("regex", self.regex), ("choice", self.choice), ("grammar", self.grammar)]
        return [
            TextForm(kind, constraint, "structured_outputs")
            for kind, constraint in named
            if constraint is not None
        ]

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(self._forms) != 1:
            raise ValueError("must have one of json, json_object, regex, choice and grammar")
        return self

    @property
    def text_form(self) -> TextForm:
        return self._forms[0]


class TextPart(Body):
    """A part of a message."""

    kinds: ClassVar[tuple[str, ...]] = ("text",)

    type: str
    text: str

    @field_validator("type")
    @classmethod
    def _is_text(cls, kind: str) -> str:
        if kind not in cls.kinds:
            known = " or ".join(map(repr, cls.kinds))
            raise ValueError(f"must be {known}: this server reads nothing but text, got {kind[:40]!r}")
        return kind


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS), FIRST_ALONE]


def text_of(content: str | Sequence[TextPart] | None) -> str:
    """All parts together."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class Prediction(Body):
    """The answer that a client expects (OpenAI's predicted outputs): drafts are copied from it."""

    type: Literal["content"]
    content: Content


class SharedFields(Body):
    """The fields that all endpoints read which answer."""

    prompt_name: ClassVar[str] = "prompt"
    """What a client calls the text to go on with."""
    suffix_name: ClassVar[str] = "suffix"
    """What a client calls the text behind a gap."""

    model: str | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], FIRST_ALONE] | None = None
    """An empty string is none, as in llama.cpp."""
    ignore_eos: StrictBool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = None
    medusa_plain: StrictBool = False
    """Ours: decode this request without guessing, for comparison."""

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_token_ids(cls, logit_bias: Any) -> Any:
        keys = logit_bias if isinstance(logit_bias, dict) else ()
        if len(keys) > MAX_BIASES:
            raise ValueError(f"at most {MAX_BIASES} tokens, got {len(keys)}")
        for key in keys:
            if not TOKEN_ID.fullmatch(key):
                raise ValueError(f"keys must be token ids, got {key[:20]!r}")
        return logit_bias

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: str | list[str] | None) -> list[str]:
        stops = [text for text in ([stop] if isinstance(stop, str) else stop or []) if text]
        if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in stops):
            raise ValueError(
                f"at most {MAX_STOPS} strings of up to {MAX_STOP_LENGTH} characters, got {len(stops)} strings"
            )
        return stops

    @property
    def asked(self) -> ChatRequest | CompletionRequest:
        """The chat or the completion that this asks for."""
        raise NotImplementedError

    def told_at_once(self, model_name: str) -> dict[str, Any] | None:
        """The reply to a request that wants no answer of the model; None for all others."""
        return None

    @classmethod
    def own_name(cls, field: str) -> str:
        """What a client calls this field of :attr:`asked`."""
        return field

    @classmethod
    def own_error(cls, error: Any) -> Any:
        """``error``, with the names that fields have here."""
        return error

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def longest(self) -> int | None:
        """Tokens of an answer at most, if the client says."""
        return self.max_tokens

    @property
    def num_answers(self) -> int:
        return self.n

    @property
    def text_form(self) -> TextForm | None:
        """The structured output of an answer; None for text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.text_form
        return None if self.response_format is None else self.response_format.text_form

    @property
    def is_formed(self) -> bool:
        """Whether answers must keep to a grammar."""
        return self.text_form is not None

    @property
    def stops(self) -> list[str]:
        return self.stop if isinstance(self.stop, list) else []

    def refused(self) -> tuple[str, str] | None:
        """A field that is given and cannot be honoured, and why; None when there is none."""
        if self.structured_outputs is not None and self.response_format is not None:
            return (
                "structured_outputs",
                "structured_outputs and response_format both say a form; leave one out",
            )
        if self.ignore_eos and self.is_formed:
            return "ignore_eos", "ignore_eos continues after the end of the structured output; leave it out"
        return None


class CalledFunction(Body):
    """The function of a call that the model has made before."""

    name: str
    arguments: str
    """JSON, unless a length limit cut it or the model wrote something else."""


class GivenCall(Body):
    """A call that the model has made before."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Body):
    """One message of a conversation."""

    passes_extra_fields = True

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[GivenCall], Field(max_length=MAX_CALLS), FIRST_ALONE] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as newer clients write it."""

    @property
    def beside(self) -> list[str]:
        """The fields that only a chat template may read."""
        return [name for name, value in (self.model_extra or {}).items() if value is not None]

    @property
    def needs_tools(self) -> bool:
        """Whether only a chat template that knows tools can render it."""
        return self.role == "tool" or bool(self.tool_calls)

    @property
    def as_conversation(self) -> dict[str, Any]:
        """In the form of :mod:`medusa.conversations`, with fields in the order in which they came; arguments
        of calls are text."""
        message: dict[str, Any] = {}
        for name, value in self.as_sent.items():
            if name == "role":
                message["role"] = "system" if self.role == "developer" else self.role
            elif name == "content":
                message["content"] = text_of(self.content)
            elif name in ("reasoning_content", "reasoning"):
                thought = self.reasoning_content or self.reasoning
                if thought is not None:
                    message["reasoning_content"] = thought
            elif name == "tool_calls":
                if value:
                    message["tool_calls"] = [written_call(call) for call in value]
            elif value is not None:
                message[name] = value
        return {**message, "content": message.get("content", "")}


class OfferedFunction(Body):
    """The tools that the model may call."""

    passes_extra_fields = True

    name: Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME)]
    parameters: Parameters | None = None


class Tool(Body):
    """A tool that the model may call."""

    passes_extra_fields = True

    type: Literal["function"]
    function: OfferedFunction


class FunctionName(Body):
    """Names one of the tools."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class Rendering(Body):
    """The chat template options."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FIRST_ALONE] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    """Go on with the last message, where the model has begun it."""
    reasoning_effort: Annotated[str, Field(max_length=40)] | None = None
    enable_thinking: StrictBool | None = None
    chat_template_kwargs: TemplateArguments | None = None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """By the names in templates and in ``apply_chat_template``."""
        begins = self.add_generation_prompt and not self.continue_final_message
        arguments: dict[str, Any] = {"add_generation_prompt": begins}
        if self.continue_final_message:
            arguments["continue_final_message"] = True
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
            if self.reasoning_effort == "none":
                arguments["enable_thinking"] = False
        if self.enable_thinking is not None:
            arguments["enable_thinking"] = self.enable_thinking
        return arguments | (self.chat_template_kwargs or {})


class ChatRequest(SharedFields, Rendering):
    """``POST /v1/chat/completions``."""

    prompt_name = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ALONE]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None

    @model_validator(mode="after")
    def _logprobs_go_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def asked(self) -> ChatRequest:
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools for the chat template."""
        if self.tool_choice == "none":
            return []
        return [tool.as_sent for tool in self.tools or []]

    @property
    def may_call(self) -> list[dict[str, Any]]:
        """The tools of which the answer may be a call."""
        return self.offered

    @property
    def must_call(self) -> list[dict[str, Any]]:
        """The candidates of a required call; empty where the model may answer without a call."""
        functions = [tool["function"] for tool in self.offered]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function["name"] == self.tool_choice.function.name]
        return functions if self.tool_choice == "required" else []

    @property
    def is_formed(self) -> bool:
        return super().is_formed or bool(self.must_call)

    def refused(self) -> tuple[str, str] | None:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            return "continue_final_message", "continue_final_message needs a last message of the assistant"
        if self.tool_choice not in (None, "none", "auto") and not self.must_call:
            return "tool_choice", "tool_choice must name one of tools, or tools must be given"
        return super().refused()


class CompletionRequest(SharedFields):
    """``POST /v1/completions``."""

    suffix: str | None = None
    """The text after the answer, which then fills the gap; empty where the text ends there."""
    prompt: (
        str
        | Annotated[list[Token], FIRST_ALONE]
        | Annotated[list[str], FIRST_ALONE]
        | Annotated[list[Annotated[list[Token], FIRST_ALONE]], FIRST_ALONE]
    )
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[Whole, Field(ge=0)] | None = 16
    """With 0 the prompt is read alone, for the next request, as in OpenAI's completions."""
    echo: StrictBool = False
    best_of: Whole | None = None

    @field_validator("prompt")
    @classmethod
    def _few_and_not_empty(cls, prompt: Any, fields: ValidationInfo) -> Any:
        if prompt and len(_prompts_of(prompt)) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} texts, got {len(prompt)}; send them in several requests")
        if prompt == [] or not (fields.data.get("suffix") or all(_prompts_of(prompt))):
            raise ValueError("must not be empty")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each gets ``n`` answers."""
        return _prompts_of(self.prompt)

    @property
    def num_answers(self) -> int:
        return self.n * len(self.prompts)

    @property
    def asked(self) -> CompletionRequest:
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def refused(self) -> tuple[str, str] | None:
        if self.best_of and self.best_of != self.n:
            return "best_of", "this server has no best_of; leave it out"
        if self.echo and self.logprobs is not None:
            return "echo", "a prompt is given back without log-probabilities; leave echo or logprobs out"
        return super().refused()


class InfillRequest(CompletionRequest):
    """``POST /v1/fim/completions``, as Mistral has it: the text of a gap, in the form of a chat's answer."""

    prompt: str
    suffix: str = ""
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    logprobs: None = None
    echo: Literal[False] = False


class OtherText(Body):
    """A text that the model is shown before the one with the gap."""

    text: str
    filename: str = "tmp"


class LlamaInfillRequest(InfillRequest):
    """``POST /infill``, with llama.cpp's names, values where a field is left out, and form of the answer."""

    prompt_name = "input_prefix"
    suffix_name = "input_suffix"

    suffix: Annotated[str, Field(alias="input_suffix")]
    prompt: Annotated[str, Field(alias="input_prefix")]
    begun: Annotated[str, Field(alias="prompt")] = ""
    """What the gap begins with."""
    others: Annotated[
        list[OtherText], Field(alias="input_extra", default_factory=list, max_length=MAX_PARTS), FIRST_ALONE
    ]
    max_tokens: Annotated[Whole, Field(alias="n_predict", ge=-1)] = -1
    """-1 is as many as the server allows."""
    n: Literal[1] = 1
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] = 0.8
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] = 40
    top_p: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.95
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.05
    repetition_penalty: Annotated[float, Field(alias="repeat_penalty", strict=True, gt=0, le=10)] = 1.0

    @field_validator("seed")
    @classmethod
    def _any_seed(cls, seed: int | None) -> int | None:
        return None if seed == -1 else seed

    @property
    def longest(self) -> int | None:
        return None if self.max_tokens < 0 else self.max_tokens


class TokenizeRequest(Rendering):
    """``POST /tokenize``: of a text, or of a conversation as it would be rendered."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool = False
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ALONE] | None
    ) = None

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must have either prompt or messages")
        return self

    @property
    def chat(self) -> ChatRequest:
        """The conversation, as it would be answered."""
        names = {"messages", *Rendering.model_fields}
        return ChatRequest.model_validate(
            {name: self.as_sent[name] for name in self.as_sent if name in names}
        )


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS), FIRST_ALONE]


class EmbeddingRequest(Body):
    """Texts to embed."""

    model: str | None = None
    dimensions: Annotated[Whole, Field(ge=1)] | None = None
    """The first numbers of each vector alone, at its length again: for models that are trained for it."""

    input: Any

    @property
    def is_cut(self) -> bool:
        """Whether a text that is too long is cut; else it is refused."""
        return False

    @property
    def texts(self) -> list[str | list[int]]:
        """Each text, or its tokens."""
        return _prompts_of(self.input)

    def reply(self, name: str, vectors: Sequence[Tensor], num_tokens: int, seconds: float) -> dict[str, Any]:
        """The body of the reply for ``vectors``, (D,) float32 each, by the model called ``name``."""
        raise NotImplementedError


class EmbeddingsRequest(EmbeddingRequest):
    """``POST /v1/embeddings``."""

    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS), FIRST_ALONE]
        | Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS), FIRST_ALONE]
        | Annotated[list[list[Token]], Field(min_length=1, max_length=MAX_TEXTS), FIRST_ALONE]
    )
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None

    def reply(self, name: str, vectors: Sequence[Tensor], num_tokens: int, seconds: float) -> dict[str, Any]:
        is_base64 = self.encoding_format == "base64"
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _as_base64(vector) if is_base64 else vector.tolist(),
                }
                for index, vector in enumerate(vectors)
            ],
            "model": name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def _as_base64(vector: Tensor) -> str:
    """The numbers of ``vector``, four bytes each, the lowest first, as OpenAI's client asks for them."""
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def _prompts_of(prompt: Any) -> list[str | list[int]]:
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def sampling_arguments(request: SharedFields, defaults: SamplingAdvice) -> dict[str, Any]:
    """For ``MedusaModel.request``: the arguments of ``generate``; ``defaults`` are the options that a request
    leaves out, and all of them are said."""
    wanted = SamplingAdvice(
        **{field.name: getattr(request, field.name) for field in fields(SamplingAdvice)}
    ).over(defaults)
    temperature = wanted.temperature or 0.0
    if temperature < LEAST_TEMPERATURE:
        temperature = 0.0
    arguments: dict[str, Any] = {"do_sample": temperature > 0}
    arguments["repetition_penalty"] = wanted.repetition_penalty
    if temperature > 0:
        arguments |= {"temperature": temperature, "top_k": max(0, wanted.top_k or 0)}
        arguments |= {"top_p": wanted.top_p, "min_p": wanted.min_p or None}
    if request.logit_bias:
        arguments["sequence_bias"] = [[[int(key)], float(bias)] for key, bias in request.logit_bias.items()]
    return arguments


def field_of(location: tuple[Any, ...]) -> str:
    """The field that a validation error is about, as a client writes it: ``messages[0].content``."""
    parts = [part for part in location if not (isinstance(part, str) and TYPE_NAME.fullmatch(part))]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" for part in parts)
    return text.removeprefix(".")


def most_specific_error(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The most specific error: for a field with several types, the error of the type that fits best."""

    def depth(error: Mapping[str, Any]) -> tuple[int, list[int]]:
        return len(error["loc"]), [part for part in error["loc"] if isinstance(part, int)]

    return max(errors, key=depth)


def message_of(error: Mapping[str, Any]) -> str:
    """The error of the field, without pydantic's own prefix."""
    return str(error["msg"]).removeprefix("Value error, ")
