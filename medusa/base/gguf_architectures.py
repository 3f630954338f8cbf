"""Architectures whose GGUF files ``transformers`` (5.24) does not read, or not all of them: its configuration
of each from the metadata, and where a file has its weights under other names or in other forms.

The names of tensors are those of the package ``gguf`` wherever it lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, TensorProcessor

from medusa.base.gguf_file import GGUFFile

COMMON = {
    "embedding_length": "hidden_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
"""Fields of every configuration, by their keys in a file."""
WITH_ATTENTION = {"attention.head_count": "num_attention_heads"}
"""Those of a configuration with attention."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of the numbers by which rotary frequencies are divided (Llama 3.1 and later)."""
UNTURNED = 1e20
"""Rotary frequencies that are divided by more than this turn nothing."""
YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}
"""Fields of a YaRN scaling, by their keys behind ``rope.scaling``."""


@dataclass(frozen=True)
class Keys:
    """The metadata of a file, by keys without its architecture."""

    file: GGUFFile

    def __getitem__(self, key: str) -> Any:
        return self.file.metadata[f"{self.file.architecture}.{key}"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.file.architecture}.{key}", default)

    @property
    def drafting_blocks(self) -> range:
        """The blocks behind those of the model: layers for multi-token prediction."""
        count = self["block_count"]
        return range(count - self.get("nextn_predict_layers", 0), count)

    @property
    def num_layers(self) -> int:
        return self.drafting_blocks.start

    def of_layers(self, key: str) -> list[Any]:
        """A value of each layer; a file may have one for all."""
        value = self[key]
        return [*value][: self.num_layers] if hasattr(value, "__iter__") else [value] * self.num_layers

    def has_tensor(self, ending: str) -> bool:
        return any(name.endswith(ending) for name in self.file.tensors)

    def rows(self, name: str) -> int:
        return self.file.tensors[name].shape[0]

    def fields(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The fields of a configuration whose keys the file has."""
        values = {name: self.get(key) for key, name in names.items()}
        return {name: value for name, value in values.items() if value is not None}


Settings = Callable[[Keys], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """How files of an architecture say which model of ``transformers`` they hold."""

    model_type: str
    settings: Settings
    """The configuration, beside :data:`COMMON` and :data:`WITH_ATTENTION`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of the configuration that the file has as they are, by their keys."""
    processor: type[TensorProcessor] = TensorProcessor
    """Puts the numbers of tensors in the order of ``transformers``."""
    tensors: Sequence[str] = ()
    """Tensors that are in the configuration."""


# ------------------------------------------------------------------ configurations


def configuration_of(file: GGUFFile) -> dict[str, Any]:
    """The configuration of the model in ``file``, whose architecture is in :data:`ARCHITECTURES`.

    Raises:
        KeyError: a key is missing.
    """
    keys = Keys(file)
    architecture = ARCHITECTURES[file.architecture]
    ids = {
        f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "model_type": architecture.model_type,
        "num_hidden_layers": keys.num_layers,
        "vocab_size": keys.rows("token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **ids,
        **keys.fields({**COMMON, **architecture.fields}),
        **architecture.settings(keys),
    }


def _attention(keys: Keys) -> dict[str, Any]:
    """Attention whose layers are alike, or that some layers have."""
    return {
        "num_key_value_heads": max(keys.of_layers("attention.head_count_kv")),
        **keys.fields({**WITH_ATTENTION, "attention.key_length": "head_dim"}),
    }


def _rope(keys: Keys, **settings: Any) -> dict[str, Any]:
    """Rotary angles, and their scaling where it is YaRN."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys["rope.freq_base"], **settings}
    if keys.get("rope.scaling.type") == "yarn":
        rope |= {"rope_type": "yarn"}
        rope |= keys.fields({f"rope.scaling.{key}": name for key, name in YARN.items()})
    return rope


def _decoder(keys: Keys) -> dict[str, Any]:
    """A decoder as Llama is one."""
    return {
        "intermediate_size": keys["feed_forward_length"],
        "rope_parameters": _rope(keys),
        **_attention(keys),
    }


def _windows(keys: Keys) -> dict[str, Any]:
    """Layers that attend to a window, and layers that attend to all."""
    window = {"sliding_window": keys.get("attention.sliding_window") or None}
    if keys.get("attention.sliding_window_pattern") is None:
        return window
    of_layers = keys.of_layers("attention.sliding_window_pattern")
    kinds = ["sliding_attention" if is_window else "full_attention" for is_window in of_layers]
    return {**window, "layer_types": kinds}


def _mistral3(keys: Keys) -> dict[str, Any]:
    rope = _rope(keys)
    scales = keys.get("rope.scaling.yarn_log_multiplier")
    if scales is not None:  # one number for both: the scores are not scaled
        rope |= {"mscale": scales, "mscale_all_dim": scales}
    rope["llama_4_scaling_beta"] = keys.get("attention.temperature_scale", 0.0)
    return {**_decoder(keys), "rope_parameters": rope}


def _phi3(keys: Keys) -> dict[str, Any]:
    width = keys["embedding_length"] // keys["attention.head_count"]
    rope = _rope(keys, partial_rotary_factor=keys.get("rope.dimension_count", width) / width)
    settings = {**_decoder(keys), "sliding_window": keys.get("attention.sliding_window") or None}
    if LONG_FACTORS in keys.file.tensors:
        original = keys["rope.scaling.original_context_length"]
        settings["original_max_position_embeddings"] = original
        rope |= {
            "rope_type": "longrope",
            "long_factor": keys.file.floats(LONG_FACTORS).tolist(),
            "short_factor": keys.file.floats(SHORT_FACTORS).tolist(),
            "factor": keys["context_length"] / original,
            "original_max_position_embeddings": original,
        }
        rope |= keys.fields({"rope.scaling.attn_factor": "attention_factor"})
    return {**settings, "rope_parameters": rope}


LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
"""The tensors of the numbers by which LongRoPE divides the frequencies of long and of short texts."""


def _gemma4(keys: Keys) -> dict[str, Any]:
    is_window = keys.of_layers("attention.sliding_window_pattern")
    heads = keys.of_layers("attention.head_count_kv")
    widths = keys.of_layers("feed_forward_length")
    full = is_window.index(False)
    has_values = f"blk.{full}.attn_v.weight" in keys.file.tensors
    rope = {"rope_type": "proportional", "rope_theta": keys["rope.freq_base"]}
    if ROPE_FACTORS in keys.file.tensors:
        factors = keys.file.floats(ROPE_FACTORS)
        rope["partial_rotary_factor"] = (factors < UNTURNED).sum().item() / len(factors)
    per_layer = "per_layer_token_embd.weight"
    num_experts = keys.get("expert_count", 0)
    settings = {
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": heads[is_window.index(True)],
        "head_dim": keys["attention.key_length_swa"],
        "global_head_dim": keys["attention.key_length"],
        "attention_k_eq_v": not has_values,
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": keys.rows(
            per_layer if per_layer in keys.file.tensors else "token_embd.weight"
        ),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": keys["rope.freq_base_swa"]},
        },
        **_windows(keys),
    }
    if not has_values:
        settings["num_global_key_value_heads"] = heads[full]
    if num_experts:
        settings |= {
            "enable_moe_block": True,
            "num_experts": num_experts,
            "top_k_experts": keys["expert_used_count"],
            "moe_intermediate_size": keys["expert_feed_forward_length"],
        }
    return settings


