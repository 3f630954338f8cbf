"""Many tokenised documents in flat arrays, so that millions of them cost their tokens and little more, in
memory or on the disk: made once by one process, in little memory, and mapped by all.

    training/       tokens.int32 (T,) and is_label.bool (T,), raw; starts.npy (n + 1,) long
    held-out/       the same
    template.json   the chat template options
    counts.json     counts of the rows
    checksums.json  the SHA-256 of each of these files; written last

The directory's name is a digest of all inputs: the data files, how they are cut and filtered, the tokenizer
and its chat template, and the version of medusa that made them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import medusa
from medusa.files import digest_of, read_json, replaced_directory, write_json
from medusa.heads.calibration import AnsweredTokens
from medusa.training.config import DataOptions
from medusa.training.data.reading import expanded

COUNT_BEFORE = 4
"""How often a token of the map of heads that go on counts as written beside what the new text has."""


class Document(NamedTuple):
    """One training sequence."""

    tokens: np.ndarray  # (T,) int32
    is_label: np.ndarray  # (T,) bool; tokens that the model wrote


@dataclass(frozen=True)
class Documents:
    """A list of documents. n documents, T tokens in all."""

    tokens: np.ndarray  # (T,) int32
    is_label: np.ndarray  # (T,) bool
    starts: np.ndarray  # (n + 1,) long; document i is tokens[starts[i]:starts[i + 1]]

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Documents:
        listed = list(documents)
        starts = np.concatenate([[0], np.cumsum([len(each.tokens) for each in listed], dtype=np.int64)])
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in listed)]),
            np.concatenate([np.zeros(0, bool), *(each.is_label for each in listed)]),
            starts.astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Document:
        span = slice(self.starts[index], self.starts[index + 1])
        return Document(self.tokens[span], self.is_label[span])

    @property
    def lengths(self) -> np.ndarray:
        """(n,) tokens of each document."""
        return np.diff(self.starts)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_labels(self) -> int:
        return int(self.is_label.sum())

    def digest(self) -> str:
        """A hash of everything in them."""
        content = hashlib.sha256()
        for part in (self.tokens, self.is_label, self.starts):
            content.update(np.ascontiguousarray(part).data)
        return content.hexdigest()

    def spread(self, count: int) -> list[int]:
        """Indices of ``count`` documents, or of all if there are fewer, spread evenly."""
        last = len(self) - 1
        return np.unique(np.linspace(0, last, min(count, len(self))).round().astype(int)).tolist()

    def answers(self, at_most: int | None = None) -> list[AnsweredTokens]:
        """The first ``at_most`` documents, or all, as rows to calibrate heads on."""
        rows = (self[index] for index in range(len(self))[:at_most])
        return [AnsweredTokens(row.tokens.tolist(), row.is_label.tolist()) for row in rows]

    def num_scored(self, num_heads: int, has_column: np.ndarray | None = None) -> np.ndarray:
        """(n, K) long: targets of each depth in each document.

        ``has_column`` (V,) bool says which tokens count; all of them when it is None.
        """
        counts = np.zeros((len(self), num_heads), dtype=np.int64)
        for index in range(len(self)):
            tokens, is_label = self[index]
            targets = is_label.nonzero()[0]
            if has_column is not None:
                targets = targets[has_column[tokens[targets]]]
            counts[index] = [(targets - 1 - depth >= 0).sum() for depth in range(1, num_heads + 1)]
        return counts

    def most_frequent_labels(
        self, count: int, vocab_size: int, before: np.ndarray | None = None
    ) -> np.ndarray:
        """(count,) ids, ascending, of the tokens most often written; where counts are equal, low ids.

        Those in ``before``, a token map of heads that go on with this text, count as written
        :data:`COUNT_BEFORE` times more: what a text has once does not drive them out.
        """
        if not 1 <= count <= vocab_size:
            raise ValueError(f"token_map_size must be in [1, {vocab_size}], got {count}")
        counts = np.bincount(self.tokens[self.is_label], minlength=vocab_size)
        if before is not None:
            counts[before[before < vocab_size]] += COUNT_BEFORE
        return np.sort(np.argsort(-counts, kind="stable")[:count])


def trained_on(training: Documents, options: DataOptions) -> Documents:
    """The training documents with the labels that ``train_on`` asks for."""
    if options.train_on == "answers":
        return training
    return Documents(training.tokens, np.ones_like(training.is_label), training.starts)


ONLY_IN_TRAINING = ("train_on", "packing", "tokens_per_batch")
"""Data options that documents do not depend on."""
TOKENS, LABELS, STARTS = "tokens.int32", "is_label.bool", "starts.npy"
_PARTS = ("training", "held-out")
_FILES = (
    *(f"{part}/{name}" for part in _PARTS for name in (TOKENS, LABELS, STARTS)),
    "template.json",
    "counts.json",
)
CHECKSUMS = "checksums.json"


def name_of(options: DataOptions, tokenizer: Any) -> str:
    """The name of the directory that holds these documents.

    Raises:
        FileNotFoundError, ValueError: a source cannot be opened.
    """
    document_options = {
        key: value for key, value in dataclasses.asdict(options).items() if key not in ONLY_IN_TRAINING
    }
    sources: list[Any] = []
    for source in expanded(options.data, options.data_split):
        path = Path(source)
        state = path.stat() if path.is_file() else None
        where = str(path.resolve()) if state else source
        sources.append([where, *([state.st_size, state.st_mtime_ns] if state else [])])
    backend = getattr(tokenizer, "backend_tokenizer", None)
    identity = {
        **document_options,
        "sources": sources,
        "tokenizer": backend.to_str() if backend is not None else repr(tokenizer),
        "template": [str(tokenizer.chat_template), str(tokenizer.special_tokens_map)],
        "medusa": medusa.__version__,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Dataset:
    """Documents to train on, documents to measure on, and what happened to the rest."""

    training: Documents
    held_out: Documents
    counts: dict[str, int]
    template_options: list[dict[str, Any]] = field(default_factory=list)
    """The chat template options of the documents: every different set."""

    def summary(self) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in self.counts.items())


def write_documents(directory: Path, documents: Iterable[Document]) -> None:
    """Write ``documents`` into a new ``directory``, one at a time; not through a mapped file, in which a full
    disk would end the process by a signal."""
    directory.mkdir()
    starts = [0]
    with (directory / TOKENS).open("wb") as tokens, (directory / LABELS).open("wb") as is_label:
        for document in documents:
            tokens.write(np.ascontiguousarray(document.tokens, dtype=np.int32).data)
            is_label.write(np.ascontiguousarray(document.is_label, dtype=bool).data)
            starts.append(starts[-1] + len(document.tokens))
    np.save(directory / STARTS, np.array(starts, dtype=np.int64))


def read_documents(directory: Path) -> Documents:
    """The documents in ``directory``, mapped: they take memory as they are read, and processes share it."""
    starts = np.load(directory / STARTS)
    if not starts[-1]:
        return Documents.of([])
    # "c" (copy on write): torch warns about arrays that cannot be written.
    tokens = np.memmap(directory / TOKENS, np.int32, mode="c")
    return Documents(tokens, np.memmap(directory / LABELS, bool, mode="c"), starts)


def write_dataset(
    directory: Path,
    documents: Documents,
    is_held_out: np.ndarray,
    counts: dict[str, int],
    template_options: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write ``documents`` in two parts, the counts of rows, and the chat template options; atomically.

    A run that began at the same time may have written them: the same, since the data is in the name.
    """
    with replaced_directory(directory, overwrite=True) as partial:
        for name, chosen in zip(_PARTS, (~is_held_out, is_held_out), strict=True):
            write_documents(partial / name, (documents[int(index)] for index in chosen.nonzero()[0]))
        write_json(partial / "template.json", {"told": list(template_options)})
        write_json(partial / "counts.json", counts)
        write_json(partial / CHECKSUMS, _checksums(partial))


def _checksums(directory: Path) -> dict[str, str]:
    return {name: digest_of(directory / name) for name in _FILES if (directory / name).is_file()}


def damage_of_dataset(directory: Path) -> str | None:
    """The first file in ``directory`` that is not the one that :func:`write_dataset` wrote, in words; all of
    it is read."""
    try:
        recorded = read_json(directory / CHECKSUMS)
    except (FileNotFoundError, ValueError):
        return f"{directory / CHECKSUMS} is missing or damaged"
    checksums = _checksums(directory)
    for name in _FILES:
        if name not in checksums:
            return f"{directory / name} is missing"
        if recorded.get(name) != checksums[name]:
            return f"{directory / name} has other bytes than were written"
    return None


def read_dataset(directory: Path) -> Dataset:
    """The dataset that :func:`write_dataset` wrote.

    Raises:
        FileNotFoundError: the directory is not there, on this machine.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory} is not on this machine: the tokenised documents are in output_dir, which must be a "
            "directory that all machines of the launch see"
        )
    training, held_out = (read_documents(directory / name) for name in _PARTS)
    template_options = read_json(directory / "template.json")["told"]
    return Dataset(training, held_out, read_json(directory / "counts.json"), template_options)
