"""What the tokenizer tells about a model, without its weights: its chat template, the form of its answers,
and the tokens that mark a gap."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from medusa.base.sampling_advice import SamplingAdvice
from medusa.conversations import as_template
from medusa.serving.chat_template import BoundedChatTemplate
from medusa.serving.infill import InfillTokens, infill_tokens
from medusa.serving.output_formats import OutputFormat, detect_format

TEMPLATE_ERRORS = (TemplateError, TypeError, KeyError, ValueError, RecursionError)
"""Exceptions that a chat template may raise about its input."""
SAY = ({"role": "user", "content": "a question"},)
"""A conversation that all chat templates render."""


class TokenizedModel:
    """A model as its tokenizer knows it.

    Args:
        vocab_size: tokens that the model knows.
    """

    sampling = SamplingAdvice()
    """Sampling options of requests that leave them out, where they are known."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._chat_template = BoundedChatTemplate(tokenizer)

    @property
    def capabilities(self) -> list[str]:
        """What can be asked of it, as Ollama names it."""
        can = {
            "completion": True,
            "tools": self.tokenizer.chat_template is not None and self.knows_tools,
            "insert": self.infill is not None,
            "thinking": bool(self.output_format.unsearched[1]),
        }
        return [name for name, is_there in can.items() if is_there]

    @functools.cached_property
    def knows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        say = as_template([*SAY], self._chat_template)
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
        try:
            return self._rendered(say, [tool]) != self._rendered(say)
        except TEMPLATE_ERRORS:
            return False

    @functools.cached_property
    def takes_several_systems(self) -> bool:
        """Whether the chat template shows more than one system message to the model."""
        return self._shows_systems({"role": "system", "content": "said after it"}, *SAY)

    @functools.cached_property
    def takes_late_systems(self) -> bool:
        """Whether the chat template shows a system message behind others to the model."""
        return self._shows_systems(*SAY, {"role": "system", "content": "said after it"})

    def _shows_systems(self, *messages: dict[str, Any]) -> bool:
        """Whether the chat template shows the system messages among ``messages``, behind another one."""
        conversation = [{"role": "system", "content": "said at first"}, *messages]
        try:
            shown = self._rendered(as_template(conversation, self._chat_template))
        except TEMPLATE_ERRORS:
            return False
        return all(message["content"] in shown for message in conversation)

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Sequence[Any] = (), arguments: Mapping[str, Any] = {}
    ) -> str:
        return self._chat_template.apply_chat_template(messages, [*tools] or None, **arguments)

    @functools.cached_property
    def _template(self) -> str:
        """The template that renders tools."""
        return self.tokenizer.get_chat_template(tools=[{}]) if self.tokenizer.chat_template else ""

    @functools.cached_property
    def output_format(self) -> OutputFormat:
        """How the model writes answers."""
        return detect_format(self._template)

    @functools.cached_property
    def infill(self) -> InfillTokens | None:
        """The tokens that mark a gap; None for a model that was not trained to fill one."""
        return infill_tokens(self.tokenizer, self._vocab_size)
