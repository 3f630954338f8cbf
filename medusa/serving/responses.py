"""OpenAI's newer endpoint, ``POST /v1/responses``: a request is a chat in other words, and so is its answer.

Nothing is kept between requests: who goes on with a conversation sends all of it.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, field_validator, model_validator

from medusa.serving.body import FIRST_ALONE, Body, Whole, json_value, shortened
from medusa.serving.chat_requests import MAX_FUNCTION_NAME, MAX_MESSAGES, MAX_TOOLS, ChatRequest, Parameters
from medusa.serving.dialects import BlockReplies, Conversation, Dialect, ReplyContext, new_identity
from medusa.serving.json_repair import repaired
from medusa.serving.replies import RequestError
from medusa.serving.shared_fields import MAX_PARTS, JsonSchema, TextForm, TextPart, text_of


class InputPart(TextPart):
    """A part of an item."""

    kinds = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


Content = str | Annotated[list[InputPart], Field(max_length=MAX_PARTS), FIRST_ALONE]


class InputItem(Body):
    """An item of a conversation: a message, a call that the model has made, what came of it, reasoning."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    summary: Content | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> InputItem:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "custom_tool_call": ("call_id", "name", "input"),
            "custom_tool_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        for name in needed[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type!r} needs {name}")
        return self


class InputFormat(Body):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] = "lark"
    definition: str | None = None

    @model_validator(mode="after")
    def _has_definition(self) -> InputFormat:
        if self.type == "grammar" and not self.definition:
            raise ValueError("type 'grammar' needs syntax and definition")
        return self

    @property
    def text_form(self) -> TextForm | None:
        """None for text."""
        if self.type == "text":
            return None
        return TextForm("grammar" if self.syntax == "lark" else "regex", self.definition, "tools[].format")


class OfferedTool(Body):
    """A function that the model may call, a custom tool, whose input is text, or a namespace of such tools;
    a tool of another type is one that OpenAI's servers run."""

    type: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_FUNCTION_NAME)] | None = None
    description: str | None = None
    parameters: Parameters | None = None
    strict: StrictBool | None = None
    format: InputFormat | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS), FIRST_ALONE] | None = None

    @model_validator(mode="after")
    def _has_name(self) -> OfferedTool:
        if self.type in ("function", "custom", "namespace") and self.name is None:
            raise ValueError(f"a tool of type {self.type!r} needs name")
        return self

    def shown(self, namespace: str | None = None) -> list[ShownTool]:
        """The functions that the model is shown for it; none for a tool that nobody here can run."""
        if self.type == "namespace":
            return [shown for tool in self.tools or () for shown in tool.shown(self.name)]
        if self.type not in ("function", "custom"):
            return []
        function = {key: value for key, value in self.as_sent.items() if key in FUNCTION_KEYS}
        form = None
        if self.type == "custom":
            form = None if self.format is None else self.format.text_form
            function = {key: function[key] for key in function if key in ("name", "description")}
            if form is not None:
                rule = f"The input keeps to this {self.format and self.format.syntax} grammar:"
                about = f"{self.description}\n\n" if self.description else ""
                function["description"] = f"{about}{rule}\n{form.constraint}"
            function["parameters"] = INPUT_ALONE
        function["name"] = shown_name(namespace, self.name or "")
        return [ShownTool(namespace, self.name or "", function, self.type == "custom", form)]

    def dropped(self) -> dict[str, None]:
        """What the model is not shown of it, as it is reported."""
        if self.type == "namespace":
            unshown = {"tools[namespace].description": None} if self.description else {}
            return unshown | {name: None for tool in self.tools or () for name in tool.dropped()}
        return {} if self.shown() else {f"tools[{shortened(self.type)}]": None}


@dataclass(frozen=True)
class ShownTool:
    """A tool as the model is shown it: a function, behind whose name stands that of its namespace."""

    namespace: str | None
    name: str
    function: dict[str, Any]
    is_custom: bool
    """Its input is text."""
    form: TextForm | None
    """That its input keeps to."""


def shown_name(namespace: str | None, name: str) -> str:
    """The name under which the model is shown a tool of a namespace."""
    return name if namespace is None else f"{namespace}.{name}"


