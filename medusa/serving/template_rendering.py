"""Rendering of chat templates, the work of a :class:`medusa.bounded_process.BoundedProcess`.

A template is a program that came with the model's file: it may never end, or write more than memory holds.
This file imports nothing of this package. A question has the arguments of ``apply_chat_template``, the answer
the ``text`` or the ``error`` of the template.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 2**24
"""Characters of a conversation as text: far more than any model reads."""


def prepared(settings: None) -> Callable[[dict[str, Any]], dict[str, str]]:
    """The function from the arguments of ``apply_chat_template``, the template among them, to the text."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    tokenizer = PreTrainedTokenizerBase()  # without a vocabulary: torch is not imported

    def rendered(arguments: dict[str, Any]) -> dict[str, str]:
        try:
            text = str(tokenizer.apply_chat_template(**arguments, tokenize=False))
        except MemoryError:  # the process ends of it
            raise
        except Exception as error:  # a template raises what it likes
            return {"error": f"{type(error).__name__}: {error}"[:2000]}
        if len(text) > MAX_CHARACTERS:
            return {"error": f"it writes {len(text)} characters, at most {MAX_CHARACTERS}"}
        return {"text": text}

    return rendered
