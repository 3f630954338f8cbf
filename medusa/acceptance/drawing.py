"""Drawing a draft from q, decided by noise the caller brings: one implementation for drafters and tests.

The noise must be independent of the verifier's (``VerificationNoise``).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from medusa.acceptance.protocol import DraftKind
from medusa.trees.candidate_tree import CandidateTree

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
