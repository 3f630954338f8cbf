"""From data files to documents to train on and documents to measure on, and how to look at them."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from medusa.checks import differences
from medusa.heads.calibration import AnsweredTokens
from medusa.training.config import DataOptions
from medusa.training.data.dataset import (
    ONLY_IN_TRAINING,
    Dataset,
    Document,
    Documents,
    name_of,
    read_dataset,
    read_documents,
    write_dataset,
    write_documents,
)
from medusa.training.data.reading import Example, read_examples
from medusa.training.data.rendering import RenderedText, Renderer, tokenise

_LOOP_NGRAM = 8
"""Tokens that have to repeat before a repetition counts as a loop; prose rarely repeats so many."""


def filtered(documents: Iterable[Document], options: DataOptions, counts: Counter[str]) -> Iterator[Document]:
    """The documents kept, cut to ``max_length`` tokens. Adds what happened to the others to ``counts``."""
    seen: set[bytes] = set()
    for document in documents:
        counts["documents"] += 1
        if len(document.tokens) > options.max_length:
            counts["cut to max_length"] += 1
            document = Document(*(each[: options.max_length] for each in document))
        reason = _reason_to_drop(document, options, seen)
        if reason:
            counts[f"dropped: {reason}"] += 1
        else:
            yield document


def _reason_to_drop(document: Document, options: DataOptions, seen: set[bytes]) -> str | None:
    written = document.tokens[1:][document.is_label[1:]]
    if not len(written):
        return "no label"
    limit = options.max_repeated_fraction
    if limit is not None and _repeated_fraction(written) > limit:
        return "looping"
    if options.drop_duplicates:
        digest = hashlib.sha256(document.tokens.tobytes()).digest()
        if digest in seen:
            return "duplicate"
        seen.add(digest)
    return None


def _repeated_fraction(tokens: np.ndarray) -> float:
    """The part of the n-grams of tokens (T,) that occurred before in it; 0 for text shorter than one."""
    if len(tokens) < _LOOP_NGRAM:
        return 0.0
    ngrams = np.lib.stride_tricks.sliding_window_view(tokens, _LOOP_NGRAM)
    return 1 - len(np.unique(ngrams, axis=0)) / len(ngrams)


def held_out_indices(documents: Documents, fraction: float, at_most: int, seed: int) -> np.ndarray:
    """Indices, ascending, of the documents to measure on and never train on.

    Chosen by a hash of the prompt and ``seed``: the same prompt always lies on the same side, so does a
    document when others are added, until ``at_most`` is reached. The documents of at least one prompt are
    held out when ``fraction`` is above 0 and there are two different prompts.
    """
    if fraction == 0 or at_most == 0:
        return np.zeros(0, dtype=np.int64)
    places = np.array([_place(documents[index], seed) for index in range(len(documents))])
    distinct = np.unique(places)
    if len(distinct) < 2:
        return np.zeros(0, dtype=np.int64)
    limit = fraction
    if (places < limit).sum() > at_most:
        limit = np.sort(places)[at_most]
    limit = max(limit, (distinct[0] + distinct[1]) / 2)
    return (places < limit).nonzero()[0]


def _place(document: Document, seed: int) -> float:
    """A number in [0, 1) that depends on the prompt (all tokens where there is none) and the seed."""
    labels = document.is_label.nonzero()[0]
    end = labels[0] if len(labels) and labels[0] > 1 else len(document.tokens)
    digest = hashlib.sha256(str(seed).encode() + document.tokens[:end].astype("<i4").tobytes()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


TRAINED, CONTEXT = "bold green", "dim"
LEGEND = Text.assemble(
    ("trained on", TRAINED), "   ", ("context only", CONTEXT), "   · between tokens, ⏎ newline"
)


def load_data(options: DataOptions, tokenizer: Any) -> Dataset:
    """Everything ``options.data`` names: read, rendered, tokenised, filtered and split.

    Raises:
        FileNotFoundError, ValueError: a source or a row cannot be read, or nothing is left to train on.
    """
    with tempfile.TemporaryDirectory(prefix="medusa-") as directory:  # what is mapped stays readable
        return read_dataset(tokenised(options, tokenizer, Path(directory)))


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
        renderer = Renderer(tokenizer, options.told)
        texts = _rendered(read_examples(options.data, options.data_split), renderer, counts)
        write_documents(Path(spool, "all"), filtered(tokenise(tokenizer, texts), options, counts))
        documents = read_documents(Path(spool, "all"))
        if not len(documents):
            reasons = ", ".join(f"{count} {name}" for name, count in counts.items())
            raise ValueError(
                f"data {options.data} holds nothing to train on ({reasons}); rows need an assistant message "
                "that answers something, or text"
                if counts["rows"]
                else f"data {options.data} holds no rows"
            )
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
        write_dataset(target, documents, is_held_out, dict(counts), renderer.template_options)
    return target


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


def _rendered(
    examples: Iterable[Example], renderer: Renderer, counts: Counter[str]
) -> Iterator[RenderedText]:
    for example in examples:
        counts["rows"] += 1
        documents = renderer.render(example)
        counts["rows without an answer"] += not documents
        yield from documents
    counts.update(renderer.skipped)


def held_out_answers(provenances: Mapping[str, Mapping[str, Any]], tokenizer: Any) -> list[AnsweredTokens]:
    """The conversations that training runs held out, found again from what their heads say of themselves:
    those that all runs of ``provenances`` (by label) share.

    Raises:
        ValueError: some heads do not say what they were trained on, two runs held out other conversations, or
            the data are no longer what they were.
        FileNotFoundError: the data are not there.
    """
    (first, provenance), *others = provenances.items()
    options = _data_options(first, provenance)
    for label, other in others:
        both = (dataclasses.asdict(options), dataclasses.asdict(_data_options(label, other)))
        ours, theirs = ({key: each[key] for key in each if key not in ONLY_IN_TRAINING} for each in both)
        if differing := differences(ours, theirs):
            raise ValueError(
                f"{first!r} and {label!r} held out other conversations: {'; '.join(differing)}; give "
                "--prompts that neither was trained on"
            )
    data = load_data(options, tokenizer)
    found, recorded = data.counts["held-out labels"], provenance.get("data", {}).get("held-out labels")
    if found != recorded:
        raise ValueError(
            f"the run of {first!r} held out {recorded} answer tokens, {options.data} now gives {found}: the "
            "data have changed since; give --prompts instead of --held-out"
        )
    return data.held_out.answers()


def _data_options(label: str, provenance: Mapping[str, Any]) -> DataOptions:
    configuration = provenance.get("configuration", {})
    if "data" not in configuration:
        raise ValueError(
            f"the heads {label!r} do not say what they were trained on (provenance.json), so what they held "
            "out is not known; give --prompts instead of --held-out"
        )
    names = [field.name for field in dataclasses.fields(DataOptions)]
    return DataOptions(**{name: configuration[name] for name in names if name in configuration})
