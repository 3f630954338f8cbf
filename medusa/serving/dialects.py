"""Dialects: other protocols in which a client may say a chat, and what they share.

A dialect's request is the same as a :class:`medusa.serving.chat_requests.ChatRequest`, and its reply is
written from the same parts: :class:`Conversation` makes messages of what comes block by block,
:class:`BlockReplies` makes blocks of what the model writes.
"""

from __future__ import annotations

import abc
import functools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from medusa.base.sampling_advice import SamplingAdvice
from medusa.serving.chat_requests import ChatRequest
from medusa.serving.completion_requests import CompletionRequest
from medusa.serving.output_parser import OutputParser, Part
from medusa.serving.replies import RequestError, StreamedReplies, read
from medusa.serving.shared_fields import SharedFields
from medusa.serving.worker import Update


@dataclass(frozen=True)
class ReplyContext:
    """What a reply tells beside the answer itself."""

    model_name: str
    tokenizer: Any
    """Counts the tokens of reasoning."""
    reader: OutputParser
    """Reads the answer."""
    num_prompt: int = 0
    """Tokens of the prompt."""
    sampling: SamplingAdvice = SamplingAdvice()
    """Options of requests that leave them out."""


class Dialect(SharedFields):
    """A chat in the words of another protocol."""

    names_of: ClassVar[Mapping[str, str]] = {}
    """Fields of a chat that have other names here."""

    n: Literal[1] = 1

    @functools.cached_property
    def chat(self) -> ChatRequest:
        """The same as a chat."""
        return self._chat_type.model_validate(self._shared_fields() | self._chat_fields())

    @property
    def _chat_type(self) -> type[ChatRequest]:
        return ChatRequest

    @property
    def asked(self) -> ChatRequest | CompletionRequest:
        return self.chat

    def _shared_fields(self) -> dict[str, Any]:
        """The fields that came and are the same in a chat."""
        shared = {*SharedFields.model_fields} - {"n", "response_format"}
        fields = self.model_dump(include=shared, exclude_unset=True, by_alias=True)
        aliases = {self.__class__.model_fields[name].alias or name: name for name in shared}
        return {aliases[name]: value for name, value in fields.items()}

    def _chat_fields(self) -> dict[str, Any]:
        """The other fields of the chat."""
        raise NotImplementedError

    def replies(self, context: ReplyContext) -> BlockReplies:
        """The writer of the reply."""
        raise NotImplementedError

    @classmethod
    def own_name(cls, field: str) -> str:
        """The name that a field of a chat has here."""
        return cls.names_of.get(field, field)

    @classmethod
    def own_error(cls, error: RequestError) -> RequestError:
        """The error of a chat field, with the name of that field in this protocol."""
        text = str(error)
        for name, own in cls.names_of.items():
            text = text.replace(name, own)
        return RequestError(
            text,
            error.status,
            error.param and cls.own_name(error.param),
            error.code,
            error.retry_after,
            error.excess,
        )


class Conversation:
    """The messages of a chat, from blocks that come one by one.

    What the model wrote in one turn, its reasoning, its text and its calls, is one message, as the chat
    template showed it when it was written.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thought: str | None = None
        self._names = dict[str, str]()

    def say(self, role: str | None, text: str) -> None:
        """A message."""
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant":
            message["reasoning_content"] = self._thought
        self._thought = None
        self.messages.append(message)

    def think(self, text: str) -> None:
        """Reasoning before what the assistant says or calls next."""
        self._thought = text or None

    def call(self, identity: str, name: str, arguments: str) -> None:
        """A call that the model has made; ``arguments`` are JSON."""
        self._names[identity] = name
        is_same_turn = self.messages and self.messages[-1]["role"] == "assistant"
        if self._thought is not None or not is_same_turn:
            self.say("assistant", "")
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": identity, "function": {"name": name, "arguments": arguments}})

    def result(self, identity: str, text: str, name: str | None = None) -> None:
        """What came of a call, of the function ``name`` where a client says it."""
        name = name or self._names.get(identity)
        self.messages.append({"role": "tool", "content": text, "tool_call_id": identity, "name": name})


def new_identity(kind: str, num_letters: int = 32) -> str:
    """An identity that nothing else has."""
    return f"{kind}_{uuid.uuid4().hex[:num_letters]}"


class BlockReplies(StreamedReplies, abc.ABC):
    """One answer under way as blocks, each of reasoning, of text, or of a call; and the events that tell of
    them. A block is closed before the next one is opened.

    Args:
        reader: reads the answer.
    """

    def __init__(self, reader: OutputParser):
        self._reader = reader
        self._open_kind: str | None = None
        """Of the last block, while it is open."""
        self._reason: str | None = None
        self._stop_string: str | None = None

    def whole(self, updates: Sequence[Sequence[Update]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        for update in updates[0]:
            self.part(0, update)
        self.end(usage)
        return self._whole()

    def part(self, index: int, update: Update) -> list[Any]:
        """The events of an update."""
        parts, self._reason = read(self._reader, update)
        self._stop_string = update.stop_string
        return [event for part in parts for event in self._took(part)]

    def _took(self, part: Part) -> list[Any]:
        kind = "call" if part.kind == "arguments" else part.kind
        events: list[Any] = []
        if part.kind == "call" or self._open_kind != kind:
            events = [*self._close(), *self._open(kind, part.text)]
        return events if part.kind == "call" else [*events, *self._add(part.text)]

    def _close(self, status: str = "completed") -> list[Any]:
        """The last block, if it is open, is whole, or will not be."""
        if self._open_kind is None:
            return []
        self._open_kind = None
        return self._closed(status)

    def _open(self, kind: str, name: str) -> list[Any]:
        self._open_kind = kind
        return self._opened(kind, name)

    @abc.abstractmethod
    def _whole(self) -> dict[str, Any]:
        """The body of the reply as far as it has come."""

    @abc.abstractmethod
    def _opened(self, kind: str, name: str) -> list[Any]:
        """The events of a block that begins; ``name`` is that of a call."""

    @abc.abstractmethod
    def _add(self, text: str) -> list[Any]:
        """The events of more text for the last block."""

    @abc.abstractmethod
    def _closed(self, status: str) -> list[Any]:
        """The events of the last block's end."""
