"""Activation functions whose results for a row do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WHOLE_VECTORS = 32
"""Numbers that torch's elementwise loops take at a time, at most: two vectors of 16."""
LOOP_NUMBERS = 32_768
"""Numbers from which on torch shares such a loop among threads, and cuts it anywhere."""


class RowwiseActivation(nn.Module):
    """An activation function that gives a row (..., W) the same bits whatever the other rows are.

    torch computes ``gelu`` with other code if rows are not contiguous, and the numbers after the last whole
    vector with other code than the rest. Here rows are contiguous, padded to whole vectors, and split into
    parts that one thread computes. A program that is compiled ahead needs no parts: one thread runs its
    loops, over widths that are whole vectors.
    """

    def __init__(self, function: nn.Module):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return rowwise(self.function, x)


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise ``function`` of ``x`` (..., W), as :class:`RowwiseActivation` computes it."""
    missing = -x.shape[-1] % WHOLE_VECTORS
    if missing:
        return _of_whole(function, nn.functional.pad(x, (0, missing)))[..., : x.shape[-1]]
    return _of_whole(function, x.contiguous())


def _of_whole(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if torch.compiler.is_exporting() or x.numel() < LOOP_NUMBERS:
        return function(x)
    return of_rows_in_parts(function, x.flatten(0, -2)).view(x.shape)


def of_rows_in_parts(
    function: Callable[[Tensor], Tensor], rows: Tensor, whole: int = WHOLE_VECTORS
) -> Tensor:
    """``function`` of rows (R, W), so many at once as one thread computes, so that a row's bits depend on
    nothing else. Where W is no multiple of ``whole`` they are computed one by one."""
    num_rows, width = rows.shape
    at_once = max(1, (LOOP_NUMBERS - 1) // width) if width % whole == 0 else 1
    if num_rows <= at_once:
        return function(rows)
    return torch.cat([function(part) for part in rows.split(at_once)])
