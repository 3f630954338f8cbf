"""The rules for sampled drafts, for one chain: "token", "block" and "greedy_block"; and for trees:
"multi_draft" and "spectr".

:mod:`medusa.acceptance.protocol` documents the input and output of a rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa.acceptance.protocol import (
    DraftKind,
    SampledDraft,
    Verdict,
    VerificationNoise,
    VerificationRule,
    conclude,
    deepest,
    drafted_probability,
    entry_at,
    excess,
    kept_share,
    next_candidates,
    normalised,
    open_proposal,
    ratio,
    row_at,
)

# ------------------------------------------------------------------ one chain


def verify_tokens(draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
    """Speculative sampling: the draft tokens of a chain are tested one by one, the first miss ends it.

    arXiv 2211.17192 (algorithm 1) and 2302.01318.

    Draft token x stays with probability min(1, p(x)/q(x)) while all before it stayed.

    After a miss the next token comes from norm(max(p - q, 0)), after none from p.
    """
    proposal = open_proposal(draft.proposal)
    p = drafted_probability(draft.target, draft.tokens)
    q = drafted_probability(proposal, draft.tokens)
    acceptance = F.pad(ratio(p, q).clamp(max=1), (1, 0), value=1.0)  # (B, N)
    best = torch.cumprod((noise.uniform < acceptance).long(), dim=1).sum(1) - 1
    residual = excess(row_at(draft.target, best), row_at(proposal, best))
    return conclude(draft, noise, best, residual, acceptance)


def verify_block(draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
    """The prefixes of a chain are tested as wholes, and the longest accepted one wins.

    arXiv 2403.10444, algorithm 2. Never accepts less in expectation than token verification.

    Prefix X^i stays with probability R_i / (R_i + 1 - a_i), R_i = sum of max(a_i p - q, 0) after it.

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


@dataclass(frozen=True)
class TargetModification:
    """Layers on the target distribution, the newest first. S = g - 1 layers can be alive at once."""

    log_ratio: Tensor  # (B, S) log a of the text emitted since the layer's block began
    remaining: Tensor  # (B, S) long; number of coming tokens the layer governs, 0: none

    def rows(self, index: Tensor) -> TargetModification:
        """The state of the rows ``index`` (X,) long, for a batch that drops, repeats or reorders rows."""
        return TargetModification(self.log_ratio[index], self.remaining[index])


@dataclass(frozen=True)
class _Layer:
    """A distribution before a layer acts on it, and the layer's log a at each node."""

    target: Tensor  # (B, N, V)
    log_ratio: Tensor  # (B, N)


def verify_greedy_block(
    draft: SampledDraft, noise: VerificationNoise, state: TargetModification | None = None
) -> Verdict:
    """Greedy block verification: accepts the most in one step, and pays over the steps that follow.

    arXiv 2403.10444, appendix on greedy block verification. Without block verification's min(1, .) in the
    recursion a prefix X^i survives with probability min(1, p(X^i) / q(X^i)), the most any rule can reach. The
    mass for the other outputs is max(p(z) - q(z), 0) of the *joint* probability of each path z of the block,
    so the g - tau - 1 tokens after the next token follow not p but

        p'(x | z) = norm(max(a(z) p(x | z) - q(x | z), 0)),      a(z) = p(z) / q(z) from the block's start.

    The state carries a(z) and the number of tokens it still governs. Each step that stops short adds such a
    layer on top of the active ones, and the modified target is the p of the step. The layers read q again,
    after text that was not drafted: q must depend only on the text.

    The longest prefix whose coin falls below R / (R + 1 - a) stays, with a = p/q of the whole prefix.

    Raises:
        ValueError: the draft length is another than the one ``state`` was made with.
    """
    proposal = open_proposal(draft.proposal)
    if state is None:
        state = no_modification(draft)
    target, layers = modified_target(draft, proposal, state)
    own = _Layer(target, path_log_ratio(draft, target, proposal, torch.zeros_like(target[:, 0, 0])))
    weights = layer_weights(own, proposal)  # (B, N, V)
    acceptance = prefix_acceptance(own.log_ratio, weights.sum(-1))
    best = deepest(noise.uniform < acceptance)
    residual = normalised(row_at(weights, best), fallback=row_at(target, best))
    verdict = conclude(draft, noise, best, residual, acceptance)
    return replace(verdict, state=next_state(state, [own, *layers], proposal, verdict))


def no_modification(draft: SampledDraft) -> TargetModification:
    """The state at the start of a text: every layer dead."""
    num_rows, num_nodes = draft.tokens.shape
    num_layers = max(num_nodes - 2, 0)
    return TargetModification(
        draft.target.new_zeros(num_rows, num_layers), draft.tokens.new_zeros(num_rows, num_layers)
    )


