"""Operators of torch in C++ for passes of few rows on a CPU, compiled here at first use and kept on disk.

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
(:func:`medusa.engine.weights.forms.uses_twelve_bits`): a trained matrix has few exponents, so a code of four
bits is enough for the upper byte of all but a few in ten thousand weights, and the outliers are stored
separately.

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

import ctypes
import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
