"""The causal transformer layer of EAGLE-3 heads (arXiv 2503.01840): Llama's, but for its input.

An entry joins a *feature* of token t, made of the base's hidden states, with the embedding of token t + 1.
It has the form that serving engines load. This module knows nothing of heads, trees or files.

Shapes: D hidden, E entries, S entries that can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

from medusa.base.causal_lm import CausalLM, hidden_size
from medusa.heads.draft_vocab import MAX_SIZE
from medusa.options import check_counts

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that a layer takes over from its base; types that change with the length of the text are
left out."""
DEFAULT_THETA = 10000.0
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": DEFAULT_THETA}


@dataclass(frozen=True)
class LayerConfig:
    """The sizes of a layer."""

    hidden_size: int
    """D."""
    num_attention_heads: int
    num_key_value_heads: int
    """A divisor of num_attention_heads."""
    head_dim: int
    intermediate_size: int
    """Size of the feed-forward part."""
    rms_norm_eps: float = 1e-5
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: dict(_DEFAULT_ROPE))
    """Parameters of the rotary embedding, as in ``transformers``; rope_type is one of :data:`ROPE_TYPES`."""
    max_position_embeddings: int = 2048
    """Positions that the base was made for."""

    def __post_init__(self) -> None:
        check_counts(
            self,
            MAX_SIZE,
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
        )
        check_counts(self, 2**40, "max_position_embeddings")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads={self.num_attention_heads}, got "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:  # rotary embeddings turn pairs
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if not isinstance(self.rms_norm_eps, float) or not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps must be a number between 0 and 1, got {self.rms_norm_eps!r}")
        _check_rope(self.rope_parameters)

    @classmethod
    def of_base(cls, base: CausalLM, intermediate_size: int = 0, **options: Any) -> Self:
        """The layer with ``base``'s attention heads, rotary embedding and feed-forward size, or another one
        where ``intermediate_size`` is not 0; ``options`` are other fields."""
        text = base.config.get_text_config(decoder=True)
        size = hidden_size(base)
        heads = text.num_attention_heads
        feed_forward = intermediate_size or getattr(text, "intermediate_size", None)
        return cls(
            hidden_size=size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or size // heads,
            intermediate_size=feed_forward if isinstance(feed_forward, int) else 4 * size,
            rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-5,
            rope_parameters=_rope_of(text),
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
            **options,
        )


def _check_rope(parameters: Any) -> None:
    """Raise ValueError unless ``parameters`` describe a rotary embedding that a layer can have."""
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters must be an object, got {parameters!r:.200}")
    theta = parameters.get("rope_theta")
    kind = parameters.get("rope_type")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {kind!r:.100}")
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not theta > 0:
        raise ValueError(f"rope_theta must be a number above 0, got {theta!r:.100}")


def _rope_of(text: Any) -> dict[str, Any]:
    """The rotary settings of a text configuration: for full attention where layers differ."""
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta", DEFAULT_THETA)
    if parameters.get("rope_type", "default") not in ROPE_TYPES[1:]:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_theta": theta, **{key: value for key, value in parameters.items() if value is not None}}


class CausalLayer(nn.Module):
    """A Llama layer whose attention reads [embedding, feature]."""

    def __init__(self, config: LayerConfig, norm_before_residual: bool = False):
        """``norm_before_residual``: the residual is the normed feature, and not the feature."""
        super().__init__()
        self.norm_before_residual = norm_before_residual
        size = config.hidden_size
        llama = LlamaConfig(
            hidden_size=size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
            bos_token_id=None,
            eos_token_id=None,
        )
        llama._attn_implementation = "sdpa"
        self.input_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(llama, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, width, bias=False))
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(llama)
        with torch.device("cpu"):  # no file holds its frequencies: a head built on "meta" needs real ones too
            self.rotary_emb = LlamaRotaryEmbedding(llama)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """The output of E entries, (B, E, D), from features and embeddings (B, E, D).

        Causal over entries without ``mask`` (B, 1, E, S) bool; their positions are ``position_ids`` (B, E)
        long, by default from 0. ``cache`` stores their keys and values, and returns the keys and values of
        all S visible entries.
        """
        if position_ids is None:
            position_ids = torch.arange(features.shape[1], device=features.device)[None]
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        joined = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)  # (B, E, 2 * D)
        attended, _ = self.self_attn(joined, self.rotary_emb(joined, position_ids), mask, cache)
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


def document_pairs(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries of a row are of one document, (B or 1, E, E) bool, and their distances, (E, E) long.
    positions (B, E) long count from 0 where a document starts."""
    entries = torch.arange(positions.shape[1], device=positions.device)
    document = (positions == 0).cumsum(1)
    if bool((document == document[:, :1]).all()):
        document = document[:1]  # a row is one document: one mask serves all rows
    return document[:, :, None] == document[:, None, :], entries[:, None] - entries[None, :]
