"""The loss of all heads, with memory flat in the number of heads and in the vocabulary.

    L = sum over depths k of (sum over targets of w_k * loss_k) / num_scored_k

With w_k = decay^k this is eq. 1 of arXiv 2401.10774, averaged over targets; ``depth_weights.py`` has the
weights. Those of D-PACE need what all heads think of a path before the first gradient, so the logits are then
made twice, and still never more than one block of them is held.

Heads are taken one by one and targets block by block: forward, loss and backward of one block of logits
(C, V) happen before the next exists, residual blocks included, and only parameter gradients stay. To
autograd (and to whatever wraps the module: DDP, accelerate) it is one function of the hidden states and
the parameters.

``num_scored`` is given from outside, so that micro-batches and processes add up to exactly the gradient
of the joined batch. Sums and counts come back, never means, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from medusa.heads.medusa_heads import MedusaHeads
from medusa.training.losses.alignment import Alignment
from medusa.training.losses.depth_weights import DepthWeighting, acceptance_weights, decay_weights
from medusa.training.losses.objectives import (
    Objective,
    ObjectiveName,
    TeacherRows,
    needs_teacher,
    objective_named,
)

Teacher = Callable[[Tensor], Tensor]
"""Hidden states (C, D) -> the base's own logits (C, V') in the heads' columns."""


@dataclass(frozen=True)
class LossOptions:
    """What is minimised."""

    objective: ObjectiveName = "ce"
    kl_weight: float = 0.5
    depth_weighting: DepthWeighting = "decay"
    decay: float = 0.8
    dpace_smoothing: float = 0.5
    block_elements: int = 2**24
    """Logits held at a time; C = block_elements / V' targets."""
    feature_weight: float = 10.0
    """EAGLE-style heads only: weight of the regression on the base's features beside the objective."""

    def __post_init__(self) -> None:
        objective_named(self.objective, self.kl_weight)
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")
        if self.depth_weighting not in get_args(DepthWeighting):
            raise ValueError(
                f"depth_weighting must be one of {get_args(DepthWeighting)}, got {self.depth_weighting!r}"
            )
        if not 0 <= self.dpace_smoothing <= 1:
            raise ValueError(f"dpace_smoothing must be in [0, 1], got {self.dpace_smoothing}")
        if self.block_elements < 1:
            raise ValueError(f"block_elements must be at least 1, got {self.block_elements}")
        if self.feature_weight < 0:
            raise ValueError(f"feature_weight must be at least 0, got {self.feature_weight}")

    def checked_teacher(self, teacher: Teacher | None) -> Teacher | None:
        """``teacher`` where the objective needs one, which must then be there."""
        if not needs_teacher(self.objective):
            return None
        if teacher is None:
            raise ValueError(f"objective {self.objective!r} needs the base's logits: pass teacher")
        return teacher

    def target_weights(
        self, alignment: Alignment, num_states: int, confidence: Callable[[], Tensor]
    ) -> Tensor:
        """(K, S): what the loss of each target counts at each depth, 0 where it has no source.

        ``confidence`` gives the probabilities (K, S) of the targets; it is called when they are needed.
        """
        if self.depth_weighting == "decay":
            return decay_weights(alignment, self.decay)
        return acceptance_weights(confidence(), alignment, num_states, self.dpace_smoothing)


class TargetBlock(NamedTuple):
    """Some of the targets, as one depth sees them."""

    columns: Tensor  # (C,) long
    is_scored: Tensor  # (C,) bool; false where the depth has no source for the target
    weights: Tensor  # (C,)
    teacher_rows: TeacherRows | None


