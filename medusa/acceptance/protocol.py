"""Sampled drafts: how they are drawn, and the input and output of a rule for them.

These rules compare two distributions, so they need to know the one the draft was drawn from. A rule
is a pure tensor function over a batch of rows; it knows nothing of models, caches or seeds:

    verdict = rule.verify(draft, noise, state)

    draft.tokens    (B, N) long   node 0 is the root token, parents come before their children,
                                  siblings in the order they were drawn
    draft.topology                medusa.trees.candidate_tree.TreeTopology, one tree for all rows or one a row
    draft.target    (B, N, V)     p: the base model's distribution after each node, with temperature, top-k,
                                  top-p and every logits processor applied
    draft.proposal  (B, N, V)     q: the source of each node's children; a leaf's row is not read.
                                  A row of zeros says "nothing was drafted here": short drafts need no mask
                                  (``greedy_block`` needs drafts of full length). Nodes of equal text, as
                                  independent chains have, must have equal p and equal q
    noise.uniform   (B, N)        one number of [0, 1) a node, the coin of that node
    noise.gumbel    (B, V)        draws the next token from p or its residual
    state                         the previous step's verdict.state; None at the start, and always
                                  with every rule but ``greedy_block``

    verdict.best          (B,) long   the deepest accepted node
    verdict.num_accepted  (B,) long   its depth: accepted draft tokens, the root not counted
    verdict.next_token    (B,) long   already drawn from p or its residual. Never sample again
    verdict.residual      (B, V)      the distribution it was drawn from
    verdict.acceptance    (B, N)      the probability each coin was compared with; NaN for an unused coin
    verdict.state                     pass it to the next step

Draft noise, coins and residual noise must be independent of each other, and of the steps before: a ratio test
on a draft that was chosen with the verifier's own noise is biased. This module makes all three from a seed
and the position of the root. Nothing here reads a tensor back to the host.

The work is done in the dtype of the distributions, float32 or float64. Conventions for 0/0: a token with
q = 0 was not drafted and is never accepted; a residual without mass falls back to the target.

A rule says which drafts it is exact for (``draft_kinds``, the kind to draw first) and refuses the
others with the reason (``rule.require``). **Adding a rule**: a
``VerificationRule("name", verify, draft_kinds=(DraftKind.CHAIN,))`` in
:data:`medusa.acceptance.rules.RULES`.

Drafts are drawn from q with noise that the caller brings, one implementation for drafters and tests. Noise is
counter-based, in three streams that never meet: of drafts, of the verifier's coins, and of the next token.
Rejected draft tokens were chosen with noise too, and a later step that drafts the same position again must
not see it a second time. So noise is keyed by the *step* (the position of its root token, which no two steps
of a row share) and the node. The exact rule keys its noise by the position of the chosen token instead;
neither may be used for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from medusa.acceptance.sampling import gumbel_noise
from medusa.trees.candidate_tree import CandidateTree, TreeTopology


class DraftKind(Enum):
    """How the children of a node came about. The values are the words error messages use."""

    RANKED = "ranked candidates (top-k of the heads, a suffix match)"
    CHAIN = "one chain sampled from q"
    WITH_REPLACEMENT = "a tree whose siblings are sampled from q independently"


_WHY_NOT = {
    DraftKind.RANKED: "a ranked candidate was not drawn from q, it is a point mass, so a test on p/q is "
    "biased; use acceptance='exact', or have the drafter sample",
}


@dataclass(frozen=True)
class SampledDraft:
    """A drafted tree and the two distributions at its nodes; the beginning of this file has the details."""

    tokens: Tensor  # (B, N) long
    topology: TreeTopology
    target: Tensor  # (B, N, V) p after each node
    proposal: Tensor  # (B, N, V) q the children of each node were drawn from


@dataclass(frozen=True)
class VerificationNoise:
    """All the randomness of one verification."""

    uniform: Tensor  # (B, N) in [0, 1)
    gumbel: Tensor  # (B, V) standard Gumbel


@dataclass(frozen=True)
class Verdict:
    """The decision of a rule for each row."""

    best: Tensor  # (B,) long
    num_accepted: Tensor  # (B,) long
    next_token: Tensor  # (B,) long
    residual: Tensor  # (B, V)
    acceptance: Tensor  # (B, N); NaN for an unused coin
    state: Any = None


VerifyFunction = Callable[[SampledDraft, VerificationNoise, Any], Verdict]


@dataclass(frozen=True)
class VerificationRule:
    """A rule and the drafts it is exact for.

    ``context_only_proposal``: the rule reads q again at later steps, so q after a token may depend on the
    text before it and on nothing else (a draft model, an early exit), and not on the depth of the token
    (Medusa heads, an EAGLE-3 head).
    """

    name: str
    function: VerifyFunction
    draft_kinds: tuple[DraftKind, ...]  # the first is the one to draw where a tree may branch
    context_only_proposal: bool = False

    @property
    def only_chains(self) -> bool:
        return self.draft_kinds == (DraftKind.CHAIN,)

    def verify(self, draft: SampledDraft, noise: VerificationNoise, state: Any = None) -> Verdict:
        """The verdict on ``draft``.

        Raises:
            ValueError: shapes or dtypes do not fit together, or a chain rule got a tree.
        """
        check_shapes(draft, noise)
        if self.only_chains:
            check_chain(self.name, draft)
        return self.function(draft, noise, state)

    def require(self, kind: DraftKind, context_only: bool = True) -> None:
        """Raise ValueError unless the rule is exact for drafts of this kind.

        ``context_only`` says whether the drafter's q depends only on the text.

        Raises:
            ValueError: it is not; the message says why and what to use instead.
        """
        if kind not in self.draft_kinds:
            reason = _WHY_NOT.get(kind, f"it is exact for {self.draft_kinds[0].value}")
            if self.only_chains and kind is DraftKind.WITH_REPLACEMENT:
                reason = "the rule walks one path; draft a chain, or use a tree rule such as 'multi_draft'"
            raise ValueError(f"acceptance={self.name!r} cannot verify {kind.value}: {reason}")
        if self.context_only_proposal and not context_only:
            raise ValueError(
                f"acceptance={self.name!r} needs a drafter whose q depends only on the text, because it "
                "reads q again at later steps; this drafter's q also depends on the step: "
                "use acceptance='block'"
            )


def check_shapes(draft: SampledDraft, noise: VerificationNoise) -> None:
    """Raise ValueError unless the tensors of ``draft`` and ``noise`` fit together. Reads shapes only.

    Raises:
        ValueError: one does not; its name, the rule and what arrived.
    """
    B, N = draft.tokens.shape
    V = draft.target.shape[-1]
    expected = {
        "target": (draft.target, (B, N, V)),
        "proposal": (draft.proposal, (B, N, V)),
        "uniform": (noise.uniform, (B, N)),
        "gumbel": (noise.gumbel, (B, V)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape} for tokens {(B, N)}, got {tuple(tensor.shape)}")
        if tensor.dtype != draft.target.dtype or tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} must be float32 or float64, the same as target ({draft.target.dtype}), got "
                f"{tensor.dtype}: convert the logits before the softmax"
            )
    if draft.topology.num_nodes != N or draft.topology.parents.shape[0] not in (1, B):
        raise ValueError(
            f"topology must hold 1 or {B} trees of {N} nodes, got {tuple(draft.topology.parents.shape)}"
        )


def check_chain(name: str, draft: SampledDraft) -> None:
    """Raise ValueError unless the draft is a chain: one node per level.

    Raises:
        ValueError: it is not.
    """
    tree = draft.topology
    if not tree.is_chain:
        raise ValueError(
            f"acceptance={name!r} walks one chain, got a tree of {tree.num_nodes} nodes and depth "
            f"{tree.max_depth}; use CandidateTree.chain(g).topology(), or a tree rule such as 'multi_draft'"
        )


# ------------------------------------------------------------------ distributions


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
    """The residual of the target once a draft from ``proposal`` was rejected: norm(max(p - q, 0)), (..., V).

    Rounding may leave no mass (p = q); then the target itself is used, an event of probability 0.
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


