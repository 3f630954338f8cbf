"""What losses read of a micro-batch: hidden states from the base, or from a file that it filled once."""

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
from medusa.training.states.stored_states import StateFile, frozen_states, states_width


@dataclass(frozen=True)
class StateFeed:
    """States (P, (1 + L) * D), with those of L layers where heads fuse them, and the alignment with them."""

    base: CausalLM
    documents: Documents
    num_heads: int
    column_of: Tensor | None = None
    layers: tuple[int, ...] = ()
    stored: StateFile | None = None

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Alignment]:
        """On the base's device. An empty batch has no states and no targets."""
        device, size = self.base.device, states_width(self.base, self.layers)
        if not batch:
            nothing = torch.zeros(0, dtype=torch.long)
            alignment = align(nothing, nothing.bool(), nothing, self.num_heads)
            return torch.zeros(0, size, device=device), alignment.to(device)
        if self.stored is not None:
            return self._from_file(self.stored, batch)
        padded = collate(self.documents, batch)
        states = frozen_states(self.base, padded, self.layers)
        return states.reshape(-1, size), padded.aligned(self.num_heads, self.column_of).to(device)

    def _from_file(self, stored: StateFile, batch: MicroBatch) -> tuple[Tensor, Alignment]:
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
        return stored.of(indices).to(self.base.device), alignment.to(self.base.device)


class FeatureBatch(NamedTuple):
    """Whole rows of a micro-batch, as an EAGLE-3 head reads them."""

    hidden: Tensor  # (B, T, (1 + L) * D)
    next_embeddings: Tensor  # (B, T, D); of the token after each
    positions: Tensor  # (B, T) long; from 0 at the start of each document


@dataclass(frozen=True)
class FeatureFeed:
    """What an EAGLE-3 head reads: whole rows, since its entries attend to all before them."""

    base: CausalLM
    documents: Documents
    num_heads: int
    column_of: Tensor | None = None
    layers: tuple[int, ...] = ()
    stored: StateFile | None = None
    """Of the states of all positions."""

    def __call__(self, batch: MicroBatch) -> tuple[FeatureBatch, Alignment]:
        """Rows and their alignment, on the base's device. An empty batch has one token and no targets."""
        device = self.base.device
        padded = collate(self.documents, batch) if batch else one_token()
        # What a row's last entry joins is never read.
        following = padded.input_ids.roll(-1, dims=1).to(device)
        with torch.no_grad():
            next_embeddings = self.base.get_input_embeddings()(following)
        if self.stored is None:
            hidden = frozen_states(self.base, padded, self.layers)
        else:
            hidden = self._from_file(self.stored, batch, padded)
        rows = FeatureBatch(hidden, next_embeddings, padded.positions.to(device))
        return rows, padded.aligned(self.num_heads, self.column_of).to(device)

    def _from_file(self, stored: StateFile, batch: MicroBatch, padded: PaddedBatch) -> Tensor:
        """The states (B, T, (1 + L) * D) of a micro-batch, empty or not."""
        states = torch.zeros(*padded.input_ids.shape, stored.size, dtype=stored.dtype)
        for row, indices in zip(states, batch, strict=False):
            kept = stored.of(indices)
            row[: len(kept)] = kept
        return states.to(self.base.device, self.base.dtype)