class LossSums(NamedTuple):
    """Sums over targets by depth, (K,) each; they add up over blocks, micro-batches and processes."""

    loss: Tensor
    weighted: Tensor  # what is minimised: each loss times the weight of its target
    top1: Tensor  # long; targets that were the head's first guess
    top5: Tensor  # long; among its first five
    num_labels: Tensor  # long; targets, those without a column included: what a hit rate divides by
    num_scored: Tensor  # long; targets with a column: what the loss divides by

    @classmethod
    def zeros(cls, num_heads: int, device: torch.device | str = "cpu") -> LossSums:
        counts = (torch.zeros(num_heads, dtype=torch.long, device=device) for _ in range(4))
        sums = (torch.zeros(num_heads, device=device) for _ in range(2))
        return cls(*sums, *counts)

    def plus(self, other: LossSums) -> LossSums:
        return LossSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def objective(self, num_scored: Tensor) -> Tensor:
        """The weighted loss, a scalar, where ``num_scored`` (K,) targets are scored in all."""
        return (self.weighted / num_scored.clamp(min=1)).sum()

    def add_block(self, index: int, logits: Tensor, targets: TargetBlock, objective: Objective) -> Tensor:
        """Count a block of logits (C, V') of depth ``index`` + 1, in place; the gradient of each row's loss.

        Rows that are not scored are not counted. The gradient is with respect to the logits, (C, V'), and
        unweighted.
        """
        log_q = logits.detach().float().log_softmax(-1)
        is_as_good = log_q >= log_q.gather(1, targets.columns[:, None])  # (C, V); a tie counts as a miss
        num_better = is_as_good.sum(-1, dtype=torch.int32) - 1  # int64 sums of booleans are ten times slower
        loss, gradient = objective(log_q, targets.columns, targets.teacher_rows)
        loss = loss.masked_fill(~targets.is_scored, 0.0)
        self.loss[index] += loss.sum()
        self.weighted[index] += (loss * targets.weights).sum()
        self.top1[index] += (targets.is_scored & (num_better < 1)).sum()
        self.top5[index] += (targets.is_scored & (num_better < 5)).sum()
        self.num_scored[index] += targets.is_scored.sum()
        return gradient


def probability_of(logits: Tensor, columns: Tensor) -> Tensor:
    """(C,): the probability of column ``columns`` (C,) long under each row of logits (C, V')."""
    logits = logits.float()
    return (logits.gather(1, columns[:, None])[:, 0] - logits.logsumexp(-1)).exp()


class HeadsLoss(nn.Module):
    """The heads and their loss: the module that a trainer wraps and optimises."""

    def __init__(self, heads: MedusaHeads, options: LossOptions):
        super().__init__()
        self.heads = heads
        self.options = options

    def forward(
        self,
        hidden: Tensor,
        alignment: Alignment,
        output_embedding: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None = None,
    ) -> tuple[Tensor, LossSums]:
        """The weighted loss, a scalar, and its sums.

        Args:
            hidden: (P, (1 + L) * D) states that ``alignment`` points into, the last one first, then those of
                the layers that the heads fuse; gradients reach it when it wants them.
            output_embedding: the base's; never trained here.
            num_scored: (K,) targets of the whole optimisation step, all micro-batches and processes.
            teacher: needed by every objective but "ce".
        """
        teacher = self.options.checked_teacher(teacher)
        last = hidden.detach()[:, : self.heads.config.hidden_size]
        work = _Work(self, alignment, output_embedding, num_scored, teacher, last)
        hidden = self.heads.fuse(hidden)
        parameters = list(self.heads.parameters())
        loss = _FusedLoss.apply(work, hidden, *parameters) if torch.is_grad_enabled() else work.run(hidden)
        return loss, work.sums


