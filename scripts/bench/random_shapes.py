"""Random models of known shapes: they take the time and the memory of trained ones.

A dense shape is a directory in bfloat16, or a GGUF file that is written from one; a mixture of experts and a
hybrid, whose layers keep states, are GGUF files.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
    "3B": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
"""Shapes of Llama 3.2 1B and 3B and of Llama 3.1 8B, which does not tie its embeddings."""
VOCABULARY = 128256
STD = 0.02


@dataclass(frozen=True)
class Mixture:
    """The shape of a mixture of experts, as its GGUF file describes it."""

    architecture: str
    kind: str
    """The name of its quantisation, as files are called: the type of most of its weights."""
    num_layers: int
    hidden: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_chosen: int
    """Experts of a token."""
    expert_width: int
    vocab_size: int

    @property
    def is_gpt_oss(self) -> bool:
        return self.architecture == "gpt-oss"


MIXTURES = {
    "30B-A3B": Mixture("qwen3moe", "Q4_K_M", 48, 2048, 32, 4, 128, 128, 8, 768, 151936),
    "20B-A4B": Mixture("gpt-oss", "MXFP4", 24, 2880, 64, 8, 64, 32, 4, 2880, 201088),
}
"""Shapes of Qwen3-30B-A3B and gpt-oss-20b."""


# ------------------------------------------------------------------ dense shapes


def config_of(shape: str) -> LlamaConfig:
    """The configuration of a shape."""
    settings: dict[str, Any] = {"rope_theta": 500000.0}
    return LlamaConfig(
        **SHAPES[shape],
        **settings,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=shape != "8B",
        max_position_embeddings=8192,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        eos_token_id=None,
        pad_token_id=0,
    )


def write_shape(shape: str, directory: Path, tokenizer: Path) -> None:
    """Random weights in bfloat16, a file for every few layers, and the files of some tokenizer."""
    config = config_of(shape)
    generator = torch.Generator().manual_seed(0)
    directory.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        shapes = {
            name: weight.shape
            for name, weight in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    index: dict[str, str] = {}
    for number, names in enumerate(_in_parts(list(shapes)), start=1):
        file = f"model-{number:05d}.safetensors"
        weights = {name: _random(shapes[name], generator) for name in names}
        save_file(weights, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    for file_of_tokenizer in tokenizer.glob("*token*"):
        shutil.copy(file_of_tokenizer, directory)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(directory)  # last: its file says that the others are there


def _in_parts(names: list[str]) -> Iterator[list[str]]:
    """Names of the tensors of a file each."""
    for first in range(0, len(names), 40):
        yield names[first : first + 40]


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, STD, generator=generator)


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}


def write_gguf(directory: Path, target: Path, kind: str) -> None:
    """A file of the same shape, of kind BF16, Q8_0 or Q4_K_M, without a tokenizer. Its weights are those of
    the directory, rows of queries and keys in an order that means another model; of Q4_K_M any."""
    import gguf

    config = LlamaConfig.from_pretrained(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, file in index.items():
        with safe_open(directory / file, "pt") as opened:
            shape = opened.get_slice(name).get_shape()
        writer.add_tensor_info(_gguf_name(name), *_info(shape, _type_of(name, shape, kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (name, file) in enumerate(index.items()):
        with safe_open(directory / file, "pt") as opened:
            weight = opened.get_tensor(name)
        quantisation = _type_of(name, list(weight.shape), kind)
        if weight.dim() == 1:
            data = weight.float().numpy()
        elif kind == "BF16":
            data = weight.view(torch.uint8).numpy()
        elif kind == "Q4_K_M":
            data = _random_blocks(list(weight.shape), quantisation, number)
        else:
            data = gguf.quantize(weight.float().numpy(), quantisation)
        writer.write_tensor_data(data)
    writer.close()


def _type_of(name: str, shape: list[int], kind: str) -> Any:
    """The type of a matrix in a file of ``kind``; Q4_K_M is the mixture that llama.cpp calls so."""
    import gguf

    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    if kind != "Q4_K_M":
        return gguf.GGMLQuantizationType[kind]
    is_half = ".layers." in name and int(name.split(".")[2]) % 2 == 0
    is_finer = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    is_finer |= is_half and name.endswith(("v_proj.weight", "down_proj.weight"))
    return gguf.GGMLQuantizationType.Q6_K if is_finer else gguf.GGMLQuantizationType.Q4_K


SCALES = {"Q6_K": [208], "Q5_K": [0, 2], "Q4_K": [0, 2], "Q8_0": [0]}
"""Where a block has its float16 numbers."""


def _random_blocks(shape: list[int], quantisation: Any, seed: int) -> np.ndarray:
    """A matrix of any codes, with small scales: it takes the time and the memory of a quantised one."""
    import gguf

    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[quantisation]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    if quantisation.name == "MXFP4":
        blocks[..., 0] = rng.integers(118, 121, blocks.shape[:-1])
    for start in SCALES.get(quantisation.name, []):
        scales = rng.uniform(1e-5, 3e-5, blocks.shape[:-1]).astype(np.float16)
        blocks[..., start : start + 2] = scales.view(np.uint8).reshape(*scales.shape, 2)
    return blocks.reshape(*shape[:-1], -1)


# ------------------------------------------------------------------ mixtures


def write_mixture(name: str, target: Path) -> None:
    """A mixture of :data:`MIXTURES` as a GGUF file without a tokenizer, its matrices random and the same in
    every layer; tensors are of the types that llama.cpp gives them in such a file."""
    import gguf

    mixture = MIXTURES[name]
    keys: dict[str, Any] = {
        "block_count": mixture.num_layers,
        "context_length": 8192,
        "embedding_length": mixture.hidden,
        "feed_forward_length": mixture.expert_width,
        "expert_feed_forward_length": mixture.expert_width,
        "expert_count": mixture.num_experts,
        "expert_used_count": mixture.num_chosen,
        "attention.head_count": mixture.num_heads,
        "attention.head_count_kv": mixture.num_key_value_heads,
        "attention.key_length": mixture.head_dim,
        "attention.value_length": mixture.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
        "vocab_size": mixture.vocab_size,
    }
    if mixture.is_gpt_oss:
        keys |= {
            "attention.sliding_window": 128,
            "rope.scaling.type": gguf.RopeScalingType.YARN.value,
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        }
    _write_file(target, mixture.architecture, keys, _tensors_of_mixture(mixture))


def _tensors_of_mixture(mixture: Mixture) -> dict[str, tuple[list[int], Any]]:
    """The shapes and types of its tensors, by name."""
    from gguf import GGMLQuantizationType as Type

    most = Type.Q8_0 if mixture.is_gpt_oss else Type.Q4_K
    finer = Type.Q8_0 if mixture.is_gpt_oss else Type.Q6_K
    of_experts = Type.MXFP4 if mixture.is_gpt_oss else most
    hidden = mixture.hidden
    inner = mixture.expert_width
    queries = mixture.num_heads * mixture.head_dim
    keys = mixture.num_key_value_heads * mixture.head_dim
    tensors: dict[str, tuple[list[int], Any]] = {
        "token_embd.weight": ([mixture.vocab_size, hidden], most),
        "output.weight": ([mixture.vocab_size, hidden], finer),
        "output_norm.weight": ([hidden], Type.F32),
    }
    for layer in range(mixture.num_layers):
        is_finer = not mixture.is_gpt_oss and layer % 2 == 0
        of_layer: dict[str, tuple[list[int], Any]] = {
            "attn_norm.weight": ([hidden], Type.F32),
            "attn_q.weight": ([queries, hidden], most),
            "attn_k.weight": ([keys, hidden], most),
            "attn_v.weight": ([keys, hidden], finer if is_finer else most),
            "attn_output.weight": ([hidden, queries], most),
            "ffn_gate_inp.weight": ([mixture.num_experts, hidden], Type.F32),
            "ffn_gate_exps.weight": ([mixture.num_experts, inner, hidden], of_experts),
            "ffn_up_exps.weight": ([mixture.num_experts, inner, hidden], of_experts),
            "ffn_down_exps.weight": ([mixture.num_experts, hidden, inner], finer if is_finer else of_experts),
        }
        if mixture.is_gpt_oss:
            of_layer |= {
                "attn_q.bias": ([queries], Type.F32),
                "attn_k.bias": ([keys], Type.F32),
                "attn_v.bias": ([keys], Type.F32),
                "attn_output.bias": ([hidden], Type.F32),
                "post_attention_norm.weight": ([hidden], Type.F32),
                "attn_sinks.weight": ([mixture.num_heads], Type.F32),
                "ffn_gate_inp.bias": ([mixture.num_experts], Type.F32),
                "ffn_gate_exps.bias": ([mixture.num_experts, inner], Type.F32),
                "ffn_up_exps.bias": ([mixture.num_experts, inner], Type.F32),
                "ffn_down_exps.bias": ([mixture.num_experts, hidden], Type.F32),
            }
        else:
            of_layer |= {
                "ffn_norm.weight": ([hidden], Type.F32),
                "attn_q_norm.weight": ([mixture.head_dim], Type.F32),
                "attn_k_norm.weight": ([mixture.head_dim], Type.F32),
            }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in of_layer.items()}
    return tensors


# ------------------------------------------------------------------ hybrids


@dataclass(frozen=True)
class Hybrid:
    """The shape of a model whose layers keep states, in Q4_K_M."""

    architecture: str
    num_layers: int
    hidden: int
    inner: int
    """The width of the layers' feed-forward part."""
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    attention: tuple[int, ...]
    """The layers with attention; the others keep states."""
    keys: dict[str, Any]
    """What its file says of the states."""

    kind = "Q4_K_M"


