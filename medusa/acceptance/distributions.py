"""Drawing from distributions: the drafts, what is left of the target, and the noise that decides.

Drafts are drawn from q with noise that the caller brings, one implementation for drafters and tests. Noise is
counter-based, in three streams that never meet: of drafts, of the verifier's coins, and of the next token.
Rejected draft tokens were chosen with noise too, and a later step that drafts the same position again must
not see it a second time. So noise is keyed by the *step* (the position of its root token, which no two steps
of a row share) and the node. The exact rule keys its noise by the position of the chosen token instead;
neither may be used for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from medusa.acceptance.protocol import DraftKind, SampledDraft, Verdict, VerificationNoise
from medusa.acceptance.sampling import gumbel_noise
from medusa.trees.candidate_tree import CandidateTree


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


ProposalAfter = Callable[[Tensor, slice], Tensor]


def draw_without_replacement(proposal: Tensor, gumbel: Tensor, num_draws: int) -> Tensor:
    """``num_draws`` different tokens from ``proposal`` (..., V), in the order drawn: (..., num_draws) long.

    The largest of log q + ``gumbel`` (..., V), in falling order, are successive draws without replacement
    (Gumbel top-k, arXiv 1903.06059). Where fewer tokens have q > 0, tokens with q = 0 fill the end: the
    rules take them as not drafted.

    Raises:
        ValueError: more draws than the vocabulary has tokens.
    """
    if num_draws > proposal.shape[-1]:
        raise ValueError(
            f"num_draws must be at most the vocabulary, {proposal.shape[-1]} tokens, got {num_draws}; "
            "make the tree narrower"
        )
    return (proposal.log() + gumbel).topk(num_draws, dim=-1).indices


def draw_tree(
    tree: CandidateTree, root: Tensor, proposal_after: ProposalAfter, gumbel: Tensor, *, replacement: bool
) -> tuple[Tensor, Tensor]:
    """Tokens (B, N) long of ``tree`` below ``root`` (B,) long, and the q (B, N, V) they were drawn from.

    ``proposal_after(tokens, nodes)`` is asked once a level, with the tokens (B, N) filled so far and the
    nodes of that level as a slice; it answers with q after those nodes (B, M, V). ``gumbel`` is
    (B, N, V). The tree gives the number of children of a node; its ranks are not read. A chain is
    ``CandidateTree.chain(g)``, k independent chains are ``independent_chains(k, g)``. Rows of nodes on the
    last level stay 0.
    """
    B, (_, N, V) = root.shape[0], gumbel.shape
    tokens = root.new_zeros(B, N)
    tokens[:, 0] = root
    proposal = gumbel.new_zeros(B, N, V)
    levels = _levels(tree)
    for nodes, children in pairwise(levels):
        proposal[:, nodes] = proposal_after(tokens, nodes)
        parents, places = _places(tree, children)
        if replacement:
            drawn = (proposal[:, parents].log() + gumbel[:, children]).argmax(-1)
        else:
            widest = max(places) + 1
            drawn = draw_without_replacement(proposal[:, parents], gumbel[:, parents], widest)
            drawn = drawn.gather(2, torch.tensor(places, device=root.device).expand(B, -1)[..., None])[..., 0]
        tokens[:, children] = drawn
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


def kind_drawn(tree: CandidateTree, replacement: bool) -> DraftKind:
    """The kind of draft that :func:`draw_tree` makes of ``tree``."""
    if tree.depth == tree.num_nodes - 1:
        return DraftKind.CHAIN
    return DraftKind.WITH_REPLACEMENT if replacement else DraftKind.WITHOUT_REPLACEMENT


def _levels(tree: CandidateTree) -> list[slice]:
    """The nodes of each depth; they are contiguous, because a CandidateTree is in breadth-first order."""
    depths = [len(path) for path in tree.paths]
    return [slice(depths.index(d), depths.index(d) + depths.count(d)) for d in range(tree.depth + 1)]


def _places(tree: CandidateTree, children: slice) -> tuple[list[int], list[int]]:
    """The parent of each node in ``children`` and its place among its siblings, from 0."""
    parents = list(tree.parents[children])
    return parents, [parents[:i].count(parent) for i, parent in enumerate(parents)]


_DRAFT, _COIN, _RESIDUAL = 0x5DEECE66D, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85


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
    """A number for every (step, node), (B, N) long. Steps are 1,024 apart: trees have fewer nodes."""
    if num_nodes > 1024:
        raise ValueError(f"num_nodes must be at most 1024, got {num_nodes}")
    return root_positions[:, None] * 1024 + torch.arange(num_nodes, device=root_positions.device)
