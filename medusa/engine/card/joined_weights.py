"""Linear layers of one input as one product, whose weights lie one below the other in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class JoinedWeights:
    """The outputs of ``linears`` side by side, from one product: (..., in) -> (..., all outs).

    Their parameters become views of the joined weight, so that no weight is held twice, and a write to one of
    them is a write to it.
    """

    def __init__(self, linears: Sequence[nn.Linear]):
        self.weight = _joined(linears)
        """(all outs, in)."""
        self.bias = _joined_biases(linears)
        """(all outs,), or None."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@torch.no_grad()
def _joined(linears: Sequence[nn.Linear]) -> Tensor:
    weights = [linear.weight.detach() for linear in linears]
    first = weights[0]
    if len(weights) == 1:
        return first
    rows = sum(map(len, weights))
    if all(_follows(one, other) for one, other in itertools.pairwise(weights)):
        return first.as_strided((rows, first.shape[1]), first.stride())
    joined = torch.cat(weights)
    for linear, part in zip(linears, joined.split([*map(len, weights)]), strict=True):
        linear.weight.data = part
    return joined


def _follows(one: Tensor, other: Tensor) -> bool:
    """Whether ``other`` begins where ``one`` ends, in the same memory."""
    same_memory = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    are_whole = one.is_contiguous() and other.is_contiguous()
    return same_memory and are_whole and one.data_ptr() + one.nbytes == other.data_ptr()


def _joined_biases(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return biases[0] if len(biases) == 1 else torch.cat(biases)
