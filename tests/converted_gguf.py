"""Tiny random models of many architectures as GGUF files, laid out as llama.cpp's converter lays them out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 96
ATTENTION = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 4, "max_position_embeddings": 256},
}
OF_ATTENTION = {
    **{"block_count": 4, "embedding_length": 32, "feed_forward_length": 64, "context_length": 256},
    **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6},
    "rope.freq_base": 10000.0,
}
DELTA = {
    **ATTENTION,
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 32, "full_attention_interval": 4, "tie_word_embeddings": True},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
}
OF_DELTA = {
    **OF_ATTENTION,
    **{"attention.key_length": 16, "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0]},
    **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6},
    **{"ssm.inner_size": 192, "full_attention_interval": 4},
}
SCAN = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2},
}
OF_SCAN = {
    **{"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.inner_size": 64},
    "ssm.time_step_rank": 4,
}
SCALES = {"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5}
OF_SCALES = {"embedding_scale": 12.0, "attention.scale": 0.25, "residual_scale": 0.5, "logit_scale": 6.0}
WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
OF_WINDOWS = {
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in WINDOWS],
}
GEMMA = {
    **ATTENTION,
    **{"num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16, "layer_types": WINDOWS},
    **{"sliding_window": 16, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0},
}
OF_GEMMA = {
    **{**OF_ATTENTION, **OF_WINDOWS, "attention.head_count_kv": 1, "rope.freq_base": 1000000.0},
    **{"rope.freq_base_swa": 10000.0, "attention.key_length": 16, "attention.key_length_swa": 8},
    **{"final_logit_softcapping": 30.0, "attention.shared_kv_layers": 0},
    "embedding_length_per_layer_input": 0,
}
OF_GPT_OSS = {
    **{**OF_ATTENTION, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 150000.0},
    **{"attention.key_length": 8, "expert_count": 4, "expert_used_count": 2, "feed_forward_length": 64},
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "attention.sliding_window": 16},
    "rope.scaling.original_context_length": 4096,
}
FACTORS = [1.0 + 0.25 * number for number in range(4)]

MODELS: Mapping[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3.5": ("qwen35", "qwen3_5_text", DELTA, OF_DELTA),
    "Qwen3.5 MoE": (
        "qwen35moe",
        "qwen3_5_moe_text",
        {
            **{**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            "shared_expert_intermediate_size": 32,
        },
        {
            **{**OF_DELTA, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
            "expert_shared_feed_forward_length": 32,
        },
    ),
    "Gemma 4 E2B": (
        "gemma4",
        "gemma4_text",
        {
            **{**GEMMA, "num_hidden_layers": 8, "layer_types": WINDOWS * 2, "num_kv_shared_layers": 4},
            **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        {
            **{**OF_GEMMA, "block_count": 8, "attention.shared_kv_layers": 4},
            "attention.sliding_window_pattern": OF_WINDOWS["attention.sliding_window_pattern"] * 2,
            "feed_forward_length": [64] * 4 + [128] * 4,
            "embedding_length_per_layer_input": 8,
        },
    ),
    "Gemma 4 26B": (
        "gemma4",
        "gemma4_text",
        {
            **{**GEMMA, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        },
        {
            **{**OF_GEMMA, "attention.head_count_kv": [2, 2, 2, 1], "expert_count": 4},
            **{"expert_used_count": 2, "expert_feed_forward_length": 32},
        },
    ),
    "SmolLM3": ("smollm3", "smollm3", ATTENTION, {**OF_ATTENTION, "rope.freq_base": 2000000.0}),
    "Ministral 3": (
        "mistral3",
        "ministral3",
        {
            **{**ATTENTION, "head_dim": 16},
            "rope_parameters": {
                **{"rope_type": "yarn", "type": "yarn", "rope_theta": 10000.0, "factor": 8.0},
                **{"original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
            },
        },
        {
            **{**OF_ATTENTION, "attention.key_length": 16, "rope.dimension_count": 16},
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.yarn_beta_fast": 32.0},
            **{"rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_slow": 1.0},
            **{"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5},
        },
    ),
    "Granite 3": (
        "granite",
        "granite",
        {**ATTENTION, **SCALES, "logits_scaling": 6.0},
        {**OF_ATTENTION, **OF_SCALES, "attention.head_count_kv": [2] * 4},
    ),
    "Granite 4 H": (
        "granitehybrid",
        "granitemoehybrid",
        {
            **{**ATTENTION, **SCALES, **SCAN, "logits_scaling": 6.0, "shared_intermediate_size": 64},
            **{"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "nope"},
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        {
            **{**OF_ATTENTION, **OF_SCALES, **OF_SCAN, "attention.head_count_kv": [0, 2, 0, 2]},
            **{"expert_shared_feed_forward_length": 64, "expert_count": 0, "expert_used_count": 0},
            "rope.scaling.finetuned": False,
        },
    ),
    "Granite 4 H MoE": (
        "granitehybrid",
        "granitemoehybrid",
        {
            **{**ATTENTION, **SCALES, **SCAN, "logits_scaling": 6.0, "shared_intermediate_size": 32},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "nope"},
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        {
            **{**OF_ATTENTION, **OF_SCALES, **OF_SCAN, "attention.head_count_kv": [0, 2, 0, 2]},
            **{"expert_shared_feed_forward_length": 32, "expert_count": 4, "expert_used_count": 2},
            "rope.scaling.finetuned": False,
        },
    ),
    "LFM2 MoE": (
        "lfm2moe",
        "lfm2_moe",
        {
            **{**ATTENTION, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2, "norm_eps": 1e-6},
            "tie_word_embeddings": True,
        },
        {
            **{**OF_ATTENTION, "attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3},
            **{"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
            **{"leading_dense_block_count": 1, "rope.freq_base": 1000000.0},
        },
    ),
    "Falcon H1": (
        "falcon-h1",
        "falcon_h1",
        {**ATTENTION, **SCAN, "mamba_d_ssm": 64, "head_dim": 16},
        {**OF_ATTENTION, **OF_SCAN, "attention.key_length": 16},
    ),
    "Nemotron H": (
        "nemotron_h",
        "nemotron_h",
        {
            **{**ATTENTION, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
            **{"ssm_state_size": 8, "conv_kernel": 4, "layer_norm_epsilon": 1e-6},
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        },
        {
            **{**OF_ATTENTION, **OF_SCAN, "attention.head_count_kv": [0, 0, 2, 0]},
            **{"feed_forward_length": [0, 64, 0, 64], "attention.key_length": 8},
        },
    ),
    "Nemotron 3": (
        "nemotron_h_moe",
        "nemotron_h",
        {
            **{**ATTENTION, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
            **{"ssm_state_size": 8, "conv_kernel": 4, "layer_norm_epsilon": 1e-6, "n_routed_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
            **{"moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        },
        {
            **{**OF_ATTENTION, **OF_SCAN, "attention.head_count_kv": [0, 0, 2, 0], "expert_count": 4},
            **{"feed_forward_length": [0, 32, 0, 32], "attention.key_length": 8, "expert_used_count": 2},
            **{"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
            **{"expert_shared_count": 1, "expert_group_count": 1, "expert_group_used_count": 1},
            **{"expert_weights_norm": True, "expert_weights_scale": 2.5},
        },
    ),
    "Mamba 2": (
        "mamba2",
        "mamba2",
        {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8},
            **{"n_groups": 2, "expand": 2, "conv_kernel": 4, "layer_norm_epsilon": 1e-6},
        },
        {
            **{**OF_SCAN, "block_count": 2, "embedding_length": 32, "context_length": 2**20},
            **{"attention.layer_norm_rms_epsilon": 1e-6, "attention.head_count": 0},
        },
    ),
    "GLM 4": (
        "glm4",
        "glm4",
        {**ATTENTION, "head_dim": 16, "rms_norm_eps": 1e-6, "attention_bias": True},
        {**OF_ATTENTION, "attention.key_length": 16, "rope.dimension_count": 8},
    ),
    "EXAONE 4": (
        "exaone4",
        "exaone4",
        {**ATTENTION, "head_dim": 16, "layer_types": WINDOWS, "sliding_window": 16},
        {**OF_ATTENTION, **OF_WINDOWS, "attention.key_length": 16},
    ),
    "OLMo 2": ("olmo2", "olmo2", ATTENTION, OF_ATTENTION),
    "OLMo 3": (
        "olmo2",
        "olmo3",
        {
            **{**ATTENTION, "layer_types": WINDOWS, "sliding_window": 16},
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "attention_factor": 1.25},
                    "original_max_position_embeddings": 16,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            **{**OF_ATTENTION, **OF_WINDOWS, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0},
            **{"rope.scaling.original_context_length": 16, "rope.scaling.yarn_attn_factor": 1.25},
        },
    ),
    "Phi 3 with LongRoPE": (
        "phi3",
        "phi3",
        {
            **{**ATTENTION, "original_max_position_embeddings": 16, "sliding_window": None},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                **{"short_factor": FACTORS[:2], "long_factor": FACTORS[2:]},
                "original_max_position_embeddings": 16,
            },
        },
        {
            **{**OF_ATTENTION, "rope.dimension_count": 4, "rope.scaling.original_context_length": 16},
            **{"rope.scaling.attn_factor": 2**0.5, "attention.sliding_window": 0},
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {
            **{**ATTENTION, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
            "sliding_window": 16,
        },
        OF_GPT_OSS,
    ),
}
"""The architecture, as llama.cpp and as ``transformers`` name it, a configuration, and its metadata."""

ROPE_OF_LLAMA = {"smollm3", "mistral3", "granite", "granitehybrid", "nemotron_h", "nemotron_h_moe"}
"""Architectures whose queries and keys are in the order of llama.cpp's rotary angles."""
SCANS = {"granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2"}
NAMES = {
    "mamba.dt_bias": "ssm_dt.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "shared_mlp.output_linear.weight": "ffn_down.weight",
    "router.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "pre_ff_layernorm.weight": "ffn_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.q_proj.weight": "attn_q.weight",
    "mixer.k_proj.weight": "attn_k.weight",
    "mixer.v_proj.weight": "attn_v.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
"""What llama.cpp's converter calls weights that the package ``gguf`` does not list."""
NEXTN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head_norm"}


def made(kind: str, **sizes: Any) -> Any:
    """A random model of :data:`MODELS` in float32, every number of it."""
    _, model_type, config, _ = MODELS[kind]
    ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    given = {"tie_word_embeddings": False, **ids, **config, "vocab_size": VOCAB_SIZE, **sizes}
    if "layer_norm_epsilon" not in given:
        given["rms_norm_eps"] = 1e-5 if model_type == "gpt_oss" else 1e-6
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made_config = AutoConfig.for_model(model_type, **given)
        model = AutoModelForCausalLM.from_config(made_config, dtype=torch.float32)
        for value in model.state_dict().values():
            value.copy_(torch.randn(value.shape) * (0.3 if value.dim() < 2 else value.shape[-1] ** -0.5))
            if value.dim() == 1:
                value.add_(0.5)
    return model.eval()


def write_converted(
    model: Any, kind: str, path: Path, mtp: Any = None, matrices: Type = Type.F32, **metadata: Any
) -> Path:
    """Write ``model`` of ``kind`` to ``path``, and behind it the layers ``mtp`` for multi-token prediction.
    Large matrices become ``matrices``; ``metadata`` are added."""
    architecture, _, _, keys = MODELS[kind]
    writer = gguf.GGUFWriter(path, architecture)
    given = {**keys, **metadata}
    if mtp is not None:
        given |= {"block_count": keys["block_count"] + len(mtp), "nextn_predict_layers": len(mtp)}
    for key, value in given.items():
        add: Callable[[str, Any], None] = {
            **{bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32},
            **{str: writer.add_string, list: writer.add_array},
        }[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("none")
    writer.add_token_list([f"<{token}>" for token in range(VOCAB_SIZE)])
    for name, tensor in _tensors(model, architecture, mtp).items():
        is_large = tensor.dim() > 1 and tensor.shape[-1] >= 32 and not re.search("ssm_norm|_inp", name)
        type_of_tensor = matrices if is_large else Type.F32
        numbers = gguf.quantize(tensor.detach().contiguous().numpy(), type_of_tensor)
        writer.add_tensor(name, numbers, raw_dtype=type_of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any, architecture: str, mtp: Any) -> dict[str, Tensor]:
    """The tensors by their names in a file."""
    stored = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    first = model.config.num_hidden_layers
    tensors = _laid_out(stored, model.config, architecture)
    for number, layer in enumerate(mtp or ()):
        of_block = {
            f"model.layers.{first + number}.{name.removeprefix('mtp_block.')}": value
            for name, value in layer.state_dict().items()
            if name.startswith("mtp_block.")
        }
        tensors |= _laid_out(of_block, model.config, architecture)
        for ours, theirs in NEXTN.items():
            value = layer.get_parameter(f"{ours}.weight")
            tensors[f"blk.{first + number}.nextn.{theirs}.weight"] = value + (value.dim() == 1)
    if architecture == "gemma4":  # of the angles of attention to all, a quarter turn
        tensors["rope_freqs.weight"] = torch.tensor([1.0] * 2 + [1e30] * 6)
    if architecture == "phi3":
        rope = model.config.rope_parameters
        for length in ("long", "short"):
            tensors[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"])
    return tensors


def _laid_out(stored: Mapping[str, Tensor], config: Any, architecture: str) -> dict[str, Tensor]:
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers + 2)
    tensors = {}
    for name, value in stored.items():
        block = re.sub(r".*layers\.(\d+)\..*", r"blk.\1", name)
        ending = re.sub(r".*layers\.\d+\.", "", name)
        if name.endswith("experts.gate_up_proj") and architecture != "gemma4":
            interleaved = architecture == "gpt-oss"
            gate = value[..., ::2].mT if interleaved else value.chunk(2, dim=1)[0]
            up = value[..., 1::2].mT if interleaved else value.chunk(2, dim=1)[1]
            tensors |= {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
        elif name.endswith("experts.gate_up_proj_bias"):
            tensors |= {
                f"{block}.ffn_gate_exps.bias": value[..., ::2],
                f"{block}.ffn_up_exps.bias": value[..., 1::2],
            }
        elif name.endswith("experts.down_proj_bias"):
            tensors[f"{block}.ffn_down_exps.bias"] = value
        elif "experts." in name and name.endswith("down_proj"):
            tensors[f"{block}.ffn_down_exps.weight"] = value.mT if architecture == "gpt-oss" else value
        elif name.endswith("experts.up_proj"):
            tensors[f"{block}.ffn_up_exps.weight"] = value
        elif name.endswith("shared_mlp.input_linear.weight"):
            of_experts = "_shexp" if config.num_local_experts else ""
            gate, up = value.chunk(2)
            tensors |= {
                f"{block}.ffn_gate{of_experts}.weight": gate,
                f"{block}.ffn_up{of_experts}.weight": up,
            }
        else:
            listed = names.get_name(name, try_suffixes=(".weight", ".bias"))
            known = next((theirs for ours, theirs in NAMES.items() if ending.endswith(ours)), None)
            if ending == "shared_mlp.output_linear.weight" and config.num_local_experts:
                known = "ffn_down_shexp.weight"
            target = listed if known is None else f"{block}.{known}"
            assert target is not None, name
            tensors[target] = _numbers(name, value, config, architecture)
    return tensors


def _numbers(name: str, value: Tensor, config: Any, architecture: str) -> Tensor:
    """The numbers of a weight as the converter leaves them."""
    if architecture in ROPE_OF_LLAMA and re.search(r"[qk]_proj\.", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    if architecture in SCANS:
        if name.endswith("A_log"):
            return -value.exp()[:, None]
        if name.endswith(".D"):
            return value[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            return value.view(2, -1)
    if architecture.startswith("qwen35"):
        value = _tiled(name, value, config)
        if name.endswith("A_log"):
            return -value.exp()
        if name.endswith("norm.weight") and "linear_attn" not in name:
            return value + 1
    return value.squeeze(1) if re.search(r"conv1?d?\.weight", name) else value


def _tiled(name: str, value: Tensor, config: Any) -> Tensor:
    """With the heads of values one of each head of keys after the other, in place of those of a head of keys
    together."""
    keys = config.linear_num_key_heads
    width = config.linear_value_head_dim

    def rows(part: Tensor, width: int) -> Tensor:
        heads = part.view(keys, -1, width, *part.shape[1:])
        return heads.transpose(0, 1).reshape(part.shape)

    start = 2 * keys * config.linear_key_head_dim
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")) and "linear_attn" in name:
        return torch.cat([value[:start], rows(value[start:], width)])
    if name.endswith("in_proj_z.weight"):
        return rows(value, width)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return rows(value, 1)
    return rows(value.T, width).T if name.endswith("linear_attn.out_proj.weight") else value
