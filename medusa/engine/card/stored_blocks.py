"""Matrices of a GGUF file on a card, in the bits that the file has.

A file has a row as blocks, one after the other, each with its scales and its codes: of 34 bytes, or of 210,
which no card reads well. Here the same bits lie in planes: the codes of all blocks, in their order, then
what codes have beyond four bits, and the scales. Only the scales of Q4_K and Q5_K, six bits each in the file,
take a byte here, and the powers of two of MXFP4 four. ``ggml-common.h`` of llama.cpp has the blocks, and its
``dequantize_row_...`` the numbers; the package ``gguf`` has both in Python, and the tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medusa.base.gguf_file import type_name

IQ4_NL_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What codes stand for, twice that of the Microscaling formats' E2M1."""


@dataclass(frozen=True)
class Form:
    """How a type stores numbers. A number is its scale times (code - zero), or times an entry of the table,
    minus a minimum where it has one."""

    block: int
    """Numbers that share a block, and its scale."""
    num_bytes: int
    """Bytes of a block in a file."""
    take_apart: Callable[[Tensor], dict[str, Tensor]]
    """Blocks (out, blocks, bytes) uint8 -> the planes of :class:`StoredBlocks`, (out, blocks, ...) each."""
    half: int = 0
    """The low four bits of this many bytes are numbers that follow each other, then the high four bits; 0
    where a code has eight bits and a sign."""
    group: int = 32
    """Numbers that share a whole scale."""
    zero: int = 0
    high_bits: int = 0
    """Bits of a code beyond four: of the columns of a chunk of 256 / high_bits, in 32 bytes, those of columns
    c, c + 32, ... in byte c, the lowest first."""
    table: tuple[int, ...] | None = None

    @property
    def has_whole_scales(self) -> bool:
        """Whether groups have scales in whole numbers, times that of the block."""
        return self.block == 256

    @property
    def has_minima(self) -> bool:
        return self.has_whole_scales and self.zero == 0


def _numbers(values: Tensor, kind: torch.dtype = torch.float16) -> Tensor:
    """Bytes (..., 2 n) as float16."""
    return values.contiguous().view(kind)


def _simple(blocks: Tensor) -> dict[str, Tensor]:
    return {"scales": _numbers(blocks[..., :2]), "codes": blocks[..., 2:]}


def _mxfp4(blocks: Tensor) -> dict[str, Tensor]:
    exponents = blocks[..., :1].int()  # half of two to the power of these less 127
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return {"scales": bits.view(torch.float32), "codes": blocks[..., 1:]}


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits each, (..., 8) uint8, that lie in (..., 12) bytes."""
    first, second, third = packed.split(4, dim=-1)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    return scales, minima


def _q4_k(blocks: Tensor) -> dict[str, Tensor]:
    scales, minima = _six_bits(blocks[..., 4:16])
    both = _numbers(blocks[..., :4])
    planes = {"scales": both[..., :1], "minima": both[..., 1:], "whole_scales": scales}
    return {**planes, "whole_minima": minima, "codes": blocks[..., 16:]}


def _q5_k(blocks: Tensor) -> dict[str, Tensor]:
    high_bits = blocks[..., 16:48]
    return {**_q4_k(blocks), "high_bits": high_bits, "codes": blocks[..., 48:]}


def _q6_k(blocks: Tensor) -> dict[str, Tensor]:
    low, high_bits, whole_scales, scales = blocks.split([128, 64, 16, 2], dim=-1)
    planes = {"codes": low, "high_bits": high_bits, "scales": _numbers(scales)}
    return {**planes, "whole_scales": whole_scales.contiguous().view(torch.int8)}


FORMS = {
    2: Form(32, 18, _simple, half=16, zero=8),  # Q4_0
    8: Form(32, 34, _simple),  # Q8_0
    12: Form(256, 144, _q4_k, half=32),  # Q4_K
    13: Form(256, 176, _q5_k, half=32, high_bits=1),  # Q5_K
    14: Form(256, 210, _q6_k, half=64, group=16, zero=32, high_bits=2),  # Q6_K
    20: Form(32, 18, _simple, half=16, table=IQ4_NL_NUMBERS),  # IQ4_NL
    39: Form(32, 17, _mxfp4, half=16, table=MXFP4_NUMBERS),  # MXFP4
}
"""The types that are held so, as GGUF numbers them."""


@dataclass
class StoredBlocks:
    """A matrix (out, in) in the bits of its type.

    Copies of a module share it, as they share parameters.
    """

    type: int
    width: int
    """in."""
    codes: Tensor
    """(out, in / 2) uint8 of two codes each, or (out, in) int8."""
    scales: Tensor
    """(out, in / block) float16 or float32."""
    whole_scales: Tensor | None = None
    """(out, in / group) uint8 or int8."""
    minima: Tensor | None = None
    """(out, in / block) float16."""
    whole_minima: Tensor | None = None
    """(out, in / group) uint8."""
    high_bits: Tensor | None = None
    """(out, in * high_bits / 8) uint8."""
    table: Tensor | None = field(default=None, repr=False)
    """(16,) float32."""

    @classmethod
    def of(cls, rows: Tensor, type: int) -> StoredBlocks:
        """The matrix whose ``rows`` (out, bytes) uint8 a file has; on their device."""
        form = FORMS[type]
        blocks = rows.unflatten(1, (-1, form.num_bytes))
        planes = {name: plane.flatten(1).contiguous() for name, plane in form.take_apart(blocks).items()}
        if not form.half:
            planes["codes"] = planes["codes"].view(torch.int8)
        if form.table is not None:
            planes["table"] = torch.tensor(form.table, dtype=torch.float32, device=rows.device)
        return cls(type, blocks.shape[1] * form.block, **planes)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredBlocks:
        return self

    @property
    def form(self) -> Form:
        return FORMS[self.type]

    @property
    def num_rows(self) -> int:
        return len(self.codes)

    @property
    def planes(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name."""
        planes = {name: value for name, value in vars(self).items() if name not in ("type", "width")}
        return {name: plane for name, plane in planes.items() if plane is not None}

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(plane.nbytes for plane in self.planes.values())

    @property
    def type_name(self) -> str:
        """As GGUF names it."""
        return type_name(self.type)
