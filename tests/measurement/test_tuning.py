from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_chat import chat_heads, chat_model, wide_tree

from medusa import CandidateTree, HeadsCheckpoint, load_heads, save_heads, save_tree
from medusa.measurement.tuning import (
    TreeSize,
    fastest,
    file_asked_for,
    file_tuned,
    measure_step_seconds,
    trees_by_size,
)
from medusa.prompts import padded_batch
from medusa.trees.rank_counts import RankCounts
from medusa.trees.tuned_trees import Runtime, TunedTree


def test_step_times_are_taken_for_every_tree_in_every_round():
    model = chat_model()
    inputs = {"input_ids": torch.arange(10)[None]}
    trees = {1: CandidateTree.chain(0), 13: wide_tree()}
    seconds = measure_step_seconds(model, trees, [inputs] * 3, num_steps=2)
    assert set(seconds) == {1, 13}
    assert all(0 < value < 5 for value in seconds.values())
    with pytest.raises(ValueError, match="no answer lasted two steps with the tree of 1 node;"):
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


def test_a_tree_must_beat_plain_decoding_by_more_than_noise():
    plain = TreeSize(1, 0, tokens_per_step=1.0, step_seconds=1.0)
    barely = TreeSize(4, 2, tokens_per_step=1.22, step_seconds=1.2)
    assert fastest([plain, barely]) is plain
    clearly = TreeSize(4, 2, tokens_per_step=1.25, step_seconds=1.2)
    assert fastest([plain, clearly]) is clearly


def test_the_speed_of_a_batch_is_that_of_its_rows_together():
    assert TreeSize(4, 2, 1.5, step_seconds=2.0, batch_size=8).tokens_per_second == 6.0


def test_batches_are_timed_too_and_a_hopeless_size_is_not_timed(monkeypatch):
    model = chat_model()
    rows = [
        {"input_ids": torch.arange(n)[None], "attention_mask": torch.ones(1, n, dtype=torch.long)}
        for n in (10, 3, 6)
    ]
    trees = {1: CandidateTree.chain(0), 2: CandidateTree.chain(1), 13: wide_tree()}
    worth = {1: 1.0, 2: 0.9, 13: 1e-9}
    seconds = measure_step_seconds(model, trees, [padded_batch(rows)] * 3, tokens_per_step=worth)
    assert list(seconds) == [1, 2]


def test_what_a_first_run_sets_up_makes_no_later_size_hopeless(monkeypatch):
    trees = {1: CandidateTree.chain(0), 2: CandidateTree.chain(1), 3: CandidateTree.chain(2)}
    runs = []

    def step_seconds(_model, tree, _batch, _num_steps):
        runs.append(tree.num_nodes)
        return 100.0 if runs == [1, 1, 2] else 1.0

    monkeypatch.setattr("medusa.measurement.tuning._step_seconds", step_seconds)
    seconds = measure_step_seconds(None, trees, [{}] * 2, tokens_per_step={1: 1.0, 2: 1.3, 3: 1.5})
    assert list(seconds) == [1, 2, 3]


def measured_seconds(stream, **options):
    """Of a step of a stand-in for a model, whose ``stream`` moves the clock."""
    clock = [0.0]
    model = SimpleNamespace(
        device=torch.device("cpu"), stream=lambda statistics, **arguments: stream(clock, statistics)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa.measurement.tuning.time.perf_counter", lambda: clock[0])
        found = measure_step_seconds(model, {1: CandidateTree.chain(0)}, [{}] * 2, **options)
    return found[1]


def test_steps_are_timed_only_while_every_row_decodes():
    """The mean is over steps 2 to 3, then a row has ended."""

    def stream(clock, statistics):
        for number, taken in enumerate((5.0, 100.0, 2.0, 4.0, 1000.0)):
            clock[0] += taken
            statistics.num_passes = number
            yield SimpleNamespace(tokens=[[1], [2]] if number < 4 else [[1], []])

    assert measured_seconds(stream) == 3.0


def test_steps_that_come_in_bursts_are_timed_from_burst_to_burst():
    """Three steps of 3 seconds come at a time, and 50 seconds of setting up in the second burst."""

    def stream(clock, statistics):
        step = SimpleNamespace(tokens=([1],))
        yield step
        for burst in range(1, 10):
            clock[0] += 9.0 + 50.0 * (burst == 2)
            statistics.setup_seconds += 50.0 * (burst == 2)
            statistics.num_passes += 3
            yield from [step] * 3

    assert measured_seconds(stream, num_steps=4) == 3.0


# ------------------------------------------------------------------ what is written

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
    assert said[1] == "default tree: now the tree of batch size 1 (2 nodes; before, 13 nodes)"


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


def test_a_tree_asked_for_on_a_card_is_not_hidden_by_those_of_another_card(heads):
    card, processor = Runtime("a card", "bfloat16", "eager"), TunedTree(HERE, 1, CHAIN(2))
    others = [TunedTree(replace(card, device=name), 1, CHAIN(2)) for name in ("another", "a third")]
    save_tree(heads, CHAIN(3), [processor, TunedTree(card, 1, CHAIN(2)), *others])
    file_asked_for(heads, CHAIN(1), card, TIMED_HERE)
    assert load_heads(heads).tuned == (processor,)
