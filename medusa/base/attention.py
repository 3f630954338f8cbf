"""Tree attention: what each tree node may look at, and at which position it stands.

A node sees the row's committed tokens, its ancestors and itself. Its position is the number of
committed tokens plus its depth, however many siblings stand before it in the pass.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from medusa.trees.candidate_tree import TreeTopology

LayerWindows = dict[str, int | None]
"""Attention layer type -> sliding window in tokens, None for full attention."""

ALL_NODES = slice(None)

GROUPED_ATTENTION = "medusa_grouped_sdpa"
"""An attention implementation of ``transformers``: :func:`grouped_attention`."""

FLOAT64_ATTENTION = "medusa_float64_sdpa"
"""An attention implementation of ``transformers``: :func:`float64_attention`."""

MASKED_ATTENTION = ("sdpa", "eager", GROUPED_ATTENTION, FLOAT64_ATTENTION)
"""Attention implementations that take an arbitrary mask."""

MAX_GROUPED_NODES = 64
"""For more nodes :func:`grouped_masks` leaves the masks alone: they would be large, and repeating keys
pays."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``sdpa`` that does not repeat keys and values for the heads that share them.

    query (B, H, T, width), key and value (B, H', S, width) -> (B, T, H, width). The G = H / H' heads that
    read the same keys stand as one head with G * T queries, for which the mask is (B, 1, G * T, S), see
    :func:`grouped_masks`. With any other mask it is ``sdpa`` as ``transformers`` runs it.
    """
    batch, num_heads, num_queries, _ = query.shape
    num_rows = num_queries * (num_heads // key.shape[1])
    is_grouped = attention_mask is not None and attention_mask.shape[2] == num_rows
    if not is_grouped or not kwargs.keys() <= _PLAIN_OPTIONS:
        mask = None if attention_mask is None else attention_mask[:, :, :num_queries]
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)
    queries = query.reshape(batch, key.shape[1], num_rows, -1)
    output = F.scaled_dot_product_attention(queries, key, value, attention_mask, scale=kwargs.get("scaling"))
    output = output.view(batch, num_heads, num_queries, -1)
    return output.transpose(1, 2).contiguous(), None  # (B, T, H, width)


_PLAIN_OPTIONS = {"dropout", "scaling", "sliding_window", "position_ids", "cache_position", "use_cache"}
"""What a layer passes without asking for more than attention: decoding drops nothing out, and the window
is in the mask."""


def float64_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """:func:`grouped_attention` computed in float64 and rounded once, so that no float32 bit depends on how
    many queries and slots take part."""
    wide = (query.double(), key.double(), value.double())
    output, _ = grouped_attention(module, *wide, attention_mask, **kwargs)
    return output.to(query.dtype), None


for _name, _attention in ((GROUPED_ATTENTION, grouped_attention), (FLOAT64_ATTENTION, float64_attention)):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def check_attention(base: PreTrainedModel) -> None:
    """Raise ValueError unless the attention of ``base`` takes a tree's mask, now: it can be changed any time,
    and some implementations read a mask of another kind past its end."""
    attention = base.config.get_text_config(decoder=True)._attn_implementation
    if attention not in MASKED_ATTENTION:
        raise ValueError(
            f"attention implementation {attention!r} takes no tree mask; load {type(base).__name__} with "
            "attn_implementation='sdpa' (or 'eager'), or call set_attn_implementation('sdpa')"
        )


def attention_windows(base: PreTrainedModel) -> LayerWindows:
    """The attention layer types of ``base``, each with its window."""
    return layer_windows(base.config.get_text_config(decoder=True), masks_by_window(base))


def masks_by_window(base: PreTrainedModel) -> bool:
    """Whether the code of ``base`` masks by the ``sliding_window`` of its configuration.

    Some models of ``transformers`` have one and attend to everything (Moshi; any model to whose configuration
    somebody added one). Code from elsewhere is taken at its configuration's word.
    """
    decoder = base.get_decoder()
    code = sys.modules[type(decoder).__module__]
    return not is_code_of_transformers(decoder) or hasattr(code, "create_sliding_window_causal_mask")


def is_code_of_transformers(module: nn.Module) -> bool:
    """Whether the class of ``module`` is one of ``transformers``' own models."""
    return type(module).__module__.startswith("transformers.models.")


def layer_windows(config: PreTrainedConfig, has_windows: bool = True) -> LayerWindows:
    """The attention layer types of a text configuration, each with its window.

    Without ``has_windows`` the model's code attends to everything, whatever its configuration says of a
    sliding window.

    Raises:
        ValueError: some layers have neither full nor sliding-window attention.
    """
    window = getattr(config, "sliding_window", None) if has_windows else None
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
    ancestors = topology.ancestors[:, nodes].expand(lengths.shape[0], -1, -1)
    is_ancestor = ancestors.gather(2, column[:, None].expand(-1, ancestors.shape[1], -1))
    in_tree = (offset >= 0) & (offset < topology.num_nodes)
    return torch.where(offset[:, None] < 0, True, is_ancestor & in_tree[:, None])


def within_window(
    lengths: Tensor, num_slots: int, topology: TreeTopology, window: int, nodes: slice = ALL_NODES
) -> Tensor:
    """Which cache slots lie less than ``window`` positions before each node, (B, M, S) bool."""
    slots = torch.arange(num_slots, device=lengths.device)
    offset = slots - lengths[:, None]  # (B, S)
    depths = topology.depths.expand(lengths.shape[0], -1)
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


def mask_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of the masks that a text configuration's attention adds to scores, None where it takes
    booleans; ``dtype`` is the model's."""
    known = {"sdpa": None, FLOAT64_ATTENTION: torch.float64}
    return known.get(config._attn_implementation, dtype)


def grouped_masks(masks: Tensor | dict[str, Tensor], config: PreTrainedConfig) -> Tensor | dict[str, Tensor]:
    """``masks`` (B, 1, M, S) with the rows that :func:`grouped_attention` wants: (B, 1, G * M, S).

    All M rows come once for each of the G heads that share keys; as given for other attention.
    """
    if isinstance(masks, dict):
        return {kind: cast(Tensor, grouped_masks(mask, config)) for kind, mask in masks.items()}
    is_grouped = config._attn_implementation in (GROUPED_ATTENTION, FLOAT64_ATTENTION)
    if not is_grouped or masks.shape[2] > MAX_GROUPED_NODES:
        return masks
    num_heads = config.num_attention_heads
    return masks.repeat(1, 1, num_heads // (getattr(config, "num_key_value_heads", None) or num_heads), 1)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill_(~visible, torch.finfo(dtype).min)
