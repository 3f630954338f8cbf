"""Float32 weights in the layout that this processor reads best.

A CPU's ordinary matrix product is poor between 2 and 32 rows, which is exactly what verifying a tree asks
for. Packing each weight once into the blocked layout of oneDNN (what Inductor's freezing does under
``torch.compile``) mends that without compiling anything. The arithmetic stays float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM
from medusa.engine.int8 import DRAFT_DIGITS, Int8Product, has_int8_products, int8_scorer
from medusa.engine.views import PackedProduct, missing_for_plain_float32, view_of

PACKED_ROWS = 16
"""Rows that the packed layout is tuned for; any number works."""


def missing_for_packed(base: CausalLM) -> str | None:
    """What :func:`packed` lacks to run ``base``; None when nothing."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return "a torch built with oneDNN"
    return missing_for_plain_float32(base)


def packed(base: CausalLM) -> CausalLM:
    """A model that shares every parameter with ``base`` and whose linear layers read packed weights.

    ``base`` is left as it is. The packed weights take as much memory again as the linear layers; they are
    taken when this is called and do not follow later changes of the parameters.
    """
    return view_of(base, PackedLinear, Float32Product)


class Float32Product(PackedProduct):
    """Rows times a packed float32 matrix: (..., in) -> (..., out).

    Args:
        weight: (out, in); taken now, later changes do not count.
        bias: (out,), or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__(weight)
        self.bias = bias

    def _in_own_layout(self, weight: Tensor) -> Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


class PackedLinear(Float32Product):
    """A linear layer over a packed weight."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.weight.detach(), linear.bias)
        self.weight = linear.weight  # shared with the base, for code that reads it

    def scorer_of(self, token_ids: Tensor) -> nn.Module | None:
        """In int8, which is read in a quarter of the time: drafts do not change the text, only its speed.
        See :class:`medusa.engine.quick_heads.QuickProducts`."""
        return int8_scorer(self, token_ids) if has_int8_products() else None

    def product_of(self, weight: Tensor, bias: Tensor | None) -> nn.Module | None:
        """In int8, as :meth:`scorer_of`."""
        return Int8Product(weight, bias, DRAFT_DIGITS) if has_int8_products() else None
