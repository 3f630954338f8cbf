"""The loss of an adapted base's own next-token row, with memory flat in the number of tokens.

    L_base = sum over targets of KL(p || q) / num_targets

where q is the adapted base's distribution and p that of the same model with the adapter switched off:
self-distillation as in arXiv 2401.10774, section 2.2.2; or cross-entropy with the text's own tokens. As in
``loss.py`` the targets are taken block by block, forward and backward of one block of logits (C, V) before
the next exists, and to autograd it is one function of the hidden states. Nothing of the output embedding
is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from medusa.training.losses.fused_blocks import FusedBlocks
from medusa.training.losses.loss import Teacher
from medusa.training.losses.objectives import TeacherRows, expected, objective_named

BaseObjective = Literal["kl", "ce"]


class BaseTargets(NamedTuple):
    """Label tokens of a micro-batch, each with the state that the base predicts it from. S targets."""

    sources: Tensor  # (S,) long: indices of states
    tokens: Tensor  # (S,) long


class BaseSums(NamedTuple):
    """Sums over targets, () each; they add up over blocks, micro-batches and processes."""

    cross_entropy: Tensor  # of the adapted base and the text
    reference_cross_entropy: Tensor  # of the base without the adapter and the text
    divergence: Tensor  # KL(without || with)
    num_agreeing: Tensor  # long; targets at which both have the same first guess
    num_targets: Tensor  # long
    num_compared: Tensor  # long; targets at which the base without the adapter was asked

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> BaseSums:
        sums = (torch.zeros((), device=device) for _ in range(3))
        counts = (torch.zeros((), dtype=torch.long, device=device) for _ in range(3))
        return cls(*sums, *counts)

    def plus(self, other: BaseSums) -> BaseSums:
        return BaseSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class BaseLoss:
    """What an adapted base is held to."""

    project: Teacher
    """States (C, D) -> the base's logits (C, V)."""
    vocab_size: int
    """V."""
    objective: BaseObjective = "kl"
    block_elements: int = 2**24
    """Logits held at a time; C = block_elements / V targets."""

    @property
    def needs_reference(self) -> bool:
        return self.objective == "kl"

    def __call__(
        self, hidden: Tensor, reference: Tensor | None, targets: BaseTargets, num_targets: Tensor
    ) -> tuple[Tensor, BaseSums]:
        """The loss, a scalar (), and its sums.

        Args:
            hidden: (P, D) states of the adapted base; gradients reach them.
            reference: (P, D) states of the same base with the adapter switched off; constants.
            num_targets: () targets of the whole optimisation step, all micro-batches and processes.
        """
        if reference is None and self.needs_reference:
            raise ValueError("base_objective 'kl' needs the states without the adapter: pass reference")
        work = _Work(self, None if reference is None else reference.detach(), targets, num_targets)
        loss = FusedBlocks.apply(work, hidden) if torch.is_grad_enabled() else work.run(hidden, None)
        return loss, work.sums


class _Work:
    """One pass over all blocks of one micro-batch."""

    def __init__(self, loss: BaseLoss, reference: Tensor | None, targets: BaseTargets, num_targets: Tensor):
        self.project = loss.project
        self.block_size = max(1, loss.block_elements // loss.vocab_size)
        self.objective = objective_named(loss.objective, kl_weight=1.0)
        self.reference, self.targets = reference, targets
        self.weight = 1 / num_targets.clamp(min=1)
        self.total = torch.zeros((), device=targets.tokens.device)
        self.sums = BaseSums.zeros(targets.tokens.device)

    def run(self, hidden: Tensor, gradient: Tensor | None) -> Tensor:
        """The loss of hidden (P, D) as a scalar (); adds to ``gradient``, alike, when wanted."""
        for start in range(0, len(self.targets.tokens), self.block_size):
            block = slice(start, start + self.block_size)
            sources = self.targets.sources[block]
            with torch.set_grad_enabled(gradient is not None):
                states = hidden.detach()[sources].requires_grad_(gradient is not None)
                logits = self.project(states)  # (C, V)
            of_logits = self._count(logits.detach(), block)
            if gradient is not None:
                (found,) = torch.autograd.grad(logits, states, of_logits.to(logits.dtype))
                gradient.index_add_(0, sources, found.to(gradient.dtype))
        return self.total * self.weight

    def _count(self, logits: Tensor, block: slice) -> Tensor:
        """Add a block of logits (C, V) to the sums; the gradient of its loss, (C, V)."""
        tokens = self.targets.tokens[block]
        log_q = logits.float().log_softmax(-1)
        rows = None
        sums = BaseSums.zeros(tokens.device)._replace(
            cross_entropy=-log_q.gather(1, tokens[:, None]).sum(), num_targets=_count_of(tokens)
        )
        if self.reference is not None:
            with torch.no_grad():
                rows = TeacherRows.of_logits(self.project(self.reference[self.targets.sources[block]]))
            sums = _compared(sums, log_q, rows, tokens)
        self.sums = self.sums.plus(sums)
        losses, gradient = self.objective(log_q, tokens, rows)  # log_q may be overwritten
        self.total = self.total + losses.sum()
        return gradient.mul_(self.weight)


def _compared(sums: BaseSums, log_q: Tensor, rows: TeacherRows, tokens: Tensor) -> BaseSums:
    """``sums`` with what one block shows of the difference that the adapter makes."""
    log_p = rows.log_probabilities
    return sums._replace(
        reference_cross_entropy=-log_p.gather(1, tokens[:, None]).sum(),
        divergence=expected(rows.probabilities, log_p - log_q).sum(),
        num_agreeing=(log_p.argmax(-1) == log_q.argmax(-1)).sum(),
        num_compared=_count_of(tokens),
    )


def _count_of(tokens: Tensor) -> Tensor:
    return torch.tensor(len(tokens), device=tokens.device)
