"""Medusa heads as a drafter: every head guesses its own depth, all from one hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa.drafters import Draft, DraftContext
from medusa.heads import MedusaHeads, embedding_weight
from medusa.tree import CandidateTree


class HeadsDrafter:
    """Fills ``tree`` with the best guesses of the heads.

    When the row is sampled, head d ranks its tokens by ``beta / temperature * logits + G`` with the
    very noise that will choose the token at that position (Gumbel coupling, arXiv 2408.07978), so
    that more guesses hit. That is exact under the equality rule and biased under any ratio rule.

    Args:
        beta: weight of the head's opinion against the noise; 1 believes the head as it is, more
            sharpens it.
    """

    def __init__(
        self, heads: MedusaHeads, output_embedding: nn.Module, tree: CandidateTree, beta: float = 1.5
    ):
        self.heads = heads
        self.output_embedding = output_embedding
        self.tree = tree
        self.beta = beta
        device = embedding_weight(output_embedding).device
        self._topology = tree.topology(device)
        nodes = tree.paths[1:]
        self._depth_index = torch.tensor([len(path) - 1 for path in nodes], device=device, dtype=torch.long)
        self._rank = torch.tensor([path[-1] for path in nodes], device=device, dtype=torch.long)

    @property
    def max_depth(self) -> int:
        return self.tree.depth

    def draft(self, context: DraftContext) -> Draft:
        guesses = self.ranked_guesses(context, max(self.tree.width_by_depth))  # (B, K, W)
        below_root = guesses[:, self._depth_index, self._rank]  # (B, N - 1)
        return Draft(torch.cat([context.root[:, None], below_root], dim=1), self._topology)

    def ranked_guesses(self, context: DraftContext, width: int) -> Tensor:
        """The ``width`` best tokens of each head, best first: (B, K, width) long."""
        logits = self.heads(context.hidden, self.output_embedding)[:, : self.tree.depth]
        width = min(width, logits.shape[-1])
        if context.noise is not None:
            noise = context.noise[:, : self.tree.depth]
            if self.heads.token_map is not None:
                noise = noise[..., self.heads.token_map]
            logits = logits.float() * (self.beta / context.temperature) + noise
        return self.heads.token_ids(logits.topk(width, dim=-1).indices)

    def keep_rows(self, rows: Tensor) -> None:
        """Heads keep nothing between steps."""