ProposalAfter = Callable[[Tensor, slice], Tensor]


def draw_tree(
    tree: CandidateTree, root: Tensor, proposal_after: ProposalAfter, gumbel: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens (B, N) long of ``tree`` below ``root`` (B,) long, and the q (B, N, V) they were drawn from.

    Siblings are independent draws.

    ``proposal_after(tokens, nodes)`` is called once per level, with the tokens (B, N) filled so far and the
    nodes of that level as a slice; it returns q after these nodes (B, M, V). ``gumbel`` is (B, N, V). The
    tree gives the number of children of a node; its ranks are not read. A chain is
    ``CandidateTree.chain(g)``, k independent chains are ``independent_chains(k, g)``. Rows of nodes on the
    last level stay 0.
    """
    B, N, V = gumbel.shape
    tokens = root.new_zeros(B, N)
    tokens[:, 0] = root
    proposal = gumbel.new_zeros(B, N, V)
    levels = _levels(tree)
    for nodes, children in pairwise(levels):
        proposal[:, nodes] = proposal_after(tokens, nodes)
        parents = list(tree.parents[children])
        tokens[:, children] = (proposal[:, parents].log() + gumbel[:, children]).argmax(-1)
    return tokens, proposal


def independent_chains(num_chains: int, length: int) -> CandidateTree:
    """The topology of ``num_chains`` chains of ``length`` draft tokens that share only the root.

    Raises:
        ValueError: one of them is below 1.
    """
    if num_chains < 1 or length < 1:
        raise ValueError(f"num_chains and length must be at least 1, got {num_chains} and {length}")
    return CandidateTree.from_paths(
        (chain, *(0,) * depth) for chain in range(num_chains) for depth in range(length)
    )


def kind_drawn(tree: CandidateTree) -> DraftKind:
    """The kind of draft that :func:`draw_tree` makes of ``tree``."""
    return DraftKind.CHAIN if tree.depth == tree.num_nodes - 1 else DraftKind.WITH_REPLACEMENT


def _levels(tree: CandidateTree) -> list[slice]:
    """The nodes of each depth; they are contiguous, because a CandidateTree is in breadth-first order."""
    depths = [len(path) for path in tree.paths]
    starts = [depths.index(depth) for depth in range(tree.depth + 1)] + [tree.num_nodes]
    return [slice(start, end) for start, end in pairwise(starts)]


# What makes three streams of noise of one seed: for drafts, for coins, and for the next token.
_DRAFT = 0x5DEECE66D
_COIN = 0x2545F4914F6CDD1D
_RESIDUAL = 0x369DEA0F31A53F85


def draft_noise(seeds: Tensor, root_positions: Tensor, num_nodes: int, vocab_size: int) -> Tensor:
    """Gumbel noise to draw the nodes of a step with, (B, N, V); seeds and root_positions are (B,) long."""
    return gumbel_noise(seeds ^ _DRAFT, _counters(root_positions, num_nodes), vocab_size)


def verification_noise(
    seeds: Tensor, root_positions: Tensor, num_nodes: int, vocab_size: int
) -> VerificationNoise:
    """A coin for every node of a step and the Gumbel noise of its next token."""
    coins = gumbel_noise(seeds ^ _COIN, _counters(root_positions, num_nodes), 1)[..., 0]  # (B, N)
    uniform = torch.exp(-torch.exp(-coins)).clamp(max=1 - 2.0**-24)
    gumbel = gumbel_noise(seeds ^ _RESIDUAL, root_positions[:, None], vocab_size)[:, 0]  # (B, V)
    return VerificationNoise(uniform, gumbel)


def _counters(root_positions: Tensor, num_nodes: int) -> Tensor:
    """A number for every (step, node), (B, N) long. The spacing of steps is 1,024: trees have fewer nodes."""
    if num_nodes > 1024:
        raise ValueError(f"num_nodes must be at most 1024, got {num_nodes}")
    return root_positions[:, None] * 1024 + torch.arange(num_nodes, device=root_positions.device)
