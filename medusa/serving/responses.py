"""OpenAI's newer endpoint, ``POST /v1/responses``: a request is a chat in other words, and so is its answer.

Nothing is kept between requests: who goes on with a conversation sends all of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, field_validator, model_validator

from medusa.serving.dialects import BlockReplies, Conversation, Dialect, new_identity
from medusa.serving.output_parser import OutputParser
from medusa.serving.replies import RequestError
from medusa.serving.requests import (
    FIRST_ALONE,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    JsonSchema,
    Parameters,
    TextPart,
    Whole,
    text_of,
)


class InputPart(TextPart):
    """A part of an item."""

    kinds = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


Content = str | Annotated[list[InputPart], Field(max_length=MAX_PARTS), FIRST_ALONE]


class InputItem(Body):
    """An item of a conversation: a message, a call that the model has made, what came of it, reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    summary: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> InputItem:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        for name in needed[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type!r} needs {name}")
        return self


class OfferedTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: Parameters | None = None
    strict: StrictBool | None = None


class ChosenTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(JsonSchema):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # type: ignore[assignment]

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type 'json_schema' needs schema: {...}")
        return self

    @property
    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type, "json_schema": None if self.schema_ is None else {"schema": self.schema_}}


class TextOptions(Body):
    """The required format of the text."""

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """How much is thought."""

    effort: Annotated[str, Field(max_length=40)] | None = None


@dataclass(frozen=True)
class ItemType:
    """What a block is called."""

    name: str
    letters: str
    """At the beginning of its id."""
    text: str = ""
    """The type of its text."""


ITEM_TYPES = {
    "text": ItemType("message", "msg", "output_text"),
    "reasoning": ItemType("reasoning", "rs", "reasoning_text"),
    "call": ItemType("function_call", "fc"),
}
"""The items of a response, by the kind of the block."""
MAX_PAIRS = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def _few_pairs(metadata: Any) -> Any:
    if isinstance(metadata, dict) and len(metadata) > MAX_PAIRS:
        raise ValueError(f"at most {MAX_PAIRS} pairs, got {len(metadata)}")
    return metadata


