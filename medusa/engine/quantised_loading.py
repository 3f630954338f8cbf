"""Loads a quantised base, a GGUF file or a directory, into modules that hold its weights in their own bits.

Whole numbers are held as :mod:`medusa.engine.group_quantised` holds them, and multiplied in whole numbers,
except with ``engine="packed"``: in float32. FP8 is no whole number: it is widened to bfloat16. What is not
quantised is packed as that of any base. One block of layers is read at a time, and its pages of the file are
given back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from medusa.base.architecture_check import check_decodable, is_tested
from medusa.base.causal_lm import CausalLM, embedding_rows, lm_head
from medusa.base.gguf_file import FLOAT_TYPES, GGUFFile, TensorEntry, type_name
from medusa.base.loading import (
    BaseSource,
    gguf_model,
    load_widened,
    quantised_directory,
    source_arguments,
)
from medusa.base.quantised_directory import QuantisedDirectory, set_weight
from medusa.base.quantised_forms import QuantisedLayer, QuantisedMatrix
from medusa.base.stored_weights import FLOATS
from medusa.console import counted, log_console, megabytes
from medusa.engine.file_weights import (
    NarrowEmbedding,
    QuantisedEmbedding,
    give_back_freed_memory,
    is_lookup,
    is_narrow,
    misses_weights,
    packed_rest,
    placeholder,
    released_pages,
)
from medusa.engine.group_quantised import (
    GroupQuantisedLinear,
    GroupQuantisedLMHead,
    GroupQuantisedMatmul,
    QuantisedRows,
    gguf_types,
)
from medusa.engine.held_sizes import bytes_of_group, check_fits, matrices
from medusa.engine.kernels import kernels_unsupported_reason
from medusa.engine.quantised_experts import experts_in_file, file_rows, hold_experts, mxfp4_experts
from medusa.engine.views import joinable_linears, pack_linears, share_product
from medusa.heads.mtp import MtpHead, without_weights
from medusa.options import Engine

if TYPE_CHECKING:
    from medusa.base.gguf_model import NamedWeight, Order

ReadsWeight = Callable[[], QuantisedRows | Tensor]
"""Reads the weight of a module: in whole numbers, or as plain numbers (out, in)."""


def load_quantised(source: BaseSource, engine: Engine) -> CausalLM:
    """The base at ``source``, which is quantised, its matrices held as its files have them.

    They are multiplied in whole numbers, except with ``engine="packed"``: in float32. With
    ``engine="eager"``, or where there are no kernels, all is widened.

    Raises:
        ValueError: a file is not what it says, or in a form that is not read; or trees cannot be verified on
            its model.
        MemoryError: there is too little memory for it; the message says what would fit.
    """
    is_widened = _is_widened(engine)
    if source.gguf is None:
        directory = quantised_directory(source)
        return (
            _widened_directory(source, directory)
            if is_widened
            else _held_directory(source, directory, engine)
        )
    if is_widened:
        num_weights = sum(math.prod(each.shape) for each in source.gguf.tensors.values())
        _check_widened_fits(source.name, num_weights, source.gguf.num_bytes)
        return load_widened(source, torch.float32)
    return _held_file(source, source.gguf, engine)


def bytes_of_quantised(source: BaseSource, engine: Engine) -> int:
    """Memory that the weights of a base that is quantised take as ``engine`` holds them, about; none of them
    is read.

    Raises:
        ValueError: a file is not what it says, or in a form that is not read.
    """
    if source.gguf is None:
        directory = quantised_directory(source)
        base = directory.empty_model(**source_arguments(source.arguments))
        if _is_widened(engine):
            return 4 * sum(weight.numel() for weight in base.parameters())
        return _bytes_held(directory, base, *directory.of_text(base), engine)
    if _is_widened(engine):
        return 4 * sum(math.prod(entry.shape) for entry in source.gguf.tensors.values())
    model = gguf_model()
    base = model.empty_model(source.gguf, source.config)
    return _HeldTensors.of(source.gguf, base, model.placed_weights(source.gguf, base)).num_bytes


def _is_widened(engine: Engine) -> bool:
    """Whether a quantised base is held in float32."""
    return engine == "eager" or kernels_unsupported_reason() is not None


def _check_widened_fits(name: str, num_weights: int, in_files: int) -> None:
    """Raise MemoryError where the weights find no place in float32; in the files they take ``in_files``."""
    others: tuple[Engine, ...] = ("auto",) if kernels_unsupported_reason() is None else ()
    check_fits(name, "eager", lambda engine: 4 * num_weights if engine == "eager" else in_files, others)


# ------------------------------------------------------------------ directories


def _widened_directory(source: BaseSource, directory: QuantisedDirectory) -> CausalLM:
    model = directory.empty_model(**source_arguments(source.arguments))
    layers, plain = directory.of_text(model)
    in_files = sum(each.num_bytes for each in directory.tensors.values())
    _check_widened_fits(source.name, sum(each.numel() for each in model.parameters()), in_files)
    return cast(CausalLM, directory.filled(model, layers, plain, torch.float32))


def _held_directory(source: BaseSource, directory: QuantisedDirectory, engine: Engine) -> CausalLM:
    base = directory.empty_model(**source_arguments(source.arguments))
    layers, plain = directory.of_text(base)
    experts = directory.quantised_experts(base)
    int8 = _is_held_in_int8(engine, layers)
    num_bytes = _bytes_held(directory, base, layers, plain, engine)
    check_fits(source.name, engine, lambda _: num_bytes, ())
    head = lm_head(base)
    modules = dict(base.named_modules())
    check_decodable(base)
    for name, stored in plain.items():
        values = directory.tensor(stored)
        module = modules[name.rpartition(".")[0]]
        is_packed = name.endswith(".weight") and (type(module) is nn.Linear or is_lookup(module))
        set_weight(base, name, values if is_packed else values.float())
    if source.config.get_text_config(decoder=True).tie_word_embeddings:
        base.tie_weights()
    release = released_pages()
    widened = list[QuantisedLayer]()

    def reads(layer: QuantisedLayer) -> ReadsWeight:
        return lambda: _weight(directory, layer, modules[layer.name] is head, release, widened)

    of_experts = {name: [partial(mxfp4_experts, directory, name)] for name in experts}
    hold_experts(base, of_experts, engine != "packed", release)
    by_module = {id(modules[name]): reads(layer) for name, layer in layers.items()}
    rows = None if id(head) in by_module else embedding_rows(head)
    if rows is None:
        of_head = by_module[id(head)]()
        by_module[id(head)] = _given(of_head)
        rows = of_head if isinstance(of_head, Tensor) else None
    for parent in list(base.modules()):
        _hold_quantised(parent, by_module, head, engine != "packed", int8, release)
    if widened:
        size = megabytes(sum(4 * each.num_weights for each in widened))
        log_console().print(
            f"{counted(len(widened), 'weight')} widened to float32, with scales that no other type holds or "
            f"of an LM head with an order of inputs: {size}",
            style="dim",
            soft_wrap=True,
        )
    base = packed_rest(base, int8, rows, release)
    give_back_freed_memory()  # of codes that were unpacked
    if not is_tested(base) and misses_weights(base):
        raise ValueError(
            f"engine={engine!r} needs modules that are called for their products, and {type(base).__name__} "
            "reads weights itself; use engine='eager'"
        )
    return base


def _is_held_in_int8(engine: Engine, layers: Mapping[str, QuantisedLayer]) -> bool:
    """Whether ``engine`` rounds the weights of a quantised directory again, those of FP8 alone."""
    return engine == "int8" and all(layer.form == "fp8" for layer in layers.values())


def _bytes_held(
    directory: QuantisedDirectory,
    base: CausalLM,
    layers: Mapping[str, QuantisedLayer],
    plain: Mapping[str, str],
    engine: Engine,
) -> int:
    """Memory that the weights of ``base`` take, about.

    An LM head that is tied is packed beside the embedding's rows, which stay in the file.
    """
    int8 = _is_held_in_int8(engine, layers)
    parameters = dict(base.named_parameters(remove_duplicate=False))
    stored = {id(parameters[name]): directory.tensors[source] for name, source in plain.items()}
    dtypes = {weight: FLOATS[entry.dtype] for weight, entry in stored.items()}
    for layer in layers.values():
        if layer.form == "fp8":
            dtypes[id(parameters[f"{layer.name}.weight"])] = torch.bfloat16
    lookups = {id(module.weight) for module in base.modules() if is_lookup(module)}
    in_numbers = (layer for layer in layers.values() if layer.form != "fp8")
    num_bytes = sum(
        layer.num_weights * (4 * layer.bits + 3) // 32 for layer in in_numbers
    )  # scales and zeros
    packed: set[int] = set()
    for linears, dtype in matrices(base, lambda weight: dtypes.get(id(weight))):
        packed.update(id(linear.weight) for linear in linears)
        num_bytes += bytes_of_group(linears, dtype, int8)
    left = {weight: entry for weight, entry in stored.items() if weight in lookups or weight not in packed}
    of_experts = sum(math.prod(shape) for shape in directory.quantised_experts(base).values())
    num_bytes += of_experts * 17 // 32  # bytes of a block
    return num_bytes + sum(entry.num_bytes for entry in left.values())


def _weight(
    directory: QuantisedDirectory,
    layer: QuantisedLayer,
    is_head: bool,
    release: Callable[[Tensor], Tensor],
    widened: list[QuantisedLayer],
) -> QuantisedRows | Tensor:
    """The weight of a layer as it is held; ``widened`` gets the layer where that is in float32."""
    parts = directory.parts(layer)
    weight = directory.weight(layer, parts)
    held: QuantisedRows | Tensor | None = None
    if isinstance(weight, Tensor):
        held = weight
    elif not is_head or weight.input_order is None:
        held = QuantisedRows.of(weight)
    if held is None:
        widened.append(layer)
        held = cast(QuantisedMatrix, weight).widened()
    for part in parts.values():
        release(part)
    return held


# ------------------------------------------------------------------ GGUF files


def _held_file(source: BaseSource, file: GGUFFile, engine: Engine) -> CausalLM:
    model = gguf_model()
    base = model.empty_model(file, source.config)
    weights = model.placed_weights(file, base)
    held = _HeldTensors.of(file, base, weights)
    check_fits(source.name, engine, lambda _: held.num_bytes, ())
    _say_what_is_widened(held.widened)
    check_decodable(base)
    for name, values in held.floats.items():
        set_weight(base, name, values)
    in_place = {*held.quantised, *held.floats, *held.experts}
    rest = {name: weight for name, weight in weights.items() if name not in in_place}
    model.fill(base, file, rest, torch.float32)
    if source.config.get_text_config(decoder=True).tie_word_embeddings:
        base.tie_weights()
    model.check_filled(base, file, in_place)
    release = released_pages()
    head = lm_head(base)
    quantised = [*held.quantised.values(), *held.tied]
    rows = None if any(module is head for module, _ in quantised) else embedding_rows(head)
    _hold_tensors(file, base, quantised, held.experts, head, engine != "packed", release)
    base = packed_rest(base, False, rows, release)
    give_back_freed_memory()  # of parts that were joined
    return base


def load_held_mtp_layers(path: Path, head: MtpHead) -> None:
    """Fill the layers of ``head``, which have no memory yet, from the file at ``path``: its matrices as the
    file has them, multiplied in whole numbers, as heads are.

    Raises:
        ValueError: the file has other tensors.
    """
    model = gguf_model()
    file = GGUFFile.open(path)
    release = released_pages()
    of_layers = model.mtp_weights(file, without_weights(head.config.base_config), head.layers)
    for layer, weights in zip(head.layers, of_layers, strict=False):
        quantised = _file_modules(file, layer, weights, None)
        experts = experts_in_file(file, layer, weights)
        in_place = {*quantised, *experts}
        rest = {name: weight for name, weight in weights.items() if name not in in_place}
        model.fill(layer, file, rest, torch.float32)
        model.check_filled(layer, file, in_place)
        _hold_tensors(file, layer, quantised.values(), experts, None, True, release)
    for layer in head.layers:
        model.check_filled(layer, file)


def _hold_tensors(
    file: GGUFFile,
    model: nn.Module,
    quantised: Iterable[tuple[nn.Module, Sequence[QuantisedRows]]],
    experts: Mapping[str, Sequence[TensorEntry]],
    head: nn.Module | None,
    in_whole_numbers: bool,
    release: Callable[[Tensor], Tensor],
) -> None:
    """Have modules of ``model`` hold their parts, and ``experts`` theirs, as ``file`` has them."""
    by_module = {id(module): partial(_joined_rows, parts, release) for module, parts in quantised}
    of_experts = {name: [partial(file_rows, file, part) for part in parts] for name, parts in experts.items()}
    hold_experts(model, of_experts, in_whole_numbers, release)
    for parent in list(model.modules()):
        _hold_quantised(parent, by_module, head, in_whole_numbers, False, release)


@dataclass(frozen=True)
class _HeldTensors:
    """How the tensors of a GGUF file will be held in a base; none of them has been read."""

    quantised: Mapping[str, tuple[nn.Module, Sequence[QuantisedRows]]]
    """Linear layers and embeddings in whole numbers, by the names of their weights: the parts of each."""
    tied: Sequence[tuple[nn.Module, Sequence[QuantisedRows]]]
    """The LM head, where its product is made of the embedding's rows, which stay in the file."""
    floats: Mapping[str, Tensor]
    """Matrices of floats, in their own type, by name."""
    experts: Mapping[str, Sequence[TensorEntry]]
    """The parts of matrices of experts, by name."""
    widened: Sequence[TensorEntry]
    """All others: they become float32."""
    num_bytes: int
    """Memory of all of them."""

    @classmethod
    def of(cls, file: GGUFFile, base: CausalLM, weights: Mapping[str, NamedWeight]) -> _HeldTensors:
        embedding = base.get_input_embeddings()
        head = lm_head(base)
        quantised = _file_modules(file, base, weights, head)
        is_tied = head.weight is embedding.weight
        tied = [(head, rows) for module, rows in quantised.values() if is_tied and module is embedding]
        floats = _file_floats(file, base, weights)
        experts = experts_in_file(file, base, weights)
        in_place = {*quantised, *floats, *experts}
        others = (weight for name, weight in weights.items() if name not in in_place)
        widened = [file.tensors[source] for weight in others for source in weight.sources]
        lookups = list[QuantisedRows]()
        products = list[QuantisedRows]()
        for module, of_module in quantised.values():
            (lookups if isinstance(module, nn.Embedding) else products).extend(of_module)
        parts = [file_rows(file, part) for parts in experts.values() for part in parts]
        products += [part for part in parts if isinstance(part, QuantisedRows)]
        as_stored = [*floats.values(), *(part for part in parts if isinstance(part, Tensor))]
        num_bytes = sum(values.nbytes for values in (*as_stored, *(rows.rows for rows in lookups)))
        num_bytes += sum(rows.packed_bytes for rows in (*products, *(rows for _, of in tied for rows in of)))
        num_bytes += 4 * sum(math.prod(entry.shape) for entry in widened)
        return cls(quantised, tied, floats, experts, widened, num_bytes)


