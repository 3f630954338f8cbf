import pytest
import torch
from tiny_chat import chat_model, wide_tree

from medusa import CandidateTree
from medusa.calibration import RankCounts
from medusa.tuning import TreeSize, fastest, held_out_tokens_per_step, measure_step_seconds, trees_by_size


def test_step_times_are_taken_for_every_tree_in_every_round():
    model = chat_model()
    inputs = {"input_ids": torch.arange(10)[None]}
    trees = {1: CandidateTree.chain(0), 13: wide_tree()}
    seconds = measure_step_seconds(model, trees, [inputs] * 3, num_steps=2)
    assert set(seconds) == {1, 13}
    assert all(0 < value < 5 for value in seconds.values())
    with pytest.raises(ValueError, match="no answer lasted a step with the tree of 1 nodes"):
        measure_step_seconds(model, trees, [inputs])


def test_the_fastest_size_may_be_plain_decoding():
    plain = TreeSize(1, 0, tokens_per_step=1.0, step_seconds=1.0)
    slow = TreeSize(8, 2, tokens_per_step=1.8, step_seconds=2.0)
    fast = TreeSize(4, 2, tokens_per_step=1.5, step_seconds=1.2)
    assert fastest([plain, slow]) is plain
    assert fastest([plain, fast, slow]) is fast


def test_sizes_that_the_counts_cannot_fill_are_left_out():
    counts = RankCounts((torch.tensor([[0], [1], [0]], dtype=torch.int16),), max_rank=2)
    assert list(trees_by_size(counts, (1, 2, 3, 4, 64))) == [1, 2, 3]


def test_held_out_tokens_per_step_judges_a_tree_on_other_answers():
    # Each half likes the rank that the other half never sees.
    even = torch.zeros(50, 1, dtype=torch.int16)
    odd = torch.ones(50, 1, dtype=torch.int16)
    counts = RankCounts((even, odd, even, odd), max_rank=2)
    assert counts.replayed_tokens_per_step(counts.best_tree(2)) > 1.3
    assert held_out_tokens_per_step(counts, 2) == 1.0
    assert held_out_tokens_per_step(counts, 3) == pytest.approx(2.0, abs=0.05)
