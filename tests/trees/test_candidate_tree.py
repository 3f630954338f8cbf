"""Candidate trees: what may be built, what their tensors say, and that the best tree is the best one."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa import CandidateTree, best_tree
from medusa.trees.candidate_tree import MAX_NODES, TreeTopology, grown_path_values


def independent_path_values(rank_rates):
    """Path values where depths know nothing of each other: the product of ``rank_rates[d][r]``."""
    return grown_path_values(lambda path: rank_rates[len(path)] if len(path) < len(rank_rates) else ())


@st.composite
def trees(draw, max_depth: int = 5, max_width: int = 4, max_nodes: int = 20) -> CandidateTree:
    paths = {()}
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent = draw(st.sampled_from(sorted(paths)))
        if len(parent) < max_depth:
            paths.add((*parent, draw(st.integers(0, max_width - 1))))
    return CandidateTree.from_paths(paths)


def all_paths(width: int, depth: int) -> list[tuple[int, ...]]:
    return [path for d in range(1, depth + 1) for path in product(range(width), repeat=d)]


def test_paths_come_in_any_order_with_or_without_the_root():
    tree = CandidateTree.from_paths([(0, 1), [1], (0,)])
    assert tree.paths == ((), (0,), (1,), (0, 1))
    assert tree == CandidateTree.from_paths([(), (0,), (1,), (0, 1)])
    assert tree.num_nodes == 4 and tree.depth == 2
    assert tree.parents == (0, 0, 0, 1)
    assert tree.width_by_depth == (2, 2)


def test_a_tree_of_nothing_is_the_root_alone():
    assert CandidateTree.from_paths([]) == CandidateTree.chain(0)
    assert CandidateTree.chain(0).num_nodes == 1
    assert CandidateTree.chain(0).depth == 0
    assert CandidateTree.chain(0).width_by_depth == ()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (-1,)], r"ranks count from 0, got path \[-1\]"),
        ([(0,), (1,), (0,)], r"names each path once, got \[0\] more than once"),
        ([(0,), (1, 0)], r"\[1, 0\] is there, \[1\] is not; add the parent"),
        ([(0,), (0, 0, 0)], r"\[0, 0, 0\] is there, \[0, 0\] is not"),
        ([(0,), (0.5,)], r"a list of ranks, which are ints, got \(0.5,\)"),
        ([7], "a list of ranks, which are ints, got 7"),
        ([(0,) * 10**6], r"^.{,200}$"),
    ],
)
def test_paths_that_make_no_tree_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        CandidateTree.from_paths(paths)


def test_a_tree_of_more_nodes_than_a_mask_can_hold_is_refused_at_once():
    too_many = "a tree holds at most 4096 nodes, got"
    for build in (
        lambda: CandidateTree.from_paths((rank,) for rank in range(200_000)),
        lambda: CandidateTree.from_paths((rank,) for rank in range(MAX_NODES)),  # and the root
        lambda: CandidateTree.from_paths([(0,)] * 60_000),
        lambda: CandidateTree.chain(10**9),
    ):
        with pytest.raises(ValueError, match=too_many):
            build()
    largest = CandidateTree.from_paths((rank,) for rank in range(MAX_NODES - 1))
    assert largest.topology().ancestors.nbytes == MAX_NODES**2
    assert CandidateTree.chain(MAX_NODES - 1).depth == MAX_NODES - 1


def test_a_chain_of_negative_depth_is_refused():
    with pytest.raises(ValueError, match="depth must be at least 0, got -1"):
        CandidateTree.chain(-1)


def test_a_chain_holds_the_best_guess_of_each_head():
    assert CandidateTree.chain(3).paths == ((), (0,), (0, 0), (0, 0, 0))
    assert CandidateTree.chain(3).parents == (0, 0, 1, 2)


@given(tree=trees(), max_depth=st.integers(0, 6))
def test_a_subtree_keeps_the_nodes_no_deeper_than_asked(tree, max_depth):
    part = tree.subtree(max_depth)
    assert set(part.paths) == {path for path in tree.paths if len(path) <= max_depth}
    assert part == CandidateTree.from_paths(part.paths)
    assert part.depth == min(tree.depth, max_depth)


@given(tree=trees())
def test_topology_tensors_say_what_the_paths_say(tree):
    topology = tree.topology()
    index = {path: i for i, path in enumerate(tree.paths)}
    assert topology.num_nodes == tree.num_nodes and topology.max_depth == tree.depth
    for i, path in enumerate(tree.paths):
        above = [index[path[:d]] for d in range(len(path) + 1)]
        assert topology.parents[0, i] == index[path[:-1]]
        assert topology.depths[0, i] == len(path)
        assert topology.ancestors[0, i].nonzero().flatten().tolist() == sorted(above)
        assert topology.lineage[0, i].tolist() == above + [i] * (tree.depth - len(path))


@given(tree=trees())
def test_parents_stand_before_their_children(tree):
    assert all(parent < node for node, parent in enumerate(tree.parents) if node)


def test_topologies_of_several_rows_are_those_of_each_row():
    rows = [CandidateTree.chain(3), CandidateTree.from_paths([(0,), (1,), (1, 0)])]
    parents = torch.tensor([tree.parents for tree in rows])
    depths = torch.tensor([[len(path) for path in tree.paths] for tree in rows])
    together = TreeTopology.from_parents(parents, depths, max_depth=3)
    assert together.lineage.shape == (2, 4, 4)
    for row, tree in enumerate(rows):
        assert torch.equal(together.ancestors[row], tree.topology().ancestors[0])
        assert torch.equal(together.lineage[row, :, : tree.depth + 1], tree.topology().lineage[0])


def test_a_prompt_is_a_chain_in_which_each_token_sees_all_before_it():
    prompt = TreeTopology.chain(5, "cpu")
    tree = CandidateTree.chain(4).topology()
    assert torch.equal(prompt.parents, tree.parents)
    assert torch.equal(prompt.depths, tree.depths)
    assert torch.equal(prompt.ancestors, tree.ancestors)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_nodes=st.integers(1, 6))
def test_the_best_tree_is_worth_as_much_as_any_tree_of_its_size(data, num_nodes):
    """Against every prefix-closed set of paths of that size, for values that do not grow along a path."""
    values: dict[tuple[int, ...], float] = {(): 1.0}
    for path in all_paths(width=2, depth=3):
        values[path] = values[path[:-1]] * data.draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0]))
    del values[()]

    def worth(paths) -> float:
        return sum(values[path] for path in paths if path)

    def is_closed(paths) -> bool:
        return all(len(path) == 1 or path[:-1] in paths for path in paths)

    chosen = best_tree(values, num_nodes)
    assert chosen.num_nodes == num_nodes
    best = max(worth(paths) for paths in combinations(values, num_nodes - 1) if is_closed(paths))
    assert worth(chosen.paths) == pytest.approx(best)


def test_the_best_tree_ends_where_the_values_end():
    values = independent_path_values([[0.6, 0.2], [0.5], [0.4]])
    assert best_tree(values, 100).num_nodes == 1 + len(values) == 7
    assert best_tree(values, 3).paths == ((), (0,), (0, 0))


def test_a_value_whose_parent_has_none_is_out_of_reach():
    assert best_tree({(0,): 0.5, (1, 0): 0.9}, 10).paths == ((), (0,))


def test_a_best_tree_of_no_node_is_refused():
    with pytest.raises(ValueError, match=r"num_nodes must be at least 1 \(the root token\), got 0"):
        best_tree({(0,): 0.5}, 0)


def test_independent_values_are_products_of_the_rates():
    values = independent_path_values([[0.5, 0.25], [0.5, 0.0]])
    assert values == {(0,): 0.5, (1,): 0.25, (0, 0): 0.25, (1, 0): 0.125}


def test_grown_values_cut_short_are_the_largest_ones():
    rates = [[0.7, 0.2, 0.05], [0.6, 0.3], [0.5, 0.4]]
    everything = independent_path_values(rates)
    cut = grown_path_values(lambda path: rates[len(path)] if len(path) < 3 else (), max_paths=8)
    assert len(cut) == 8
    assert sorted(cut.values()) == pytest.approx(sorted(everything.values())[-8:])
