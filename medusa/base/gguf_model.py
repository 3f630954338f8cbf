"""Configuration and names of weights of a model in a GGUF file, in the terms of ``transformers``.

``transformers`` knows what the metadata of each architecture mean; here it is asked without reading the
vocabulary, or a whole model, each time.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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

from medusa.base.experts import arranged, expert_matrices, is_experts
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
    "gpt-oss": {"attention.key_length": "head_dim"},
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
    if file.architecture in GGUF_CONFIG_ARCHS:
        with _explained_metadata(file):
            return AutoConfig.for_model(**get_gguf_config(dict(file.metadata), tuple(file.tensors)))
    import gguf

    known = {name.replace("_", "").replace("-", "") for name in GGUF_SUPPORTED_ARCHITECTURES}
    is_known = file.architecture.replace("_", "").replace("-", "") in known
    if not is_known or file.architecture not in gguf.MODEL_ARCH_NAMES.values():
        listed = ", ".join(sorted({*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_ARCHS} - _NO_MODELS))
        raise ValueError(
            f"{file.path} holds a model of architecture {file.architecture!r}, which transformers reads "
            f"from no GGUF file; it reads {listed}. "
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
class NamedWeight:
    """A parameter of a model of ``transformers`` in a file: one tensor, or of experts perhaps two."""

    sources: tuple[str, ...]
    """Their names in the file."""
    convert: Callable[..., np.ndarray]
    """The numbers of each as the file has them -> those of the parameter."""

    def row_order(self, num_rows: int) -> Tensor | None:
        """The rows of the file, in the model's order, (num_rows,) long; None where the model has other rows
        than the file. Only for a parameter that is one tensor of the file."""
        numbered = np.repeat(np.arange(num_rows, dtype=np.float64)[:, None], 3, axis=1)
        numbered += np.array([0, 0.25, 0.5])  # columns that are moved are seen too
        try:
            converted = self.convert(numbered)
        except ValueError:  # it looks at the number of columns
            return None
        is_same = converted.shape == numbered.shape and np.array_equal(
            converted - converted[:, :1], numbered - numbered[:, :1]
        )
        if not is_same or not np.array_equal(np.sort(converted[:, 0]), np.arange(num_rows)):
            return None
        return torch.from_numpy(converted[:, 0].astype(np.int64))


def named_weights(file: GGUFFile, model: Any) -> dict[str, NamedWeight]:
    """The tensors of ``file`` by the names of ``model``'s parameters."""
    in_order = _by_conversions if file.architecture in GGUF_ARCHS else _by_name
    return {**in_order(file, model), **_of_experts(file, model)}


def _by_name(file: GGUFFile, model: Any) -> dict[str, NamedWeight]:
    """:func:`named_weights` by the names that the package ``gguf`` lists for each architecture."""
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=model.config.to_dict())
    weights = {}
    for target, source in _source_names(file, model, processor).items():

        def convert(numbers: np.ndarray, source: str = source) -> np.ndarray:
            parsed: dict[str, Any] = {"tensors": {}}  # where the processor of GPT-2 puts an LM head too
            return processor.process(weights=numbers, name=source, parsed_parameters=parsed).weights

        weights[target] = NamedWeight((source,), convert)
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


def _source_names(file: GGUFFile, model: Any, processor: TensorProcessor) -> dict[str, str]:
    """The file's name of each parameter of ``model`` that it has."""
    import gguf

    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    config = model.config.get_text_config(decoder=True)
    names = gguf.get_tensor_name_map(architectures[file.architecture], config.num_hidden_layers)
    sources: dict[str, str] = {}
    for target, _ in model.named_parameters(remove_duplicate=False):
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
        sources.update((target, each) for each in spellings if each in file.tensors)
    return sources


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


# ------------------------------------------------------------------ the model


def empty_model(file: GGUFFile, config: PreTrainedConfig) -> Any:
    """The model of ``file`` in float32, its buffers computed and its parameters without memory."""
    try:
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (*_NO_MODEL, RuntimeError, AssertionError) as error:
        raise ValueError(f"{file.path} has metadata that describe no model: {error}") from error
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
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: weight for name, weight in named_weights(file, model).items() if name in parameters}
    placed = {source for weight in weights.values() for source in weight.sources}
    left = [name for name in file.tensors if name not in placed and name != ROPE_FACTORS]
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
    for name, parameter in list(model.named_parameters()):
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
        check_shape(file.path, " with ".join(weight.sources), values.shape, parameter.shape)
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, torch.nn.Parameter(values, requires_grad=False))


def check_filled(model: Any, file: GGUFFile, held: Collection[str] = ()) -> None:
    """Raise ValueError where a parameter of ``model`` has no numbers yet and is none of ``held``."""
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta and name not in held]
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
    return model.to(dtype) if dtype != torch.float32 else model


ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of the numbers by which rotary frequencies are divided (Llama 3.1 and later)."""
