"""Which nodes of a draft each row accepts, by its request's acceptance rule.

The rules are in :mod:`medusa.acceptance`. This module gives them what they ask for: the scores after each
row's logits processors, and the noise by which the base chooses.

Shapes beside those of :mod:`medusa`: R of the B rows, M of the N nodes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from medusa.acceptance.exact import (
    Acceptance,
    accept_by_walking,
    accept_equal,
    accept_in_lockstep,
    accept_typical,
    accepted_up_to,
)
from medusa.acceptance.protocol import SampledDraft, verification_noise
from medusa.acceptance.sampling import NodePaths, UpcomingNoise, choose, choose_next, process_node_logits
from medusa.decoding.state import DecodeState, Row
from medusa.drafters.protocol import Draft
from medusa.trees.candidate_tree import TreeTopology

SCORES_AT_ONCE = 2**21
"""Up to this number of scores (B * N * V), choosing the tokens of all nodes at once is faster than walking
down the accepted path."""


class RowsFailed(RuntimeError):
    """A step failed because of ``rows``; nothing was committed."""

    def __init__(self, rows: list[Row]):
        super().__init__(f"{len(rows)} rows made a step fail")
        self.rows = rows


def accept(
    state: DecodeState,
    draft: Draft,
    logits: Tensor,
    noise: UpcomingNoise | None,
    *,
    may_wait: bool = True,
) -> Acceptance:
    """The accepted path of each row, given the logits (B, N, V) after all nodes.

    ``state`` is not changed, except in lockstep, where the caller's processors and criteria are called. If
    ``may_wait`` is False, nothing is read on the host.
    """
    if state.sampled is not None:
        return _accept_sampled(state, draft, logits)
    if state.lockstep_batch is not None:
        indices = [row.index for row in state.rows]
        return accept_in_lockstep(state.lockstep_batch, indices, draft.tokens, draft.topology, logits, noise)
    if may_wait and _walking_is_faster(state, draft, logits):
        return _accept_by_walking(state, draft, logits, noise)
    scores = node_scores(state, draft, logits)
    chosen = _chosen(scores, noise, draft.topology)
    if state.request.acceptance == "typical":
        acceptance = accept_typical(draft.tokens, chosen, scores, draft.topology)
    else:
        acceptance = accept_equal(draft.tokens, chosen, draft.topology)
    if not state.refuses_nan:
        return acceptance
    chosen_scores = scores.gather(2, chosen[..., None]).squeeze(2)  # (B, N)
    on_path = chosen_scores.gather(1, acceptance.path)  # (B, L)
    return replace(acceptance, chose_nan=on_path.isnan().any(1))


def _walking_is_faster(state: DecodeState, draft: Draft, logits: Tensor) -> bool:
    """Whether scoring only accepted nodes, one depth after the other, is faster than scoring all nodes.

    Not on a graphics card: the host would wait for it at each depth.
    """
    num_nodes = draft.topology.num_nodes
    if logits.device.type != "cpu" or num_nodes == 1 or state.request.acceptance == "typical":
        return False
    is_expensive = state.seeds is not None or any(row.request.processors for row in state.rows)
    return is_expensive or len(logits) * num_nodes * logits.shape[2] > SCORES_AT_ONCE


def _accept_by_walking(
    state: DecodeState, draft: Draft, logits: Tensor, noise: UpcomingNoise | None
) -> Acceptance:
    """The exact rule; only the nodes of the accepted path are scored."""
    chose_nan = [False] * len(logits)

    def choose_after(rows: list[int], nodes: list[int], depth: int) -> list[int]:
        scores = node_scores(state, draft, logits[rows, nodes][:, None], rows, nodes)[:, 0]  # (R, V)
        chosen = choose_next(scores, noise, depth + 1, rows)
        if state.refuses_nan:
            for row, is_nan in zip(rows, scores.gather(1, chosen[:, None]).isnan().tolist(), strict=True):
                chose_nan[row] |= is_nan[0]
        return chosen.tolist()

    acceptance = accept_by_walking(draft.tokens, draft.topology, choose_after)
    if not state.refuses_nan:
        return acceptance
    return replace(acceptance, chose_nan=torch.tensor(chose_nan, device=logits.device))


def _accept_sampled(state: DecodeState, draft: Draft, logits: Tensor) -> Acceptance:
    """The path that a rule for sampled drafts accepts. Its noise is independent of the drafter's."""
    rule = state.request.rule
    seeds = state.seeds
    assert rule is not None and seeds is not None and draft.proposal is not None
    scores = node_scores(state, draft, logits)
    sampled = SampledDraft(draft.tokens, draft.topology, scores.softmax(-1), draft.proposal)
    noise = verification_noise(seeds, state.lengths - 1, draft.topology.num_nodes, scores.shape[-1])
    verdict = rule.verify(sampled, noise, state.rule_state)
    acceptance = accepted_up_to(verdict.best, verdict.next_token, draft.topology)
    return replace(acceptance, rule_state=verdict.state)


def _chosen(scores: Tensor, noise: UpcomingNoise | None, topology: TreeTopology) -> Tensor:
    """The token after each node, (B, N) long, given the scores (B, N, V)."""
    if topology.num_nodes == 1:
        return choose_next(scores[:, 0], noise, 1)[:, None]
    if noise is None:
        return choose(scores, None)
    depths = topology.depths.expand(len(scores), -1)  # (B, N)
    by_depth = noise.until(topology.max_depth + 1)  # (B, L, V)
    return choose(scores, by_depth.gather(1, depths[..., None].expand(-1, -1, by_depth.shape[2])))


def node_scores(
    state: DecodeState,
    draft: Draft,
    logits: Tensor,
    rows: list[int] | None = None,
    nodes: list[int] | None = None,
) -> Tensor:
    """Scores (R, M, V) float32: logits (R, M, V) after the logits processors of each row.

    By default all rows and nodes: R = B, M = N. With ``rows`` and ``nodes`` (one node of each row): M = 1.

    Raises:
        RowsFailed: a processor failed.
    """
    rows = list(range(len(logits))) if rows is None else rows
    groups = [] if state.settings is not None else state.rows_by_processors(rows)
    if state.settings is None and not any(processors for processors, _ in groups):
        return logits.float()
    paths = NodePaths(
        prefix=state.tokens,
        prefix_lengths=state.lengths - 1,
        padding=state.padding,
        tokens=draft.tokens,
        topology=draft.topology,
    )
    if state.settings is not None:
        return state.settings.scores(logits, paths)
    node_index = None if nodes is None else draft.tokens.new_tensor(nodes)[:, None]  # (R, 1)
    if len(groups) == 1 and len(rows) == len(state.rows):
        return process_node_logits(logits, groups[0][0], paths, node_index)
    scores = logits.to(torch.float32, copy=True)
    for processors, members in groups:
        if not processors:
            continue
        index = torch.tensor(members, device=scores.device)
        members_rows = [rows[member] for member in members]
        try:
            scores[index] = process_node_logits(
                logits[index],
                processors,
                paths.of_rows(torch.tensor(members_rows, device=scores.device)),
                None if node_index is None else node_index[index],
            )
        except Exception as error:
            raise RowsFailed([state.rows[row] for row in members_rows]) from error
    return scores
