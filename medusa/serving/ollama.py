"""Ollama's endpoints, ``/api/chat`` and ``/api/generate``, and what its clients ask about a model first.

Facts about the protocol are those of ``docs/api.md`` and ``api/types.go`` of Ollama, and of what its own
client for Python, `ollama` 0.6.3, sends and reads. Streams are lines of JSON.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool
from torch import Tensor

from medusa.serving.body import FIRST_ALONE, Body, Whole, json_value, shortened
from medusa.serving.chat_requests import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS, ChatRequest, Tool
from medusa.serving.completion_requests import CompletionRequest, InfillRequest
from medusa.serving.dialects import BlockReplies, Conversation, Dialect, ReplyContext
from medusa.serving.embedding_requests import MAX_TEXTS, EmbeddingRequest
from medusa.serving.json_repair import repaired
from medusa.serving.model_pool import ServedModel
from medusa.serving.replies import RequestError
from medusa.serving.shared_fields import Penalty
from medusa.serving.worker import Update

OLLAMA_VERSION = "0.12.0"
"""Of Ollama, whose protocol this is: clients such as Copilot ask for 0.6.4 or newer."""


SECONDS_OF = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Units of a duration, as Go writes it."""
DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?)(ns|us|µs|ms|s|m|h)")
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def _no_images(images: Any) -> None:
    if images:
        raise ValueError("this server reads nothing but text; leave images out")


NoImages = Annotated[None, BeforeValidator(_no_images)]


def _keep_seconds(keep_alive: Any) -> float | None:
    """Seconds that the model stays after a request; infinite for a negative time, as in Ollama."""
    if keep_alive is None or keep_alive == "":
        return None
    text = str(keep_alive)
    sign = text.startswith("-")
    parts = DURATION_PART.findall(text.lstrip("-"))
    if NUMBER.fullmatch(text):
        seconds = abs(float(text))
    elif parts and "".join(map("".join, parts)) == text.lstrip("-"):
        seconds = sum(float(number) * SECONDS_OF[unit] for number, unit in parts)
    else:
        raise ValueError(
            f"must be seconds, or a time such as 5m or 1h30m, got {shortened(text)!r}; negative is for ever"
        )
    return math.inf if sign and seconds else seconds


KeepAlive = Annotated[float | None, BeforeValidator(_keep_seconds)]
"""How long the model stays after a request, in seconds."""


class StayingFields(Body):
    """The fields of a request that says how long its model stays in memory."""

    keep_alive: KeepAlive = None

    @property
    def keep_seconds(self) -> float | None:
        return self.keep_alive


class CalledFunction(Body):
    """The function of a call that the model has made before."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Whole | None = None
    """The number of the call, which its place says too."""


class GivenCall(Body):
    """A call that the model has made before."""

    id: str | None = None
    function: CalledFunction


class OllamaMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: NoImages = None
    tool_calls: Annotated[list[GivenCall], Field(max_length=MAX_CALLS), FIRST_ALONE] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(Body):
    """Sampling options; those of the machine, such as ``num_ctx``, are the server's own to say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    num_predict: Whole | None = None
    """Less than 1 is as many as the server allows."""
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None

    @property
    def for_chat(self) -> dict[str, Any]:
        fields = self.model_dump(include={*OllamaOptions.model_fields}, exclude_none=True)
        longest = fields.pop("num_predict", 0)
        names = {"repeat_penalty": "repetition_penalty"}
        renamed = {names.get(name, name): value for name, value in fields.items()}
        return renamed | ({"max_tokens": longest} if longest > 0 else {})


