"""What tuning writes into a heads directory, what it leaves, and that it says so."""

import pytest
from tiny_chat import chat_heads, wide_tree

from medusa import CandidateTree, HeadsCheckpoint, load_heads, save_heads, save_tree
from medusa.measurement.tuning import file_asked_for, file_tuned
from medusa.trees.tuned_trees import Runtime, TunedTree

HERE, ELSEWHERE = Runtime("this processor", "float32", "packed"), Runtime("a card", "bfloat16", "eager")
CHAIN = CandidateTree.chain
TIMED_HERE = {"device": "this processor", "dtype": "float32", "engine": "packed", "num_positions": 9}


@pytest.fixture
def heads(tmp_path):
    """A heads directory as training leaves it: a tree that nobody timed."""
    return save_heads(HeadsCheckpoint(chat_heads(), "tiny", wide_tree()), tmp_path / "heads")


def test_the_tree_of_batch_size_1_replaces_a_default_that_nobody_timed(heads):
    tuned = [TunedTree(HERE, 1, CHAIN(1)), TunedTree(HERE, 4, CHAIN(0))]
    said = file_tuned(heads, tuned, TIMED_HERE)
    loaded = load_heads(heads)
    assert (loaded.tree, loaded.tuned, loaded.tree_origin) == (CHAIN(1), tuple(tuned), TIMED_HERE)
    assert "2 nodes for batch size 1 on this processor, float32, packed, general steps" in said[0]
    assert "the root alone for batch size 4" in said[0]
    assert said[1] == "default tree: now that of batch size 1 (2 nodes; before, 13 nodes)"


def test_without_batch_size_1_the_default_tree_stays_with_its_origin(heads):
    save_tree(heads, CHAIN(3), [TunedTree(ELSEWHERE, 1, CHAIN(2))], **TIMED_HERE)
    said = file_tuned(heads, [TunedTree(HERE, 4, CHAIN(1))], {"device": "none of it"})
    loaded = load_heads(heads)
    assert (loaded.tree, loaded.tree_origin) == (CHAIN(3), TIMED_HERE)
    assert [entry.tree for entry in loaded.tuned] == [CHAIN(2), CHAIN(1)]
    assert said[1:] == [
        "default tree: left as it was (4 nodes): batch size 1 was not tuned",
        "tuned trees for anything else, left as they were: 1",
    ]


@pytest.mark.parametrize(
    "entry", [TunedTree(ELSEWHERE, 1, CHAIN(1)), TunedTree(HERE, 1, CHAIN(1), step="static")], ids=str
)
def test_a_default_tuned_on_another_runtime_stays(heads, entry):
    save_tree(heads, CHAIN(3), **TIMED_HERE)
    said = file_tuned(heads, [entry], {"device": "none of it"})
    loaded = load_heads(heads)
    assert (loaded.tree, loaded.tuned, loaded.tree_origin) == (CHAIN(3), (entry,), TIMED_HERE)
    assert said[1].endswith("it was tuned on this processor, float32, packed, general steps")


def test_a_default_tuned_on_the_same_runtime_is_replaced(heads):
    save_tree(heads, CHAIN(3), [TunedTree(HERE, 1, CHAIN(3))], **TIMED_HERE)
    file_tuned(heads, [TunedTree(HERE, 1, CHAIN(2))], TIMED_HERE)
    loaded = load_heads(heads)
    assert (loaded.tree, loaded.tuned) == (CHAIN(2), (TunedTree(HERE, 1, CHAIN(2)),))


def test_where_there_was_no_tree_the_default_stays_the_chain_it_stood_for(heads):
    (heads / "tree.json").unlink()
    file_tuned(heads, [TunedTree(HERE, 4, CHAIN(1))], TIMED_HERE)
    assert load_heads(heads).tree == CHAIN(3)


def test_a_tree_asked_for_becomes_the_default_and_what_would_hide_it_goes(heads):
    tuned = [
        TunedTree(ELSEWHERE, 1, CHAIN(2)),
        TunedTree(HERE, 1, CHAIN(2)),
        TunedTree(HERE, 4, CHAIN(2), step="static"),
    ]
    save_tree(heads, CHAIN(3), tuned, device="another", dtype="float32", engine="eager")
    said = file_asked_for(heads, CHAIN(1), HERE, TIMED_HERE)
    loaded = load_heads(heads)
    assert (loaded.tree, loaded.tuned, loaded.tree_origin) == (CHAIN(1), tuple(tuned[:1]), TIMED_HERE)
    assert said[1].endswith("on this processor, float32, packed: 2")
