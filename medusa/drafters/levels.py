"""Drafting level by level: any model of the next token fills a tree, by rank or by drawing.

A subclass gives the logits after each node (:meth:`LevelDrafter.logits_after`). This module turns them into
candidates, in two ways. *Ranked*: the node of rank r holds the r-th best token after its parent, where "best"
includes the noise that will choose the token (Gumbel coupling), legal with the equality rule only. *Sampled*:
children are drawn from the drafter's distribution with noise of their own, for the rules that compare two
distributions. Temperature, top-k, top-p and the like cut the drafter's distribution as they cut the base's: a
token that the base cannot choose would never be accepted, and any distribution is exact.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from medusa.acceptance.protocol import DraftKind, draft_noise, draw_tree, kind_drawn
from medusa.acceptance.sampling import UpcomingNoise, warp_logits
from medusa.drafters.protocol import Draft, DraftContext, StatelessDrafter
from medusa.hardware import sent
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

LARGEST_LOGIT = 1e9
"""Bound of logits: larger ones, and NaN, would give no distribution to draw from."""


class LevelDrafter(StatelessDrafter):
    """Fills ``tree`` from the root down; its ranks count a drafter's best tokens after the parent."""

    beta = 1.0
    """Weight of the drafter's opinion against the noise when a row is sampled and candidates are ranked; 1
    takes its distribution as it is, more sharpens it."""

    def __init__(self, tree: CandidateTree, device: torch.device | str):
        self._device = device
        self._shape(tree)

    def with_tree(self, tree: CandidateTree | None = None) -> Self:
        filled = copy.copy(self)
        filled._shape(self.tree if tree is None else tree)
        return filled

    def _shape(self, tree: CandidateTree) -> None:
        """Set all that follows from ``tree``, and forget earlier steps."""
        if tree.depth < 1:
            raise ValueError("tree must be at least 1 deep, got only the root; decode plainly instead")
        self.tree = tree
        self._widths = tree.width_by_depth
        self.topology: TreeTopology = tree.topology(self._device)
        depths = [len(path) for path in tree.paths]
        starts = [depths.index(depth) for depth in range(tree.depth + 1)] + [tree.num_nodes]
        self.levels = [slice(start, end) for start, end in pairwise(starts)]
        self._ranks = sent([path[-1] if path else 0 for path in tree.paths], self._device)

    @property
    def max_depth(self) -> int:
        return self.tree.depth

    @abstractmethod
    def logits_after(self, context: DraftContext, tokens: Tensor, nodes: slice) -> Tensor:
        """Logits (B, M, V') of what follows the M nodes of one level, in the columns of :attr:`token_map`.

        tokens (B, N) long is filled down to that level. Called once per level from the root down, the last
        level left out.
        """

    def draft(self, context: DraftContext) -> Draft:
        return self._ranked(context) if context.sampled is None else self._sampled(context)

    def sampled_kind(self, wanted: DraftKind) -> DraftKind:
        return kind_drawn(self.tree)

    def _ranked(self, context: DraftContext) -> Draft:
        tokens = context.root[:, None].repeat(1, self.tree.num_nodes)
        for depth, (nodes, children) in enumerate(pairwise(self.levels), start=1):
            logits = self.logits_after(context, tokens, nodes)
            best = self.best_tokens(context, depth, logits)  # (B, M, W)
            parents = self.topology.parents[0, children] - nodes.start
            tokens[:, children] = best[:, parents, self._ranks[children]]
        return Draft(tokens, self.topology)

    def best_tokens(self, context: DraftContext, depth: int, logits: Tensor) -> Tensor:
        """The tokens that logits (B, M, V') rank best at ``depth``, best first: (B, M, W) long."""
        columns = self.scores(context, depth, logits).topk(self._widths[depth - 1], dim=-1).indices
        return columns if self.token_map is None else self.token_map[columns]

    def scores(self, context: DraftContext, depth: int, logits: Tensor) -> Tensor:
        """The scores (B, M, V') that rank tokens at ``depth``, given their logits (B, M, V').

        The noise that will choose the token takes part when there is one (Gumbel coupling, arXiv 2408.07978).
        """
        if context.noise is None:
            return logits
        noise = self.noise_of_columns(context.noise, depth, len(context.root))
        return logits.float() * context.sharpness(self.beta) + noise[:, None]

    def noise_of_columns(self, noise: UpcomingNoise, depth: int, num_rows: int) -> Tensor:
        """Of the tokens that the columns of the drafter's logits stand for, at ``depth``: (B, V')."""
        tokens = None if self.token_map is None else self.token_map.expand(num_rows, -1)
        return noise.of_tokens(depth, tokens)

    def _sampled(self, context: DraftContext) -> Draft:
        def proposal_after(tokens: Tensor, nodes: slice) -> Tensor:
            logits = _bounded(self.logits_after(context, tokens, nodes))
            proposal = warp_logits(logits, context.processors).softmax(-1)
            if self.token_map is None:
                return proposal
            over_vocabulary = proposal.new_zeros(*proposal.shape[:-1], self.vocab_size)
            return over_vocabulary.index_copy(-1, self.token_map, proposal)

        assert context.seeds is not None
        noise = draft_noise(context.seeds, context.lengths - 1, self.tree.num_nodes, self.vocab_size)
        tokens, proposal = draw_tree(self.tree, context.root, proposal_after, noise)
        return Draft(tokens, self.topology, proposal)

    @property
    def token_map(self) -> Tensor | None:
        """(V',) long: the token id of each column of :meth:`logits_after`; None for all tokens."""
        return None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V, of the base."""


def _bounded(logits: Tensor) -> Tensor:
    """Logits clamped so that softmax gives a distribution, whatever the weights are: NaN becomes the
    lowest."""
    return logits.float().nan_to_num(nan=-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