class OllamaRequest(StayingFields, Dialect):
    """The fields that both endpoints read."""

    names_of: ClassVar[dict[str, str]] = {
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        "response_format": "format",
        "enable_thinking": "think",
        "reasoning_effort": "think",
    }

    stream: StrictBool = True
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: StrictBool | Literal["low", "medium", "high"] | None = None

    @property
    def says_nothing(self) -> bool:
        """Whether the client only wants the model to be loaded, or put down."""
        raise NotImplementedError

    def _chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"stream": self.stream}
        if self.options is not None:
            fields |= self.options.for_chat
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        if self.think is not None:
            fields["enable_thinking"] = self.think is not False
            fields["reasoning_effort"] = None if self.think in (True, False) else self.think
        return fields

    def told_at_once(self, model_name: str) -> dict[str, Any] | None:
        if not self.says_nothing:
            return None
        reason = "unload" if self.keep_alive == 0 else "load"
        return {**_head(model_name), **self.answer_of({}), "done": True, "done_reason": reason}

    def answer_of(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a reply for what the model says."""
        raise NotImplementedError

    def replies(self, context: ReplyContext) -> OllamaReplies:
        return OllamaReplies(self, context)


class OllamaChatRequest(OllamaRequest):
    """``POST /api/chat``."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES), FIRST_ALONE] = Field(
        default_factory=list
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FIRST_ALONE] | None = None

    @property
    def says_nothing(self) -> bool:
        return not self.messages

    def _chat_fields(self) -> dict[str, Any]:
        messages = self._messages() or [{"role": "user", "content": ""}]
        fields = super()._chat_fields() | {"messages": messages}
        if self.tools:
            fields["tools"] = [tool.as_sent for tool in self.tools]
        return fields

    def _messages(self) -> list[dict[str, Any]]:
        conversation = Conversation()
        identities = list[str]()
        for message in self.messages:
            if message.role == "tool":  # names its call, or is that of the next one
                next_call = identities.pop(0) if identities else ""
                conversation.result(message.tool_call_id or next_call, message.content, message.tool_name)
                continue
            conversation.think(message.thinking or "")
            conversation.say(message.role, message.content)
            identities = [] if message.role == "assistant" else identities
            for number, call in enumerate(message.tool_calls or ()):
                identities.append(call.id or f"call_{len(conversation.messages)}_{number}")
                arguments = json.dumps(call.function.arguments, ensure_ascii=False)
                conversation.call(identities[-1], call.function.name, arguments)
        return conversation.messages

    def answer_of(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "", **message}}


class OllamaGenerateRequest(OllamaRequest):
    """``POST /api/generate``: a question to the model, the text between two others, or, ``raw``, text to go
    on with."""

    names_of: ClassVar[dict[str, str]] = {**OllamaRequest.names_of, "messages": "prompt"}

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: StrictBool = False
    images: NoImages = None

    @property
    def says_nothing(self) -> bool:
        return not (self.prompt or self.suffix)

    @functools.cached_property
    def _asked(self) -> ChatRequest | CompletionRequest:
        if not self.suffix and not self.raw:
            return self.chat
        fields = self._shared_fields() | super()._chat_fields() | {"prompt": self.prompt}
        for name in ("enable_thinking", "reasoning_effort"):
            fields.pop(name, None)
        fields.setdefault("max_tokens", None)
        if self.suffix:
            return InfillRequest.model_validate({**fields, "suffix": self.suffix})
        return CompletionRequest.model_validate(fields)

    @property
    def asked(self) -> ChatRequest | CompletionRequest:
        return self._asked

    def _chat_fields(self) -> dict[str, Any]:
        conversation = Conversation()
        if self.system:
            conversation.say("system", self.system)
        conversation.say("user", self.prompt)
        return super()._chat_fields() | {"messages": conversation.messages}

    def answer_of(self, message: Mapping[str, Any]) -> dict[str, Any]:
        thought = {name: text for name, text in message.items() if name == "thinking"}
        return {"response": message.get("content", ""), **thought}


