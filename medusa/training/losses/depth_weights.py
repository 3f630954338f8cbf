"""How much the loss of each target counts at each depth.

``decay`` weighs depth k by decay^k (arXiv 2401.10774). ``dpace`` weighs by what the target does for the
expected number of accepted tokens, given how good the heads are now (D-PACE, arXiv 2605.18810, eq. 7 to 9).
With q_k the probability that the head of depth k gives the text's own token, seen from one position,

    w_k = sum over m >= k of  product over i <= m of ((1 - a) * q_i + a),

detached: the derivative of the smoothed expected length with respect to log q_k. The path of a target is
the tokens that heads predict from the *same* position: the head of depth k at position s predicts s + k + 1,
and before it come the heads of depths below k at s, which predict other targets.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from medusa.training.losses.alignment import Alignment

DepthWeighting = Literal["decay", "dpace"]


def decay_weights(alignment: Alignment, decay: float) -> Tensor:
    """(K, S): decay^k for the targets of depth k, 0 where a target has no source."""
    is_scored = alignment.sources[1:] >= 0
    depths = torch.arange(1, alignment.num_heads + 1, device=is_scored.device)
    return decay ** depths[:, None] * is_scored


def acceptance_weights(confidence: Tensor, alignment: Alignment, num_states: int, smoothing: float) -> Tensor:
    """(K, S): the D-PACE weight of each target at each depth, 0 where a target has no source.

    A token that is no label ends nothing and earns nothing: the path goes through it as if it were given. A
    label that the heads have no column for is one that they never guess.

    Args:
        confidence: (K, S) probabilities that the heads give the targets.
        num_states: P, the states that ``alignment`` points into.
        smoothing: a in [0, 1]; above 0 depths keep a weight while the heads before them are still bad.
    """
    starts, missed = (
        torch.where(each >= 0, each, num_states) for each in (alignment.sources[1:], alignment.unmapped)
    )
    reached = confidence.new_ones(len(confidence), num_states + 1)  # the last column takes what has no source
    is_label = torch.zeros_like(reached)
    reached.scatter_(1, starts, (1 - smoothing) * confidence + smoothing)
    reached.scatter_(1, missed, smoothing)
    for places in (starts, missed):
        is_label.scatter_(1, places, 1.0)
    earned = reached.cumprod(0) * is_label  # (K, P + 1)
    weights = earned.flip(0).cumsum(0).flip(0).gather(1, starts)  # (K, S)
    return weights * (alignment.sources[1:] >= 0)
