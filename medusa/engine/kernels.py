"""Operators of torch in C++ for passes of few rows on a CPU: compiled here at first use, kept on disk.

``kernels.cpp`` holds a product with packed weights and attention over a tree. A CPU's ordinary operators are
poor between 2 and 32 rows, which is exactly what verifying a tree asks for, and they add in another order for
another number of rows. These read every weight, key and value once, and add in one order, so what a row
gives is the same to the last bit whatever stands beside it. It also grows dynamic trees, where
:mod:`medusa.drafters.dynamic` would call some two hundred small operators.

The compiler that is found compiles them for this processor in some ten seconds.
"""

from __future__ import annotations

import ctypes
import functools
import os
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

from medusa.base.attention import TREE_ATTENTION
from medusa.engine.libraries import check_library, compile_library, digest_of, found_compiler, kept_library
from medusa.progress import log_console

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-w")
"""No multiplication is joined with an addition but where the source says so, so that all bits are its own."""


@functools.cache
def missing_kernels() -> str | None:
    """What the kernels lack to run here, in words; None when nothing, and they are loaded."""
    compiler = found_compiler()
    if compiler is None:
        return "a C++ compiler (g++ or clang++), and none is installed"
    try:
        path = _compiled(compiler)
    except subprocess.CalledProcessError as error:
        says = next(
            (line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip()[-200:]
        )
        return f"kernels that compile, and {compiler} failed: {says}"
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # libraries that Inductor compiles call them by name
    torch.ops.load_library(str(path))
    torch.library.register_fake("medusa::packed_product", _shape_of_product, allow_override=True)
    torch.library.register_fake("medusa::tree_attention", _shape_of_attention, allow_override=True)
    return None


def are_loaded() -> bool:
    """Whether something in this process runs on the kernels already; nothing is compiled to find out."""
    return missing_kernels.cache_info().currsize > 0 and missing_kernels() is None


def lanes() -> int:
    """Outputs of a panel: floats in a vector of the kernels, which this loads.

    Raises:
        ValueError: they cannot run here.
    """
    if (lacks := missing_kernels()) is not None:
        raise ValueError(f"computing with the kernels needs {lacks}")
    return int(torch.ops.medusa.lanes())


def _compiled(compiler: str) -> Path:
    """The library, compiled first where it is not there; in a directory of this process alone where the
    user's cache cannot be written."""
    path = kept_library("kernels", digest_of(SOURCE.read_text(), compiler, FLAGS))
    text = f"compiling kernels for this processor: some seconds, once; kept in {path.parent}"
    try:
        compile_library(path, text, lambda directory: _built(compiler, directory / "kernels.so"))
        check_library(path)
    except PermissionError as error:
        log_console().print(f"the kernels are compiled for this process alone: {error}", style="dim")
        directory = tempfile.TemporaryDirectory(prefix="medusa-kernels-")
        _kept.append(directory)
        return _built(compiler, Path(directory.name) / "kernels.so")
    return path


_kept: list[Any] = []
"""What must live as long as the process."""


def _built(compiler: str, path: Path) -> Path:
    root = Path(torch.__file__).parent
    tuned = "-mcpu=native" if os.uname().machine == "aarch64" else "-march=native"
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    linked = [f"-L{root / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    command = [compiler, tuned, *FLAGS, *includes, str(SOURCE), "-o", str(path), *linked]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return path


def _shape_of_product(
    x: Tensor, panels: Tensor, scales: Tensor | None, bias: Tensor | None, width: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


def _shape_of_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


_PLACES = ("position_ids", "cache_position")
"""Tensors that a layer passes on without asking for more than attention."""


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
    kind, outside of decoding, the implementation runs that this one stands for.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        given = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, **kwargs}
        given = {name: option for name, option in given.items() if option is not None}
        return _ordinary(module)(module, query, key, value, attention_mask, **given)
    if unknown := [name for name, each in kwargs.items() if isinstance(each, Tensor) and name not in _PLACES]:
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
