"""Linear layers that multiply with the kernels, their weights as narrow as they may be.

Arithmetic is in float32. Weights lie in the narrowest of bfloat16, float16 and float32 that holds every
number exactly: most checkpoints were published in bfloat16, and are the same model to the last bit at half
the memory and nearly half the time.

In int8 a weight has one scale per output channel, and the text is that of another model (MEASUREMENTS says
how near). What it is multiplied by becomes whole numbers of 16 bits, 256 of which share a scale; their
products are added as whole numbers, which is exact in any order and half the work of widening to float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from medusa.engine.kernels import lanes

WEIGHT_STEPS = 127
"""Steps of an int8 weight on either side of zero."""

_TINY = torch.finfo(torch.float32).tiny
"""Keeps the scale of a channel of zeros above zero; it is too small to change any other scale."""


class Product(nn.Module):
    """Rows times a matrix, float32 outside: (..., in) -> (..., out).

    Args:
        weight: (out, in); taken now, later changes do not count.
        bias: (out,), or None.
        int8: whether the weight is rounded to int8; it is held exactly otherwise.
    """

    panels: Tensor
    scales: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, int8: bool = False):
        super().__init__()
        self.width = len(weight)
        if isinstance(bias, nn.Parameter):
            self.bias = bias  # shared with the base
        else:
            self.register_buffer("bias", bias, persistent=False)
        codes, scales = quantised(weight) if int8 else (weight.to(narrowest_dtype(weight)), None)
        self.register_buffer("panels", in_panels(codes), persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.medusa.packed_product(x, self.panels, self.scales, self.bias, self.width)


class PackedLinear(Product):
    """A linear layer over a packed weight."""

    def __init__(self, linear: nn.Linear | Conv1D, int8: bool = False):
        weight = linear.weight.detach()
        super().__init__(weight.T if isinstance(linear, Conv1D) else weight, linear.bias, int8)
        self.weight = linear.weight  # shared with the base, for code that reads it


def narrowest_dtype(weight: Tensor) -> torch.dtype:
    """The narrowest of bfloat16, float16 and float32 in which each number of ``weight`` is what it is."""
    narrow = (torch.bfloat16, torch.float16)
    return next(
        (dtype for dtype in narrow if torch.equal(weight.to(dtype).to(weight.dtype), weight)), torch.float32
    )


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 codes (out, in) and scales (out,) of a weight (out, in): the product of both is near it."""
    scales = weight.abs().amax(dim=1).clamp_(min=_TINY) / WEIGHT_STEPS
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def in_panels(weight: Tensor) -> Tensor:
    """A weight (out, in) as the kernels read it: (panels, in, lanes), in int8 (panels, in / 2, lanes, 2).
    What is missing of the last panel, and of the last pair, are zeros."""
    together = (2,) if weight.dtype == torch.int8 else ()
    padded = F.pad(weight, (0, -weight.shape[1] % 2 if together else 0, 0, -len(weight) % lanes()))
    panels = padded.view(-1, lanes(), padded.shape[1] // max(together, default=1), *together)
    return panels.transpose(1, 2).contiguous()
