"""Heads that compute as quickly as their engine can: what they guess never changes the text.

Every guess is verified, so heads need not be computed in the precision they were trained in. On an engine
whose output embedding offers a quicker product (:class:`medusa.heads.token_map.ScoresSome`), the heads' own
layers use it, as the scores of a token map do.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from medusa.heads.medusa_heads import MedusaHeads, ResidualBlock
from medusa.heads.token_map import ScoresSome, version_of


class QuickHeads(MedusaHeads):
    """Medusa heads that share the parameters of ``heads`` and multiply with ``product_of`` them.

    The products hold what the parameters are now, and do not follow later changes.
    """

    def __init__(self, heads: MedusaHeads, output_embedding: ScoresSome):
        nn.Module.__init__(self)
        shared = {id(tensor): tensor for tensor in (*heads.parameters(), *heads.buffers())}
        self.__dict__.update(copy.deepcopy(heads, shared).__dict__)
        for block in (module for module in self.blocks.modules() if isinstance(module, ResidualBlock)):
            block.linear = _QuickLinear(block.linear, output_embedding)
        self._path_products = nn.ModuleList(
            _product(output_embedding, weight, None) for weight in getattr(self, "paths", ())
        )
        if self.config.fused_layers:
            self.fusion = _QuickLinear(self.fusion, output_embedding)

    def _read_path(self, index: int, rows: Tensor) -> Tensor:
        return self._path_products[index](rows)


class _QuickLinear(nn.Linear):
    """A linear layer that computes with a product made of its weight."""

    def __init__(self, linear: nn.Linear, output_embedding: ScoresSome):
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        self._product = _product(output_embedding, linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)


def _product(output_embedding: ScoresSome, weight: Tensor, bias: Tensor | None) -> nn.Module:
    product = output_embedding.product_of(weight.detach(), None if bias is None else bias.detach())
    assert product is not None, "checked before"
    return product


def quick_heads(heads: MedusaHeads, output_embedding: nn.Module) -> MedusaHeads:
    """``heads`` as quick as ``output_embedding`` lets them be: themselves where it offers nothing.

    The quick ones are made once and kept with ``heads`` until a parameter changes.
    """
    if not isinstance(output_embedding, ScoresSome) or next(heads.parameters()).dtype != torch.float32:
        return heads
    if output_embedding.product_of(torch.zeros(1, 1), None) is None:
        return heads
    kept = heads.kept_with_weights
    if not isinstance(kept, _Kept) or not kept.are_of(heads, output_embedding):
        heads.kept_with_weights = kept = _Kept(heads, output_embedding)
    return kept.quick


class _Kept:
    """Quick heads, and how to tell that they are out of date."""

    def __init__(self, heads: MedusaHeads, output_embedding: ScoresSome):
        self.quick = QuickHeads(heads, output_embedding)
        self.versions, self.kind = _versions(heads), type(output_embedding)

    def __deepcopy__(self, memo: dict) -> _Kept:
        return self  # copied heads have parameters of their own, to which these are out of date

    def are_of(self, heads: MedusaHeads, output_embedding: nn.Module) -> bool:
        """Whether no parameter has moved, been cast or written to since."""
        return self.kind is type(output_embedding) and self.versions == _versions(heads)


def _versions(heads: MedusaHeads) -> list[tuple[int, int]]:
    return [(parameter.data_ptr(), version_of(parameter)) for parameter in heads.parameters()]
