"""Modules that multiply rows by packed matrices: alone, or joined with others that read one input."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import HasQuantisedRows
from medusa.engine.weights.forms import FileBits, FileRows, Form, Packed, packed


class PackedMatmul(nn.Module):
    """Rows times a matrix, float32 outside: (..., in) -> (..., out).

    Args:
        weights: matrices (out, in) in float32, bfloat16 or float16, concatenated along the outputs; copied
            now, later changes have no effect.
        bias: (out,), or None.
        int8: whether the weights are rounded to int8; they are held exactly otherwise.
    """

    panels: Tensor
    scales: Tensor | None
    bias: Tensor | None

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, int8: bool = False):
        super().__init__()
        form, contents = packed(weights, int8)
        self._hold(form, contents, sum(map(len, weights)), weights[0].shape[1], bias)

    def _hold(self, form: Form, contents: Packed, width: int, num_inputs: int, bias: Tensor | None) -> None:
        """Hold a matrix (``width``, ``num_inputs``) and its bias."""
        self.form = form
        self.width = width
        self.num_inputs = num_inputs
        if isinstance(bias, nn.Parameter):
            self.bias = bias  # shared with the base
        else:
            self.register_buffer("bias", bias, persistent=False)
        panels, scales = contents
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.bfloat16, torch.float16):  # of heads in training, autocast makes such rows
            x = x.float()
        if torch.is_grad_enabled() and x.requires_grad:  # their loss is through an LM head
            return _ProductWithGradient.apply(x, self)
        return torch.ops.medusa.packed_product(x, self.panels, self.scales, self.bias, self.width)

    def rows_in_parts(self, size: int) -> Iterator[Tensor]:
        """The rows of the matrix in their order, (``size``, in) float32 at a time; the last part may be
        smaller."""
        rows = self._buffers.get("rows")  # of an LM head, whose base was loaded for an engine
        if rows is None or self.is_int8:
            rows = self.unpacked()
        for part in rows.split(size):
            yield part.float()

    @property
    def is_int8(self) -> bool:
        """Whether the weights are multiplied as whole numbers of 8 bits."""
        return self.form.is_int8

    @property
    def number_format(self) -> str:
        """How the weights are stored, as :attr:`medusa.engine.weights.forms.Form.name` says it."""
        return self.form.name

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Bytes of the weights by :attr:`number_format`, or by the types of their file."""
        return self.form.bytes_by_name(self.panels)

    @property
    def num_outliers(self) -> int | None:
        """Number of weights that are stored separately from the twelve-bit ones; None for other forms."""
        return self.form.num_outliers(self.panels)

    def rounded(self) -> Self:
        """The same layer with its weights rounded to int8."""
        layer = copy.copy(self)
        layer.form, (panels, scales) = packed([self.unpacked()], int8=True)
        layer._buffers = {**self._buffers, "panels": panels, "scales": scales}
        return layer

    def unpacked(self) -> Tensor:
        """The matrix (out, in) float32 that this multiplies by."""
        return self.form.unpacked(self.panels, self.scales, self.width, self.num_inputs)


ROWS_OF_A_GRADIENT = 8192
"""Rows of a matrix that are widened at once for a gradient: 134 MB at a hidden size of 4,096."""


