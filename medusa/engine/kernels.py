"""Operators of torch in C++ for passes of few rows on a CPU, compiled here at first use and kept on disk; and
linear layers that multiply with them.

The C++ in ``cpp/`` holds a product with packed weights and attention over a tree. A CPU's ordinary operators
are slow between 2 and 32 rows, the range in which trees are verified, and their order of additions depends on
the number of rows. These read every weight, key and value once, and add in one order, so the result of a row
is bit-identical whatever the other rows are. It also grows dynamic trees, where
:mod:`medusa.drafters.dynamic` would call some two hundred small operators.

A wheel brings them compiled (:mod:`medusa.engine.prebuilt`). Elsewhere, and for a processor with more
instructions than those know, the installed compiler compiles them in about fifteen seconds.

Arithmetic is in float32. Weights are held in the narrowest of bfloat16, float16 and float32 that holds every
number exactly: most checkpoints were published in bfloat16, and are the same model to the last bit at half
the memory and nearly half the time. Numbers of bfloat16 take twelve bits where that is faster
(:func:`uses_twelve_bits`): a trained matrix has few exponents, so a code of four bits is enough for the upper
byte of all but a few in ten thousand weights, and the outliers are stored separately.

In int8 a weight has one scale per output channel, and the text is another model's (MEASUREMENTS says how
near). Activations are rounded to integers of 16 bits, 256 to a scale; products are added as integers, which
is exact in any order and half the work of widening to float32.

On processors with tile registers (AMX: Intel's servers since 2023) products of bfloat16 and int8 are computed
in them, so that a pass of 16 rows takes little longer than one of a single row. Tiles multiply bfloat16 by
bfloat16, and rows are float32: each number is split into three bfloat16 numbers with exactly the same sum,
and sums are float32. Numbers below 1e-38 count as zero there. Weights in twelve bits are widened to bfloat16
a tile at a time, or once a panel for more than 16 rows. Int8 gives the same bits either way.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import itertools
import math
import mmap
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from medusa import files
from medusa.base.attention import POSITION_OPTIONS, TREE_ATTENTION
from medusa.console import log_console
from medusa.engine import building
from medusa.engine.building import CPP, FLAGS, source_text
from medusa.engine.libraries import (
    INSTALL_COMPILER,
    check_library,
    compile_library,
    digest_of,
    found_compiler,
    in_a_line,
    kept_library,
    why_not_kept,
)
from medusa.engine.prebuilt import prebuilt_kernels


@functools.cache
def kernels_unsupported_reason() -> str | None:
    """The missing requirement of the kernels on this machine, in words; None if there is none, and they are
    loaded."""
    compiler = found_compiler()
    if not _has_loaded_prebuilt(compiler is not None):
        lacks = _why_not_compiled(compiler)
        if lacks is not None:
            return lacks
    torch.library.register_fake("medusa::packed_product", _shape_of_product, allow_override=True)
    torch.library.register_fake("medusa::expert_products", _shape_of_experts, allow_override=True)
    torch.library.register_fake("medusa::tree_attention", _shape_of_attention, allow_override=True)
    torch.library.register_fake("medusa::quantised_rows", _shape_of_rows, allow_override=True)
    torch.library.register_fake("medusa::matrix_rule", _shapes_of_rule, allow_override=True)
    torch.library.register_fake("medusa::rows_at", _shape_of_rows_at, allow_override=True)
    return None


def _has_loaded_prebuilt(has_compiler: bool) -> bool:
    """Whether a library of the wheel computes here; where it should and cannot, a line says why."""
    try:
        path = prebuilt_kernels(FLAGS, has_compiler)
        if path is not None:
            _load(path)
    except (OSError, ValueError) as error:
        text = f"the kernels that came with medusa are not used: {in_a_line(error)}"
        log_console().print(text, style="dim", soft_wrap=True)
        return False
    return path is not None


def _why_not_compiled(compiler: str | None) -> str | None:
    """The missing requirement of kernels that ``compiler`` makes; None without any, and they are loaded."""
    if compiler is None:
        return f"a C++ compiler (g++ or clang++), and none is installed ({INSTALL_COMPILER})"
    try:
        _load(_compiled(compiler))
    except subprocess.CalledProcessError as error:
        return f"kernels that compile, and {compiler} failed: {in_a_line(error)}"
    except (OSError, ValueError) as error:  # no place to keep it, or none to run it from
        log_console().print(
            f"the kernels are compiled for this process only: {why_not_kept(error)}",
            style="dim",
            soft_wrap=True,
        )
        try:
            _load(_compiled_for_this_process(compiler))
        except (OSError, subprocess.CalledProcessError) as second:
            return f"kernels that can be loaded: {in_a_line(second)}; TMPDIR names another directory"
    return None


def _load(path: Path) -> None:
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # libraries that Inductor compiles call them by name
    torch.ops.load_library(str(path))


def are_loaded() -> bool:
    """Whether something in this process runs on the kernels already; nothing is compiled to find out."""
    return kernels_unsupported_reason.cache_info().currsize > 0 and kernels_unsupported_reason() is None


def lanes() -> int:
    """Outputs of a panel: floats in a vector of the kernels, which this loads.

    Raises:
        ValueError: they cannot run here.
    """
    lacks = kernels_unsupported_reason()
    if lacks is not None:
        raise ValueError(f"computing with the kernels needs {lacks}")
    return int(torch.ops.medusa.lanes())


def has_tiles(wanted: bool | None = None) -> bool:
    """Whether products of bfloat16 and int8 are computed in tile registers (AMX): by default if the processor
    has them.

    Args:
        wanted: sets it from now on. Weights in int8 must be packed again after a change.

    Raises:
        ValueError: the kernels cannot run here.
    """
    lanes()  # loads them
    return bool(torch.ops.medusa.tiles(wanted))


def _compiled(compiler: str) -> Path:
    """The library in the user's cache, compiled first if it does not exist."""
    path = kept_kernels(compiler)
    text = (
        "compiling kernels for this processor, once: some fifteen seconds on an idle machine, longer beside "
        f"other work; kept in {path.parent}"
    )
    compile_library(path, text, lambda directory: _built(compiler, directory / "kernels.so"))
    check_library(path)
    return path


