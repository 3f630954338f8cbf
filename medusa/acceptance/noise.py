"""The noise of one step for sampled drafts: counter-based, three streams that never meet.

Rejected draft tokens were chosen with noise too. A later step that drafts the same position again must
not see that noise a second time, so everything here is keyed by the *step* (the position of its root
token, which no two steps of a row share) and the node. The default exact rule keys its noise by the
position of the chosen token instead; neither may be used for the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.acceptance.protocol import VerificationNoise
from medusa.acceptance.sampling import gumbel_noise

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
