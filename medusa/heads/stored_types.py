"""The types in which the weights of heads stand in their file.

Float types are tensors of that type. In Q8_0 and Q4_0, types of GGUF, each 32 numbers of a row share a
float16 scale, and each number is a whole one of 8 or 4 bits: 34 or 18 bytes in place of 128. A matrix (N, D)
is then a tensor (N, bytes of a row) uint8. All that is no matrix, or whose rows are no multiple of 32, is
float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

GroupType = Literal["Q8_0", "Q4_0"]
GROUP = 32
"""Numbers that share a scale."""
ROW_BYTES: dict[str, int] = {"Q8_0": 34, "Q4_0": 18}
"""Bytes of a group."""
_SCALES_TRIED = 24
"""The number of scales that are tried for each group of Q4_0."""


def stored(state: Mapping[str, Tensor], dtype: torch.dtype | GroupType | None) -> dict[str, Tensor]:
    """The tensors of a module, by name, as they are written: in ``dtype``, or in their own where it is
    None."""
    return {name: _stored(tensor.detach(), dtype).contiguous() for name, tensor in state.items()}


def _stored(tensor: Tensor, dtype: torch.dtype | GroupType | None) -> Tensor:
    """One tensor as it is written."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    if isinstance(dtype, torch.dtype):
        return tensor.to(dtype)
    if not is_grouped(tensor.shape):
        return tensor.to(torch.float16)
    numbers = tensor.float().cpu()
    return _in_four_bits(numbers) if dtype == "Q4_0" else _in_eight_bits(numbers)


def is_grouped(shape: torch.Size) -> bool:
    """Whether a tensor of that shape is written in groups."""
    return len(shape) == 2 and shape[1] % GROUP == 0


def widened(rows: Tensor, dtype: str, shape: torch.Size) -> Tensor:
    """The float32 numbers of ``shape`` that ``rows`` (N, bytes) uint8 hold in groups of the type ``dtype``.

    Raises:
        ValueError: the rows are not of that size.
    """
    bytes_of_row = shape[1] // GROUP * ROW_BYTES[dtype]
    if rows.dtype != torch.uint8 or tuple(rows.shape) != (shape[0], bytes_of_row):
        raise ValueError(
            f"must be {(shape[0], bytes_of_row)} bytes to hold {tuple(shape)} numbers in {dtype}, got "
            f"{rows.dtype} {tuple(rows.shape)}; the files are damaged or do not belong together, get them "
            "again"
        )
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(rows.numpy(), GGMLQuantizationType[dtype]))


def exact_four_bits(numbers: Tensor) -> Tensor | None:
    """The bytes of ``numbers`` (N, D) in Q4_0, if these hold each of them exactly, as those that were read
    from such a file; else None."""
    if not is_grouped(numbers.shape) or _exact_scales(numbers[:1].float()) is None:
        return None
    numbers = numbers.float()
    scales = _exact_scales(numbers)
    return None if scales is None else _bytes_of_codes(numbers.unflatten(-1, (-1, GROUP)), scales)


def _exact_scales(numbers: Tensor) -> Tensor | None:
    """For each group of ``numbers`` (N, D) float32 a scale (N, groups, 1), of which all its numbers are -8 to
    7 times; None where a group has none."""
    groups = numbers.unflatten(-1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = torch.zeros_like(largest)
    waiting = largest.flatten() != 0
    for code in (-8, -7, *range(-6, 0), *range(1, 8)):  # what the largest number may be: mostly -8
        left = waiting.nonzero().squeeze(1)
        if not len(left):
            break
        scale = (largest.flatten()[left] / code).half().float()[:, None]  # (G, 1)
        some = groups.flatten(0, -2)[left]  # (G, GROUP)
        is_exact = (_codes(some, scale) * scale == some).all(-1)
        scales.view(-1)[left[is_exact]] = scale.squeeze(1)[is_exact]
        waiting[left[is_exact]] = False
    return None if waiting.any() else scales


def _in_eight_bits(numbers: Tensor) -> Tensor:
    """The bytes of ``numbers`` (N, D) float32 in Q8_0."""
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.quantize(numbers.numpy(), GGMLQuantizationType.Q8_0))


def _in_four_bits(numbers: Tensor) -> Tensor:
    """The bytes of ``numbers`` (N, D) float32 in Q4_0, with the scale of each group that has the least square
    error, of those around the usual one.

    The usual scale maps the number of the largest size to -8.
    """
    groups = numbers.unflatten(-1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best_error = torch.full_like(largest, torch.inf)
    best = torch.zeros_like(largest)
    for divisor in torch.linspace(-9.5, -6.5, _SCALES_TRIED).tolist():
        scale = (largest / divisor).half().float()
        error = (_codes(groups, scale) * scale - groups).square().sum(-1, keepdim=True)
        best = torch.where(error < best_error, scale, best)
        best_error = torch.minimum(error, best_error)
    return _bytes_of_codes(groups, best)


def _bytes_of_codes(groups: Tensor, scales: Tensor) -> Tensor:
    """The bytes of ``groups`` (N, groups, GROUP) float32 in Q4_0, with these scales (N, groups, 1)."""
    codes = (_codes(groups, scales) + 8).to(torch.uint8)
    pairs = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return torch.cat([scales.half().view(torch.uint8), pairs], dim=-1).flatten(-2)


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    """The whole numbers, -8 to 7, that times ``scale`` are nearest to ``groups``."""
    codes = torch.where(scale == 0, torch.zeros_like(groups), groups / scale)
    return codes.round().clamp(-8, 7)
