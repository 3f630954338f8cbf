"""The loss of an EAGLE-style head, unrolled as far as it will draft.

    L = sum over depths d of (sum over targets of w_d * (f * smooth_l1_d + loss_d)) / num_scored_d

At depth d the head has predicted d features, each but the first from its own last prediction and the
text's own token. ``smooth_l1_d`` compares the last of them with the base's true feature, averaged over
dimensions, each in units of its size; ``loss_d`` is the objective on its unembedding, KL to the base's own
distribution for EAGLE's recipe (arXiv 2401.15077, section 3.2: the two weigh 1 to 0.1, f = 10). The paper
trains depth 1 alone and adds noise to the features; here the head meets its own errors instead.

Only label tokens are targets. A depth's predictions keep their graph through the one layer; their logits
are made, scored and dropped block by block, as in ``loss.py``. The weights w_d are those of
``depth_weights.py``: a draft starts at one feature, as Medusa heads start at one state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.heads.eagle import EagleHead, drafted_features
from medusa.training.losses.alignment import Alignment
from medusa.training.losses.fused_blocks import FusedBlocks
from medusa.training.losses.loss import LossOptions, LossSums, TargetBlock, Teacher, probability_of
from medusa.training.losses.objectives import TeacherRows, objective_named


class FeatureBatch(NamedTuple):
    """Whole rows of a micro-batch, as the head reads them."""

    features: Tensor  # (B, T, D)
    next_embeddings: Tensor  # (B, T, D); of the token after each
    positions: Tensor  # (B, T) long; from 0 at the start of each document


class EagleLoss(nn.Module):
    """The head and its loss: the module that a trainer wraps and optimises."""

    def __init__(self, head: EagleHead, options: LossOptions):
        super().__init__()
        self.head = head
        self.options = options

    def forward(
        self,
        batch: FeatureBatch,
        alignment: Alignment,
        output_embedding: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, LossSums]:
        """The weighted loss, a scalar, and its sums; gradients reach the head's parameters only.

        Args:
            alignment: its sources count the B * T positions of ``batch`` row by row.
            output_embedding: the base's; never trained here.
            num_scored: (K,) targets of the whole optimisation step, all micro-batches and processes.
            teacher: needed by every objective but "ce".
        """
        teacher = self.options.checked_teacher(teacher)
        truth = batch.features.flatten(0, 1)[alignment.sources[0]]  # (S, D); unembedded, the target's row
        # The entry that ends at the token before the target is the one that depth 1 predicts it from.
        entries = alignment.sources[1].clamp(min=0)
        predicted = torch.stack(
            [each.flatten(0, 1)[entries] for each in drafted_features(self.head, *batch)]
        )  # (K, S, D)
        work = _Work(self.head, self.options, alignment, output_embedding, num_scored, teacher, truth)
        work.weigh(predicted.detach(), batch.positions.numel())
        loss = FusedBlocks.apply(work, predicted)
        regression = self.options.feature_weight * self._regression(predicted, truth)  # (K, S)
        regression = regression.masked_fill(~work.is_scored, 0.0)
        weighted = (work.weights * regression).sum(1)
        sums = work.sums._replace(
            loss=work.sums.loss + regression.detach().sum(1),
            weighted=work.sums.weighted + weighted.detach(),
            num_labels=work.sums.num_scored + alignment.num_unmapped,
        )
        return loss + (weighted / num_scored.clamp(min=1)).sum(), sums

    def _regression(self, predicted: Tensor, truth: Tensor) -> Tensor:
        """(K, S): how far predicted features (K, S, D) are from the true ones (S, D)."""
        scale = self.head.feature_scale
        ours, theirs = predicted.float() / scale, (truth.float() / scale).expand_as(predicted)
        return F.smooth_l1_loss(ours, theirs, reduction="none").mean(-1)


class _Work:
    """One pass over all blocks of logits of one micro-batch."""

    def __init__(
        self,
        head: EagleHead,
        options: LossOptions,
        alignment: Alignment,
        output_embedding: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None,
        truth: Tensor,
    ):
        self.columns, self.is_scored = alignment.columns, alignment.sources[1:] >= 0  # (S,), (K, S)
        self.options, self.alignment, self.num_scored = options, alignment, num_scored
        self.head, self.output_embedding = head, output_embedding
        self.teacher, self.truth = teacher, truth
        self.objective = objective_named(options.objective, options.kl_weight)
        size = max(1, options.block_elements // (head.config.token_map_size or head.config.vocab_size))
        self.blocks = [slice(start, start + size) for start in range(0, len(self.columns), size)]
        self.sums = LossSums.zeros(len(num_scored), num_scored.device)
        self.weights = torch.empty(0)  # (K, S), once weighed

    def weigh(self, predicted: Tensor, num_states: int) -> None:
        """Find the weights of all targets, given predicted features (K, S, D) from ``num_states`` starts."""
        self.weights = self.options.target_weights(
            self.alignment, num_states, lambda: self._confidence(predicted)
        )

    def _confidence(self, predicted: Tensor) -> Tensor:
        """(K, S): the probability that each depth gives each target."""
        found = torch.zeros(predicted.shape[:2], device=predicted.device)
        with torch.no_grad():
            for block in self.blocks:
                for index, states in enumerate(predicted[:, block]):
                    logits = self.head.unembedded(states, self.output_embedding)
                    found[index, block] = probability_of(logits, self.columns[block])
        return found

    def run(self, predicted: Tensor, gradient: Tensor | None) -> Tensor:
        """The weighted loss of predicted (K, S, D) as a scalar (); fills ``gradient``, alike, when wanted."""
        for block in self.blocks:
            teacher_rows = self._teacher_rows(block)
            for index in range(len(predicted)):
                with torch.set_grad_enabled(gradient is not None):
                    states = predicted[index, block].detach().requires_grad_(gradient is not None)
                    logits = self.head.unembedded(states, self.output_embedding)  # (C, V')
                of_logits = self._count(index, block, logits, teacher_rows)
                if gradient is not None:
                    gradient[index, block] = torch.autograd.grad(logits, states, of_logits)[0]
        return self.sums.objective(self.num_scored)

    def _teacher_rows(self, block: slice) -> TeacherRows | None:
        """The base's own rows for the targets of a block: the same at every depth."""
        if self.teacher is None:
            return None
        with torch.no_grad():
            return TeacherRows.of_logits(self.teacher(self.truth[block]))

    def _count(self, index: int, block: slice, logits: Tensor, teacher_rows: TeacherRows | None) -> Tensor:
        """Add a block of depth ``index`` + 1 to the sums; the gradient of its weighted loss, (C, V)."""
        weights = self.weights[index, block]
        targets = TargetBlock(self.columns[block], self.is_scored[index, block], weights, teacher_rows)
        gradient = self.sums.add_block(index, logits, targets, self.objective)
        return gradient.mul_((weights / self.num_scored[index].clamp(min=1))[:, None]).to(logits.dtype)
