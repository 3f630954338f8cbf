"""A model in a directory whose ``config.json`` has a ``quantization_config``, read without a package of the
method that quantised it.

Everything that can be refused is refused by names, types and shapes, before a weight is read.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from medusa.base.causal_lm import in_type
from medusa.base.experts import arranged, expert_matrices, is_experts, shape_of_experts
from medusa.base.quantised_forms import (
    BLOCK,
    FORMS,
    GROUPS_OF_INPUTS,
    SCALES,
    ZEROS,
    QuantisedLayer,
    QuantisedMatrix,
    fp8_numbers,
    mxfp4_numbers,
)
from medusa.base.text_part import auto_class, text_part
from medusa.console import megabytes

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
"""The methods that are read, as ``quant_method`` names them."""
READABLE = (
    "GPTQ and compressed-tensors in 4 and 8 bits, AWQ in 4 bits (gemm), and FP8, with groups of whole "
    f"{BLOCK} inputs; experts in MXFP4"
)
WORDS = ("qweight", "qzeros", "weight_packed")
"""Tensors of several codes in each number."""
FLOATS = ("BF16", "F16", "F32")
"""Types of tensors that are not quantised, and of scales, as safetensors names them."""
PACKED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
"""Formats of compressed-tensors that are read; "mixed-precision" has one for each group of layers."""
PLACES = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
"""Arguments that say where files come from."""
UNUSED = re.compile(
    r"\.(input_scale|output_scale|activation_scale|[qkv]_scale|input_zero_point|rotary_emb\.inv_freq)$"
)
"""Tensors without a use here: rows are rounded as they come, and keys and values are kept in float32."""
EXPERT_PARTS = ("_blocks", "_scales")
"""The endings of the two tensors that hold a matrix of experts in MXFP4."""
OF_LAYERS = re.compile(r"\.(layers|h|blocks)\.\d+\.")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and its form."""

    file: Path
    name: str
    """Its name there."""
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    num_bytes: int


