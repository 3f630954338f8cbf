"""Requests with a conversation: chats, and the tokens of one."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    model_validator,
)
from transformers import PreTrainedTokenizerBase

from medusa.conversations import written_call
from medusa.serving.body import FIRST_ALONE, MAX_TOKENS, Body, Token, Whole, few_fields
from medusa.serving.shared_fields import Content, SharedFields, text_of

MAX_TOOLS = 128


MAX_FUNCTION_NAME = 256
"""Characters of a function's name, behind that of its namespace."""


MAX_MESSAGES = 2048
MAX_CALLS = 128


TEMPLATE_PARAMETERS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""Arguments of rendering a conversation besides template variables."""


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


TemplateArguments = Annotated[dict[str, Any], BeforeValidator(few_fields), AfterValidator(_for_the_template)]
"""Chat template variables of a client."""


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
        return self.offered

    @property
    def must_call(self) -> list[dict[str, Any]]:
        functions = [tool["function"] for tool in self.offered]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function["name"] == self.tool_choice.function.name]
        return functions if self.tool_choice == "required" else []

    def refused(self) -> tuple[str, str] | None:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            return "continue_final_message", "continue_final_message needs a last message of the assistant"
        if self.tool_choice not in (None, "none", "auto") and not self.must_call:
            return "tool_choice", "tool_choice must name one of tools, or tools must be given"
        return super().refused()


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
