"""Token verification: the draft tokens of a chain are tested one by one, the first miss ends it.

Speculative sampling, arXiv 2211.17192 (algorithm 1) and 2302.01318.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from medusa.acceptance.protocol import (
    DraftKind,
    SampledDraft,
    Verdict,
    VerificationNoise,
    VerificationRule,
)
from medusa.acceptance.residual import conclude, drafted_probability, excess, open_proposal, ratio, row_at


def verify(draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
    """Draft token x stays with probability min(1, p(x)/q(x)) while all before it stayed.

    After a miss the next token comes from norm(max(p - q, 0)), after none from p.
    """
    proposal = open_proposal(draft.proposal)
    p = drafted_probability(draft.target, draft.tokens)
    q = drafted_probability(proposal, draft.tokens)
    acceptance = F.pad(ratio(p, q).clamp(max=1), (1, 0), value=1.0)  # (B, N)
    best = torch.cumprod((noise.uniform < acceptance).long(), dim=1).sum(1) - 1
    residual = excess(row_at(draft.target, best), row_at(proposal, best))
    return conclude(draft, noise, best, residual, acceptance)


TOKEN = VerificationRule(
    "token", verify, (DraftKind.CHAIN,), "each draft token of a chain on its own, up to the miss"
)
