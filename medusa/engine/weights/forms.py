"""The forms in which products hold their matrices: each packs them, says what they mean, and its name.

    Exact        numbers in the narrowest of bfloat16, float16 and float32 that holds every one of them
    TwelveBits   numbers of bfloat16 in twelve bits, where this machine multiplies them no slower
    Int8         numbers rounded to 255 whole numbers, times a scale per output
    FileBits     whole numbers in groups, in the bits that a file has for them

Matrices are packed one below the other, and multiplied by one operator, which tells the form by the panels.
A matrix without memory is packed without memory: so a base is counted before it is read.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa import files
from medusa.console import log_console
from medusa.engine.building import FLAGS, source_text
from medusa.engine.kernels import has_tiles, lanes
from medusa.engine.libraries import digest_of, found_compiler, kept_library, why_not_kept
from medusa.engine.weights.memory import HugePages, packed_memory

Packed = tuple[Tensor, Tensor | None]
"""Panels, and the scales (out,) of int8; None in other forms."""


class Form:
    """How a product holds its matrix (out, in)."""

    name: str
    """How the numbers are stored: the name of their type, or "bfloat16 in 12 bits"."""
    is_int8 = False
    """Whether the numbers are multiplied as whole numbers of 8 bits."""

    def bytes_by_name(self, panels: Tensor) -> dict[str, int]:
        """Bytes of the weights by :attr:`name`."""
        return {self.name: panels.nbytes}

    def num_outliers(self, panels: Tensor) -> int | None:
        """Number of weights that are stored separately; None in forms that have no such."""
        return None

    def unpacked(self, panels: Tensor, scales: Tensor | None, num_outputs: int, num_inputs: int) -> Tensor:
        """The matrix (out, in) float32 that ``panels`` and ``scales`` mean."""
        raise NotImplementedError


class Exact(Form):
    """Every number as it is, in a type that holds all of them: panels (P, in / L, lanes, L), where a lane
    holds L = 2 numbers of bfloat16, or one of another type. The last panel and lane are padded with zeros."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.name = str(dtype).removeprefix("torch.")

    def packed(self, weights: Sequence[Tensor]) -> Packed:
        """Contiguous matrices, one below the other."""
        return _in_panels(weights, self.dtype, 2 if self.dtype == torch.bfloat16 else 1), None

    def unpacked(self, panels: Tensor, scales: Tensor | None, num_outputs: int, num_inputs: int) -> Tensor:
        return _rows_of(panels, num_outputs, num_inputs).float()


class Int8(Form):
    """A scale of an output times one of the 255 whole numbers from -127 to 127: panels as of :class:`Exact`,
    of two numbers a lane, four for tile registers."""

    name = "int8"
    is_int8 = True

    def packed(self, weights: Sequence[Tensor]) -> Packed:
        """Contiguous matrices, one below the other."""
        scales = torch.empty(sum(map(len, weights)), dtype=torch.float32, device=weights[0].device)
        return _in_panels(weights, torch.int8, 4 if has_tiles() else 2, scales), scales

    def unpacked(self, panels: Tensor, scales: Tensor | None, num_outputs: int, num_inputs: int) -> Tensor:
        assert scales is not None, "int8 has a scale for each output"
        return _rows_of(panels, num_outputs, num_inputs) * scales[:, None]


