"""What losses read of a micro-batch: hidden states from the base, or from shards that were written once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.training.data.batching import MicroBatch, PaddedBatch, collate, one_token
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import Alignment, align
from medusa.training.states.live import LiveStates, states_width
from medusa.training.states.stored_states import StateFile


class ReadBatch(NamedTuple):
    """What can be had of a micro-batch without the base, on the CPU."""

    padded: PaddedBatch | None
    """None of an empty micro-batch, and where nothing but states is read."""
    states: Tensor | None
    """None where the base computes them."""
    alignment: Alignment


@dataclass(frozen=True)
class StateFeed:
    """States (P, (1 + L) * D), with those of L layers where heads fuse them, and the alignment with them."""

    base: CausalLM
    documents: Documents
    num_heads: int
    column_of: Tensor | None = None
    layers: tuple[int, ...] = ()
    stored: StateFile | None = None
    live: LiveStates | None = None
    """What computes states that are not stored; ``base`` itself by default."""

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Alignment]:
        """On the base's device. An empty batch has no states and no targets."""
        return self.given(self.read(batch))

    def read(self, batch: MicroBatch) -> ReadBatch:
        """What any thread can do beforehand."""
        if not batch:
            nothing = torch.zeros(0, dtype=torch.long)
            return ReadBatch(None, None, align(nothing, nothing.bool(), nothing, self.num_heads))
        if self.stored is not None:
            return self._from_file(self.stored, batch)
        padded = collate(self.documents, batch)
        return ReadBatch(padded, None, padded.aligned(self.num_heads, self.column_of))

    def given(self, read: ReadBatch) -> tuple[Tensor, Alignment]:
        """What only the base can do."""
        device, size, states = self.base.device, states_width(self.base, self.layers), read.states
        if self.stored is None:
            states = (self.live or LiveStates(self.base))(read.padded, self.layers)
        if states is None:
            states = torch.zeros(0, size)
        return states.reshape(-1, size).to(device), read.alignment.to(device)

    def _from_file(self, stored: StateFile, batch: MicroBatch) -> ReadBatch:
        indices = [index for row in batch for index in row]
        spans = [stored.span(index) for index in indices]
        needed = torch.from_numpy(np.concatenate([stored.needed[span] for span in spans]))
        alignment = align(
            torch.from_numpy(np.concatenate([self.documents.tokens[span] for span in spans])).long(),
            torch.from_numpy(np.concatenate([self.documents.is_label[span] for span in spans])),
            torch.cat([torch.arange(span.stop - span.start) for span in spans]),
            self.num_heads,
            self.column_of,
            state_of=needed.cumsum(0) - 1,
        )
        return ReadBatch(None, stored.of(indices), alignment)


class FeatureBatch(NamedTuple):
    """Whole rows of a micro-batch, as heads with a causal layer read them."""

    hidden: Tensor  # (B, T, (1 + L) * D)
    next_tokens: Tensor  # (B, T) long; the token after each
    positions: Tensor  # (B, T) long; from 0 at the start of each document


@dataclass(frozen=True)
class FeatureFeed:
    """What heads with a causal layer read: whole rows, since its entries attend to all before them."""

    base: CausalLM
    documents: Documents
    num_heads: int
    column_of: Tensor | None = None
    layers: tuple[int, ...] = ()
    stored: StateFile | None = None
    """Of the states of all positions up to the last that predicts a label."""
    live: LiveStates | None = None
    """What computes states that are not stored; ``base`` itself by default."""

    def __call__(self, batch: MicroBatch) -> tuple[FeatureBatch, Alignment]:
        """Rows and their alignment, on the base's device. An empty batch has one token and no targets."""
        return self.given(self.read(batch))

    def read(self, batch: MicroBatch) -> ReadBatch:
        """What any thread can do beforehand."""
        padded = collate(self.documents, batch) if batch else one_token()
        states = None if self.stored is None else self._from_file(self.stored, batch, padded)
        return ReadBatch(padded, states, padded.aligned(self.num_heads, self.column_of))

    def given(self, read: ReadBatch) -> tuple[FeatureBatch, Alignment]:
        """What only the base can do."""
        device, padded, hidden = self.base.device, read.padded, read.states
        assert padded is not None
        # What a row's last entry joins is never read.
        following = padded.input_ids.roll(-1, dims=1).to(device)
        if hidden is None:
            hidden = (self.live or LiveStates(self.base)).of(padded, self.layers)
        hidden = hidden.to(device, self.base.dtype)
        rows = FeatureBatch(hidden, following, padded.positions.to(device))
        return rows, read.alignment.to(device)

    def _from_file(self, stored: StateFile, batch: MicroBatch, padded: PaddedBatch) -> Tensor:
        """The states (B, T, (1 + L) * D) of a micro-batch, empty or not."""
        states = torch.zeros(*padded.input_ids.shape, stored.size, dtype=stored.dtype)
        for row, indices in zip(states, batch, strict=False):
            needed = np.concatenate([stored.needed[stored.span(index)] for index in indices])
            row[: len(needed)][torch.from_numpy(needed)] = stored.of(indices)
        return states