class _ProductWithGradient(torch.autograd.Function):
    """A product, with the gradient of its widened rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: PackedMatmul) -> Tensor:
        ctx.product = product
        with torch.no_grad():
            return product.forward(x.detach())  # hooks have run

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        columns = gradient.split(ROWS_OF_A_GRADIENT, dim=-1)
        rows = ctx.product.rows_in_parts(ROWS_OF_A_GRADIENT)
        parts = [each @ part for each, part in zip(columns, rows, strict=True)]
        return torch.stack(parts).sum(0), None


class GroupQuantisedMatmul(PackedMatmul):
    """Rows times matrices in the bits of a file, float32 outside: (..., in) -> (..., out).

    Args:
        weights: matrices of one width and one order of inputs, concatenated along the outputs; copied now.
        bias: (out,), or None.
        in_whole_numbers: whether rows are rounded to 8 bits; they are multiplied as they are otherwise.
    """

    input_order: Tensor | None

    def __init__(self, weights: Sequence[FileRows], bias: Tensor | None, in_whole_numbers: bool):
        nn.Module.__init__(self)
        form = FileBits(weights, in_whole_numbers)
        width = sum(len(weight.rows) for weight in weights)
        self._hold(form, form.packed(weights), width, weights[0].num_inputs, bias)
        self.register_buffer("input_order", weights[0].input_order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.input_order is None else x.index_select(-1, self.input_order))

    def rounded(self) -> Self:
        """This layer: its weights are whole numbers already."""
        return self

    def unpacked(self) -> Tensor:
        """The matrix (out, in) float32, each number as the file means it."""
        columns = super().unpacked()
        return columns if self.input_order is None else columns[:, self.input_order.argsort()]


class GroupQuantisedLMHead(GroupQuantisedMatmul, HasQuantisedRows):
    """An LM head over a quantised matrix, whose rows can be looked up: heads read those of their tokens."""

    file_rows: Tensor

    def __init__(self, weight: FileRows, bias: Tensor | None, in_whole_numbers: bool):
        super().__init__([weight], bias, in_whole_numbers)
        self.file_type: int = weight.type
        if weight.order is not None or weight.input_order is not None:
            raise ValueError("rows and inputs of an LM head must stand in the file's order")
        self.register_buffer("file_rows", weight.rows.detach(), persistent=False)

    def rows_in_parts(self, size: int) -> Iterator[Tensor]:
        return map(self.rows_at, torch.arange(self.width).split(size))

    def rows_at(self, ids: Tensor) -> Tensor:
        return torch.ops.medusa.quantised_rows(self.file_rows, ids, self.file_type, self.num_inputs)


# ------------------------------------------------------------------ layers that read one input


ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names, within one module, of layers that read one input, in the order in which they are called. A layer
with another input still gives the right result, only without a gain."""


def joinable_linears(module: nn.Module) -> Iterator[list[nn.Linear]]:
    """The groups of linear layers directly below ``module`` that read one input."""
    for names in ONE_INPUT:
        layers = [module._modules.get(name) for name in names]
        linears = [layer for layer in layers if type(layer) is nn.Linear]
        inputs = {(layer.in_features, layer.bias is None) for layer in linears}
        if len(linears) == len(names) and len(inputs) == 1:
            yield linears


def joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of ``linears``, one after the other; None where they have none."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return torch.cat(biases) if biases else None


def share_product(linears: Sequence[nn.Linear], product: nn.Module) -> list[JoinedLinear]:
    """Replacements of ``linears`` that are computed by ``product``, which has their outputs in order."""
    shared = _JointProduct([linear.out_features for linear in linears])
    layers = [JoinedLinear(linear, shared, index) for index, linear in enumerate(linears)]
    layers[0].product = product
    shared.first = layers[0]
    return layers


class JoinedLinear(nn.Module):
    """A linear layer that is computed together with others of the same input: (..., in) -> (..., out)."""

    product: nn.Module
    """The product of all of them, which only the first one has: this one's columns are those of its place."""

    def __init__(self, linear: nn.Linear, shared: _JointProduct, index: int):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias  # shared with the base
        self.shared = shared
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.part(self._index, x)


class _JointProduct:
    """One product for several layers, and its result for the last input until all have taken their part.

    Not an ``nn.Module``, so that a model does not list the same one under each of its layers.
    """

    first: JoinedLinear
    """The layer that has the product."""

    def __init__(self, widths: list[int]):
        self.widths = widths
        self._held: tuple[Tensor, int, tuple[Tensor, ...]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": None}

    def part(self, index: int, x: Tensor) -> Tensor:
        """Columns of layer ``index`` for input ``x`` (..., in)."""
        held = self._held
        version = 0 if x.is_inference() else x._version
        if held is None or held[0] is not x or held[1] != version:
            held = (x, version, self.first.product(x).split(self.widths, dim=-1))
        self._held = None if index == len(self.widths) - 1 else held
        return held[2][index]
