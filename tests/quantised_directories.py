"""Tiny random models in directories with a ``quantization_config``, in each form that is read.

Tensors are packed by the definitions of the formats, a word at a time; the numbers that they mean are
computed beside them, by scale (code - zero).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, Qwen2Config

LAYER = re.compile(r"^(?!vis).*\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$")
"""Names of the matrices of decoder layers."""
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
VOCAB_SIZE, HIDDEN, INTERMEDIATE = 260, 256, 384
CONFIGS = {"llama": LlamaConfig, "phi3": Phi3Config, "qwen2": Qwen2Config}


@dataclass
class Matrix:
    """A matrix of whole numbers."""

    codes: np.ndarray
    """(out, in), from 0 on."""
    scales: np.ndarray
    """(out, groups)."""
    zeros: np.ndarray
    """(out, groups)."""
    groups: np.ndarray
    """(in,): the group of each input."""

    @property
    def numbers(self) -> Tensor:
        codes = self.codes.astype(np.float32) - self.zeros[:, self.groups]
        return torch.from_numpy((self.scales[:, self.groups] * codes).astype(np.float32))


def words(codes: np.ndarray, bits: int, axis: int, order: list[int] | None = None) -> Tensor:
    """Whole numbers packed along ``axis``, the first in the lowest bits of an int32."""
    count = 32 // bits
    moved = np.moveaxis(codes.astype(np.uint64), axis, -1)
    moved = moved.reshape(*moved.shape[:-1], -1, count)
    packed = np.zeros(moved.shape[:-1], np.uint64)
    for at, place in enumerate(order or range(count)):
        packed |= moved[..., place] << np.uint64(bits * at)
    return torch.from_numpy(
        np.ascontiguousarray(np.moveaxis(packed, -1, axis).astype(np.uint32).view(np.int32))
    )


def random_matrix(
    rng: np.random.Generator,
    shape: tuple[int, int],
    bits: int = 4,
    size: int = 128,
    dtype: torch.dtype = torch.float16,
    is_symmetric: bool = True,
    order: str | None = None,
) -> Matrix:
    """Any codes, with scales that are numbers of ``dtype``. ``order``: the groups of inputs are "shared" by
    matrices of one width, or each has "its own"; they lie in order otherwise."""
    num_outputs, num_inputs = shape
    num_groups = -(-num_inputs // size)
    scales = 0.13 / 2**bits * (1 + 0.5 * rng.standard_normal((num_outputs, num_groups)))
    zeros = (
        rng.integers(1, 2**bits, scales.shape) if not is_symmetric else np.full(scales.shape, 2 ** (bits - 1))
    )
    groups = np.arange(num_inputs) // size
    orders = {"shared": np.random.default_rng(num_inputs), "its own": rng}
    return Matrix(
        rng.integers(0, 2**bits, shape),
        torch.from_numpy(scales).to(dtype).float().numpy(),
        zeros,
        groups if order is None else orders[order].permutation(groups),
    )


def gptq(matrix: Matrix, bits: int, less: int = 1) -> dict[str, Tensor]:
    """``less``: what zeros are stored without, 1 in the first version of the format."""
    return {
        "qweight": words(matrix.codes.T, bits, 0),
        "qzeros": words((matrix.zeros.T - less) % 2**bits, bits, 1),
        "scales": torch.from_numpy(matrix.scales.T.copy()).half(),
        "g_idx": torch.from_numpy(matrix.groups).int(),
    }


def awq(matrix: Matrix) -> dict[str, Tensor]:
    return {
        "qweight": words(matrix.codes.T, 4, 1, AWQ_ORDER),
        "qzeros": words(matrix.zeros.T, 4, 1, AWQ_ORDER),
        "scales": torch.from_numpy(matrix.scales.T.copy()).half(),
    }


def pack_quantized(matrix: Matrix, bits: int, has_zeros: bool) -> dict[str, Tensor]:
    made = {
        "weight_packed": words(matrix.codes, bits, 1),
        "weight_scale": torch.from_numpy(matrix.scales).bfloat16(),
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    return made | ({"weight_zero_point": words(matrix.zeros, bits, 0)} if has_zeros else {})


def int_quantized(matrix: Matrix) -> dict[str, Tensor]:
    return {
        "weight": torch.from_numpy((matrix.codes - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(matrix.scales).bfloat16(),
    }


Quantise = Callable[[np.random.Generator, tuple[int, int]], tuple[dict[str, Tensor], Tensor]]


def whole(pack: Callable[[Matrix], dict[str, Tensor]], **how: Any) -> Quantise:
    def made(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        matrix = random_matrix(rng, shape, **{**how, "size": how.get("size") or shape[1]})
        return pack(matrix), matrix.numbers

    return made


def fp8(rows: int | None, columns: int | None, name: str, dtype: torch.dtype) -> Quantise:
    """Blocks of so many rows and columns; None: all."""

    def made(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
        block = (rows or shape[0], columns or shape[1])
        codes = torch.from_numpy(rng.standard_normal(shape) * 60).to(torch.float8_e4m3fn)
        grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        scales = torch.from_numpy(0.001 * (1 + 0.3 * rng.random(grid))).to(dtype)
        which = np.arange(shape[0])[:, None] // block[0], np.arange(shape[1])[None] // block[1]
        numbers = (codes.float() * scales.float()[which]).bfloat16().float()
        stored = scales.flatten() if grid == (1, 1) else scales
        return {"weight": codes, name: stored}, numbers

    return made


def scheme(format: str, bits: int, group_size: int | None = None, **more: Any) -> dict[str, Any]:
    """The settings of compressed-tensors."""
    strategy = "group" if group_size else "channel"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def of_gptq(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 128, "desc_act": False, **more}


_BF16, _ASYMMETRIC = {"dtype": torch.bfloat16}, {"is_symmetric": False}
FORMS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "gptq": (of_gptq(sym=True), whole(lambda each: gptq(each, 4), size=128)),
    "gptq, zeros": (of_gptq(sym=False), whole(lambda each: gptq(each, 4), size=128, **_ASYMMETRIC)),
    "gptq, second version": (
        of_gptq(checkpoint_format="gptq_v2"),
        whole(lambda each: gptq(each, 4, 0), size=128, **_ASYMMETRIC),
    ),
    "gptq, order": (
        of_gptq(desc_act=True),
        whole(lambda each: gptq(each, 4), size=64, order="shared", **_ASYMMETRIC),
    ),
    "gptq, orders": (
        of_gptq(desc_act=True),
        whole(lambda each: gptq(each, 4), size=128, order="its own"),
    ),
    "gptq, 8 bits": (of_gptq(8), whole(lambda each: gptq(each, 8), bits=8, size=128)),
    "gptq, 8 bits, zeros": (of_gptq(8), whole(lambda each: gptq(each, 8), bits=8, size=128, **_ASYMMETRIC)),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        whole(awq, size=128, **_ASYMMETRIC),
    ),
    "w4a16": (
        scheme("pack-quantized", 4, 128),
        whole(lambda each: pack_quantized(each, 4, False), size=128, **_BF16),
    ),
    "w4a16, zeros": (
        scheme("pack-quantized", 4, 32),
        whole(lambda each: pack_quantized(each, 4, True), size=32, **_BF16, **_ASYMMETRIC),
    ),
    "w8a16": (
        scheme("pack-quantized", 8),
        whole(lambda each: pack_quantized(each, 8, False), bits=8, size=None, **_BF16),
    ),
    "w8a16, zeros": (
        scheme("pack-quantized", 8),
        whole(lambda each: pack_quantized(each, 8, True), bits=8, size=None, **_BF16, **_ASYMMETRIC),
    ),
    "w8a8": (scheme("int-quantized", 8), whole(int_quantized, bits=8, size=None, **_BF16)),
    "fp8, a scale": (
        scheme("float-quantized", 8, type="float", strategy="tensor"),
        fp8(None, None, "weight_scale", torch.bfloat16),
    ),
    "fp8, channels": (
        scheme("float-quantized", 8, type="float"),
        fp8(1, None, "weight_scale", torch.bfloat16),
    ),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        fp8(128, 128, "weight_scale_inv", torch.float32),
    ),
}
"""The settings and the packing of each form."""
WHOLE = [form for form in FORMS if not form.startswith("fp8")]


def write_directory(
    path: Path,
    form: str = "gptq",
    architecture: str = "llama",
    is_tied: bool = False,
    num_layers: int = 2,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Write a model to ``path``: the same model with its numbers in float32, as ``transformers`` computes it.

    Args:
        settings: instead of the form's own; more: of the model's configuration.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 352 if form == "fp8, blocks" else INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": is_tied,
        "eos_token_id": 258,
        "bos_token_id": 256,
    }
    config = CONFIGS[architecture](**{**sizes, **more})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    own, quantise = FORMS[form]
    tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases are zeros, norms ones
                parameter += 0.1 * torch.randn_like(parameter)
            parameter.copy_(parameter.bfloat16())
            tensors[name] = parameter.detach().bfloat16()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                del tensors[f"{name}.weight"]
                parts, numbers = quantise(rng, tuple(module.weight.shape))
                module.weight.copy_(numbers)
                tensors |= {f"{name}.{part}": each.contiguous() for part, each in parts.items()}
    config.save_pretrained(path)
    model.generation_config.eos_token_id = [258, 259]
    model.generation_config.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    written |= {"quantization_config": own if settings is None else settings, "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(written))
    save_tensors(path, tensors)
    return model


def quantise_saved(path: Path, form: str = "awq", numbers_path: Path | None = None) -> Path:
    """Quantise the decoder layers of the model that is saved at ``path`` in one file. The same model with its
    numbers is written to ``numbers_path``. Returns ``path``."""
    rng = np.random.default_rng(0)
    settings, quantise = FORMS[form]
    widened = load_file(path / "model.safetensors")
    quantised = dict(widened)
    for name in filter(LAYER.search, widened):
        parts, widened[name] = quantise(rng, tuple(quantised.pop(name).shape))
        quantised |= {name.replace("weight", part): each.contiguous() for part, each in parts.items()}
    if numbers_path is not None:
        shutil.copytree(path, numbers_path)
        save_file(widened, numbers_path / "model.safetensors", metadata={"format": "pt"})
    save_file(quantised, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return path


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Two files, and their index."""
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, those in files.items():
        save_file({name: tensors[name] for name in those}, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, those in files.items() for name in those}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
