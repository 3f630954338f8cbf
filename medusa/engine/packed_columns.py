"""Weights that layers multiply themselves, weight @ columns, as those with selective scans do."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from medusa.base.recurrent_rules import calls_scans
from medusa.engine.kernels import PackedMatmul

WEIGHTS_OF_HEADS = ("x_proj_weight", "dt_proj_weight")
"""Parameters of Zamba's layers: a matrix for each head."""


class PackedColumns(nn.Module):
    """A packed weight (M, K) in the place of a tensor: weight @ columns (..., K, N) -> (..., M, N)."""

    def __init__(self, product: PackedMatmul):
        super().__init__()
        self.product = product

    def __matmul__(self, columns: Tensor) -> Tensor:
        return cast(Tensor, self.product(columns.transpose(-1, -2))).transpose(-1, -2)


class PackedColumnsOfHeads(nn.Module):
    """The packed weights (H, M, K) of H heads: weights[:, None] @ columns (H, B, K, N) -> (H, B, M, N)."""

    def __init__(self, products: list[PackedMatmul]):
        super().__init__()
        self.products = nn.ModuleList(PackedColumns(product) for product in products)

    def __getitem__(self, place: Any) -> PackedColumnsOfHeads:
        return self

    def __matmul__(self, columns: Tensor) -> Tensor:
        heads: Any = self.products
        return torch.stack([weight @ of_head for weight, of_head in zip(heads, columns, strict=True)])


def pack_columns(layer: nn.Module, int8: bool) -> None:
    """Pack the weights that ``layer`` multiplies itself, where it is one with selective scans whose linear
    layers are packed; ``int8`` says whether matrices of heads are rounded to int8."""
    if not (hasattr(layer, "A_log") and calls_scans(type(layer))):
        return
    linear: Any = getattr(layer, "dt_proj", None)
    if linear is not None and "weight" not in linear._modules:
        del linear.weight
        linear.weight = PackedColumns(_without_bias(linear))
    for name in WEIGHTS_OF_HEADS:
        weights = layer._parameters.pop(name, None)
        if weights is not None:
            products = [PackedMatmul([weight.detach()], None, int8) for weight in weights]
            setattr(layer, name, PackedColumnsOfHeads(products))


def _without_bias(product: PackedMatmul) -> PackedMatmul:
    """The same product, with the same memory, that adds no bias."""
    plain = copy.copy(product)
    plain._parameters = {}
    plain._modules = {}
    plain._buffers = {**product._buffers, "bias": None}
    return plain