def kept_kernels(compiler: str) -> Path:
    """Where the library of kernels is, or will be."""
    return kept_library("kernels", digest_of(source_text(), compiler, FLAGS))


def _compiled_for_this_process(compiler: str) -> Path:
    """The library in a directory that goes with this process."""
    directory = tempfile.TemporaryDirectory(prefix="medusa-kernels-")
    _kept.append(directory)
    return _built(compiler, Path(directory.name) / "kernels.so")


_kept: list[Any] = []
"""Objects that must live as long as the process."""


def shared_constant(name: str) -> float:
    """A number that Python and C++ share: the one of this name in ``cpp/constants.h``."""
    return _constants()[name]


@functools.cache
def _constants() -> dict[str, float]:
    text = (CPP / "constants.h").read_text()
    definitions = re.findall(r"^constexpr (float|int64_t) (\w+) = (\S+?)f?;", text, re.MULTILINE)
    return {name: float(value) if kind == "float" else int(value) for kind, name, value in definitions}


def _built(compiler: str, path: Path) -> Path:
    """The library at ``path``, for this processor."""
    root = Path(torch.__file__).parent
    linked = [f"-L{root / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    return building.build(compiler, path, [*building.native_options(), *FLAGS], root, linked)


def _shape_of_product(
    x: Tensor, panels: Tensor, scales: Tensor | None, bias: Tensor | None, width: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


def _shape_of_experts(
    x: Tensor,
    choices: Tensor,
    panels: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    num_experts: int,
    width: int,
) -> Tensor:
    return x.new_empty(*choices.shape, width)


def _shape_of_rows(file_rows: Tensor, ids: Tensor, type: int, width: int) -> Tensor:
    return file_rows.new_empty(*ids.shape, width, dtype=torch.float32)


def _shape_of_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _shape_of_rows_at(before: Tensor, nodes: Tensor, places: Tensor) -> Tensor:
    return before.new_empty(*places.shape, before.shape[2])


def _shapes_of_rule(state: Tensor, *args: Tensor | None) -> tuple[Tensor, Tensor]:
    *_, value, _, beta, _, _ = args
    assert value is not None
    return torch.empty_like(value), value.new_empty(0 if beta is None else value.shape[0], *value.shape[1:])


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the nodes of a tree: query (B, H, N, D), key (B, H', S, D), value (B, H', S, E) and
    attention_mask as :func:`medusa.base.attention.seen_slots` makes it -> (B, N, H, E).

    ``softcap`` bends scores (Gemma 2), ``s_aux`` (H,) are attention sinks (GPT-OSS). With a mask of another
    kind, outside of decoding, the replaced implementation runs.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, **kwargs}
        options = {name: option for name, option in options.items() if option is not None}
        return _ordinary(module)(module, query, key, value, attention_mask, **options)
    unknown = [
        name for name, each in kwargs.items() if isinstance(each, Tensor) and name not in POSITION_OPTIONS
    ]
    if unknown:
        raise ValueError(f"attention over a tree knows no {', '.join(unknown)}")
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return torch.ops.medusa.tree_attention(
        query, key, value, attention_mask, scale, softcap or 0.0, s_aux
    ), None


def _ordinary(module: Any) -> Any:
    """The attention that a layer would have run without the kernels."""
    if module.config._attn_implementation == TREE_ATTENTION["eager"]:
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS["sdpa"]


for _instead, _name in TREE_ATTENTION.items():
    AttentionInterface.register(_name, tree_attention)
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_instead])


