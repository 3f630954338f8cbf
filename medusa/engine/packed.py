"""Float32 weights in the layout that this processor reads best.

A CPU's ordinary matrix product is poor between 2 and 32 rows, which is exactly what verifying a tree asks
for. Packing each weight once into the blocked layout of oneDNN (what Inductor's freezing does under
``torch.compile``) mends that without compiling anything. The arithmetic stays float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa.base import CausalLM
from medusa.engine.int8 import has_int8_products, int8_scorer
from medusa.engine.linears import missing_for_plain_float32, with_linears

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
    return with_linears(base, PackedLinear)


class PackedLinear(nn.Module):
    """A linear layer over a packed weight: (..., in) -> (..., out)."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias  # shared, for those who read them
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return out.reshape(*x.shape[:-1], self.weight.shape[0])

    def scorer_of(self, token_ids: Tensor) -> nn.Module | None:
        """In int8, which is read in a quarter of the time: drafts do not change the text, only its speed.
        See :class:`medusa.token_map.ScoresSome`."""
        return int8_scorer(self, token_ids) if has_int8_products() else None
