"""Linear layers of one input as one product, whose weights lie one below the other in memory.

The parameters, or blocks, of the layers become parts of the joined ones, so that no weight is held twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.engine.card.block_modules import QuantisedLinear, block_products
from medusa.engine.card.stored_blocks import StoredBlocks


class KeepsModules(ValueError):
    """A layer keeps its modules, for the reason that the message says."""


Product = Callable[[Tensor], Tensor]
"""(..., in) -> (..., all outs)."""


@torch.no_grad()
def joined_product(linears: Sequence[Any]) -> Product:
    """The outputs of ``linears``, which have one input, side by side.

    Raises:
        KeepsModules: they are of other classes than ``nn.Linear`` and :class:`QuantisedLinear`, or of both.
    """
    kinds = {type(linear) for linear in linears}
    bias = _joined_biases(linears)
    if kinds == {nn.Linear}:
        weight = in_one_piece([linear.weight.detach() for linear in linears])
        for linear, part in zip(linears, _parts(weight, linears), strict=True):
            linear.weight.data = part
        return lambda x: F.linear(x, weight, bias)
    if kinds == {QuantisedLinear}:
        matrices = _joined_blocks(linears)
        return lambda x: block_products(x, matrices, bias)
    raise KeepsModules(f"its linear layers are of {', '.join(sorted(kind.__name__ for kind in kinds))}")


def in_one_piece(tensors: Sequence[Tensor]) -> Tensor:
    """``tensors`` (out, ...), one below the other: a copy, unless they lie in memory so already."""
    first = tensors[0]
    if all(_follows(one, other) for one, other in itertools.pairwise(tensors)):
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    return torch.cat([*tensors])


def _follows(one: Tensor, other: Tensor) -> bool:
    """Whether ``other`` begins where ``one`` ends, in the same memory."""
    same_memory = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    are_whole = one.is_contiguous() and other.is_contiguous()
    return same_memory and are_whole and one.data_ptr() + one.nbytes == other.data_ptr()


def _parts(whole: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    return whole.split([linear.out_features for linear in linears])


def _joined_blocks(linears: Sequence[QuantisedLinear]) -> list[StoredBlocks]:
    """The matrices of ``linears``, those of one type that follow each other as one."""
    joined = []
    for _, group in itertools.groupby(linears, key=lambda linear: linear.matrix.type):
        alike = [*group]
        first = alike[0].matrix
        planes: dict[str, Any] = {
            name: in_one_piece([linear.matrix.planes[name] for linear in alike])
            for name in first.planes
            if name != "table"
        }
        for name, plane in planes.items():
            for linear, part in zip(alike, _parts(plane, alike), strict=True):
                setattr(linear.matrix, name, part)
        joined.append(replace(first, **planes))
    return joined


def _joined_biases(linears: Sequence[Any]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return biases[0] if len(biases) == 1 else torch.cat(biases)