def _qwen35(
    num_layers: int, hidden: int, inner: int, heads: tuple[int, int], state_heads: tuple[int, int]
) -> Hybrid:
    """Three gated delta nets to one attention, and a layer for multi-token prediction behind all; ``heads``
    are those of queries and of keys, ``state_heads`` those of keys and of values."""
    keys = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": state_heads[0],
        "ssm.time_step_rank": state_heads[1],
        "ssm.inner_size": 128 * state_heads[1],
        "full_attention_interval": 4,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 10000000.0,
        "attention.head_count_kv": heads[1],
        "nextn_predict_layers": 1,
    }
    attention = (*range(3, num_layers, 4), num_layers)
    return Hybrid("qwen35", num_layers + 1, hidden, inner, *heads, 256, 248320, attention, keys)


HYBRIDS = {
    "Qwen3.5-0.8B": _qwen35(24, 1024, 3584, (8, 2), (16, 16)),
    "Qwen3.5-4B": _qwen35(32, 2560, 9216, (16, 4), (16, 32)),
    "LFM2.5-1.2B": Hybrid(
        *("lfm2", 16, 2048, 8192, 32, 8, 64, 65536, (2, 5, 8, 10, 12, 14)),
        {"shortconv.l_cache": 3, "rope.freq_base": 1000000.0},
    ),
    "Granite-4-H-1B": Hybrid(
        *("granitehybrid", 40, 1536, 4096, 12, 4, 128, 100352, (5, 15, 25, 35)),
        {
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 1,
            "ssm.inner_size": 3072,
            "ssm.time_step_rank": 48,
            "expert_shared_feed_forward_length": 4096,
            "expert_count": 0,
            "expert_used_count": 0,
            "embedding_scale": 12.0,
            "attention.scale": 0.0078125,
            "residual_scale": 0.22,
            "logit_scale": 6.0,
            "rope.scaling.finetuned": False,
            "rope.freq_base": 10000.0,
        },
    ),
}
"""Shapes of what laptops run in 2026."""


