"""Linear layers and embeddings whose weights stay as a file has quantised them.

A quantised file has whole numbers of 4 to 8 bits in groups, each with a scale (GGUF's Q4_K, Q6_K, Q5_0, ...;
GPTQ, AWQ, compressed-tensors).
``cpp/group_weights.h`` holds them in their own bits without changing a number, in the order in which they are
read, and they are multiplied in one of two ways:

- in whole numbers: rows are rounded to 8 bits as well, as other programs do for such files;
- in float32: each number is widened exactly, and rows are as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import HasQuantisedRows
from medusa.base.gguf_file import type_name
from medusa.base.quantised_forms import BLOCK, QuantisedMatrix
from medusa.engine.kernels import PackedMatmul, lanes, weight_memory

FIRST_OF_DIRECTORIES = 1000
"""The first of the types of directories: whole numbers of 4 or 8 bits with a scale for each 32, in float16 or
bfloat16, and perhaps a code of their own for zero. FILE_TYPES of ``cpp/file_types.cpp`` lists them."""


def gguf_types() -> frozenset[int]:
    """The types of GGUF that are held in their own bits, as GGUF numbers them: Q4_0, Q4_K, MXFP4 and others.
    FILE_TYPES of ``cpp/file_types.cpp`` lists them."""
    lanes()  # loads the kernels
    return frozenset(torch.ops.medusa.gguf_types())


@dataclass(frozen=True)
class QuantisedRows:
    """A matrix as a file has it, or one of each expert."""

    rows: Tensor
    """(out, bytes) uint8, or (E, out, bytes)."""
    type: int
    """Its type, of :func:`gguf_types` or from :data:`FIRST_OF_DIRECTORIES` on."""
    num_inputs: int
    order: Tensor | None = None
    """(out,) long: the row of the file that is each output; None where it is the same."""
    input_order: Tensor | None = None
    """(in,) long: the input of each column; None where they are in order."""

    @classmethod
    def of(cls, matrix: QuantisedMatrix) -> QuantisedRows | None:
        """The rows of a matrix of a directory; None where its scales are numbers of float32 only."""
        kinds = (torch.float16, torch.bfloat16)
        kind = next(
            (each for each in kinds if torch.equal(matrix.scales.to(each).float(), matrix.scales.float())),
            None,
        )
        if kind is None:
            return None
        parts = [matrix.scales.to(kind)[..., None].contiguous().view(torch.uint8)]
        if matrix.zeros is not None:
            parts.append(matrix.zeros[..., None])
        codes = matrix.codes.unflatten(1, (-1, BLOCK))  # (out, in / 32, 32)
        if matrix.bits == 4:
            codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        type = FIRST_OF_DIRECTORIES + 4 * (matrix.bits == 8) + 2 * (matrix.zeros is not None)
        type += kind == torch.bfloat16
        rows = torch.cat([*parts, codes], dim=2).flatten(1)
        return cls(rows, type, matrix.codes.shape[1], input_order=matrix.input_order)

    @property
    def packed_bytes(self) -> int:
        """Memory that a product of these rows alone takes: Q2_K and Q3_K are held in 4 bits."""
        *experts, num_rows, _ = self.rows.shape
        if experts:  # each has whole pairs of panels
            num_rows = experts[0] * (num_rows + -num_rows % (2 * lanes()))
        return int(torch.ops.medusa.quantised_size([self.type], [num_rows], self.num_inputs))

    @property
    def type_name(self) -> str:
        """As GGUF names it; of directories "4 bits" or "8 bits"."""
        if self.type >= FIRST_OF_DIRECTORIES:
            return "8 bits" if self.type >= FIRST_OF_DIRECTORIES + 4 else "4 bits"
        return type_name(self.type)


class GroupQuantisedMatmul(PackedMatmul):
    """Rows times quantised matrices, float32 outside: (..., in) -> (..., out).

    Args:
        weights: matrices of one width and one order of inputs, concatenated along the outputs; copied now.
        bias: (out,), or None.
        in_whole_numbers: whether rows are rounded to 8 bits; they are multiplied as they are otherwise.
    """

    input_order: Tensor | None

    def __init__(self, weights: Sequence[QuantisedRows], bias: Tensor | None, in_whole_numbers: bool):
        nn.Module.__init__(self)
        lanes()  # loads the kernels
        num_rows = [len(weight.rows) for weight in weights]
        types = [weight.type for weight in weights]
        self.width = sum(num_rows)
        self.num_inputs = weights[0].num_inputs
        self._types = dict.fromkeys((weight.type_name for weight in weights), 0)
        for weight in weights:
            self._types[weight.type_name] += weight.rows.nbytes
        if isinstance(bias, nn.Parameter):
            self.bias = bias
        else:
            self.register_buffer("bias", bias, persistent=False)
        size = torch.ops.medusa.quantised_size(types, num_rows, self.num_inputs)
        panels = weight_memory.empty((size,), torch.uint8)
        torch.ops.medusa.begin_quantised(panels, types, num_rows, self.num_inputs, in_whole_numbers)
        for index, weight in enumerate(weights):
            torch.ops.medusa.pack_quantised(panels, index, weight.rows, weight.order)
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("scales", None, persistent=False)
        self.register_buffer("input_order", weights[0].input_order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.input_order is None else x.index_select(-1, self.input_order))

    @property
    def is_int8(self) -> bool:
        return bool(torch.ops.medusa.is_in_whole_numbers(self.panels))

    @property
    def number_format(self) -> str:
        """The types of the file: "Q4_K", or "Q4_K and Q6_K"."""
        return " and ".join(sorted(self._types))

    @property
    def bytes_by_format(self) -> dict[str, int]:
        return dict(self._types)

    @property
    def num_outliers(self) -> int | None:
        return None

    def rounded(self) -> Self:
        """This layer: its weights are whole numbers already."""
        return self

    def unpacked(self) -> Tensor:
        """The matrix (out, in) float32, each number as the file means it."""
        columns = torch.ops.medusa.unpack_quantised(self.panels)
        return columns if self.input_order is None else columns[:, self.input_order.argsort()]


class GroupQuantisedLinear(GroupQuantisedMatmul):
    """A linear layer over one quantised matrix."""

    def __init__(self, linear: nn.Linear, weight: QuantisedRows, in_whole_numbers: bool):
        super().__init__([weight], linear.bias, in_whole_numbers)
        self.weight = linear.weight


class GroupQuantisedLMHead(GroupQuantisedLinear, HasQuantisedRows):
    """An LM head over a quantised matrix, whose rows can be looked up: heads read those of their tokens."""

    file_rows: Tensor

    def __init__(self, linear: nn.Linear, weight: QuantisedRows, in_whole_numbers: bool):
        super().__init__(linear, weight, in_whole_numbers)
        self.file_type: int = weight.type
        if weight.order is not None or weight.input_order is not None:
            raise ValueError("rows and inputs of an LM head must stand in the file's order")
        self.register_buffer("file_rows", weight.rows.detach(), persistent=False)

    def rows_in_parts(self, size: int) -> Iterator[Tensor]:
        return map(self.rows_at, torch.arange(self.width).split(size))

    def rows_at(self, ids: Tensor) -> Tensor:
        return torch.ops.medusa.quantised_rows(self.file_rows, ids, self.file_type, self.num_inputs)
