"""SpecTr's k-sequential selection: k independent drafts, each accepted against a scaled-down target.

arXiv 2310.15141, algorithm 3 (one token) applied level by level as in its algorithm 2. With one draft
it is token verification.
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
from medusa.acceptance.residual import conclude, next_candidates, normalised, ratio, row_at


def verify(draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
    """Level by level: the first of k drafts whose coin is below min(1, p / (rho q)) stays.

    Drafts that agree with the accepted tokens so far go on to the next level.
    """
    root = torch.zeros_like(draft.tokens[:, 0])
    on_path = torch.zeros_like(draft.tokens, dtype=torch.bool)
    on_path[:, 0] = True
    best, depth = root, root
    acceptance = torch.where(on_path, 1.0, torch.nan).to(draft.target.dtype)
    residual = draft.target[:, 0]
    for _ in range(draft.topology.max_depth):
        candidates = next_candidates(on_path, depth, draft)
        chosen, accepted, residual, tested = select(draft, noise.uniform, best, candidates)
        acceptance = torch.where(tested.isnan(), acceptance, tested)
        token = draft.tokens.gather(1, chosen[:, None])
        on_path = on_path | (candidates & (draft.tokens == token) & accepted[:, None])
        best, depth = torch.where(accepted, chosen, best), depth + accepted
    return conclude(draft, noise, best, residual, acceptance)


def select(
    draft: SampledDraft, uniform: Tensor, node: Tensor, candidates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One k-sequential selection among ``candidates`` (B, N) bool, the drafts after ``node`` (B,) long.

    Returns the first accepted candidate (B,) long and whether there is one (B,) bool; what the next token is
    to be drawn from (B, V): the residual after ``node``, or the target after the accepted candidate; and the
    probability of each coin (B, N), NaN for nodes that are no candidates.
    """
    p, q = row_at(draft.target, node), row_at(draft.proposal, node)
    drafted = q.gather(1, draft.tokens)  # (B, N)
    num_drafts = candidates.sum(1)
    rho = division_factor(p, q, num_drafts)
    probability = ratio(p.gather(1, draft.tokens), rho[:, None] * drafted).clamp(max=1)
    hit = candidates & (uniform < probability)
    accepted = hit.any(1)
    chosen = torch.where(accepted, hit.long().argmax(1), node)
    left = torch.where(
        accepted[:, None], row_at(draft.target, chosen), residual_after_all(p, q, rho, num_drafts)
    )
    return chosen, accepted, left, probability.masked_fill(~candidates, torch.nan)


def overlap(p: Tensor, q: Tensor, rho: Tensor) -> Tensor:
    """beta(rho) = sum of min(p / rho, q): how often one draft is accepted, (B,)."""
    return torch.minimum(p / rho[:, None], q).sum(-1)


def some_accepted(beta: Tensor, num_drafts: Tensor) -> Tensor:
    """1 - (1 - beta)^k: how often one of k drafts is accepted, (B,)."""
    return 1 - (1 - beta).clamp(min=0) ** num_drafts


def division_factor(p: Tensor, q: Tensor, num_drafts: Tensor) -> Tensor:
    """The smallest rho in [1, k] with rho beta(rho) >= 1 - (1 - beta(rho))^k, by bisection; (B,).

    Any such rho is exact, the smallest accepts most; the bisection returns its upper end, which is one.
    A slack of the size of the rounding in a sum over V lets p = q have rho = 1.
    """
    slack, num_halvings = (1e-6, 24) if p.dtype == torch.float32 else (1e-13, 52)
    low = torch.ones_like(p[:, 0])
    high = num_drafts.to(p.dtype).clamp(min=1)

    def enough(rho: Tensor) -> Tensor:
        beta = overlap(p, q, rho)
        return rho * beta >= some_accepted(beta, num_drafts) - slack

    high = torch.where(enough(low), low, high)
    for _ in range(num_halvings):
        middle = (low + high) / 2
        fits = enough(middle)
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high


def residual_after_all(p: Tensor, q: Tensor, rho: Tensor, num_drafts: Tensor) -> Tensor:
    """What the next token is drawn from when none of k drafts stayed: p minus what they cover, (B, V)."""
    beta = overlap(p, q, rho)
    covered = ratio(some_accepted(beta, num_drafts), beta)[:, None] * torch.minimum(p / rho[:, None], q)
    return normalised((p - covered).clamp(min=0), fallback=p)


SPECTR = VerificationRule(
    "spectr",
    verify,
    (DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN),
    "k-sequential selection among independent drafts (SpecTr)",
)
