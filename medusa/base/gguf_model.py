"""Configuration and names of weights of a model in a GGUF file, in the terms of ``transformers``.

``transformers`` knows what the metadata of each architecture mean; here it is asked without reading the
vocabulary, or a whole model, each time.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf import (
    GGUF_ARCHS,
    GGUF_CONFIG_ARCHS,
    get_gguf_config,
    get_gguf_conversion_mapping,
)
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
)

from medusa.base.causal_lm import in_type
from medusa.base.experts import arranged, expert_matrices, is_experts
from medusa.base.gguf_architectures import (
    ARCHITECTURES,
    ROPE_FACTORS,
    Keys,
    configuration_of,
    in_shape,
    sources_in_layer,
)
from medusa.base.gguf_file import GGUFFile, check_shape
from medusa.base.gguf_tokenizer import end_tokens
from medusa.base.gguf_tokenizer import gguf_tokenizer as gguf_tokenizer

MOST_INPUTS = 2**20
"""Inputs of a layer: far more than any model has."""
BLOCK_NUMBER = re.compile(r"\.(\d+)\.")
"""The number of a layer in the name of a module."""
SIZES = {
    "gpt2": {"context_length": "n_positions"},
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "gpt-oss": {"attention.key_length": "head_dim", "attention.sliding_window": "sliding_window"},
}
"""Sizes that ``transformers`` does not take from files of an architecture, by their keys there, as its
configuration has them."""
WITHOUT_VOCABULARY = ("gpt2", "starcoder2")
"""Architectures of whose files ``transformers`` does not take the number of tokens."""
YARN_APART = "gpt-oss"
"""The architecture whose scaling of rotary angles ``transformers`` reads wrong: the lengths of keys in place
of their values (5.24)."""
YARN = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}


def gguf_config(file: GGUFFile) -> PreTrainedConfig:
    """The configuration of the model in ``file``.

    Raises:
        ValueError: ``transformers`` knows no such architecture, and the message lists those that it knows; or
            the metadata describe no model.
    """
    _check_sizes(file)
    config = _config_of(file)
    for key, name in SIZES.get(file.architecture, {}).items():
        if f"{file.architecture}.{key}" in file.metadata:
            setattr(config, name, file.metadata[f"{file.architecture}.{key}"])
    if file.architecture in WITHOUT_VOCABULARY and "token_embd.weight" in file.tensors:
        config.vocab_size = file.tensors["token_embd.weight"].shape[0]
    if file.architecture in GGUF_CONFIG_ARCHS:  # the configuration leaves it to the file
        blocks = Keys(file).drafting_blocks
        config.mtp_num_hidden_layers = sum(f"blk.{each}.{PROJECTION}" in file.tensors for each in blocks)
    if file.architecture == YARN_APART:
        scaling = {name: file.metadata.get(f"{file.architecture}.{key}") for key, name in YARN.items()}
        known = {name: value for name, value in scaling.items() if value is not None}
        config.rope_parameters = {**config.rope_parameters, **known}
    return config


def _check_sizes(file: GGUFFile) -> None:
    """Raise ValueError for sizes that no file of so many tensors has: lists of so many layers would fill the
    memory."""
    limits = {
        f"{file.architecture}.block_count": len(file.tensors),
        f"{file.architecture}.embedding_length": MOST_INPUTS,
    }
    for key, most in limits.items():
        size = file.metadata.get(key)
        if isinstance(size, int) and not 0 < size <= most:
            raise ValueError(
                f"GGUF file {file.path} is damaged: {key} is {size}, and must be from 1 to {most}; copy or "
                "download it again"
            )


def _config_of(file: GGUFFile) -> PreTrainedConfig:
    """The configuration that ``transformers`` makes of the metadata: in one of two ways, by architecture."""
    import gguf

    listed = {*gguf.MODEL_ARCH_NAMES.values()}
    with _explained_metadata(file):
        if file.architecture in ARCHITECTURES.keys() & listed:
            return AutoConfig.for_model(**configuration_of(file))
        if file.architecture in GGUF_CONFIG_ARCHS:
            return AutoConfig.for_model(**get_gguf_config(dict(file.metadata), tuple(file.tensors)))
    known = {name.replace("_", "").replace("-", "") for name in GGUF_SUPPORTED_ARCHITECTURES}
    is_known = file.architecture.replace("_", "").replace("-", "") in known
    if not is_known or file.architecture not in listed:
        of_transformers = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS}
        names = ", ".join(sorted((of_transformers | ARCHITECTURES.keys() & listed) - _NO_MODELS))
        raise ValueError(
            f"{file.path} holds a model of architecture {file.architecture!r}, which is read "
            f"from no GGUF file; those that are read are {names}. "
            "Convert the model's own repository, or choose another file"
        )
    with tempfile.TemporaryDirectory(prefix="medusa-gguf-") as directory, _explained_metadata(file):
        _write_metadata(file, Path(directory) / "metadata.gguf")
        return AutoConfig.from_pretrained(directory, gguf_file="metadata.gguf")


@contextmanager
def _explained_metadata(file: GGUFFile) -> Iterator[None]:
    """Within, settings that make no model are a ValueError that names ``file``."""
    try:
        yield
    except (*_NO_MODEL, KeyError, AttributeError) as error:
        raise ValueError(f"{file.path} has metadata that describe no model: {error}") from error


_NO_MODEL = (ValueError, TypeError, ArithmeticError, StrictDataclassError)
"""The errors of ``transformers`` for settings that make no model."""
_NO_MODELS = {"general", "tokenizer", "t5", "umt5", "mistral"}
"""Names in the lists of ``transformers`` that are no causal language models, or that no file has: llama.cpp
calls Mistral "llama"."""


def _write_metadata(file: GGUFFile, path: Path) -> None:
    """Write a file with the metadata of ``file`` but its vocabulary, and the names of its tensors: what
    ``transformers`` reads of a whole file's header takes ten seconds."""
    import gguf

    writer = gguf.GGUFWriter(path, file.architecture)
    size_key = f"{file.architecture}.vocab_size"
    for key, value in file.metadata.items():
        if key == "general.architecture" or key.startswith(("tokenizer.ggml.token", "tokenizer.ggml.merges")):
            continue
        if key.startswith(f"{YARN_APART}.rope.scaling."):
            continue
        if key.startswith("tokenizer.") and isinstance(value, list):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int64(key, value)
        elif isinstance(value, float):
            writer.add_float64(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list) and value:
            writer.add_array(key, value)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if size_key not in file.metadata and isinstance(tokens, int):
        writer.add_int64(size_key, tokens)
    for name in file.tensors:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------ weights


