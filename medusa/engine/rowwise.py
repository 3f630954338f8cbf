"""Activation functions whose results for a row do not depend on the rows beside it."""

from __future__ import annotations

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
        missing = -x.shape[-1] % WHOLE_VECTORS
        if missing:
            return self._of_whole(nn.functional.pad(x, (0, missing)))[..., : x.shape[-1]]
        return self._of_whole(x.contiguous())

    def _of_whole(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting() or x.numel() < LOOP_NUMBERS:
            return self.function(x)
        rows = x.flatten(0, -2)
        parts = rows.split(max(1, (LOOP_NUMBERS - 1) // x.shape[-1]))
        return torch.cat([self.function(part) for part in parts]).view(x.shape)
