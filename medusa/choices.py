"""What arguments of the library and flags of programs choose from, and what several of them can be told.

They stand alone here so that a program can show its help without importing torch.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

Engine = Literal["auto", "eager", "packed", "int8"]
"""How the base model's layers are executed; the table is in :mod:`medusa.engine`."""
StepKind = Literal["general", "static", "compiled", "captured"]
"""How decode steps are run; the table is in :mod:`medusa.decoding.steps`."""
ForeignName = Literal["vllm-medusa", "vllm-eagle3", "speculators", "mtp"]
"""Formats that heads are written in for other projects, and checked as; see :mod:`medusa.interop`."""
Dtype = Literal["float32", "bfloat16", "float16"]
"""Precision of a base model."""


@dataclass(frozen=True)
class TemplateOptions:
    """What the chat template is told beside the messages, where nobody says it of a conversation itself."""

    enable_thinking: bool | None = None
    """Whether the model reasons before it answers (--no-enable-thinking: not), for templates that ask; none
    leaves it to the template."""
    chat_template_kwargs: str | None = None
    """Other variables of the chat template, as a JSON object: '{"reasoning_effort": "low"}'."""

    def __post_init__(self) -> None:
        if not isinstance(self._kwargs, dict):
            raise ValueError(f"chat_template_kwargs must be a JSON object, got {self.chat_template_kwargs!r}")

    @property
    def _kwargs(self) -> Any:
        try:
            return json.loads(self.chat_template_kwargs or "{}")
        except ValueError as error:
            raise ValueError(
                f"chat_template_kwargs must be a JSON object, got {self.chat_template_kwargs!r}: {error}"
            ) from error

    @property
    def told(self) -> dict[str, Any]:
        """All of it, by the names that templates know."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**thinking, **self._kwargs}