@dataclass(frozen=True)
class Order:
    """Where a matrix of a file has the rows and columns of the model's."""

    rows: Tensor | None = None
    """(R,) long: the row of the file that is each row; None where they are the same."""
    columns: Tensor | None = None
    """(C,) long: the column of the file that is each column; None where they are the same."""

    @property
    def moves(self) -> bool:
        return self.rows is not None or self.columns is not None


@dataclass(frozen=True)
class NamedWeight:
    """A parameter of a model of ``transformers`` in a file: one tensor, or several."""

    sources: tuple[str, ...]
    """Their names in the file."""
    convert: Callable[..., np.ndarray]
    """The numbers of each as the file has them -> those of the parameter."""

    def order(self, shapes: Sequence[Sequence[int]]) -> Order | None:
        """The order of the rows of all sources, which are matrices of these ``shapes``, or of the columns of
        one; None where the model has other numbers than the file."""
        num_rows = [shape[0] for shape in shapes]
        bounds = np.cumsum(num_rows)[:-1]
        rows = self._places(np.arange(sum(num_rows))[:, None] + _ACROSS, 0, bounds)
        if rows is not None:
            return Order(rows=_moved(rows))
        if len(shapes) > 1:
            return None
        columns = self._places(np.arange(shapes[0][1]) + _ACROSS[:, None], 1, bounds)
        return None if columns is None else Order(columns=_moved(columns))

    def _places(self, numbered: np.ndarray, axis: int, bounds: np.ndarray) -> np.ndarray | None:
        """The places in the file along ``axis``, from the numbers that they have in ``numbered``: across it
        there are a few, which must stay where they are; None where the model has others."""
        try:
            converted = self.convert(*np.split(numbered, bounds))
        except (ValueError, IndexError):  # it looks at the number of those across
            return None
        if converted.shape != numbered.shape:
            return None
        places = converted.take(0, 1 - axis)
        across = np.expand_dims(places, 1 - axis)
        is_same = np.array_equal(converted - across, numbered - numbered.take([0], 1 - axis))
        return places if is_same and np.array_equal(np.sort(places), np.arange(len(places))) else None