class QuantisedDirectory:
    """A model in safetensors files that one of :data:`METHODS` has quantised.

    Args:
        name: the directory or hub id.
        config: its configuration.
        files: its safetensors files.
    """

    def __init__(self, name: str, config: PreTrainedConfig, files: Sequence[Path]):
        self.name = name
        self.settings = quantisation_settings(config)
        self._form = described_settings(config)
        self.config = copy.deepcopy(config)
        """The configuration of the model that was quantised."""
        del self.config.quantization_config
        self._opened = {file: safe_open(file, "pt") for file in files}
        self.tensors: dict[str, StoredTensor] = {}
        """By name: in the files, and in the model once :meth:`empty_model` has made it."""
        for file, opened in self._opened.items():
            for key in opened.keys():  # noqa: SIM118
                part = opened.get_slice(key)
                shape = tuple(part.get_shape())
                dtype = part.get_dtype()
                num_bytes = math.prod(shape) * _bits_of(dtype) // 8
                self.tensors[key] = StoredTensor(file, key, dtype, shape, num_bytes)

    @property
    def method(self) -> str:
        return str(self.settings["quant_method"])

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored: a view of its file."""
        stored = self.tensors[name]
        return self._opened[stored.file].get_tensor(stored.name)

    # -------------------------------------------------------------- what is there

    def quantised_layers(self, model: Any) -> dict[str, QuantisedLayer]:
        """The linear layers of ``model`` whose weights are quantised here, by name.

        Raises:
            ValueError: the directory has a form that is not read, or a tensor that has no place in ``model``,
                or lacks one.
        """
        self._check_settings()
        layers: dict[str, QuantisedLayer] = {}
        for name, module in model.named_modules():
            form = self._form_of(name) if type(module) is nn.Linear else None
            if form is not None:
                layers[name] = self._layer(name, form, (module.out_features, module.in_features))
        plain = self.plain_names(model, layers)
        experts = self.quantised_experts(model)
        placed = {*plain, *plain.values(), *_other_names(model, plain)}
        placed |= {f"{matrix}{part}" for matrix in experts for part in EXPERT_PARTS}
        placed |= {stored for layer in layers.values() for stored in self._names(layer).values()}
        has_layers = self.config.get_text_config(decoder=True).num_hidden_layers > 0
        left = [
            name
            for name in self.tensors
            if name not in placed and not UNUSED.search(name) and (has_layers or not OF_LAYERS.search(name))
            if not self._is_bias_of_zeros(name, layers)
        ]
        if left:
            raise self._refused(
                f"its tensor {left[0]!r} ({len(left)} in all) has no place in {type(model).__name__} of "
                "transformers"
            )
        filled = {*plain, *(f"{name}.weight" for name in layers), *experts}
        missing = [name for name, _ in model.named_parameters() if name not in filled]
        if missing:
            raise ValueError(
                f"base {self.name!r} must have a tensor for {missing[0]!r} ({len(missing)} in all), and has "
                "none; copy or download it again"
            )
        return layers

    def of_text(self, model: Any) -> tuple[dict[str, QuantisedLayer], dict[str, str]]:
        """:meth:`quantised_layers` and :meth:`plain_names` of ``model``, which lets go of what reads images.

        Raises:
            ValueError: as :meth:`quantised_layers`.
        """
        layers = self.quantised_layers(model)
        plain = self.plain_names(model, layers)
        text_part(model)
        modules = {name for name, _ in model.named_modules()}
        saved = {name for names, _ in _saved(model) for name in names}
        return (
            {name: layer for name, layer in layers.items() if name in modules},
            {name: stored for name, stored in plain.items() if name in saved},
        )

    def _is_bias_of_zeros(self, name: str, layers: Mapping[str, QuantisedLayer]) -> bool:
        """Whether a tensor is the bias that AutoGPTQ added to each layer, also of models without biases."""
        layer, _, part = name.rpartition(".")
        return self.method == "gptq" and part == "bias" and layer in layers and not self.tensor(name).any()

    def quantised_experts(self, model: Any) -> dict[str, tuple[int, int, int]]:
        """The matrices of experts of ``model`` that are in MXFP4 here, by name: experts, outputs and inputs.

        Raises:
            ValueError: a tensor has another shape.
        """
        matrices = {}
        for name, module in model.named_modules():
            names = expert_matrices(module) if is_experts(module) else ()
            quantised = [each for each in names if f"{name}.{each}{EXPERT_PARTS[0]}" in self.tensors]
            if quantised and len(quantised) < len(names):
                raise self._refused(f"of {name!r} only {quantised[0]} is in MXFP4")
            for matrix in quantised:
                full_name = f"{name}.{matrix}"
                num_experts, num_outputs, num_inputs = shape = shape_of_experts(module, matrix)
                groups = (num_experts, num_outputs, num_inputs // BLOCK)
                for part, expected in zip(EXPERT_PARTS, ((*groups, BLOCK // 2), groups), strict=True):
                    stored = self.tensors.get(f"{full_name}{part}")
                    if stored is None or stored.shape != expected or num_inputs % BLOCK:
                        raise self._of_another_shape(f"{full_name}{part}", expected)
                matrices[full_name] = shape
        return matrices

    def expert_parts(self, matrix: str) -> tuple[Tensor, Tensor]:
        """Blocks and scales of a matrix of experts, as :func:`medusa.base.quantised_forms.mxfp4_numbers`
        takes those of each expert: views of the files."""
        blocks, scales = (self.tensor(f"{matrix}{part}") for part in EXPERT_PARTS)
        return blocks, scales

    def plain_names(self, model: Any, quantised: Mapping[str, QuantisedLayer]) -> dict[str, str]:
        """The tensors that are not quantised, by the names of the parameters and buffers of ``model`` that
        they are."""
        quantised_names = {f"{name}.weight" for name in quantised}
        plain = {}
        for names, tensor in _saved(model):
            stored = next((name for name in names if name in self.tensors), None)
            if stored is None or quantised_names & set(names):
                continue
            entry = self.tensors[stored]
            if entry.dtype not in FLOATS:
                raise self._refused(f"its tensor {stored!r} of type {entry.dtype} is no layer's weight")
            if entry.shape != tensor.shape:
                raise self._of_another_shape(stored, tuple(tensor.shape))
            plain[names[0]] = stored
        return plain

    def _check_settings(self) -> None:
        """Raise ValueError where the configuration asks for a form that is not read."""
        settings = self.settings
        rules: list[tuple[str, Any, tuple[Any, ...]]] = []  # a key, its value, and the values that are read
        if self.method == "gptq":
            checkpoint_format = settings.get("checkpoint_format", "gptq")
            rules.append(("checkpoint_format", checkpoint_format, ("gptq", "gptq_v2")))
            rules.append(("bits", settings.get("bits"), (4, 8)))
        if self.method == "awq":
            packing = str(settings.get("version") or settings.get("format") or "gemm").lower()
            rules.append(("version", packing, ("gemm",)))
            rules.append(("bits", settings.get("bits", 4), (4,)))
            rules.append(("zero_point", settings.get("zero_point", True), (True,)))
        if self.method == "compressed-tensors":
            rules.append(("format", settings.get("format"), PACKED_FORMATS))
            rules += [
                ("format", scheme["format"], PACKED_FORMATS)
                for scheme in self._schemes
                if scheme.get("format")
            ]
            for scheme in self._schemes:
                weights = _as_settings(scheme.get("weights"))
                bits = (8,) if weights.get("type") == "float" else (4, 8)
                rules.append(("num_bits", weights.get("num_bits", 8), bits))
            sparsity = _as_settings(settings.get("sparsity_config")).get("format", "dense")
            rules.append(("sparsity_config.format", sparsity, ("dense",)))
            rules.append(("transform_config", bool(settings.get("transform_config")), (False,)))
        for key, value, allowed in rules:
            if value not in allowed:
                choices = " or ".join(map(str, allowed))
                raise self._refused(f"{key} in its quantization_config must be {choices}, got {value}")

    @property
    def _schemes(self) -> list[Mapping[str, Any]]:
        """How each group of layers is quantised, in compressed-tensors."""
        return _schemes_of(self.settings)

    def _form_of(self, layer: str) -> str | None:
        """The form of a layer's weight; None where it is not quantised."""
        if self.method in ("gptq", "awq"):
            return self.method if f"{layer}.qweight" in self.tensors else None
        if f"{layer}.weight_packed" in self.tensors:
            return "packed"
        stored = self.tensors.get(f"{layer}.weight")
        return None if stored is None else {"I8": "int8", "F8_E4M3": "fp8"}.get(stored.dtype)

    def _names(self, layer: QuantisedLayer) -> dict[str, str]:
        """The names of a layer's tensors, by their last part."""
        names = {part: f"{layer.name}.{part}" for part in FORMS[layer.form].parts}
        return {part: name for part, name in names.items() if name in self.tensors}

    def _layer(self, name: str, form: str, shape: tuple[int, int]) -> QuantisedLayer:
        """The layer called ``name``, whose tensors have the shapes that a weight of this one has."""
        codes = f"{name}.{FORMS[form].codes}"
        stored = self.tensors[codes].shape
        num_outputs, num_inputs = shape
        # Words of 32 bits for the codes of an output: of AWQ, which packs outputs, as many as for 4 bits.
        words = {"gptq": stored[0], "packed": stored[-1], "awq": num_inputs // 8}.get(form, num_inputs // 4)
        bits = 32 * words // num_inputs
        scales_names = [f"{name}.{part}" for part in SCALES]
        scales = next((tensor for tensor in scales_names if tensor in self.tensors), None)
        if scales is None or self.tensors[scales].dtype not in FLOATS:
            raise self._refused(f"{codes!r} has no scales of type {', '.join(FLOATS)}")
        if bits not in (4, 8) or num_inputs % BLOCK or (form in ("gptq", "awq") and num_outputs % 8):
            raise self._refused(
                f"{codes!r} has shape {stored} for {num_inputs} inputs and {num_outputs} outputs"
            )
        scales_shape = self.tensors[scales].shape
        num_groups = scales_shape[0 if form in ("gptq", "awq") else -1] if len(scales_shape) == 2 else 1
        layer = QuantisedLayer(name, form, shape, bits, num_groups)
        self._check_shapes(layer, scales_shape)
        if form == "fp8":  # either raises where the groups are of no form that is read
            self._block_of(layer, scales_shape)
        else:
            self._groups(layer)
        return layer

    def _check_shapes(self, layer: QuantisedLayer, scales: tuple[int, ...]) -> None:
        """Raise ValueError where a tensor of ``layer`` has another shape than its form says."""
        num_outputs, num_inputs = layer.shape
        per_word = 32 // layer.bits
        expected = FORMS[layer.form].shapes(num_outputs, num_inputs, per_word, layer.num_groups)
        zeros = self.tensors.get(f"{layer.name}.weight_zero_point")
        if zeros is not None:
            rows = -(-num_outputs // per_word) if zeros.dtype == "I32" else num_outputs
            expected["weight_zero_point"] = (rows, layer.num_groups)
        if math.prod(scales) == 1 or scales == (num_outputs,):  # of the whole matrix, or of each output
            expected.pop("weight_scale", None)
            if zeros is not None and zeros.shape == scales:
                del expected["weight_zero_point"]
        for part, shape in expected.items():
            name = f"{layer.name}.{part}"
            if name not in self.tensors or self.tensors[name].shape != shape:
                raise self._of_another_shape(name, shape)
            if part in WORDS and self.tensors[name].dtype != "I32":
                raise self._refused(f"{name!r} must be of type I32, got {self.tensors[name].dtype}")

    def _groups(self, layer: QuantisedLayer) -> tuple[Tensor, Tensor | None]:
        """The group of each block of 32 columns of codes, (in / 32,) long, and the input of each column,
        (in,) long, or None where they are in order: inputs of a group are put beside each other."""
        num_inputs = layer.shape[1]
        names = self._names(layer)
        group_of = next((self.tensor(names[part]) for part in GROUPS_OF_INPUTS if part in names), None)
        if group_of is None or bool((group_of < 0).any()):  # compressed-tensors: -1, they are in order
            group_of = torch.arange(num_inputs) // self._group_size(layer)
        if group_of.shape != (num_inputs,):
            raise self._of_another_shape(names.get("g_idx", f"{layer.name}.weight_g_idx"), (num_inputs,))
        groups, order = group_of.long().sort(stable=True)
        blocks = groups.view(-1, BLOCK)
        if bool((blocks != blocks[:, :1]).any()) or not bool((groups < layer.num_groups).all()):
            raise self._refused(
                f"groups of {layer.name!r} must be whole {BLOCK} inputs, got {layer.num_groups} for "
                f"{num_inputs} inputs"
            )
        return blocks[:, 0], None if torch.equal(order, torch.arange(num_inputs)) else order

    def _group_size(self, layer: QuantisedLayer) -> int:
        """Inputs of a group: as the configuration says, where that gives as many groups."""
        num_inputs = layer.shape[1]
        settings = [self.settings, *(_as_settings(scheme.get("weights")) for scheme in self._schemes)]
        for size in (setting.get("group_size") for setting in settings):
            if isinstance(size, int) and size > 0 and -(-num_inputs // size) == layer.num_groups:
                return size
        return -(-num_inputs // layer.num_groups)

    def _block_of(self, layer: QuantisedLayer, scales: tuple[int, ...]) -> tuple[int, int]:
        """Outputs and inputs that share a scale, in an FP8 matrix with scales of this shape."""
        num_outputs, num_inputs = layer.shape
        rows, columns = (*scales, 1, 1)[:2]
        settings: list[Any] = [self.settings.get("weight_block_size")]
        settings += [_as_settings(scheme.get("weights")).get("block_structure") for scheme in self._schemes]
        blocks = [(size[0], size[1]) for size in settings if _is_block(size)]
        if rows in (1, num_outputs) and num_inputs % columns == 0:  # of channels, or of the matrix
            blocks.append((num_outputs // rows, num_inputs // columns))
        for block in blocks:
            grid = (-(-num_outputs // block[0]), -(-num_inputs // block[1]))
            if len(scales) < 3 and (rows, columns) == grid:
                return block
        raise self._refused(f"{layer.name!r} has scales of shape {scales} for a weight of {layer.shape}")

    def _refused(self, why: str) -> ValueError:
        return ValueError(
            f"base {self.name!r} is quantised in a way that is not read on a CPU: {why}. Read are "
            f"{READABLE}; name the model that it was made from, or a GGUF file of it"
        )

    def _of_another_shape(self, name: str, expected: tuple[int, ...]) -> ValueError:
        shape = self.tensors[name].shape if name in self.tensors else "none"
        return ValueError(
            f"base {self.name!r}: tensor {name!r} must have shape {expected}, as its configuration says, got "
            f"{shape}; copy or download it again"
        )

    # -------------------------------------------------------------- reading

    def parts(self, layer: QuantisedLayer) -> dict[str, Tensor]:
        """The tensors of a layer as they are stored, by the last part of their names: views of the files."""
        return {part: self.tensor(name) for part, name in self._names(layer).items()}

    def weight(self, layer: QuantisedLayer, parts: Mapping[str, Tensor]) -> QuantisedMatrix | Tensor:
        """The weight of a layer from its tensors: whole numbers; of FP8 the numbers themselves, (out, in)
        bfloat16."""
        scales = next(parts[part] for part in SCALES if part in parts)
        if layer.form == "fp8":
            return fp8_numbers(parts["weight"], scales, self._block_of(layer, tuple(scales.shape)))
        codes = FORMS[layer.form].codes_of(parts, layer)
        zeros = self.zeros(layer)
        scales = scales.T if layer.form in ("gptq", "awq") else scales.reshape(-1, layer.num_groups)
        groups, order = self._groups(layer)
        num_outputs = layer.shape[0]
        return QuantisedMatrix(
            codes if order is None else codes[:, order],
            layer.bits,
            scales.expand(num_outputs, -1)[:, groups],
            None if zeros is None else zeros.expand(num_outputs, -1)[:, groups],
            order,
        )

    def zeros(self, layer: QuantisedLayer) -> Tensor | None:
        """The codes for zero of a layer of whole numbers, (out, groups) uint8, or (1, 1); None where they are
        half of the codes' range everywhere."""
        parts = {part: self.tensor(name) for part, name in self._names(layer).items() if part in ZEROS}
        zeros = FORMS[layer.form].zeros_of(parts, layer) if parts else None
        if zeros is not None and layer.form == "gptq" and self.settings.get("checkpoint_format") != "gptq_v2":
            zeros = zeros + 1 & 2**layer.bits - 1
        if zeros is not None and bool((zeros == 2 ** (layer.bits - 1)).all()):
            return None
        return zeros

    def input_order(self, layer: QuantisedLayer) -> Tensor | None:
        """The input of each column of a layer of whole numbers, (in,) long; None where they are in order."""
        return self._groups(layer)[1]

    # -------------------------------------------------------------- the model

    def empty_model(self, **arguments: Any) -> Any:
        """The model in float32, its buffers computed and its parameters without memory. ``arguments`` say
        where its files come from."""
        is_trusted = bool(arguments.get("trust_remote_code"))
        with init_empty_weights(include_buffers=False):
            model: Any = auto_class(self.config).from_config(
                self.config, dtype=torch.float32, trust_remote_code=is_trusted
            )
        model.tie_weights()
        self._rename_as_in(model)
        places = {key: value for key, value in arguments.items() if key in PLACES}  # others become settings
        with suppress(OSError):  # most have one
            model.generation_config = GenerationConfig.from_pretrained(self.name, **places)
        return model.eval()

    def _rename_as_in(self, model: Any) -> None:
        """Name the tensors as ``model`` does: those of models of images were named in other ways before."""
        changes = get_model_conversion_mapping(model)
        renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        modules = {name for name, _ in model.named_modules()}
        renamed = {}
        for key, stored in self.tensors.items():
            name, _ = rename_source_key(key, renamings, [])
            is_known = key.rpartition(".")[0] in modules or name.rpartition(".")[0] not in modules
            renamed[key if is_known else name] = stored
        self.tensors = renamed

    def filled(
        self, model: Any, layers: Mapping[str, QuantisedLayer], plain: Mapping[str, str], dtype: torch.dtype
    ) -> Any:
        """``model`` with all weights in ``dtype``, as modules of ``transformers`` compute with them; the
        others are what :meth:`of_text` says of it."""
        for name, layer in layers.items():
            weight = self.weight(layer, self.parts(layer))
            numbers = weight if isinstance(weight, Tensor) else weight.widened()
            set_weight(model, f"{name}.weight", numbers.to(dtype))
        for name in self.quantised_experts(model):
            numbers = torch.stack(
                [mxfp4_numbers(*parts) for parts in zip(*self.expert_parts(name), strict=True)]
            )
            experts = model.get_submodule(name.rpartition(".")[0])
            set_weight(model, name, arranged(experts, [numbers]).to(dtype))
        for name, stored in plain.items():
            set_weight(model, name, self.tensor(stored).to(dtype, copy=True))
        model.tie_weights()
        return in_type(model, dtype)

    @property
    def described(self) -> str:
        """The content of the files and its form, in words."""
        sizes: Counter[str] = Counter()
        for name, stored in self.tensors.items():
            is_quantised = self._form_of(name.rpartition(".")[0]) and not name.endswith(".bias")
            kind = "quantised layers" if is_quantised else stored.dtype
            sizes["experts" if name.endswith(EXPERT_PARTS) else kind] += stored.num_bytes
        content = ", ".join(f"{megabytes(size)} of {name}" for name, size in sizes.most_common())
        return f"{self._form}: {content}"


def _bits_of(dtype: str) -> int:
    """Bits of a number of a type, as safetensors names it: 8 of "F8_E4M3"."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def _saved(model: Any) -> Iterator[tuple[list[str], Tensor]]:
    """The parameters and saved buffers of a model, each with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


def _other_names(model: Any, plain: Mapping[str, str]) -> set[str]:
    """All names of the parameters in ``plain``: a file may have a tied one twice."""
    return {name for names, _ in _saved(model) if names[0] in plain for name in names}


def set_weight(model: Any, name: str, values: Tensor) -> None:
    """Set a parameter or a buffer of ``model`` by its name."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if last in module._buffers:
        module._buffers[last] = values
    else:
        setattr(module, last, nn.Parameter(values, requires_grad=False))


def quantisation_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The ``quantization_config`` of a configuration; empty where it has none."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return {}
    return dict(settings if isinstance(settings, Mapping) else settings.to_dict())


def _as_settings(value: Any) -> Mapping[str, Any]:
    """``value`` where it is an object of settings, else none: some programs write null, or other things."""
    return value if isinstance(value, Mapping) else {}


def _is_block(value: Any) -> bool:
    """Whether ``value`` is the size of a block of a matrix, two numbers."""
    return isinstance(value, list | tuple) and [type(size) for size in value] == [int] * 2 and min(value) > 0


def _schemes_of(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How each group of layers is quantised, in the ``quantization_config`` of compressed-tensors."""
    return [_as_settings(scheme) for scheme in _as_settings(settings.get("config_groups")).values()]


def is_quantised(config: PreTrainedConfig) -> bool:
    """Whether one of :data:`METHODS` has quantised the weights of a model of this configuration."""
    return quantisation_settings(config).get("quant_method") in METHODS


def described_settings(config: PreTrainedConfig) -> str:
    """How a model of this configuration was quantised: "gptq in 4 bits, groups of 128"."""
    settings = quantisation_settings(config)
    method = settings.get("quant_method")
    if method in ("gptq", "awq"):
        size = settings.get("group_size")
        groups_of = "a group for each output" if size in (None, -1) else f"groups of {size}"
        order = ", with an order of inputs" if settings.get("desc_act") else ""
        return f"{method} in {settings.get('bits')} bits, {groups_of}{order}"
    if method == "mxfp4":
        return "experts in mxfp4, a scale for 32 weights"
    if method == "fp8":
        block: Any = settings.get("weight_block_size")
        scaled_part = f"{block[0]}x{block[1]} weights" if _is_block(block) else "each matrix"
        return f"fp8, a scale for {scaled_part}"
    weights = [_as_settings(scheme.get("weights")) for scheme in _schemes_of(settings)]
    bits = sorted({f"{weight.get('type')} of {weight.get('num_bits')} bits" for weight in weights})
    sizes = sorted({str(weight.get("group_size") or weight.get("strategy")) for weight in weights})
    return f"{method} ({settings.get('format')}), {' and '.join(bits)}, a scale for each {' or '.join(sizes)}"
