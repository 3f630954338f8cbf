"""The forms in which directories hold quantised matrices, and the numbers that they mean.

- "gptq": ``qweight`` (in / P, out) int32, each P codes of 4 or 8 bits of inputs that follow each other;
  ``qzeros`` (groups, out / P), less one in the first version of the format; ``scales`` (groups, out); perhaps
  ``g_idx`` (in,), the group of each input. As AutoGPTQ and GPTQModel write them.
- "awq": ``qweight`` (in, out / 8) int32 and ``qzeros`` (groups, out / 8), the outputs of a word in the order
  0, 2, 4, 6, 1, 3, 5, 7; ``scales`` (groups, out). As AutoAWQ writes them in its packing "gemm".
- "packed" of compressed-tensors: ``weight_packed`` (out, in / P) int32; ``weight_scale`` (out, groups);
  perhaps ``weight_zero_point`` (out / P, groups) int32, or (out, groups) int8, and ``weight_g_idx`` (in,).
  Numbers have a sign there, and half of their range is added where they are packed.
- "int8" of compressed-tensors: ``weight`` (out, in) int8, and the others as above.
- MXFP4 of experts (GPT-OSS): ``.._blocks`` (E, out, in / 32, 16) uint8, two codes in a byte, the lower half
  first; ``.._scales`` (E, out, in / 32) uint8, exponents of two, 127 for one.
- "fp8" of compressed-tensors and of transformers: ``weight`` (out, in) in float8_e4m3fn; ``weight_scale`` or
  ``weight_scale_inv``: one number, one an output, or one a block of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Inputs that share a scale and a zero at least, as the kernels hold them."""
SCALES = ("scales", "weight_scale", "weight_scale_inv")
ZEROS = ("qzeros", "weight_zero_point")
GROUPS_OF_INPUTS = ("g_idx", "weight_g_idx")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight that follow each other, of each four bits of a word of AWQ, the lowest bits first."""

Parts = Mapping[str, Tensor]
"""The tensors of a layer by the last part of their names."""


@dataclass(frozen=True)
class QuantisedLayer:
    """How the weight of a linear layer is held."""

    name: str
    form: str
    """One of :data:`FORMS`."""
    shape: tuple[int, int]
    """(out, in)."""
    bits: int
    """Bits of a code."""
    num_groups: int
    """Scales of an output; of FP8 those of a row of blocks."""

    @property
    def num_weights(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix of whole numbers: a weight is scale (code - zero)."""

    codes: Tensor
    """(out, in) uint8, the inputs of a group beside each other."""
    bits: int
    """4 or 8."""
    scales: Tensor
    """(out, in / 32) in a float type."""
    zeros: Tensor | None
    """(out, in / 32) uint8; None where they are half of the codes' range everywhere."""
    input_order: Tensor | None
    """(in,) long: the input of each column; None where they are in order."""

    def widened(self) -> Tensor:
        """The matrix (out, in) float32, its columns in the order of the inputs."""
        blocks = self.codes.unflatten(1, (-1, BLOCK)).float()  # (out, in / 32, 32)
        zeros = 2.0 ** (self.bits - 1) if self.zeros is None else self.zeros[..., None].float()
        numbers = ((blocks - zeros) * self.scales[..., None].float()).flatten(1)
        return numbers if self.input_order is None else numbers[:, self.input_order.argsort()]


@dataclass(frozen=True)
class Form:
    """The tensors of a form."""

    codes: str
    """The last part of the name of the tensor that holds the codes."""
    others: tuple[str, ...]
    """The last parts of the names of tensors that may be beside it, scales excepted."""
    shapes: Callable[[int, int, int, int], dict[str, tuple[int, ...]]]
    """Shapes of what must be there, for outputs, inputs, codes in a word, and groups."""
    codes_of: Callable[[Parts, QuantisedLayer], Tensor]
    """The codes (out, in) uint8 of a layer's tensors."""
    zeros_of: Callable[[Parts, QuantisedLayer], Tensor | None]
    """The zeros (out, groups) uint8 of a layer's tensors; None where there are none."""

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.codes, *SCALES, *self.others)