def _scan(keys: Keys, names: Mapping[str, str]) -> dict[str, Any]:
    """The layers of Mamba 2, under the ``names`` that a configuration has for their settings."""
    inner = keys["ssm.inner_size"]
    heads = keys["ssm.time_step_rank"]
    settings = {
        "heads": heads,
        "head": inner // heads,
        "state": keys["ssm.state_size"],
        "groups": keys["ssm.group_count"],
        "kernel": keys["ssm.conv_kernel"],
        "expand": inner // keys["embedding_length"],
        "inner": inner,
        "has_bias": keys.has_tensor("ssm_conv1d.bias"),
    }
    return {name: settings[key] for key, name in names.items()}


def _kinds(keys: Keys, other: str) -> list[str]:
    """Layers with attention and ``other`` layers."""
    heads = keys.of_layers("attention.head_count_kv")
    return ["full_attention" if count else other for count in heads]


_MAMBA = {
    **{"heads": "mamba_n_heads", "head": "mamba_d_head", "state": "mamba_d_state"},
    **{"groups": "mamba_n_groups", "kernel": "mamba_d_conv", "expand": "mamba_expand"},
    "has_bias": "mamba_conv_bias",
}


def _granite_hybrid(keys: Keys) -> dict[str, Any]:
    return {
        **_decoder(keys),
        **_scan(keys, _MAMBA),
        "layer_types": _kinds(keys, "linear_attention"),
        "num_local_experts": keys.get("expert_count", 0),
        "num_experts_per_tok": keys.get("expert_used_count", 0),
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned") else None,
    }


