"""Linear layers and embeddings whose weights stay as a file has quantised them.

A quantised file has whole numbers of 4 to 8 bits in groups, each with a scale (GGUF's Q4_K, Q6_K, Q5_0, ...).
``group_quantised.cpp`` holds them in their own bits without changing a number, in the order in which it reads
them, and multiplies in one of two ways:

- in whole numbers: rows are rounded to 8 bits as well, as other programs do for such files;
- in float32: each number is widened exactly, and rows are as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import HasQuantisedRows
from medusa.base.gguf_file import type_name
from medusa.engine.kernels import PackedMatmul, lanes, weight_memory

PACKED_TYPES = frozenset({2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39})
"""Types of GGUF that are held in their own bits, as GGUF numbers them: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to
Q6_K, IQ4_NL, IQ4_XS and MXFP4."""


@dataclass(frozen=True)
class QuantisedRows:
    """A matrix as a file has it."""

    rows: Tensor
    """(out, bytes) uint8."""
    type: int
    """Its type, of :data:`PACKED_TYPES`."""
    num_inputs: int
    order: Tensor | None = None
    """(out,) long: the row of the file that is each output; None where it is the same."""


class GroupQuantisedMatmul(PackedMatmul):
    """Rows times quantised matrices, float32 outside: (..., in) -> (..., out).

    Args:
        weights: matrices of one width, concatenated along the outputs; copied now.
        bias: (out,), or None.
        in_whole_numbers: whether rows are rounded to 8 bits; they are multiplied as they are otherwise.
    """

    def __init__(self, weights: Sequence[QuantisedRows], bias: Tensor | None, in_whole_numbers: bool):
        nn.Module.__init__(self)
        lanes()  # loads the kernels
        num_rows, types = [len(each.rows) for each in weights], [each.type for each in weights]
        self.width, self.num_inputs = sum(num_rows), weights[0].num_inputs
        self._types = dict.fromkeys(map(type_name, types), 0)
        for each in weights:
            self._types[type_name(each.type)] += each.rows.nbytes
        if isinstance(bias, nn.Parameter):
            self.bias = bias
        else:
            self.register_buffer("bias", bias, persistent=False)
        size = torch.ops.medusa.quantised_size(types, num_rows, self.num_inputs)
        panels = weight_memory.empty((size,), torch.uint8)
        torch.ops.medusa.begin_quantised(panels, types, num_rows, self.num_inputs, in_whole_numbers)
        for index, each in enumerate(weights):
            torch.ops.medusa.pack_quantised(panels, index, each.rows, each.order)
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("scales", None, persistent=False)

    @property
    def is_int8(self) -> bool:
        return bool(self.panels[12:16].view(torch.int32))  # Head of group_quantised.cpp

    @property
    def number_format(self) -> str:
        """The types of the file: "Q4_K", or "Q4_K and Q6_K"."""
        return " and ".join(sorted(self._types))

    @property
    def bytes_by_format(self) -> dict[str, int]:
        return dict(self._types)

    @property
    def num_apart(self) -> int | None:
        return None

    def rounded(self) -> Self:
        """This layer: its weights are whole numbers already."""
        return self

    def unpacked(self) -> Tensor:
        """The matrix (out, in) float32, each number as the file means it."""
        return torch.ops.medusa.unpack_quantised(self.panels)


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
        order = weight.order
        if order is not None:
            raise ValueError("the rows of an LM head must stand in the file's order")
        self.register_buffer("file_rows", weight.rows.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()  # of heads in training, autocast may have made another type
        if torch.is_grad_enabled() and x.requires_grad:  # their loss is through it
            return _Product.apply(x, self)
        return super().forward(x)

    def rows_at(self, ids: Tensor) -> Tensor:
        return torch.ops.medusa.quantised_rows(self.file_rows, ids, self.file_type, self.num_inputs)


ROWS_OF_A_GRADIENT = 8192
"""Rows of a matrix that are widened at once for a gradient: 134 MB at a hidden size of 4,096."""


class _Product(torch.autograd.Function):
    """The product of an LM head, with the gradient of its widened rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: GroupQuantisedLMHead) -> Tensor:
        ctx.head = head
        return torch.ops.medusa.packed_product(x.detach(), head.panels, None, head.bias, head.width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        head, parts = ctx.head, []
        for ids in torch.arange(head.width).split(ROWS_OF_A_GRADIENT):
            parts.append(gradient[..., ids[0] : ids[-1] + 1] @ head.rows_at(ids))
        return torch.stack(parts).sum(0), None
