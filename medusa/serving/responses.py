"""OpenAI's newer endpoint, ``POST /v1/responses``: a request is a chat in other words, and so is its answer.

Nothing is kept between requests: who goes on with a conversation sends all of it.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, field_validator, model_validator

from medusa.serving.output_parser import OutputParser, Part
from medusa.serving.replies import RequestError, read
from medusa.serving.requests import (
    FIRST_ALONE,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    ChatRequest,
    JsonSchema,
    Parameters,
    SharedFields,
    TextPart,
    Whole,
    text_of,
)
from medusa.serving.worker import Update

IN_WORDS_OF_CHAT = {
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
"""Fields of a chat that have other names here."""


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


MAX_PAIRS = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def _few_pairs(metadata: Any) -> Any:
    if isinstance(metadata, dict) and len(metadata) > MAX_PAIRS:
        raise ValueError(f"at most {MAX_PAIRS} pairs, got {len(metadata)}")
    return metadata


class ResponsesRequest(SharedFields):
    """``POST /v1/responses``. ``input`` is a conversation, or the user's message."""

    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ALONE]
    instructions: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    n: Literal[1] = 1
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

    @functools.cached_property
    def chat(self) -> ChatRequest:
        """The same as a chat."""
        shared = {*SharedFields.model_fields} - {"n", "response_format"}
        body = self.model_dump(include=shared, exclude_unset=True, by_alias=True)
        body["messages"] = self._messages()
        body |= {
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
        return ChatRequest.model_validate(body)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thought = None
        names = dict[str, str]()
        for item in self.input:
            if item.type == "reasoning":
                thought = text_of(item.content) or text_of(item.summary) or None
            elif item.type == "function_call":
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "function": function}
                names[item.call_id or ""] = item.name or ""
                if thought is not None or not (messages and messages[-1].get("tool_calls")):
                    messages.append({"role": "assistant", "reasoning_content": thought, "tool_calls": []})
                    thought = None
                messages[-1]["tool_calls"].append(call)
            elif item.type == "function_call_output":
                named = {"tool_call_id": item.call_id, "name": names.get(item.call_id or "")}
                messages.append({"role": "tool", "content": text_of(item.output), **named})
            else:
                message = {"role": item.role, "content": text_of(item.content)}
                if item.role == "assistant":
                    message["reasoning_content"] = thought
                    thought = None
                messages.append(message)
        return messages


def rename_error_fields(error: RequestError) -> RequestError:
    """The error of a chat field, with the name of that field in this protocol."""
    text = str(error)
    for name, ours in IN_WORDS_OF_CHAT.items():
        text = text.replace(name, ours)
    return RequestError(
        text, error.status, error.param and responses_name(error.param), error.code, error.retry_after
    )


def responses_name(field: str) -> str:
    """The name that a field of a chat has here."""
    return IN_WORDS_OF_CHAT.get(field, field)


class ResponseReplies:
    """One response under way: its items as parts come, and the events that tell of them.

    Args:
        request: the request.
        tokenizer: counts the tokens of reasoning.
        reader: reads the answer.
    """

    def __init__(self, request: ResponsesRequest, model_name: str, tokenizer: Any, reader: OutputParser):
        self._tokenizer = tokenizer
        self._reader = reader
        self._number = 0
        self._reason: str | None = None
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # the last item
        choice = request.tool_choice
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
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

    def whole(self, updates: Sequence[Sequence[Update]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        for update in updates[0]:
            self.part(0, update)
        self.end(usage)
        return self._response

    def start(self, num_answers: int) -> list[Any]:
        """The first events of a stream."""
        return [
            self._event(f"response.{each}", response=self._snapshot()) for each in ("created", "in_progress")
        ]

    def part(self, index: int, update: Update) -> list[Any]:
        """The events of an update."""
        parts, self._reason = read(self._reader, update)
        return [event for part in parts for event in self._took(part)]

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

    def _took(self, part: Part) -> list[Any]:
        kind = {"text": "message", "reasoning": "reasoning"}.get(part.kind, "function_call")
        events: list[Any] = []
        if part.kind == "call" or not self._is_open or self._output[-1]["type"] != kind:
            events = [*self._close("completed"), *self._open(kind, part)]
        if part.kind == "call":
            return events
        item = self._output[-1]
        if kind == "function_call":
            item["arguments"] += part.text
            return [*events, self._of_item("response.function_call_arguments.delta", delta=part.text)]
        item["content"][0]["text"] += part.text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        name = f"response.{_text_of(kind)}.delta"
        return [*events, self._of_item(name, content_index=0, delta=part.text, **more)]

    def _open(self, kind: str, part: Part) -> list[Any]:
        identity = f"{ {'message': 'msg', 'reasoning': 'rs'}.get(kind, 'fc') }_{uuid.uuid4().hex}"
        item: dict[str, Any] = {"id": identity, "type": kind, "status": "in_progress"}
        content: dict[str, Any] = {"type": _text_of(kind), "text": ""}
        if kind == "message":
            content |= {"annotations": [], "logprobs": []}
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"call_id": f"call_{uuid.uuid4().hex[:24]}", "name": part.text, "arguments": ""}
        self._output.append(item)
        self._is_open = True
        events = [
            self._event("response.output_item.added", output_index=len(self._output) - 1, item={**item})
        ]
        if kind != "function_call":
            item["content"] = [content]
            name = "response.content_part.added"
            events.append(self._of_item(name, content_index=0, part={**content}))
        return events

    def _close(self, status: str) -> list[Any]:
        """The last item is whole, or will not be."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            call_fields = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._of_item("response.function_call_arguments.done", **call_fields)]
        else:
            (content,) = item["content"]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            name = f"response.{_text_of(item['type'])}.done"
            events = [
                self._of_item(name, content_index=0, text=content["text"], **more),
                self._of_item("response.content_part.done", content_index=0, part=content),
            ]
        return [
            *events,
            self._event("response.output_item.done", output_index=len(self._output) - 1, item=item),
        ]


def _text_of(kind: str) -> str:
    """The type name of an item's text."""
    return "output_text" if kind == "message" else "reasoning_text"
