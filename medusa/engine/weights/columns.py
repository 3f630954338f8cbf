"""Weights that layers multiply themselves, weight @ columns, as those with selective scans do."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from medusa.base.recurrent_rules import calls_scans
from medusa.engine.weights.products import PackedMatmul

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


def columns_of(layer: nn.Module) -> dict[str, Tensor]:
    """The matrices of heads (H, M, K) that ``layer`` multiplies itself, by name, where it is one with
    selective scans."""
    if not _multiplies_itself(layer):
        return {}
    weights = {name: layer._parameters.get(name) for name in WEIGHTS_OF_HEADS}
    return {name: weight for name, weight in weights.items() if weight is not None}


def put_columns(layer: nn.Module) -> None:
    """Let ``layer`` multiply by the packed weight of its linear layer itself, where it does so."""
    linear: Any = getattr(layer, "dt_proj", None) if _multiplies_itself(layer) else None
    if linear is not None and "weight" not in linear._modules:
        del linear.weight
        linear.weight = PackedColumns(_without_bias(linear))


def _multiplies_itself(layer: nn.Module) -> bool:
    return hasattr(layer, "A_log") and calls_scans(type(layer))


def _without_bias(product: PackedMatmul) -> PackedMatmul:
    """The same product, with the same memory, that adds no bias."""
    plain = copy.copy(product)
    plain._parameters = {}
    plain._modules = {}
    plain._buffers = {**product._buffers, "bias": None}
    return plain
