"""The tensors of a GGUF file that modules can hold in the file's own bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from medusa.base.experts import expert_matrices, is_experts, shape_of_experts
from medusa.base.gguf_file import FLOAT_TYPES, GGUFFile, TensorEntry
from medusa.engine.weights.memory import Release
from medusa.engine.weights.stored import Numbers, QuantisedRows, StoredMatrix, gguf_types

if TYPE_CHECKING:
    from medusa.base.gguf_model import NamedWeight, Order

Layer = nn.Linear | nn.Embedding


@dataclass(frozen=True)
class FileWeight:
    """A weight of a model as tensors of a file; none of them has been read."""

    parts: Sequence[StoredMatrix]
    """Views of the file."""
    joined: Callable[[Sequence[StoredMatrix]], StoredMatrix] | None = None
    """Makes one matrix of the parts, copied; None where they are held apart, as of experts."""

    def read(self, release: Release) -> Sequence[StoredMatrix]:
        """The parts, or what they are together."""
        if self.joined is None:
            return self.parts
        matrix = self.joined(self.parts)
        for part in self.parts:
            part.release(release)
        return [matrix]

    def described(self) -> Sequence[StoredMatrix]:
        """The same without memory."""
        parts = [part.without_numbers() for part in self.parts]
        return parts if self.joined is None else [self.joined(parts)]


def held_tensors(
    file: GGUFFile, model: nn.Module, weights: Mapping[str, NamedWeight], head: nn.Module | None
) -> dict[str, FileWeight]:
    """The weights of ``model``, with the LM head ``head``, that can be held as the file has them, by name:
    quantised matrices, matrices of floats, and those of experts."""
    held = {}
    types = {*gguf_types(), *FLOAT_TYPES}
    for name, module, parts, order in file_matrices(file, model, weights, types):
        check_shapes(module, parts)
        is_quantised = parts[0].type in gguf_types()
        if is_quantised and order.moves and (isinstance(module, nn.Embedding) or module is head):
            continue  # their rows are looked up as they lie in the file
        held[name] = _quantised(file, parts, order) if is_quantised else _floats(file, parts, order)
    return {**held, **_experts(file, model, weights)}


def file_matrices(
    file: GGUFFile, model: nn.Module, weights: Mapping[str, NamedWeight], types: Collection[int]
) -> Iterator[tuple[str, Layer, list[TensorEntry], Order]]:
    """The weights of linear layers and embeddings of ``model`` that are matrices of one of ``types`` in the
    file, with their names and modules, and in which order the file has them."""
    modules = dict(model.named_modules())
    for name, weight in weights.items():
        parts = [file.tensors[source] for source in weight.sources]
        module = modules[name.rpartition(".")[0]]
        is_layer = isinstance(module, (nn.Linear, nn.Embedding)) and name.endswith(".weight")
        are_alike = len({part.type for part in parts}) == 1 and {len(part.shape) for part in parts} == {2}
        if not is_layer or not are_alike or parts[0].type not in types:
            continue
        order = weight.order([part.shape for part in parts])
        if order is not None:
            yield name, cast(Layer, module), parts, order


def check_shapes(module: Layer, parts: Sequence[TensorEntry]) -> None:
    """Raise ValueError if ``parts`` are not the rows of the weight of ``module``."""
    num_rows, *rest = module.weight.shape
    if len(parts) == 1 or sum(part.shape[0] for part in parts) != num_rows:
        parts[0].check_shape((num_rows // len(parts), *rest))
    for part in parts[1:]:
        part.check_shape((part.shape[0], *rest))


def _quantised(file: GGUFFile, parts: Sequence[TensorEntry], order: Order) -> FileWeight:
    inputs = None if order.columns is None else order.columns.argsort()
    rows = [
        QuantisedRows(file.rows(part.name), part.type, part.shape[1], order.rows, inputs) for part in parts
    ]

    def joined(matrices: Sequence[StoredMatrix]) -> StoredMatrix:
        first, *others = cast("Sequence[QuantisedRows]", matrices)
        return replace(first, rows=torch.cat([first.rows, *(other.rows for other in others)]))

    return FileWeight(rows, joined if len(rows) > 1 else None)


def _floats(file: GGUFFile, parts: Sequence[TensorEntry], order: Order) -> FileWeight:
    def joined(matrices: Sequence[StoredMatrix]) -> StoredMatrix:
        numbers = torch.cat([matrix.tensor for matrix in cast("Sequence[Numbers]", matrices)])
        numbers = numbers if order.rows is None else numbers[order.rows]
        return Numbers(numbers if order.columns is None else numbers[:, order.columns])

    views = [Numbers(file.plain(part.name)) for part in parts]
    return FileWeight(views, joined if len(views) > 1 or order.moves else None)


# ------------------------------------------------------------------ experts


def _experts(file: GGUFFile, base: nn.Module, weights: Mapping[str, NamedWeight]) -> dict[str, FileWeight]:
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
            for part in parts:
                part.check_shape((num_experts, num_outputs // len(parts), num_inputs))
            held[f"{name}.{matrix}"] = FileWeight([_of_experts(file, part) for part in parts])
    return held


def _have_products(parts: Sequence[TensorEntry]) -> bool:
    """Whether one product can hold these: all in whole numbers, or all floats."""
    types = {part.type for part in parts}
    return types <= gguf_types() or types <= {*FLOAT_TYPES}


def _of_experts(file: GGUFFile, part: TensorEntry) -> StoredMatrix:
    """A part of the matrices of all experts."""
    num_experts, _, num_inputs = part.shape
    if part.type in FLOAT_TYPES:
        return Numbers(file.plain(part.name))
    rows = file.rows(part.name)
    return QuantisedRows(rows.view(num_experts, -1, rows.shape[-1]), part.type, num_inputs)
