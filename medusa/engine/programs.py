"""Modules as programs that are compiled ahead, with their weights as arguments.

Run as modules, a step of a small model is thousands of operators, and calling them takes as long as what they
compute. A program that ``torch.export`` has traced becomes a shared library with AOTInductor
(:mod:`medusa.engine.libraries` keeps it), which calls the kernels for products and attention. It holds no
weights, so it serves every module of the same shapes.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from medusa.engine.products import Product
from medusa.engine.views import JoinedLinear


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """What ``module`` computes with, by name: all but the weights that stand there for others to read."""
    read = {}
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            is_shown = isinstance(part, JoinedLinear) or (isinstance(part, Product) and name == "weight")
            if tensor is not None and not is_shown:
                read[f"{prefix}.{name}" if prefix else name] = tensor.detach()
    return read


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
def exported(
    module: nn.Module, inputs: Sequence[Tensor], shapes: Sequence[dict[int, Any]]
) -> torch.export.ExportedProgram:
    """``module`` as a program that takes :func:`weights_of` it and then ``inputs``, whose dimensions in
    ``shapes`` are dynamic."""
    weights = list(weights_of(module).values())
    dynamic = (*({} for _ in weights), *shapes)
    given = (*weights, *inputs)
    return torch.export.export(_OfItsWeights(module), given, dynamic_shapes=(dynamic,), strict=False)


@torch.no_grad()
def compiled_program(exported: torch.export.ExportedProgram, directory: Path) -> Path:
    """The shared library of a program that may call the kernels, in ``directory``."""
    options = {
        "aot_inductor.output_path": str(directory),
        "cpp.threads": 1,  # loops of few rows are shorter than waking another thread
        "aot_inductor.custom_ops_to_c_shims": {
            torch.ops.medusa.packed_product.default: [
                "AOTITorchError aoti_torch_cpu_packed_product(AtenTensorHandle, AtenTensorHandle, "
                "AtenTensorHandle*, AtenTensorHandle*, int64_t, AtenTensorHandle*)"
            ],
            torch.ops.medusa.tree_attention.default: [
                "AOTITorchError aoti_torch_cpu_tree_attention(AtenTensorHandle, AtenTensorHandle, "
                "AtenTensorHandle, AtenTensorHandle, double, double, AtenTensorHandle*, AtenTensorHandle*)"
            ],
        },
    }
    args, kwargs = exported.example_inputs
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch, about torch
        # without torch's package around it, whose writer ends the process where the disk is full
        made = torch._inductor.aot_compile(exported.module(check_guards=False), args, kwargs, options=options)
    return Path(cast(str, made))


def open_program(path: Path) -> Any:
    """Torch's runner of a program: its ``run`` takes and gives lists of tensors."""
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)


def code_of(module: nn.Module) -> str:
    """A digest of the source files of the classes in ``module`` that are of no installed library."""
    digest, known = hashlib.sha256(), ("torch.", "transformers.", "medusa.")
    for name in sorted({type(part).__module__ for part in module.modules()}):
        source = getattr(sys.modules.get(name), "__file__", None)
        if not name.startswith(known) and source is not None:
            digest.update(name.encode() + Path(source).read_bytes())
    return digest.hexdigest()
