"""The experts of a mixture over packed weights, one product for each matrix of each expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from medusa.engine.kernels import PackedMatmul


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` are experts in the form for which ``transformers`` has exchangeable forwards (its
    ``use_experts_implementation``): their attributes say what is computed."""
    says = all(hasattr(module, name) for name in ("is_transposed", "has_bias", "has_gate", "_apply_gate"))
    others = any(getattr(module, name, False) for name in ("has_post_expert_norm", "_is_expert_parallel"))
    if not says or others:
        return False
    return all(module._parameters.get(name) is not None for name in expert_matrices(module))


def expert_matrices(experts: Any) -> tuple[str, str]:
    """The names of the matrices into an expert and out of it: (E, out, in), or transposed."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


class PackedExperts(nn.Module):
    """What ``experts`` compute, (R, D), K choices (R, K) long and their weights (R, K) -> (R, D).

    Args:
        experts: the module of ``transformers``, in float32 apart from its matrices; it keeps its biases, its
            activation function and its gate. int8, release: as for
            :func:`medusa.engine.views.with_kernels`.
    """

    def __init__(self, experts: Any, int8: bool, release: Callable[[Tensor], Tensor] | None):
        super().__init__()
        self.experts = experts
        by_matrix = []
        for name in expert_matrices(experts):
            matrices = experts._parameters[name].detach()
            biases = (
                experts._parameters[f"{name}_bias"].detach() if experts.has_bias else [None] * len(matrices)
            )
            products = [
                PackedMatmul([matrix.T if experts.is_transposed else matrix], bias, int8)
                for matrix, bias in zip(matrices, biases, strict=True)
            ]
            by_matrix.append(nn.ModuleList(products))
            if release is not None:
                delattr(experts, name)
                setattr(experts, name, release(matrices))
        self.into, self.out_of = by_matrix

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        width = hidden_states.shape[-1]
        weighted = hidden_states.new_zeros(*top_k_index.shape, width)  # (R, K, D)
        gate = self.experts._apply_gate if self.experts.has_gate else self.experts.act_fn
        for expert in top_k_index.unique().tolist():
            row, place = torch.where(top_k_index == expert)
            inner = gate(self.into[expert](hidden_states[row]))
            weighted[row, place] = self.out_of[expert](inner) * top_k_weights[row, place, None]
        return weighted.sum(dim=1)
