"""Queries with their rotary angles, and keys and values that go to the cache, as one launch.

The product of queries, keys and values is one row for each node. A program takes one head of one node: a
query's is turned and written to the queries, a key's is turned and written to the slot of its node, a value's
is copied there. Where a model has norms of a head's queries and keys (Qwen3), these come first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa.engine.card.row_kernels import NormWeights, with_factors


@triton.jit(do_not_specialize=["num_nodes", "num_slots", "angle_row_stride"])
def _turned(
    rows, cosines, sines, slots, keys, values, queries, query_weight, key_weight, eps,
    num_nodes, num_slots, width, turned, row_stride, angle_row_stride, angle_node_stride,
    key_row_stride, key_head_stride, key_slot_stride, value_row_stride, value_head_stride, value_slot_stride,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, HAS_NORMS: tl.constexpr, ADDS_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0)  # of all rows
    head = tl.program_id(1)
    batch_row = (node // num_nodes).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    first = rows + node.to(tl.int64) * row_stride + head * width
    own = tl.load(first + columns, mask=is_inside, other=0.0)
    slot = tl.load(slots + node)
    is_kept = columns < tl.where(slot < num_slots, width, 0)
    if head >= NUM_HEADS + NUM_KEY_HEADS:
        at = (head - NUM_HEADS - NUM_KEY_HEADS) * value_head_stride + slot * value_slot_stride
        tl.store(values + batch_row * value_row_stride + at + columns, own, mask=is_kept)
    else:
        # a head's first `turned` numbers turn, each with the one half of them away
        half = turned // 2
        does_turn = columns < turned
        is_first_half = columns < half
        partner_columns = tl.where(is_first_half, columns + half, columns - half)
        other = tl.load(first + partner_columns, mask=does_turn, other=0.0).to(tl.float32)
        dtype: tl.constexpr = rows.dtype.element_ty
        straight = own.to(tl.float32)
        if HAS_NORMS:
            weight = query_weight if head < NUM_HEADS else key_weight
            factors = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
            partner_factors = tl.load(weight + partner_columns, mask=does_turn, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(straight * straight, axis=0) / width + eps)
            straight = with_factors(straight * scale, factors, ADDS_ONE, dtype).to(tl.float32)
            other = with_factors(other * scale, partner_factors, ADDS_ONE, dtype).to(tl.float32)
        angles = batch_row * angle_row_stride + (node % num_nodes) * angle_node_stride + columns
        cosine = tl.load(cosines + angles, mask=does_turn, other=1.0).to(tl.float32)
        sine = tl.load(sines + angles, mask=does_turn, other=0.0).to(tl.float32)
        result = (straight * cosine + tl.where(is_first_half, -other, other) * sine).to(dtype)
        if head < NUM_HEADS:
            to = queries + (node.to(tl.int64) * NUM_HEADS + head) * width
            tl.store(to + columns, result, mask=is_inside)
        else:
            at = (head - NUM_HEADS) * key_head_stride + slot * key_slot_stride
            tl.store(keys + batch_row * key_row_stride + at + columns, result, mask=is_kept)


def turned_queries(
    rows: Tensor,
    cosines: Tensor,
    sines: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[NormWeights, NormWeights] | None = None,
) -> Tensor:
    """Queries (B, N, H, W) with their angles; keys with theirs, and values, are written to their slots.

    Args:
        rows: (B, N, (H + 2 K) W): queries, keys and values of each node, contiguous.
        cosines: (B or 1, N, R), where the first R numbers of a head turn, by halves (rotate_half); sines
            likewise.
        slots: (B, N) long; a slot that ``keys`` does not have is not written.
        keys: (B, K, S, W), whose numbers of a slot lie side by side; values likewise.
        norms: of the queries and of the keys of a head, with weights (W,) and the same eps.
    """
    num_rows, num_nodes, total = rows.shape
    key_heads, num_slots, width = keys.shape[1:]
    num_heads = total // width - 2 * key_heads
    queries = rows.new_empty(num_rows, num_nodes, num_heads, width)
    cosines, sines = (angles if angles.stride(2) == 1 else angles.contiguous() for angles in (cosines, sines))
    if cosines.stride() != sines.stride():
        sines = torch.empty_like(cosines).copy_(sines)
    query_norm, key_norm = norms if norms is not None else (None, None)
    _turned[(num_rows * num_nodes, num_heads + 2 * key_heads)](
        rows, cosines, sines, slots.contiguous(), keys, values, queries,
        rows if query_norm is None else query_norm.weight, rows if key_norm is None else key_norm.weight,
        0.0 if query_norm is None else query_norm.eps,
        num_nodes, num_slots, width, cosines.shape[2], total,
        cosines.stride(0) if len(cosines) > 1 else 0, cosines.stride(1),
        *keys.stride()[:3], *values.stride()[:3],
        NUM_HEADS=num_heads, NUM_KEY_HEADS=key_heads, HAS_NORMS=norms is not None,
        ADDS_ONE=query_norm is not None and query_norm.adds_one,
        BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return queries