# ------------------------------------------------------------------ linear layers


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
        self.width = sum(map(len, weights))
        self.num_inputs = weights[0].shape[1]
        if isinstance(bias, nn.Parameter):
            self.bias = bias  # shared with the base
        else:
            self.register_buffer("bias", bias, persistent=False)
        panels, scales = pack(weights, int8)
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
        """Whether the weights were rounded to int8."""
        return self.scales is not None

    @property
    def number_format(self) -> str:
        """How the weights are stored: the name of their type, or "bfloat16 in 12 bits"."""
        if self.panels.dtype == torch.uint8:
            return "bfloat16 in 12 bits"
        return str(self.panels.dtype).removeprefix("torch.")

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Bytes of the packed weights by :attr:`number_format`."""
        return {self.number_format: self.panels.nbytes}

    @property
    def num_outliers(self) -> int | None:
        """Number of weights that are stored separately from the twelve-bit ones; None for other forms."""
        if self.panels.dtype != torch.uint8:
            return None
        return int(torch.ops.medusa.num_outliers(self.panels))

    def rounded(self) -> Self:
        """The same layer with its weights rounded to int8."""
        layer = copy.copy(self)
        panels, scales = pack([self.unpacked()], int8=True)
        layer._buffers = {**self._buffers, "panels": panels, "scales": scales}
        return layer

    def unpacked(self) -> Tensor:
        """The matrix (out, in) float32 that this multiplies by."""
        if self.panels.dtype == torch.uint8:
            return torch.ops.medusa.decode_twelve(self.panels, self.width, self.num_inputs).float()
        rows = self.panels.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[: self.width, : self.num_inputs]
        return rows.float() if self.scales is None else rows * self.scales[:, None]


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


class PackedLinear(PackedMatmul):
    """A linear layer over a packed weight."""

    def __init__(self, linear: nn.Linear | Conv1D, int8: bool = False):
        weight = linear.weight.detach()
        super().__init__([weight.T if isinstance(linear, Conv1D) else weight], linear.bias, int8)
        self.weight = linear.weight  # shared with the base, for code that reads it


def narrowest_dtype(weight: Tensor) -> torch.dtype:
    """The narrowest of bfloat16, float16 and float32 that holds every bit of ``weight``."""
    lanes()  # loads the kernels
    return _PRECISIONS[torch.ops.medusa.narrowest(weight.contiguous())]


_PRECISIONS = (torch.bfloat16, torch.float16, torch.float32)


def pack(weights: Sequence[Tensor], int8: bool = False) -> tuple[Tensor, Tensor | None]:
    """Matrices (out, in), one below the other, as the kernels read them: (panels, in / P, lanes, P), where a
    lane holds P = 2 numbers of bfloat16 or int8 (4 of int8 for tile registers), or one of another precision.
    The last panel and lane are padded with zeros. With scales (out,) where they are rounded to int8: a number
    is a scale times one of the 255 whole numbers from -127 to 127. Large matrices of numbers that bfloat16
    holds are (panels, bytes) uint8 where :func:`uses_twelve_bits`.
    """
    weights = [weight if weight.is_contiguous() else weight.contiguous() for weight in weights]
    num_outputs = sum(map(len, weights))
    num_inputs = weights[0].shape[1]
    if int8:
        dtype = torch.int8
        per_lane = 4 if has_tiles() else 2
    else:
        dtype = max(map(narrowest_dtype, weights), key=_PRECISIONS.index)
        if dtype == torch.float16 and any(narrowest_dtype(weight) != dtype for weight in weights):
            dtype = torch.float32  # what bfloat16 holds, float16 may not
        per_lane = 2 if dtype == torch.bfloat16 else 1
    if dtype == torch.bfloat16 and num_outputs * num_inputs >= TWELVE_BITS_FROM and uses_twelve_bits():
        panels = _in_twelve_bits(weights)
        if panels is not None:
            return panels, None
    scales = torch.empty(num_outputs, dtype=torch.float32) if int8 else None
    return _in_panels(weights, dtype, per_lane, scales), scales


def _in_panels(
    weights: Sequence[Tensor], dtype: torch.dtype, per_lane: int, scales: Tensor | None = None
) -> Tensor:
    """Contiguous matrices in panels of ``dtype``; ``scales`` (out,) of int8 are written."""
    num_outputs = sum(map(len, weights))
    num_inputs = weights[0].shape[1]
    shape = (-(-num_outputs // lanes()), -(-num_inputs // per_lane), lanes(), per_lane)
    panels = weight_memory.empty(shape, dtype)
    panels[-1].zero_()
    row = 0
    for weight in weights:
        torch.ops.medusa.pack(weight, panels, scales, row)
        row += len(weight)
    return panels


# ------------------------------------------------------------------ twelve bits


TWELVE_BITS_FROM = 2**17
"""Least number of weights of a matrix held in twelve bits: smaller ones stay in the second-level cache."""
TWELVE_BITS = 12.2
"""Bits of such a weight, including the room for the outliers."""
TREE_ROWS = (1, 4, 8)
PROMPT_ROWS = 32
LARGEST_PROMPT_RATIO = 1.2
"""Twelve bits are used if products of TREE_ROWS take no longer than in sixteen, in the geometric mean, and
products of PROMPT_ROWS at most LARGEST_PROMPT_RATIO times as long, which is the noise of a trial."""
_twelve_bits: bool | None = None


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
    for panels in (_in_twelve_bits([weight]), _in_panels([weight], torch.bfloat16, 2)):
        assert panels is not None, "normal numbers have a place in twelve bits"
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


def _in_twelve_bits(weights: Sequence[Tensor]) -> Tensor | None:
    """Contiguous matrices (out, in) of numbers that bfloat16 holds, one below the other, in twelve bits:
    (panels, bytes) uint8, as ``cpp/twelve_bits.h`` says. None if a panel has no room for its outliers."""
    if any(len(weight) % lanes() for weight in weights[:-1]):
        weights = [torch.cat([weight.bfloat16() for weight in weights])]
    size = torch.ops.medusa.twelve_size(weights[0].shape[1])
    panels = weight_memory.empty((-(-sum(map(len, weights)) // lanes()), size), torch.uint8)
    row = 0
    for weight in weights:
        in_bfloat16 = weight.bfloat16() if weight.dtype == torch.float16 else weight
        if torch.ops.medusa.encode_twelve(in_bfloat16, panels, row) < 0:
            return None
        row += len(weight)
    return panels


class HugePages:
    """Memory for weights, in pages of 2 MB if the system provides them on request.

    A pass reads every weight once, and asks the page tables for every page: in pages of 4 kB two cores read
    29 GB/s, in these 41. A part is freed once all tensors in it are gone.
    """

    PART = 64 * 2**20
    """Least bytes of one allocation; bytes that are never written take no memory."""
    LINE = 64
    """Bytes of a cache line; every tensor starts at one."""

    def __init__(self) -> None:
        self._part = _in_huge_pages(self.PART)
        self._taken = 0
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of this shape."""
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // self.LINE) * self.LINE
        with self._lock:
            if self._taken + size > len(self._part):
                self._part = _in_huge_pages(max(size, self.PART))
                self._taken = 0
            tensor = torch.frombuffer(self._part, dtype=dtype, count=count, offset=self._taken)
            self._taken += size
        return tensor.view(shape)


def _in_huge_pages(size: int) -> mmap.mmap:
    part = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # without them small pages hold the same
            part.madvise(mmap.MADV_HUGEPAGE)
    return part


weight_memory = HugePages()
"""Where packed weights lie."""
