"""Experts of a mixture whose matrices stay in the bits of their file, GGUF or MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.base.experts import expert_matrices, is_experts, order_of_outputs, shape_of_experts
from medusa.base.gguf_file import FLOAT_TYPES, GGUFFile, TensorEntry
from medusa.base.quantised_directory import QuantisedDirectory
from medusa.base.quantised_forms import BLOCK, mxfp4_rows
from medusa.engine.file_weights import placeholder
from medusa.engine.group_quantised import GroupQuantisedMatmul, QuantisedRows, gguf_types
from medusa.engine.kernels import PackedMatmul
from medusa.engine.packed_experts import PackedExperts, let_go_of_weights, padded_rows

if TYPE_CHECKING:
    from medusa.base.gguf_model import NamedWeight

MXFP4_TYPE = 39
"""As GGUF numbers it."""
ReadsExperts = Callable[[], QuantisedRows | Tensor]
"""Reads a part of a matrix of all experts: in whole numbers, rows (E, out, bytes); or plain, (E, out, in)."""


# ------------------------------------------------------------------ what a file holds


def experts_in_file(
    file: GGUFFile, base: CausalLM, weights: Mapping[str, NamedWeight]
) -> dict[str, list[TensorEntry]]:
    """The matrices of experts of ``base`` that can be held as the file has them, by name: their parts, each
    (E, out, in)."""
    held = {}
    for name, module in base.named_modules():
        matrices = expert_matrices(module) if is_experts(module) else ()
        parts_of = {
            matrix: [file.tensors[source] for source in weights[f"{name}.{matrix}"].sources]
            for matrix in matrices
            if f"{name}.{matrix}" in weights
        }
        if len(parts_of) < 2 or not all(map(_have_products, parts_of.values())):
            continue
        for matrix, parts in parts_of.items():
            num_experts, num_outputs, num_inputs = shape_of_experts(module, matrix)
            expected = (num_experts, num_outputs // len(parts), num_inputs)
            for part in parts:
                part.check_shape(expected)
            held[f"{name}.{matrix}"] = parts
    return held


def _have_products(parts: Sequence[TensorEntry]) -> bool:
    """Whether one product can hold these: all in whole numbers, or all floats."""
    types = {part.type for part in parts}
    return types <= gguf_types() or types <= {*FLOAT_TYPES}


def file_rows(file: GGUFFile, part: TensorEntry) -> QuantisedRows | Tensor:
    """A part of a matrix of experts, as :data:`ReadsExperts` gives it."""
    num_experts, num_outputs, num_inputs = part.shape
    if part.type in FLOAT_TYPES:
        return file.plain(part.name)
    return QuantisedRows(file.rows(part.name).view(num_experts, num_outputs, -1), part.type, num_inputs)


def mxfp4_experts(directory: QuantisedDirectory, matrix: str) -> QuantisedRows:
    """The matrix of this name, as :data:`ReadsExperts` gives it."""
    blocks, scales = directory.expert_parts(matrix)
    rows = mxfp4_rows(blocks.flatten(0, 1), scales.flatten(0, 1))
    return QuantisedRows(rows.view(*scales.shape[:2], -1), MXFP4_TYPE, BLOCK * scales.shape[2])


# ------------------------------------------------------------------ what holds it


def hold_experts(
    base: CausalLM,
    matrices: Mapping[str, Sequence[ReadsExperts]],
    in_whole_numbers: bool,
    release: Callable[[Tensor], Tensor],
) -> None:
    """Replace the experts of ``base`` whose matrices are in ``matrices``: the parts of each, by its name.
    ``release`` gives back the memory of a part that was read."""
    for name, module in list(base.named_modules()):
        if not is_experts(module) or f"{name}.{expert_matrices(module)[0]}" not in matrices:
            continue
        experts: Any = module
        products = []
        for matrix in expert_matrices(experts):
            parts = [reads() for reads in matrices[f"{name}.{matrix}"]]
            products.append(_expert_product(parts, in_whole_numbers))
            for part in parts:
                release(part.rows if isinstance(part, QuantisedRows) else part)
        into, out_of = products
        order = _order_in_product(experts, into.width, len(matrices[f"{name}.{expert_matrices(experts)[0]}"]))
        parent, _, last = name.rpartition(".")
        setattr(base.get_submodule(parent), last, PackedExperts(experts, into, out_of, order))
        let_go_of_weights(experts, placeholder)


def _expert_product(parts: Sequence[QuantisedRows | Tensor], in_whole_numbers: bool) -> PackedMatmul:
    """The product with parts of a matrix: the rows of all experts (E, out, bytes), or (E, out, in)."""
    quantised = [
        replace(part, rows=padded_rows(part.rows).flatten(0, 1))
        for part in parts
        if isinstance(part, QuantisedRows)
    ]
    if quantised:
        return GroupQuantisedMatmul(quantised, None, in_whole_numbers)
    floats = [padded_rows(part) for part in parts if isinstance(part, Tensor)]
    return PackedMatmul([rows for of_expert in zip(*floats, strict=True) for rows in of_expert], None)


def _order_in_product(experts: Any, width: int, num_parts: int) -> Tensor:
    """For each output into an expert its place in the product, which has the padded parts of a matrix one
    after the other; ``width`` are all outputs of the product."""
    num_experts, num_outputs, _ = shape_of_experts(experts, expert_matrices(experts)[0])
    places = torch.arange(width // num_experts).view(num_parts, -1)[:, : num_outputs // num_parts].flatten()
    order = order_of_outputs(experts, num_outputs) if num_parts > 1 else None
    return places if order is None else places[order]
