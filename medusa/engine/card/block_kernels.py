"""Products with matrices in the bits of a file, which are widened in registers.

A number is widened to float32 exactly as the file says, rounded once to the type of the rows, and summed in
float32. One kernel serves all types: what differs is a constant of its code. The columns are read in steps
whose size only the type decides, and in float32 a tile has always the same rows, so a row's bits do not
depend on how many there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa.engine.card.stored_blocks import StoredBlocks

BYTES_OF_A_STEP = 64
"""Bytes of codes of an output that are read at once: as many columns, or twice as many."""
FEWEST_TILE_ROWS = 16
MOST_TILE_ROWS = 64
MOST_OUTPUTS = 32
"""Outputs that a program computes; half as many of a matrix with less than :data:`SMALL`, so that every part
of a card has work. A card has to say whether other numbers are faster."""
SMALL = 8192


@triton.jit
def _numbers(
    codes, output, start, scales, whole_scales, minima, whole_minima, high_bits, table, width,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HIGH_BITS: tl.constexpr,
    HAS_TABLE: tl.constexpr, HAS_WHOLE_SCALES: tl.constexpr, HAS_MINIMA: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """What ``codes`` (O, RUNS, RUN) int32 stand for, in float32: those of the outputs ``output`` (O,) int64,
    in runs of columns that begin at ``start`` (RUNS,) and have one scale each."""
    if HIGH_BITS > 0:
        chunk: tl.constexpr = 256 // HIGH_BITS
        column = start[None, :, None] + tl.arange(0, RUN)[None, None, :]
        at = output[:, None, None] * (width * HIGH_BITS // 8) + column // chunk * 32 + column % 32
        byte = tl.load(high_bits + at, mask=column < width, other=0).to(tl.int32)
        codes += ((byte >> (column % chunk // 32 * HIGH_BITS)) & ((1 << HIGH_BITS) - 1)) << 4
    if HAS_TABLE:
        numbers = tl.load(table + codes)
    else:
        numbers = (codes - ZERO).to(tl.float32)
    is_run = start[None, :] < width
    in_blocks = output[:, None] * (width // BLOCK) + start[None, :] // BLOCK
    in_groups = output[:, None] * (width // GROUP) + start[None, :] // GROUP
    scale = tl.load(scales + in_blocks, mask=is_run, other=0.0).to(tl.float32)
    if HAS_WHOLE_SCALES:
        scale *= tl.load(whole_scales + in_groups, mask=is_run, other=0).to(tl.float32)
    numbers *= scale[:, :, None]
    if HAS_MINIMA:
        minimum = tl.load(minima + in_blocks, mask=is_run, other=0.0).to(tl.float32)
        minimum *= tl.load(whole_minima + in_groups, mask=is_run, other=0).to(tl.float32)
        numbers -= minimum[:, :, None]
    return numbers


@triton.jit
def _with_product(sums, numbers, start, rows, row, is_row, width, BYTES: tl.constexpr, RUN: tl.constexpr):
    """``sums`` (O, TILE) with the products of ``numbers`` (O, RUNS, RUN) and these columns of the rows."""
    column = tl.reshape(start[:, None] + tl.arange(0, RUN)[None, :], (BYTES,))
    at = row[:, None] * width + column[None, :]
    x = tl.load(rows + at, mask=is_row[:, None] & (column < width)[None, :], other=0.0)  # (TILE, BYTES)
    weights = tl.reshape(numbers, (numbers.shape[0], BYTES)).to(x.dtype)
    return sums + tl.dot(weights, tl.trans(x), input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def _block_product(
    rows, bias, products, codes, scales, whole_scales, minima, whole_minima, high_bits, table,
    num_rows, num_outputs, width, product_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    HIGH_BITS: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_WHOLE_SCALES: tl.constexpr,
    HAS_MINIMA: tl.constexpr, RUN: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr,
    OUTPUTS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = tl.minimum(number, num_outputs - 1).to(tl.int64)
    row = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    is_row = row < num_rows
    run = tl.arange(0, BYTES // RUN) * RUN
    place = run[None, :, None] + tl.arange(0, RUN)[None, None, :]
    sums = tl.zeros((OUTPUTS, TILE), tl.float32)
    if HALF > 0:
        for step in range(0, width // 2, BYTES):
            byte = tl.load(
                codes + output[:, None, None] * (width // 2) + step + place,
                mask=step + place < width // 2, other=0,
            ).to(tl.int32)  # fmt: skip
            start = 2 * step + run // HALF * (2 * HALF) + run % HALF
            numbers = _numbers(
                byte & 15, output, start, scales, whole_scales, minima, whole_minima, high_bits, table, width,
                BLOCK, GROUP, ZERO, HIGH_BITS, HAS_TABLE, HAS_WHOLE_SCALES, HAS_MINIMA, RUN,
            )  # fmt: skip
            sums = _with_product(sums, numbers, start, rows, row, is_row, width, BYTES, RUN)
            start += HALF
            numbers = _numbers(
                byte >> 4, output, start, scales, whole_scales, minima, whole_minima, high_bits, table, width,
                BLOCK, GROUP, ZERO, HIGH_BITS, HAS_TABLE, HAS_WHOLE_SCALES, HAS_MINIMA, RUN,
            )  # fmt: skip
            sums = _with_product(sums, numbers, start, rows, row, is_row, width, BYTES, RUN)
    else:
        for step in range(0, width, BYTES):
            code = tl.load(
                codes + output[:, None, None] * width + step + place, mask=step + place < width, other=0
            ).to(tl.int32)
            numbers = _numbers(
                code, output, step + run, scales, whole_scales, minima, whole_minima, high_bits, table, width,
                BLOCK, GROUP, ZERO, HIGH_BITS, HAS_TABLE, HAS_WHOLE_SCALES, HAS_MINIMA, RUN,
            )  # fmt: skip
            sums = _with_product(sums, numbers, step + run, rows, row, is_row, width, BYTES, RUN)
    if HAS_BIAS:
        sums += tl.load(bias + output).to(tl.float32)[:, None]
    at = row[None, :] * product_stride + output[:, None]
    is_result = is_row[None, :] & (number < num_outputs)[:, None]
    tl.store(products + at, sums.to(products.dtype.element_ty), mask=is_result)


@triton.jit
def _widened_rows(
    ids, widened, codes, scales, whole_scales, minima, whole_minima, high_bits, table, num_rows, width,
    HALF: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    HIGH_BITS: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_WHOLE_SCALES: tl.constexpr,
    HAS_MINIMA: tl.constexpr, RUN: tl.constexpr, HAS_IDS: tl.constexpr, ROWS: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    source = tl.load(ids + row, mask=is_row, other=0) if HAS_IDS else tl.where(is_row, row, 0).to(tl.int64)
    run = tl.arange(0, BYTES // RUN) * RUN
    in_run = tl.arange(0, RUN)[None, None, :]
    step = tl.program_id(1) * BYTES
    place = run[None, :, None] + in_run
    to = widened + row.to(tl.int64)[:, None, None] * width + in_run
    dtype: tl.constexpr = widened.dtype.element_ty
    if HALF > 0:
        byte = tl.load(
            codes + source[:, None, None] * (width // 2) + step + place,
            mask=step + place < width // 2,
            other=0,
        ).to(tl.int32)
        start = 2 * step + run // HALF * (2 * HALF) + run % HALF
        low = _numbers(
            byte & 15, source, start, scales, whole_scales, minima, whole_minima, high_bits, table, width,
            BLOCK, GROUP, ZERO, HIGH_BITS, HAS_TABLE, HAS_WHOLE_SCALES, HAS_MINIMA, RUN,
        )  # fmt: skip
        high = _numbers(
            byte >> 4, source, start + HALF, scales, whole_scales, minima, whole_minima, high_bits, table,
            width, BLOCK, GROUP, ZERO, HIGH_BITS, HAS_TABLE, HAS_WHOLE_SCALES, HAS_MINIMA, RUN,
        )  # fmt: skip
        column = start[None, :, None]
        is_inside = is_row[:, None, None] & (column + in_run < width)
        tl.store(to + column, low.to(dtype), mask=is_inside)
        tl.store(to + column + HALF, high.to(dtype), mask=is_inside)
    else:
        code = tl.load(
            codes + source[:, None, None] * width + step + place, mask=step + place < width, other=0
        ).to(tl.int32)
        numbers = _numbers(
            code, source, step + run, scales, whole_scales, minima, whole_minima, high_bits, table, width,
            BLOCK, GROUP, ZERO, HIGH_BITS, HAS_TABLE, HAS_WHOLE_SCALES, HAS_MINIMA, RUN,
        )  # fmt: skip
        column = step + run[None, :, None]
        is_inside = is_row[:, None, None] & (column + in_run < width)
        tl.store(to + column, numbers.to(dtype), mask=is_inside)


def block_product(rows: Tensor, matrix: StoredBlocks, bias: Tensor | None, products: Tensor) -> None:
    """Write ``rows`` (R, in) times ``matrix``, plus ``bias`` (out,), to ``products`` (R, out).

    ``rows`` are contiguous; the outputs of a row lie side by side in ``products``, which may be a part of
    something wider.
    """
    num_rows = len(rows)
    tile = FEWEST_TILE_ROWS
    if rows.dtype != torch.float32:
        tile = min(max(tile, triton.next_power_of_2(num_rows)), MOST_TILE_ROWS)
    outputs = MOST_OUTPUTS if matrix.num_rows >= SMALL else MOST_OUTPUTS // 2
    grid = (triton.cdiv(matrix.num_rows, outputs), triton.cdiv(num_rows, tile))
    _block_product[grid](
        rows, rows if bias is None else bias, products, *_planes(matrix),
        num_rows, matrix.num_rows, matrix.width, products.stride(0),
        HAS_BIAS=bias is not None, TILE=tile, OUTPUTS=outputs, **_constants(matrix), num_warps=4,
    )  # fmt: skip


def widened_rows(matrix: StoredBlocks, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """The rows ``ids`` (...) long of ``matrix``, or all of them, as numbers of ``dtype``: (..., in)."""
    shape = (matrix.num_rows,) if ids is None else ids.shape
    widened = torch.empty(*shape, matrix.width, dtype=dtype, device=matrix.codes.device)
    num_rows = widened.numel() // matrix.width
    constants = _constants(matrix)
    bytes_of_row = matrix.codes.shape[1]
    grid = (triton.cdiv(num_rows, FEWEST_TILE_ROWS), triton.cdiv(bytes_of_row, BYTES_OF_A_STEP))
    _widened_rows[grid](
        matrix.codes if ids is None else ids.contiguous(), widened, *_planes(matrix), num_rows, matrix.width,
        HAS_IDS=ids is not None, ROWS=FEWEST_TILE_ROWS, **constants, num_warps=4,
    )  # fmt: skip
    return widened


def _planes(matrix: StoredBlocks) -> list[Tensor]:
    """The tensors of ``matrix`` as kernels take them; the codes stand for those that it has not."""
    names = ("codes", "scales", "whole_scales", "minima", "whole_minima", "high_bits", "table")
    return [matrix.planes.get(name, matrix.codes) for name in names]


def _constants(matrix: StoredBlocks) -> dict[str, Any]:
    """What the code of a kernel depends on."""
    form = matrix.form
    return {
        "HALF": form.half,
        "BLOCK": form.block,
        "GROUP": form.group,
        "ZERO": form.zero,
        "HIGH_BITS": form.high_bits,
        "HAS_TABLE": form.table is not None,
        "HAS_WHOLE_SCALES": form.has_whole_scales,
        "HAS_MINIMA": form.has_minima,
        "RUN": min(form.half or form.group, form.group),
        "BYTES": BYTES_OF_A_STEP,
    }
