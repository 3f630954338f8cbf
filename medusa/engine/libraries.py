"""Programs of tensors compiled ahead of time for this processor, and kept on disk.

Run as modules, a step of a small model is thousands of operators, and calling them takes longer than what
they compute. A program that ``torch.export`` has traced becomes one shared library, with its weights inside
in the layout of Inductor's matrix kernels (AOTInductor). Compiling takes from half a minute to several
minutes, loading a second or two, so libraries are kept in the user's cache directory, under a digest of all
that they depend on.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn

from medusa import files
from medusa.engine.int8 import Digits, Int8Linear, Int8Product, int8_product, quantised
from medusa.engine.packed import PackedLinear
from medusa.engine.views import JoinedLinear
from medusa.hardware import device_name
from medusa.places import cache_home
from medusa.progress import log_console

COMPILERS = ("g++", "clang++", "c++")
INDUCTOR_OPTIONS = {"freezing": True, "max_autotune": True, "max_autotune_gemm_backends": "CPP"}
"""Weights become constants, and products Inductor's own kernels, which read few rows twice as fast as
oneDNN's. Where it has none, oneDNN's remain."""
GCC_OPTIONS = (
    "-fno-tree-loop-distribute-patterns"
    " --param max-completely-peel-times=64 --param max-completely-peeled-insns=2000"
)
"""Keep the sums of a product of five rows and more in registers. g++ 12 makes one ``memset`` of the loop that
sets them to zero, and leaves what a ``memset`` has touched in memory."""

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def missing_compiler() -> str | None:
    """What is missing to compile anything; None when nothing."""
    if any(map(shutil.which, COMPILERS)):
        return None
    return f"a C++ compiler ({', '.join(COMPILERS)}), and none is installed"


def digest_of(tensors: Mapping[str, Tensor], device: torch.device, *depends_on: Any) -> str:
    """A digest of weights, of ``depends_on`` as it prints, and of where libraries run."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    versions = torch.__version__, transformers.__version__
    instructions = (
        torch.backends.cpu.get_cpu_capability(),
        *(known() for known in (torch.cpu._is_vnni_supported, torch.cpu._is_amx_tile_supported)),
    )
    runs_on = device_name(device), platform.machine(), instructions, torch.get_num_threads()
    digest.update(repr((versions, runs_on, depends_on)).encode())
    return digest.hexdigest()[:24]


def code_of(module: nn.Module) -> str:
    """A digest of the source files of the classes in ``module`` that are of no installed library."""
    digest, known = hashlib.sha256(), ("torch.", "transformers.", "medusa.")
    for name in sorted({type(part).__module__ for part in module.modules()}):
        source = getattr(sys.modules.get(name), "__file__", None)
        if not name.startswith(known) and source is not None:
            digest.update(name.encode() + Path(source).read_bytes())
    return digest.hexdigest()


def kept_library(name: str, digest: str) -> Path:
    """Where a library is, or will be."""
    return cache_home() / "compiled" / f"{name}-{digest}.so"


def open_library(path: Path) -> Any:
    """Torch's runner of a library: its ``run`` takes and gives lists of tensors.

    Raises:
        ValueError: the file is not what was compiled; loading it would end the process.
    """
    try:
        is_whole = _seal(path).exists() and files.read_json(_seal(path)) == _sealed(path)
    except ValueError:  # the seal itself is damaged
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"the compiled library {path} is damaged: it is not the file that was written; delete it "
            "(medusa compile then makes it anew), and look whether the disk is full"
        )
    return _runner(path)


def _runner(path: Path) -> Any:
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)


def _seal(path: Path) -> Path:
    """The file beside a library that says what it holds."""
    return path.with_suffix(".json")


