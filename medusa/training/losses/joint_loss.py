"""The loss of heads and adapter together, in two stages.

    first    L = lambda_0 * L_heads              the base as it was, no gradient beyond the heads
    then     L = L_base + lambda_0 * L_heads     arXiv 2401.10774, section 2.2.2

L_heads is ``loss.py``'s, L_base ``base_loss.py``'s. lambda_0 stands in the first stage too, so that the
second moments of the optimiser are of one scale throughout. The base runs once in the first stage, and in
the second once with the adapter and, for self-distillation, once without: there is one base in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, hidden_states
from medusa.training.data.batching import MicroBatch, collate
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import Alignment
from medusa.training.losses.base_loss import BaseLoss, BaseSums, BaseTargets
from medusa.training.losses.loss import HeadsLoss, LossSums, Teacher
from medusa.training.run.lora import TrainedAdapter
from medusa.training.states.hidden_source import one_token


class JointBatch(NamedTuple):
    """A micro-batch as the base reads it, and what its own row is measured on."""

    input_ids: Tensor  # (B, T) long
    positions: Tensor  # (B, T) long
    targets: BaseTargets  # sources count the B * T positions row by row


class JointSums(NamedTuple):
    """What a micro-batch, or many, came to."""

    heads: LossSums
    base: BaseSums

    @classmethod
    def zeros(cls, num_heads: int, device: torch.device | str = "cpu") -> JointSums:
        return cls(LossSums.zeros(num_heads, device), BaseSums.zeros(device))

    def plus(self, other: JointSums) -> JointSums:
        return JointSums(self.heads.plus(other.heads), self.base.plus(other.base))


class JointRows:
    """Gives micro-batches of one set of documents as :class:`JointLoss` reads them."""

    def __init__(self, base: CausalLM, documents: Documents, num_heads: int, column_of: Tensor | None):
        self.base, self.documents = base, documents
        self.num_heads, self.column_of = num_heads, column_of

    def __call__(self, batch: MicroBatch) -> tuple[JointBatch, Alignment]:
        """On the base's device. An empty batch is one token without targets, so that gradients are zeros."""
        device = self.base.device
        padded = collate(self.documents, batch) if batch else one_token()
        alignment = padded.aligned(self.num_heads, self.column_of)
        own = padded.aligned(num_heads=0)  # the base has a column for every token
        targets = BaseTargets(own.sources[0].to(device), own.columns.to(device))
        rows = JointBatch(padded.input_ids.to(device), padded.positions.to(device), targets)
        return rows, alignment.to(device)


class JointLoss(nn.Module):
    """Heads, adapter and their loss: the module that a trainer wraps and optimises.

    The base is no part of it: neither its weights nor its buffers are moved, synchronised or saved with it.
    """

    def __init__(self, heads_loss: HeadsLoss, adapter: TrainedAdapter, base_loss: BaseLoss, lambda_0: float):
        super().__init__()
        self.heads_loss = heads_loss
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): each for name, each in adapter.parameters.items()}
        )
        self.is_joint = False
        """Which stage this is; measuring, without gradients, is the same in both."""
        self._adapted = adapter
        self._base_loss, self._lambda_0 = base_loss, lambda_0
        self._layers, self._size = heads_loss.heads.reads_layers, heads_loss.heads.config.hidden_size

    def forward(
        self,
        rows: JointBatch,
        alignment: Alignment,
        output_embedding: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, JointSums]:
        """The loss, a scalar, and its sums; gradients reach heads and adapter, of the second stage only.

        Args:
            alignment: its sources count the B * T positions of ``rows`` row by row.
            output_embedding: the base's; never trained here.
            num_scored: (K + 1,) targets of the whole optimisation step, those of the base's own row first.
            teacher: needed by every objective of the heads but "ce". The adapted base is the heads'
                teacher: its text is what they have to guess.
        """
        is_measuring = not torch.is_grad_enabled()
        if not self.is_joint and not is_measuring:
            hidden = self._without_adapter(rows)
            loss, sums = self.heads_loss(hidden, alignment, output_embedding, num_scored[1:], teacher)
            loss = self._lambda_0 * loss + 0 * sum(each.sum() for each in self.adapter.values())
            return loss, JointSums(sums, BaseSums.zeros(hidden.device))
        is_compared = is_measuring or self._base_loss.needs_reference
        reference = self._without_adapter(rows) if is_compared else None
        hidden = self._with_adapter(rows)
        heads_loss, sums = self.heads_loss(hidden, alignment, output_embedding, num_scored[1:], teacher)
        own = (hidden[:, : self._size], None if reference is None else reference[:, : self._size])
        base_loss, base_sums = self._base_loss(*own, rows.targets, num_scored[0])
        return base_loss + self._lambda_0 * heads_loss, JointSums(sums, base_sums)

    def _with_adapter(self, rows: JointBatch) -> Tensor:
        """States (P, (1 + L) * D) of the adapted base."""
        if not torch.is_grad_enabled():
            return self._states(rows)
        with self._adapted.dropping_out():
            return self._states(rows)

    def _without_adapter(self, rows: JointBatch) -> Tensor:
        """States (P, (1 + L) * D) of the base as it was, without gradients."""
        with torch.no_grad(), self._adapted.switched_off():
            return self._states(rows)

    def _states(self, rows: JointBatch) -> Tensor:
        base = self._adapted.base
        states = hidden_states(base, rows.input_ids, position_ids=rows.positions, layers=self._layers)
        return states.flatten(0, 1)
