"""Acceptance rules against loops that say the same thing slowly."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_candidate_tree import trees

from medusa import CandidateTree, MedusaModel
from medusa.acceptance.exact import Acceptance, accept_by_walking, accept_equal, accept_typical
from medusa.trees.candidate_tree import TreeTopology


def lineage_of(tree: CandidateTree, node: int) -> list[int]:
    """The nodes from the root to ``node``."""
    above = [node]
    while above[-1]:
        above.append(tree.parents[above[-1]])
    return above[::-1]


def deepest(tree: CandidateTree, stays: list[bool]) -> int:
    """The first of the deepest nodes whose whole path stays; the root always does."""
    alive = [node for node in range(tree.num_nodes) if all(stays[n] for n in lineage_of(tree, node)[1:])]
    return max(alive, key=lambda node: (len(tree.paths[node]), -node))


def check(
    result: Acceptance, row: int, tree: CandidateTree, best: int, tokens: torch.Tensor, chosen: torch.Tensor
):
    path = lineage_of(tree, best)
    assert result.num_accepted[row] == len(path) - 1
    assert result.path[row].tolist() == path + [best] * (tree.depth + 1 - len(path))
    assert result.next_token[row] == chosen[row, best]
    emitted = [*tokens[row, path[1:]].tolist(), int(chosen[row, best])]
    assert result.tokens(tokens)[row, : len(path)].tolist() == emitted


@settings(max_examples=200, deadline=None)
@given(tree=trees(), num_rows=st.integers(1, 4), num_tokens=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_the_exact_rule_keeps_the_deepest_path_that_the_base_agrees_with(tree, num_rows, num_tokens, seed):
    """Few different tokens, so that siblings are often duplicates and paths often agree."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, num_tokens, (num_rows, tree.num_nodes), generator=generator)
    chosen = torch.randint(0, num_tokens, (num_rows, tree.num_nodes), generator=generator)
    result = accept_equal(tokens, chosen, tree.topology())
    for row in range(num_rows):
        stays = [bool(tokens[row, n] == chosen[row, tree.parents[n]]) for n in range(tree.num_nodes)]
        check(result, row, tree, deepest(tree, stays), tokens, chosen)


@settings(max_examples=200, deadline=None)
@given(tree=trees(), num_rows=st.integers(1, 4), num_tokens=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_walking_accepts_what_is_accepted_at_once_and_asks_at_accepted_nodes_alone(
    tree, num_rows, num_tokens, seed
):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, num_tokens, (num_rows, tree.num_nodes), generator=generator)
    chosen, by_path = torch.zeros_like(tokens), {}
    for row in range(num_rows):  # nodes of one text are followed by one token
        for node, path in enumerate(tree.paths):
            above = [tree.paths.index(path[:depth]) for depth in range(1, len(path) + 1)]
            drawn = int(torch.randint(0, num_tokens, (), generator=generator))
            chosen[row, node] = by_path.setdefault((row, *tokens[row, above].tolist()), drawn)
    asked = []

    def choose_after(rows, nodes, depth):
        asked.extend(zip(rows, nodes, [depth] * len(rows), strict=True))
        return chosen[rows, nodes].tolist()

    walked = accept_by_walking(tokens, tree.topology(), choose_after)
    at_once = accept_equal(tokens, chosen, tree.topology())
    assert walked.num_accepted.tolist() == at_once.num_accepted.tolist()
    assert walked.tokens(tokens).tolist() == at_once.tokens(tokens).tolist()
    assert len(asked) == int(walked.num_accepted.sum()) + num_rows
    assert all(len(tree.paths[node]) == depth for _, node, depth in asked)


def test_the_root_token_is_kept_whatever_stands_there():
    topology = CandidateTree.chain(1).topology()
    result = accept_equal(torch.tensor([[5, 9]]), torch.tensor([[7, 9]]), topology)
    assert result.num_accepted.tolist() == [0]
    assert result.path.tolist() == [[0, 0]]
    assert result.tokens(torch.tensor([[5, 9]])).tolist() == [[7, 7]]


def test_a_duplicate_sibling_with_the_longer_continuation_wins():
    tree = CandidateTree.from_paths([(0,), (1,), (1, 0)])
    result = accept_equal(torch.tensor([[5, 8, 8, 3]]), torch.tensor([[8, 3, 3, 4]]), tree.topology())
    assert result.path.tolist() == [[0, 2, 3]]
    assert result.num_accepted.tolist() == [2]
    assert result.next_token.tolist() == [4]


