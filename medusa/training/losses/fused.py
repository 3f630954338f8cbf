"""The loss of many targets at several depths, with memory flat in the targets, the depths and the vocabulary.

    L = sum over depths d of (sum over targets of w_d * loss_d) / num_scored_d

Depths are taken one by one and targets block by block: forward, loss and backward of one block of logits
(C, V) happen before the next block exists, and only the gradients stay. To autograd (and to whatever wraps
the module: DDP, accelerate) it is one function of the hidden states and the parameters.

Where processes split the heads among them, all blocks of one depth come before those of the next, so that one
head is whole at a time. The teacher then sees each block once for each depth.

``num_scored`` is given from outside, so that micro-batches and processes add up to exactly the gradient
of the joined batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa.training.losses.alignment import Alignment
from medusa.training.losses.objectives import Objective, ObjectiveName, needs_teacher
from medusa.training.losses.split_heads import SplitHeads
from medusa.training.losses.sums import LossSums
from medusa.training.losses.teacher import Teacher, TeacherRows

TILE_ELEMENTS = 2**18
"""Logits that a CPU counts at a time: what it makes of them stays in its caches."""


class TargetBlock(NamedTuple):
    """C of the targets, as one depth sees them."""

    columns: Tensor  # (C,) long
    is_scored: Tensor  # (C,) bool; false where the depth has no state to predict the target from
    weights: Tensor  # (C,)
    teacher_rows: TeacherRows | None

    def part(self, rows: slice) -> TargetBlock:
        """Some of them."""
        teacher_rows = None if self.teacher_rows is None else self.teacher_rows.part(rows)
        return TargetBlock(self.columns[rows], self.is_scored[rows], self.weights[rows], teacher_rows)


@dataclass(kw_only=True)
class FusedLoss:
    """One pass over the targets of one micro-batch. S targets, K depths, P states."""

    columns: Tensor
    """(S,) long: the logits column of each target."""
    sources: Tensor
    """(K, S) long: the state that each depth predicts each target from; -1 where there is none."""
    weights: Tensor
    """(K, S)."""
    num_scored: Tensor
    """(K,) targets of the whole optimisation step, all micro-batches and processes."""
    objective: Objective
    block_elements: int
    """Logits held at a time."""
    num_columns: int
    """V'; the logits of C = block_elements / V' targets are held at a time, of one at least."""
    logits_of: Callable[[int, slice, Tensor], Tensor]
    """(depth from 0, block of targets, states (C, D)) -> logits (C, V')."""
    parameters_of: Callable[[int], Sequence[nn.Parameter]] = lambda index: ()
    """The parameters that ``logits_of`` reads at a depth."""
    teacher: Teacher | None = None
    teacher_states: Callable[[slice], Tensor] | None = None
    """A block of targets -> the states (C, D) from which the base itself predicts them."""
    split: SplitHeads | None = None
    """Whose parameters ``logits_of`` reads, where processes share them out."""
    observe: Callable[[Tensor, TargetBlock], None] | None = None
    """Sees log q (C, V') and the targets of every block."""
    sums: LossSums = field(init=False)
    """What was counted so far; ``num_labels`` is the caller's to fill."""

    def __post_init__(self) -> None:
        self.sums = LossSums.zeros(len(self.sources), self.columns.device)
        self._block_size = max(1, self.block_elements // self.num_columns)

    def __call__(self, states: Tensor, parameters: Sequence[nn.Parameter] = ()) -> Tensor:
        """The loss, a scalar; gradients reach states (P, D) and ``parameters`` where autograd wants them."""
        if torch.is_grad_enabled():
            return _Function.apply(self, states, *parameters)
        return self.run(states, {})

    def run(self, states: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor:
        """The loss of states (P, D); adds to ``gradients``, a tensor for each input that wants one."""
        depths = range(len(self.sources))
        if self.split is None:
            self._add(depths, states, gradients)
        else:
            for index in depths:
                self._add_alone(self.split, index, states, gradients)
        return self.sums.objective(self.num_scored)

    def _add_alone(
        self, split: SplitHeads, index: int, states: Tensor, gradients: dict[Tensor, Tensor]
    ) -> None:
        """What :meth:`_add` does, for one depth of heads that are split; nothing whole outlives the call."""
        with split.whole(index, gradients) as inside:
            self._add(range(index, index + 1), states, inside)

    def _add(self, depths: range, states: Tensor, gradients: dict[Tensor, Tensor]) -> None:
        for start in range(0, len(self.columns), self._block_size):
            block = slice(start, start + self._block_size)
            teacher_rows = self._teacher_rows(block)
            for index in depths:
                self._add_block(index, block, states, teacher_rows, gradients)

    def _add_block(
        self,
        index: int,
        block: slice,
        states: Tensor,
        teacher_rows: TeacherRows | None,
        gradients: dict[Tensor, Tensor],
    ) -> None:
        sources = self.sources[index, block]
        weights = self.weights[index, block]
        targets = TargetBlock(self.columns[block], sources >= 0, weights, teacher_rows)
        sources = sources.clamp(min=0)
        read = states.detach()[sources].requires_grad_(states in gradients)
        with torch.set_grad_enabled(bool(gradients)):
            logits = self.logits_of(index, block, read)
        gradient = self._count(index, logits.detach(), targets)
        if not gradients:
            return
        wanted: list[Tensor] = [each for each in self.parameters_of(index) if each in gradients]
        inputs = [*wanted, read] if read.requires_grad else wanted
        found = torch.autograd.grad(logits, inputs, gradient)
        for each, part in zip(wanted, found, strict=False):
            gradients[each] += part
        if read.requires_grad:
            gradients[states].index_add_(0, sources, found[-1].to(states.dtype))

    def _count(self, index: int, logits: Tensor, targets: TargetBlock) -> Tensor:
        """Count a block of logits (C, V'); the gradient of what is minimised to them, (C, V').

        Targets that are not scored are not counted.
        """
        num_rows = max(1, TILE_ELEMENTS // self.num_columns) if logits.is_cpu else len(logits)
        gradient = torch.empty_like(logits)
        for start in range(0, len(logits), num_rows):
            rows = slice(start, start + num_rows)
            gradient[rows] = self._count_tile(index, logits[rows], targets.part(rows))
        return gradient

    def _count_tile(self, index: int, logits: Tensor, targets: TargetBlock) -> Tensor:
        is_as_good = logits >= logits.gather(1, targets.columns[:, None])  # (C, V'); a tie counts as a miss
        num_better = is_as_good.sum(-1, dtype=torch.int32) - 1  # int64 sums of booleans are ten times slower
        log_q = logits.log_softmax(-1, dtype=torch.float32)
        if self.observe is not None:
            self.observe(log_q, targets)
        loss, gradient = self.objective(log_q, targets.columns, targets.teacher_rows)
        loss = loss.masked_fill(~targets.is_scored, 0.0)
        sums = self.sums
        sums.loss[index] += loss.sum()
        sums.weighted[index] += (loss * targets.weights).sum()
        sums.top1[index] += (targets.is_scored & (num_better < 1)).sum()
        sums.top5[index] += (targets.is_scored & (num_better < 5)).sum()
        sums.num_scored[index] += targets.is_scored.sum()
        return gradient.mul_((targets.weights / self.num_scored[index].clamp(min=1))[:, None])

    def _teacher_rows(self, block: slice) -> TeacherRows | None:
        """The base's own distribution for a block of targets: the same at every depth."""
        if self.teacher is None or self.teacher_states is None:
            return None
        with torch.no_grad():
            return TeacherRows.of_logits(self.teacher(self.teacher_states(block)))


class _Function(torch.autograd.Function):
    """A fused loss whose gradients are found on the way forward; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, work: FusedLoss, *inputs: Tensor) -> Tensor:
        wanted = zip(inputs, ctx.needs_input_grad[1:], strict=True)
        gradients = {each: torch.zeros_like(each) for each, wants in wanted if wants}
        loss = work.run(inputs[0], gradients)
        ctx.save_for_backward(*(gradients.get(each) for each in inputs))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # In place: these gradients become those of the parameters, and no second copy of them is held.
        return (None, *(None if each is None else each.mul_(upstream) for each in ctx.saved_tensors))


def decay_weights(alignment: Alignment, decay: float) -> Tensor:
    """(K, S): decay^d for the targets of depth d, 0 where a target has no source."""
    is_scored = alignment.sources[1:] >= 0
    depths = torch.arange(1, alignment.num_heads + 1, device=is_scored.device)
    return decay ** depths[:, None] * is_scored


def checked_teacher(objective: ObjectiveName, teacher: Teacher | None) -> Teacher | None:
    """``teacher`` where the objective needs one, which must then be there."""
    if not needs_teacher(objective):
        return None
    if teacher is None:
        raise ValueError(f"objective {objective!r} needs the base's logits: pass teacher")
    return teacher
