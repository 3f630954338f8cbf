"""Toy languages, and two ways to find the law of the text a verification rule produces.

``exact_law`` enumerates every draft, every pattern of coins and every next token over several steps, so
its answer has no statistical error. ``sampled_law`` runs the rule with real noise on many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor

from medusa.acceptance.protocol import SampledDraft, VerificationNoise, VerificationRule, draw_tree
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

START = (0, 1)  # the last two tokens of the prompt
FALSE_ALARM_RATE = 1e-6


@dataclass(frozen=True)
class Markov:
    """A language of order 2: ``table[before, last]`` is the distribution of the next token. (V, V, V)"""

    table: Tensor

    def after(self, before: Tensor, last: Tensor, depth: Tensor) -> Tensor:
        return self.table[before, last].expand(*last.shape, -1)


@dataclass(frozen=True)
class DepthWise:
    """A drafter like Medusa heads: q depends on the distance from the root, not on the path. (L, V)"""

    table: Tensor

    def after(self, before: Tensor, last: Tensor, depth: Tensor) -> Tensor:
        return self.table[depth].expand(*last.shape, -1)


def toy_table(seed: int, *shape: int, zeros: float = 0.0, spread: float = 1.0) -> Tensor:
    """Seeded distributions over the last dimension; ``zeros`` is the share of tokens that cannot occur."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64) * spread
    cut = torch.rand(*shape, generator=generator, dtype=torch.float64) < zeros
    cut.scatter_(-1, logits.argmax(-1, keepdim=True), False)
    return logits.masked_fill(cut, -torch.inf).softmax(-1)


def toy_pair(seed: int, vocab_size: int, zeros: float = 0.0) -> tuple[Markov, Markov]:
    """A target and a drafter of order 2."""
    shape = (vocab_size,) * 3
    return Markov(toy_table(seed, *shape, zeros=zeros)), Markov(toy_table(seed + 1000, *shape, zeros=zeros))


def node_distributions(language: Any, before: Tensor, tokens: Tensor, topology: TreeTopology) -> Tensor:
    """What ``language`` says after each node, (B, N, V); ``before`` (B,) is the token before the root."""
    previous = tokens.gather(1, topology.parents.expand_as(tokens))
    previous = torch.cat([before[:, None], previous[:, 1:]], dim=1)
    return language.after(previous, tokens, topology.depths.expand_as(tokens))


def law_of(target: Markov, num_tokens: int) -> Tensor:
    """The exact joint law of the first tokens, (V,) * num_tokens."""
    V = target.table.shape[-1]
    law = torch.ones((), dtype=torch.float64)
    for n in range(num_tokens):
        history = torch.cartesian_prod(*[torch.arange(V)] * n).view(-1, n) if n else torch.zeros(1, 0).long()
        past = torch.cat([torch.tensor(START).expand(len(history), 2), history], dim=1)
        law = (law.reshape(-1, 1) * target.table[past[:, -2], past[:, -1]]).reshape((V,) * (n + 1))
    return law


def total_variation(law: Tensor, other: Tensor) -> float:
    return 0.5 * (law - other).abs().sum().item()


# --- by enumeration ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Branches:
    """Weighted histories: ``text`` starts with START, -1 stands where nothing was emitted yet."""

    weight: Tensor  # (R,)
    text: Tensor  # (R, 2 + num_tokens) long
    count: Tensor  # (R,) long; emitted tokens
    state: Any

    def rows(self, index: Tensor) -> _Branches:
        state = None if self.state is None else self.state.rows(index)
        return _Branches(self.weight[index], self.text[index], self.count[index], state)