def _sealed(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": files.digest_of(path)}


@torch.no_grad()  # Inductor takes weights for constants in no other mode
def compile_library(
    path: Path,
    text: str,
    program: Callable[[], torch.export.ExportedProgram],
    check: Callable[[Any], None],
) -> None:
    """Compile a program, hold what came out against what it must compute, and keep it as ``path``.

    Nothing is done where it is there. Another process that compiles the same is waited for.

    Args:
        text: tells the user what takes so long.
        check: raises unless the library, as :func:`open_library` gives it, computes what it must.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    console, made = log_console(), path.with_suffix(".partial")

    def say(text: str) -> None:
        console.print(text, style="dim", soft_wrap=True)

    with files.locked(path, math.inf, say, path.with_suffix(".lock")):
        if path.exists():
            return
        say(text)
        shutil.rmtree(made, ignore_errors=True)  # what a process that was killed has left
        made.mkdir()
        try:
            with console.status("compiling", spinner="dots"), files.disk_errors(path):
                library = _compiled(program, made)
                check(_runner(library))
                files.write_json(_seal(path), _sealed(library))
                library.chmod(0o755)
                files.sync(library)
                os.replace(library, path)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _compiled(program: Callable[[], torch.export.ExportedProgram], directory: Path) -> Path:
    """The shared library of a program, in ``directory``."""
    _let_packing_be_traced()
    exported = program()
    options = {**INDUCTOR_OPTIONS, **_compiler_options(), "aot_inductor.output_path": str(directory)}
    args, kwargs = exported.example_inputs
    # without torch's package around it, whose writer ends the process where the disk is full
    made = torch._inductor.aot_compile(exported.module(check_guards=False), args, kwargs, options=options)
    return Path(cast(str, made))


def _compiler_options() -> dict[str, str]:
    """:data:`GCC_OPTIONS` for Inductor, which has one setting that reaches the compiler's command line."""
    is_gcc = Path(os.environ.get("CXX", COMPILERS[0])).name.startswith("g++")
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    has_setting = hasattr(torch._inductor.config.cpp, "march")
    return {"cpp.march": f"native {GCC_OPTIONS}"} if is_gcc and is_x86 and has_setting else {}


def traceable_products(module: AnyModule, int8: bool) -> AnyModule:
    """``module``, its products with packed weights replaced by ones that Inductor compiles.

    Linear layers of a view are in int8 where ``int8`` says so, and in float32 elsewhere.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (PackedLinear, Int8Linear, JoinedLinear)):
                of_weight = _Int8Linear.of_weight if int8 else _Float32Linear
                setattr(parent, name, of_weight(child.weight, child.bias))
            elif isinstance(child, Int8Product):
                setattr(parent, name, _Int8Linear(*child.parts))
    return module


class _Float32Linear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class _Int8Linear(nn.Module):
    """What :class:`medusa.engine.int8.Int8Product` computes; Inductor packs the weight."""

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, digits: Digits):
        """As :attr:`medusa.engine.int8.Int8Product.parts`."""
        super().__init__()
        self.codes: Tensor
        self.scales: Tensor
        self.zeros: Tensor
        self.digits, self.bias = digits, bias
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales / digits.largest_code)
        self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int32))

    @classmethod
    def of_weight(cls, weight: Tensor, bias: Tensor | None) -> _Int8Linear:
        """As :class:`medusa.engine.int8.Int8Linear`."""
        made = cls(*quantised(weight.detach()), bias, Digits(2))
        made.weight = weight  # for code that reads it
        return made

    def forward(self, x: Tensor) -> Tensor:
        packed = torch.ops.onednn.qlinear_prepack(self.codes, None)
        return int8_product(x, packed, self.scales, self.zeros, self.bias, self.digits)


def _let_packing_be_traced() -> None:
    """Tell torch the shape of what oneDNN packs, which it has no rule for."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("onednn::qlinear_prepack", "Meta"):

        @torch.library.register_fake("onednn::qlinear_prepack")
        def _shape(weight: Tensor, shape: Any) -> Tensor:
            return weight.new_empty(weight.shape[1], weight.shape[0])
