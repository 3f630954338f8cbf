"""The rules of layers that keep a matrix for each head, as one operator of the kernels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from medusa.base.recurrent import MatrixState, Updates


def matrix_rule(
    state: MatrixState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    rates: Tensor | None = None,
) -> Tensor:
    """:func:`medusa.base.recurrent_rules.matrix_rule`, in one operator."""
    B, _, H, V = value.shape
    key, value, decay = (each.contiguous() for each in (key, value, decay))  # which are kept
    before = state.before(value, (B, H, key.shape[3], V))
    updates, kept = state.pending() or (None, None)
    outputs, written = torch.ops.medusa.matrix_rule(
        before,
        state.place_of_last(),
        *((None, None, None) if updates is None else updates[:3]),
        None if kept is None else kept.path,
        None if kept is None else kept.counts,
        query,
        key,
        value,
        decay,
        beta,
        state.parents,
        rates,
    )
    state.keep(Updates(decay, key, value if beta is None else written))
    return cast(Tensor, outputs)
