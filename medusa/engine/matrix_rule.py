"""The rules of layers that keep a matrix for each head, as one operator of the kernels."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from medusa.base.recurrent import MatrixState, Updates

LEAST_KEPT = 8
"""Nodes of a chain from which on the state after the last one is kept: where all are committed, the next pass
has no updates to apply."""


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
    B, N, H, K = key.shape
    topology = state.topology
    pending = state.pending
    before = state.before_pending(value, (B, H, K, value.shape[3]))
    outputs, written, last = torch.ops.medusa.matrix_rule(
        before,
        None if pending is None else pending.decay,
        None if pending is None else pending.key,
        None if pending is None else pending.written,
        state.num_pending,
        query,
        key,
        value,
        decay,
        beta,
        None if topology.is_chain else topology.parents,
        topology.is_chain and N >= LEAST_KEPT,
        rates,
    )
    state.keep(Updates(decay, key, written, rates), last if last.numel() else None)
    return cast(Tensor, outputs)
