"""Tree attention: what each tree node may look at, and at which position it stands.

A node sees the row's committed tokens, its ancestors and itself. Its position is the number of
committed tokens plus its depth, however many siblings stand before it in the pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from medusa.tree import TreeTopology

LayerWindows = dict[str, int | None]
"""Attention layer type -> sliding window in tokens, None for full attention."""

ALL_NODES = slice(None)

FLOAT64_ATTENTION = "medusa_float64_sdpa"
"""An attention implementation of ``transformers``: :func:`float64_attention`."""


def float64_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``sdpa`` computed in float64 and rounded once, so that no float32 bit depends on how many queries and
    slots take part. Query, key and value are (B, heads, T, width); ``transformers``' interface."""
    wide = (query.double(), key.double(), value.double())
    output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *wide, attention_mask, **kwargs)
    return output.to(query.dtype), None


AttentionInterface.register(FLOAT64_ATTENTION, float64_attention)


def layer_windows(config: PreTrainedConfig) -> LayerWindows:
    """The attention layer types of a text configuration, each with its window."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if types is None:
        return {"full_attention": None} if window is None else {"sliding_attention": window}
    known = {"full_attention": None, "global": None, "sliding_attention": window}
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ValueError(
            f"base model has layers of type {', '.join(unknown)}: tree verification works with full and "
            "sliding-window attention only; other layers mask otherwise, or keep a state that cannot forget "
            "rejected tokens"
        )
    return {kind: known[kind] for kind in dict.fromkeys(types)}


def node_positions(
    lengths: Tensor, topology: TreeTopology, context: int | None = None, nodes: slice = ALL_NODES
) -> Tensor:
    """Position ids of tree nodes, (B, M) long, for rows with ``lengths`` (B,) committed tokens.

    ``context`` caps them at the last position a model knows. Only nodes past the end of the
    answer are capped, and those are never kept.
    """
    positions = lengths[:, None] + topology.depths[:, nodes]
    return positions if context is None else positions.clamp(max=context - 1)


def tree_visibility(
    lengths: Tensor, num_slots: int, topology: TreeTopology, nodes: slice = ALL_NODES
) -> Tensor:
    """Which cache slots each node sees, (B, M, S) bool, whatever the layer's window."""
    offset = torch.arange(num_slots, device=lengths.device) - lengths[:, None]  # (B, S): 0 is the root
    column = offset.clamp(0, topology.num_nodes - 1)
    ancestors = topology.ancestors[:, nodes].expand(len(lengths), -1, -1)
    is_ancestor = ancestors.gather(2, column[:, None].expand(-1, ancestors.shape[1], -1))
    in_tree = (offset >= 0) & (offset < topology.num_nodes)
    return torch.where(offset[:, None] < 0, True, is_ancestor & in_tree[:, None])


def within_window(
    lengths: Tensor, num_slots: int, topology: TreeTopology, window: int, nodes: slice = ALL_NODES
) -> Tensor:
    """Which cache slots lie less than ``window`` positions before each node, (B, M, S) bool."""
    slots = torch.arange(num_slots, device=lengths.device)
    offset = slots - lengths[:, None]  # (B, S)
    depths = topology.depths.expand(len(lengths), -1)
    depth_of_slot = depths.gather(1, offset.clamp(0, topology.num_nodes - 1))
    slot_positions = torch.where(offset < 0, slots, lengths[:, None] + depth_of_slot)
    distance = node_positions(lengths, topology, nodes=nodes)[:, :, None] - slot_positions[:, None]
    return distance < window


def tree_attention_masks(
    lengths: Tensor,
    num_slots: int,
    topology: TreeTopology,
    windows: LayerWindows,
    dtype: torch.dtype | None = None,
    nodes: slice = ALL_NODES,
) -> Tensor | dict[str, Tensor]:
    """The mask a base model's forward takes: (B, 1, M, S), or one for each layer type of a hybrid model.

    Boolean (true: visible) when ``dtype`` is None, additive in ``dtype`` otherwise. ``nodes`` are the M
    nodes that the pass runs.
    """
    visible = tree_visibility(lengths, num_slots, topology, nodes)
    masks = {}
    for kind, window in windows.items():
        seen = visible
        if window is not None:
            seen = visible & within_window(lengths, num_slots, topology, window, nodes)
        masks[kind] = (seen if dtype is None else _additive(seen, dtype))[:, None]
    return masks if len(masks) > 1 else masks.popitem()[1]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill_(~visible, torch.finfo(dtype).min)