def _given(weight: QuantisedRows | Tensor) -> ReadsWeight:
    return lambda: weight


def file_matrices(
    file: GGUFFile, model: nn.Module, weights: Mapping[str, NamedWeight], types: Collection[int]
) -> Iterator[tuple[str, nn.Linear | nn.Embedding, list[TensorEntry], Order]]:
    """The weights of linear layers and embeddings of ``model`` that are matrices of one of ``types`` in the
    file, with their names and modules, and in which order the file has them."""
    modules = dict(model.named_modules())
    for name, weight in weights.items():
        parts = [file.tensors[source] for source in weight.sources]
        module = modules[name.rpartition(".")[0]]
        is_layer = isinstance(module, (nn.Linear, nn.Embedding)) and name.endswith(".weight")
        if (
            not is_layer
            or {len(part.shape) for part in parts} != {2}
            or len({each.type for each in parts}) > 1
        ):
            continue
        order = weight.order([part.shape for part in parts]) if parts[0].type in types else None
        if order is not None:
            yield name, cast("nn.Linear | nn.Embedding", module), parts, order


def check_shapes(module: nn.Linear | nn.Embedding, parts: Sequence[TensorEntry]) -> None:
    """Raise ValueError if ``parts`` are not the rows of the weight of ``module``."""
    num_rows, *rest = module.weight.shape
    if len(parts) == 1 or sum(part.shape[0] for part in parts) != num_rows:
        parts[0].check_shape((num_rows // len(parts), *rest))
    for part in parts[1:]:
        part.check_shape((part.shape[0], *rest))


def _file_modules(
    file: GGUFFile, model: nn.Module, weights: Mapping[str, NamedWeight], head: nn.Module | None
) -> dict[str, tuple[nn.Module, list[QuantisedRows]]]:
    """The linear layers and embeddings of ``model``, with the LM head ``head``, that can hold their weight as
    the file has it, by the name of that weight: the parts of each, one below the other."""
    modules: dict[str, tuple[nn.Module, list[QuantisedRows]]] = {}
    for name, module, parts, order in file_matrices(file, model, weights, gguf_types()):
        check_shapes(module, parts)
        if order.moves and (isinstance(module, nn.Embedding) or module is head):
            continue
        inputs = None if order.columns is None else order.columns.argsort()
        rows = [
            QuantisedRows(file.rows(part.name), part.type, part.shape[1], order.rows, inputs)
            for part in parts
        ]
        modules[name] = (module, rows)
    return modules


def _joined_rows(parts: Sequence[QuantisedRows], release: Callable[[Tensor], Tensor]) -> QuantisedRows:
    """The parts of a matrix as one, in their order, which is that of all rows; parts that were copied are
    released."""
    first, *others = parts
    if not others:
        return first
    joined = replace(first, rows=torch.cat([part.rows for part in parts]))
    for part in parts:
        release(part.rows)
    return joined


def _file_floats(file: GGUFFile, base: CausalLM, weights: Mapping[str, NamedWeight]) -> dict[str, Tensor]:
    """The matrices of ``base`` that are floats in the file, in their own type, by name."""
    matrices = {}
    for name, module, parts, order in file_matrices(file, base, weights, FLOAT_TYPES):
        values = file.plain(parts[0].name)
        if len(parts) > 1:
            values = torch.cat([values, *(file.plain(part.name) for part in parts[1:])])
        if values.shape == module.weight.shape:
            values = values if order.rows is None else values[order.rows]
            matrices[name] = values if order.columns is None else values[:, order.columns]
    return matrices


def _say_what_is_widened(widened: Iterable[TensorEntry]) -> None:
    """Tell of matrices that cannot be held in their own bits, and what they take."""
    large = [each for each in widened if len(each.shape) > 1 and type_name(each.type) != "F32"]
    if large:
        kinds = ", ".join(sorted({type_name(each.type) for each in large}))
        log_console().print(
            f"{counted(len(large), 'tensor')} of type {kinds}, widened to float32: "
            f"{megabytes(sum(4 * math.prod(each.shape) for each in large))} in place of "
            f"{megabytes(sum(each.num_bytes for each in large))}",
            style="dim",
            soft_wrap=True,
        )


def _hold_quantised(
    parent: nn.Module,
    quantised: Mapping[int, ReadsWeight],
    head: nn.Module | None,
    in_whole_numbers: bool,
    int8: bool,
    release: Callable[[Tensor], Tensor],
) -> None:
    """Replace the modules directly below ``parent`` that are in ``quantised``, by their identity. Modules
    whose weight is read as plain numbers are packed as :func:`medusa.engine.views.pack_linears` does."""
    children = dict(parent.named_children())
    weights = {child: quantised[id(child)]() for child in children.values() if id(child) in quantised}
    plain = {child: weight for child, weight in weights.items() if isinstance(weight, Tensor)}
    rows = {child: weight for child, weight in weights.items() if isinstance(weight, QuantisedRows)}
    joined = _joined(parent, rows, in_whole_numbers)
    for name, child in children.items():
        if child not in rows:
            if isinstance(child, nn.Embedding) and is_narrow(child.weight):
                setattr(parent, name, NarrowEmbedding(child))
            continue
        new = joined.get(child)
        if new is None and isinstance(child, nn.Embedding):
            setattr(parent, name, QuantisedEmbedding(child, rows[child]))
            continue
        if new is None:
            kind = GroupQuantisedLMHead if child is head else GroupQuantisedLinear
            new = kind(cast(nn.Linear, child), rows[child], in_whole_numbers)
        del new.weight
        new.weight = placeholder(cast(Tensor, child.weight))
        setattr(parent, name, new)
        release(rows[child].rows)
    for child, weight in plain.items():
        child.weight = nn.Parameter(weight, requires_grad=False)
    if plain:
        pack_linears(parent, int8, release)


def _joined(
    parent: nn.Module, rows: Mapping[nn.Module, QuantisedRows], in_whole_numbers: bool
) -> dict[nn.Module, nn.Module]:
    """Replacements of the linear layers below ``parent`` that read one input, in one order."""
    replacements: dict[nn.Module, nn.Module] = {}
    for linears in joinable_linears(parent):
        weights = [rows[linear] for linear in linears if linear in rows]
        if len(weights) < len(linears) or not _have_one_order(weights):
            continue
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        product = GroupQuantisedMatmul(weights, torch.cat(biases) if biases else None, in_whole_numbers)
        replacements.update(zip(linears, share_product(linears, product), strict=True))
    return replacements


def _have_one_order(weights: Sequence[QuantisedRows]) -> bool:
    first, *others = (each.input_order for each in weights)
    if first is None:
        return all(each is None for each in others)
    return all(each is not None and torch.equal(first, each) for each in others)
