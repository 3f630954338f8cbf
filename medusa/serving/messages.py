"""Anthropic's endpoint, ``POST /v1/messages``: a request is a chat in other words, and so is its answer.

Facts about the protocol are those of Anthropic's reference of November 2026 and of what its own clients,
`anthropic` 2.14 for Python and Claude Code 2.1, send and read.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from medusa.serving.body import FIRST_ALONE, Body, json_value, shortened
from medusa.serving.chat_requests import MAX_FUNCTION_NAME, MAX_MESSAGES, MAX_TOOLS, Parameters
from medusa.serving.dialects import BlockReplies, Conversation, Dialect, ReplyContext, new_identity
from medusa.serving.json_repair import repaired
from medusa.serving.replies import RequestError, anthropic_error
from medusa.serving.shared_fields import MAX_PARTS, TextPart

BILLING = "x-anthropic-billing-header:"
"""Begins a system block of Claude Code that is for Anthropic's accounting. It differs from one conversation
to the next, and stands before all else, so that nothing behind it could be read once for all of them."""
BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""Kinds of blocks that are read, by the role."""
NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""The fields that a block must have."""
STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


def _as_blocks(content: Any) -> Any:
    """Text alone is one block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


AS_BLOCKS = BeforeValidator(_as_blocks)
TextBlocks = Annotated[
    list[TextPart], Field(default_factory=list, max_length=MAX_PARTS), FIRST_ALONE, AS_BLOCKS
]


class InputBlock(Body):
    """A part of a message: text, reasoning, a call that the model has made, what came of it."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: TextBlocks
    is_error: StrictBool | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> InputBlock:
        if self.type not in NEEDED:
            known = ", ".join(map(repr, NEEDED))
            raise ValueError(
                f"the type of a block must be one of {known}: this server reads nothing but text, got "
                f"{shortened(self.type)!r}; leave it out"
            )
        for name in NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"a block of type {self.type!r} needs {name}")
        return self


class InputMessage(Body):
    """A message of a conversation. Claude Code sends further system messages among them."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[InputBlock], Field(max_length=MAX_PARTS), FIRST_ALONE, AS_BLOCKS]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> InputMessage:
        for block in self.content:
            if block.type not in BLOCKS[self.role]:
                raise ValueError(f"a message of the {self.role} has no blocks of type {block.type!r}")
        return self


class OfferedTool(Body):
    """A function that the model may call, or a tool of Anthropic's own, which has a type and no schema."""

    type: str = "custom"
    name: Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME)]
    description: str | None = None
    input_schema: Parameters | None = None
    strict: StrictBool | None = None

    @property
    def is_known(self) -> bool:
        """Whether it can be shown to the model; of others only Anthropic's models know what they take."""
        return self.input_schema is not None

    @property
    def function(self) -> dict[str, Any]:
        names = {"name": "name", "description": "description", "input_schema": "parameters"}
        return {names[key]: value for key, value in self.as_sent.items() if key in names}


class ToolChoice(Body):
    """Whether the model calls, and which tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None

    @property
    def for_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    """Whether the model reasons first."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """How much is thought, and the form of the text."""

    effort: Annotated[str, Field(max_length=40)] | None = None
    format: OutputFormat | None = None


class MessagesRequest(Dialect):
    """``POST /v1/messages``, and ``/v1/messages/count_tokens``, where ``max_tokens`` is left out."""

    names_of: ClassVar[dict[str, str]] = {
        "reasoning_effort": "output_config.effort",
        "enable_thinking": "thinking.type",
        "response_format": "output_config.format",
    }

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ALONE]
    system: TextBlocks
    stop: Annotated[list[str] | None, Field(alias="stop_sequences"), FIRST_ALONE] = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS), FIRST_ALONE] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def unread(self, place: str = "") -> dict[str, None]:
        unread = super().unread(place)
        unread |= {f"tools[{shortened(tool.type)}]": None for tool in self.tools or () if not tool.is_known}
        if len(self._system_texts) < len(self.system):
            unread[f"system[{BILLING.rstrip(':')}]"] = None
        return unread

    def _chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"messages": self._messages()}
        is_begun = fields["messages"][-1]["role"] == "assistant" and self.messages[-1].role == "assistant"
        if is_begun and "tool_calls" not in fields["messages"][-1]:
            fields["continue_final_message"] = True  # the answer goes on with it
        known_tools = [tool for tool in self.tools or () if tool.is_known]
        if known_tools:
            fields["tools"] = [{"type": "function", "function": tool.function} for tool in known_tools]
        choice = self.tool_choice
        if choice is not None:
            fields["tool_choice"] = choice.for_chat
            fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        if self.thinking is not None:
            fields["enable_thinking"] = {"enabled": True, "disabled": False}.get(self.thinking.type)
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                schema = {"schema": self.output_config.format.schema_}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    @property
    def _system_texts(self) -> list[str]:
        return [part.text for part in self.system if not part.text.startswith(BILLING)]

    def _messages(self) -> list[dict[str, Any]]:
        conversation = Conversation()
        if self._system_texts:
            conversation.say("system", "\n".join(self._system_texts))
        for message in self.messages:
            texts = list[str]()
            for block in message.content:
                if block.type == "text":
                    texts.append(block.text or "")
                    continue
                self._say(conversation, message.role, texts)
                if block.type == "thinking":
                    conversation.think(block.thinking or "")
                elif block.type == "tool_use":
                    arguments = json.dumps(block.input, ensure_ascii=False)
                    conversation.call(block.id or "", block.name or "", arguments)
                elif block.type == "tool_result":
                    begin = "Error: " if block.is_error else ""
                    result = begin + "\n".join(part.text for part in block.content)
                    conversation.result(block.tool_use_id or "", result)
            self._say(conversation, message.role, texts)
        return conversation.messages

    def _say(self, conversation: Conversation, role: str, texts: list[str]) -> None:
        """Takes ``texts``, each on a line of its own; turns of the user that follow each other are one."""
        text = "\n".join(texts)
        if not texts:
            return
        texts.clear()
        before = conversation.messages[-1] if conversation.messages else {}
        if role == before.get("role") == "user":
            before["content"] += f"\n{text}"
        else:
            conversation.say(role, text)

    def replies(self, context: ReplyContext) -> MessageReplies:
        return MessageReplies(context)


BEGUN: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
"""A block that has just begun, by its kind."""
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of an event with more of a block, and the field that has it, by the block's type."""


