"""Heads that compute as quickly as their engine can: what they guess never changes the text.

Every guess is verified, so heads need not be computed in the precision they were trained in. On an engine
whose output embedding offers a quicker product (:class:`QuickProducts`), the heads' own layers use it, and so
do the scores of a token map. On any other engine the rows of a token map are gathered once.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import copy_sharing_parameters
from medusa.heads.medusa_heads import MedusaHeads
from medusa.heads.token_map import GatheredRows, TokenMapped

AnyHeads = TypeVar("AnyHeads", bound=TokenMapped)


@runtime_checkable
class QuickProducts(Protocol):
    """An output embedding with quicker products for drafts than its own rows, in a precision of their own."""

    def scorer_of(self, token_ids: Tensor) -> nn.Module | None:
        """What scores ``token_ids`` (V',) long alone, (..., D) -> (..., V'); None where it has none."""
        ...

    def product_of(self, weight: Tensor, bias: Tensor | None) -> nn.Module | None:
        """What multiplies with a drafting module's own weight (out, in) as quickly; None likewise."""
        ...


def quick_heads(heads: AnyHeads, output_embedding: nn.Module) -> AnyHeads:
    """Heads to draft with, as quick as ``output_embedding`` lets them be; ``heads`` where there is nothing to
    gain.

    They share the parameters of ``heads`` and hold what these and the output embedding are now: make them
    anew when a weight has changed.
    """
    scored = heads.token_map if heads.scores_base_rows else None
    if _has_products(output_embedding, heads):
        quick: AnyHeads = _with_products(heads, output_embedding)
    elif scored is not None:
        quick = copy_sharing_parameters(heads)
    else:
        return heads
    if scored is not None:
        quick.scorer = _scorer(output_embedding, scored)
    return quick


def _with_products(heads: AnyHeads, output_embedding: QuickProducts) -> AnyHeads:
    """``heads``, sharing their parameters, with linear layers that multiply with ``product_of`` them."""
    if isinstance(heads, MedusaHeads):
        return QuickHeads(heads, output_embedding)  # type: ignore[return-value]
    quick = copy_sharing_parameters(heads)
    _quicken(quick, output_embedding)
    return quick


def _quicken(quick: nn.Module, output_embedding: QuickProducts) -> None:
    """Give every linear layer of ``quick`` its product."""
    for module in list(quick.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, _QuickLinear(child, output_embedding))


class QuickHeads(MedusaHeads):
    """Medusa heads that share the parameters of ``heads`` and multiply with ``product_of`` them."""

    def __init__(self, heads: MedusaHeads, output_embedding: QuickProducts):
        nn.Module.__init__(self)
        self.__dict__.update(copy_sharing_parameters(heads).__dict__)
        _quicken(self, output_embedding)
        self._path_products = nn.ModuleList(
            _product(output_embedding, weight, None) for weight in getattr(self, "paths", ())
        )

    def _read_path(self, index: int, rows: Tensor) -> Tensor:
        return self._path_products[index](rows)


class _QuickLinear(nn.Linear):
    """A linear layer that reads its product in place of its weight."""

    def __init__(self, linear: nn.Linear, output_embedding: QuickProducts):
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        self._product = _product(output_embedding, linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)


def _has_products(output_embedding: nn.Module, heads: TokenMapped) -> TypeGuard[QuickProducts]:
    """Whether ``output_embedding`` multiplies with the layers of ``heads``."""
    if not isinstance(output_embedding, QuickProducts) or next(heads.parameters()).dtype != torch.float32:
        return False
    return output_embedding.product_of(torch.zeros(1, 1), None) is not None


def _product(output_embedding: QuickProducts, weight: Tensor, bias: Tensor | None) -> nn.Module:
    product = output_embedding.product_of(weight.detach(), None if bias is None else bias.detach())
    assert product is not None  # what _has_products has made sure of
    return product


def _scorer(output_embedding: nn.Module, token_map: Tensor) -> GatheredRows | nn.Module:
    quick = output_embedding.scorer_of(token_map) if isinstance(output_embedding, QuickProducts) else None
    return GatheredRows(output_embedding, token_map) if quick is None else quick