def _in_panels(
    weights: Sequence[Tensor], dtype: torch.dtype, per_lane: int, scales: Tensor | None = None
) -> Tensor:
    """Contiguous matrices in panels of ``dtype``; ``scales`` (out,) of int8 are written."""
    num_outputs = sum(map(len, weights))
    num_inputs = weights[0].shape[1]
    shape = (-(-num_outputs // lanes()), -(-num_inputs // per_lane), lanes(), per_lane)
    panels = packed_memory(shape, dtype, weights[0])
    if panels.is_meta:
        return panels
    panels[-1].zero_()
    row = 0
    for weight in weights:
        torch.ops.medusa.pack(weight, panels, scales, row)
        row += len(weight)
    return panels


def _rows_of(panels: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """The matrix (out, in) in panels of numbers."""
    return panels.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:num_outputs, :num_inputs]


def _contiguous(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight if weight.is_contiguous() else weight.contiguous() for weight in weights]


def packed(weights: Sequence[Tensor], int8: bool = False) -> tuple[Form, Packed]:
    """The form that matrices (out, in), one below the other, are held in, and the matrices in it: rounded to
    int8, or in the narrowest form that holds every number exactly."""
    weights = _contiguous(weights)
    if int8:
        rounded = Int8()
        return rounded, rounded.packed(weights)
    dtype = max(map(narrowest_dtype, weights), key=_PRECISIONS.index)
    if dtype == torch.float16 and any(narrowest_dtype(weight) != dtype for weight in weights):
        dtype = torch.float32  # what bfloat16 holds, float16 may not
    is_large = sum(weight.numel() for weight in weights) >= TWELVE_BITS_FROM
    if dtype == torch.bfloat16 and is_large and uses_twelve_bits():
        twelve_bits = TwelveBits()
        contents = twelve_bits.packed(weights)
        if contents is not None:
            return twelve_bits, contents
    exact = Exact(dtype)
    return exact, exact.packed(weights)


def narrowest_dtype(weight: Tensor) -> torch.dtype:
    """The narrowest of bfloat16, float16 and float32 that holds every bit of ``weight``; its own type where
    it has no memory."""
    if weight.is_meta:
        return weight.dtype
    lanes()  # loads the kernels
    return _PRECISIONS[torch.ops.medusa.narrowest(weight.contiguous())]


_PRECISIONS = (torch.bfloat16, torch.float16, torch.float32)


# ------------------------------------------------------------------ the bits of a file


class FileRows(Protocol):
    """A matrix as a file has quantised it: :class:`medusa.engine.weights.stored.QuantisedRows`."""

    @property
    def rows(self) -> Tensor:
        """(out, bytes) uint8."""

    @property
    def type(self) -> int:
        """The number of its type."""

    @property
    def type_name(self) -> str:
        """The name of its type."""

    @property
    def num_inputs(self) -> int:
        """Inputs of a row."""

    @property
    def order(self) -> Tensor | None:
        """(out,) long: the row that is each output; None where it is the same."""

    @property
    def input_order(self) -> Tensor | None:
        """(in,) long: the input of each column; None where they are in order."""


class FileBits(Form):
    """Whole numbers in groups, each with a scale, in the bits that a file has for them (GGUF's Q4_K, Q6_K,
    Q5_0, ...; GPTQ, AWQ, compressed-tensors). ``cpp/group_weights.h`` holds them without changing a number,
    in the order in which they are read. They are multiplied in one of two ways:

    - in whole numbers: rows are rounded to 8 bits as well, as other programs do for such files;
    - in float32: each number is widened exactly, and rows are as they are.
    """

    def __init__(self, weights: Sequence[FileRows], in_whole_numbers: bool):
        self.is_int8 = in_whole_numbers
        self._sizes: Counter[str] = Counter()
        for weight in weights:
            self._sizes[weight.type_name] += weight.rows.nbytes
        self.name = " and ".join(sorted(self._sizes))  # of the types of the file

    def packed(self, weights: Sequence[FileRows]) -> Packed:
        """Matrices of one width, one below the other."""
        lanes()  # loads the kernels
        types = [weight.type for weight in weights]
        num_rows = [len(weight.rows) for weight in weights]
        num_inputs = weights[0].num_inputs
        size = torch.ops.medusa.quantised_size(types, num_rows, num_inputs)
        panels = packed_memory((size,), torch.uint8, weights[0].rows)
        if panels.is_meta:
            return panels, None
        torch.ops.medusa.begin_quantised(panels, types, num_rows, num_inputs, self.is_int8)
        for index, weight in enumerate(weights):
            torch.ops.medusa.pack_quantised(panels, index, weight.rows, weight.order)
        return panels, None

    def bytes_by_name(self, panels: Tensor) -> dict[str, int]:
        """Bytes that the matrices have in their file, by the name of their type there."""
        return dict(self._sizes)

    def unpacked(self, panels: Tensor, scales: Tensor | None, num_outputs: int, num_inputs: int) -> Tensor:
        return torch.ops.medusa.unpack_quantised(panels)


# ------------------------------------------------------------------ twelve bits


TWELVE_BITS_FROM = 2**17
"""Least number of weights of a matrix held in twelve bits: smaller ones stay in the second-level cache."""
TREE_ROWS = (1, 4, 8)
PROMPT_ROWS = 32
LARGEST_PROMPT_RATIO = 1.2
"""Twelve bits are used if products of TREE_ROWS take no longer than in sixteen, in the geometric mean, and
products of PROMPT_ROWS at most LARGEST_PROMPT_RATIO times as long, which is the noise of a trial."""
_twelve_bits: bool | None = None


class TwelveBits(Form):
    """Numbers that bfloat16 holds: panels (P, bytes) uint8, as ``cpp/twelve_bits.h`` says."""

    name = "bfloat16 in 12 bits"

    def packed(self, weights: Sequence[Tensor]) -> Packed | None:
        """Contiguous matrices; None if a panel has no room for its outliers."""
        if any(len(weight) % lanes() for weight in weights[:-1]):
            weights = [torch.cat([weight.bfloat16() for weight in weights])]
        size = torch.ops.medusa.twelve_size(weights[0].shape[1])
        shape = (-(-sum(map(len, weights)) // lanes()), size)
        panels = packed_memory(shape, torch.uint8, weights[0])
        row = 0
        for weight in () if panels.is_meta else weights:
            in_bfloat16 = weight.bfloat16() if weight.dtype == torch.float16 else weight
            if torch.ops.medusa.encode_twelve(in_bfloat16, panels, row) < 0:
                return None
            row += len(weight)
        return panels, None

    def num_outliers(self, panels: Tensor) -> int | None:
        return int(torch.ops.medusa.num_outliers(panels))

    def unpacked(self, panels: Tensor, scales: Tensor | None, num_outputs: int, num_inputs: int) -> Tensor:
        return torch.ops.medusa.decode_twelve(panels, num_outputs, num_inputs).float()


def uses_twelve_bits(wanted: bool | None = None) -> bool:
    """Whether large matrices of bfloat16 numbers are packed in twelve bits a weight, every number exactly.

    They are where this machine multiplies them no slower than in sixteen bits. The first call measures that,
    in about two seconds, and keeps the result beside the compiled kernels: delete it there to measure again.

    Args:
        wanted: sets it from now on. Matrices that are packed already stay as they are.

    Raises:
        ValueError: the kernels cannot run here.
    """
    global _twelve_bits
    lanes()  # loads them
    if wanted is not None:
        _twelve_bits = wanted
    if _twelve_bits is None:
        ratios = _kept_ratios()
        mean = statistics.geometric_mean(ratios[str(rows)] for rows in TREE_ROWS)
        _twelve_bits = mean <= 1 and ratios[str(PROMPT_ROWS)] <= LARGEST_PROMPT_RATIO
    return _twelve_bits


def _kept_ratios() -> dict[str, float]:
    """:func:`_time_ratios` of this machine, measured once."""
    digest = digest_of(source_text(), found_compiler(), FLAGS, torch.get_num_threads())
    path = kept_library("twelve-bits", digest).with_suffix(".json")
    try:
        if path.exists():
            return dict(files.read_json(path))
        ratios = _time_ratios()
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, ratios)
    except (OSError, ValueError) as error:  # no place to keep it, or what was kept is damaged
        text = f"twelve bits are timed for this process only: {why_not_kept(error)}"
        log_console().print(text, style="dim", soft_wrap=True)
        ratios = _time_ratios()
    return ratios


def _time_ratios() -> dict[str, float]:
    """The time of a product in twelve bits, relative to sixteen, by number of rows: the shortest of trials in
    turns, which other programs delay least, over more weights than the caches of most processors hold."""
    weight = torch.randn(64 * lanes(), 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages = HugePages()
    repeats = 256 // lanes()
    forms = []
    for contents in (TwelveBits().packed([weight]), Exact(torch.bfloat16).packed([weight])):
        assert contents is not None, "normal numbers have a place in twelve bits"
        panels = contents[0]
        forms.append(pages.empty((repeats, *panels.shape), panels.dtype).copy_(panels).flatten(0, 1))
    ratios = {}
    for rows in (*TREE_ROWS, PROMPT_ROWS):
        x = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(1))
        times: tuple[list[float], list[float]] = [], []
        for _, (seconds, panels) in itertools.product(range(9), list(zip(times, forms, strict=True))):
            start = time.perf_counter()
            torch.ops.medusa.packed_product(x, panels, None, None, repeats * len(weight))
            seconds.append(time.perf_counter() - start)
        ratios[str(rows)] = min(times[0]) / min(times[1])
    return ratios
