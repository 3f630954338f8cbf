"""The chat template of the served model, rendered in a process of its own: see ``template_rendering.py``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from medusa.bounded_process import BoundedProcess, OutOfBounds

RENDERING = Path(__file__).with_name("template_rendering.py")
SECONDS = 2.0
"""In which a conversation must have been rendered; the longest ones take a tenth of a second."""


class TemplateLimitError(TemplateError):
    """The error of a chat template that takes more time or memory than there is for it."""


@functools.cache
def rendering_process() -> BoundedProcess:
    """The process that renders all templates."""
    return BoundedProcess(RENDERING, lambda: None, SECONDS)


class BoundedChatTemplate:
    """The part of a tokenizer that renders conversations; :func:`medusa.conversations.as_template` takes it
    for one."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @property
    def chat_template(self) -> Any:
        """The template, or several by name; None where the model has none."""
        return self._tokenizer.chat_template

    @property
    def is_bounded(self) -> bool:
        """Whether ``transformers`` renders the template. A tokenizer's own code for it, such as Mistral's, is
        trusted as the model's code is."""
        return type(self._tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template

    def start(self) -> None:
        """Start the process, so that the first conversation waits for nothing."""
        if self.is_bounded and self.chat_template is not None:
            rendering_process().start()

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **arguments: Any
    ) -> str:
        """The text of a conversation, as the tokenizer's own method gives it with ``tokenize=False``.

        Raises:
            TemplateError: the template refuses the conversation, or writes too much.
            TemplateLimitError: it takes too much time or memory.
        """
        arguments = {"conversation": [*conversation], "tools": tools, **arguments}
        if not self.is_bounded:
            return str(self._tokenizer.apply_chat_template(**{**arguments, "tokenize": False}))
        arguments.pop("tokenize", None)
        names = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        template = self._tokenizer.get_chat_template(tools=tools)
        try:
            answer = rendering_process().ask({**names, **arguments, "chat_template": template})
        except OutOfBounds as error:
            raise TemplateLimitError(str(error)) from error
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])
