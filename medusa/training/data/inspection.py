"""Documents in colour: what a run would train on, before it runs."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from medusa.training.data.documents import Document

TRAINED, CONTEXT = "bold green", "dim"


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(
        ("trained on", TRAINED), "   ", ("context only", CONTEXT), "   · between tokens, ⏎ newline"
    )


def coloured(document: Document, tokenizer: Any) -> Text:
    """The document token by token, the tokens trained on in colour."""
    text = Text()
    for token, is_label in zip(document.tokens.tolist(), document.is_label.tolist(), strict=True):
        shown = tokenizer.decode([token]).replace("\n", "⏎\n")
        text.append(shown, style=TRAINED if is_label else CONTEXT)
        text.append("" if shown.endswith("\n") else "·", style="dim blue")
    text.append(
        f"\n{int(document.is_label.sum())} of {len(document.tokens)} tokens trained on", style="italic"
    )
    return text
