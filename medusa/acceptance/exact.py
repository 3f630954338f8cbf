"""The exact rule: a node stays if its token is the one that the base model writes after its parent.

It takes candidates as they are, wherever they come from, and gives the text of plain decoding: for all nodes
at once, or from the root down, each row by itself or in lockstep.

A logits processor or stopping criterion of the caller's own may keep state from call to call (a grammar
does), know its rows by their index in the batch, or fail after a token that it has forbidden. It behaves as
with ``transformers`` only when it is called in the same way: once for each position, in order, with the whole
batch. So in lockstep the tree is walked one position at a time. The scores at each row's current node are
processed, a token is chosen from them, the criteria are called, and every row moves to the child that holds
its token. Where a row has no such child, the step ends for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from medusa.acceptance.sampling import UpcomingNoise, choose_next
from medusa.trees.candidate_tree import TreeTopology


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one step, for every row."""

    path: Tensor
    """(B, L) long: the accepted nodes from the root down; past ``num_accepted`` the last one repeats."""
    num_accepted: Tensor
    """(B,) long: accepted nodes, the root token not counted."""
    next_token: Tensor
    """(B,) long: what follows the accepted path; the next root token."""
    chose_nan: Tensor | None = None
    """(B,) bool: a token was chosen by a NaN score; None if this was not checked."""
    rule_state: Any = None
    """The state of a rule for sampled drafts after this step."""

    def tokens(self, draft_tokens: Tensor) -> Tensor:
        """New tokens of the step, (B, L) long: the accepted drafts, then ``next_token``, repeated."""
        if self.path.shape[1] == 1:
            return self.next_token[:, None]
        shifted = torch.cat([self.path[:, 1:], self.path[:, -1:]], dim=1)
        slots = torch.arange(shifted.shape[1], device=shifted.device)
        is_draft = slots < self.num_accepted[:, None]
        return torch.where(is_draft, draft_tokens.gather(1, shifted), self.next_token[:, None])


def accept_equal(draft_tokens: Tensor, chosen: Tensor, topology: TreeTopology) -> Acceptance:
    """The exact rule: a node stays if it and all before it equal the base's choice at their parents.

    draft_tokens (B, N) long, chosen (B, N) long: the base's choice after each node, which depends only on the
    node's logits, the seed and the position. The deepest such node wins, and the base's choice there is the
    next token; it is never drawn again. Hence the output equals decoding one token at a time, whatever was
    drafted.
    """
    if topology.num_nodes == 1:  # plain decoding
        nothing = torch.zeros_like(chosen)
        return Acceptance(nothing, nothing[:, 0], chosen[:, 0])
    parents = topology.parents.expand_as(draft_tokens)
    matches = draft_tokens == chosen.gather(1, parents)
    matches[:, 0] = True
    return deepest_path(matches, chosen, topology)


def accept_by_walking(
    draft_tokens: Tensor,
    topology: TreeTopology,
    choose_after: Callable[[list[int], list[int], int], list[int]],
    has_ended: Callable[[int], bool] = lambda row: False,
    in_lockstep: bool = False,
) -> Acceptance:
    """The result of :func:`accept_equal`, found from the root down: the base's choice is computed only at
    accepted nodes.

    This is less work where choices are expensive, as over a large vocabulary; the host waits for the device
    at each depth.

    Args:
        draft_tokens: (B, N) long.
        choose_after: the base's choice in some rows after one node of each, all at one depth.
        has_ended: whether a row ends with its last chosen token.
        in_lockstep: whether all rows that have not ended stop where one of them does.
    """
    tokens = draft_tokens.tolist()
    parents = topology.parents.expand_as(draft_tokens).tolist()
    standing: list[list[int]] = [[0] for _ in tokens]  # the nodes of the text so far: siblings may be equal
    next_token = [0] * len(tokens)
    running = list(range(len(tokens)))
    depth = 0
    while running:
        chosen = choose_after(running, [standing[row][0] for row in running], depth)
        for row, token in zip(running, chosen, strict=True):
            next_token[row] = token
        going_on = [row for row in running if not has_ended(row)]
        below = {
            row: [
                node
                for node, token in enumerate(tokens[row])
                if node > 0 and token == next_token[row] and parents[row][node] in standing[row]
            ]
            for row in going_on
        }
        running = [row for row in going_on if below[row]]
        depth += 1
        if in_lockstep and len(running) < len(going_on):
            break
        for row in running:
            standing[row] = below[row]
    best = topology.parents.new_tensor([nodes[0] for nodes in standing])
    return accepted_up_to(best, best.new_tensor(next_token), topology)


