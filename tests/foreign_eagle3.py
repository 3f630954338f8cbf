"""EAGLE-3 heads as other projects build and write them, small: a Llama layer that reads two vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

LAYERS = (2, 4, 5)
"""Of eight: those that a checkpoint without the key is read with."""


def deep_base(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama of eight layers over the chat tokenizer."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tokens = {"eos_token_id": 256, "pad_token_id": 256, "bos_token_id": None, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | tokens | changes)).eval()


class Eagle3Reference(nn.Module):
    """What the published code computes over a whole text: config.json's keys are its arguments."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        rope = dict(config.get("rope_scaling") or {"rope_type": "default"})
        said = {key: config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
        said |= {key: config[key] for key in ("num_key_value_heads", "rms_norm_eps") if key in config}
        rope |= {"rope_theta": config.get("rope_theta", 10000.0)}
        layer = LlamaConfig(**said, max_position_embeddings=512, rope_parameters=rope)
        layer._attn_implementation = "eager"
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self.config, self.rotary = config, LlamaRotaryEmbedding(layer)
        self.midlayer = LlamaDecoderLayer(layer, 0)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * size, width, bias=False))
        self.midlayer.hidden_norm = LlamaRMSNorm(size, eps)
        if config.get("norm_before_fc"):
            self.input_norm = LlamaRMSNorm(3 * size, eps)
        if config.get("fc_norm"):
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(size, eps) for _ in range(3))
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config["draft_vocab_size"], bias=False)

    def forward(self, three_states: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, T, V') and next features (B, T, D) of states (B, T, 3 * D) and embeddings (B, T, D)."""
        joined = three_states
        if self.config.get("norm_before_fc"):
            joined = self.input_norm(joined)
        if self.config.get("fc_norm"):
            parts = joined.chunk(3, -1)
            joined = torch.cat([norm(each) for norm, each in zip(self.fc_norm, parts, strict=True)], -1)
        return self.drafted(self.fc(joined), embeddings)

    def drafted(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        layer, length = self.midlayer, features.shape[1]
        normed = layer.hidden_norm(features)
        residual = normed if self.config.get("norm_before_residual") else features
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        joined = torch.cat([layer.input_layernorm(embeddings), normed], -1)
        places = self.rotary(joined, torch.arange(length)[None])
        residual = residual + layer.self_attn(joined, position_embeddings=places, attention_mask=mask)[0]
        output = residual + layer.mlp(layer.post_attention_layernorm(residual))
        states = self.norm(output)
        return self.lm_head(states), states if self.config.get("norm_output") else output


def reference_config(draft_vocab_size: int = 60, **changes: Any) -> dict[str, Any]:
    """config.json as SpecForge writes it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "vocab_size": 260,
        "draft_vocab_size": draft_vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
    } | changes


def reference_head(config: dict[str, Any]) -> Eagle3Reference:
    """With weights that have moved."""
    torch.manual_seed(7)
    head = Eagle3Reference(config)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.2)
    return head.eval()


def written_tensors(head: Eagle3Reference, vocab_size: int = 260) -> dict[str, Tensor]:
    """The tensors of a checkpoint; every fourth token is drafted."""
    tensors = {name: each.detach().clone() for name, each in head.state_dict().items()}
    num_drafted = len(head.lm_head.weight)
    if num_drafted < vocab_size:
        tokens = torch.arange(num_drafted) * 4 + 1
        tensors["d2t"] = tokens - torch.arange(num_drafted)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    return tensors


def write_directory(
    directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors"
) -> Path:
    """A checkpoint in one file, or in shards where ``file`` is an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, directory / file)
    elif file.endswith(".index.json"):
        names = sorted(tensors)
        shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
        for shard, held in shards.items():
            save_file({name: tensors[name] for name in held}, directory / shard)
        where = {name: shard for shard, held in shards.items() for name in held}
        (directory / file).write_text(json.dumps({"weight_map": where}))
    else:
        save_file(tensors, directory / file)
    return directory


def as_speculators(
    config: dict[str, Any], tensors: dict[str, Tensor], base: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint in the layout of vllm-project/speculators, which names the base."""
    config = dict(config)
    outer = {
        key: config.pop(key) for key in ("norm_before_residual", "fc_norm", "norm_output") if key in config
    }
    whole = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": base, "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": config.pop("draft_vocab_size"),
        "target_hidden_size": None,
        "transformer_layer_config": {key: each for key, each in config.items() if key != "architectures"},
        **outer,
    }
    return whole, {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