def exact_law(
    rule: VerificationRule,
    target: Any,
    drafter: Any,
    tree: CandidateTree,
    num_tokens: int,
    *,
    carry: bool = True,
) -> Tensor:
    """Joint law of the first ``num_tokens`` tokens under ``rule``. ``carry``: keep the state."""
    V = target.table.shape[-1]
    law = torch.zeros((V,) * num_tokens, dtype=torch.float64)
    text = torch.tensor([[*START, *[-1] * num_tokens]])
    live = _Branches(torch.ones(1, dtype=torch.float64), text, torch.zeros(1, dtype=torch.long), None)
    while len(live.weight):
        stepped, _ = _enumerate_step(rule, target, drafter, tree, live)
        done = stepped.count >= num_tokens
        finished = stepped.rows(done.nonzero()[:, 0])
        law.index_put_(tuple(finished.text[:, 2:].T), finished.weight, accumulate=True)
        live = _merged(stepped.rows((~done).nonzero()[:, 0]))
        if not carry:
            live = replace(live, state=None)
    return law


def expected_accepted(rule: VerificationRule, target: Any, drafter: Any, tree: CandidateTree) -> float:
    """E[num_accepted] of the first step, by enumeration."""
    text = torch.tensor([[*START, *[-1] * (tree.depth + 1)]])
    live = _Branches(torch.ones(1, dtype=torch.float64), text, torch.zeros(1, dtype=torch.long), None)
    stepped, accepted = _enumerate_step(rule, target, drafter, tree, live)
    return (stepped.weight * accepted).sum().item()


def _enumerate_step(rule, target, drafter, tree, live) -> tuple[_Branches, Tensor]:
    topology = tree.topology()
    live, tokens = _all_drafts(drafter, tree, topology, live)
    coins = torch.tensor(list(product([0.0, 1 - 2.0**-53], repeat=tree.num_nodes - 1)), dtype=torch.float64)
    V, R, C = target.table.shape[-1], len(tokens), len(coins)
    which = torch.arange(R).repeat_interleave(C * V)
    uniform = torch.cat([torch.zeros(C, 1, dtype=torch.float64), coins], dim=1)
    uniform = uniform.repeat_interleave(V, 0).repeat(R, 1)
    wanted = torch.arange(V).repeat(R * C)
    live, tokens = live.rows(which), tokens[which]

    before = _last(live, 1)
    draft = SampledDraft(
        tokens,
        topology,
        node_distributions(target, before, tokens, topology),
        node_distributions(drafter, before, tokens, topology),
    )
    gumbel = torch.nn.functional.one_hot(wanted, V).double() * 1e9
    verdict = rule.verify(draft, VerificationNoise(uniform, gumbel), live.state)

    chance = verdict.acceptance[:, 1:]
    coin_weight = torch.where(uniform[:, 1:] == 0, chance, 1 - chance)
    coin_weight = torch.where(chance.isnan(), 0.5, coin_weight).prod(1)
    next_weight = verdict.residual.gather(1, wanted[:, None])[:, 0]
    stepped = _emit(replace(live, state=verdict.state), draft, verdict.best, verdict.num_accepted, wanted)
    stepped = replace(stepped, weight=live.weight * coin_weight * next_weight)
    kept = (stepped.weight > 0).nonzero()[:, 0]
    return stepped.rows(kept), verdict.num_accepted[kept]


def _all_drafts(drafter, tree, topology, live) -> tuple[_Branches, Tensor]:
    """Every draft of every branch, one node after the other."""
    tokens = torch.zeros(len(live.weight), tree.num_nodes, dtype=torch.long)
    tokens[:, 0] = _last(live, 0)
    for node in range(1, tree.num_nodes):
        parent = tree.parents[node]
        q = node_distributions(drafter, _last(live, 1), tokens, topology)[:, parent]
        R, V = q.shape
        which, token = torch.arange(R).repeat_interleave(V), torch.arange(V).repeat(R)
        live = replace(live.rows(which), weight=(live.weight[:, None] * q).reshape(-1))
        tokens = tokens[which]
        tokens[:, node] = token
        kept = (live.weight > 0).nonzero()[:, 0]
        live, tokens = live.rows(kept), tokens[kept]
    return live, tokens


def _last(live: _Branches, back: int) -> Tensor:
    return live.text.gather(1, (live.count + 1 - back)[:, None])[:, 0]