FUNCTION_KEYS = ("name", "description", "parameters", "strict")
"""Keys of a function that its chat template may show."""
INPUT_ALONE = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool."""


class ChosenTool(Body):
    """The tool that must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class InputOfTool(ChatRequest):
    """A chat whose answer is the input of a custom tool, and not a call of it: a call holds its input as
    JSON, where the input's own grammar cannot be kept."""

    form: TextForm

    @property
    def may_call(self) -> list[dict[str, Any]]:
        return []

    @property
    def must_call(self) -> list[dict[str, Any]]:
        return []

    @property
    def text_form(self) -> TextForm:
        return self.form


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
    event: str
    """In the names of events with its text; the type of its content."""
    text_field: str = ""
    """Of a call, for its arguments."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the item, and of its content."""
    fields_of_text: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_call(self) -> bool:
        return bool(self.text_field)


ITEM_TYPES = {
    "text": ItemType(
        "message",
        "msg",
        "output_text",
        fields={"role": "assistant"},
        fields_of_text={"annotations": [], "logprobs": []},
    ),
    "reasoning": ItemType("reasoning", "rs", "reasoning_text", fields={"summary": []}),
    "call": ItemType("function_call", "fc", "function_call_arguments", "arguments"),
    "input": ItemType("custom_tool_call", "ctc", "custom_tool_call_input", "input"),
}
"""The items of a response, by the kind of the block; ``input`` is a call of a custom tool."""
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
        if self.shown_tools:
            body["tools"] = [{"type": "function", "function": tool.function} for tool in self.shown_tools]
        body["tool_choice"] = self.tool_choice
        if self._chosen is not None:
            body["tool_choice"] = {"type": "function", "function": {"name": shown_name(*self._chosen)}}
        if self.written_tool is not None:
            body |= {"tool_choice": None, "form": self.written_tool.form}
        if self.text is not None and self.text.format is not None:
            body["response_format"] = self.text.format.for_chat
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
        return body

    @functools.cached_property
    def shown_tools(self) -> list[ShownTool]:
        """All tools as the model is shown them."""
        return [shown for tool in self.tools or () for shown in tool.shown()]

    @functools.cached_property
    def written_tool(self) -> ShownTool | None:
        """The custom tool whose input the answer is: the one that must be called, if its input has a form."""
        chosen = self.shown_tools if self.tool_choice == "required" else []
        if self._chosen is not None:
            chosen = [tool for tool in self.shown_tools if (tool.namespace, tool.name) == self._chosen]
        return chosen[0] if len(chosen) == 1 and chosen[0].form is not None else None

    @property
    def _chosen(self) -> tuple[str | None, str] | None:
        """The namespace and the name of the tool that must be called, if one is named."""
        choice = self.tool_choice
        return (choice.namespace, choice.name) if isinstance(choice, ChosenTool) else None

    @property
    def _chat_type(self) -> type[ChatRequest]:
        return ChatRequest if self.written_tool is None else InputOfTool

    def unread(self, place: str = "") -> dict[str, None]:
        dropped = [name for tool in self.tools or () for name in tool.dropped()]
        return super().unread(place) | dict.fromkeys(dropped)

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
            elif item.type in ("function_call", "custom_tool_call"):
                written = json.dumps({"input": item.input}, ensure_ascii=False)
                arguments = item.arguments or "" if item.type == "function_call" else written
                name = shown_name(item.namespace, item.name or "")
                conversation.call(item.call_id or "", name, arguments)
            elif item.type in ("function_call_output", "custom_tool_call_output"):
                conversation.result(item.call_id or "", text_of(item.output))
            else:
                conversation.say(item.role, text_of(item.content))
        return conversation.messages

    def replies(self, context: ReplyContext) -> ResponseReplies:
        return ResponseReplies(self, context)