def write_hybrid(name: str, target: Path) -> None:
    """A hybrid of :data:`HYBRIDS` as a GGUF file, in the way of :func:`write_mixture`."""
    hybrid = HYBRIDS[name]
    num_heads = hybrid.num_key_value_heads
    of_layers = [num_heads if layer in hybrid.attention else 0 for layer in range(hybrid.num_layers)]
    keys = {
        "block_count": hybrid.num_layers,
        "context_length": 8192,
        "embedding_length": hybrid.hidden,
        "feed_forward_length": hybrid.inner,
        "attention.head_count": hybrid.num_heads,
        "attention.head_count_kv": hybrid.num_key_value_heads
        if hybrid.architecture == "qwen35"
        else of_layers,
        "attention.key_length": hybrid.head_dim,
        "attention.value_length": hybrid.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": hybrid.head_dim,
        "vocab_size": hybrid.vocab_size,
        **hybrid.keys,
    }
    _write_file(target, hybrid.architecture, keys, _tensors_of_hybrid(hybrid))


def _tensors_of_hybrid(hybrid: Hybrid) -> dict[str, tuple[list[int], Any]]:
    """The shapes and types of its tensors, by name."""
    from gguf import GGMLQuantizationType as Type

    hidden = hybrid.hidden
    inner = hybrid.inner
    is_qwen = hybrid.architecture == "qwen35"
    last_norm = "token_embd_norm.weight" if hybrid.architecture == "lfm2" else "output_norm.weight"
    tensors: dict[str, tuple[list[int], Any]] = {
        "token_embd.weight": ([hybrid.vocab_size, hidden], Type.Q6_K),
        last_norm: ([hidden], Type.F32),
    }
    for layer in range(hybrid.num_layers):
        finer = Type.Q6_K if layer % 2 == 0 else Type.Q4_K
        of_layer: dict[str, tuple[list[int], Any]] = {
            "attn_norm.weight": ([hidden], Type.F32),
            f"{'post_attention' if is_qwen else 'ffn'}_norm.weight": ([hidden], Type.F32),
            "ffn_gate.weight": ([inner, hidden], Type.Q4_K),
            "ffn_up.weight": ([inner, hidden], Type.Q4_K),
            "ffn_down.weight": ([hidden, inner], finer),
        }
        if layer in hybrid.attention:
            of_layer |= _attention_of_hybrid(hybrid, finer)
        else:
            of_layer |= _state_of_hybrid(hybrid)
        if "nextn_predict_layers" in hybrid.keys and layer == hybrid.num_layers - 1:
            of_layer["nextn.eh_proj.weight"] = ([hidden, 2 * hidden], Type.Q4_K)
            norms = ("enorm", "hnorm", "shared_head_norm")
            of_layer |= {f"nextn.{norm}.weight": ([hidden], Type.F32) for norm in norms}
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in of_layer.items()}
    return tensors