_ACROSS = np.array([0, 0.25, 0.5])
"""Numbers of places across those that are numbered: where these are moved, it is seen."""


def _moved(places: np.ndarray) -> Tensor | None:
    """The ``places`` as an order; None where each is its own."""
    return None if np.all(np.diff(places) == 1) else torch.from_numpy(places.astype(np.int64))


def named_weights(file: GGUFFile, model: Any) -> dict[str, NamedWeight]:
    """The tensors of ``file`` by the names of ``model``'s parameters."""
    in_order = _by_conversions if file.architecture in GGUF_ARCHS else _by_name
    return {**in_order(file, model), **_of_experts(file, model)}


def _by_name(file: GGUFFile, model: Any) -> dict[str, NamedWeight]:
    """:func:`named_weights` by the names that the package ``gguf`` lists for each architecture."""
    known = ARCHITECTURES.get(file.architecture)
    kind = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor) if known is None else known.processor
    processor = kind(config=model.config.to_dict())
    shapes = {name: value.shape for name, value in _values(model).items()}
    weights = {}
    for target, sources in _source_names(file, model, processor).items():

        def convert(
            *parts: np.ndarray, sources: tuple[str, ...] = sources, target: str = target
        ) -> np.ndarray:
            parsed: dict[str, Any] = {"tensors": {}}  # where the processor of GPT-2 puts an LM head too
            arranged_parts = [
                processor.process(weights=part, name=source, parsed_parameters=parsed).weights
                for part, source in zip(parts, sources, strict=True)
            ]
            if known is None:
                return arranged_parts[0]
            return in_shape(np.concatenate(arranged_parts), sources[0], shapes[target])

        weights[target] = NamedWeight(sources, convert)
    return weights


def _of_experts(file: GGUFFile, model: Any) -> dict[str, NamedWeight]:
    """The matrices and biases of experts, which a file has apart for gate and up."""
    weights = {}
    for name, module in model.named_modules():
        number = BLOCK_NUMBER.search(name)
        if number is None or not is_experts(module):
            continue
        block = f"blk.{number[1]}"
        into, out_of = expert_matrices(module)
        gate = ("gate",) if module.has_gate else ()
        for target, kinds in ((into, (*gate, "up")), (out_of, ("down",))):
            for suffix, kind_of in (("", "weight"), ("_bias", "bias")):
                sources = tuple(f"{block}.ffn_{kind}_exps.{kind_of}" for kind in kinds)

                def convert(*parts: np.ndarray, experts: Any = module) -> np.ndarray:
                    return arranged(experts, [torch.from_numpy(part) for part in parts]).numpy()

                if all(source in file.tensors for source in sources):
                    weights[f"{name}.{target}{suffix}"] = NamedWeight(sources, convert)
    return weights


def _source_names(file: GGUFFile, model: Any, processor: TensorProcessor) -> dict[str, tuple[str, ...]]:
    """The file's tensors of each parameter of ``model`` that it has."""
    import gguf

    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    config = model.config.get_text_config(decoder=True)
    names = gguf.get_tensor_name_map(architectures[file.architecture], config.num_hidden_layers)
    sources: dict[str, tuple[str, ...]] = {}
    for target in _values(model):
        stem = target
        suffix = ""
        if target.endswith((".weight", ".bias")):
            stem, _, kind = target.rpartition(".")
            suffix = f".{kind}"
        parts = processor.preprocess_name(stem).split(".")
        # the map lists the names of many classes, some without the names of the outer modules
        first_number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        known = (names.get_name(".".join(parts[start:])) for start in range(first_number + 1))
        of_map = next((name + suffix for name in known if name is not None), None)
        spellings = () if of_map is None else (of_map, f"{of_map}.weight")  # sinks are a weight in files
        sources.update((target, (each,)) for each in spellings if each in file.tensors)
        number = BLOCK_NUMBER.search(target)
        if target not in sources and number is not None:
            in_layer = sources_in_layer(target, f"blk.{number[1]}", file.tensors)
            sources.update({} if in_layer is None else {target: in_layer})
    return sources


