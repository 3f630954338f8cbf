"""Typical acceptance, the rule of the Medusa paper: it accepts more, and the text is not the base's own."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance, deepest_path
from medusa.trees.candidate_tree import TreeTopology


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
