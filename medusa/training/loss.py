"""The loss of all heads, with memory flat in the number of heads and in the vocabulary.

    L = sum over depths k of decay^k * (sum over targets of loss_k) / num_scored_k

which is eq. 1 of arXiv 2401.10774, averaged over targets.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa.heads import MedusaHeads
from medusa.training.alignment import Alignment
from medusa.training.objectives import (
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
    decay: float = 0.8
    block_elements: int = 2**24
    """Logits held at a time; C = block_elements / V' targets."""
    feature_weight: float = 10.0
    """EAGLE-style heads only: weight of the regression on the base's features beside the objective."""

    def __post_init__(self) -> None:
        objective_named(self.objective, self.kl_weight)
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")
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

    def depth_weights(self, num_scored: Tensor) -> Tensor:
        """(K,): what the loss of one target of each depth counts, given all targets (K,) of the step."""
        depths = torch.arange(1, len(num_scored) + 1, device=num_scored.device)
        return self.decay**depths / num_scored.clamp(min=1)


class LossSums(NamedTuple):
    """Sums over targets by depth, (K,) each; they add up over blocks, micro-batches and processes."""

    loss: Tensor
    top1: Tensor  # long; targets that were the head's first guess
    top5: Tensor  # long; among its first five
    num_labels: Tensor  # long; targets, those without a column included: what a hit rate divides by
    num_scored: Tensor  # long; targets with a column: what the loss divides by

    @classmethod
    def zeros(cls, num_heads: int, device: torch.device | str = "cpu") -> LossSums:
        counts = (torch.zeros(num_heads, dtype=torch.long, device=device) for _ in range(4))
        return cls(torch.zeros(num_heads, device=device), *counts)

    def plus(self, other: LossSums) -> LossSums:
        return LossSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def add_block(
        self,
        index: int,
        logits: Tensor,
        columns: Tensor,
        is_scored: Tensor,
        objective: Objective,
        teacher_rows: TeacherRows | None,
    ) -> Tensor:
        """Count a block of logits (C, V') of depth ``index`` + 1, in place; the gradient of each row's loss.

        columns (C,) long are the targets; rows that ``is_scored`` (C,) bool leaves out are not counted.
        The gradient is with respect to the logits, (C, V').
        """
        log_q = logits.detach().float().log_softmax(-1)
        is_as_good = log_q >= log_q.gather(1, columns[:, None])  # (C, V); a tie counts against the head
        num_better = is_as_good.sum(-1, dtype=torch.int32) - 1  # int64 sums of booleans are ten times slower
        loss, gradient = objective(log_q, columns, teacher_rows)
        self.loss[index] += loss.masked_fill(~is_scored, 0.0).sum()
        self.top1[index] += (is_scored & (num_better < 1)).sum()
        self.top5[index] += (is_scored & (num_better < 5)).sum()
        self.num_scored[index] += is_scored.sum()
        return gradient


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
            hidden: (P, D) states that ``alignment`` points into; gradients reach it when it wants them.
            output_embedding: the base's; never trained here.
            num_scored: (K,) targets of the whole optimisation step, all micro-batches and processes.
            teacher: needed by every objective but "ce".
        """
        teacher = self.options.checked_teacher(teacher)
        weights = self.options.depth_weights(num_scored)
        work = _Work(self, alignment, output_embedding, weights, teacher)
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
        weights: Tensor,
        teacher: Teacher | None,
    ):
        self.heads, self.options = module.heads, module.options
        self.alignment, self.output_embedding, self.weights = alignment, output_embedding, weights
        self.teacher = teacher
        self.objective = objective_named(self.options.objective, self.options.kl_weight)
        self.sums = LossSums.zeros(self.heads.num_heads, weights.device)

    def run(self, hidden: Tensor, gradients: _Gradients | None = None) -> Tensor:
        """The weighted loss as a scalar (); adds to ``gradients`` when they are wanted."""
        config = self.heads.config
        size = max(1, self.options.block_elements // (config.token_map_size or config.vocab_size))
        num_targets = len(self.alignment.columns)
        for start in range(0, num_targets, size):
            block = slice(start, min(start + size, num_targets))
            teacher_rows = self._teacher_rows(hidden, block)
            for index in range(self.heads.num_heads):
                self._add_block(index, block, hidden, teacher_rows, gradients)
        self.sums = self.sums._replace(num_labels=self.sums.num_scored + self.alignment.num_unmapped)
        return (self.sums.loss * self.weights).sum()

    def _teacher_rows(self, hidden: Tensor, block: slice) -> TeacherRows | None:
        """The base's own rows for the targets of a block: the same for every head."""
        if self.teacher is None:
            return None
        with torch.no_grad():
            return TeacherRows.of_logits(self.teacher(hidden[self.alignment.sources[0, block]]))

    def _add_block(
        self,
        index: int,
        block: slice,
        hidden: Tensor,
        teacher_rows: TeacherRows | None,
        gradients: _Gradients | None,
    ) -> None:
        sources, columns = self.alignment.sources[index + 1, block], self.alignment.columns[block]
        is_scored = sources >= 0  # false for the first tokens of a document only
        states = hidden.detach()[sources.clamp(min=0)]  # (C, D)
        with torch.set_grad_enabled(gradients is not None):
            if gradients is not None and gradients.hidden is not None:
                states.requires_grad_()
            logits = self.heads.logits_of(index, states, self.output_embedding)  # (C, V')
        gradient = self.sums.add_block(index, logits, columns, is_scored, self.objective, teacher_rows)
        if gradients is not None:
            gradient.mul_((self.weights[index] * is_scored)[:, None])
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
