"""The fields of all requests for an answer: its sampling, its length, its form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    StrictBool,
    field_validator,
    model_validator,
)

from medusa.base.sampling_advice import SamplingAdvice
from medusa.serving.body import FIRST_ALONE, Body, Whole

MAX_PARTS = 1024
MAX_STOPS, MAX_STOP_LENGTH = 16, 512


MAX_CHOICES = 16


MAX_BIASES = 4096


TOKEN_ID = re.compile(r"[0-9]{1,10}")


LEAST_TEMPERATURE = 1e-5
"""Less is 0: clients write such numbers for it, and logits that are divided by them are no numbers."""


SEEDS = 2**62
"""Different seeds: what clients send, which has 64 bits and a sign, is taken modulo this."""


Penalty = Annotated[float, Field(strict=True, ge=-2, le=2)]


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
    def asked(self) -> SharedFields:
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
    def may_call(self) -> list[dict[str, Any]]:
        """The tools of which the answer may be a call."""
        return []

    @property
    def must_call(self) -> list[dict[str, Any]]:
        """The candidates of a required call; empty where the model may answer without a call."""
        return []

    @property
    def is_formed(self) -> bool:
        """Whether answers must keep to a grammar."""
        return self.text_form is not None or bool(self.must_call)

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
