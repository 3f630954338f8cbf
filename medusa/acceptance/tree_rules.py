"""Rules for drafted trees: "multi_draft", "spectr" and "traversal"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medusa.acceptance.distributions import (
    conclude,
    entry_at,
    excess,
    kept_share,
    next_candidates,
    normalised,
    ratio,
    row_at,
    without,
)
from medusa.acceptance.protocol import (
    DraftKind,
    SampledDraft,
    Verdict,
    VerificationNoise,
    VerificationRule,
)


@dataclass(frozen=True)
class _Walk:
    """Where each row stands: the accepted path, and what is left of both distributions after it."""

    best: Tensor  # (B,) long
    depth: Tensor  # (B,) long
    on_path: Tensor  # (B, N) bool; nodes whose tokens from the root are the accepted ones (drafts may repeat)
    target: Tensor  # (B, V)
    proposal: Tensor  # (B, V)


def verify_drafts(
    draft: SampledDraft, noise: VerificationNoise, state: Any = None, *, replacement: bool = True
) -> Verdict:
    """Recursive rejection over several drafts a node, drawn with or without replacement.

    SpecInfer, arXiv 2305.09781 (algorithm 2), for independent drafts; without replacement as in Sequoia,
    arXiv 2402.12374, and recursive rejection sampling, arXiv 2402.14160.

    Each child x in turn stays with probability min(1, p(x)/q(x)); a miss leaves p = norm(max(p - q, 0)).

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
    verify_drafts,
    (DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN),
    "recursive rejection over independent drafts (SpecInfer)",
)

MULTI_DRAFT_WITHOUT_REPLACEMENT = VerificationRule(
    "multi_draft_without_replacement",
    partial(verify_drafts, replacement=False),
    (DraftKind.WITHOUT_REPLACEMENT, DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN),
    "recursive rejection over drafts that differ",
)


def verify_spectr(draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
    """SpecTr's k-sequential selection: k independent drafts, each accepted against a scaled-down target.

    arXiv 2310.15141, algorithm 3 (one token) applied level by level as in its algorithm 2. With one draft
    it is token verification.

    Level by level: the first of k drafts whose coin is below min(1, p / (rho q)) stays.

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
    verify_spectr,
    (DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN),
    "k-sequential selection among independent drafts (SpecTr)",
)


def verify_traversal(draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
    """Traversal verification: a tree drawn without replacement, judged from its leaves to its root.

    arXiv 2505.12398. On a chain it is block verification; on a tree it is to recursive rejection what block
    verification is to token verification.

    The paper's traversal visits a node after its children and stops at the first it accepts. What it holds
    against each coin does not depend on the coins, so all nodes are judged first, parents before children,
    and the traversal reduces to finding the first accepted node in the order of the visit.

    The first node, children before parents and siblings in draw order, whose coin is below its weight."""
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
    verify_traversal,
    (DraftKind.WITHOUT_REPLACEMENT, DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN),
    "leaves to root over a tree of drafts that differ",
)
