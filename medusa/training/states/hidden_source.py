"""Where a micro-batch's hidden states come from: here, from the base model itself.

A source gives states (P, (1 + L) * D), with those of L layers where heads fuse them, and the
:class:`Alignment` that points into them. The other source, a file
that the base filled once, is in ``stored_states.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, hidden_size, hidden_states
from medusa.training.data.batching import MicroBatch, PaddedBatch, collate
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import Alignment, align
from medusa.training.losses.eagle_loss import FeatureBatch


class HiddenSource(Protocol):
    """Gives the states of a micro-batch of one set of documents."""

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Alignment]:
        """States (P, D) and their alignment, on the base's device. An empty batch has no targets."""
        ...


@dataclass(frozen=True)
class LiveStates:
    """Runs the base on every micro-batch."""

    base: CausalLM
    documents: Documents
    num_heads: int
    column_of: Tensor | None = None
    layers: tuple[int, ...] = ()

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Alignment]:
        device, size = self.base.device, states_width(self.base, self.layers)
        if not batch:
            return torch.zeros(0, size, device=device), no_targets(self.num_heads).to(device)
        padded = collate(self.documents, batch)
        states = frozen_states(self.base, padded, self.layers)
        return states.reshape(-1, size), padded.aligned(self.num_heads, self.column_of).to(device)


@dataclass(frozen=True)
class LiveFeatures:
    """What an EAGLE-style head reads, from the base: whole rows, since its entries attend to all before."""

    base: CausalLM
    documents: Documents
    num_heads: int
    column_of: Tensor | None = None

    def __call__(self, batch: MicroBatch) -> tuple[FeatureBatch, Alignment]:
        """Rows and their alignment, on the base's device. An empty batch has one token and no targets."""
        device = self.base.device
        padded = collate(self.documents, batch) if batch else one_token()
        # What a row's last entry joins is never read.
        following = padded.input_ids.roll(-1, dims=1).to(device)
        with torch.no_grad():
            next_embeddings = self.base.get_input_embeddings()(following)
        features = FeatureBatch(self.states(batch, padded), next_embeddings, padded.positions.to(device))
        return features, padded.aligned(self.num_heads, self.column_of).to(device)

    def states(self, batch: MicroBatch, padded: PaddedBatch) -> Tensor:
        """The base's states (B, T, D) of a micro-batch, empty or not."""
        return frozen_states(self.base, padded)


def one_token() -> PaddedBatch:
    """A micro-batch of a process that has nothing to do: no targets."""
    nothing = torch.zeros(1, 1, dtype=torch.long)
    return PaddedBatch(nothing, nothing, nothing.bool())


def frozen_states(base: CausalLM, padded: PaddedBatch, layers: tuple[int, ...] = ()) -> Tensor:
    """States (B, T, (1 + L) * D) of a micro-batch, without gradients."""
    ids, positions = padded.input_ids.to(base.device), padded.positions.to(base.device)
    with torch.no_grad():
        return hidden_states(base, ids, position_ids=positions, layers=layers)


def states_width(base: CausalLM, layers: tuple[int, ...]) -> int:
    """(1 + L) * D: the numbers of one token's states."""
    return (1 + len(layers)) * hidden_size(base)


def no_targets(num_heads: int) -> Alignment:
    nothing = torch.zeros(0, dtype=torch.long)
    return align(nothing, nothing.bool(), nothing, num_heads)