class ResponseReplies(BlockReplies):
    """One response under way: its items are the blocks."""

    def __init__(self, request: ResponsesRequest, context: ReplyContext):
        super().__init__(context.reader)
        self._tokenizer = context.tokenizer
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._tools = {tool.function["name"]: tool for tool in request.shown_tools}
        self._written = request.written_tool
        self._item_type = ITEM_TYPES["text"]
        """Of the last item."""
        self._input = InputText()
        """Of the custom tool that is called."""
        self._response: dict[str, Any] = {
            "id": new_identity("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": context.model_name,
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
            "temperature": _first(request.temperature, context.sampling.temperature),
            "text": {"format": {"type": "text"}},
            "tool_choice": request.as_sent.get("tool_choice") or "auto",
            "tools": [tool.as_sent for tool in request.tools or ()],
            "top_p": _first(request.top_p, context.sampling.top_p),
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

    def waiting(self) -> list[Any]:
        """Codex leaves after five minutes without an event, and does not count comments."""
        return [self._event("response.in_progress", response=self._snapshot())]

    def _opened(self, kind: str, name: str) -> list[Any]:
        tool = self._written if kind == "text" else self._tools.get(name)
        is_input = tool is not None and tool.is_custom and kind != "reasoning"
        self._item_type = item_type = ITEM_TYPES["input" if is_input else kind]
        self._input = InputText()
        item: dict[str, Any] = {"id": new_identity(item_type.letters), "type": item_type.name}
        item["status"] = "in_progress"
        if item_type.is_call:
            item |= {"call_id": new_identity("call", 24), "name": name, item_type.text_field: ""}
            if tool is not None:
                item |= {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace else {})
        else:
            item |= {**item_type.fields, "content": []}
        self._output.append(item)
        events = [
            self._event("response.output_item.added", output_index=len(self._output) - 1, item={**item})
        ]
        if not item_type.is_call:
            content = {"type": item_type.event, "text": "", **item_type.fields_of_text}
            item["content"] = [content]
            name = "response.content_part.added"
            events.append(self._of_item(name, content_index=0, part={**content}))
        return events

    def _add(self, text: str) -> list[Any]:
        item = self._output[-1]
        name = f"response.{self._item_type.event}.delta"
        if self._item_type.is_call:
            if self._item_type.name == "custom_tool_call" and self._written is None:
                text = self._input.feed(text)
            item[self._item_type.text_field] += text
            return [self._of_item(name, delta=text)] if text else []
        item["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return [self._of_item(name, content_index=0, delta=text, **more)]

    def _closed(self, status: str) -> list[Any]:
        item = self._output[-1]
        item["status"] = status
        name = f"response.{self._item_type.event}.done"
        if self._item_type.is_call:
            text_field = self._item_type.text_field
            rest = self._input.rest()
            item[text_field] += rest
            events = [self._of_item(f"response.{self._item_type.event}.delta", delta=rest)] if rest else []
            events.append(self._of_item(name, **{text_field: item[text_field], "name": item["name"]}))
        else:
            (content,) = item["content"]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                self._of_item(name, content_index=0, text=content["text"], **more),
                self._of_item("response.content_part.done", content_index=0, part=content),
            ]
        return [
            *events,
            self._event("response.output_item.done", output_index=len(self._output) - 1, item=item),
        ]


class InputText:
    """The input of a custom tool, from the JSON of a call that has it as ``input``, as far as it has come."""

    def __init__(self) -> None:
        self._json = ""
        self._at = 0  # of the first character that is not out
        self._text = ""

    def feed(self, text: str) -> str:
        """More of the input; ``text`` is more of the JSON."""
        self._json += text
        if not self._at:
            begin = INPUT_BEGIN.match(self._json)
            self._at = begin.end() if begin else 0
        if not self._at:
            return ""
        end = WHOLE_CHARACTERS.match(self._json, self._at).end()  # type: ignore[union-attr]
        piece = str(json_value(f'"{self._json[self._at : end]}"'))
        self._at = end
        self._text += piece
        return piece

    def rest(self) -> str:
        """What is not out at the end; of a call without ``input`` its arguments as they are."""
        if not self._json:
            return ""
        match json_value(repaired(self._json)):
            case {"input": str(text)}:
                return text.removeprefix(self._text)
        return self._json


INPUT_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
WHOLE_CHARACTERS = re.compile(
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"
)
"""Characters of a string in JSON, as far as each is whole."""


def _first(*values: float | None) -> float | None:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)
