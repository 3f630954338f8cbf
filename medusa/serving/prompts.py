"""The prompts of requests: conversations and texts in tokens, within the limits of a model."""

from __future__ import annotations

import functools
import itertools
import re
import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from medusa.conversations import as_template
from medusa.serving.body import shortened
from medusa.serving.chat_requests import ChatRequest, DetokenizeRequest, TokenizeRequest
from medusa.serving.chat_template import TemplateLimitError
from medusa.serving.completion_requests import CompletionRequest, LlamaInfillRequest
from medusa.serving.dialects import Dialect
from medusa.serving.infill import InfillTokens, start_tokens, tokens_after
from medusa.serving.replies import RequestError
from medusa.serving.tokenized_model import TEMPLATE_ERRORS, TokenizedModel

TOO_LONG = "This model's maximum context length is {} tokens"
"""OpenAI's words, by which clients know that they must shorten a conversation."""


class PromptTokenizer(TokenizedModel):
    """A tokenized model that turns requests into prompts. A prompt that cannot be answered raises a
    :class:`RequestError`.

    Args:
        template_options: default chat template options.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, template_options: Mapping[str, Any]):
        super().__init__(tokenizer, vocab_size)
        self.template_options = template_options

    @property
    @abstractmethod
    def context(self) -> int | None:
        """Tokens that prompt and answer may have together."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together at most in the memory that there is."""

    def prompts(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """The tokens of a conversation, or of each text to continue."""
        if isinstance(request, ChatRequest):
            prompts = [self.chat_prompt(request)]
        else:
            prompts = [self._text_prompt(prompt, request) for prompt in request.prompts]
        if not all(prompts):
            raise RequestError("the prompt must not be empty", param="prompt")
        return prompts

    def chat_prompt(self, request: ChatRequest) -> list[int]:
        """The tokens of a conversation, as the chat template renders it."""
        if self.tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        speaks_of_tools = any(message.needs_tools for message in request.messages)
        if (request.offered or speaks_of_tools) and not self.knows_tools:
            raise RequestError(
                "the chat template of this model has no place for tools; leave them out",
                param="tools" if request.offered else "messages",
            )
        messages = [message.as_conversation for message in request.messages]
        if not self.takes_several_systems:
            messages = _with_one_system(messages)
        if not self.takes_late_systems:
            messages = _without_late_systems(messages)
        try:
            messages = as_template(messages, self._chat_template)
            arguments = {**self.template_options, **request.template_arguments}
            text = self._marked(messages, request.offered, arguments)
        except TemplateLimitError as error:
            raise RequestError(
                f"the model's chat template does not come to an end with these messages: {error}; send "
                "fewer, or serve a model with another template",
                param="messages",
            ) from error
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                "the model's chat template refuses these messages: their roles or their order, or what "
                "chat_template_kwargs tells it",
                param="messages",
            ) from error
        self.check_length(text, "messages")
        parts = filter(None, text.split(self._mark))
        return [id for part in parts for id in self.tokenizer(part, add_special_tokens=False)["input_ids"]]

    def _marked(
        self, messages: list[dict[str, Any]], tools: Sequence[Any], arguments: Mapping[str, Any]
    ) -> str:
        """The conversation as text, with the mark inside of each control token that messages and tools spell:
        tokenised on either side of it, what users write is text."""
        text = self._rendered(messages, tools, arguments)
        cut, *others = self._cut([messages, [*tools], dict(arguments)])
        if [cut, *others] == [messages, [*tools], arguments]:
            return text
        # Some templates look for such text in earlier answers, such as the end of reasoning.
        kept_answers = [
            old if old["role"] == "assistant" else new for old, new in zip(messages, cut, strict=True)
        ]
        for candidate in (cut, kept_answers):
            marked = self._rendered(candidate, *others)
            if marked.replace(self._mark, "") == text:
                return marked
        raise RequestError(
            "a message holds the text of a control token, which the chat template does not leave as it is; "
            "leave it out",
            param="messages",
        )

    @functools.cached_property
    def _mark(self) -> str:
        """Text that nobody can guess."""
        return f"{secrets.randbits(128):039d}"

    @functools.cached_property
    def _controls(self) -> re.Pattern[str]:
        names = {*self._control_names.values(), *(self.infill.names if self.infill else ())}
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @functools.cached_property
    def _control_names(self) -> dict[int, str]:
        added = self.tokenizer.added_tokens_decoder.items()
        return {id: token.content for id, token in added if token.special}

    def _cut(self, value: Any) -> Any:
        """``value`` with the mark after the first character of each control token in its texts."""
        if isinstance(value, str):
            return self._controls.sub(lambda match: f"{match[0][0]}{self._mark}{match[0][1:]}", value)
        if isinstance(value, list):
            return [self._cut(item) for item in value]
        if isinstance(value, dict):
            return {self._cut(key): self._cut(item) for key, item in value.items()}
        return value

    def _text_prompt(self, prompt: str | list[int], request: CompletionRequest) -> list[int]:
        if request.suffix is not None and self.infill is not None:
            return self._infill_prompt(self.infill, prompt, request.suffix, request)
        return self.ids_of(prompt, "prompt")

    def ids_of(self, text: str | list[int], param: str) -> list[int]:
        """The tokens of a text, with the tokenizer's marks at its beginning and its end."""
        if isinstance(text, str):
            self.check_length(text, param)
            return self.tokenizer(text)["input_ids"]
        self.check_tokens(text, param)
        return text

    def _infill_prompt(
        self, infill: InfillTokens, prompt: str | list[int], suffix: str, request: CompletionRequest
    ) -> list[int]:
        """The tokens of a text with a gap before ``suffix``; control tokens that either spells are text."""
        after = self._tokens_after(suffix, request.suffix_name)
        start = start_tokens(self.tokenizer)
        if isinstance(prompt, str):
            self.check_length(prompt, request.prompt_name)
            first, *more = self._cut(prompt).split(self._mark)
            before = list(self.tokenizer(first, add_special_tokens=False)["input_ids"])
            before += [id for part in more for id in tokens_after(self.tokenizer, part)]
        else:
            self.check_tokens(prompt, request.prompt_name)
            before = prompt
        if not isinstance(request, LlamaInfillRequest):
            return infill.prompt(start, before, after)
        files = [(other.filename, other.text) for other in request.others]
        shown = infill.context(files, partial(self._tokens_after, param="input_extra"))
        begun = self._tokens_after(request.begun, "prompt")
        return [*infill.prompt([*start, *shown], before, after), *begun]

    def _tokens_after(self, text: str, param: str) -> list[int]:
        """The tokens of a text behind a mark; control tokens that it spells are text."""
        self.check_length(text, param)
        return [id for part in self._cut(text).split(self._mark) for id in tokens_after(self.tokenizer, part)]

    @functools.cached_property
    def max_characters(self) -> int:
        """Characters of the longest prompt that can fit, if all its tokens are the longest one."""
        return self.max_tokens * max(map(len, self.tokenizer.get_vocab()))

    def check_length(self, text: str, param: str) -> None:
        """Refuse a text that is too long before it is tokenised, which takes long."""
        if len(text) > self.max_characters:
            raise RequestError(
                f"{TOO_LONG.format(self.max_tokens)}, and {param} has {len(text)} characters, of which at "
                f"most {self.max_characters} can fit; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def check_tokens(self, ids: Sequence[int], param: str) -> None:
        size = self._vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise RequestError(
                    f"{param} must hold token ids of 0 to {size - 1}, got {token}", param=param
                )

    def unread(self, request: ChatRequest | CompletionRequest) -> list[str]:
        """The fields that a client gives and that nobody reads here, nor does the chat template."""
        unread = [*request.unread()]
        if isinstance(request, ChatRequest):
            names = ("reasoning_effort", "enable_thinking")
            template_fields = {name: name for name in names if getattr(request, name) is not None}
            template_fields |= {
                name: f"chat_template_kwargs.{shortened(name)}" for name in request.chat_template_kwargs or {}
            }
            if request.reasoning_effort == "none" and "enable_thinking" in self._template:
                template_fields.pop("reasoning_effort")
            beside = {
                key: f"messages[].{shortened(key)}" for message in request.messages for key in message.beside
            }
            template_fields |= {name: field for name, field in beside.items() if name not in template_fields}
            known = set(re.findall(r"\w+", self._template))
            unread += [field for name, field in template_fields.items() if name not in known]
        return unread

    def tokens(self, request: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text or a conversation."""
        if request.prompt is None:
            ids = self.chat_prompt(request.chat)
        else:
            self.check_length(request.prompt, "prompt")
            ids = self.tokenizer(request.prompt, add_special_tokens=request.add_special_tokens)["input_ids"]
        names = self.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.context, "tokens": ids, "token_strs": names}

    def num_tokens(self, request: Dialect) -> dict[str, Any]:
        """The number of tokens of a conversation, as Anthropic's clients read it."""
        return {"input_tokens": len(self.chat_prompt(request.chat))}

    def text(self, request: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens."""
        self.check_tokens(request.tokens, "tokens")
        return {"prompt": self.text_of(request.tokens)}

    def text_of(self, tokens: Sequence[int]) -> str:
        """Control tokens included."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with the system messages at their head as one, a blank line between."""
    first = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    if len(first) < 2:
        return messages
    together = "\n\n".join(message["content"] for message in first)
    return [{**first[0], "content": together}, *messages[len(first) :]]


def _without_late_systems(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` where the user says what system messages behind others say, in one turn with what the user
    says before."""
    shown = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    for message in messages[len(shown) :]:
        if message["role"] != "system":
            shown.append(message)
        elif shown and shown[-1]["role"] == "user":
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n\n{message['content']}"}
        else:
            shown.append({**message, "role": "user"})
    return shown
