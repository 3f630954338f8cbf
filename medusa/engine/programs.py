"""Modules as programs that are compiled ahead, with their weights as arguments.

Run as modules, a step of a small model is thousands of operators, and calling them takes as long as their
arithmetic. A program that ``torch.export`` has traced becomes a shared library with AOTInductor
(:mod:`medusa.engine.libraries` keeps it), which calls the kernels for products and attention. It holds no
weights, so it serves every module of the same shapes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from medusa.base.experts import is_experts
from medusa.engine.building import source_text
from medusa.engine.libraries import (
    NO_COMPILER,
    LibraryError,
    check_library,
    compile_library,
    digest_of,
    found_compiler,
    kept_library,
)
from medusa.engine.weights.experts import RouterWeight
from medusa.engine.weights.products import JoinedLinear, PackedMatmul
from medusa.files import check_trusted

VERSION = 12
"""Version of the compiled code: raise it with every change of a program's computation."""


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that ``module.forward`` reads, by name."""
    weights = {}
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            is_shown = isinstance(part, JoinedLinear) or (isinstance(part, PackedMatmul) and name == "weight")
            is_shown |= isinstance(tensor, RouterWeight) or is_experts(part)
            if tensor is not None and not is_shown:
                weights[f"{prefix}.{name}" if prefix else name] = tensor.detach()
    return weights


def is_sized_by_content(weight: Tensor) -> bool:
    """Whether a weight is bytes that say themselves what they hold, of any length: one program serves all."""
    return weight.dim() == 1 and weight.dtype == torch.uint8


@dataclass
class Part:
    """A unit of compilation: a function of tensors, and its inputs in two trials."""

    name: str
    module: nn.Module
    trials: Sequence[Sequence[Tensor]]
    """Inputs, twice: dimensions that differ are dynamic."""
    settings: tuple = ()
    """The inputs on which the code of ``module`` depends, besides the settings of its modules."""
    twin: nn.Module | None = None
    """The module of the second trial, if one of other sizes is to share the library."""

    @functools.cached_property
    def path(self) -> Path:
        """The path of the library: its name is a digest of everything it depends on except weights."""
        digest = digest_of(
            self.settings,
            [(type(module).__qualname__, _plain_settings(module)) for module in self.module.modules()],
            [
                (name, "any" if is_sized_by_content(weight) else tuple(weight.shape), weight.dtype)
                for name, weight in weights_of(self.module).items()
            ],
            [[tensor.dtype for tensor in inputs] for inputs in self.trials],
            code_of(self.module),
            source_text(),
            transformers.__version__,
            torch.get_num_threads(),
            VERSION,
        )
        return kept_library(self.name, digest)

    def compile(self) -> None:
        """Compile the library to disk.

        Raises:
            LibraryError: it is not there, and neither is a compiler.
        """
        if not self.path.exists() and found_compiler() is None:
            raise LibraryError(NO_COMPILER)
        text = (
            f"compiling {self.name} for this processor, once: some ten seconds on an idle machine, longer "
            f"beside other work; kept in {self.path.parent}"
        )
        compile_library(self.path, text, lambda directory: compiled_program(self._exported(), directory))

    @torch.no_grad()
    def _exported(self) -> torch.export.ExportedProgram:
        modules = self.module, self.twin or self.module
        first, second = (
            [*weights_of(module).values(), *given] for module, given in zip(modules, self.trials, strict=True)
        )
        dims: dict[tuple[int, int], Any] = {}
        shapes = []
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            if is_sized_by_content(one):
                shapes.append({0: torch.export.Dim(f"bytes{index}", min=1)})
                continue
            sizes = zip(one.shape, other.shape, strict=True)
            changing = {at: pair for at, pair in enumerate(sizes) if pair[0] != pair[1]}
            shapes.append(
                {
                    at: dims.setdefault(pair, torch.export.Dim(f"d{len(dims)}", min=1))
                    for at, pair in changing.items()
                }
            )
        of_its_weights = _OfItsWeights(self.module)
        return torch.export.export(
            of_its_weights, tuple(first), dynamic_shapes=(tuple(shapes),), strict=False
        )


def _plain_settings(module: nn.Module) -> list[tuple[str, str]]:
    """The numbers and texts that a module is made with, its place and mode left out."""
    return sorted(
        (name, repr(value))
        for name, value in vars(module).items()
        if name not in ("layer_idx", "training") and isinstance(value, (int, float, str, type(None)))
    )


class Program:
    """A module that the library of a part computes, or its own code where there is none."""

    def __init__(self, module: nn.Module, part: Part | None):
        self._weights = list(weights_of(module).values())
        self._library: Any = None if part is None else _opened(part.path)
        self._module = module if part is None else None  # it would keep the trial inputs alive

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._module is not None:
            return cast("list[Tensor]", self._module(*inputs))
        return cast("list[Tensor]", self._library.run([*self._weights, *inputs]))


@functools.lru_cache(64)
def _opened(path: Path) -> Any:
    """Torch's runner of a program: its ``run`` takes and gives lists of tensors."""
    check_library(path)
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)


