"""Tiny random bases of each family that comes with layers for multi-token prediction, with their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stateful_models import TINY
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from medusa.heads.autoregressive_head import unroll
from medusa.heads.mtp import UNSAID, MtpConfig, MtpHead, num_mtp_layers, without_weights

STATEFUL = TINY
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **SIZES,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "qwen3_next": STATEFUL["qwen3_next"],
    "qwen3_5_text": STATEFUL["qwen3_5_text"],
    "qwen3_5_moe_text": STATEFUL["qwen3_5_moe_text"],
}
WITH_TREES = ("deepseek_v3", "glm4_moe")
FEW_TOKENS = 13
PROMPT = torch.tensor([[3, 8, 5, 5, 12, 4, 9, 3, 7]])


def made_base(model_type: str, num_layers: int = 1, **settings: Any) -> Any:
    """A random float32 base, the same one every time."""
    given = {"num_mtp_layers": num_layers} if model_type in WITH_TREES else {}
    with torch.random.fork_rng():
        torch.manual_seed(7)
        sizes = {**FAMILIES[model_type], "vocab_size": FEW_TOKENS, **given, **settings}
        config = AutoConfig.for_model(model_type, **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


AROUND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
AROUND_MTP = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}
"""What stands around a layer, as ``transformers`` and as files call it."""


def stored_tensors(head: MtpHead) -> dict[str, Tensor]:
    """The weights of ``head`` as the base's files have them."""
    base = without_weights(head.config.base_config)
    first, is_mtp = base.config.num_hidden_layers, base.config.model_type in UNSAID
    around, stored = (AROUND_MTP if is_mtp else AROUND), {}
    layer: Any
    for number, layer in enumerate(head.layers):
        prefix = "mtp." if is_mtp else f"model.layers.{first + number}."
        block = f"mtp.layers.{number}." if is_mtp else prefix
        of_base = {f"model.layers.0.{name}": each for name, each in layer.mtp_block.state_dict().items()}
        for name, each in revert_weight_conversion(base, of_base).items():
            stored[block + name.removeprefix("model.layers.0.")] = each
        for name, each in layer.state_dict().items():
            module, _, rest = name.partition(".")
            if module in around:
                stored[f"{prefix}{around[module]}.{rest}"] = each
    return stored


def save_base(directory: Path, model_type: str, num_layers: int = 1, **settings: Any) -> Path:
    """A base and its layers for multi-token prediction, in files as they are published."""
    base = made_base(model_type, num_layers, **settings)
    base.name_or_path = str(directory)
    with torch.random.fork_rng():
        torch.manual_seed(8)
        head = MtpHead(MtpConfig.of_base(base))
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    fit(head, base, base.generate(PROMPT, max_new_tokens=48, do_sample=False))
    base.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors") | stored_tensors(head)
    contiguous = {name: each.contiguous() for name, each in weights.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def fit(head: MtpHead, base: Any, text: torch.Tensor, num_steps: int = 12) -> None:
    """Have ``head`` guess some of ``text`` (1, T) long right."""
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-2)
    with torch.no_grad():
        hidden = base(text, output_hidden_states=True).hidden_states[-1]
        following = base.get_input_embeddings()(text.roll(-1, dims=1))
    for _ in range(num_steps):
        states = unroll(head, hidden, following, torch.arange(text.shape[1])[None])
        logits = [base.lm_head(each[0, depth:-2]) for depth, each in enumerate(states)]
        losses = [cross_entropy(each, text[0, depth + 2 :]) for depth, each in enumerate(logits)]
        optimiser.zero_grad()
        sum(losses).backward()
        optimiser.step()


def load_base(directory: Path) -> Any:
    """The base, as ``transformers``' own use_mtp wants it: its configuration says how many layers there are,
    and its class which tensors are theirs."""
    base = AutoModelForCausalLM.from_pretrained(directory)
    config, count = base.config, num_mtp_layers(base.config)
    config.num_mtp_layers = count
    if getattr(config, "layer_types", None) and getattr(config, "mtp_layer_types", None) is None:
        config.mtp_layer_types = ["full_attention"] * count
    numbered = [rf"layers\.{config.num_hidden_layers + number}\." for number in range(count)]
    base._keys_to_ignore_on_load_unexpected = [r"^mtp\.", *numbered]
    return base.eval()
