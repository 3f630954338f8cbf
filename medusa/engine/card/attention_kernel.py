"""Attention of the nodes of a tree over the cache, as two launches: parts of the keys, then their sum.

A group of query heads reads one head of keys and values. A tile holds rows of one such group, node after
node and within a node head after head, so that what is read once serves all of them. What a node sees is its
row of the mask that modules take (:func:`medusa.base.attention.tree_attention_masks`): committed tokens,
ancestors, windows. A block of keys that no row of a tile sees is not read, which is most of a cache of fixed
size.

The keys are read in parts of :data:`PART` slots, whatever the number of rows, nodes and slots, each with a
softmax of its own (arXiv 2205.14135); the parts are summed in their order, and a part of which a node sees
nothing leaves its bits alone. So in float32 a node's bits depend on what it sees and on nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 256
"""Slots that one program reads; a card has to say whether another number is faster."""
MOST_TILE_ROWS = 64
"""Rows of a tile, at most, where numbers have 16 bits; half as many where a head has 256 numbers. In float32
a tile has the fewest, always, since a product of another shape may sum in another order."""
FEWEST_TILE_ROWS = 16
"""The fewest rows that ``tl.dot`` takes."""
TILE_BYTES = 16384
"""Bytes of the keys that a program multiplies at once, at most: more of them, and of their values, do not fit
its registers."""


@triton.jit
def _bent(scores, cap, HAS_CAP: tl.constexpr):
    """``scores``, or where there is a cap cap * tanh(scores / cap)."""
    if not HAS_CAP:
        return scores
    decay = tl.exp(-2.0 * tl.abs(scores) / cap)
    bent = cap * (1.0 - decay) / (1.0 + decay)
    return tl.where(scores < 0, -bent, bent)


@triton.jit(
    do_not_specialize=["num_nodes", "num_slots", "num_parts", "query_row_stride", "mask_row_stride"]
)  # one code for all of them, so that all passes round alike
def _attended_parts(
    queries, keys, values, mask, sums, tops, totals,
    scale, cap, num_nodes, num_slots, key_width, value_width, num_parts,
    query_row_stride, query_node_stride, query_head_stride,
    key_row_stride, key_head_stride, key_slot_stride, value_row_stride, value_head_stride, value_slot_stride,
    mask_row_stride, mask_node_stride,
    NUM_KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_CAP: tl.constexpr, IS_ADDED: tl.constexpr,
    SLOTS: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    batch_row = (tl.program_id(1) // NUM_KEY_HEADS).to(tl.int64)
    key_head = tl.program_id(1) % NUM_KEY_HEADS
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)  # of the nodes' groups
    node = row // GROUP
    head = key_head * GROUP + row % GROUP
    is_row = node < num_nodes
    key_columns = tl.arange(0, KEY_BLOCK)
    value_columns = tl.arange(0, VALUE_BLOCK)
    is_key_column = key_columns < key_width
    is_value_column = value_columns < value_width
    at = batch_row * query_row_stride + node * query_node_stride + head * query_head_stride
    query = tl.load(
        queries + at[:, None] + key_columns, mask=is_row[:, None] & is_key_column, other=0.0
    )  # (TILE, KEY_BLOCK)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    attended = tl.zeros((TILE, VALUE_BLOCK), tl.float32)
    first_key = keys + batch_row * key_row_stride + key_head * key_head_stride
    first_value = values + batch_row * value_row_stride + key_head * value_head_stride
    of_node = mask + batch_row * mask_row_stride + node * mask_node_stride
    for block in range(SLOTS // KEYS):
        slot = part * SLOTS + block * KEYS + tl.arange(0, KEYS)
        is_slot = slot < num_slots
        is_pair = is_row[:, None] & is_slot
        if IS_ADDED:
            seen = tl.load(of_node[:, None] + slot, mask=is_pair, other=-1.0) == 0
        else:
            seen = tl.load(of_node[:, None] + slot, mask=is_pair, other=0) != 0
        if tl.max(tl.max(seen.to(tl.int32), axis=1), axis=0) > 0:
            far = slot.to(tl.int64)
            key = tl.load(
                first_key + far * key_slot_stride + key_columns[:, None],
                mask=is_key_column[:, None] & is_slot,
                other=0.0,
            )  # (KEY_BLOCK, KEYS)
            value = tl.load(
                first_value + far[:, None] * value_slot_stride + value_columns,
                mask=is_slot[:, None] & is_value_column,
                other=0.0,
            )  # (KEYS, VALUE_BLOCK)
            scores = tl.dot(query, key, input_precision="ieee") * scale
            scores = tl.where(seen, _bent(scores, cap, HAS_CAP), float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may see nothing yet
            weights = tl.exp(scores - base[:, None])
            decay = tl.exp(top - base)
            total = total * decay + tl.sum(weights, axis=1)
            attended = attended * decay[:, None]
            attended += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            top = new_top
    num_heads = NUM_KEY_HEADS * GROUP
    to = ((batch_row * num_nodes + node) * num_heads + head) * num_parts + part
    tl.store(tops + to, top, mask=is_row)
    tl.store(totals + to, total, mask=is_row)
    has_seen = is_row & (top > float("-inf"))  # else nobody reads it
    to = sums + to[:, None] * value_width + value_columns
    tl.store(to, attended, mask=has_seen[:, None] & is_value_column)


@triton.jit(do_not_specialize=["num_parts"])
def _sum_of_parts(
    sums, tops, totals, sinks, attended, num_parts, num_heads, value_width,
    HAS_SINKS: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # a node's head
    columns = tl.arange(0, VALUE_BLOCK)
    is_inside = columns < value_width
    top = float("-inf")
    total = 0.0
    if HAS_SINKS:  # a score beside the others, whose value is zero
        top = tl.load(sinks + row % num_heads).to(tl.float32)
        total = 1.0
    result = tl.zeros((VALUE_BLOCK,), tl.float32)
    for part in range(num_parts):
        at = row * num_parts + part
        top_of_part = tl.load(tops + at)
        if top_of_part > float("-inf"):
            new_top = tl.maximum(top, top_of_part)
            decay = tl.exp(top - new_top)
            share = tl.exp(top_of_part - new_top)
            of_part = tl.load(sums + at * value_width + columns, mask=is_inside, other=0.0)
            result = result * decay + of_part * share
            total = total * decay + tl.load(totals + at) * share
            top = new_top
    result = result / total
    tl.store(attended + row * value_width + columns, result.to(attended.dtype.element_ty), mask=is_inside)


def tree_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of nodes: queries (B, N, H, W), keys (B, K, S, W), values (B, K, S, E) -> (B, N, H, E).

    Args:
        mask: (B or 1, 1, N, S) bool, true where a node sees a slot; or what is added to scores, 0 there and
            another number elsewhere.
        scale: the factor of the scores.
        cap: what bends scores, as cap * tanh(score / cap) (Gemma 2); 0 does not.
        sinks: (H,), a score of each head that takes its share and gives nothing (GPT-OSS).
    """
    num_rows, num_nodes, num_heads, key_width = queries.shape
    key_heads, num_slots = keys.shape[1:3]
    value_width = values.shape[3]
    group = num_heads // key_heads
    key_block = max(16, triton.next_power_of_2(key_width))
    value_block = max(16, triton.next_power_of_2(value_width))
    block = min(64, max(16, TILE_BYTES // (max(key_block, value_block) * queries.element_size())))
    tile = FEWEST_TILE_ROWS
    num_warps = 4
    if queries.dtype == torch.float32:
        block = min(block, 16)
        num_warps = 8
    elif num_nodes * group > tile:
        most_rows = min(MOST_TILE_ROWS, TILE_BYTES // 2 // max(key_block, value_block))
        tile = min(triton.next_power_of_2(num_nodes * group), most_rows)
        num_warps = 8
    num_parts = triton.cdiv(num_slots, PART)
    tops = queries.new_empty(num_rows, num_nodes, num_heads, num_parts, dtype=torch.float32)
    sums = tops.new_empty(*tops.shape, value_width)
    totals = torch.empty_like(tops)
    grid = (triton.cdiv(num_nodes * group, tile), num_rows * key_heads, num_parts)
    is_added = mask.dtype != torch.bool
    seen = mask if is_added else mask.view(torch.uint8)
    if seen.stride(3) != 1:
        seen = seen.contiguous()
    _attended_parts[grid](
        queries, keys, values, seen, sums, tops, totals,
        scale, cap, num_nodes, num_slots, key_width, value_width, num_parts,
        *queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        seen.stride(0) if len(seen) > 1 else 0, seen.stride(2),
        NUM_KEY_HEADS=key_heads, GROUP=group, HAS_CAP=cap > 0, IS_ADDED=is_added, SLOTS=PART,
        TILE=tile, KEYS=block, KEY_BLOCK=key_block, VALUE_BLOCK=value_block, num_warps=num_warps,
    )  # fmt: skip
    attended = queries.new_empty(num_rows, num_nodes, num_heads, value_width)
    _sum_of_parts[(num_rows * num_nodes * num_heads,)](
        sums, tops, totals, tops if sinks is None else sinks, attended, num_parts, num_heads, value_width,
        HAS_SINKS=sinks is not None, VALUE_BLOCK=value_block, num_warps=1,
    )  # fmt: skip
    return attended
