"""From data files to documents to train on and documents to measure on, and how to look at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from medusa.training.config.options import DataOptions
from medusa.training.data.documents import Document, Documents
from medusa.training.data.filtering import filtered, held_out_indices, split
from medusa.training.data.reading import Example, check_sources, read_examples
from medusa.training.data.rendering import RenderedText, Renderer, tokenise

TRAINED, CONTEXT = "bold green", "dim"


@dataclass(frozen=True)
class TrainingData:
    """Documents to train on, documents to measure on, and what happened to the rest."""

    training: Documents
    held_out: Documents
    counts: dict[str, int]


def load_data(options: DataOptions, tokenizer: Any) -> TrainingData:
    """Everything ``options.data`` names: read, rendered, tokenised, filtered and split.

    Raises:
        FileNotFoundError, ValueError: a source or a row cannot be read, or nothing is left to train on.
    """
    check_sources(options.data)
    counts: Counter[str] = Counter()
    texts = _rendered(read_examples(options.data, options.data_split), tokenizer, counts)
    documents = Documents.of(filtered(tokenise(tokenizer, texts), options, counts))
    if not counts["rows"]:
        raise ValueError(f"data {options.data} holds no rows")
    if not len(documents):
        reasons = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(
            f"data {options.data} holds nothing to train on ({reasons}); rows need an assistant message that "
            "answers something, or text"
        )
    held_out = held_out_indices(documents, options.held_out_fraction, options.max_held_out, options.seed)
    training, measured = split(documents, held_out)
    counts.update(
        {
            "training documents": len(training),
            "training tokens": training.num_tokens,
            "training labels": training.num_labels,
            "held-out documents": len(measured),
            "held-out labels": measured.num_labels,
        }
    )
    return TrainingData(training, measured, dict(counts))


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


def _rendered(examples: Iterable[Example], tokenizer: Any, counts: Counter[str]) -> Iterator[RenderedText]:
    renderer = Renderer(tokenizer)
    for example in examples:
        counts["rows"] += 1
        documents = renderer.render(example)
        counts["rows without an answer"] += not documents
        yield from documents
    counts.update(renderer.skipped)