class EmbedRequest(StayingFields, EmbeddingRequest):
    """``POST /api/embed``."""

    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS), FIRST_ALONE]
    truncate: StrictBool = True
    options: OllamaOptions | None = None

    @property
    def is_cut(self) -> bool:
        return self.truncate

    def reply(self, name: str, vectors: Sequence[Tensor], num_tokens: int, seconds: float) -> dict[str, Any]:
        return {
            "model": name,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": round(seconds * 1e9),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }


class OldEmbedRequest(EmbedRequest):
    """``POST /api/embeddings``, the older form: one text."""

    input: str = Field(alias="prompt")

    def reply(self, name: str, vectors: Sequence[Tensor], num_tokens: int, seconds: float) -> dict[str, Any]:
        return {"embedding": vectors[0].tolist()}


class OllamaReplies(BlockReplies):
    """One answer under way: its text and reasoning come as they are written, calls when they are whole."""

    is_lines = True

    def __init__(self, request: OllamaRequest, context: ReplyContext):
        super().__init__(context.reader)
        self._request = request
        self._model_name = context.model_name
        self._began = time.monotonic_ns()
        self._first = 0  # when the first text came
        self._message: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._arguments = ""
        self._name = ""

    def whole(self, updates: Sequence[Sequence[Update]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply that is not streamed; all of its time counts as writing."""
        self._first = self._began
        return super().whole(updates, usage)

    def start(self, num_answers: int) -> list[Any]:
        """Nothing: a stream begins with text."""
        return []

    def end(self, usage: dict[str, Any]) -> list[Any]:
        """The last line of a stream."""
        events = self._close()
        now = time.monotonic_ns()
        first = self._first or now
        self._last = {
            "done": True,
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": first - self._began,
            "eval_count": usage["completion_tokens"],
            "eval_duration": now - first,
        }
        return [*events, {**_head(self._model_name), **self._request.answer_of({}), **self._last}]

    def failed(self, error: RequestError) -> list[Any]:
        """The last line of a stream that cannot go on."""
        return [{"error": str(error)}]

    def _whole(self) -> dict[str, Any]:
        return {**_head(self._model_name), **self._request.answer_of(self._message), **self._last}

    def _opened(self, kind: str, name: str) -> list[Any]:
        self._first = self._first or time.monotonic_ns()
        self._kind = kind
        self._name = name
        self._arguments = ""
        return []

    def _add(self, text: str) -> list[Any]:
        if self._kind == "call":
            self._arguments += text
            return []
        field = "thinking" if self._kind == "reasoning" else "content"
        self._message[field] = self._message.get(field, "") + text
        return [self._line({field: text})]

    def _closed(self, status: str) -> list[Any]:
        if self._kind != "call":
            return []
        calls = self._message.setdefault("tool_calls", [])
        function = {"index": len(calls), "name": self._name}
        call = {"function": {**function, "arguments": json_value(repaired(self._arguments or "{}"))}}
        calls.append(call)
        return [self._line({"tool_calls": [call]})]

    def _line(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {**_head(self._model_name), **self._request.answer_of(message), "done": False}


def _head(model_name: str) -> dict[str, Any]:
    return {"model": model_name, "created_at": now()}


def now() -> str:
    """This moment, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class ShowRequest(Body):
    """``POST /api/show``."""

    model: str | None = None
    name: str | None = None
    """The same, as older clients write it."""
    verbose: StrictBool | None = None


def ollama_card(model: ServedModel, name: str) -> dict[str, Any]:
    """The model as ``GET /api/tags`` lists it under a name."""
    path = Path(model.path)
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return {
        "name": name,
        "model": name,
        "modified_at": model.began_at,
        "size": sum(file.stat().st_size for file in files) if model.path else 0,
        "digest": hashlib.sha256(model.names[0].encode()).hexdigest(),
        "details": _details(model),
    }


def loaded_card(model: ServedModel) -> dict[str, Any]:
    """The model, which is in memory, as ``GET /api/ps`` lists it: the memory that is planned for it, where
    that is known, and when it is put down."""
    card = ollama_card(model, model.names[0])
    return {
        **card,
        "size": model.num_bytes or card["size"],
        "size_vram": 0,
        "context_length": model.context,
        "expires_at": model.expires_at.isoformat().replace("+00:00", "Z"),
    }


def ollama_facts(model: ServedModel) -> dict[str, Any]:
    """What ``POST /api/show`` tells about the model, by which clients know what they may ask of it. It need
    not be loaded: clients ask this of all models."""
    tokenized = model.tokenized()
    return {
        "modified_at": model.began_at,
        "details": _details(model),
        "model_info": {
            "general.architecture": model.family,
            "general.basename": model.names[0],
            f"{model.family}.context_length": model.context,
        },
        "capabilities": tokenized.capabilities,
        "template": str(tokenized.tokenizer.chat_template or ""),
        "parameters": "\n".join(f"{name} {value}" for name, value in tokenized.sampling.told.items()),
        "modelfile": "",
        "license": "",
    }


def _details(model: ServedModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf" if model.path.endswith(".gguf") else "safetensors",
        "family": model.family,
        "families": [model.family],
        "parameter_size": "",
        "quantization_level": "",
    }
