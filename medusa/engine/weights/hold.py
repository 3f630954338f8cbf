"""The one place that puts what holds a weight in the place of a module of ``transformers``.

A base is held while it is read: each matrix is read, packed by all cores, and its pages of the file are given
back, so it is in memory once. A view of a base that is loaded shares its parameters, and is held beside them.
And a base whose matrices have no memory is held without memory: that is its plan
(:mod:`medusa.engine.weights.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from medusa.base.experts import expert_matrices, is_experts
from medusa.engine.weights.columns import PackedColumnsOfHeads, columns_of, put_columns
from medusa.engine.weights.experts import (
    PackedExperts,
    is_router,
    let_go_of_weights,
    put_router_product,
    routers_of,
)
from medusa.engine.weights.lookups import is_lookup
from medusa.engine.weights.memory import Release, placeholder
from medusa.engine.weights.products import (
    PackedMatmul,
    joinable_linears,
    joined_bias,
    share_product,
)
from medusa.engine.weights.stored import Arithmetic, Numbers, StoredMatrix

LINEAR = (nn.Linear, Conv1D)
"""Classes of layers that are one product; a subclass keeps its own forward."""
Reads = Mapping[int, Callable[[], Sequence[StoredMatrix]]]
"""What reads the weights of a model, by the identity of each parameter: the weight (out, in); of experts the
parts of theirs, (E, out, in) each. A parameter that is not among them is held as it is."""


@dataclass(frozen=True)
class Holder:
    """Puts what holds the weights of a model in the place of its modules, as an engine multiplies by them."""

    how: Arithmetic
    reads: Reads = field(default_factory=dict)
    release: Release | None = None
    """Gives back the pages of what is packed; the modules then have placeholders for their weights. None:
    they keep their weights, as of a view."""
    head: nn.Module | None = None
    """The LM head, whose rows are looked up too where its weight is given back."""

    def hold(self, model: nn.Module) -> None:
        """Hold the weights of ``model``: of linear layers, those with the same input in one product; of
        embeddings, of experts and their routers, and of layers with selective scans. Weights that are held
        exactly already are rounded where that is how."""
        for parent in list(model.modules()):
            self._hold_linears(parent)
            for name, child in list(parent.named_children()):
                replacement = self._held(child, parent)
                if replacement is not child:
                    setattr(parent, name, replacement)
            if any(isinstance(child, PackedExperts) for child in parent.children()):
                for router in routers_of(parent):
                    self._hold_router(router)
            self._hold_columns(parent)

    def _held(self, child: nn.Module, parent: nn.Module) -> nn.Module:
        """What holds the weights of ``child``; itself where it has none that are held, or holds them."""
        if is_experts(child) and not isinstance(parent, PackedExperts):
            return self._held_experts(child)
        if isinstance(child, nn.Embedding) and self._holds_rows(child):
            return self._weight(child.weight).lookup(child)
        if isinstance(child, PackedMatmul) and self.how.int8 and not (child.is_int8 or is_router(parent)):
            return child.rounded()
        return child

    def _holds_rows(self, embedding: nn.Embedding) -> bool:
        """Whether the rows of ``embedding`` stay as they are stored; a view keeps its embeddings."""
        if self.release is None:
            return False
        return id(embedding.weight) in self.reads or (is_lookup(embedding) and is_narrow(embedding.weight))

    def _parts(self, parameter: Tensor, is_transposed: bool = False) -> Sequence[StoredMatrix]:
        reads = self.reads.get(id(parameter))
        if reads is not None:
            return reads()
        weight = parameter.detach()
        return [Numbers(weight.mT if is_transposed else weight)]

    def _weight(self, parameter: Tensor, is_transposed: bool = False) -> StoredMatrix:
        (weight,) = self._parts(parameter, is_transposed)
        return weight

    def _hold_linears(self, parent: nn.Module) -> None:
        """Replace the linear layers directly below ``parent``."""
        linears: dict[str, Any] = {
            name: child for name, child in parent.named_children() if type(child) in LINEAR
        }
        weights = {
            linear: self._weight(linear.weight, is_transposed=type(linear) is Conv1D)
            for linear in linears.values()
        }
        groups = [
            group
            for group in joinable_linears(parent)
            if all(weights[group[0]].shares_product(weights[linear], self.how) for linear in group[1:])
        ]
        replacements: dict[nn.Module, nn.Module] = {}
        for group in groups:
            product = weights[group[0]].product(
                [weights[linear] for linear in group], joined_bias(group), self.how
            )
            replacements.update(zip(group, share_product(group, product), strict=True))
        for name, linear in linears.items():
            packed: Any = replacements.get(linear) or self._held_linear(linear, weights[linear])
            packed.weight = linear.weight  # for code that reads it
            if self.release is not None:
                del packed.weight
                packed.weight = placeholder(linear.weight)
            self._release([weights[linear]])
            setattr(parent, name, packed)

    def _held_linear(self, linear: Any, weight: StoredMatrix) -> PackedMatmul:
        """The product of a linear layer that shares none."""
        bias = linear.bias
        is_head = linear is self.head and self.release is not None
        return weight.lm_head(bias, self.how) if is_head else weight.product([weight], bias, self.how)

    def _held_experts(self, experts: Any) -> PackedExperts:
        name_into, name_out_of = expert_matrices(experts)
        into, num_parts = self._expert_product(experts, name_into)
        out_of, _ = self._expert_product(experts, name_out_of)
        packed = PackedExperts(experts, into, out_of, num_parts)
        if self.release is not None:
            let_go_of_weights(experts)
        return packed

    def _expert_product(self, experts: Any, name: str) -> tuple[PackedMatmul, int]:
        """The product of the matrices of this name of all experts, and the number of its parts."""
        parts = self._parts(experts._parameters[name], experts.is_transposed)
        product = parts[0].expert_product(parts, self.how)
        self._release(parts)
        return product, len(parts)

    def _release(self, weights: Iterable[StoredMatrix]) -> None:
        if self.release is not None:
            for weight in weights:
                weight.release(self.release)

    def _hold_router(self, router: Any) -> None:
        """Let an exact product compute the scores of ``router``: they choose experts."""
        weight = router.weight
        exactly = Arithmetic(int8=False, in_whole_numbers=False)
        stored = self._weight(weight)
        place = weight.detach() if self.release is None else placeholder(weight)
        put_router_product(router, stored.product([stored], None, exactly), place)
        self._release([stored])

    def _hold_columns(self, layer: nn.Module) -> None:
        """Hold the matrices that ``layer`` multiplies itself."""
        put_columns(layer)
        for name, weights in columns_of(layer).items():
            stored = cast(Numbers, self._weight(weights))
            products = [PackedMatmul([weight], None, self.how.int8) for weight in stored.tensor]
            del layer._parameters[name]
            setattr(layer, name, PackedColumnsOfHeads(products))


def is_narrow(tensor: Tensor) -> bool:
    """Whether the numbers of ``tensor`` are of a type that float32 holds in half of its bytes."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def held_parameters(model: nn.Module) -> set[int]:
    """The parameters of ``model`` that are held in a form of theirs, by identity: all others are float32."""
    held = {id(module.weight) for module in model.modules() if type(module) in LINEAR or is_lookup(module)}
    for experts in filter(is_experts, model.modules()):
        held |= {id(experts._parameters[name]) for name in expert_matrices(experts)}
    return held


def transposed_parameters(model: nn.Module) -> set[int]:
    """Those of :func:`held_parameters` that lie (in, out), or (E, in, out), by identity."""
    transposed = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    for experts in filter(is_experts, model.modules()):
        if cast(Any, experts).is_transposed:
            transposed |= {id(experts._parameters[name]) for name in expert_matrices(experts)}
    return transposed