class _Work:
    """One pass over all blocks of one micro-batch."""

    def __init__(
        self,
        module: HeadsLoss,
        alignment: Alignment,
        output_embedding: nn.Module,
        num_scored: Tensor,
        teacher: Teacher | None,
        last: Tensor,
    ):
        self.last = last  # (P, D): what the base's own rows are made of
        self.heads, self.options = module.heads, module.options
        self.alignment, self.output_embedding, self.num_scored = alignment, output_embedding, num_scored
        self.teacher = teacher
        self.objective = objective_named(self.options.objective, self.options.kl_weight)
        self.sums = LossSums.zeros(self.heads.num_heads, num_scored.device)
        config = self.heads.config
        size = max(1, self.options.block_elements // (config.token_map_size or config.vocab_size))
        num_targets = len(alignment.columns)
        self.blocks = [slice(start, start + size) for start in range(0, num_targets, size)]

    def run(self, hidden: Tensor, gradients: _Gradients | None = None) -> Tensor:
        """The weighted loss as a scalar (); adds to ``gradients`` when they are wanted."""
        weights = self.options.target_weights(self.alignment, len(hidden), lambda: self._confidence(hidden))
        for block in self.blocks:
            teacher_rows = self._teacher_rows(block)
            for index in range(self.heads.num_heads):
                is_scored = self.alignment.sources[index + 1, block] >= 0
                columns = self.alignment.columns[block]
                targets = TargetBlock(columns, is_scored, weights[index, block], teacher_rows)
                self._add_block(index, block, hidden, targets, gradients)
        self.sums = self.sums._replace(num_labels=self.sums.num_scored + self.alignment.num_unmapped)
        return self.sums.objective(self.num_scored)

    def _confidence(self, hidden: Tensor) -> Tensor:
        """(K, S): the probability that each head gives each target."""
        found = torch.zeros(self.heads.num_heads, len(self.alignment.columns), device=hidden.device)
        with torch.no_grad():
            for block in self.blocks:
                for index in range(self.heads.num_heads):
                    logits = self._logits(index, block, self._states(index, block, hidden))
                    found[index, block] = probability_of(logits, self.alignment.columns[block])
        return found

    def _states(self, index: int, block: slice, hidden: Tensor) -> Tensor:
        """What the head at ``index`` predicts a block's targets from, (C, D)."""
        return hidden.detach()[self.alignment.sources[index + 1, block].clamp(min=0)]

    def _logits(self, index: int, block: slice, states: Tensor) -> Tensor:
        """What the head at ``index`` says of a block's targets, given its states (C, D): logits (C, V')."""
        path = self.alignment.path(index + 1, block) if self.heads.config.reads_path else None
        return self.heads.logits_of(index, states, self.output_embedding, path)

    def _teacher_rows(self, block: slice) -> TeacherRows | None:
        """The base's own rows for the targets of a block: the same for every head."""
        if self.teacher is None:
            return None
        with torch.no_grad():
            return TeacherRows.of_logits(self.teacher(self.last[self.alignment.sources[0, block]]))

    def _add_block(
        self,
        index: int,
        block: slice,
        hidden: Tensor,
        targets: TargetBlock,
        gradients: _Gradients | None,
    ) -> None:
        states = self._states(index, block, hidden)
        with torch.set_grad_enabled(gradients is not None):
            if gradients is not None and gradients.hidden is not None:
                states.requires_grad_()
            logits = self._logits(index, block, states)
        gradient = self.sums.add_block(index, logits, targets, self.objective)
        if gradients is not None:
            gradient.mul_((targets.weights / self.num_scored[index].clamp(min=1))[:, None])
            sources = self.alignment.sources[index + 1, block]
            gradients.add(index, logits, gradient.to(logits.dtype), states, sources)


class _Gradients:
    """Where the gradients of one micro-batch add up."""

    def __init__(self, heads: MedusaHeads, hidden: Tensor | None):
        self.heads = heads
        self.of: dict[Tensor, Tensor] = {
            each: torch.zeros_like(each) for each in heads.parameters() if each.requires_grad
        }
        self.hidden = None if hidden is None else torch.zeros_like(hidden)

    def add(self, index: int, logits: Tensor, gradient: Tensor, states: Tensor, sources: Tensor) -> None:
        """Backward from the logits (C, V') of one head with their gradient (C, V')."""
        wanted: list[Tensor] = [each for each in self.heads.parameters_of(index) if each.requires_grad]
        inputs = wanted if self.hidden is None else [*wanted, states]
        found = torch.autograd.grad(logits, inputs, gradient)
        for each, part in zip(wanted, found, strict=False):
            self.of[each] += part
        if self.hidden is not None:
            self.hidden.index_add_(0, sources.clamp(min=0), found[-1].to(self.hidden.dtype))


class _FusedLoss(torch.autograd.Function):
    """The weighted loss with its gradients found on the way forward; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, work: _Work, hidden: Tensor, *parameters: Tensor) -> Tensor:
        gradients = _Gradients(work.heads, hidden if ctx.needs_input_grad[1] else None)
        loss = work.run(hidden, gradients)
        ctx.save_for_backward(gradients.hidden, *(gradients.of.get(each) for each in parameters))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(None if each is None else each * upstream for each in ctx.saved_tensors))
