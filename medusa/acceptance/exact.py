"""The exact rule: a node stays if its token is the one that the base model writes after its parent.

It takes candidates as they are, wherever they come from, and gives the text of plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.trees.candidate_tree import TreeTopology


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one step, for every row."""

    path: Tensor
    """(B, L) long: the accepted nodes from the root down; past ``num_accepted`` the last one repeats."""
    num_accepted: Tensor
    """(B,) long: accepted nodes, the root token not counted."""
    next_token: Tensor
    """(B,) long: what follows the accepted path; the next root token."""

    def tokens(self, draft_tokens: Tensor) -> Tensor:
        """New tokens of the step, (B, L) long: the accepted drafts, then ``next_token``, repeated."""
        shifted = torch.cat([self.path[:, 1:], self.path[:, -1:]], dim=1)
        slots = torch.arange(shifted.shape[1], device=shifted.device)
        is_draft = slots < self.num_accepted[:, None]
        return torch.where(is_draft, draft_tokens.gather(1, shifted), self.next_token[:, None])


def accept_equal(draft_tokens: Tensor, chosen: Tensor, topology: TreeTopology) -> Acceptance:
    """The exact rule: a node stays if it and all before it equal what the base chose at their parents.

    draft_tokens (B, N) long, chosen (B, N) long: the base's choice after each node, which depends on
    the node's logits, the seed and the position alone. The deepest such node wins, and the base's
    choice there is the next token; it is never drawn again. Hence the output is what one token at a
    time would have given, whatever was drafted.
    """
    if topology.num_nodes == 1:  # plain decoding
        nothing = torch.zeros_like(chosen)
        return Acceptance(nothing, nothing[:, 0], chosen[:, 0])
    parents = topology.parents.expand_as(draft_tokens)
    matches = draft_tokens == chosen.gather(1, parents)
    matches[:, 0] = True
    return deepest_path(matches, chosen, topology)


def deepest_path(stays: Tensor, chosen: Tensor, topology: TreeTopology) -> Acceptance:
    """The deepest node all of whose path ``stays`` (B, N) bool."""
    broken = (topology.ancestors & ~stays[:, None, :]).any(dim=2)  # (B, N)
    depths = topology.depths.expand_as(stays)
    best = torch.where(broken, -1, depths).argmax(dim=1)  # (B,)
    return accepted_up_to(best, chosen.gather(1, best[:, None]).squeeze(1), topology)


def accepted_up_to(best: Tensor, next_token: Tensor, topology: TreeTopology) -> Acceptance:
    """The path that ends in node ``best`` (B,) long, followed by ``next_token`` (B,) long."""
    lineage = topology.lineage.expand(len(best), -1, -1)
    path = lineage.gather(1, best[:, None, None].expand(-1, 1, lineage.shape[2])).squeeze(1)
    depths = topology.depths.expand(len(best), -1)
    return Acceptance(path, depths.gather(1, best[:, None]).squeeze(1), next_token)


def accept_typical(
    draft_tokens: Tensor,
    chosen: Tensor,
    scores: Tensor,
    topology: TreeTopology,
    threshold: float = 0.09,
    alpha: float = 0.3,
) -> Acceptance:
    """LOSSY: a node stays if the base finds its token plausible enough (arXiv 2401.10774, section 3.3.2).

    A token x stays when p(x) > min(threshold, alpha * exp(-H(p))), p = softmax of the parent's
    ``scores`` (B, N, V) and H its entropy in nats. The text differs from plain decoding, and its
    distribution from the model's.
    """
    log_p = scores.log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(dim=-1)  # (B, N)
    bound = (alpha * torch.exp(-entropy)).clamp(max=threshold)
    parents = topology.parents.expand_as(draft_tokens)
    parent_log_p = log_p.gather(1, parents[..., None].expand_as(log_p))
    probability = parent_log_p.gather(2, draft_tokens[..., None]).squeeze(2).exp()
    plausible = probability > bound.gather(1, parents)
    plausible[:, 0] = True
    return deepest_path(plausible, chosen, topology)
