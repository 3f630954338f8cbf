"""A drafter for static steps that knows the answers: it is often right, and made of tensors alone."""

from __future__ import annotations

import torch
from conftest import VOCAB_SIZE
from torch import Tensor

from medusa import CandidateTree
from medusa.drafters.protocol import Draft, DraftContext, StatelessDrafter


class StaticOracle(StatelessDrafter):
    """Puts the right token at one rank or another, and wrong ones at the rest.

    answers: per row, the whole sequence (unpadded prompt and answer). Where ``always`` it is at rank 0.
    """

    def __init__(self, answers: list[list[int]], tree: CandidateTree, always: bool = False):
        longest = max(map(len, answers))
        self.answers = torch.tensor([row + [0] * (longest - len(row)) for row in answers])
        self.tree, self.always = tree, always
        self.topology = tree.topology()
        self.ranks = torch.tensor([path[-1] if path else 0 for path in tree.paths])
        self.static_key = id(self)

    @property
    def max_depth(self) -> int:
        return self.tree.depth

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    def tensors(self) -> list[Tensor]:
        return []

    def draft(self, context: DraftContext) -> Draft:
        at = context.lengths[:, None] - 1 + self.topology.depths  # (B, N)
        right = self.answers.gather(1, at.clamp(max=self.answers.shape[1] - 1))
        right_rank = torch.zeros_like(at) if self.always else at * 7 % 3
        wrong = (right + 1 + self.ranks) % VOCAB_SIZE
        tokens = torch.where(self.ranks == right_rank, right, wrong)
        tokens = torch.where(self.topology.depths == 0, context.root[:, None], tokens)
        return Draft(tokens, self.topology)

    def keep_rows(self, rows: Tensor) -> None:
        self.answers = self.answers[rows]
