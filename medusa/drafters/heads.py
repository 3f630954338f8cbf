"""Medusa heads as a drafter: every head guesses its own depth, all from one hidden state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from medusa.base import CausalLM
from medusa.base import output_embedding as output_embedding_of
from medusa.drafters import Draft, DraftContext, Drafter
from medusa.drafters.choice import DrafterSettings, DraftSource, NamedDrafter
from medusa.drafters.eagle import EagleDrafter
from medusa.drafters.levels import LevelDrafter
from medusa.eagle import EagleHead, Heads
from medusa.heads import MedusaHeads, embedding_weight
from medusa.tree import CandidateTree

if TYPE_CHECKING:
    from medusa.model import MedusaModel


class HeadsDrafter(LevelDrafter):
    """Fills ``tree`` with the best guesses of the heads.

    When the row is sampled, head d ranks its tokens by ``beta / temperature * logits + G`` with the
    very noise that will choose the token at that position (Gumbel coupling, arXiv 2408.07978), so
    that more guesses hit. That is exact under the equality rule and biased under any ratio rule, for
    which candidates are drawn from the heads' distributions instead.
    """

    context_only = False  # what a head says of a token depends on how far ahead it stands

    def __init__(
        self, heads: MedusaHeads, output_embedding: nn.Module, tree: CandidateTree, beta: float = 1.5
    ):
        super().__init__(tree, embedding_weight(output_embedding).device, beta)
        self.heads, self.output_embedding = heads, output_embedding
        self._depth_index = self.topology.depths[0, 1:] - 1

    def draft(self, context: DraftContext) -> Draft:
        if context.sampled is not None:
            return self._sampled(context)
        guesses = self.ranked_guesses(context, max(self.tree.width_by_depth))  # (B, K, W)
        below_root = guesses[:, self._depth_index, self._ranks[1:]]  # (B, N - 1)
        return Draft(torch.cat([context.root[:, None], below_root], dim=1), self.topology)

    def ranked_guesses(self, context: DraftContext, width: int) -> Tensor:
        """The ``width`` best tokens of each head, best first: (B, K, width) long."""
        logits = self.heads(context.hidden, self.output_embedding)[:, : self.tree.depth]
        if context.noise is not None:
            noise = context.noise[:, : self.tree.depth]
            if self.heads.token_map is not None:
                noise = noise[..., self.heads.token_map]
            logits = logits.float() * (self.beta / context.temperature) + noise
        return self.heads.token_ids(logits.topk(width, dim=-1).indices)

    def logits_after(self, context: DraftContext, tokens: Tensor, nodes: slice) -> Tensor:
        """The logits of the head of the next depth, the same after every node of a level."""
        head = self.levels.index(nodes)
        logits = self.heads.logits_of(head, context.hidden, self.output_embedding)  # (B, V')
        if self.heads.token_map is not None:
            everything = logits.new_full((len(logits), self.vocab_size), -torch.inf)
            logits = everything.index_copy(1, self.heads.token_map, logits)
        return logits[:, None].expand(-1, nodes.stop - nodes.start, -1)

    @property
    def vocab_size(self) -> int:
        return self.heads.config.vocab_size


def drafter_of_heads(heads: Heads, base: CausalLM, tree: CandidateTree) -> Drafter:
    """The drafter for heads of either kind, over ``base``'s embeddings."""
    if isinstance(heads, EagleHead):
        return EagleDrafter(heads, base, tree)
    return HeadsDrafter(heads, output_embedding_of(base), tree)


def heads_source(model: MedusaModel, settings: DrafterSettings) -> DraftSource:
    """The model's heads in the model's tree; in a chain where the tree is the root alone."""
    heads, runner = model.heads, model.runner
    assert heads is not None, "asked after by missing_heads"
    return DraftSource(
        "heads",
        lambda tree: drafter_of_heads(heads, runner, tree),
        own_tree=model.tree if model.tree.depth else None,
        draft_length=settings.draft_length or heads.num_heads,
        max_length=heads.num_heads,
    )


def missing_heads(model: MedusaModel, settings: DrafterSettings) -> str | None:
    """Heads, unless the model has them."""
    return "heads, and the model was loaded without; give --heads" if model.heads is None else None


DRAFTERS = (NamedDrafter("heads", heads_source, "the heads the model was loaded with", missing_heads),)
