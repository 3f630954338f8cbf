"""Documents into micro-batches: rows of similar length padded, or rows packed full.

A row is a list of document indices, a micro-batch a list of rows, an epoch a list of micro-batches in a
fixed order. The plan of an epoch is a pure function of the lengths, the options and the epoch, so a resumed
run and every process of a distributed one see the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medusa.training.config import DataOptions
from medusa.training.data.dataset import Documents
from medusa.training.losses import Alignment, align

MicroBatch = list[list[int]]
_POOL = 64
"""Micro-batches whose documents are sorted together: enough to pad little, few enough to stay random."""
_OPEN_ROWS = 32
"""Rows that packing keeps open: a document goes to the fullest one that still takes it."""


def plan_epoch(
    lengths: np.ndarray, options: DataOptions, epoch: int, switch: int | None = None
) -> list[MicroBatch]:
    """The micro-batches of one epoch over documents of ``lengths`` (n,), each document once.

    ``switch`` is the base's :func:`medusa.base.profile.longrope_threshold`: documents longer than that
    share no micro-batch with others, which the base would read otherwise beside them. Rows that are packed
    must not reach past it.
    """
    random = np.random.default_rng([options.seed, epoch])
    order = random.permutation(len(lengths))
    if options.packing:
        rows = _packed_rows(order, lengths, options.max_length)
        rows_per_batch = max(1, options.tokens_per_batch // options.max_length)
        return [rows[start : start + rows_per_batch] for start in range(0, len(rows), rows_per_batch)]
    plan: list[MicroBatch] = []
    number = np.cumsum(lengths[order]) // max(1, _POOL * options.tokens_per_batch)
    for pool in np.split(order, np.flatnonzero(np.diff(number)) + 1):
        by_length = pool[np.argsort(lengths[pool], kind="stable")]
        plan += _alike_in_length(by_length, lengths, options.tokens_per_batch, switch)
    return [plan[index] for index in random.permutation(len(plan))]


def plan_in_order(lengths: np.ndarray, options: DataOptions, switch: int | None = None) -> list[MicroBatch]:
    """Micro-batches of all documents, longest last, unpacked: for evaluation, where order means nothing.

    ``switch`` as in :func:`plan_epoch`.
    """
    return _alike_in_length(np.argsort(lengths, kind="stable"), lengths, options.tokens_per_batch, switch)


@dataclass(frozen=True)
class PaddedBatch:
    """A micro-batch as the base model reads it."""

    input_ids: Tensor  # (B, T) long; padding is token 0
    positions: Tensor  # (B, T) long; 0 at the start of a document and of padding after packed ones
    is_label: Tensor  # (B, T) bool

    def to(self, device: torch.device) -> PaddedBatch:
        return PaddedBatch(self.input_ids.to(device), self.positions.to(device), self.is_label.to(device))

    def aligned(self, num_heads: int, column_of: Tensor | None = None) -> Alignment:
        """See :func:`medusa.training.losses.align`; sources count the B * T positions row by
        row."""
        return align(
            self.input_ids.flatten(), self.is_label.flatten(), self.positions.flatten(), num_heads, column_of
        )


def collate(documents: Documents, rows: Sequence[Sequence[int]]) -> PaddedBatch:
    """Rows of packed documents, padded on the right to the longest row. Without rows one unlabelled token: an
    idle process still takes part in collective operations.

    transformers separates documents of a row where ``position_ids`` restart and there is no mask. The padding
    after a single document continues its positions: causal attention hides it already, and a batch without
    restarts needs no mask at all.
    """
    height = max(1, len(rows))
    width = int(max((sum(documents.lengths[list(row)]) for row in rows), default=1))
    input_ids = torch.zeros(height, width, dtype=torch.long)
    is_label = torch.zeros(height, width, dtype=torch.bool)
    positions = torch.arange(width).repeat(height, 1)
    for index, row in enumerate(rows):
        end = 0
        for document in (documents[number] for number in row):
            start = end
            end = end + len(document.tokens)
            input_ids[index, start:end] = torch.from_numpy(document.tokens)
            is_label[index, start:end] = torch.from_numpy(document.is_label)
            positions[index, start:] = torch.arange(width - start)
        if len(row) > 1:
            positions[index, end:] = torch.arange(width - end)
    return PaddedBatch(input_ids, positions, is_label)


def _alike_in_length(
    by_length: np.ndarray, lengths: np.ndarray, tokens: int, switch: int | None
) -> list[MicroBatch]:
    """Documents given from short to long, as micro-batches of one document a row."""
    plan: list[MicroBatch] = []
    for index in by_length:
        crosses = bool(plan) and switch is not None and lengths[plan[-1][0][0]] <= switch < lengths[index]
        if plan and not crosses and (len(plan[-1]) + 1) * lengths[index] <= tokens:
            plan[-1].append([int(index)])
        else:
            plan.append([[int(index)]])
    return plan


def _packed_rows(order: np.ndarray, lengths: np.ndarray, capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    filled: list[int] = []  # tokens in each of the open rows, the last len(filled) of rows
    closed: list[list[int]] = []
    for index in order:
        length = int(lengths[index])
        fitting = [row for row, used in enumerate(filled) if used + length <= capacity]
        if fitting:
            chosen = max(fitting, key=lambda row: filled[row])
            rows[chosen].append(int(index))
            filled[chosen] += length
            continue
        if len(rows) == _OPEN_ROWS:
            fullest = max(range(len(rows)), key=lambda row: filled[row])
            closed.append(rows.pop(fullest))
            filled.pop(fullest)
        rows.append([int(index)])
        filled.append(length)
    return closed + rows
