"""Medusa heads whose tree takes another shape at every step, as large as before: where they are surest now.

A tree chosen beforehand (:func:`medusa.best_tree`) holds the rank paths that are right most often. At a given
step the heads know better: a candidate is worth the product of the probabilities along its path, and the
N - 1 candidates worth most make the tree (EAGLE-2, arXiv 2406.16858, section 4.2). Heads are trained towards
the base's distribution, so what they say of a token is near the rate at which it turns out right.

Level by level the ``beam`` best nodes are carried on, with as many candidates after each. All of it is tensor
operations of one shape, so static steps can run it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import output_embedding as output_embedding_of
from medusa.drafters.heads import BETA, HeadsDrafter, heads_source
from medusa.drafters.protocol import Draft, DraftContext, Drafter
from medusa.drafters.source import DrafterSettings, DraftHost, DraftSource, NamedDrafter
from medusa.heads.eagle import EagleHead
from medusa.heads.medusa_heads import MedusaHeads
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

MIN_BEAM, MAX_BEAM = 4, 16
"""A small tree loses candidates below the first; past the second, drafting costs more than it finds."""
WORST = -1e30
"""The least that a token adds to the value of its path, and what scores that are no numbers add: values can
always be compared, and no child is worth more than its parent."""


class DynamicHeadsDrafter(HeadsDrafter):
    """Fills trees of as many nodes as ``tree`` has, at most as deep, of a shape that the heads choose.

    For rules that compare two distributions candidates are drawn in ``tree`` itself.
    """

    def __init__(
        self, heads: MedusaHeads, output_embedding: nn.Module, tree: CandidateTree, beta: float = BETA
    ):
        super().__init__(heads, output_embedding, tree, beta)
        wanted = tree.num_nodes - 1
        self.beam = min(max(MIN_BEAM, tree.num_nodes // 2), MAX_BEAM)
        most = heads.config.token_map_size or heads.config.vocab_size
        parents = 1 + (tree.depth - 1) * self.beam  # at most, over all levels
        self._fanout = min(max(self.beam, -(-wanted // parents)), most)
        sizes = [self._fanout]  # candidates of each level
        while len(sizes) < tree.depth:
            sizes.append(min(self.beam, sizes[-1]) * self._fanout)
        self._num_nodes = 1 + min(wanted, sum(sizes))
        self._depths = torch.cat(
            [torch.full((size,), depth, device=self._ranks.device) for depth, size in enumerate(sizes, 1)]
        )

    @property
    def static_key(self) -> Hashable:
        return "dynamic", super().static_key

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    def _ranked(self, context: DraftContext) -> Draft:
        tokens, values, parents = self._candidates(context)  # (B, C) each
        # No candidate is worth more than its parent, which stands before it and goes first in a tie.
        order = values.argsort(dim=1, descending=True, stable=True)
        chosen = order[:, : self.num_nodes - 1].sort(dim=1).values
        root = context.root[:, None]
        kept_parents = parents.gather(1, chosen)
        nodes = torch.searchsorted(chosen, kept_parents) + 1
        topology = TreeTopology.from_parents(
            torch.cat([torch.zeros_like(root), nodes.masked_fill(kept_parents < 0, 0)], dim=1),
            torch.cat([torch.zeros_like(root), self._depths[chosen]], dim=1),
            self.tree.depth,
        )
        return Draft(torch.cat([root, tokens.gather(1, chosen)], dim=1), topology)

    def _candidates(self, context: DraftContext) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, values (log-probabilities of paths) and parents of all candidates, level after level.

        (B, C) each; parents count candidates, -1 is the root.
        """
        paths = context.root[:, None, None]  # (B, M, depth): the beam, tokens from the root on
        beam = paths.new_full(paths.shape[:2], -1)  # (B, M): which candidates they are
        worth = torch.zeros(beam.shape, device=beam.device)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        first = 0
        for depth in range(1, self.tree.depth + 1):
            logits = self.logits_along(context, depth - 1, paths.shape[1], paths)
            scores = self.scores(context, depth, logits).float()
            log_q, columns = scores.log_softmax(-1).topk(self._fanout, dim=-1)  # (B, M, R)
            tokens = (columns if self.token_map is None else self.token_map[columns]).flatten(1)
            log_q = log_q.nan_to_num(nan=WORST).clamp(WORST, 0)  # one NaN or infinity makes a whole row NaN
            values = (worth[..., None] + log_q).flatten(1)
            found.append((tokens, values, beam.repeat_interleave(self._fanout, dim=1)))
            worth, kept = values.topk(min(self.beam, values.shape[1]), dim=1)
            came_from = (kept // self._fanout)[..., None].expand(-1, -1, depth)
            paths = torch.cat([paths.gather(1, came_from), tokens.gather(1, kept)[..., None]], dim=2)
            beam, first = first + kept, first + values.shape[1]
        tokens, values, parents = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
        return tokens, values, parents


def dynamic_heads_source(host: DraftHost, settings: DrafterSettings) -> DraftSource:
    """The model's heads in trees of the size of its tree for the batch."""
    heads, embedding = host.drafting_heads, output_embedding_of(host.runner)
    assert isinstance(heads, MedusaHeads), "missing_medusa_heads refuses this model before"

    def fill(tree: CandidateTree) -> Drafter:
        return DynamicHeadsDrafter(heads, embedding, tree)

    return replace(heads_source(host, settings), name="dynamic-heads", fill=fill)


def missing_medusa_heads(host: DraftHost, settings: DrafterSettings) -> str | None:
    """What is missing: Medusa heads, unless the model has them."""
    if isinstance(host.heads, MedusaHeads):
        return None
    kind = "an EAGLE-style head" if isinstance(host.heads, EagleHead) else "no heads"
    return f"Medusa heads, and the model was loaded with {kind}; give --heads"


DYNAMIC_HEADS = NamedDrafter(
    "dynamic-heads",
    dynamic_heads_source,
    "the heads, in a tree that takes another shape at every step",
    missing_medusa_heads,
    needs_heads=True,
)
