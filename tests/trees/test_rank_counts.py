"""What ranks say of a tree on answers that did not choose it."""

import pytest
import torch

from medusa.trees.rank_counts import RankCounts


def test_held_out_tokens_per_step_judges_a_tree_on_other_answers():
    # Each half likes the rank that the other half never sees.
    even = torch.zeros(50, 1, dtype=torch.int16)
    odd = torch.ones(50, 1, dtype=torch.int16)
    counts = RankCounts((even, odd, even, odd), max_rank=2)
    assert counts.replayed_tokens_per_step(counts.best_tree(2)) > 1.3
    assert counts.held_out_tokens_per_step(2) == 1.0
    assert counts.held_out_tokens_per_step(3) == pytest.approx(2.0, abs=0.05)
