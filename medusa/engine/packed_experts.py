"""The experts of a mixture over packed weights, a product for each matrix of each expert, and its router."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa.base.experts import expert_matrices
from medusa.engine.kernels import PackedMatmul
from medusa.engine.rowwise import LOOP_NUMBERS, WHOLE_VECTORS


class PackedExperts(nn.Module):
    """What ``experts`` compute, (R, D), K choices (R, K) long and their weights (R, K) -> (R, D).

    The bits of a row are the same whatever the other rows are, and only the experts that a row chooses are
    read.

    Args:
        experts: the module of ``transformers``, in float32 apart from its matrices, which are not read; it
            keeps its biases, its activation function and its gate.
        into, out_of: the product of each expert's matrices, biases included.
        order: (out,) long, the output of ``into`` that each output of the experts is; None where it is the
            same.
    """

    order: Tensor | None

    def __init__(
        self,
        experts: Any,
        into: Iterable[PackedMatmul],
        out_of: Iterable[PackedMatmul],
        order: Tensor | None = None,
    ):
        super().__init__()
        self.experts = experts
        self.into, self.out_of = nn.ModuleList(into), nn.ModuleList(out_of)
        self.register_buffer("order", order, persistent=False)

    @classmethod
    def of(cls, experts: Any, int8: bool, release: Callable[[Tensor], Tensor] | None) -> Self:
        """``experts`` over their own matrices; the arguments are those of
        :func:`medusa.engine.views.with_kernels`."""
        by_matrix = []
        for name in expert_matrices(experts):
            matrices = experts._parameters[name].detach()
            products = [
                PackedMatmul([matrix.T if experts.is_transposed else matrix], bias, int8)
                for matrix, bias in zip(matrices, expert_biases(experts, name), strict=True)
            ]
            by_matrix.append(products)
            if release is not None:
                replace_matrix(experts, name, release(matrices))
        into, out_of = by_matrix
        return cls(experts, into, out_of)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_rows, num_choices = top_k_index.shape
        choices, order = top_k_index.flatten().sort(stable=True)
        chosen, counts = choices.unique_consecutive(return_counts=True)
        experts, sizes = chosen.tolist(), counts.tolist()

        def products(matrices: nn.ModuleList, rows: Tensor) -> Tensor:
            parts = zip(experts, rows.split(sizes), strict=True)
            return torch.cat([matrices[expert](part) for expert, part in parts])

        inner = products(self.into, hidden_states[order // num_choices])
        by_expert = products(self.out_of, self._gated(inner if self.order is None else inner[:, self.order]))
        outputs = torch.empty_like(by_expert)
        outputs[order] = by_expert
        weighted = outputs.view(num_rows, num_choices, -1) * top_k_weights[..., None]  # (R, K, D)
        return weighted.sum(dim=1)

    def _gated(self, inner: Tensor) -> Tensor:
        """The activation of rows (R, out), each computed with the same code whatever the others are."""
        gate = self.experts._apply_gate if self.experts.has_gate else self.experts.act_fn
        width = inner.shape[1]
        at_once = (LOOP_NUMBERS - 1) // width if width % (2 * WHOLE_VECTORS) == 0 else 1
        if len(inner) <= at_once:
            return gate(inner)
        return torch.cat([gate(part) for part in inner.split(max(1, at_once))])


def expert_biases(experts: Any, name: str) -> Sequence[Tensor | None]:
    """The bias of each expert beside its matrix ``name``, (out,); None where they have none."""
    if experts.has_bias:
        return list(experts._parameters[f"{name}_bias"].detach())
    return [None] * len(experts._parameters[name])


def replace_matrix(experts: Any, name: str, weight: Tensor) -> None:
    """Let go of a matrix of ``experts``, in whose place ``weight`` is from here on."""
    delattr(experts, name)
    setattr(experts, name, weight)


# ------------------------------------------------------------------ routers


class RouterWeight(Tensor):
    """The weight of a router (E, D) in the kernels' form, as the router reads it: ``F.linear`` with it is
    their product, whose bits for a row depend on that row alone. It has no numbers of its own."""

    product: PackedMatmul

    @classmethod
    def of(cls, weight: Tensor, place: Tensor) -> RouterWeight:
        """``weight`` in float32; ``place`` has its shape and type, and takes no memory."""
        packed: RouterWeight = place.as_subclass(cls)
        packed.product = PackedMatmul([weight.detach()], None)
        return packed

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and isinstance(args[1], cls):
            scores = args[1].product(args[0])
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            return scores if bias is None else scores + bias
        is_widening = func is Tensor.float or (func in (Tensor.type, Tensor.to) and torch.float32 in args)
        if is_widening and isinstance(args[0], cls):
            return args[0]  # it is float32 already
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def pack_router(block: nn.Module, place_of: Callable[[Tensor], Tensor]) -> None:
    """Let the kernels compute the products of the routers directly below ``block``: modules of
    ``transformers`` with a weight of their own. ``place_of`` makes a tensor without memory in the place of
    one."""
    for child in block.children():
        weight = child._parameters.get("weight")
        if weight is None or weight.dim() != 2 or isinstance(child, (nn.Linear, nn.Embedding, PackedMatmul)):
            continue
        packed = RouterWeight.of(weight, place_of(weight))
        del child.weight
        child.register_buffer("weight", packed, persistent=False)
