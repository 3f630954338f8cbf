"""The EAGLE-3 drafting head (arXiv 2503.01840), in exactly the form that serving engines load.

Where Medusa heads guess every depth from one hidden state, this head is one transformer layer that runs ahead
on its own states. An entry joins a *feature* g_t with the embedding of token t + 1 and scores token t + 2.
Where the base has read token t, g_t is made of the base's states after three of its layers
(:meth:`Eagle3Head.fuse`); further on it is what the head itself gave at the entry before. This module knows
nothing of trees or files.

Shapes: D hidden, V vocabulary, V' scored tokens, L fused layers, E entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size
from medusa.heads.medusa_heads import MAX_DEPTH, MAX_LAYERS, MAX_SIZE, MedusaHeads, ascends, check_counts
from medusa.heads.token_map import TokenMapped

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that the head takes over from its base; those that change with the length of the text it
does not."""
DEFAULT_THETA = 10000.0
MIN_LAYERS_OF_DEFAULT = 7
"""Bases with fewer layers have no three different ones at :func:`default_layers`."""


@dataclass(frozen=True)
class Eagle3Config:
    """What defines an EAGLE-3 head, apart from its weights."""

    hidden_size: int
    """D of the base model, and of the head."""
    vocab_size: int
    """V of the base model's output embedding."""
    fused_layers: tuple[int, ...]
    """The base's states after that many of its decoder layers are read, 1 the first."""
    num_attention_heads: int
    num_key_value_heads: int
    """A divisor of num_attention_heads."""
    head_dim: int
    intermediate_size: int
    """Size of the feed-forward part."""
    rms_norm_eps: float = 1e-5
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": DEFAULT_THETA}
    )
    """Of the rotary embedding, as in ``transformers``; rope_type is one of :data:`ROPE_TYPES`."""
    max_position_embeddings: int = 2048
    """Positions that the base was made for."""
    max_depth: int = 5
    """How far ahead it is made to draft."""
    token_map_size: int | None = None
    """V': tokens that it can draft; None for all."""
    own_lm_head: bool = False
    """Whether it scores with rows of its own (V', D), as most published heads do, or with the base's."""
    fc_norm: bool = False
    """EAGLE-3.1: the state of each fused layer is normed before they are joined."""
    norm_output: bool = False
    """EAGLE-3.1: the normed output, and not the sum before the norm, is the next feature."""
    norm_before_fc: bool = False
    """All fused states are normed as one vector before they are joined."""
    norm_before_residual: bool = False
    """The layer's residual is the normed feature, and not the feature."""

    def __post_init__(self) -> None:
        check_counts(
            hidden_size=(self.hidden_size, MAX_SIZE),
            vocab_size=(self.vocab_size, MAX_SIZE),
            num_attention_heads=(self.num_attention_heads, MAX_SIZE),
            num_key_value_heads=(self.num_key_value_heads, MAX_SIZE),
            head_dim=(self.head_dim, MAX_SIZE),
            intermediate_size=(self.intermediate_size, MAX_SIZE),
            max_position_embeddings=(self.max_position_embeddings, 2**40),
            max_depth=(self.max_depth, MAX_DEPTH),
        )
        if self.token_map_size is not None:
            check_counts(token_map_size=(self.token_map_size, self.vocab_size))
        layers = self.fused_layers
        if not isinstance(layers, (list, tuple)) or not layers or not ascends(layers):
            raise ValueError(
                f"fused_layers of an EAGLE-3 head must be at least one int from 1 to {MAX_LAYERS}, different "
                f"and in ascending order, got {layers!r:.200}"
            )
        object.__setattr__(self, "fused_layers", tuple(layers))  # a list, where it comes from a file
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads={self.num_attention_heads}, got "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:  # rotary embeddings turn pairs
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if not isinstance(self.rms_norm_eps, float) or not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps must be a number between 0 and 1, got {self.rms_norm_eps!r}")
        for name in ("own_lm_head", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        check_rope(self.rope_parameters)

    @classmethod
    def of_base(
        cls,
        base: CausalLM,
        fused_layers: Sequence[int] | None = None,
        intermediate_size: int = 0,
        **options: Any,
    ) -> Eagle3Config:
        """The head for ``base``: its attention heads, rotary embedding and feed-forward size.

        Args:
            fused_layers: None: :func:`default_layers`.
            intermediate_size: 0: the base's own.
            options: other fields.

        Raises:
            ValueError: the base has too few layers for the default, or its token embeddings have another size
                than its hidden states.
        """
        text, size = base.config.get_text_config(decoder=True), hidden_size(base)
        embedded = base.get_input_embeddings().weight.shape[1]
        if embedded != size:
            raise ValueError(
                f"an EAGLE-3 head needs token embeddings of the size of the hidden states, {size}; those of "
                f"{base.name_or_path!r} have {embedded}: train head_kind=medusa"
            )
        heads = text.num_attention_heads
        wide = intermediate_size or getattr(text, "intermediate_size", None)
        return cls(
            hidden_size=size,
            vocab_size=vocab_size(base),
            fused_layers=tuple(fused_layers or default_layers(base)),
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or size // heads,
            intermediate_size=wide if isinstance(wide, int) else 4 * size,
            rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-5,
            rope_parameters=_rope_of(text),
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
            **options,
        )


def default_layers(base: CausalLM) -> tuple[int, int, int]:
    """The layers that every engine takes where a checkpoint names none: 2, L // 2 and L - 3 of L.

    Raises:
        ValueError: these are no three different layers of ``base``.
    """
    count = base.config.get_text_config(decoder=True).num_hidden_layers
    if count < MIN_LAYERS_OF_DEFAULT:
        raise ValueError(
            f"base model {base.name_or_path!r} has {count} layers, and the default of EAGLE-3 (2, L // 2, "
            f"L - 3) needs at least {MIN_LAYERS_OF_DEFAULT}; name the layers: fused_layers"
        )
    return 2, count // 2, count - 3


def check_rope(parameters: Any) -> None:
    """Raise ValueError unless ``parameters`` are those of a rotary embedding that the head can have."""
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters must be an object, got {parameters!r:.200}")
    theta, kind = parameters.get("rope_theta"), parameters.get("rope_type")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {kind!r:.100}")
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not theta > 0:
        raise ValueError(f"rope_theta must be a number above 0, got {theta!r:.100}")


def _rope_of(text: Any) -> dict[str, Any]:
    """The rotary settings of a text configuration: those of full attention where layers differ."""
    given = getattr(text, "rope_parameters", None) or {}
    given = given.get("full_attention", given)
    theta = given.get("rope_theta", DEFAULT_THETA)
    if given.get("rope_type", "default") not in ROPE_TYPES[1:]:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_theta": theta, **{key: value for key, value in given.items() if value is not None}}


class Drafted(NamedTuple):
    """What the head gives at some entries."""

    states: Tensor
    """(B, E, D): what is unembedded."""
    features: Tensor
    """(B, E, D): what the entry after reads."""


class Eagle3Head(TokenMapped):
    """Runs ahead of the base on features of its own. The base's embeddings are passed in, never part of it.

    Parameters are named as in the checkpoints of other projects (:mod:`medusa.interop.eagle3`).
    """

    def __init__(self, config: Eagle3Config, token_map: Sequence[int] | Tensor | None = None):
        super().__init__(config.vocab_size, config.token_map_size, token_map)
        self.config = config
        size, num_layers = config.hidden_size, len(config.fused_layers)

        def norm(width: int = size) -> nn.RMSNorm:
            return nn.RMSNorm(width, eps=config.rms_norm_eps)

        if config.norm_before_fc:
            self.input_norm = norm(num_layers * size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm() for _ in range(num_layers))
        self.fc = nn.Linear(num_layers * size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = norm()
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.token_map_size or config.vocab_size, bias=False)

    @property
    def num_heads(self) -> int:
        """The depths it is made for, as many as that many Medusa heads reach."""
        return self.config.max_depth

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """The base's decoder layers whose states :meth:`fuse` takes beside the last one."""
        return self.config.fused_layers

    @property
    def scores_base_rows(self) -> bool:
        return not self.config.own_lm_head

    def fuse(self, hidden: Tensor) -> Tensor:
        """The features (..., D) of what the base gives, (..., (1 + L) * D): the last state first, which is
        not read."""
        below = hidden[..., self.config.hidden_size :].to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            below = self.input_norm(below)
        if self.config.fc_norm:
            parts = below.chunk(len(self.fc_norm), dim=-1)
            below = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(below)

    def forward(
        self,
        features: Tensor,
        next_embeddings: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Drafted:
        """What the head gives at E entries, from features and embeddings (B, E, D).

        Entry i joins feature t_i with the embedding of the token after it; its state scores the token after
        that. Causal over entries without ``attention_mask`` (B, 1, E, S) bool; ``cache`` takes their keys and
        values, and gives those of all S entries that they may see.
        """
        dtype = self.fc.weight.dtype
        if position_ids is None:
            position_ids = torch.arange(features.shape[1], device=features.device)[None]
        output = self.midlayer(
            features.to(dtype), next_embeddings.to(dtype), attention_mask, position_ids, cache
        )
        states = self.norm(output)
        return Drafted(states, states if self.config.norm_output else output)

    def unembedded(self, features: Tensor, output_embedding: nn.Module) -> Tensor:
        """States (..., D) as scored by the head's own rows, or else by the base's: logits (..., V')."""
        if self.config.own_lm_head:
            return self.lm_head(features)
        return super().unembedded(features, output_embedding)


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads [embedding, feature]."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, self.norm_before_residual = config.hidden_size, config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(size, config.intermediate_size)

    def forward(
        self, features: Tensor, embeddings: Tensor, mask: Tensor | None, position_ids: Tensor, cache: Any
    ) -> Tensor:
        """(B, E, D) of features and embeddings (B, E, D)."""
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        joined = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)  # (B, E, 2 * D)
        residual = residual + self.self_attn(joined, mask, position_ids, cache)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Attention(nn.Module):
    """Grouped-query attention with rotary positions over inputs of twice the hidden size."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        width, key_width = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(2 * size, width, bias=False)
        self.k_proj = nn.Linear(2 * size, key_width, bias=False)
        self.v_proj = nn.Linear(2 * size, key_width, bias=False)
        self.o_proj = nn.Linear(width, size, bias=False)
        rope = LlamaConfig(
            hidden_size=size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.device("cpu"):  # no file holds its frequencies: a head built on "meta" needs real ones too
            self.rotary_emb = LlamaRotaryEmbedding(rope)

    def forward(self, joined: Tensor, mask: Tensor | None, position_ids: Tensor, cache: Any) -> Tensor:
        """(B, E, D) of joined (B, E, 2 * D)."""
        queries, keys, values = (
            each(joined).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, heads, E, head_dim)
        queries, keys = apply_rotary_pos_emb(queries, keys, *self.rotary_emb(queries, position_ids))
        if cache is not None:
            keys, values = cache.update(keys, values, 0)
        seen = F.scaled_dot_product_attention(
            queries, keys, values, mask, is_causal=mask is None, enable_gqa=queries.shape[1] != keys.shape[1]
        )
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """Llama's feed-forward part."""

    def __init__(self, size: int, wide: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, wide, bias=False)
        self.up_proj = nn.Linear(size, wide, bias=False)
        self.down_proj = nn.Linear(wide, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


Heads = MedusaHeads | Eagle3Head
"""What a heads directory can hold."""


def drafted_states(
    head: Eagle3Head, hidden: Tensor, next_embeddings: Tensor, positions: Tensor
) -> list[Tensor]:
    """The states (B, E, D) from which drafting would guess each depth 1 .. K, with the text's own tokens.

    Entry i of depth d ends a draft of d entries: the first joins the base's feature i - d + 1 with its next
    token, each of the others what the entry before it gave. It attends to what it would while drafting:
    entries on the base's features up to the first, then the draft's own. So what is trained (the paper's
    training-time test) and counted is what decoding does. Entries less than d - 1 after the start of a
    document mean nothing.

    Args:
        hidden: (B, E, (1 + L) * D), the base's; see :meth:`Eagle3Head.fuse`.
        next_embeddings: (B, E, D), of the token after each.
        positions: (B, E) long, from 0 where a document starts; documents of a row do not see each other.
    """
    features = head.fuse(hidden)
    cache, inputs, states = DynamicCache(), features, []
    for mask in _unrolled_masks(positions, head.num_heads):
        drafted = head(inputs, next_embeddings, mask, positions, cache)
        states.append(drafted.states)
        inputs = torch.cat([features[:, :1], drafted.features[:, :-1].to(features.dtype)], dim=1)
    return states


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
