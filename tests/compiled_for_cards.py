"""Compiles the kernels for cards, on a machine without one: `python tests/compiled_for_cards.py 80 90`.

Each kernel is launched as the library launches it, for the shapes of a base of 8B and for small and odd
ones; in the place of a card stands a note of what was launched, which is then compiled for each architecture.
Prints a JSON object for each: the kernel, the architecture, and what ``cuobjdump`` says of its registers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

NAMES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}
_launched: dict[tuple, tuple[ASTSource, dict[str, Any], str]] = {}


def _note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **others: Any) -> None:
    """Take note of a launch, with what Triton makes a constant of and what it assumes of the others."""
    names = [parameter.name for parameter in kernel.params]
    options = {name: value for name, value in others.items() if name not in names}
    values = {**dict(zip(names, args, strict=False)), **others}
    signature = {}
    constants = {}
    divisible = {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        is_number = isinstance(value, int) and not parameter.is_constexpr
        is_special = is_number and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor):
            signature[parameter.name] = NAMES[value.dtype]
        if isinstance(value, Tensor) or (is_special and value % 16 == 0):
            divisible[(place,)] = [["tt.divisibility", 16]]
    key = (kernel.fn.__name__, str(signature), str(constants), str(divisible))
    _launched[key] = (ASTSource(kernel, signature, constants, divisible), options, kernel.fn.__name__)


def launch_all() -> None:
    """Launch every kernel, in every type and for every kind of shape."""
    from medusa.engine.card.attention_kernel import tree_attention
    from medusa.engine.card.block_kernels import block_product, widened_rows
    from medusa.engine.card.rotary_kernel import turned_queries
    from medusa.engine.card.row_kernels import NormWeights, gated, sum_and_norm
    from medusa.engine.card.stored_blocks import FORMS, StoredBlocks

    for dtype in (torch.float32, torch.float16, torch.bfloat16):

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        for width, adds_one in ((4096, False), (77, True)):
            norm = NormWeights(zeros(width), 1e-6, adds_one)
            for inner in (None, norm):
                sum_and_norm(zeros(2, width), zeros(2, width), norm, inner)
            gated(zeros(2, 2 * width), is_silu=adds_one)
        for head, group, num_nodes in ((128, 4, 64), (64, 7, 1), (96, 1, 5), (256, 2, 64)):
            entries = zeros(1, 2, 512, head)
            norms = (NormWeights(zeros(head), 1e-6),) * 2
            for turned, of_heads in ((head, None), (head // 2, norms)):
                angles = zeros(1, num_nodes, turned)
                rows = zeros(1, num_nodes, 2 * (group + 2) * head)
                slots = torch.zeros(1, num_nodes, dtype=torch.long)
                queries = turned_queries(rows, angles, angles, slots, entries, entries, of_heads)
            mask = torch.zeros(1, 1, num_nodes, 512, dtype=torch.bool)
            tree_attention(queries, entries, entries, mask, 0.1)
            tree_attention(
                queries, entries, entries, zeros(1, 1, num_nodes, 512), 0.1, 50.0, zeros(2 * group)
            )
        for kind, form in FORMS.items():
            rows = torch.zeros(4, 1024 // form.block * form.num_bytes, dtype=torch.uint8)
            matrix = StoredBlocks.of(rows, kind)
            for num_rows in (1, 64):
                block_product(zeros(num_rows, 1024), matrix, None, zeros(num_rows, 4))
            widened_rows(matrix, dtype, torch.zeros(3, dtype=torch.long))


def registers_of(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes that did not fit them."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [program, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", listing.stdout)
    assert numbers is not None, listing.stdout
    return {"registers": int(numbers[1]), "spilled": int(numbers[2])}


def main() -> None:
    JITFunction.run = _note
    launch_all()
    for architecture in map(int, sys.argv[1:]):
        for source, options, name in _launched.values():
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            ptx = compiled.asm["ptx"]
            answer = {"kernel": name, "sm": architecture, "is_ptx": f".target sm_{architecture}" in ptx}
            print(json.dumps(answer | registers_of(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