def modified_target(
    draft: SampledDraft, proposal: Tensor, state: TargetModification
) -> tuple[Tensor, list[_Layer]]:
    """The target of this step (B, N, V), and the layers it came through, the newest first."""
    num_nodes = draft.tokens.shape[1]
    num_layers = state.remaining.shape[1]
    if num_layers != max(num_nodes - 2, 0):
        raise ValueError(
            f"acceptance='greedy_block' needs the same draft length at every step: the state is of length "
            f"{num_layers + 1}, this draft of length {num_nodes - 1}"
        )
    nodes = torch.arange(num_nodes, device=draft.tokens.device)
    target = draft.target
    layers: list[_Layer] = []
    for index in reversed(range(num_layers)):
        layer = _Layer(target, path_log_ratio(draft, target, proposal, state.log_ratio[:, index]))
        layers.insert(0, layer)
        reach = num_layers - index  # a layer of that age governs no node from here on
        start = _Layer(target[:, :reach], layer.log_ratio[:, :reach])
        changed = normalised(layer_weights(start, proposal[:, :reach]), fallback=start.target)
        governed = nodes[:reach] < state.remaining[:, index, None]  # (B, reach)
        changed = torch.where(governed[..., None], changed, start.target)
        target = torch.cat([changed, target[:, reach:]], dim=1)
    return target, layers


