"""The experts of a mixture over packed weights, a product for each matrix of each expert, and its router."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa.base.experts import expert_matrices, order_of_outputs, shape_of_experts
from medusa.base.rowwise import WHOLE_VECTORS, of_rows_in_parts
from medusa.engine.weights.memory import placeholder
from medusa.engine.weights.products import PackedMatmul


class PackedExperts(nn.Module):
    """What ``experts`` compute, (R, D), K choices (R, K) long and their weights (R, K) -> (R, D).

    The bits of a row are the same whatever the other rows are, and only the experts that a row chooses are
    read.

    Args:
        experts: the module of ``transformers``, in float32 apart from its matrices, which are not read; its
            activation function and its gate are used.
        into, out_of: the matrices of all experts as one, (E * out, in), each expert's outputs padded to whole
            pairs of panels (:func:`medusa.engine.weights.stored.padded_rows`).
        num_parts: how many parts ``into`` was made of, such as those of gate and up.
    """

    order: Tensor | None
    bias_into: Tensor | None
    bias_out_of: Tensor | None

    def __init__(self, experts: Any, into: PackedMatmul, out_of: PackedMatmul, num_parts: int):
        super().__init__()
        self.experts = experts
        self.into = into
        self.out_of = out_of
        self.num_experts, self.num_outputs, _ = shape_of_experts(experts, expert_matrices(experts)[1])
        width = into.width // self.num_experts
        order = _order_in_product(experts, width, num_parts)
        is_same = torch.equal(order, torch.arange(width))
        self.register_buffer("order", None if is_same else order, persistent=False)
        name_into, name_out_of = expert_matrices(experts)
        self.register_buffer("bias_into", self._bias(name_into, into, order), persistent=False)
        self.register_buffer("bias_out_of", self._bias(name_out_of, out_of, None), persistent=False)

    def _bias(self, matrix: str, product: PackedMatmul, order: Tensor | None) -> Tensor | None:
        """The biases beside a matrix as its product adds them, (E * padded out,)."""
        if not self.experts.has_bias:
            return None
        bias = self.experts._parameters[f"{matrix}_bias"].detach()
        padded = bias.new_zeros(self.num_experts, product.width // self.num_experts)
        padded[:, torch.arange(bias.shape[1]) if order is None else order] = bias
        return padded.flatten()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        inner = self._products(self.into, hidden_states, top_k_index, self.bias_into)  # (R, K, out)
        if self.order is not None:
            inner = inner[..., self.order]
        outputs = self._products(self.out_of, self._gated(inner), top_k_index, self.bias_out_of)  # (R, K, D)
        return (outputs[..., : self.num_outputs] * top_k_weights[..., None]).sum(dim=1)

    def _products(self, matrices: PackedMatmul, x: Tensor, choices: Tensor, bias: Tensor | None) -> Tensor:
        width = matrices.width // self.num_experts
        return torch.ops.medusa.expert_products(
            x, choices, matrices.panels, matrices.scales, bias, self.num_experts, width
        )

    def _gated(self, inner: Tensor) -> Tensor:
        """The activation of rows (R, K, out), each computed with the same code whatever the others are."""
        gate = self.experts._apply_gate if self.experts.has_gate else self.experts.act_fn
        if torch.compiler.is_exporting():  # one thread runs the loops, over whole vectors
            return gate(inner)
        rows = of_rows_in_parts(gate, inner.flatten(0, 1), 2 * WHOLE_VECTORS)  # it takes halves of a row
        return rows.view(*inner.shape[:2], -1)


def _order_in_product(experts: Any, width: int, num_parts: int) -> Tensor:
    """For each output into an expert its place among the ``width`` of the product, which has the padded parts
    of a matrix one after the other: (out,) long."""
    _, num_outputs, _ = shape_of_experts(experts, expert_matrices(experts)[0])
    places = torch.arange(width).view(num_parts, -1)[:, : num_outputs // num_parts].flatten()
    order = order_of_outputs(experts, num_outputs) if num_parts > 1 else None
    return places if order is None else places[order]


def let_go_of_weights(experts: Any) -> None:
    """Put placeholders in the places of the matrices and biases of ``experts``."""
    names = expert_matrices(experts)
    biases = [f"{name}_bias" for name in names] if experts.has_bias else []
    for name in (*names, *biases):
        weight = experts._parameters[name]
        delattr(experts, name)
        setattr(experts, name, placeholder(weight))


# ------------------------------------------------------------------ routers


class RouterWeight(Tensor):
    """The weight of a router (E, D) as the router reads it: ``F.linear`` with it is ``product``, whose bits
    for a row depend on that row alone. Nothing else may read its numbers."""

    product: PackedMatmul

    @classmethod
    def of(cls, product: PackedMatmul, place: Tensor) -> RouterWeight:
        """``place`` has the shape and the type of the weight."""
        packed: RouterWeight = place.as_subclass(cls)
        packed.product = product
        return packed

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterWeight:
        if id(self) not in memo:
            place = self.as_subclass(Tensor).detach()
            memo[id(self)] = RouterWeight.of(copy.deepcopy(self.product, memo), place)
        return cast(RouterWeight, memo[id(self)])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs or {})
        if func is F.linear and isinstance(named["weight"], cls):
            scores = named["weight"].product(named["input"])
            return scores if named.get("bias") is None else scores + named["bias"]
        others = (*args[1:], *(kwargs or {}).values())
        is_widening = func is Tensor.float or (func in (Tensor.type, Tensor.to) and torch.float32 in others)
        if is_widening and isinstance(args[0], cls):
            return args[0]  # it is float32 already
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def is_router(module: nn.Module) -> bool:
    """Whether the kernels compute the scores of ``module``."""
    return isinstance(module._buffers.get("weight"), RouterWeight)


def routers_of(block: nn.Module) -> list[nn.Module]:
    """The routers directly below ``block``, which has experts: modules of ``transformers`` with a weight of
    their own."""
    others = (nn.Linear, nn.Embedding, PackedMatmul)
    weights = {child: child._parameters.get("weight") for child in block.children()}
    return [
        child
        for child, weight in weights.items()
        if weight is not None and weight.dim() == 2 and not isinstance(child, others)
    ]


def put_router_product(router: nn.Module, product: PackedMatmul, place: Tensor) -> None:
    """Let ``product`` compute the scores of ``router``. ``place`` has the shape of its weight."""
    router.product = product
    del router.weight
    router.register_buffer("weight", RouterWeight.of(product, place), persistent=False)
