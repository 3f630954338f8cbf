"""The best path of a dynamic tree, for bases that verify chains alone.

A base that keeps a state (:mod:`medusa.base.recurrent`) follows one path a step. Dynamic heads say what each
node is worth, so they can say which path is expected to give most tokens: that with the largest sum of the
probabilities of its nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.acceptance.distributions import independent_chains
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.protocol import Draft, DraftContext, Drafter, StatelessDrafter
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

WIDTH = 8
"""Chains side by side whose nodes the tree has: so many candidates are compared."""


class BestPathDrafter(StatelessDrafter):
    """Drafts the best path of the trees of ``drafter``, as deep as these."""

    def __init__(self, drafter: DynamicDrafter):
        self._drafter = drafter.fill(independent_chains(WIDTH, drafter.tree.depth))
        self.context_only, self.needs_features = drafter.context_only, drafter.needs_features
        self.reads_layers = drafter.reads_layers

    @property
    def max_depth(self) -> int:
        return self._drafter.max_depth

    def fill(self, tree: CandidateTree | None = None) -> BestPathDrafter:
        """As deep as ``tree``."""
        return BestPathDrafter(self._drafter.fill(tree))

    def begin(self, num_rows: int, after: Drafter | None = None) -> None:
        self._drafter.begin(num_rows, after._drafter if isinstance(after, BestPathDrafter) else None)

    def keep_rows(self, rows: Tensor) -> None:
        self._drafter.keep_rows(rows)

    def draft(self, context: DraftContext) -> Draft:
        return best_path(self._drafter.draft(context))


def best_path(draft: Draft) -> Draft:
    """The path of ``draft``, which says what its nodes are worth, on which most guesses are expected to be
    right: a chain, as deep as the deepest of its rows; behind the end of a shorter one its last token stands
    again, and is worth nothing."""
    assert draft.worth is not None
    topology = draft.topology
    expected = (topology.ancestors * draft.worth.exp()[:, None]).sum(2)  # (B, N): of the path to each node
    best = expected.argmax(1)
    depths = topology.depths.expand_as(draft.tokens).gather(1, best[:, None])  # (B, 1)
    lineage = topology.lineage.expand(len(best), -1, -1)[torch.arange(len(best), device=best.device), best]
    path = lineage[:, : int(depths.max()) + 1]  # (B, L)
    is_behind = torch.arange(path.shape[1], device=path.device) > depths
    worth = draft.worth.gather(1, path).masked_fill(is_behind, -torch.inf)
    chain = TreeTopology.chain(path.shape[1], path.device, is_draft=True)
    return Draft(draft.tokens.gather(1, path), chain, worth=worth)
