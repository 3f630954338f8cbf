"""The experts of a mixture as ``transformers`` holds them: a module whose matrices are stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


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


def shape_of_experts(experts: Any, name: str) -> tuple[int, int, int]:
    """Experts, outputs and inputs of the matrix ``name``."""
    count, rows, columns = experts._parameters[name].shape
    return (count, columns, rows) if experts.is_transposed else (count, rows, columns)


def order_of_outputs(experts: Any, num_outputs: int) -> Tensor | None:
    """The output of gate and up, one after the other, that each output of ``experts`` is, (num_outputs,)
    long; None where it is the same."""
    if not experts.has_gate or experts.is_concatenated:
        return None
    return torch.arange(num_outputs).view(2, -1).T.flatten()


def arranged(experts: Any, parts: Sequence[Tensor]) -> Tensor:
    """A matrix of ``experts`` from its parts (E, out, in), or a bias from its parts (E, out)."""
    matrix = torch.cat(list(parts), dim=1)
    order = order_of_outputs(experts, matrix.shape[1]) if len(parts) > 1 else None
    if order is not None:
        matrix = matrix[:, order]
    return matrix.mT if experts.is_transposed and matrix.dim() == 3 else matrix
