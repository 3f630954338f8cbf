"""What heads in training would give a user: tokens per step, replayed on held-out documents."""

from __future__ import annotations

from medusa.base.causal_lm import CausalLM
from medusa.heads.calibration import calibrate
from medusa.heads.eagle import Heads
from medusa.training.data.documents import Documents

NUM_NODES = 64
"""Of the tree: what a GPU verifies in about the time of one node."""


def replayed_metrics(
    base: CausalLM, heads: Heads | None, documents: Documents, at_most: int
) -> dict[str, float]:
    """``held_out/tokens_per_step`` of greedy decoding with a tree of :data:`NUM_NODES` nodes, by ``heads``.

    Replayed, not decoded: each head's guesses are read once along the answers of ``at_most`` documents. Each
    half of the answers is judged with the tree of the other. Empty without heads, and where a half has no
    answer long enough to see every head guess.
    """
    answers = [row for row in documents.answers(at_most) if any(row.is_label[1:])]
    if heads is None or not answers:
        return {}
    counts = calibrate(base, heads, answers)
    if len(counts.ranks) < 2 or not all(half.num_positions for half in counts.halves()):
        return {}
    return {"held_out/tokens_per_step": counts.held_out_tokens_per_step(NUM_NODES)}