def _falcon_h1(keys: Keys) -> dict[str, Any]:
    """Its multipliers are in the weights of a file."""
    return {
        **_decoder(keys),
        **_scan(keys, {**_MAMBA, "inner": "mamba_d_ssm"}),
        "mamba_rms_norm": keys.has_tensor("ssm_norm.weight"),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


_PLAIN_MAMBA = {
    **{"groups": "n_groups", "kernel": "conv_kernel", "expand": "expand", "has_bias": "use_conv_bias"},
}


def _mamba2(keys: Keys) -> dict[str, Any]:
    names = {"heads": "num_heads", "head": "head_dim", "state": "state_size", **_PLAIN_MAMBA}
    return {**_scan(keys, names), "layer_norm_epsilon": keys["attention.layer_norm_rms_epsilon"]}


def _nemotron_h(keys: Keys) -> dict[str, Any]:
    names = {"heads": "mamba_num_heads", "head": "mamba_head_dim", "state": "ssm_state_size", **_PLAIN_MAMBA}
    widths = keys.of_layers("feed_forward_length")
    num_experts = keys.get("expert_count", 0)
    kinds = [
        ("moe" if num_experts else "mlp") if width else kind
        for width, kind in zip(widths, _kinds(keys, "linear_attention"), strict=True)
    ]
    return {
        **_attention(keys),
        **_scan(keys, names),
        "layer_types": kinds,
        "intermediate_size": max(widths),
        "layer_norm_epsilon": keys.get("attention.layer_norm_rms_epsilon")
        or keys["attention.layer_norm_epsilon"],
        "mlp_hidden_act": "relu2",
        **keys.fields(_OF_SHARED_EXPERTS if num_experts else {}),
    }


_OF_SHARED_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "moe_latent_size": "moe_latent_size",
}


def _lfm2_moe(keys: Keys) -> dict[str, Any]:
    return {
        **_decoder(keys),
        "layer_types": _kinds(keys, "conv"),
        "use_expert_bias": keys.has_tensor("exp_probs_b.bias"),
        "norm_eps": keys["attention.layer_norm_rms_epsilon"],
    }


def _glm4(keys: Keys) -> dict[str, Any]:
    share = keys["rope.dimension_count"] / keys["attention.key_length"]
    rope = _rope(keys, partial_rotary_factor=share)
    return {**_decoder(keys), "rope_parameters": rope, "attention_bias": keys.has_tensor("attn_q.bias")}


def _olmo3(keys: Keys) -> dict[str, Any]:
    theta = keys.get("rope.freq_base_swa", keys["rope.freq_base"])
    angles = {
        "full_attention": _rope(keys),
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }
    return {**_decoder(keys), **_windows(keys), "rope_parameters": angles}


def _olmo2(keys: Keys) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, whose files are of the same architecture."""
    if keys.get("attention.sliding_window"):
        return {"model_type": "olmo3", **_olmo3(keys)}
    return _decoder(keys)


def _exaone4(keys: Keys) -> dict[str, Any]:
    settings = {**_decoder(keys), **_windows(keys)}
    if settings["sliding_window"] is None:
        settings["layer_types"] = ["full_attention"] * keys.num_layers
    return settings


_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "num_dense_layers",
    "shortconv.l_cache": "conv_L_cache",
}
_SHARED = {"expert_shared_feed_forward_length": "shared_intermediate_size"}
ARCHITECTURES = {
    "exaone4": Architecture("exaone4", _exaone4),
    "falcon-h1": Architecture("falcon_h1", _falcon_h1),
    "gemma4": Architecture("gemma4_text", _gemma4),
    "glm4": Architecture("glm4", _glm4),
    "granite": Architecture("granite", _decoder, _SCALES, LlamaTensorProcessor),
    "granitehybrid": Architecture(
        "granitemoehybrid", _granite_hybrid, {**_SCALES, **_SHARED}, LlamaTensorProcessor
    ),
    "lfm2moe": Architecture("lfm2_moe", _lfm2_moe, _OF_EXPERTS),
    "mamba2": Architecture("mamba2", _mamba2),
    "mistral3": Architecture("ministral3", _mistral3, processor=LlamaTensorProcessor),
    "nemotron_h": Architecture("nemotron_h", _nemotron_h, processor=LlamaTensorProcessor),
    "nemotron_h_moe": Architecture("nemotron_h", _nemotron_h, processor=LlamaTensorProcessor),
    "olmo2": Architecture("olmo2", _olmo2),
    "phi3": Architecture("phi3", _phi3, tensors=(LONG_FACTORS, SHORT_FACTORS)),
    "smollm3": Architecture("smollm3", _decoder, processor=LlamaTensorProcessor),
}
"""By llama.cpp's names."""