def test_a_match_below_a_miss_is_not_kept():
    tree = CandidateTree.chain(2)
    result = accept_equal(torch.tensor([[5, 8, 3]]), torch.tensor([[7, 3, 4]]), tree.topology())
    assert result.num_accepted.tolist() == [0]
    assert result.next_token.tolist() == [7]


def test_every_row_may_have_its_own_tree():
    one, other = CandidateTree.chain(2), CandidateTree.from_paths([(0,), (1,)])
    topology = TreeTopology.from_parents(
        torch.tensor([one.parents, other.parents]), torch.tensor([[0, 1, 2], [0, 1, 1]]), max_depth=2
    )
    tokens, chosen = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[2, 3, 4], [3, 3, 4]])
    result = accept_equal(tokens, chosen, topology)
    assert result.num_accepted.tolist() == [2, 1]
    assert result.path.tolist() == [[0, 1, 2], [0, 2, 2]]
    assert result.next_token.tolist() == [4, 4]


def plausible(scores: list[float], token: int, threshold: float, alpha: float) -> bool:
    """The rule of arXiv 2401.10774, section 3.3.2, in plain arithmetic."""
    weights = [math.exp(score) for score in scores]
    p = [weight / sum(weights) for weight in weights]
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    return p[token] > min(threshold, alpha * math.exp(-entropy))


@settings(max_examples=200, deadline=None)
@given(
    tree=trees(max_nodes=12),
    seed=st.integers(0, 2**31),
    sharpness=st.sampled_from([0.3, 1.0, 4.0]),
    with_zeros=st.booleans(),
)
def test_the_typical_rule_keeps_what_the_formula_keeps(tree, seed, sharpness, with_zeros):
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(2, tree.num_nodes, 12, generator=generator)
    if with_zeros:  # as top-k leaves them
        scores[..., ::3] = -torch.inf
    tokens = torch.randint(0, 12, (2, tree.num_nodes), generator=generator)
    chosen = scores.argmax(dim=-1)
    result = accept_typical(tokens, chosen, scores, tree.topology())
    for row in range(2):
        stays = [
            plausible(scores[row, tree.parents[n]].tolist(), int(tokens[row, n]), 0.09, 0.3)
            for n in range(tree.num_nodes)
        ]
        check(result, row, tree, deepest(tree, stays), tokens, chosen)


def accepts(probabilities: list[float], token: int, **options: float) -> bool:
    scores = torch.tensor([[probabilities, probabilities]]).log()
    chosen = torch.zeros(1, 2, dtype=torch.long)
    result = accept_typical(
        torch.tensor([[0, token]]), chosen, scores, CandidateTree.chain(1).topology(), **options
    )
    return bool(result.num_accepted[0])


def test_threshold_and_alpha_are_not_swapped():
    """A flat distribution (entropy 2.27): the bound is 0.3 / e^2.27 = 0.031, and 0.0093 with the two swapped.
    A peaked one (entropy 0.56): 0.09 and 0.051."""
    flat = [0.02] + [0.98 / 9] * 9
    assert not accepts(flat, token=0)
    assert accepts(flat, token=0, threshold=0.3, alpha=0.09)
    peaked = [0.83, 0.07, 0.1]
    assert not accepts(peaked, token=1)
    assert accepts(peaked, token=1, threshold=0.3, alpha=0.09)
    assert accepts(peaked, token=2)


def test_the_typical_rule_says_that_it_is_lossy_and_is_never_the_default():
    assert accept_typical.__doc__.startswith("LOSSY")
    assert "LOSSY" in MedusaModel.generate.__doc__
    for method in (MedusaModel.generate, MedusaModel.stream, MedusaModel.decode):
        assert inspect.signature(method).parameters["acceptance"].default == "exact"


@pytest.mark.parametrize("rule", ["equal", "typical"])
def test_the_callers_tensors_are_left_alone(rule):
    tree = CandidateTree.from_paths([(0,), (1,)])
    tokens, chosen, scores = torch.tensor([[1, 2, 3]]), torch.tensor([[3, 0, 0]]), torch.randn(1, 3, 5)
    before = [tensor.clone() for tensor in (tokens, chosen, scores)]
    if rule == "equal":
        accept_equal(tokens, chosen, tree.topology())
    else:
        accept_typical(tokens, chosen, scores, tree.topology())
    assert all(torch.equal(a, b) for a, b in zip(before, (tokens, chosen, scores), strict=True))
