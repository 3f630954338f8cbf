"""Traversal verification: a tree drawn without replacement, judged from its leaves to its root.

arXiv 2505.12398. On a chain it is block verification; on a tree it is to recursive rejection what block
verification is to token verification.

The paper's traversal visits a node after its children and stops at the first it accepts. What it holds
against each coin does not depend on the coins, so all nodes are judged first, parents before children, and
the traversal reduces to finding the first accepted node in the order of the visit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medusa.acceptance.protocol import (
    DraftKind,
    SampledDraft,
    Verdict,
    VerificationNoise,
    VerificationRule,
)
from medusa.acceptance.residual import conclude, entry_at, kept_share, normalised, ratio, row_at, without


def verify(draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
    """The first node, children before parents and siblings in draw order, whose coin is below its weight."""
    acceptance, residual = judge(draft)
    best = first_accepted(draft, noise.uniform < acceptance)
    return conclude(draft, noise, best, row_at(residual, best), acceptance)


def judge(draft: SampledDraft) -> tuple[Tensor, Tensor]:
    """The weight of each node once its children are rejected (B, N), and what is then left of p (B, N, V).

    A child x starts with min(1, a p(x)/q(x)) of its parent's weight a; rejecting it turns the parent's
    p into norm(max(a p - q, 0)), a into R / (R + 1 - a) with R the mass of that, and takes x out of q.
    The root stays whatever its weight.
    """
    parents = draft.topology.parents.expand_as(draft.tokens)
    target, proposal = draft.target.clone(), draft.proposal.clone()
    weight = torch.ones_like(draft.target[..., 0])
    for node in range(1, draft.tokens.shape[1]):
        parent, token = parents[:, node], draft.tokens[:, node]
        p, q, a = row_at(target, parent), row_at(proposal, parent), entry_at(weight, parent)
        drawn = entry_at(q, token)
        weight[:, node] = (a * ratio(entry_at(p, token), drawn)).clamp(max=1)
        excess = (a[:, None] * p - q).clamp(min=0)
        left = excess.sum(-1)
        was_drawn = drawn > 0
        _put(weight, parent, torch.where(was_drawn, kept_share(left, a), a))
        _put(target, parent, torch.where(was_drawn[:, None], normalised(excess, fallback=p), p))
        _put(proposal, parent, torch.where(was_drawn[:, None], without(q, token), q))
    weight[:, 0] = 1
    return weight, target


def _put(values: Tensor, node: Tensor, rows: Tensor) -> None:
    """Write ``rows`` (B, ...) into ``values`` (B, N, ...) at ``node`` (B,) long, in place."""
    values[torch.arange(values.shape[0], device=values.device), node] = rows


def first_accepted(draft: SampledDraft, accepted: Tensor) -> Tensor:
    """The first accepted node in the order of the visit (B,) long; ``accepted`` is (B, N) bool.

    Going down from the root, the first child whose subtree holds an accepted node leads to it.
    """
    num_nodes = accepted.shape[1]
    parents = draft.topology.parents.expand_as(draft.tokens)
    nodes = torch.arange(num_nodes, device=accepted.device)
    holds = (draft.topology.ancestors & accepted[:, :, None]).any(1)  # (B, N)
    best = torch.zeros_like(draft.tokens[:, 0])
    for _ in range(draft.topology.max_depth):
        leads = holds & (parents == best[:, None]) & (nodes > 0)
        first = torch.where(leads, nodes, num_nodes).amin(1)
        best = torch.where(first < num_nodes, first, best)
    return best


TRAVERSAL = VerificationRule(
    "traversal",
    verify,
    (DraftKind.WITHOUT_REPLACEMENT, DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN),
    "leaves to root over a tree of drafts that differ",
)