class _OfItsWeights(nn.Module):
    """A module as a function of its weights and then of its inputs."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._of = (module,)  # hidden, so that no weight counts as this module's own
        self._names = list(weights_of(module))

    def forward(self, *inputs: Tensor) -> Any:
        weights = dict(zip(self._names, inputs, strict=False))
        return torch.func.functional_call(self._of[0], weights, inputs[len(weights) :])


@torch.no_grad()
def compiled_program(exported: torch.export.ExportedProgram, directory: Path) -> Path:
    """The shared library of a program that may call the kernels, in ``directory``.

    Raises:
        LibraryError: torch is in a directory whose path its compiler cannot take.
    """
    torch_home = Path(torch.__file__).parent
    if not _is_taken(torch_home):
        raise LibraryError(
            "torch cannot compile where a path has blanks or quotes in it, and it is installed in "
            f"{torch_home}; install it in another directory"
        )
    if not _is_taken(Path(tempfile.gettempdir())):
        raise LibraryError(
            "torch cannot compile where a path has blanks or quotes in it, and temporary files are in "
            f"{tempfile.gettempdir()}; TMPDIR names another directory"
        )
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    if _is_taken(directory) and _is_usable(Path(_inductor_cache())):
        return _compiled_in(exported, directory)
    places = [each for each in map(Path, PLAIN_PLACES) if each.is_dir() and os.access(each, os.W_OK)]
    if not places:
        raise LibraryError(
            f"torch cannot compile in a path with blanks or quotes, got {directory}; MEDUSA_CACHE names "
            "another"
        )
    with (
        tempfile.TemporaryDirectory(prefix="medusa-", dir=places[0]) as plain,
        temporary_cache_dir(str(Path(plain) / "inductor")),
    ):
        return Path(shutil.copy(_compiled_in(exported, Path(plain)), directory))


PLAIN_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Directories to compile in, where the path of the cache is none for torch's compiler."""


def _is_taken(path: Path) -> bool:
    """Whether torch's compiler, which gets a line of words, takes ``path`` as one."""
    return re.fullmatch(r"[\w./+@=:,~-]+", str(path.absolute()), re.ASCII) is not None


def _is_usable(cache: Path) -> bool:
    """Whether torch's compiler may keep its files in ``cache`` and take those that are there: by default it
    is in the directory for temporary files, where any user could have made it first."""
    try:
        check_trusted(cache)
    except PermissionError:
        return False
    except FileNotFoundError:  # torch makes it
        pass
    return _is_taken(cache)


def _inductor_cache() -> str:
    """Torch's own directory; one that is not taken where a user has no name, for which torch has none."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        return str(cache_dir())
    except (KeyError, OSError):
        return " "


def _compiled_in(exported: torch.export.ExportedProgram, directory: Path) -> Path:
    options = {
        "aot_inductor.output_path": str(directory),
        "cpp.threads": 1,  # loops of few rows are shorter than waking another thread
        "aot_inductor.custom_ops_to_c_shims": {
            torch.ops.medusa.packed_product.default: [
                "AOTITorchError aoti_torch_cpu_packed_product(AtenTensorHandle, AtenTensorHandle, "
                "AtenTensorHandle*, AtenTensorHandle*, int64_t, AtenTensorHandle*)"
            ],
            torch.ops.medusa.expert_products.default: [
                "AOTITorchError aoti_torch_cpu_expert_products(AtenTensorHandle, AtenTensorHandle, "
                "AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle*, int64_t, int64_t, AtenTensorHandle*)"
            ],
            torch.ops.medusa.quantised_rows.default: [
                "AOTITorchError aoti_torch_cpu_quantised_rows(AtenTensorHandle, AtenTensorHandle, int64_t, "
                "int64_t, AtenTensorHandle*)"
            ],
            torch.ops.medusa.tree_attention.default: [
                "AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle, AtenTensorHandle, "
                "AtenTensorHandle, AtenTensorHandle, double, double, AtenTensorHandle*, AtenTensorHandle*)"
            ],
            torch.ops.medusa.matrix_rule.default: [
                "AOTITorchError aoti_torch_cpu_matrix_rule(AtenTensorHandle, AtenTensorHandle, "
                "AtenTensorHandle*, AtenTensorHandle*, AtenTensorHandle*, AtenTensorHandle*, "
                "AtenTensorHandle*, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, "
                "AtenTensorHandle*, AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle*, "
                "AtenTensorHandle*)"
            ],
            torch.ops.medusa.rows_at.default: [
                "AOTITorchError aoti_torch_cpu_rows_at(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, "
                "AtenTensorHandle*)"
            ],
        },
    }
    args, kwargs = exported.example_inputs
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch, about torch
        # without torch's package around it, whose writer ends the process where the disk is full
        path = torch._inductor.aot_compile(exported.module(check_guards=False), args, kwargs, options=options)
    return Path(cast(str, path))


def code_of(module: nn.Module) -> str:
    """A digest of the source files of the classes in ``module`` that are of no installed library."""
    digest = hashlib.sha256()
    known = ("torch.", "transformers.", "medusa.")
    for name in sorted({type(part).__module__ for part in module.modules()}):
        source = getattr(sys.modules.get(name), "__file__", None)
        if not name.startswith(known) and source is not None:
            digest.update(name.encode() + Path(source).read_bytes())
    return digest.hexdigest()
