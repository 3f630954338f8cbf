"""Rules for one drafted chain: "token", "block" and "greedy_block"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa.acceptance.distributions import (
    conclude,
    deepest,
    drafted_probability,
    entry_at,
    excess,
    kept_share,
    normalised,
    open_proposal,
    ratio,
    row_at,
)
from medusa.acceptance.protocol import (
    DraftKind,
    SampledDraft,
    Verdict,
    VerificationNoise,
    VerificationRule,
)


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


TOKEN = VerificationRule(
    "token", verify_tokens, (DraftKind.CHAIN,), "each draft token of a chain on its own, up to the miss"
)


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


BLOCK = VerificationRule(
    "block", verify_block, (DraftKind.CHAIN,), "prefixes of a chain as wholes, the longest one wins"
)


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
    recursion a prefix X^i survives with probability min(1, p(X^i) / q(X^i)), the most any rule can reach.
    What is left for the other outputs is max(p(z) - q(z), 0) of the *joint* probability of each path z of
    the block, so the g - tau - 1 tokens after the next token follow not p but

        p'(x | z) = norm(max(a(z) p(x | z) - q(x | z), 0)),      a(z) = p(z) / q(z) from the block's start.

    The state carries a(z) and how many tokens it still governs. Each step that stops short adds such a layer
    on top of those still alive, and the modified target is the p of the step. The layers read q again, after
    text that was not drafted: q must depend on the text alone.

    The longest prefix whose coin falls below R / (R + 1 - a), with a = p/q of the whole prefix.

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
    num_nodes, num_layers = draft.tokens.shape[1], state.remaining.shape[1]
    if num_layers != max(num_nodes - 2, 0):
        raise ValueError(
            f"acceptance='greedy_block' needs the same draft length at every step: the state is of length "
            f"{num_layers + 1}, this draft of length {num_nodes - 1}"
        )
    nodes = torch.arange(num_nodes, device=draft.tokens.device)
    target = draft.target
    layers: list[_Layer] = []
    for s in reversed(range(num_layers)):
        layer = _Layer(target, path_log_ratio(draft, target, proposal, state.log_ratio[:, s]))
        layers.insert(0, layer)
        reach = num_layers - s  # a layer of that age governs no node from here on
        start = _Layer(target[:, :reach], layer.log_ratio[:, :reach])
        changed = normalised(layer_weights(start, proposal[:, :reach]), fallback=start.target)
        governed = nodes[:reach] < state.remaining[:, s, None]  # (B, reach)
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
    """Every layer moved past the tokens this step emits; the oldest slot is dead by now and drops out."""
    num_layers, draft_length = state.remaining.shape[1], proposal.shape[1] - 1
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


GREEDY_BLOCK = VerificationRule(
    "greedy_block",
    verify_greedy_block,
    (DraftKind.CHAIN,),
    "most accepted in one step; carries a changed target over the next steps",
    context_only_proposal=True,
)