def _unpacked(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """The codes, uint8, of int32 words that hold ``32 / bits`` of them along dimension ``dim`` (0 or 1)."""
    per_word = 32 // bits
    shape = list(words.shape)
    shape.insert(dim + 1, per_word)
    codes = torch.empty(shape, dtype=torch.uint8)
    for at, place in enumerate(order or range(per_word)):
        codes.select(dim + 1, place).copy_((words >> bits * at) & 2**bits - 1)
    return codes.flatten(dim, dim + 1)


def _codes_of_gptq(parts: Parts, layer: QuantisedLayer) -> Tensor:
    return _unpacked(parts["qweight"], layer.bits, 0).T.contiguous()


def _zeros_of_gptq(parts: Parts, layer: QuantisedLayer) -> Tensor:
    return _unpacked(parts["qzeros"], layer.bits, 1).T


def _codes_of_awq(parts: Parts, layer: QuantisedLayer) -> Tensor:
    return _unpacked(parts["qweight"], layer.bits, 1, AWQ_ORDER).T.contiguous()


def _zeros_of_awq(parts: Parts, layer: QuantisedLayer) -> Tensor:
    return _unpacked(parts["qzeros"], layer.bits, 1, AWQ_ORDER).T


def _packed_codes(parts: Parts, layer: QuantisedLayer) -> Tensor:
    return _unpacked(parts["weight_packed"], layer.bits, 1)


def _int8_codes(parts: Parts, layer: QuantisedLayer) -> Tensor:
    return parts["weight"].view(torch.uint8) ^ 128


def _signed_zeros(parts: Parts, layer: QuantisedLayer) -> Tensor | None:
    """The zeros (out, groups) uint8 of compressed-tensors, half of the range added; None where there are
    none."""
    zeros = parts.get("weight_zero_point")
    if zeros is None:
        return None
    if zeros.dtype == torch.int32:
        return _unpacked(zeros, layer.bits, 0)[: layer.shape[0]]
    return (zeros.to(torch.int16) + 2 ** (layer.bits - 1)).to(torch.uint8).view(-1, layer.num_groups)


def _no_codes(parts: Parts, layer: QuantisedLayer) -> Tensor:
    raise AssertionError("FP8 has no codes: see fp8_numbers")


FORMS = {
    "gptq": Form(
        "qweight",
        ("qzeros", "g_idx"),
        lambda n, k, p, g: {"qweight": (k // p, n), "qzeros": (g, n // p), "scales": (g, n)},
        _codes_of_gptq,
        _zeros_of_gptq,
    ),
    "awq": Form(
        "qweight",
        ("qzeros",),
        lambda n, k, p, g: {"qweight": (k, n // p), "qzeros": (g, n // p), "scales": (g, n)},
        _codes_of_awq,
        _zeros_of_awq,
    ),
    "packed": Form(
        "weight_packed",
        ("weight_shape", "weight_zero_point", "weight_g_idx"),
        lambda n, k, p, g: {"weight_packed": (n, k // p), "weight_scale": (n, g)},
        _packed_codes,
        _signed_zeros,
    ),
    "int8": Form(
        "weight",
        ("weight_zero_point",),
        lambda n, k, p, g: {"weight": (n, k), "weight_scale": (n, g)},
        _int8_codes,
        _signed_zeros,
    ),
    "fp8": Form("weight", (), lambda n, k, p, g: {"weight": (n, k)}, _no_codes, _no_codes),
}


def fp8_numbers(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 numbers (out, in) times their scales, bfloat16; ``block`` are the outputs and inputs of a scale."""
    rows, columns = codes.shape
    grid = scales.float().reshape(-(-rows // block[0]), -(-columns // block[1]))
    row_scales = grid if grid.shape[1] == 1 else grid.repeat_interleave(block[1], 1)[:, :columns]
    result = torch.empty(codes.shape, dtype=torch.bfloat16)
    for first in range(0, rows, block[0]):  # a row of blocks at a time
        part = slice(first, first + block[0])
        result[part] = codes[part].float() * row_scales[first // block[0]]
    return result


MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of MXFP4's codes 0 to 7; codes 8 to 15 are the same with a minus (OCP Microscaling Formats
Specification 1.0, E2M1)."""


def mxfp4_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrix (out, in) of an expert from its blocks and scales, bfloat16, which holds each number."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # (out, in / 32, 32)
    numbers = torch.tensor([*MXFP4, *(-each for each in MXFP4)])[codes.long()]
    return torch.ldexp(numbers, scales[..., None].int() - 127).flatten(1).bfloat16()


def mxfp4_rows(blocks: Tensor, scales: Tensor) -> Tensor:
    """The same as rows of a GGUF file, (out, bytes) uint8: a block is its scale and 16 bytes, whose lower
    halves are its first 16 codes."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.cat((scales[..., None], codes[..., :16] | codes[..., 16:] << 4), dim=-1).flatten(1)
