"""Many tokenised documents in flat arrays, so that millions of them cost their tokens and little more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from medusa.heads.calibration import AnsweredTokens
from medusa.training.config.options import DataOptions


class Document(NamedTuple):
    """One training sequence."""

    tokens: np.ndarray  # (T,) int32
    is_label: np.ndarray  # (T,) bool; tokens that the model wrote
    origin: str = ""


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

    def subset(self, indices: Sequence[int] | np.ndarray) -> Documents:
        """The documents at ``indices``, in that order."""
        return Documents.of(self[index] for index in indices)

    def spread(self, count: int) -> list[int]:
        """Indices of ``count`` documents, or of all if there are fewer, spread evenly."""
        last = len(self) - 1
        return np.unique(np.linspace(0, last, min(count, len(self))).round().astype(int)).tolist()

    def answers(self, at_most: int | None = None) -> list[AnsweredTokens]:
        """The first ``at_most`` documents, or all, as rows to calibrate heads on."""
        rows = (self[index] for index in range(len(self))[:at_most])
        return [AnsweredTokens(row.tokens.tolist(), row.is_label.tolist()) for row in rows]

    def labelled_everywhere(self) -> Documents:
        """The same documents with every token a label."""
        return Documents(self.tokens, np.ones_like(self.is_label), self.starts)

    def num_scored(self, num_heads: int, has_column: np.ndarray | None = None) -> np.ndarray:
        """(n, K) long: targets of each depth in each document.

        ``has_column`` (V,) bool says which tokens count; all of them when it is None.
        """
        counts = np.zeros((len(self), num_heads), dtype=np.int64)
        for index in range(len(self)):
            tokens, is_label, _ = self[index]
            targets = is_label.nonzero()[0]
            if has_column is not None:
                targets = targets[has_column[tokens[targets]]]
            counts[index] = [(targets - 1 - depth >= 0).sum() for depth in range(1, num_heads + 1)]
        return counts

    def most_frequent_labels(self, count: int, vocab_size: int) -> np.ndarray:
        """(count,) ids, ascending, of the tokens most often written; low ids where counts are equal."""
        if not 1 <= count <= vocab_size:
            raise ValueError(f"token_map_size must be in [1, {vocab_size}], got {count}")
        frequency = np.bincount(self.tokens[self.is_label], minlength=vocab_size)
        return np.sort(np.argsort(-frequency, kind="stable")[:count])


def trained_on(training: Documents, options: DataOptions) -> Documents:
    """The training documents with the labels that ``train_on`` asks for."""
    return training.labelled_everywhere() if options.train_on == "everything" else training
