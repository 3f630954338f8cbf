"""Block verification: the prefixes of a chain are tested as wholes, and the longest accepted one wins.

arXiv 2403.10444, algorithm 2. Never accepts less in expectation than token verification.
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
from medusa.acceptance.residual import (
    conclude,
    deepest,
    drafted_probability,
    kept_share,
    normalised,
    open_proposal,
    ratio,
    row_at,
)


def verify(draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
    """Prefix X^i stays with probability R_i / (R_i + 1 - a_i), R_i = sum of max(a_i p - q, 0) after it.

    The test runs over all N = g + 1 nodes. With q = 0 after the last draft token, R_g = a_g, and the
    formula gives a_g there by itself.
    """
    proposal = open_proposal(draft.proposal)
    a = prefix_weight(draft, proposal)
    weights = (a[..., None] * draft.target - proposal).clamp(min=0)  # (B, N, V)
    left = weights.sum(-1)
    acceptance = kept_share(left, a)
    acceptance[:, 0] = 1
    best = deepest(noise.uniform < acceptance)
    residual = normalised(row_at(weights, best), fallback=row_at(draft.target, best))
    return conclude(draft, noise, best, residual, acceptance)


def prefix_weight(draft: SampledDraft, proposal: Tensor) -> Tensor:
    """a_0 = 1, a_i = min(1, a_{i-1} p(X_i) / q(X_i)): how much of a prefix may be kept, (B, N)."""
    p = drafted_probability(draft.target, draft.tokens)
    step = ratio(p, drafted_probability(proposal, draft.tokens))
    weights = [torch.ones_like(draft.target[:, 0, 0])]
    for i in range(step.shape[1]):
        weights.append((weights[-1] * step[:, i]).clamp(max=1))
    return torch.stack(weights, dim=1)


BLOCK = VerificationRule(
    "block", verify, (DraftKind.CHAIN,), "prefixes of a chain as wholes, the longest one wins"
)
