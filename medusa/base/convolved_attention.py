"""Compressed convolutional attention (arXiv 2510.04476), as Zaya has it, over the nodes of a tree.

Two convolutions, one after the other, mix queries and keys along the text, and half of each value is that of
the token before. ``transformers`` writes this without the functions that other layers call by name, and for
one text in order, so that the whole projection is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from medusa.base.recurrent import ConvolutionState

Convolution = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function with the arguments of :func:`medusa.base.recurrent_rules.causal_convolution`."""


def convolved_projection(
    layer: Any, hidden_states: Tensor, state: ConvolutionState, convolution: Convolution
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of nodes, (B, N, heads, head_dim) each, from their hidden states (B, N, D).

    The ``state`` of the ``layer`` holds the last tokens' projections: queries, keys, and the values that come
    one token later.
    """
    queries = layer.q_proj(hidden_states)
    keys = layer.k_proj(hidden_states)
    delayed = layer.v_proj_delayed(hidden_states)
    windows = _windows(layer, state, torch.cat([queries, keys, delayed], dim=-1).transpose(1, 2))
    num_delayed = delayed.shape[-1]
    mixed = _mixed(layer, windows[:, :-num_delayed], convolution)  # (B, N, C)
    mixed_queries, mixed_keys = mixed.split([queries.shape[-1], keys.shape[-1]], dim=-1)

    def heads(states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, layer.head_dim))

    groups = layer.num_key_value_groups
    queries = (heads(queries) + heads(keys).repeat_interleave(groups, dim=2)) * 0.5
    keys = queries.unflatten(2, (-1, groups)).mean(dim=3)
    values = torch.cat([layer.v_proj_current(hidden_states), windows[:, -num_delayed:, :, -2].mT], dim=-1)
    return heads(mixed_queries) + queries, heads(mixed_keys) + keys, heads(values)


def _windows(layer: Any, state: ConvolutionState, projected: Tensor) -> Tensor:
    """The projections of the tokens that each node reads, (B, C, N, size), from those of the nodes (B, C, N).

    Before the first token queries and keys are zeros, and the value is that of a token of zeros."""
    size = max(2, layer.conv_kernel_size + 1)
    before = projected.new_zeros(*projected.shape[:2], size - 1)
    value = layer.v_proj_delayed(before.new_zeros(1, layer.hidden_size))  # (1, C')
    before[:, -value.shape[-1] :] = value[..., None]
    return state.windows(projected, size, before)


def _mixed(layer: Any, windows: Tensor, convolution: Convolution) -> Tensor:
    """Queries and keys after both convolutions, (B, N, C), of windows (B, C, N, size)."""
    depthwise = layer.conv_qk_depthwise
    width = layer.depthwise_kernel_size
    first = windows.shape[3] - layer.conv_kernel_size - 1
    steps = [
        convolution(windows[..., start : start + width], depthwise.weight[:, 0], depthwise.bias)
        for start in range(first, first + layer.grouped_kernel_size)
    ]
    inputs = torch.stack(steps, dim=-1).transpose(1, 2)  # (B, N, C, K)
    return layer.conv_qk_grouped(inputs.flatten(0, 1)).view(inputs.shape[:3])


def projection_in_place(own: Callable[..., Any], convolution: Convolution) -> Callable[..., Any]:
    """:func:`convolved_projection` as the forward of a layer, in the place of its ``own``, which runs where
    there is no cache of ours."""

    @functools.wraps(own)
    def forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache: Any = args[0] if args else kwargs.get("cache", kwargs.get("past_key_values"))
        if not hasattr(cache, "paths"):
            return own(layer, hidden_states, *args, **kwargs)
        state = cache.layers[layer.layer_idx].conv_states[0]
        return convolved_projection(layer, hidden_states, state, convolution)

    return forward
