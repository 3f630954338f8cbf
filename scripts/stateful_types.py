"""The table of docs/guides/recurrent.md: the types of ``transformers`` that keep a state, and which decode.

    python scripts/stateful_types.py            # print the table
    python scripts/stateful_types.py --write    # write it into the guide

Each type is made tiny, with random weights, and checked as any base is when it is loaded. Types that their
structure alone refuses are made without weights.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from medusa.base.architecture_check import check_decodable, fault_of

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "recurrent.md"
BEGIN, END = "<!-- made by scripts/stateful_types.py -->\n", "<!-- end -->"

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

TINY: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "bailing_hybrid": {**LATENT, "head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "bamba": {**WITH_ATTENTION, **MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**WITH_ATTENTION, **MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "falcon_mamba": SIZES,
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
    "mamba": SIZES,
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
        "head_dim": 8,
        "num_experts_per_tok": 1,
        "router_hidden_size": 8,
    },
}
"""Small configurations, by ``model_type``; an empty one stands for the type's own, made without weights."""


def tiny_model(model_type: str, **others: Any) -> Any:
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
    return fault_of(model)


def table() -> str:
    """The table in Markdown."""
    rows = []
    for model_type in sorted(TINY):
        model = tiny_model(model_type)
        reason = reason_against(model)
        rows.append(f"| `{model_type}` | {'refused' if reason else 'yes'} | {reason or ''} |")
    return "\n".join(["| `model_type` | decodes | why not |", "|---|---|---|", *rows]) + "\n"


def main(arguments: list[str]) -> None:
    logging.set_verbosity_error()
    if arguments == ["--write"]:
        before, _, rest = GUIDE.read_text(encoding="utf-8").partition(BEGIN)
        GUIDE.write_text(
            before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2], encoding="utf-8"
        )
    else:
        sys.stdout.write(table())


if __name__ == "__main__":
    main(sys.argv[1:])
