"""The EAGLE-3 drafting head (arXiv 2503.01840), in exactly the form that serving engines load.

Where Medusa heads guess every depth from one hidden state, this head is one transformer layer that runs ahead
on its own states. An entry joins a *feature* g_t with the embedding of token t + 1 and scores token t + 2.
Where the base has read token t, g_t is made of the base's states after three of its layers
(:meth:`Eagle3Head.fuse`); further on it is what the head itself gave at the entry before. This module knows
nothing of trees or files.

Shapes: D hidden, V vocabulary, V' scored tokens, L fused layers, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size
from medusa.checks import check_counts
from medusa.heads.causal_layer import MAX_SIZE, CausalLayer, LayerConfig, checked_layers, document_pairs
from medusa.heads.medusa_heads import MAX_DEPTH, MedusaHeads
from medusa.heads.token_map import TokenMapped

MIN_LAYERS_OF_DEFAULT = 7
"""Bases with fewer layers have no three different ones at :func:`default_layers`."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """What defines an EAGLE-3 head, apart from its weights: the sizes of its layer, which are the base's as a
    rule, and what stands around it."""

    vocab_size: int
    """V of the base model's output embedding."""
    fused_layers: tuple[int, ...]
    """The base's states after that many of its decoder layers are read, 1 the first."""
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
        super().__post_init__()
        check_counts(self, MAX_SIZE, "vocab_size")
        check_counts(self, MAX_DEPTH, "max_depth")
        if self.token_map_size is not None:
            check_counts(self, self.vocab_size, "token_map_size")
        # a list, where it comes from a file
        object.__setattr__(self, "fused_layers", checked_layers(self.fused_layers, least=1))
        for name in ("own_lm_head", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")

    @classmethod
    def of_base(
        cls,
        base: CausalLM,
        intermediate_size: int = 0,
        *,
        fused_layers: Sequence[int] | None = None,
        **options: Any,
    ) -> Self:
        """The head for ``base``, with its layer; the default of ``fused_layers`` is :func:`default_layers`.

        Raises:
            ValueError: the base has too few layers for the default, or its token embeddings have another size
                than its hidden states.
        """
        size, embedded = hidden_size(base), base.get_input_embeddings().weight.shape[1]
        if embedded != size:
            raise ValueError(
                f"an EAGLE-3 head needs token embeddings of the size of the hidden states, {size}; those of "
                f"{base.name_or_path!r} have {embedded}: train head_kind=medusa"
            )
        layers = tuple(fused_layers or default_layers(base))
        return super().of_base(
            base, intermediate_size, vocab_size=vocab_size(base), fused_layers=layers, **options
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
        self.midlayer = CausalLayer(config, config.norm_before_residual)
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
    def reads_text(self) -> bool:
        """True: its entries attend to all before them."""
        return True

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
        that. The mask, positions and cache are those of :class:`medusa.heads.causal_layer.CausalLayer`.
        """
        dtype = self.fc.weight.dtype
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


Heads = MedusaHeads | Eagle3Head
"""What a heads directory can hold."""


def check_heads_fit(heads: Heads, base: CausalLM) -> None:
    """Raise ValueError unless ``heads`` can sit on a base of these sizes."""
    for name, ours in (("hidden_size", hidden_size(base)), ("vocab_size", vocab_size(base))):
        if (theirs := getattr(heads.config, name)) != ours:
            raise ValueError(
                f"heads were trained for {name}={theirs}, base model {base.name_or_path!r} has {ours}; load "
                "the base model that the heads were trained on"
            )


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
    together, distance = document_pairs(positions)
    masks = []
    for depth in range(1, num_steps + 1):
        parts = [together & (distance >= depth - 1)]
        parts += [(distance == depth - step).expand_as(together) for step in range(2, depth + 1)]
        masks.append(torch.cat(parts, dim=-1)[:, None])
    return masks
