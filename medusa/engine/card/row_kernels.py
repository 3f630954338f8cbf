"""What stands between the products of a layer, each as one launch: a residual sum with the norm behind it,
and the gate of a gated unit.

One program computes one row, in an order that only the row's width decides, so a row's bits do not depend on
what stands beside it. All arithmetic is in float32, and is rounded where the modules round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_OF_A_GATE = 1024
"""Columns that one program of the gate computes."""


@dataclass(frozen=True)
class NormWeights:
    """An RMSNorm (arXiv 1910.07467): x / sqrt(mean(x^2) + eps) times a weight."""

    weight: Tensor
    """(D,)."""
    eps: float
    adds_one: bool = False
    """Whether the factor is 1 + weight, multiplied before rounding (Gemma); else the weight, multiplied after
    it (Llama)."""


@triton.jit
def with_factors(scaled, factors, ADDS_ONE: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of a norm (BLOCK,) float32, that have been scaled, times its weight; rounded to DTYPE."""
    if ADDS_ONE:
        return (scaled * (1.0 + factors)).to(DTYPE)
    return (scaled.to(DTYPE).to(tl.float32) * factors).to(DTYPE)


@triton.jit
def _sum_and_norm(
    x, more, inner_weight, weight, total, normed, width, inner_eps, eps,
    HAS_MORE: tl.constexpr, HAS_INNER: tl.constexpr, INNER_ADDS_ONE: tl.constexpr,
    HAS_NORM: tl.constexpr, ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    at = row * width + columns
    dtype: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_MORE:
        added = tl.load(more + at, mask=is_inside, other=0.0).to(tl.float32)
        if HAS_INNER:
            factors = tl.load(inner_weight + columns, mask=is_inside, other=0.0).to(tl.float32)
            added *= tl.rsqrt(tl.sum(added * added, axis=0) / width + inner_eps)
            added = with_factors(added, factors, INNER_ADDS_ONE, dtype).to(tl.float32)
        rounded = (values + added).to(dtype)
        tl.store(total + at, rounded, mask=is_inside)
        values = rounded.to(tl.float32)
    if HAS_NORM:
        factors = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
        scaled = values * tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
        tl.store(normed + at, with_factors(scaled, factors, ADDS_ONE, dtype), mask=is_inside)


NO_NORM = NormWeights(torch.empty(0), 0.0)


def sum_and_norm(
    x: Tensor, more: Tensor | None, norm: NormWeights | None, inner: NormWeights | None = None
) -> tuple[Tensor, Tensor]:
    """``x`` + ``more``, and the ``norm`` of this sum: (..., D) each, as the arguments, which must be
    contiguous. ``inner`` is a norm that is put on ``more`` before (Gemma 2).

    Without ``more`` the sum is ``x`` itself, and without ``norm`` the second result is the sum.
    """
    width = x.shape[-1]
    total = x if more is None else torch.empty_like(x)
    normed = total if norm is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    inner_norm = inner or NO_NORM
    outer_norm = norm or NO_NORM
    _sum_and_norm[(x.numel() // width,)](
        x, x if more is None else more,
        x if inner is None else inner.weight, x if norm is None else norm.weight,
        total, normed, width, inner_norm.eps, outer_norm.eps,
        HAS_MORE=more is not None, HAS_INNER=inner is not None, INNER_ADDS_ONE=inner_norm.adds_one,
        HAS_NORM=norm is not None, ADDS_ONE=outer_norm.adds_one,
        BLOCK=block, num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    return total, normed


@triton.jit
def _gated(rows, gated, width, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    first = rows + row * 2 * width
    gate = tl.load(first + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(first + width + columns, mask=is_inside, other=0.0).to(tl.float32)
    bend = gate
    if not IS_SILU:  # 0.5 * (1 + tanh(z)) is sigmoid(2 * z)
        bend = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    dtype: tl.constexpr = gated.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-bend))).to(dtype).to(tl.float32)
    tl.store(gated + row * width + columns, (activated * up).to(dtype), mask=is_inside)


def gated(rows: Tensor, is_silu: bool) -> Tensor:
    """The activation of the first half of ``rows`` times their second half: (..., 2 F) -> (..., F).

    ``rows`` are contiguous. The activation is SiLU, or GELU by its formula with tanh (arXiv 1606.08415).
    """
    width = rows.shape[-1] // 2
    result = rows.new_empty(*rows.shape[:-1], width)
    grid = (result.numel() // width, triton.cdiv(width, COLUMNS_OF_A_GATE))
    _gated[grid](rows, result, width, IS_SILU=is_silu, BLOCK=COLUMNS_OF_A_GATE, num_warps=4)
    return result
