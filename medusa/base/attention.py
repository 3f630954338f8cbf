"""Tree attention: the mask and the position of each tree node.

A node sees the row's committed tokens, its ancestors and itself. Its position is the number of committed
tokens plus its depth, independent of its siblings in the pass.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from medusa.trees.candidate_tree import TreeTopology

LayerWindows = dict[str, int | None]
"""Attention layer type -> sliding window in tokens, None for full attention."""

ALL_NODES = slice(None)
WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "dummy"})
"""Layer types that attend to no slots."""
BESIDE_STATES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Layer types with attention beside a state, and the type of their attention."""

TREE_ATTENTION = {"sdpa": "medusa_tree_sdpa", "eager": "medusa_tree_eager"}
"""The attention implementations of our kernels (:mod:`medusa.engine.kernels`), by the implementation that
they replace."""

MASKED_ATTENTION = ("sdpa", "eager", *TREE_ATTENTION.values())
"""Attention implementations that take an arbitrary mask, or what :func:`seen_slots` makes of it."""

MOST_TREE_NODES = 64
"""Length of a chain above which each node's past is one range of slots, without listing the nodes."""


MOST_MASKS = 4
"""The number of masks of one pass that are kept: as many as it has types of layers."""

POSITION_OPTIONS = ("position_ids", "cache_position")
"""Tensors that a layer passes on to its attention without asking for more."""

_pinning = threading.Lock()
_num_pinned = 0
_had_cudnn = True
_pinned_here = threading.local()


@contextmanager
def pinned_attention(device: torch.device) -> Iterator[None]:
    """Have passes of this thread on a card attend by :func:`grouped_attention`, and without cuDNN.

    Torch likes cuDNN best in half precision: it makes a plan for each new length of a text, which takes
    longer than a step, and on some cards its masked attention is wrong where there are few heads of keys and
    values (pytorch#193893).

    Both switches are one for all threads: the last that leaves puts them back. What other threads compute
    stays ``transformers``' own.
    """
    global _num_pinned, _had_cudnn
    if device.type != "cuda":
        yield
        return
    with _pinning:
        if not _num_pinned:
            _had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
            if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:  # else somebody has chosen another
                ALL_ATTENTION_FUNCTIONS["sdpa"] = grouped_attention
        _num_pinned += 1
    _pinned_here.masks = _FoldedMasks()
    try:
        yield
    finally:
        _pinned_here.masks = None
        with _pinning:
            _num_pinned -= 1
            if not _num_pinned:
                torch.backends.cuda.enable_cudnn_sdp(_had_cudnn)
                if ALL_ATTENTION_FUNCTIONS["sdpa"] is grouped_attention:
                    del ALL_ATTENTION_FUNCTIONS["sdpa"]


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a few nodes whose heads share keys and values in groups, which are not repeated: the nodes
    of a group's G heads are G * N queries of one head.

    query (B, H, N, W), key and value (B, H / G, S, W), attention_mask (B, 1, N, S) -> (B, N, H, W), None.
    What other threads ask for, and all that is more than this, is computed by ``transformers``.
    """
    masks: _FoldedMasks | None = getattr(_pinned_here, "masks", None)
    num_rows, num_heads, num_nodes, width = query.shape
    num_groups = num_heads // key.shape[1]
    is_tree = query.is_cuda and num_nodes <= MOST_TREE_NODES and num_groups > 1
    is_masked = attention_mask is not None and attention_mask.shape[1] == 1
    asks_more = bool(options.get("softcap") or options.get("dropout")) or any(
        torch.is_tensor(option) for name, option in options.items() if name not in POSITION_OPTIONS
    )
    if masks is None or attention_mask is None or not (is_tree and is_masked) or asks_more:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    output = nn.functional.scaled_dot_product_attention(
        query.reshape(num_rows, key.shape[1], num_groups * num_nodes, width),
        key,
        value,
        attn_mask=masks.folded(attention_mask, num_groups, query.dtype),
        scale=scaling,
    )
    return output.view(num_rows, num_heads, num_nodes, -1).transpose(1, 2).contiguous(), None


class _FoldedMasks:
    """The masks of :func:`grouped_attention`; the layers of one type share one."""

    def __init__(self) -> None:
        self._newest: list[tuple[Tensor, Tensor]] = []

    def folded(self, mask: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
        """``mask`` (B, 1, N, S) of the nodes of each head for those of G = ``num_groups`` heads, (B, 1,
        G * N, S) or (B, 1, 1, S), as it is added to scores: torch would make that of it in each layer."""
        for source, folded in self._newest:
            if source is mask and folded.dtype == dtype:
                return folded
        folded = mask if mask.shape[2] == 1 else mask.repeat(1, 1, num_groups, 1)
        if mask.dtype == torch.bool:
            folded = folded.log()  # 0 where it is true, and minus infinity elsewhere
        folded = folded.to(dtype)
        self._newest = [(mask, folded), *self._newest[: MOST_MASKS - 1]]
        return folded


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
    types = [BESIDE_STATES.get(kind, kind) for kind in types if kind not in WITHOUT_ATTENTION]
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
    if topology.num_nodes == 1:
        return offset[:, None] <= 0
    column = offset.clamp(0, topology.num_nodes - 1)
    ancestors = topology.ancestors[:, nodes].expand(lengths.shape[0], -1, -1)
    is_ancestor = ancestors.gather(2, column[:, None].expand(-1, ancestors.shape[1], -1))
    in_tree = offset == column
    return (offset[:, None] < 0) | (is_ancestor & in_tree[:, None])


def within_window(
    lengths: Tensor, num_slots: int, topology: TreeTopology, window: int, nodes: slice = ALL_NODES
) -> Tensor:
    """Which cache slots are less than ``window`` positions before each node, (B, M, S) bool."""
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
    return None if config._attn_implementation == "sdpa" else dtype


def takes_seen_slots(config: PreTrainedConfig) -> bool:
    """Whether the attention of a text configuration wants :func:`seen_slots` in the place of masks."""
    return config._attn_implementation in TREE_ATTENTION.values()


def seen_slots(
    lengths: Tensor, topology: TreeTopology, windows: LayerWindows, nodes: slice = ALL_NODES
) -> Tensor | dict[str, Tensor]:
    """The masks of :func:`tree_attention_masks` in a form whose size does not grow with the text: (B, 1, M, 2
    + T) int32, or one for each layer type of a hybrid model. Made by the kernels that read it.

    For each node the first slot that it sees and the end of those, and then for each of the T nodes of the
    tree, in the slots from there on, 1 + its depth where it is seen and 0 elsewhere. A long chain has no such
    nodes: the slots of its own past come before its end.
    """
    first, end, _ = nodes.indices(topology.num_nodes)
    by_range = topology.is_chain and end - first > MOST_TREE_NODES
    seen = {
        kind: torch.ops.medusa.seen_slots(
            lengths, topology.depths, topology.ancestors, first, end, by_range, window
        )
        for kind, window in windows.items()
    }
    return seen if len(seen) > 1 else seen.popitem()[1]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that is added to scores: 0 where ``visible``, and the lowest number elsewhere."""
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill_(~visible, torch.finfo(dtype).min)
