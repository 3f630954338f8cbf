"""Heads that compute as quickly as their engine can: what they guess never changes the text.

Every guess is verified, so heads need not be computed in the precision they were trained in. Where the base
computes with the kernels, the heads' own layers do so with int8 weights, and so do the scores of a token map.
On any other engine the rows of a token map are gathered once.
"""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import copy_sharing_parameters, embedding_weight
from medusa.engine.products import PackedLinear, Product
from medusa.heads.medusa_heads import MedusaHeads
from medusa.heads.token_map import GatheredRows, TokenMapped

AnyHeads = TypeVar("AnyHeads", bound=TokenMapped)


def quick_heads(heads: AnyHeads, output_embedding: nn.Module) -> AnyHeads:
    """Heads to draft with, as quick as ``output_embedding`` lets them be; ``heads`` where there is nothing to
    gain.

    They share the parameters of ``heads`` and hold what these and the output embedding are now: make them
    anew when a weight has changed.
    """
    scored = heads.token_map if heads.scores_base_rows else None
    has_kernels = isinstance(output_embedding, PackedLinear) and _dtype(heads) == torch.float32
    if not has_kernels and scored is None:
        return heads
    quick = copy_sharing_parameters(heads)
    if has_kernels:
        for module in list(quick.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, PackedLinear(child, int8=True))
        if isinstance(heads, MedusaHeads):
            quick.__class__ = QuickHeads
            quick.path_products = nn.ModuleList(
                Product(weight.detach(), None, int8=True) for weight in getattr(heads, "paths", ())
            )
    if scored is not None:
        quick.scorer = (
            _scorer(output_embedding, scored) if has_kernels else GatheredRows(output_embedding, scored)
        )
    return quick


class QuickHeads(MedusaHeads):
    """Medusa heads whose products are the kernels'."""

    path_products: nn.ModuleList

    def _read_path(self, index: int, rows: Tensor) -> Tensor:
        return self.path_products[index](rows)


def _scorer(output_embedding: nn.Module, token_map: Tensor) -> Product:
    """The rows of an output embedding for the tokens of a map alone."""
    bias = cast("Tensor | None", output_embedding.bias)
    bias = None if bias is None else bias.detach()[token_map]
    return Product(embedding_weight(output_embedding).detach()[token_map], bias, int8=True)


def _dtype(heads: nn.Module) -> torch.dtype:
    return cast(torch.dtype, next(heads.parameters()).dtype)
