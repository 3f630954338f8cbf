"""What counted ranks say: of heads, of the best tree, and of the steps that decoding with a tree takes."""

from __future__ import annotations

import math

import pytest
import torch

from medusa import CandidateTree, best_tree
from medusa.trees import rank_counts
from medusa.trees.candidate_tree import grown_path_values
from medusa.trees.rank_counts import MISS, UNKNOWN, RankCounts


def independent_path_values(rank_rates):
    """Path values where depths know nothing of each other: the product of ``rank_rates[d][r]``."""
    return grown_path_values(lambda path: rank_rates[len(path)] if len(path) < len(rank_rates) else ())


def counts_of(*answers, max_rank=4):
    return RankCounts(tuple(torch.tensor(answer, dtype=torch.int16) for answer in answers), max_rank)


def marginal_tree(counts, num_nodes):
    rates = counts.head_counts / torch.tensor(counts.head_totals)[:, None]
    return best_tree(independent_path_values(rates.tolist()), num_nodes)


def expected_tokens_per_step(counts, tree):
    """Tokens per step when a step starts at every position of the text alike."""
    return 1 + sum(counts.joint_counts[path] for path in tree.paths if path) / counts.num_positions


def test_top_k_accuracy_counts_known_positions_only():
    counts = counts_of([[0, 2], [1, MISS], [0, 0], [3, UNKNOWN], [UNKNOWN, UNKNOWN]])
    assert counts.top_k_accuracy(1) == [0.5, 1 / 3]
    assert counts.top_k_accuracy(3) == [0.75, 2 / 3]
    with pytest.raises(ValueError, match=r"k must be in \[1, max_rank=4\], got 5"):
        counts.top_k_accuracy(5)
    assert math.isnan(counts_of([[0, UNKNOWN]]).top_k_accuracy(1)[1])


def test_joint_counts_beat_marginals_where_ranks_are_correlated():
    # Rank 1 follows rank 0 and rank 0 follows rank 1, always; by marginals the four pairs look alike.
    counts = counts_of([[0, 1], [1, 0]] * 50)
    joint, marginal = counts.best_tree(5), marginal_tree(counts, 5)
    assert set(joint.paths) == {(), (0,), (1,), (0, 1), (1, 0)}
    assert expected_tokens_per_step(counts, joint) == 3.0
    assert expected_tokens_per_step(counts, marginal) == 2.5


@pytest.mark.parametrize("num_nodes", [2, 5, 9, 17])
def test_with_many_counts_the_joint_tree_is_never_worse_than_the_marginal_one(num_nodes):
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 5, (4000,), generator=generator)
    stays = torch.rand(4000, generator=generator) < 0.7
    second = torch.where(stays, first, torch.randint(0, 5, (4000,), generator=generator))
    ranks = torch.stack([first, second], dim=1)
    counts = RankCounts((ranks.masked_fill(ranks == 4, MISS).to(torch.int16),), max_rank=4)
    joint = expected_tokens_per_step(counts, counts.best_tree(num_nodes))
    assert joint >= expected_tokens_per_step(counts, marginal_tree(counts, num_nodes)) - 1e-9


def test_path_values_never_grow_along_a_path_and_fall_back_to_independence(monkeypatch):
    counts = counts_of([[0, 1], [1, 0], [MISS, 0], [0, MISS]])
    values = counts.path_values()
    assert all(values[path] <= values[path[:-1]] for path in values if len(path) > 1)
    monkeypatch.setattr(rank_counts, "PRIOR_STRENGTH", 1e9)
    trusting_only_marginals = counts.path_values()
    # Of 4 positions one has rank 1, for either head; each of the 4 ranks counts 0.1 more.
    assert trusting_only_marginals[(1, 1)] == pytest.approx((1.1 / 4.4) ** 2)
    monkeypatch.setattr(rank_counts, "PRIOR_STRENGTH", 1e-9)
    assert counts.path_values()[(1, 1)] == pytest.approx(0.0, abs=1e-6)


def test_a_tree_of_any_size_can_be_built_from_few_counts_and_no_deeper_than_asked():
    counts = counts_of([[0, 1], [0, 0]])
    assert counts.best_tree(21).num_nodes == 21, "4 ranks of 2 heads make 1 + 4 + 16 nodes"
    assert counts.best_tree(21, max_depth=1).num_nodes == 5
    assert counts.best_tree(3).paths == ((), (0,), (0, 0))
    with pytest.raises(ValueError, match="num_nodes must be at least 1"):
        counts.best_tree(0)


def test_expected_tokens_per_step_averages_over_positions_and_replay_walks():
    # From position 0 both guesses are right; position 1 and 2 are then never the start of a step.
    counts = counts_of([[0, 0], [MISS, 0], [MISS, 0], [0, 0], [0, UNKNOWN], [UNKNOWN, UNKNOWN]])
    chain = CandidateTree.chain(2)
    assert counts.num_positions == 4
    assert expected_tokens_per_step(counts, chain) == 1 + (2 + 0 + 0 + 2) / 4
    # Steps: 0 -> 3 (2 accepted), 3 -> 5 (one accepted, then the answer is over: its own token is cut).
    assert counts.replay(chain) == [(2, 5)]
    assert counts.replay(CandidateTree.chain(0)) == [(5, 5)]


def test_halves_deal_the_answers_out():
    counts = counts_of([[0]], [[1]], [[2]])
    even, odd = counts.halves()
    assert [ranks.tolist() for ranks in even.ranks] == [[[0]], [[2]]]
    assert [ranks.tolist() for ranks in odd.ranks] == [[[1]]]
    with pytest.raises(ValueError, match="at least 2 answers, got 1"):
        odd.halves()


def test_held_out_tokens_per_step_judges_a_tree_on_other_answers():
    # Each half likes the rank that the other half never sees.
    even = torch.zeros(50, 1, dtype=torch.int16)
    odd = torch.ones(50, 1, dtype=torch.int16)
    counts = RankCounts((even, odd, even, odd), max_rank=2)
    num_steps, num_tokens = map(sum, zip(*counts.replay(counts.best_tree(2)), strict=True))
    assert num_tokens / num_steps > 1.3
    assert counts.held_out_tokens_per_step(2) == 1.0
    assert counts.held_out_tokens_per_step(3) == pytest.approx(2.0, abs=0.05)


def test_counts_of_two_texts_add_up_to_those_of_both():
    both = counts_of([[0]]) + counts_of([[1], [0]])
    assert [ranks.flatten().tolist() for ranks in both.ranks] == [[0], [1, 0]]


def test_counts_of_different_heads_are_not_added():
    with pytest.raises(ValueError, match=r"agree in \(max_rank, heads\)"):
        counts_of([[0]]) + counts_of([[0]], max_rank=5)
