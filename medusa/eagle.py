"""An EAGLE-style drafting head: one transformer layer that runs ahead on the base model's features.

Where Medusa heads guess every depth from one hidden state, this head is autoregressive in *features*: from
the base's hidden state f_t (the input of its output embedding) and the embedding of token t + 1 it predicts
f_{t+1}, whose unembedding scores token t + 2; fed with its own prediction it goes on (EAGLE, arXiv
2401.15077, section 3). This module knows nothing of trees or files.

Shapes: D hidden, V vocabulary, E = one entry: (feature t, token t + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel


@dataclass(frozen=True)
class EagleConfig:
    """What defines an EAGLE-style head, apart from its weights."""

    hidden_size: int
    """D of the base model."""
    vocab_size: int
    """V of the base model's output embedding."""
    num_attention_heads: int = 8
    """Of the one layer; divides hidden_size."""
    intermediate_size: int = 0
    """Of the layer's feed-forward part; 0 for 4 x hidden_size, rounded down to a multiple of 64."""
    max_depth: int = 5
    """How far ahead it is made to draft."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_attention_heads", "max_depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads must divide hidden_size={self.hidden_size}, "
                f"got {self.num_attention_heads}"
            )


class EagleHead(nn.Module):
    """Predicts the base's next feature. The base's embeddings are passed in, never part of the module."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.join = nn.Linear(2 * size, size)
        wide = config.intermediate_size or max(64, 4 * size // 64 * 64)
        layer = LlamaConfig(
            vocab_size=1,  # it reads embeddings of the base
            hidden_size=size,
            intermediate_size=wide,
            num_hidden_layers=1,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_attention_heads,
            max_position_embeddings=2**20,
            use_cache=False,
        )
        layer._attn_implementation = "sdpa"
        self.layer = LlamaModel(layer)
        del self.layer.embed_tokens

    def forward(
        self,
        features: Tensor,
        next_embeddings: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """The predicted next feature of every entry: (B, E, D) from features and embeddings (B, E, D).

        Entry i joins feature t_i with the embedding of the token after it; its prediction's unembedding
        scores the token after that. Causal over entries without ``attention_mask``.
        """
        dtype = self.join.weight.dtype
        joined = self.join(torch.cat([features.to(dtype), next_embeddings.to(dtype)], dim=-1))
        if position_ids is None:
            position_ids = torch.arange(joined.shape[1], device=joined.device)[None]
        return self.layer(
            inputs_embeds=joined,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