class ResponsesRequest(Dialect):
    """``POST /v1/responses``. ``input`` is a conversation, or the user's message."""

    names_of: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "messages": "input",
    }

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ALONE]
    instructions: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS), FIRST_ALONE] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], BeforeValidator(_few_pairs)] | None = None
    """Given back as it came."""
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None

    @field_validator("previous_response_id", "conversation", "background")
    @classmethod
    def _keeps_nothing(cls, value: Any) -> None:
        if value:
            raise ValueError(
                "this server keeps no answers; leave it out and send the whole conversation in input"
            )

    def _chat_fields(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if self.tools is not None:
            functions = [
                {key: tool.as_sent[key] for key in tool.as_sent if key != "type"} for tool in self.tools
            ]
            body["tools"] = [{"type": "function", "function": function} for function in functions]
        choice = self.tool_choice
        body["tool_choice"] = (
            {"type": "function", "function": {"name": choice.name}}
            if isinstance(choice, ChosenTool)
            else choice
        )
        if self.text is not None and self.text.format is not None:
            body["response_format"] = self.text.format.for_chat
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
        return body

    def _messages(self) -> list[dict[str, Any]]:
        conversation = Conversation()
        if self.instructions is not None:
            conversation.say("system", self.instructions)
        if isinstance(self.input, str):
            conversation.say("user", self.input)
            return conversation.messages
        for item in self.input:
            if item.type == "reasoning":
                conversation.think(text_of(item.content) or text_of(item.summary))
            elif item.type == "function_call":
                conversation.call(item.call_id or "", item.name or "", item.arguments or "")
            elif item.type == "function_call_output":
                conversation.result(item.call_id or "", text_of(item.output))
            else:
                conversation.say(item.role, text_of(item.content))
        return conversation.messages

    def replies(
        self, model_name: str, tokenizer: Any, reader: OutputParser, num_prompt: int
    ) -> ResponseReplies:
        return ResponseReplies(self, model_name, tokenizer, reader)


class ResponseReplies(BlockReplies):
    """One response under way: its items are the blocks.

    Args:
        request: the request.
        tokenizer: counts the tokens of reasoning.
        reader: reads the answer.
    """

    def __init__(self, request: ResponsesRequest, model_name: str, tokenizer: Any, reader: OutputParser):
        super().__init__(reader)
        self._tokenizer = tokenizer
        self._number = 0
        self._output: list[dict[str, Any]] = []
        choice = request.tool_choice
        self._response: dict[str, Any] = {
            "id": new_identity("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, ChosenTool) else choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if request.text is not None and request.text.format is not None:
            text_format = request.text.format.model_dump(by_alias=True, exclude_unset=True)
            self._response["text"] = {"format": {"type": "text", **text_format}}

    def _whole(self) -> dict[str, Any]:
        return self._response

    def start(self, num_answers: int) -> list[Any]:
        """The first events of a stream."""
        return [
            self._event(f"response.{each}", response=self._snapshot()) for each in ("created", "in_progress")
        ]

    def end(self, usage: dict[str, Any]) -> list[Any]:
        """The last events of a stream."""
        is_cut = self._reason == "length"
        status = "incomplete" if is_cut else "completed"
        events = self._close(status)
        thought = "".join(
            part["text"] for item in self._output if item["type"] == "reasoning" for part in item["content"]
        )
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": len(self._tokenizer(thought)["input_ids"])},
                "total_tokens": usage["total_tokens"],
                "medusa": usage["medusa"],
            },
        }
        return [*events, self._event(f"response.{status}", response=self._snapshot())]

    def failed(self, error: RequestError) -> list[Any]:
        """The last events of a stream that cannot go on."""
        fields = error.body["error"]
        response_error = {"code": fields["code"] or fields["type"], "message": fields["message"]}
        self._response |= {"status": "failed", "error": response_error}
        return [*self._close("incomplete"), self._event("response.failed", response=self._snapshot())]

    def _snapshot(self) -> dict[str, Any]:
        return {**self._response, "output": [*self._output]}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event about the last item."""
        index = len(self._output) - 1
        return self._event(kind, item_id=self._output[-1]["id"], output_index=index, **fields)

    def _opened(self, kind: str, name: str) -> list[Any]:
        item_type = ITEM_TYPES[kind]
        item: dict[str, Any] = {"id": new_identity(item_type.letters), "type": item_type.name}
        item["status"] = "in_progress"
        if kind == "call":
            item |= {"call_id": new_identity("call", 24), "name": name, "arguments": ""}
        else:
            item |= (
                {"summary": [], "content": []}
                if kind == "reasoning"
                else {"role": "assistant", "content": []}
            )
        self._output.append(item)
        events = [
            self._event("response.output_item.added", output_index=len(self._output) - 1, item={**item})
        ]
        if kind != "call":
            content: dict[str, Any] = {"type": item_type.text, "text": ""}
            content |= {"annotations": [], "logprobs": []} if kind == "text" else {}
            item["content"] = [content]
            name = "response.content_part.added"
            events.append(self._of_item(name, content_index=0, part={**content}))
        return events

    def _add(self, text: str) -> list[Any]:
        item = self._output[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            return [self._of_item("response.function_call_arguments.delta", delta=text)]
        item["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        name = f"response.{item['content'][0]['type']}.delta"
        return [self._of_item(name, content_index=0, delta=text, **more)]

    def _closed(self, status: str) -> list[Any]:
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            call_fields = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._of_item("response.function_call_arguments.done", **call_fields)]
        else:
            (content,) = item["content"]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            name = f"response.{content['type']}.done"
            events = [
                self._of_item(name, content_index=0, text=content["text"], **more),
                self._of_item("response.content_part.done", content_index=0, part=content),
            ]
        return [
            *events,
            self._event("response.output_item.done", output_index=len(self._output) - 1, item=item),
        ]