def _values(model: Any, remove_duplicate: bool = False) -> dict[str, Tensor]:
    """The parameters of ``model`` by name, and the buffers that its files have."""
    stored = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return {**dict(model.named_parameters(remove_duplicate=remove_duplicate)), **buffers}


def _by_conversions(file: GGUFFile, model: Any) -> dict[str, NamedWeight]:
    """:func:`named_weights` by the conversions that ``transformers`` has for newer architectures."""
    mapping = get_gguf_conversion_mapping(file.architecture, model.config)
    renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
    converters = [change for change in mapping if isinstance(change, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    weights = {}
    for source in file.tensors:
        target, pattern = rename_source_key(source, renamings, converters)
        operations = [] if pattern is None else by_pattern[pattern].operations

        def convert(numbers: np.ndarray, operations: Any = operations, target: str = target) -> np.ndarray:
            tensor = torch.from_numpy(np.ascontiguousarray(numbers))
            for operation in operations:
                converted = operation.convert(
                    {target: tensor}, source_patterns=[target], target_patterns=[target]
                )
                tensor = converted[target]
            return tensor.numpy()

        weights[target] = NamedWeight((source,), convert)
    return weights


# ------------------------------------------------------------------ layers for multi-token prediction

PROJECTION = "nextn.eh_proj.weight"
"""The tensor of such a layer that is of no other's."""
AROUND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head_norm": "post_norm"}
"""What stands around such a layer, as files call it behind ``nextn``, and as ``transformers`` does."""


def _tensors_of(file: GGUFFile, blocks: Collection[int]) -> list[str]:
    """The names of the tensors of ``blocks``."""
    numbers = {name: BLOCK_NUMBER.search(name) for name in file.tensors if name.startswith("blk.")}
    return [name for name, number in numbers.items() if number is not None and int(number[1]) in blocks]


def mtp_weights(file: GGUFFile, base: Any, layers: torch.nn.ModuleList) -> list[dict[str, NamedWeight]]:
    """The tensors of ``file`` by the names of the parameters of each of ``layers``, ``transformers``' own for
    multi-token prediction on ``base``: they are layers of the kind of its last with full attention."""
    kinds = getattr(base.config, "layer_types", None) or ["full_attention"] * base.config.num_hidden_layers
    like = max(number for number, kind in enumerate(kinds) if kind == "full_attention")
    decoder = next(name for name, module in base.named_modules() if module is base.get_decoder())
    of_layers = []
    for block, layer in zip(Keys(file).drafting_blocks, layers, strict=False):
        names = {
            name.replace(f"blk.{block}.", f"blk.{like}.", 1): name for name in _tensors_of(file, [block])
        }
        as_like = replace(file, tensors={name: file.tensors[own] for name, own in names.items()})
        of_layer = {
            name.removeprefix(f"{decoder}.layers.{like}."): weight
            for name, weight in named_weights(as_like, base).items()
        }
        norm = of_layer["input_layernorm.weight"].convert
        weights = {f"mtp_block.{name}": weight for name, weight in of_layer.items()}
        for in_file, name in AROUND.items():
            source = f"blk.{like}.nextn.{in_file}.weight"
            weights[f"{name}.weight"] = NamedWeight((source,), norm if name.endswith("norm") else _as_it_is)
        own = {
            name: replace(weight, sources=tuple(names.get(source, source) for source in weight.sources))
            for name, weight in weights.items()
            if name in _values(layer) and all(source in names for source in weight.sources)
        }
        of_layers.append(own)
    return of_layers


def fill_mtp_layers(file: GGUFFile, base: Any, layers: torch.nn.ModuleList, dtype: torch.dtype) -> None:
    """Set the parameters of ``layers`` (:func:`mtp_weights`) from ``file``, widened.

    Raises:
        ValueError: the file has other tensors.
    """
    for layer, weights in zip(layers, mtp_weights(file, base, layers), strict=False):
        fill(layer, file, weights, dtype)
    for layer in layers:
        check_filled(layer, file)


def _as_it_is(numbers: np.ndarray) -> np.ndarray:
    return numbers


# ------------------------------------------------------------------ the model


def empty_model(file: GGUFFile, config: PreTrainedConfig) -> Any:
    """The model of ``file`` in float32, its buffers computed and its parameters without memory."""
    try:
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (*_NO_MODEL, RuntimeError, AssertionError) as error:
        raise ValueError(f"{file.path} has metadata that describe no model: {error}") from error
    for name, value in _values(model).items():
        if not value.is_meta:
            _set_value(model, name, value.to("meta"))  # a buffer that the file must have
    model.tie_weights()
    model.generation_config.eos_token_id = end_tokens(file) or model.generation_config.eos_token_id
    if ROPE_FACTORS in file.tensors:
        factors = file.floats(ROPE_FACTORS)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name.endswith("inv_freq") and buffer.shape == factors.shape:
                    setattr(module, name, buffer / factors)
    return model.eval()


def placed_weights(file: GGUFFile, model: Any) -> dict[str, NamedWeight]:
    """:func:`named_weights`, of which each tensor of the file has a place in ``model``.

    Raises:
        ValueError: one has none: the model would be another.
    """
    values = _values(model)
    weights = {name: weight for name, weight in named_weights(file, model).items() if name in values}
    placed = {source for weight in weights.values() for source in weight.sources}
    known = ARCHITECTURES.get(file.architecture)
    in_settings = () if known is None else known.tensors
    others = {ROPE_FACTORS, *in_settings, *_tensors_of(file, Keys(file).drafting_blocks)}
    left = [name for name in file.tensors if name not in placed and name not in others]
    if left:
        raise ValueError(
            f"{file.path}: tensor {left[0]!r} ({len(left)} in all) has no place in {type(model).__name__} of "
            "transformers, so the model would answer otherwise; take the model's own repository"
        )
    return weights


def fill(model: Any, file: GGUFFile, weights: Mapping[str, NamedWeight], dtype: torch.dtype) -> None:
    """Set the parameters of ``model`` that are in ``weights``, widened.

    Raises:
        ValueError: one is of another shape.
    """
    for name, value in _values(model).items():
        if name not in weights:
            continue
        weight = weights[name]
        if len({file.tensors[source].shape for source in weight.sources}) > 1:
            raise ValueError(
                f"{file.path}: tensors {' and '.join(weight.sources)} must have one shape; copy or download "
                "the file again"
            )
        numbers = weight.convert(*(file.floats(source).numpy() for source in weight.sources))
        values = torch.from_numpy(np.ascontiguousarray(numbers)).to(dtype)
        check_shape(file.path, " with ".join(weight.sources), values.shape, value.shape)
        _set_value(model, name, values)


def _set_value(model: Any, name: str, values: Tensor) -> None:
    """Put ``values`` in the place of a parameter of ``model``, or of a buffer."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    is_buffer = last in module._buffers
    setattr(module, last, values if is_buffer else torch.nn.Parameter(values, requires_grad=False))


def check_filled(model: Any, file: GGUFFile, held: Collection[str] = ()) -> None:
    """Raise ValueError where a parameter of ``model`` has no numbers yet and is none of ``held``."""
    values = _values(model, remove_duplicate=True)
    missing = [name for name, value in values.items() if value.is_meta and name not in held]
    if missing:
        raise ValueError(
            f"{file.path} must have a tensor for {missing[0]!r} ({len(missing)} in all), and has none"
        )


def load_widened(file: GGUFFile, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model of ``file`` with all weights widened, as modules of ``transformers`` compute with them."""
    model = empty_model(file, config)
    fill(model, file, placed_weights(file, model), dtype)
    model.tie_weights()
    check_filled(model, file)
    return in_type(model, dtype)
