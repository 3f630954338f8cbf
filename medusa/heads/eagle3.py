"""The EAGLE-3 drafting head (arXiv 2503.01840), in exactly the form that serving engines load.

Where Medusa heads guess every depth from one hidden state, this head is one transformer layer that drafts on
its own states (:mod:`medusa.heads.autoregressive_head`). Where the base has read a token, its feature is made
of the base's states after three of its layers. This module knows nothing of trees or files.

Shapes: D hidden, V vocabulary, V' scored tokens, L fused layers, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size
from medusa.heads.autoregressive_head import AutoregressiveHead, Drafted
from medusa.heads.causal_layer import CausalLayer, LayerConfig
from medusa.heads.draft_vocab import MAX_SIZE, checked_layers
from medusa.heads.medusa_heads import MAX_DEPTH
from medusa.options import ForeignName, check_counts

_MIN_LAYERS_OF_DEFAULT = 7
"""Bases with fewer layers have no three different ones at :func:`default_layers`."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """The configuration of an EAGLE-3 head: the sizes of its layer, usually the base's, and the parts around
    it."""

    vocab_size: int
    """V of the base model's LM head."""
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
        size = hidden_size(base)
        embedding_size = base.get_input_embeddings().weight.shape[1]
        if embedding_size != size:
            raise ValueError(
                f"an EAGLE-3 head needs token embeddings of the size of the hidden states, {size}; those of "
                f"{base.name_or_path!r} have {embedding_size}: train head_kind=medusa"
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
    if count < _MIN_LAYERS_OF_DEFAULT:
        raise ValueError(
            f"base model {base.name_or_path!r} has {count} layers, and the default of EAGLE-3 (2, L // 2, "
            f"L - 3) needs at least {_MIN_LAYERS_OF_DEFAULT}; name the layers: fused_layers"
        )
    return 2, count // 2, count - 3


class Eagle3Head(AutoregressiveHead):
    """Runs ahead of the base on features of its own. The base's embeddings are passed in, never part of it.

    Parameters are named as in the checkpoints of other projects (:mod:`medusa.interop.eagle3`).
    """

    kind: ClassVar[str] = "eagle3"
    config_type: ClassVar[type[Any]] = Eagle3Config
    exported_as: ClassVar[ForeignName | None] = "vllm-eagle3"

    def __init__(self, config: Eagle3Config, token_map: Sequence[int] | Tensor | None = None):
        super().__init__(config, token_map)
        size = config.hidden_size
        num_layers = len(config.fused_layers)

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
    def scores_base_rows(self) -> bool:
        return not self.config.own_lm_head

    def in_words(self) -> str:
        layers = " ".join(map(str, self.fused_layers))
        rows = "rows of its own" if self.config.own_lm_head else "the base's rows"
        return (
            f"an EAGLE-3 head over layers {layers} that drafts {self.num_heads} deep and scores "
            f"{self.num_columns:,} tokens with {rows}"
        )

    def fuse(self, hidden: Tensor) -> Tensor:
        """The features (..., D) from the base's states (..., (1 + L) * D): the last state comes first, and is
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
        layer: int = 0,
    ) -> Drafted:
        dtype = self.fc.weight.dtype
        output = self.midlayer(
            features.to(dtype), next_embeddings.to(dtype), attention_mask, position_ids, cache
        )
        states = self.norm(output)
        return Drafted(states, states if self.config.norm_output else output)

    def unembedded(self, features: Tensor, lm_head: nn.Module) -> Tensor:
        """States (..., D) as scored by the head's own rows, or else by the base's: logits (..., V')."""
        if self.config.own_lm_head:
            return self.lm_head(features)
        return super().unembedded(features, lm_head)