# ------------------------------------------------------------------ weights

NAMES: Sequence[tuple[str, tuple[str, ...]]] = (
    ("dt_bias", ("ssm_dt.bias",)),
    ("shared_mlp.input_linear.weight", ("ffn_gate.weight", "ffn_up.weight")),
    ("shared_mlp.input_linear.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
    ("shared_mlp.output_linear.weight", ("ffn_down.weight",)),
    ("block_sparse_moe.router.weight", ("ffn_gate_inp.weight",)),
    ("feed_forward.expert_bias", ("exp_probs_b.bias",)),
    ("layer_scalar", ("layer_output_scale.weight",)),
    ("router.scale", ("ffn_gate_inp.scale",)),
    ("router.per_expert_scale", ("ffn_down_exps.scale",)),
    ("pre_ff_layernorm.weight", ("ffn_norm",)),
    ("mixer.A_log", ("ssm_a",)),
    ("mixer.D", ("ssm_d",)),
    ("mixer.conv1d.weight", ("ssm_conv1d.weight",)),
    ("mixer.conv1d.bias", ("ssm_conv1d.bias",)),
    ("mixer.norm.weight", ("ssm_norm.weight",)),
    ("mixer.in_proj.weight", ("ssm_in.weight",)),
    ("mixer.out_proj.weight", ("ssm_out.weight",)),
    ("mixer.up_proj.weight", ("ffn_up.weight",)),
    ("mixer.down_proj.weight", ("ffn_down.weight",)),
    ("mixer.q_proj.weight", ("attn_q.weight",)),
    ("mixer.k_proj.weight", ("attn_k.weight",)),
    ("mixer.v_proj.weight", ("attn_v.weight",)),
    ("mixer.o_proj.weight", ("attn_output.weight",)),
    ("mixer.gate.weight", ("ffn_gate_inp.weight",)),
    ("mixer.gate.e_score_correction_bias", ("exp_probs_b.bias",)),
    ("mixer.shared_experts.up_proj.weight", ("ffn_up_shexp.weight",)),
    ("mixer.shared_experts.down_proj.weight", ("ffn_down_shexp.weight",)),
)
"""Endings of the names of parameters, and the tensors of the same layer of which they are made, one after the
other, where the package ``gguf`` has no names for them."""


def sources_in_layer(parameter: str, block: str, tensors: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The tensors of ``block`` ("blk.3") of which a parameter is made; None where :data:`NAMES` does not
    say."""
    for ending, parts in NAMES:
        sources = tuple(f"{block}.{part}" for part in parts)
        if parameter.endswith(f".{ending}") and all(source in tensors for source in sources):
            return sources
    return None


def in_shape(numbers: np.ndarray, source: str, shape: Sequence[int]) -> np.ndarray:
    """The numbers of a tensor of a scan or a short convolution in the ``shape`` of its parameter: files lack
    axes of one, or have more. Other tensors stay as they are."""
    _, _, kind = source.removeprefix("blk.").partition(".")
    if kind == "ssm_a":
        numbers = np.log(-numbers)
    is_of_state = kind.startswith(("ssm_a", "ssm_d", "ssm_norm", "ssm_conv1d", "shortconv.conv"))
    return numbers.reshape(shape) if is_of_state and numbers.size == np.prod(shape) else numbers
