"""What losses read of a micro-batch: tokens, and the base's hidden states, computed now or stored before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.training.data.batching import MicroBatch, PaddedBatch, collate
from medusa.training.data.dataset import Documents
from medusa.training.losses.targets import Alignment
from medusa.training.states.base import LiveStates
from medusa.training.states.stored import StoredStates


@dataclass(frozen=True)
class BaseStates:
    """The base model of a run, and where its hidden states come from."""

    base: CausalLM
    """All that training reads beside states: without decoder layers where others compute these."""
    live: LiveStates
    stored: Mapping[str, StoredStates] = field(default_factory=dict)
    """Of the "training" and the "held-out" documents, where they are stored."""

    @classmethod
    def of(cls, base: CausalLM) -> BaseStates:
        """Those of a base that this process runs alone."""
        return cls(base, LiveStates(base))

    def of_document(self, documents: Documents, name: str, index: int, layers: tuple[int, ...]) -> Tensor:
        """The states (T, (1 + L) * D) of one of the ``documents`` that are called ``name``; stored ones are
        zeros where none are kept."""
        if (stored := self.stored.get(name)) is not None:
            return stored.row(index)
        return self.live(collate(documents, [[index]]), layers)[0]


class StateBatch(NamedTuple):
    """Rows of a micro-batch, as heads read them."""

    hidden: Tensor  # (B, T, (1 + L) * D); zeros where no state is kept
    next_tokens: Tensor  # (B, T) long; the token after each
    positions: Tensor  # (B, T) long; from 0 at the start of each document


@dataclass(frozen=True)
class Feed:
    """Gives what a loss reads of micro-batches of ``documents``."""

    states: BaseStates
    documents: Documents
    name: str
    """Under which their states are stored, if at all."""
    num_heads: int
    column_of: Tensor | None = None
    """(V,) long, each token's logits column; None: the token id."""
    layers: tuple[int, ...] = ()
    """Whose states heads fuse with the last."""

    def __call__(self, batch: MicroBatch) -> tuple[Any, Alignment]:
        """What the loss reads, and the alignment with it, which counts the B * T positions row by row; on the
        base's device. An empty micro-batch is one token without targets."""
        base, padded = self.states.base, collate(self.documents, batch)
        if (stored := self.states.stored.get(self.name)) is None:
            hidden = self.states.live(padded, self.layers)
        else:
            hidden = _padded_states(stored, batch, padded)
        # What a row's last state joins is never read.
        following = padded.input_ids.roll(-1, dims=1).to(base.device)
        rows = StateBatch(hidden.to(base.device, base.dtype), following, padded.positions.to(base.device))
        return rows, self.aligned(padded)

    def aligned(self, padded: PaddedBatch) -> Alignment:
        """The targets of the heads in a micro-batch."""
        return padded.aligned(self.num_heads, self.column_of).to(self.states.base.device)


def _padded_states(stored: StoredStates, batch: MicroBatch, padded: PaddedBatch) -> Tensor:
    """The stored states (B, T, (1 + L) * D) of a micro-batch, empty or not."""
    states = torch.zeros(*padded.input_ids.shape, stored.size, dtype=stored.dtype)
    for row, indices in zip(states, batch, strict=False):
        needed = np.concatenate([stored.needed[stored.span(index)] for index in indices])
        row[: len(needed)][torch.from_numpy(needed)] = stored.of(indices)
    return states