def _attention_of_hybrid(hybrid: Hybrid, finer: Any) -> dict[str, tuple[list[int], Any]]:
    from gguf import GGMLQuantizationType as Type

    hidden = hybrid.hidden
    queries = hybrid.num_heads * hybrid.head_dim
    keys = hybrid.num_key_value_heads * hybrid.head_dim
    is_gated = hybrid.architecture == "qwen35"
    tensors: dict[str, tuple[list[int], Any]] = {
        "attn_q.weight": ([2 * queries if is_gated else queries, hidden], Type.Q4_K),
        "attn_k.weight": ([keys, hidden], Type.Q4_K),
        "attn_v.weight": ([keys, hidden], finer),
        "attn_output.weight": ([hidden, queries], Type.Q4_K),
    }
    if hybrid.architecture != "granitehybrid":
        norms = ("attn_q_norm.weight", "attn_k_norm.weight")
        tensors |= {norm: ([hybrid.head_dim], Type.F32) for norm in norms}
    return tensors


def _state_of_hybrid(hybrid: Hybrid) -> dict[str, tuple[list[int], Any]]:
    from gguf import GGMLQuantizationType as Type

    hidden = hybrid.hidden
    if hybrid.architecture == "lfm2":
        return {
            "shortconv.conv.weight": ([hidden, hybrid.keys["shortconv.l_cache"]], Type.F32),
            "shortconv.in_proj.weight": ([3 * hidden, hidden], Type.Q4_K),
            "shortconv.out_proj.weight": ([hidden, hidden], Type.Q4_K),
        }
    values = hybrid.keys["ssm.inner_size"]
    num_heads = hybrid.keys["ssm.time_step_rank"]
    channels = values + 2 * hybrid.keys["ssm.group_count"] * hybrid.keys["ssm.state_size"]
    tensors: dict[str, tuple[list[int], Any]] = {
        "ssm_conv1d.weight": ([channels, hybrid.keys["ssm.conv_kernel"]], Type.F32),
        "ssm_dt.bias": ([num_heads], Type.F32),
        "ssm_out.weight": ([hidden, values], Type.Q4_K),
    }
    if hybrid.architecture == "qwen35":
        return tensors | {
            "ssm_a": ([num_heads], Type.F32),
            "ssm_norm.weight": ([values // num_heads], Type.F32),
            "attn_qkv.weight": ([channels, hidden], Type.Q5_K),
            "attn_gate.weight": ([values, hidden], Type.Q4_K),
            "ssm_beta.weight": ([num_heads, hidden], Type.Q4_K),
            "ssm_alpha.weight": ([num_heads, hidden], Type.Q4_K),
        }
    return tensors | {
        "ssm_a": ([num_heads, 1], Type.F32),
        "ssm_d": ([num_heads, 1], Type.F32),
        "ssm_conv1d.bias": ([channels], Type.F32),
        "ssm_in.weight": ([values + channels + num_heads, hidden], Type.Q4_K),
        "ssm_norm.weight": ([hybrid.keys["ssm.group_count"], values], Type.F32),
    }


# ------------------------------------------------------------------ tensors of a file


def _write_file(
    target: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, tuple[list[int], Any]]
) -> None:
    """A GGUF file with random tensors of these shapes and types; matrices of one shape are the same."""
    import gguf

    writer = gguf.GGUFWriter(target, architecture)
    add: dict[type, Any] = {
        **{bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32},
        **{str: writer.add_string, list: writer.add_array},
    }
    for key, value in keys.items():
        add[type(value)](f"{architecture}.{key}", value)
    writer.add_tokenizer_model("none")
    writer.add_token_list([f"<{token}>" for token in range(keys["vocab_size"])])
    for tensor, (shape, kind) in tensors.items():
        writer.add_tensor_info(tensor, *_info(shape, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    blocks: dict[Any, np.ndarray] = {}
    rng = np.random.default_rng(0)
    for tensor, (shape, kind) in tensors.items():
        if kind == gguf.GGMLQuantizationType.F32:
            if tensor.endswith("norm.weight"):
                values = np.ones(shape)
            elif tensor.endswith("ssm_a"):  # a decay is below one
                values = -rng.uniform(1, 16, shape)
            else:
                values = STD * rng.standard_normal(shape)
            writer.write_tensor_data(values.astype(np.float32))
            continue
        if (*shape, kind) not in blocks:
            blocks[*shape, kind] = _random_blocks(shape, kind, len(blocks))
        writer.write_tensor_data(blocks[*shape, kind])
    writer.close()


def _info(shape: list[int], quantisation: Any) -> tuple[list[int], Any, int, Any]:
    """Shape, type and bytes of a tensor, which the writer needs before its data."""
    import gguf

    if quantisation == gguf.GGMLQuantizationType.F32:
        return shape, np.dtype(np.float32), 4 * math.prod(shape), None
    block, size = gguf.GGML_QUANT_SIZES[quantisation]
    in_bytes = [*shape[:-1], shape[-1] // block * size]
    return in_bytes, np.dtype(np.uint8), math.prod(in_bytes), quantisation


def _gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor of Llama."""
    ending = next(each for each in GGUF_NAMES if name.endswith(each))
    theirs = GGUF_NAMES[ending]
    return f"blk.{name.split('.')[2]}.{theirs}" if ".layers." in name else theirs
