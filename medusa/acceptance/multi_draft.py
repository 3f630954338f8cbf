"""Recursive rejection over several drafts a node, drawn with or without replacement.

SpecInfer, arXiv 2305.09781 (algorithm 2), for independent drafts; without replacement as in Sequoia,
arXiv 2402.12374, and recursive rejection sampling, arXiv 2402.14160.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
from medusa.acceptance.residual import conclude, entry_at, excess, next_candidates, ratio, without


@dataclass(frozen=True)
class _Walk:
    """Where each row stands: the accepted path, and what is left of both distributions after it."""

    best: Tensor  # (B,) long
    depth: Tensor  # (B,) long
    on_path: Tensor  # (B, N) bool; nodes whose tokens from the root are the accepted ones (drafts may repeat)
    target: Tensor  # (B, V)
    proposal: Tensor  # (B, V)


def verify(
    draft: SampledDraft, noise: VerificationNoise, state: Any = None, *, replacement: bool = True
) -> Verdict:
    """Each child x in turn stays with probability min(1, p(x)/q(x)); a miss leaves p = norm(max(p - q, 0)).

    Without replacement a miss also removes x from q. Chains that share their accepted tokens are one
    path: the drafts of all of them are tried.
    """
    acceptance = torch.full_like(noise.uniform, torch.nan)
    acceptance[:, 0] = 1
    walk = _start(draft)
    for node in range(1, draft.tokens.shape[1]):
        walk, probability = _try_node(walk, node, draft, noise, replacement)
        acceptance[:, node] = probability
    return conclude(draft, noise, walk.best, walk.target, acceptance)


def _start(draft: SampledDraft) -> _Walk:
    root = torch.zeros_like(draft.tokens[:, 0])
    on_path = torch.zeros_like(draft.tokens, dtype=torch.bool)
    on_path[:, 0] = True
    return _Walk(root, root, on_path, draft.target[:, 0], draft.proposal[:, 0])


def _try_node(
    walk: _Walk, node: int, draft: SampledDraft, noise: VerificationNoise, replacement: bool
) -> tuple[_Walk, Tensor]:
    """The walk after ``node`` was tried, and what its coin was compared with (B,); NaN: it was not tried."""
    token = draft.tokens[:, node]
    p, q = entry_at(walk.target, token), entry_at(walk.proposal, token)
    candidates = next_candidates(walk.on_path, walk.depth, draft)
    tried = candidates[:, node] & (q > 0)
    probability = ratio(p, q).clamp(max=1)
    accepted = tried & (noise.uniform[:, node] < probability)
    missed = tried & ~accepted
    same = candidates & (draft.tokens == token[:, None]) & accepted[:, None]  # (B, N)
    proposal = walk.proposal if replacement else without(walk.proposal, token)
    after = _Walk(
        torch.where(accepted, node, walk.best),
        walk.depth + accepted,
        walk.on_path | same,
        _choose(accepted, draft.target[:, node], missed, excess(walk.target, walk.proposal), walk.target),
        _choose(accepted, draft.proposal[:, node], missed, proposal, walk.proposal),
    )
    return after, probability.masked_fill(~tried, torch.nan)


def _choose(first: Tensor, a: Tensor, second: Tensor, b: Tensor, otherwise: Tensor) -> Tensor:
    """Rows (B, V) of ``a`` where ``first`` (B,) holds, of ``b`` where ``second`` does, else ``otherwise``."""
    return torch.where(first[:, None], a, torch.where(second[:, None], b, otherwise))


MULTI_DRAFT = VerificationRule(
    "multi_draft",
    verify,
    (DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN),
    "recursive rejection over independent drafts (SpecInfer)",
)

MULTI_DRAFT_WITHOUT_REPLACEMENT = VerificationRule(
    "multi_draft_without_replacement",
    partial(verify, replacement=False),
    (DraftKind.WITHOUT_REPLACEMENT, DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN),
    "recursive rejection over drafts that differ",
)
