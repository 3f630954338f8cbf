"""Ranks of true tokens among the guesses of heads: statistics for heads and trees.

From the joint ranks of all heads follow top-k accuracy per head, which rank path would have been right and
how often, the tree with the most accepted tokens, and the tokens per step that decoding this very text with
a tree would have shown. :mod:`medusa.heads.calibration` counts them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from medusa.trees.candidate_tree import CandidateTree, RankPath, best_tree, grown_path_values

MISS = -1
"""Rank of a true token that is not among the head's ``max_rank`` best guesses."""
UNKNOWN = -2
"""Rank where the answer is already over."""
UNSEEN = 0.1
"""Times that a rank counts as right before any text is read."""
PRIOR_STRENGTH = 64.0
"""Number of observations by which a joint rate is drawn towards the head's own."""


@dataclass(frozen=True)
class RankCounts:
    """Ranks of the true tokens, and statistics of them; ``a + b`` is both texts together."""

    ranks: tuple[Tensor, ...]
    """One (P, K) int16 tensor per answer: position by position, head by head; MISS or UNKNOWN below 0."""
    max_rank: int
    """How many guesses of each head were looked at."""

    def __add__(self, other: RankCounts) -> RankCounts:
        if (self.max_rank, self.num_heads) != (other.max_rank, other.num_heads):
            raise ValueError(
                f"counts to add must agree in (max_rank, heads): {(self.max_rank, self.num_heads)} "
                f"and {(other.max_rank, other.num_heads)}"
            )
        return replace(self, ranks=self.ranks + other.ranks)

    @property
    def num_heads(self) -> int:
        """K."""
        return self.ranks[0].shape[1]

    @cached_property
    def head_totals(self) -> list[int]:
        """Positions at which each head's true token is known."""
        return (torch.cat(self.ranks) != UNKNOWN).sum(dim=0).tolist()

    @cached_property
    def head_counts(self) -> Tensor:
        """[d-1, r] = positions at which the rank-r guess of head d was right, (K, max_rank) long."""
        ranks = torch.cat(self.ranks).long()
        return torch.stack([(ranks == rank).sum(dim=0) for rank in range(self.max_rank)], dim=1)

    @cached_property
    def num_positions(self) -> int:
        """Positions at which every head's true token is known; the joint counts are over these."""
        return self.head_totals[-1]

    @cached_property
    def joint_counts(self) -> Counter[RankPath]:
        """[path] = how often every guess on ``path`` was right, over :attr:`num_positions`."""
        longest = Counter(
            _right_path(row) for ranks in self.ranks for row in ranks.tolist() if row[-1] != UNKNOWN
        )
        counts: Counter[RankPath] = Counter()
        for path, count in longest.items():
            for depth in range(1, len(path) + 1):
                counts[path[:depth]] += count
        return counts

    def top_k_accuracy(self, k: int) -> list[float]:
        """[d-1] = how often the true token was among the k best guesses of head d; NaN where never known."""
        if not 1 <= k <= self.max_rank:
            raise ValueError(
                f"k must be in [1, max_rank={self.max_rank}], got {k}; calibrate with more ranks"
            )
        hits = self.head_counts[:, :k].sum(dim=1).tolist()
        return [hit / total if total else math.nan for hit, total in zip(hits, self.head_totals, strict=True)]

    def path_values(self, max_depth: int | None = None, max_paths: int = 4096) -> dict[RankPath, float]:
        """Estimated probability that every guess on a path is right, for the paths worth most.

        Given its parent, a path's rate is its joint count, drawn towards the head's own rank rates as
        if those had been seen :data:`PRIOR_STRENGTH` times. Where counts are many the joint counts decide;
        where there are none the value is the product of independent depths. Ranks never seen count a
        little, so a tree of any size can be built.
        """
        if not self.num_positions:
            raise ValueError(
                f"no answer is long enough to see all {self.num_heads} heads guess (it takes "
                f"{self.num_heads + 1} tokens); calibrate on longer answers"
            )
        totals = torch.tensor(self.head_totals)[:, None] + UNSEEN * self.max_rank
        alone = ((self.head_counts + UNSEEN) / totals).tolist()
        num_ranks = self.max_rank
        depth_limit = self.num_heads if max_depth is None else min(max_depth, self.num_heads)

        def child_rates(path: RankPath) -> list[float]:
            if len(path) == depth_limit:
                return []
            seen = self.joint_counts[path] if path else self.num_positions
            return [
                (self.joint_counts[(*path, rank)] + PRIOR_STRENGTH * rate) / (seen + PRIOR_STRENGTH)
                for rank, rate in enumerate(alone[len(path)][:num_ranks])
            ]

        return grown_path_values(child_rates, max_paths)

    def best_tree(self, num_nodes: int, max_depth: int | None = None) -> CandidateTree:
        """The tree of ``num_nodes`` nodes (the root included) that should accept most."""
        return best_tree(self.path_values(max_depth=max_depth, max_paths=num_nodes), num_nodes)

    def replay(self, tree: CandidateTree) -> list[tuple[int, int]]:
        """The steps that greedy decoding of each answer with ``tree`` takes, and the tokens they emit.

        A step starts where the one before it ended, so more steps begin after a hard token.
        """
        nodes = set(tree.paths)
        replayed = []
        for ranks in self.ranks:
            positions = ranks.tolist()
            last = len(positions) - 1
            root = 0
            num_steps = 0
            while root < last:
                path = _right_path(positions[root])
                accepted = next(depth for depth in range(len(path), -1, -1) if path[:depth] in nodes)
                num_steps += 1
                root = min(root + accepted + 1, last)
            replayed.append((num_steps, root))
        return replayed

    def held_out_replay(self, num_nodes: int, max_depth: int | None = None) -> np.ndarray:
        """:meth:`replay`, (A, 2) long, with the best tree of ``num_nodes`` nodes chosen on other answers.

        The answers are dealt out in two halves; each half is decoded with the best tree of the other.
        """
        even, odd = self.halves()
        replayed = np.zeros((len(self.ranks), 2), dtype=np.int64)
        replayed[::2] = even.replay(odd.best_tree(num_nodes, max_depth))
        replayed[1::2] = odd.replay(even.best_tree(num_nodes, max_depth))
        return replayed

    def held_out_tokens_per_step(self, num_nodes: int, max_depth: int | None = None) -> float:
        """Tokens per step that a best tree of ``num_nodes`` nodes gives on answers it was not chosen on."""
        num_steps, num_tokens = self.held_out_replay(num_nodes, max_depth).sum(0)
        return float(num_tokens / num_steps) if num_steps else 1.0

    def halves(self) -> tuple[RankCounts, RankCounts]:
        """The answers dealt out in two, to choose on one half and judge on the other."""
        if len(self.ranks) < 2:
            raise ValueError(f"two halves need at least 2 answers, got {len(self.ranks)}")
        return replace(self, ranks=self.ranks[::2]), replace(self, ranks=self.ranks[1::2])


def _right_path(ranks: Sequence[int]) -> RankPath:
    """The ranks up to the first head that missed."""
    length = next((index for index, rank in enumerate(ranks) if rank < 0), len(ranks))
    return tuple(ranks[:length])
