"""The weights of a base as its files have them, before one is read.

    CheckpointWeights  safetensors or .bin files, which ``transformers`` maps into memory
    DirectoryWeights   a directory that was quantised by GPTQ, AWQ, compressed-tensors, FP8 or MXFP4
    FileWeights        a GGUF file

Each has the model without memory, says what every matrix is, and fills the model with what is not held in a
form: norms, biases and all else become float32. Matrices are read one after the other while they are held.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME

from medusa.base.architecture_check import check_decodable
from medusa.base.attention import is_code_of_transformers
from medusa.base.causal_lm import CausalLM, lm_head
from medusa.base.gguf_file import type_name
from medusa.base.loading import (
    BaseSource,
    explained_kind,
    gguf_model,
    is_held_quantised,
    load_by_transformers,
    quantised_directory,
    source_arguments,
)
from medusa.base.quantised_directory import QuantisedDirectory, set_weight
from medusa.base.quantised_forms import BLOCK, QuantisedLayer, QuantisedMatrix, mxfp4_rows
from medusa.base.stored_weights import FLOATS, StoredWeights
from medusa.base.text_part import empty_model, text_part
from medusa.console import counted, megabytes
from medusa.engine.kernels import kernels_unsupported_reason
from medusa.engine.weights.file_tensors import held_tensors
from medusa.engine.weights.hold import Reads, held_parameters, is_narrow, transposed_parameters
from medusa.engine.weights.lookups import is_lookup
from medusa.engine.weights.memory import Release
from medusa.engine.weights.stored import Arithmetic, Numbers, QuantisedRows, StoredMatrix, type_of_directory
from medusa.options import Engine

MXFP4_TYPE = 39
"""As GGUF numbers it."""


class BaseWeights(ABC):
    """The weights of a base; none of them has been read."""

    model: CausalLM
    """The model in float32, its parameters without memory."""
    is_beside = False
    """Whether packed weights are held beside those of the model, which ``transformers`` loads in float32."""
    engines: tuple[Engine, ...] = ("auto",)
    """Engines that may hold it in less than float32."""

    def __init__(self, source: BaseSource):
        self.source = source

    def chosen(self, engine: Engine) -> Engine:
        """The engine that ``engine`` means for it here."""
        return "eager" if kernels_unsupported_reason() is not None else engine

    @abstractmethod
    def arithmetic(self, engine: Engine) -> Arithmetic:
        """How ``engine``, as :meth:`chosen`, multiplies by its matrices."""

    @abstractmethod
    def described(self) -> Reads:
        """What every matrix of :attr:`model` is, without memory."""

    @abstractmethod
    def filled(self) -> tuple[CausalLM, Callable[[Release], Reads]]:
        """The model with all that is not held in a form, in float32; and what then reads the other weights.

        Raises:
            ValueError: a file is not what it says, or trees cannot be verified on the model.
        """

    def widened(self) -> str | None:
        """The matrices that could not be held in their own bits, in words, once all are held."""
        return None


def weights_of(source: BaseSource) -> BaseWeights:
    """The weights of the base at ``source``.

    Raises:
        ValueError: a file is damaged, or not what it says, or in a form that is not read.
    """
    if source.gguf is not None:
        return FileWeights(source)
    return DirectoryWeights(source) if is_held_quantised(source) else CheckpointWeights(source)


def _described(model: CausalLM, dtypes: Mapping[int, torch.dtype]) -> Reads:
    """The parameters of ``model`` that are stored in one of ``dtypes``, by identity, without memory."""
    transposed = transposed_parameters(model)
    described = {}
    for parameter in model.parameters():
        key = id(parameter)
        if key in dtypes:
            numbers = torch.empty(parameter.shape, dtype=dtypes[key], device="meta")
            described[key] = _given(Numbers(numbers.mT if key in transposed else numbers))
    return described


def _given(*parts: StoredMatrix) -> Callable[[], Sequence[StoredMatrix]]:
    return lambda: parts


# ------------------------------------------------------------------ checkpoints


class CheckpointWeights(BaseWeights):
    """The weights of a base that is not quantised. Where its modules are no code of ours to replace, or an
    adapter lies beside them, the base is loaded in float32, and packed beside it."""

    engines = ("packed", "int8")

    def __init__(self, source: BaseSource):
        super().__init__(source)
        with explained_kind(source.name):
            model = empty_model(source.config, bool(source.arguments.get("trust_remote_code")))
        self._stored = StoredWeights.of(source, model)
        is_known = is_code_of_transformers(model) and is_code_of_transformers(model.get_decoder())
        has_adapter = Path(source.name, ADAPTER_CONFIG_NAME).exists()
        self.is_beside = self._stored is None or not is_known or has_adapter
        self.model = text_part(model)

    def chosen(self, engine: Engine) -> Engine:
        chosen = super().chosen(engine)
        return "packed" if chosen == "auto" else chosen

    def arithmetic(self, engine: Engine) -> Arithmetic:
        return Arithmetic(int8=engine == "int8", in_whole_numbers=False)

    def described(self) -> Reads:
        known = {} if self._stored is None else self._stored.dtypes
        default = torch.bfloat16 if self._stored is None else self._stored.dtype
        named = self.model.named_parameters(remove_duplicate=False)
        return _described(self.model, {id(weight): known.get(name, default) for name, weight in named})

    def filled(self) -> tuple[CausalLM, Callable[[Release], Reads]]:
        """See :class:`BaseWeights`; :attr:`is_beside` is true afterwards where the files turn out to have an
        adapter, which was rounded to their type."""
        assert self._stored is not None, "weights that are held beside the model are not read here"
        base = load_by_transformers(self.source, self._stored.dtype)
        self.is_beside = getattr(base, "_hf_peft_config_loaded", False)
        if not self.is_beside:
            check_decodable(base)  # what cannot be decoded may fail on packed weights in other words
            self._stored.give_back(base)
            widen_rest(base)
        return base, lambda release: {}


@torch.no_grad()
def widen_rest(base: CausalLM) -> None:
    """Convert all weights and buffers of ``base`` to float32 that are not held in a form.

    Buffers that are computed and not loaded, such as the scale of an embedding, were rounded to the narrow
    type, so they are computed anew.
    """
    kept = held_parameters(base)
    computed = []
    for module in base.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter._is_hf_initialized = True
                if is_narrow(parameter) and id(parameter) not in kept:
                    parameter.data = parameter.data.float()
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if is_narrow(buffer):
                module._buffers[name] = buffer.float()
                if name in module._non_persistent_buffers_set:
                    computed.append(module)
                    continue
            module._buffers[name]._is_hf_initialized = True
    owners = {  # the innermost model of each module: its configuration has what the module is made of
        module: model
        for model in base.modules()
        if isinstance(model, PreTrainedModel)
        for module in model.modules()
    }
    for module in dict.fromkeys(computed):
        owners[module]._init_weights(module)
    for config in _configs(base.config):
        config.dtype = torch.float32


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and the configurations of its parts."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)


# ------------------------------------------------------------------ quantised directories


class DirectoryWeights(BaseWeights):
    """The weights of a quantised directory. FP8 is no whole number: it is widened to bfloat16."""

    def __init__(self, source: BaseSource):
        super().__init__(source)
        self._directory: QuantisedDirectory = quantised_directory(source)
        self.model = self._directory.empty_model(**source_arguments(source.arguments))
        self._layers, self._plain = self._directory.of_text(self.model)
        self._experts = self._directory.quantised_experts(self.model)
        self._parameters = dict(self.model.named_parameters(remove_duplicate=False))
        head = lm_head(self.model)
        self._head = next((name for name, module in self.model.named_modules() if module is head), None)
        self._widened: list[QuantisedLayer] = []

    def arithmetic(self, engine: Engine) -> Arithmetic:
        is_all_fp8 = all(layer.form == "fp8" for layer in self._layers.values())
        return Arithmetic(int8=engine == "int8" and is_all_fp8, in_whole_numbers=engine != "packed")

    def described(self) -> Reads:
        dtypes = {
            id(self._parameters[name]): FLOATS[self._directory.tensors[stored].dtype]
            for name, stored in self._plain.items()
            if name in self._parameters
        }
        described = {**_described(self.model, dtypes)}
        for name, layer in self._layers.items():
            described[self._key(name)] = _given(self._described_layer(layer))
        for name, (num_experts, num_outputs, num_inputs) in self._experts.items():
            num_bytes = num_inputs // BLOCK * (BLOCK // 2 + 1)
            rows = torch.empty(num_experts, num_outputs, num_bytes, dtype=torch.uint8, device="meta")
            described[id(self._parameters[name])] = _given(QuantisedRows(rows, MXFP4_TYPE, num_inputs))
        return described

    def _key(self, layer: str) -> int:
        return id(self._parameters[f"{layer}.weight"])

    def _described_layer(self, layer: QuantisedLayer) -> StoredMatrix:
        """The weight of a layer as :meth:`_read` gives it, where its scales are numbers of 16 bits."""
        if layer.form == "fp8":
            return Numbers(torch.empty(layer.shape, dtype=torch.bfloat16, device="meta"))
        order = self._directory.input_order(layer)
        if order is not None and layer.name == self._head:
            return Numbers(torch.empty(layer.shape, dtype=torch.float32, device="meta"))
        num_outputs, num_inputs = layer.shape
        has_zeros = self._directory.zeros(layer) is not None
        num_bytes = num_inputs // BLOCK * (2 + has_zeros + BLOCK * layer.bits // 8)
        rows = torch.empty(num_outputs, num_bytes, dtype=torch.uint8, device="meta")
        kind = type_of_directory(layer.bits, has_zeros, torch.float16)
        return QuantisedRows(rows, kind, num_inputs, input_order=order)

    def filled(self) -> tuple[CausalLM, Callable[[Release], Reads]]:
        base = self.model
        directory = self._directory
        modules = dict(base.named_modules())
        check_decodable(base)
        matrices = {}
        for name, stored in self._plain.items():
            module = modules[name.rpartition(".")[0]]
            if name.endswith(".weight") and (type(module) is nn.Linear or is_lookup(module)):
                matrices[id(self._parameters[name])] = stored
            else:
                set_weight(base, name, directory.tensor(stored).float())
        if self.source.config.get_text_config(decoder=True).tie_word_embeddings:
            base.tie_weights()

        def reads(release: Release) -> Reads:
            return {
                **{key: partial(self._read_plain, stored) for key, stored in matrices.items()},
                **{self._key(name): partial(self._read, name, release) for name in self._layers},
                **{id(self._parameters[name]): partial(self._read_experts, name) for name in self._experts},
            }

        return base, reads

    def _read_plain(self, stored: str) -> Sequence[StoredMatrix]:
        return [Numbers(self._directory.tensor(stored))]

    def _read(self, name: str, release: Release) -> Sequence[StoredMatrix]:
        """The weight of the quantised layer of this name."""
        layer = self._layers[name]
        parts = self._directory.parts(layer)
        weight = self._directory.weight(layer, parts)
        held: StoredMatrix | None = None
        if isinstance(weight, Tensor):
            held = Numbers(weight)
        elif name != self._head or weight.input_order is None:
            held = QuantisedRows.of(weight)
        if held is None:
            self._widened.append(layer)
            held = Numbers(cast(QuantisedMatrix, weight).widened())
        for part in parts.values():
            release(part)
        return [held]

    def _read_experts(self, matrix: str) -> Sequence[StoredMatrix]:
        """The matrix of this name of all experts."""
        blocks, scales = self._directory.expert_parts(matrix)
        rows = mxfp4_rows(blocks.flatten(0, 1), scales.flatten(0, 1))
        return [QuantisedRows(rows.view(*scales.shape[:2], -1), MXFP4_TYPE, BLOCK * scales.shape[2])]

    def widened(self) -> str | None:
        if not self._widened:
            return None
        return (
            f"{counted(len(self._widened), 'weight')} widened to float32, with scales that no other type "
            "holds or of an LM head with an order of inputs: "
            f"{megabytes(sum(4 * layer.num_weights for layer in self._widened))}"
        )


# ------------------------------------------------------------------ GGUF files


class FileWeights(BaseWeights):
    """The weights of a GGUF file."""

    def __init__(self, source: BaseSource):
        super().__init__(source)
        file = source.gguf
        assert file is not None, "a source without a file"
        self._file = file
        self._module = gguf_model()
        self.model = self._module.empty_model(file, source.config)
        self._weights = self._module.placed_weights(file, self.model)
        self._held = held_tensors(file, self.model, self._weights, lm_head(self.model))
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self._keys = {name: id(parameters[name]) for name in self._held}

    def arithmetic(self, engine: Engine) -> Arithmetic:
        return Arithmetic(int8=False, in_whole_numbers=engine != "packed")

    def described(self) -> Reads:
        return {self._keys[name]: weight.described for name, weight in self._held.items()}

    def filled(self) -> tuple[CausalLM, Callable[[Release], Reads]]:
        base = self.model
        check_decodable(base)
        rest = {name: weight for name, weight in self._weights.items() if name not in self._held}
        self._module.fill(base, self._file, rest, torch.float32)
        if self.source.config.get_text_config(decoder=True).tie_word_embeddings:
            base.tie_weights()
        self._module.check_filled(base, self._file, self._held)
        return base, lambda release: {
            self._keys[name]: partial(weight.read, release) for name, weight in self._held.items()
        }

    def widened(self) -> str | None:
        others = (weight for name, weight in self._weights.items() if name not in self._held)
        widened = [self._file.tensors[source] for weight in others for source in weight.sources]
        large = [each for each in widened if len(each.shape) > 1 and type_name(each.type) != "F32"]
        if not large:
            return None
        kinds = ", ".join(sorted({type_name(each.type) for each in large}))
        return (
            f"{counted(len(large), 'tensor')} of type {kinds}, widened to float32: "
            f"{megabytes(sum(4 * math.prod(each.shape) for each in large))} in place of "
            f"{megabytes(sum(each.num_bytes for each in large))}"
        )