def path_log_ratio(draft: SampledDraft, target: Tensor, proposal: Tensor, start: Tensor) -> Tensor:
    """log a at each node (B, N): ``start`` (B,) at the root, plus log p/q of each token drafted since."""
    p = drafted_probability(target, draft.tokens)
    q = drafted_probability(proposal, draft.tokens)
    total = start[:, None] + F.pad(torch.cumsum(ratio(p, q).log(), dim=1), (1, 0))
    # Infinity (text the drafter could not write) and a token the target cannot write: the latter decides.
    return torch.nan_to_num(total, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def layer_weights(layer: _Layer, proposal: Tensor) -> Tensor:
    """max(a p - q, 0) up to a factor that keeps it finite: exact for a <= 1, divided by a above. (B, N, V)"""
    on_target = layer.log_ratio.clamp(max=0).exp()[..., None]
    on_proposal = (-layer.log_ratio).clamp(max=0).exp()[..., None]
    return (on_target * layer.target - on_proposal * proposal).clamp(min=0)


def prefix_acceptance(log_ratio: Tensor, left: Tensor) -> Tensor:
    """R / (R + 1 - a) where a < 1, else 1, as at node 0. (B, N)"""
    a = log_ratio.clamp(max=0).exp()
    return torch.where(log_ratio < 0, kept_share(left, a), torch.ones_like(left))


def next_state(
    state: TargetModification, layers: list[_Layer], proposal: Tensor, verdict: Verdict
) -> TargetModification:
    """The state after this step: every layer moved past the tokens that it emits. The oldest slot is dead by
    now and drops out."""
    num_layers = state.remaining.shape[1]
    draft_length = proposal.shape[1] - 1
    q = entry_at(row_at(proposal, verdict.best), verdict.next_token).log()
    moved = []
    for layer in layers[:num_layers]:
        p = entry_at(row_at(layer.target, verdict.best), verdict.next_token).log()
        moved.append(entry_at(layer.log_ratio, verdict.best) + p - q)
    opened = torch.full_like(verdict.best, draft_length)[:, None]
    before = torch.cat([opened, state.remaining], dim=1)[:, :num_layers]
    remaining = (before - verdict.num_accepted[:, None] - 1).clamp(min=0)
    log_ratio = torch.stack(moved, dim=1) if moved else state.log_ratio
    return TargetModification(log_ratio.masked_fill(remaining == 0, 0.0), remaining)


# ------------------------------------------------------------------ trees


@dataclass(frozen=True)
class _Walk:
    """The state of each row: the accepted path, and the residuals of both distributions after it."""

    best: Tensor  # (B,) long
    depth: Tensor  # (B,) long
    on_path: Tensor  # (B, N) bool; nodes whose tokens from the root are the accepted ones (drafts may repeat)
    target: Tensor  # (B, V)
    proposal: Tensor  # (B, V)


def verify_drafts(draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
    """Recursive rejection over several independent drafts a node: SpecInfer, arXiv 2305.09781 (algorithm 2).

    Each child x in turn stays with probability min(1, p(x)/q(x)); a miss leaves p = norm(max(p - q, 0)).

    Chains that share their accepted tokens are one path: the drafts of all of them are tried.
    """
    acceptance = torch.full_like(noise.uniform, torch.nan)
    acceptance[:, 0] = 1
    walk = _start(draft)
    for node in range(1, draft.tokens.shape[1]):
        walk, probability = _try_node(walk, node, draft, noise)
        acceptance[:, node] = probability
    return conclude(draft, noise, walk.best, walk.target, acceptance)


def _start(draft: SampledDraft) -> _Walk:
    """The walk at the root, before any node is tried."""
    root = torch.zeros_like(draft.tokens[:, 0])
    on_path = torch.zeros_like(draft.tokens, dtype=torch.bool)
    on_path[:, 0] = True
    return _Walk(root, root, on_path, draft.target[:, 0], draft.proposal[:, 0])


def _try_node(walk: _Walk, node: int, draft: SampledDraft, noise: VerificationNoise) -> tuple[_Walk, Tensor]:
    """The walk after ``node`` was tried, and what its coin was compared with (B,); NaN: it was not tried."""
    token = draft.tokens[:, node]
    p = entry_at(walk.target, token)
    q = entry_at(walk.proposal, token)
    candidates = next_candidates(walk.on_path, walk.depth, draft)
    tried = candidates[:, node] & (q > 0)
    probability = ratio(p, q).clamp(max=1)
    accepted = tried & (noise.uniform[:, node] < probability)
    same = candidates & (draft.tokens == token[:, None]) & accepted[:, None]  # (B, N)
    unless_accepted = torch.where(
        (tried & ~accepted)[:, None], excess(walk.target, walk.proposal), walk.target
    )
    after = _Walk(
        best=torch.where(accepted, node, walk.best),
        depth=walk.depth + accepted,
        on_path=walk.on_path | same,
        target=torch.where(accepted[:, None], draft.target[:, node], unless_accepted),
        proposal=torch.where(accepted[:, None], draft.proposal[:, node], walk.proposal),
    )
    return after, probability.masked_fill(~tried, torch.nan)


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
    best = depth = root
    acceptance = torch.where(on_path, 1.0, torch.nan).to(draft.target.dtype)
    residual = draft.target[:, 0]
    for _ in range(draft.topology.max_depth):
        candidates = next_candidates(on_path, depth, draft)
        chosen, accepted, residual, tested = select(draft, noise.uniform, best, candidates)
        acceptance = torch.where(tested.isnan(), acceptance, tested)
        token = draft.tokens.gather(1, chosen[:, None])
        on_path = on_path | (candidates & (draft.tokens == token) & accepted[:, None])
        best = torch.where(accepted, chosen, best)
        depth = depth + accepted
    return conclude(draft, noise, best, residual, acceptance)


def select(
    draft: SampledDraft, uniform: Tensor, node: Tensor, candidates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One k-sequential selection among ``candidates`` (B, N) bool, the drafts after ``node`` (B,) long.

    Returns the first accepted candidate (B,) long and whether there is one (B,) bool; the distribution of the
    next token (B, V): the residual after ``node``, or the target after the accepted candidate; and the
    probability of each coin (B, N), NaN for nodes that are no candidates.
    """
    p = row_at(draft.target, node)
    q = row_at(draft.proposal, node)
    drafted = q.gather(1, draft.tokens)  # (B, N)
    num_drafts = candidates.sum(1)
    rho = division_factor(p, q, num_drafts)
    probability = ratio(p.gather(1, draft.tokens), rho[:, None] * drafted).clamp(max=1)
    hit = candidates & (uniform < probability)
    accepted = hit.any(1)
    chosen = torch.where(accepted, hit.long().argmax(1), node)
    next_distribution = torch.where(
        accepted[:, None], row_at(draft.target, chosen), residual_after_all(p, q, rho, num_drafts)
    )
    return chosen, accepted, next_distribution, probability.masked_fill(~candidates, torch.nan)


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
        low = torch.where(fits, low, middle)
        high = torch.where(fits, middle, high)
    return high


def residual_after_all(p: Tensor, q: Tensor, rho: Tensor, num_drafts: Tensor) -> Tensor:
    """The distribution of the next token when none of k drafts was accepted: p minus the mass that they
    cover, (B, V)."""
    beta = overlap(p, q, rho)
    covered = ratio(some_accepted(beta, num_drafts), beta)[:, None] * torch.minimum(p / rho[:, None], q)
    return normalised((p - covered).clamp(min=0), fallback=p)


# ------------------------------------------------------------------ by name


RULES: dict[str, VerificationRule] = {
    rule.name: rule
    for rule in (
        VerificationRule("token", verify_tokens, (DraftKind.CHAIN,)),
        VerificationRule("block", verify_block, (DraftKind.CHAIN,)),
        VerificationRule("greedy_block", verify_greedy_block, (DraftKind.CHAIN,), context_only_proposal=True),
        VerificationRule("multi_draft", verify_drafts, (DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN)),
        VerificationRule("spectr", verify_spectr, (DraftKind.WITH_REPLACEMENT, DraftKind.CHAIN)),
    )
}
"""Every rule for sampled drafts, by name."""


def rule_named(name: str) -> VerificationRule:
    """The rule called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in RULES:
        raise ValueError(
            f"acceptance={name!r} is not a rule for sampled drafts; there are {', '.join(RULES)}"
        )
    return RULES[name]