def deepest_path(stays: Tensor, chosen: Tensor, topology: TreeTopology) -> Acceptance:
    """The path to the deepest node all of whose path ``stays`` (B, N) bool; the base's choice there, of
    ``chosen`` (B, N) long, follows."""
    broken = (topology.ancestors & ~stays[:, None, :]).any(dim=2)  # (B, N)
    depths = topology.depths.expand_as(stays)
    best = torch.where(broken, -1, depths).argmax(dim=1)  # (B,)
    return accepted_up_to(best, chosen.gather(1, best[:, None]).squeeze(1), topology)


def accepted_up_to(best: Tensor, next_token: Tensor, topology: TreeTopology) -> Acceptance:
    """The path that ends in node ``best`` (B,) long, followed by ``next_token`` (B,) long."""
    lineage = topology.lineage.expand(len(best), -1, -1)
    path = lineage.gather(1, best[:, None, None].expand(-1, 1, lineage.shape[2])).squeeze(1)
    depths = topology.depths.expand(len(best), -1)
    return Acceptance(path, depths.gather(1, best[:, None]).squeeze(1), next_token)


def accept_typical(
    draft_tokens: Tensor,
    chosen: Tensor,
    scores: Tensor,
    topology: TreeTopology,
    threshold: float = 0.09,
    alpha: float = 0.3,
) -> Acceptance:
    """LOSSY: a node stays if the base finds its token plausible enough (arXiv 2401.10774, section 3.3.2).

    A token x stays when p(x) > min(threshold, alpha * exp(-H(p))), p = softmax of the parent's
    ``scores`` (B, N, V) and H its entropy in nats. The text differs from plain decoding, and its
    distribution from the model's.
    """
    log_p = scores.log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(dim=-1)  # (B, N)
    bound = (alpha * torch.exp(-entropy)).clamp(max=threshold)
    parents = topology.parents.expand_as(draft_tokens)
    parent_log_p = log_p.gather(1, parents[..., None].expand_as(log_p))
    probability = parent_log_p.gather(2, draft_tokens[..., None]).squeeze(2).exp()
    plausible = probability > bound.gather(1, parents)
    plausible[:, 0] = True
    return deepest_path(plausible, chosen, topology)


# ------------------------------------------------------------------ in lockstep


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
        self._processors = processors
        self._criteria = criteria
        self._max_length = prompts.shape[1] + max_new_tokens
        self._eos_ids = eos_ids
        self._pad_id = pad_id
        self._rows_end_alone = rows_end_alone
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
        stops = self._criteria(self.sequences, None).tolist() if self._criteria else self._is_met
        for row, token in zip(rows, tokens, strict=True):
            self._is_met[row] |= stops[row] or is_full or token in self._eos_ids

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
    """The exact rule, with the same number of tokens for all ``rows``, or fewer where the row ends.

    draft_tokens (B, N) long, logits (B, N, V); row r is ``rows[r]`` in ``batch``.
    """

    def choose_after(running: list[int], nodes: list[int], depth: int) -> list[int]:
        indices = [rows[row] for row in running]
        scores = batch.scores(indices, logits[running, nodes])
        chosen = choose_next(scores, noise, depth + 1, running)
        batch.add(indices, chosen.tolist())
        return chosen.tolist()

    return accept_by_walking(
        draft_tokens, topology, choose_after, lambda row: batch.has_ended(rows[row]), in_lockstep=True
    )
