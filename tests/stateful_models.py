"""Tiny random models that keep a state, and how their answers are compared."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from medusa.base.architecture_check import check_decodable, verification_error

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WITH_ATTENTION = {
    **SIZES,
    "initializer_range": 0.3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LINEAR = {**WITH_ATTENTION, "layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION = {**WITH_ATTENTION, "layer_types": ["conv", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_expand": 2, "mamba_d_head": 16}
DELTA = {
    **LINEAR,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **LINEAR,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN_EXPERTS = {**DELTA, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16}
SHARED_BLOCKS = {
    **WITH_ATTENTION,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "hybrid", "mamba"],
    "mamba_d_state": 8,
    "n_mamba_heads": 4,
}

SCAN = {**SIZES, "initializer_range": 0.3, "state_size": 8}

TINY: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "bailing_hybrid": {**LATENT, "head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "bamba": {**WITH_ATTENTION, **MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**WITH_ATTENTION, **MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "falcon_mamba": SCAN,
    "granitemoehybrid": {
        **LINEAR,
        **MAMBA,
        "shared_intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "jamba": {
        **WITH_ATTENTION,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
    },
    "kimi_linear": {
        **LATENT,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2": CONVOLUTION,
    "lfm2_moe": {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1},
    "lfm3": {
        **WITH_ATTENTION,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "head_dim": 8,
        "sliding_window": 8,
    },
    "mamba": SCAN,
    "mamba2": {
        **SIZES,
        "initializer_range": 0.3,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
    },
    "minimax": {**LINEAR, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4},
    "nemotron_h": {
        **{name: size for name, size in WITH_ATTENTION.items() if name != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "head_dim": 8,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
    },
    "olmo_hybrid": DELTA,
    "qwen3_5_moe_text": QWEN_EXPERTS,
    "qwen3_5_text": {**DELTA, "head_dim": 8},
    "qwen3_next": QWEN_EXPERTS,
    "qwen4_exp_text": {
        **QWEN_EXPERTS,
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_lowrank": 8,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {
        **SIZES,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "rwkv": {},
    "xlstm": {},
    "zamba": {
        **SHARED_BLOCKS,
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
        "n_mamba_heads": 2,
    },
    "zamba2": SHARED_BLOCKS,
    "zaya": {
        **WITH_ATTENTION,
        **EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": 8,
        "attention_bias": True,
        "head_dim": 8,
        "num_experts_per_tok": 1,
        "router_hidden_size": 8,
    },
}
"""Small configurations, by ``model_type``; an empty one stands for the type's own, made without weights."""


def tiny_stateful_model(model_type: str, **others: Any) -> Any:
    """A random model of this type, the same one every time; ``others`` are settings beside its own."""
    settings = TINY[model_type] | others
    with torch.random.fork_rng(), torch.device("cpu" if settings else "meta"):
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()


def reason_against(model: Any) -> str | None:
    """Why ``model`` is refused; None where it decodes."""
    try:
        check_decodable(model)
    except ValueError as error:
        return re.sub(rf"^{type(model).__name__} |, so .*|; use its own generate$", "", str(error))
    return verification_error(model)


def table_of_types() -> str:
    """The table of docs/guides/recurrent.md."""
    rows = []
    for model_type in sorted(TINY):
        model = tiny_stateful_model(model_type)
        reason = reason_against(model)
        rows.append(f"| `{model_type}` | {'refused' if reason else 'yes'} | {reason or ''} |")
    return "\n".join(["| `model_type` | decodes | why not |", "|---|---|---|", *rows]) + "\n"


DECODABLE = sorted(
    set(TINY)
    - {"deepseek_v4", "minimax", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm"}
    - {each for each in TINY if each not in CONFIG_MAPPING}
)
"""The ``model_type`` of those that are not refused, as far as this ``transformers`` has them."""
TIE = 1e-4
"""Two logits that lie nearer to each other may change places: our plain decoding lays keys and values out
otherwise than ``transformers`` and so rounds otherwise. The logits range over about 10."""


@functools.cache
def stateful_model(model_type: str, **settings):
    """A random float32 model, the same one every time."""
    return tiny_stateful_model(model_type, **settings)


def model_of_twins(model_type: str):
    """A model that scores every token of the lower half of its vocabulary all but as high as one of the upper
    half, so that what rounds otherwise soon writes another text."""
    model = tiny_stateful_model(model_type)
    weight = model.get_output_embeddings().weight
    half = len(weight) // 2
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        weight[half : 2 * half] = weight[:half] * (1 + 1e-6 * torch.randn(half, 1))
    return model


def turned_at_a_tie(base, ours: Tensor, theirs: Tensor, prompt_length: int) -> bool:
    """Whether two greedy answers (1, T) long differ, which they may do first where two logits tie.

    Raises:
        AssertionError: they differ first elsewhere.
    """
    if torch.equal(ours, theirs):
        return False
    shared = min(ours.shape[1], theirs.shape[1])
    first = int((ours[0, :shared] != theirs[0, :shared]).int().argmax())
    assert first >= prompt_length
    with torch.no_grad():
        logits = base(input_ids=theirs[:, :first], use_cache=False).logits[0, -1]
    best = logits.topk(2)
    assert float(best.values[0] - best.values[1]) < TIE, f"token {first} is another one"
    assert {int(ours[0, first]), int(theirs[0, first])} <= set(best.indices.tolist())
    return True
