"""A loss whose gradient is found on the way forward, block by block."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class BlockWork(Protocol):
    """One pass over all blocks of logits of one micro-batch."""

    def run(self, inputs: Tensor, gradient: Tensor | None) -> Tensor:
        """The loss of ``inputs`` as a scalar (); fills ``gradient``, shaped alike, when it is wanted."""
        ...


class FusedBlocks(torch.autograd.Function):
    """``work.run(inputs)`` to autograd: backward only scales the gradient that forward found."""

    @staticmethod
    def forward(ctx: Any, work: BlockWork, inputs: Tensor) -> Tensor:
        gradient = torch.zeros_like(inputs) if ctx.needs_input_grad[1] else None
        loss = work.run(inputs, gradient)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * upstream
