"""What losses add up to: sums and counts, never means, so that micro-batches and processes add up exactly.

All sums are named tuples of tensors, or of such tuples.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

S = TypeVar("S", bound=tuple)


class LossSums(NamedTuple):
    """Sums over targets by depth, (K,) each."""

    loss: Tensor
    weighted: Tensor  # what is minimised: each loss times the weight of its target
    top1: Tensor  # long; targets that were the first guess
    top5: Tensor  # long; targets among the first five guesses
    num_labels: Tensor  # long; targets, those without a column included: what a hit rate divides by
    num_scored: Tensor  # long; targets with a column: what the loss divides by

    @classmethod
    def zeros(cls, num_depths: int, device: torch.device | str = "cpu") -> LossSums:
        counts = (torch.zeros(num_depths, dtype=torch.long, device=device) for _ in range(4))
        sums = (torch.zeros(num_depths, device=device) for _ in range(2))
        return cls(*sums, *counts)

    def objective(self, num_scored: Tensor) -> Tensor:
        """The weighted loss, a scalar, where ``num_scored`` (K,) targets are scored in all."""
        return (self.weighted / num_scored.clamp(min=1)).sum()


def added(first: S, second: S) -> S:
    """Both sums together."""
    pairs: Any = zip(first, second, strict=True)
    return type(first)(*(a + b if isinstance(a, Tensor) else added(a, b) for a, b in pairs))


def as_numbers(sums: tuple) -> list[Any]:
    """``sums`` as nested lists, which JSON can hold."""
    return [each.tolist() if isinstance(each, Tensor) else as_numbers(each) for each in sums]


def from_numbers(zeros: S, saved: list[Any]) -> S:
    """The sums that :func:`as_numbers` was given; types and device are those of ``zeros``."""
    pairs: Any = zip(zeros, saved, strict=True)
    return type(zeros)(*(a.new_tensor(b) if isinstance(a, Tensor) else from_numbers(a, b) for a, b in pairs))
