"""Rows in lockstep, for processors and criteria that must be called as ``transformers`` calls them.

A logits processor or stopping criterion of the caller's own may keep state from call to call (a grammar
does), know its rows by their index in the batch, or fail after a token that it has forbidden. It does what it
does with ``transformers`` only when it is called as there: once for each position, in order, with the whole
batch.

So the tree is walked one position at a time. The scores where the rows stand are processed, a token is chosen
after each, the criteria are asked, and every row moves to the child that holds its token. Where a row has no
such child, the step ends for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from medusa.acceptance.exact import Acceptance, accepted_up_to
from medusa.acceptance.sampling import UpcomingNoise, choose
from medusa.trees.candidate_tree import TreeTopology


class LockstepBatch:
    """The batch as the caller sees it grow, padding and ended rows included.

    Args:
        prompts: (B, T) long, as the caller gave them.
        pad_id: what rows that have ended are filled with.
        rows_end_alone: whether a row ends by itself. Without an end-of-sequence criterion ``transformers``
            has every row go on until all have ended.
    """

    def __init__(
        self,
        prompts: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        max_new_tokens: int,
        eos_ids: frozenset[int],
        pad_id: int,
        rows_end_alone: bool,
    ):
        self.sequences = prompts
        """(B, T + new) long."""
        self._processors, self._criteria = processors, criteria
        self._max_length, self._eos_ids = prompts.shape[1] + max_new_tokens, eos_ids
        self._pad_id, self._rows_end_alone = pad_id, rows_end_alone
        self._is_met = [False] * len(prompts)

    def scores(self, rows: list[int], logits: Tensor) -> Tensor:
        """Scores (R, V) float32 of the next token of ``rows``, whose logits are (R, V); others have zeros."""
        scores = logits.new_zeros(len(self.sequences), logits.shape[1], dtype=torch.float32)
        scores[rows] = logits.float()
        return self._processors(cast(torch.LongTensor, self.sequences), cast(torch.FloatTensor, scores))[rows]

    def add(self, rows: list[int], tokens: list[int]) -> None:
        """Give ``rows`` a token each, the others padding, and ask the criteria."""
        column = self.sequences.new_full((len(self.sequences), 1), self._pad_id)
        column[rows, 0] = column.new_tensor(tokens)
        self.sequences = torch.cat([self.sequences, column], dim=1)
        is_full = self.sequences.shape[1] >= self._max_length
        asked = self._criteria(self.sequences, None).tolist() if self._criteria else self._is_met
        for row, token in zip(rows, tokens, strict=True):
            self._is_met[row] |= asked[row] or is_full or token in self._eos_ids

    def has_ended(self, row: int) -> bool:
        return self._is_met[row] if self._rows_end_alone else all(self._is_met)


def accept_in_lockstep(
    batch: LockstepBatch,
    rows: Sequence[int],
    draft_tokens: Tensor,
    topology: TreeTopology,
    logits: Tensor,
    noise: UpcomingNoise | None,
) -> Acceptance:
    """The exact rule, with as many tokens for every one of ``rows``, or fewer where the row ends.

    draft_tokens (B, N) long, logits (B, N, V); row r is ``rows[r]`` in ``batch``.
    """
    tokens, parents = draft_tokens.tolist(), topology.parents.expand_as(draft_tokens).tolist()
    standing: list[list[int]] = [[0] for _ in rows]  # the nodes of the text so far: siblings may be equal
    next_token = [0] * len(rows)
    running, depth, can_go_on = list(range(len(rows))), 0, True
    while can_go_on:
        nodes = [standing[row][0] for row in running]
        indices = [rows[row] for row in running]
        scores = batch.scores(indices, logits[running, nodes])
        chosen = choose(scores, None if noise is None else noise.until(depth + 1)[running, depth]).tolist()
        batch.add(indices, chosen)
        for row, token in zip(running, chosen, strict=True):
            next_token[row] = token
        running = [row for row in running if not batch.has_ended(rows[row])]
        below = {
            row: [
                node
                for node, token in enumerate(tokens[row])
                if node > 0 and parents[row][node] in standing[row] and token == next_token[row]
            ]
            for row in running
        }
        depth, can_go_on = depth + 1, bool(running) and all(below.values())
        for row, nodes in below.items() if can_go_on else ():
            standing[row] = nodes
    best = topology.parents.new_tensor([nodes[0] for nodes in standing])
    return accepted_up_to(best, best.new_tensor(next_token), topology)