class MessageReplies(BlockReplies):
    """One message under way."""

    def __init__(self, context: ReplyContext):
        super().__init__(context.reader)
        self._content: list[dict[str, Any]] = []
        self._arguments = ""
        """Of the call that is open, as JSON."""
        self._message: dict[str, Any] = {
            "id": new_identity("msg", 24),
            "type": "message",
            "role": "assistant",
            "model": context.model_name,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(context.num_prompt, 0, 0),
        }

    def _whole(self) -> dict[str, Any]:
        return self._message

    def start(self, num_answers: int) -> list[Any]:
        """The first event of a stream."""
        return [{"type": "message_start", "message": {**self._message, "content": []}}]

    def waiting(self) -> list[Any]:
        return [{"type": "ping"}]

    def end(self, usage: dict[str, Any]) -> list[Any]:
        """The last events of a stream."""
        events = self._close()
        reason = "stop_sequence" if self._stop_string is not None else "end_turn"
        delta = {
            "stop_reason": STOP_REASONS.get(self._reason or "", reason),
            "stop_sequence": self._stop_string,
        }
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = _usage(usage["prompt_tokens"], num_cached, usage["completion_tokens"])
        counts["medusa"] = usage["medusa"]
        self._message |= {**delta, "usage": counts}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": counts},
            {"type": "message_stop"},
        ]

    def failed(self, error: RequestError) -> list[Any]:
        """The last event of a stream that cannot go on."""
        return [anthropic_error(error)]

    def _opened(self, kind: str, name: str) -> list[Any]:
        call = {"type": "tool_use", "id": new_identity("toolu", 24), "name": name, "input": {}}
        self._content.append({**BEGUN.get(kind, call)})
        self._arguments = ""
        index = len(self._content) - 1
        event = {"type": "content_block_start", "index": index, "content_block": {**self._content[-1]}}
        return [event, *self.waiting()] if index == 0 else [event]

    def _add(self, text: str) -> list[Any]:
        block = self._content[-1]
        delta_type, field = DELTAS[block["type"]]
        if block["type"] == "tool_use":
            self._arguments += text
        else:
            block[field] += text
        return [self._of_block("content_block_delta", delta={"type": delta_type, field: text})]

    def _closed(self, status: str) -> list[Any]:
        block = self._content[-1]
        events = []
        if block["type"] == "tool_use":
            block["input"] = json_value(repaired(self._arguments or "{}"))
        elif block["type"] == "thinking":  # clients keep no reasoning that is not signed
            block["signature"] = self._message["id"]
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events.append(self._of_block("content_block_delta", delta=delta))
        return [*events, self._of_block("content_block_stop")]

    def _of_block(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event about the last block."""
        return {"type": kind, "index": len(self._content) - 1, **fields}


def _usage(num_prompt: int, num_cached: int, num_tokens: int) -> dict[str, Any]:
    """Numbers of tokens: of the prompt those that were read, and those of an earlier one that were not."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_tokens,
    }
