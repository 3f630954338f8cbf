"""Trees by runtime and batch size: what is written is what is read, and a model takes its own."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import left_padded, random_prompts, tiny_model
from tiny_chat import chat_base, chat_heads, wide_tree

from medusa import (
    CandidateTree,
    HeadsCheckpoint,
    HeadsConfig,
    MedusaHeads,
    MedusaModel,
    load_heads,
    save_heads,
    save_tree,
)
from medusa.trees.tuned_trees import Runtime, Trees, TunedTree, for_runtime, merged

HERE = MedusaModel(chat_base()).runtime
ELSEWHERE = Runtime("some graphics card", "bfloat16", "eager")
CHAIN, ROOT = CandidateTree.chain, CandidateTree.chain(0)


def tuned_trees(runtime=HERE):
    return (TunedTree(runtime, 8, ROOT), TunedTree(runtime, 2, CHAIN(2)), TunedTree(runtime, 1, CHAIN(3)))


@pytest.fixture
def saved(tmp_path):
    """A heads directory with a default tree and trees tuned here and elsewhere."""
    tuned = (*tuned_trees(), TunedTree(ELSEWHERE, 1, CHAIN(1), {"tokens_per_step": 1.5}))
    return save_heads(HeadsCheckpoint(chat_heads(), "tiny", wide_tree(), tuned=tuned), tmp_path / "heads")


def test_entries_are_read_as_they_were_written(saved):
    loaded = load_heads(saved)
    assert loaded.tree == wide_tree()
    assert loaded.tuned[-1] == TunedTree(ELSEWHERE, 1, CHAIN(1), {"tokens_per_step": 1.5})
    assert loaded.tuned[:3] == tuned_trees()


def test_an_entry_that_names_no_kind_of_step_is_of_general_steps(saved):
    """Files were written so before entries had a kind of step."""
    written = json.loads((saved / "tree.json").read_text())
    assert {entry.pop("step") for entry in written["tuned"]} == {"general"}
    (saved / "tree.json").write_text(json.dumps(written))
    loaded = load_heads(saved)
    assert loaded.tuned[:3] == tuned_trees()
    model = MedusaModel.from_pretrained(chat_base(), loaded, engine="eager")
    assert model.tree_for(1) == CHAIN(3)


def test_where_a_tree_came_from_survives_another_saving(saved, tmp_path):
    save_tree(saved, CHAIN(1), device="some card", num_positions=7)
    loaded = load_heads(saved)
    assert loaded.tree_origin == {"device": "some card", "num_positions": 7}
    assert load_heads(save_heads(loaded, tmp_path / "again")).tree_origin == loaded.tree_origin


def test_a_call_takes_the_tree_that_was_tuned_for_its_kind_of_step(tmp_path):
    static = TunedTree(HERE, 1, CHAIN(1), step="static")
    checkpoint = HeadsCheckpoint(chat_heads(), "tiny", wide_tree(), tuned=(*tuned_trees(), static))
    model = MedusaModel.from_pretrained(chat_base(), checkpoint, engine="eager")
    assert model.tree_for(1).depth == 3 and model.tree_for(2).depth == 2
    assert model.tree_for(1, "static").depth == model.tree_for(8, "static").depth == 1
    assert model.tree_for(1, "compiled").depth == 3, "none was timed: general steps are the best guess"
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    for step, depth in (("general", 3), ("static", 1)):
        model = MedusaModel.from_pretrained(chat_base(), checkpoint, engine="eager", step=step)
        out = model.generate(torch.arange(9)[None], **options, drafter="heads")
        assert len(out.statistics.accepted_histogram) == depth + 1
        streamed = list(model.stream(torch.arange(9)[None], max_new_tokens=8, do_sample=False, step=step))
        assert max(len(each.tokens[0]) for each in streamed) <= depth + 1
    own = MedusaModel.from_pretrained(chat_base(), checkpoint, engine="eager", step="static")
    assert own.tree.depth == 1


def test_a_tree_tuned_for_another_kind_of_step_is_left_alone():
    static = TunedTree(HERE, 1, CHAIN(1), step="static")
    checkpoint = HeadsCheckpoint(chat_heads(), "tiny", wide_tree(), tuned=(static,))
    model = MedusaModel.from_pretrained(chat_base(), checkpoint, engine="eager")
    assert model.tree == wide_tree()


def test_a_file_of_one_tree_is_read_as_before(saved):
    (saved / "tree.json").write_text(json.dumps({"paths": [[], [0]], "num_nodes": 2}))
    loaded = load_heads(saved)
    assert (loaded.tree, loaded.tuned) == (CHAIN(1), ())


@pytest.mark.parametrize(
    ("batch_size", "depth"), [(1, 3), (2, 2), (3, 0), (8, 0), (64, 0)], ids=lambda value: str(value)
)
def test_a_model_takes_the_tree_of_the_nearest_batch_size_at_or_above(saved, batch_size, depth):
    model = MedusaModel.from_pretrained(chat_base(), saved, engine="eager")
    assert model.tree_for(batch_size).depth == depth
    assert model.tree.depth == 3, "the tree of a single row"


@pytest.mark.parametrize(
    "change", [{"device": "another device"}, {"dtype": "bfloat16"}, {"engine": "packed"}], ids=str
)
def test_a_tree_tuned_elsewhere_is_left_alone(tmp_path, change):
    runtime = Runtime(**{"device": HERE.device, "dtype": HERE.dtype, "engine": HERE.engine, **change})
    checkpoint = HeadsCheckpoint(chat_heads(), "tiny", wide_tree(), tuned=tuned_trees(runtime))
    model = MedusaModel.from_pretrained(chat_base(), checkpoint, engine="eager")
    assert model.tree_for(1) == model.tree_for(8) == wide_tree()


def test_a_card_that_no_tree_was_tuned_on_takes_those_of_another_card_of_the_same_precision():
    half = Runtime("another card", "float16", "eager")
    processor = Runtime("cpu: some processor, 8 cores", "bfloat16", "eager")
    trees = (*tuned_trees(processor), *tuned_trees(half), *tuned_trees(ELSEWHERE))
    card = replace(ELSEWHERE, device="a third card")
    assert [tuned.runtime for tuned in for_runtime(trees, card)] == [ELSEWHERE] * 3
    assert [tuned.batch_size for tuned in for_runtime(trees, card)] == [1, 2, 8]
    own, captured = TunedTree(card, 1, ROOT), TunedTree(ELSEWHERE, 1, CHAIN(1), step="captured")
    assert for_runtime((*trees, own), card) == (own,)
    assert for_runtime((*trees, own, captured), card) == (own, captured), "by kind of step"
    tree = Trees(ROOT, (captured,)).tree_for(4, "general")
    assert tree == CHAIN(1), "on a card nodes are cheap in steps of any kind"
    for runtime in (replace(card, dtype="float32"), replace(processor, device="cpu: another, 2 cores")):
        assert for_runtime(trees, runtime) == ()


def test_an_explicit_tree_wins_over_every_entry(saved):
    model = MedusaModel.from_pretrained(chat_base(), saved, tree=CHAIN(1), engine="eager")
    assert model.tree_for(1) == model.tree_for(8) == CHAIN(1)


def test_auto_is_filed_under_the_engine_it_stands_for():
    assert MedusaModel(chat_base(), engine="auto").runtime.engine in ("packed", "eager")


def test_a_call_decodes_with_the_tree_of_its_batch_size_and_the_same_tokens():
    base = tiny_model("llama")
    heads = MedusaHeads(HeadsConfig(32, 61, num_heads=3))
    model = MedusaModel(base, heads, wide_tree(), tuned=tuned_trees(MedusaModel(base).runtime))
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    for num_rows, depth in ((1, 3), (2, 2), (3, 0)):
        batch = left_padded(random_prompts(num_rows, 9), [9, 4, 6][:num_rows])
        out = model.generate(**batch, **options, drafter="heads")
        assert len(out.statistics.accepted_histogram) == depth + 1
        for tree in (ROOT, wide_tree(), CHAIN(1)):
            other = model.generate(**batch, **options, tree=tree)
            assert len(other.statistics.accepted_histogram) == tree.depth + 1, "an explicit tree wins"
            assert torch.equal(other.sequences, out.sequences)
        streamed = [step.tokens for step in model.stream(**batch, max_new_tokens=12, do_sample=False)]
        assert max(len(row) for step in streamed for row in step) <= depth + 1
        joined = [[token for step in streamed for token in step[row]] for row in range(num_rows)]
        assert joined == out.sequences[:, 9:].tolist()


def test_a_tree_that_a_program_asks_for_is_used_for_every_batch_size_instead_of_those_tuned_here():
    model = MedusaModel(chat_base(), chat_heads(), wide_tree())
    model = MedusaModel(model.base, model.heads, wide_tree(), tuned=tuned_trees(model.runtime))
    model.use_tree(CHAIN(1))
    assert [model.tree_for(rows) for rows in (1, 2, 64)] == [CHAIN(1)] * 3
    with pytest.raises(ValueError, match="tree has depth 4, the heads are 3"):
        model.use_tree(CHAIN(4))


def test_writing_a_tree_alone_drops_the_tuned_ones_so_that_it_is_used(saved):
    save_tree(saved, CHAIN(2))
    assert load_heads(saved).tuned == ()
    assert MedusaModel.from_pretrained(chat_base(), saved, engine="eager").tree_for(8) == CHAIN(2)


def test_new_entries_replace_those_of_their_runtime_and_batch_size_only():
    old = (*tuned_trees(), TunedTree(ELSEWHERE, 1, CHAIN(1)))
    new = [TunedTree(HERE, 1, ROOT), TunedTree(HERE, 1, CHAIN(1), step="static")]
    together = merged(old, new)
    assert len(together) == 5
    assert Trees(CHAIN(3), together).on(HERE).tree_for(1, "general") == ROOT
    assert TunedTree(ELSEWHERE, 1, CHAIN(1)) in together


GOOD = {"device": "d", "dtype": "float32", "engine": "eager", "batch_size": 1, "paths": [[], [0]]}


@pytest.mark.parametrize(
    ("tuned", "complaint"),
    [
        ({}, r"tree.json: tuned must be a list of entries, got dict"),
        ([7], r"tuned\[0\] must be a JSON object, got int"),
        ([{**GOOD, "batch_size": 0}], r"tuned\[0\]: batch_size must be an int of at least 1, got 0"),
        ([{**GOOD, "batch_size": True}], r"batch_size must be an int of at least 1, got True"),
        ([{**GOOD, "device": ""}], r"device must be text that is not empty, got ''"),
        ([{**GOOD, "step": 1}], r"step must be text that is not empty, got 1"),
        ([{**GOOD, "engine": None}], r"engine must be text that is not empty, got None"),
        ([{**GOOD, "paths": "0"}], r"tuned\[0\]: paths must be lists of ranks"),
        ([{**GOOD, "paths": [["0"]]}], r"paths must be lists of ranks"),
        ([{**GOOD, "paths": [[0, 1]]}], r"tuned\[0\]: every path needs its parent"),
        ([GOOD, {**GOOD, "paths": [[]]}], r"tuned\[1\] is a second entry for batch size 1 on d, float32"),
        ([GOOD, {**GOOD, "step": "general"}], r"on d, float32, eager, general steps; keep one of them"),
        ([{**GOOD, "paths": [[0], [0, 0], [0] * 3, [0] * 4]}], "tree has depth 4, the heads are 3"),
        *(
            ([{key: GOOD[key] for key in GOOD if key != left_out}], rf"tuned\[0\] must hold '{left_out}'")
            for left_out in GOOD
        ),
    ],
)
def test_a_malformed_entry_is_refused_by_its_index_in_the_file(saved, tuned, complaint):
    (saved / "tree.json").write_text(json.dumps({"paths": [[]], "tuned": tuned}))
    with pytest.raises(ValueError, match=complaint):
        load_heads(saved)
