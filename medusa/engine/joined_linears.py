"""Linear layers that read the same rows, computed as one product.

An attention layer's query, key and value, and a gated MLP's gate and up, are separate layers over one input.
One wide product over all their weights reads the rows once, quantises them once, and costs one call. The
layers stay where the architecture looks for them: the first to be called computes for all, the others hand
out what it left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names, within one module, of layers that read one input, in the order in which they are called. A layer
that reads another one all the same gives the right result, only no sooner."""

Product = Callable[[Tensor, "Tensor | None"], nn.Module]
"""Weight (out, in) and bias (out,) -> what multiplies rows with them."""


def joinable_linears(module: nn.Module) -> Iterator[list[nn.Linear]]:
    """The groups of linear layers directly below ``module`` that read one input."""
    for names in ONE_INPUT:
        layers = [module._modules.get(name) for name in names]
        linears = [layer for layer in layers if type(layer) is nn.Linear]
        inputs = {(layer.in_features, layer.bias is None) for layer in linears}
        if len(linears) == len(names) and len(inputs) == 1:
            yield linears


def joined(linears: list[nn.Linear], product: Product) -> list[nn.Module]:
    """Layers to put in the place of ``linears``, which share one ``product``."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    widths = [linear.out_features for linear in linears]
    shared = _JointProduct(product(weight, torch.cat(biases) if biases else None), widths)
    return [JoinedLinear(linear, shared, index) for index, linear in enumerate(linears)]


class JoinedLinear(nn.Module):
    """A linear layer that is computed together with others of the same input: (..., in) -> (..., out)."""

    def __init__(self, linear: nn.Linear, shared: _JointProduct, index: int):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias  # shared with the base
        self._shared, self._index = shared, index

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.part(self._index, x)


class _JointProduct:
    """One product for several layers, and what it gave for the last input until all have taken their part.

    Not an ``nn.Module``, so that a model does not list the same one under each of its layers.
    """

    def __init__(self, product: nn.Module, widths: list[int]):
        self.product, self.widths = product, widths
        self._held: tuple[Tensor, int, tuple[Tensor, ...]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": None}

    def part(self, index: int, x: Tensor) -> Tensor:
        """Columns of layer ``index`` for input ``x`` (..., in)."""
        held, version = self._held, 0 if x.is_inference() else x._version
        if held is None or held[0] is not x or held[1] != version:
            held = (x, version, self.product(x).split(self.widths, dim=-1))
        self._held = None if index == len(self.widths) - 1 else held
        return held[2][index]
