"""An EAGLE-style drafting head: one transformer layer that runs ahead on the base model's features.

Where Medusa heads guess every depth from one hidden state, this head is autoregressive in *features*: from
the base's hidden state f_t (the input of its output embedding) and the embedding of token t + 1 it predicts
f_{t+1}, whose unembedding scores token t + 2; fed with its own prediction it goes on (EAGLE, arXiv
2401.15077, section 3). This module knows nothing of trees or files.

Shapes: D hidden, V vocabulary, E entries; one entry is (feature t, token t + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from medusa.heads.medusa_heads import MAX_DEPTH, MAX_SIZE, MedusaHeads, check_counts
from medusa.heads.token_map import TokenMapped


@dataclass(frozen=True)
class EagleConfig:
    """What defines an EAGLE-style head, apart from its weights."""

    hidden_size: int
    """D of the base model."""
    vocab_size: int
    """V of the base model's output embedding."""
    num_attention_heads: int = 8
    """Attention heads of the one layer; a divisor of hidden_size."""
    intermediate_size: int = 0
    """Size of the layer's feed-forward part; 0 for 4 x hidden_size, rounded down to a multiple of 64."""
    max_depth: int = 5
    """How far ahead it is made to draft."""
    token_map_size: int | None = None
    """V': tokens that it can draft; None for all."""

    def __post_init__(self) -> None:
        check_counts(
            hidden_size=(self.hidden_size, MAX_SIZE),
            vocab_size=(self.vocab_size, MAX_SIZE),
            num_attention_heads=(self.num_attention_heads, self.hidden_size),
            max_depth=(self.max_depth, MAX_DEPTH),
        )
        if self.intermediate_size != 0:
            check_counts(intermediate_size=(self.intermediate_size, MAX_SIZE))
        if self.token_map_size is not None:
            check_counts(token_map_size=(self.token_map_size, self.vocab_size))
        if self.hidden_size % (2 * self.num_attention_heads):  # rotary embeddings turn pairs
            raise ValueError(
                f"num_attention_heads must divide hidden_size={self.hidden_size} into even parts, "
                f"got {self.num_attention_heads}"
            )


class EagleHead(TokenMapped):
    """Predicts the base's next feature. The base's embeddings are passed in, never part of the module."""

    def __init__(self, config: EagleConfig, token_map: Sequence[int] | Tensor | None = None):
        super().__init__(config.vocab_size, config.token_map_size, token_map)
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
            bos_token_id=None,
            eos_token_id=None,
        )
        layer._attn_implementation = "sdpa"
        self.layer = LlamaModel(layer)
        del self.layer.embed_tokens
        with torch.device("cpu"):  # no file holds its frequencies: a head built on "meta" needs real ones too
            self.layer.rotary_emb = LlamaRotaryEmbedding(layer)
        self.register_buffer("feature_scale", torch.ones(size))
        self.register_buffer("embedding_scale", torch.ones(size))

    feature_scale: Tensor
    """(D,): the size of each dimension of a feature; features are read and predicted in this unit."""
    embedding_scale: Tensor
    """(D,): the same of token embeddings."""

    @property
    def num_heads(self) -> int:
        """The depths it is made for, as many as that many Medusa heads reach."""
        return self.config.max_depth

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """None: it reads the last state alone."""
        return ()

    @torch.no_grad()
    def set_scales(self, features: Tensor, embeddings: Tensor) -> None:
        """Measure in what unit the base's features and embeddings (..., D) come: their root mean square."""
        for scale, seen in ((self.feature_scale, features), (self.embedding_scale, embeddings)):
            size = seen.float().flatten(0, -2).square().mean(0).sqrt()
            scale.copy_(torch.where(size > 0, size, 1.0))

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
        features = features.to(dtype) / self.feature_scale
        next_embeddings = next_embeddings.to(dtype) / self.embedding_scale
        joined = self.join(torch.cat([features, next_embeddings], dim=-1))
        if position_ids is None:
            position_ids = torch.arange(joined.shape[1], device=joined.device)[None]
        predicted = self.layer(
            inputs_embeds=joined,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return predicted * self.feature_scale


Heads = MedusaHeads | EagleHead
"""What a heads directory can hold."""


def drafted_features(
    head: EagleHead, features: Tensor, next_embeddings: Tensor, positions: Tensor
) -> list[Tensor]:
    """The features (B, E, D) that drafting would predict at each depth 1 .. K, with the text's own tokens.

    Entry i of depth d ends a draft of d entries: the first joins the true feature i - d + 1 with its next
    token, each of the others the feature that the one before it predicted. It attends to what it would
    while drafting: true entries up to the first, then the draft's own. So what is trained and counted is
    what decoding does. Entries less than d - 1 after the start of a document mean nothing.

    Args:
        features: (B, E, D), the base's.
        next_embeddings: (B, E, D), of the token after each.
        positions: (B, E) long, from 0 where a document starts; documents of a row do not see each other.
    """
    cache, inputs, predicted = DynamicCache(), features, []
    masks = _unrolled_masks(positions, head.num_heads)
    for mask in masks:
        predicted.append(head(inputs, next_embeddings, mask, positions, cache))
        inputs = torch.cat([features[:, :1].to(predicted[-1].dtype), predicted[-1][:, :-1]], dim=1)
    return predicted


def _unrolled_masks(positions: Tensor, num_steps: int) -> list[Tensor]:
    """For each step d, who sees whom: (B or 1, 1, E, d * E) bool over the entries of steps 1 .. d."""
    entries = torch.arange(positions.shape[1], device=positions.device)
    document = (positions == 0).cumsum(1)
    if bool((document == document[:, :1]).all()):
        document = document[:1]  # a row is one document: one mask serves all rows
    together = document[:, :, None] == document[:, None, :]  # (B or 1, E, E)
    distance = entries[:, None] - entries[None, :]
    masks = []
    for depth in range(1, num_steps + 1):
        parts = [together & (distance >= depth - 1)]
        parts += [(distance == depth - step).expand_as(together) for step in range(2, depth + 1)]
        masks.append(torch.cat(parts, dim=-1)[:, None])
    return masks
