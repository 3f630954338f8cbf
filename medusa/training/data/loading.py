"""From data files to documents to train on and documents to measure on, and how to look at them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from medusa.training.config.options import DataOptions
from medusa.training.data.documents import Document, Documents
from medusa.training.data.filtering import filtered, held_out_indices
from medusa.training.data.reading import Example, read_examples
from medusa.training.data.rendering import RenderedText, Renderer, tokenise
from medusa.training.data.tokenised import DocumentWriter, name_of, read_set, write_set

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
    with tempfile.TemporaryDirectory(prefix="medusa-") as directory:  # what is mapped stays readable
        return TrainingData(*read_set(tokenised(options, tokenizer, Path(directory))))


def tokenised(options: DataOptions, tokenizer: Any, directory: Path) -> Path:
    """Where in ``directory`` the documents lie, tokenised now unless they were before; for one process.

    No more than a batch of rows is in memory at a time.

    Raises:
        FileNotFoundError, ValueError: see :func:`load_data`.
    """
    target = directory / name_of(options, tokenizer)
    if target.exists():
        return target
    counts: Counter[str] = Counter()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".rows-") as spool:
        writer = DocumentWriter(Path(spool))
        texts = _rendered(read_examples(options.data, options.data_split), tokenizer, counts)
        writer.extend(filtered(tokenise(tokenizer, texts), options, counts))
        documents = writer.documents()
        _check_not_empty(options, documents, counts)
        chosen = held_out_indices(documents, options.held_out_fraction, options.max_held_out, options.seed)
        is_held_out = np.zeros(len(documents), dtype=bool)
        is_held_out[chosen] = True
        num_held_out = sum(int(documents[index].is_label.sum()) for index in chosen)
        counts.update(
            {
                "training documents": int((~is_held_out).sum()),
                "training tokens": documents.num_tokens - int(documents.lengths[chosen].sum()),
                "training labels": documents.num_labels - num_held_out,
                "held-out documents": len(chosen),
                "held-out labels": num_held_out,
            }
        )
        write_set(target, documents, is_held_out, dict(counts))
    return target


def _check_not_empty(options: DataOptions, documents: Documents, counts: Counter[str]) -> None:
    """Raise ValueError when there is nothing to train on."""
    if not counts["rows"]:
        raise ValueError(f"data {options.data} holds no rows")
    if not len(documents):
        reasons = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(
            f"data {options.data} holds nothing to train on ({reasons}); rows need an assistant message that "
            "answers something, or text"
        )


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
