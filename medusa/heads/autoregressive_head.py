"""Heads that run ahead of the base on states of their own.

An entry joins a *feature* g_t with the embedding of token t + 1 and scores token t + 2. Where the base has
read token t, g_t is made of the base's states (:meth:`AutoregressiveHead.fuse`); further on it is what the
head itself gave at the entry before. EAGLE-3 heads are such (:mod:`medusa.heads.eagle3`), and so are the
layers for multi-token prediction that bases come with (:mod:`medusa.heads.mtp`). These may be several: the
first reads the base's states, each other one what the layer below gave at the entry before, and the d-th
guesses depth d. Deeper than they are many, the last goes on.

Shapes: D hidden, V vocabulary, V' scored tokens, L fused layers, E entries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size
from medusa.heads.causal_layer import document_pairs
from medusa.heads.draft_vocab import DraftVocab
from medusa.heads.medusa_heads import MedusaHeads


class Drafted(NamedTuple):
    """What a layer gives at some entries."""

    states: Tensor
    """(B, E, D): what is unembedded."""
    features: Tensor
    """(B, E, D): what the entry after reads."""


class AutoregressiveHead(DraftVocab):
    """A head that runs ahead of the base. The base's embeddings are passed in, never part of it."""

    config: Any

    @abstractmethod
    def __init__(self, config: Any, token_map: Sequence[int] | Tensor | None = None):
        super().__init__(config.vocab_size, config.token_map_size, token_map)
        self.config = config

    @property
    def num_heads(self) -> int:
        """The depths it is made for, as many as that many Medusa heads reach."""
        return self.config.max_depth

    @property
    def num_layers(self) -> int:
        """How many layers guess a depth each, the last all that are deeper."""
        return 1

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The base's decoder layers whose states :meth:`fuse` takes beside the last one."""
        return self.config.fused_layers

    def fuse(self, hidden: Tensor) -> Tensor:
        """The features (..., D) of what the base gives, (..., (1 + L) * D): by default its last states."""
        return hidden

    @abstractmethod
    def forward(
        self,
        features: Tensor,
        next_embeddings: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        layer: int = 0,
    ) -> Drafted:
        """What ``layer`` gives at E entries, from features and embeddings (B, E, D).

        Entry i joins feature t_i with the embedding of the token after it; its state scores the token after
        that. The mask, positions and cache are those of :class:`medusa.heads.causal_layer.CausalLayer`.
        """


Heads = MedusaHeads | AutoregressiveHead
"""What a heads directory can hold."""


def check_heads_fit(heads: Heads, base: CausalLM) -> None:
    """Raise ValueError unless ``heads`` can sit on a base of these sizes."""
    advice = "load the base model that the heads were trained on"
    check_sizes(base, heads.config.hidden_size, heads.config.vocab_size, "heads were trained", advice)


def check_sizes_fit(
    config: Any, base_hidden_size: int | None, base_vocab_size: int | None, base_name: str
) -> None:
    """As :func:`check_heads_fit` of heads with this ``config``, for a base that is not loaded: sizes that are
    not known, None, are not compared."""
    for name, ours in (("hidden_size", base_hidden_size), ("vocab_size", base_vocab_size)):
        theirs = getattr(config, name)
        if None not in (theirs, ours) and theirs != ours:
            raise ValueError(
                f"heads were trained for {name}={theirs}, base model {base_name!r} has {ours}; load the base "
                "model that the heads were trained on, or give heads=None (--heads none)"
            )


def check_sizes(base: CausalLM, size: int, vocabulary: int | None, what: str, advice: str) -> None:
    """Raise ValueError unless heads of these sizes can sit on ``base``; None are heads without rows. The
    message says ``what`` has other sizes, and the ``advice``."""
    for name, theirs, ours in (
        ("hidden_size", size, hidden_size(base)),
        ("vocab_size", vocabulary, vocab_size(base)),
    ):
        if theirs is not None and theirs != ours:
            raise ValueError(
                f"{what} for {name}={theirs}, base model {base.name_or_path!r} has {ours}; {advice}"
            )


def unroll(
    head: AutoregressiveHead, hidden: Tensor, next_embeddings: Tensor, positions: Tensor
) -> list[Tensor]:
    """The states (B, E, D) from which drafting would guess each depth 1 .. K, with the text's own tokens.

    Entry i of depth d ends a draft of d entries: the first joins the base's feature i - d + 1 with its next
    token, each of the others what the entry before it gave. It attends to what it would while drafting:
    entries on the base's features up to the first, then the draft's own. So what is trained (EAGLE-3's
    training-time test) and counted is what decoding does. Entries less than d - 1 after the start of a
    document mean nothing.

    Args:
        hidden: (B, E, (1 + L) * D), the base's; see :meth:`AutoregressiveHead.fuse`.
        next_embeddings: (B, E, D), of the token after each.
        positions: (B, E) long, from 0 where a document starts; documents of a row do not see each other.
    """
    features = head.fuse(hidden)
    cache, inputs, states = DynamicCache(), features, []
    for step, mask in enumerate(_unrolled_masks(positions, head.num_heads, head.num_layers)):
        layer = min(step, head.num_layers - 1)
        drafted = head(inputs, next_embeddings, mask, positions, cache, layer)
        states.append(drafted.states)
        inputs = torch.cat([features[:, :1], drafted.features[:, :-1].to(features.dtype)], dim=1)
    return states


def _unrolled_masks(positions: Tensor, num_steps: int, num_layers: int) -> list[Tensor]:
    """For each step, who sees whom: (B or 1, 1, E, R * E) bool over the entries of the R runs of its layer,
    the first of them on the text."""
    together, distance = document_pairs(positions)
    masks = []
    for step in range(num_steps):
        layer = min(step, num_layers - 1)
        run = step - layer
        text = together & (distance >= run)
        if layer:  # so near to the start, entries have nothing below them
            text = text & ((positions >= layer)[:, None] | (distance == 0))
        own = [(distance == run - earlier).expand_as(text) for earlier in range(1, run + 1)]
        masks.append(torch.cat([text, *own], dim=-1)[:, None])
    return masks
