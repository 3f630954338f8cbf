"""Autoregressive heads: they draft several tokens from their own states.

An entry joins a *feature* g_t with the embedding of token t + 1 and scores token t + 2. Where the base has
read token t, g_t is made of the base's states (:meth:`AutoregressiveHead.fuse`); beyond, it is the head's own
output at the previous entry. EAGLE-3 heads (:mod:`medusa.heads.eagle3`) are of this kind, and a base's own
layers for multi-token prediction (:mod:`medusa.heads.mtp`). With K MTP layers, layer d predicts depth d from
the output of layer d-1 at the previous entry; layer 1 reads the base's states. Beyond K the last layer is
reused.

Shapes: D hidden, V vocabulary, V' scored tokens, L fused layers, E entries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from medusa.heads.causal_layer import document_pairs
from medusa.heads.protocol import Heads


class Drafted(NamedTuple):
    """The output of a layer at some entries."""

    states: Tensor
    """(B, E, D): the input of the LM head."""
    features: Tensor
    """(B, E, D): the input of the next entry."""


class AutoregressiveHead(Heads):
    """An autoregressive head. The base's embeddings are passed in, never part of it."""

    reads_features: ClassVar[bool] = True

    @property
    def num_heads(self) -> int:
        """The depth it is trained for: the reach of the same number of Medusa heads."""
        return self.config.max_depth

    @property
    def num_layers(self) -> int:
        """How many layers guess a depth each, the last all that are deeper."""
        return 1

    @property
    def reads_per_chain(self) -> float:
        return self.num_heads / self.num_layers  # once for each depth

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
        """The output of ``layer`` at E entries, from features and embeddings (B, E, D).

        Entry i joins feature t_i with the embedding of the token after it; its state scores the token after
        that. Mask, positions and cache are as for :class:`medusa.heads.causal_layer.CausalLayer`.
        """

    def guessing_states(self, hidden: Tensor, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """The states (B, T, K, D) that a draft from each position would score, of each depth."""
        following = embed(ids.roll(-1, dims=1)).to(hidden.device)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        by_last_entry = unroll(self, hidden, following, positions)
        # A draft of d entries from position t ends at entry t + d - 1; entries that wrap around are past
        # every answer.
        by_position = [states.roll(-depth, dims=1) for depth, states in enumerate(by_last_entry)]
        return torch.stack(by_position, dim=2)

    def guesses_after(self, states: Tensor, path: Tensor, lm_head: nn.Module) -> Tensor:
        return self.unembedded(states, lm_head)


def unroll(
    head: AutoregressiveHead, hidden: Tensor, next_embeddings: Tensor, positions: Tensor
) -> list[Tensor]:
    """The states (B, E, D) from which drafting would guess each depth 1 .. K, with the text's own tokens.

    Entry i of depth d ends a draft of d entries: the first joins the base's feature i - d + 1 with its next
    token, each of the others the output of the entry before it. It attends to the same entries as while
    drafting: entries on the base's features up to the first, then the draft's own. So training (EAGLE-3's
    training-time test) and counting match decoding. Entries less than d - 1 after the start of a document are
    undefined.

    Args:
        hidden: (B, E, (1 + L) * D), the base's; see :meth:`AutoregressiveHead.fuse`.
        next_embeddings: (B, E, D), of the token after each.
        positions: (B, E) long, from 0 where a document starts; documents of a row do not see each other.
    """
    features = head.fuse(hidden)
    cache = DynamicCache()
    inputs = features
    states = []
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