def _emit(
    live: _Branches, draft: SampledDraft, best: Tensor, num_accepted: Tensor, token: Tensor
) -> _Branches:
    """The accepted path and the next token appended, as far as ``text`` reaches."""
    text = torch.cat([live.text, torch.zeros_like(live.text[:, :1])], dim=1)  # a column for the surplus
    end = text.shape[1] - 1
    path = draft.topology.lineage.expand(len(best), -1, -1)[torch.arange(len(best)), best]  # (R, L)
    drafted = torch.cat([draft.tokens.gather(1, path), token[:, None]], dim=1)
    for j in range(1, path.shape[1] + 1):
        value = torch.where(j == num_accepted + 1, token, drafted[:, j])
        place = torch.where(j <= num_accepted + 1, live.count + 1 + j, end).clamp(max=end)
        text.scatter_(1, place[:, None], value[:, None])
    count = (live.count + num_accepted + 1).clamp(max=end - 2)
    return replace(live, text=text[:, :end], count=count)


def _merged(live: _Branches) -> _Branches:
    """Branches with the same text and state added up."""
    key = torch.cat([live.text, live.count[:, None]], dim=1).double()
    if live.state is not None:
        key = torch.cat([key, live.state.remaining, live.state.log_ratio.round(decimals=10)], dim=1)
    _, group = key.unique(dim=0, return_inverse=True)
    num_groups = int(group.max()) + 1 if len(group) else 0
    first = torch.full((num_groups,), len(group)).scatter_reduce(0, group, torch.arange(len(group)), "amin")
    weight = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, live.weight)
    return replace(live.rows(first), weight=weight)


# --- by sampling ------------------------------------------------------------------------------------

NoiseSource = Callable[[int], tuple[Tensor, VerificationNoise]]


def sampled_law(
    rule: VerificationRule,
    target: Any,
    drafter: Any,
    tree: CandidateTree,
    num_tokens: int,
    *,
    num_rows: int = 200_000,
    seed: int = 0,
    noise_source: NoiseSource | None = None,
) -> Tensor:
    """Counts of the first ``num_tokens`` tokens over ``num_rows`` texts, in float32, (V,) * num_tokens.

    ``noise_source(step)`` brings the draft's Gumbel noise (B, N, V) and the verifier's noise.
    """
    topology = tree.topology()
    V, N, B = target.table.shape[-1], tree.num_nodes, num_rows
    generator = torch.Generator().manual_seed(seed)
    target, drafter = (replace(side, table=side.table.float()) for side in (target, drafter))

    def gumbel(*shape: int) -> Tensor:
        return -torch.empty(*shape).exponential_(generator=generator).log()

    def random_noise(step: int) -> tuple[Tensor, VerificationNoise]:
        coins = torch.rand(B, N, generator=generator)
        return gumbel(B, N, V), VerificationNoise(coins, gumbel(B, V))

    text = torch.tensor([*START, *[-1] * num_tokens]).repeat(B, 1)
    live = _Branches(torch.ones(B), text, torch.zeros(B, dtype=torch.long), None)
    for step in range(num_tokens):
        before = _last(live, 1)

        def proposal_after(tokens: Tensor, nodes: slice, before: Tensor = before) -> Tensor:
            return node_distributions(drafter, before, tokens, topology)[:, nodes]

        draft_gumbel, noise = (noise_source or random_noise)(step)
        tokens, proposal = draw_tree(tree, _last(live, 0), proposal_after, draft_gumbel)
        draft = SampledDraft(tokens, topology, node_distributions(target, before, tokens, topology), proposal)
        verdict = rule.verify(draft, noise, live.state)
        live = _emit(live, draft, verdict.best, verdict.num_accepted, verdict.next_token)
        live = replace(live, state=verdict.state)
    places = V ** torch.arange(num_tokens - 1, -1, -1)
    return torch.bincount((live.text[:, 2:] * places).sum(1), minlength=V**num_tokens).view((V,) * num_tokens)


def p_value(counts: Tensor, law: Tensor) -> float:
    """Chance of counts this far from ``law`` (chi-square); cells that expect under 10 are pooled."""
    observed, expected = counts.double().flatten(), law.flatten() * counts.sum()
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    rare = expected < 10
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum().item()
    return float(chi2.sf(statistic, int(kept.sum()) - 1))
