"""Small steps on distributions that every rule for sampled drafts is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.acceptance.protocol import SampledDraft, Verdict, VerificationNoise


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, and 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator, torch.zeros_like(numerator))


def kept_share(left: Tensor, a: Tensor) -> Tensor:
    """R / (R + 1 - a), the chance that a prefix of weight ``a`` <= 1 stays, R = ``left``; 0/0 is 0.

    1 - a first: R + 1 would round a small R away.
    """
    return ratio(left, left + (1 - a))


def normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    """``weights`` (..., V) scaled to sum 1; the row of ``fallback`` (..., V) where they are all 0."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, fallback)


def excess(target: Tensor, proposal: Tensor) -> Tensor:
    """What is left of the target once a draft from ``proposal`` was rejected: norm(max(p - q, 0)), (..., V).

    Rounding may leave no mass (p = q); the target itself then stands in, an event of probability 0.
    """
    return normalised((target - proposal).clamp(min=0), target)


def row_at(values: Tensor, node: Tensor) -> Tensor:
    """The row of each tree at one node: ``values`` (B, N, V), ``node`` (B,) long -> (B, V)."""
    return values.gather(1, node[:, None, None].expand(-1, 1, values.shape[2]))[:, 0]


def entry_at(rows: Tensor, index: Tensor) -> Tensor:
    """One entry a row: ``rows`` (B, X), ``index`` (B,) long -> (B,)."""
    return rows.gather(1, index[:, None])[:, 0]


def draw(distribution: Tensor, gumbel: Tensor) -> Tensor:
    """A token from each row of ``distribution`` (B, V), decided by ``gumbel`` (B, V) -> (B,) long."""
    return (distribution.log() + gumbel).argmax(-1)


def conclude(
    draft: SampledDraft, noise: VerificationNoise, best: Tensor, residual: Tensor, acceptance: Tensor
) -> Verdict:
    """The verdict for the deepest accepted nodes ``best`` (B,) long; draws from ``residual``."""
    depths = draft.topology.depths.expand(best.shape[0], -1)
    return Verdict(best, entry_at(depths, best), draw(residual, noise.gumbel), residual, acceptance)


def open_proposal(proposal: Tensor) -> Tensor:
    """The proposal of a chain with its last row 0: nothing is drafted after the last node. (B, N, V)"""
    return torch.cat([proposal[:, :-1], torch.zeros_like(proposal[:, -1:])], dim=1)


def drafted_probability(distribution: Tensor, tokens: Tensor) -> Tensor:
    """Probability of each drafted token of a chain under its parent's row: (B, N, V) -> (B, N - 1)."""
    return distribution[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]


def deepest(accepted: Tensor) -> Tensor:
    """The last accepted node of a chain: ``accepted`` (B, N) bool, node 0 always counts -> (B,) long."""
    nodes = torch.arange(accepted.shape[1], device=accepted.device)
    return (accepted * nodes).amax(1)


def next_candidates(on_path: Tensor, depth: Tensor, draft: SampledDraft) -> Tensor:
    """The drafts for the token after the accepted path: children of its nodes, (B, N) bool."""
    parents = draft.topology.parents.expand_as(draft.tokens)
    return on_path.gather(1, parents) & (draft.topology.depths == depth[:, None] + 1)


def without(distribution: Tensor, token: Tensor) -> Tensor:
    """``distribution`` (B, V) once ``token`` (B,) long was drawn and not put back; 0 when nothing is left."""
    rest = distribution.scatter(1, token[:, None], 0.0)
    return normalised(rest, fallback=torch.zeros_like(rest))
