"""The heads directory: what goes in comes out, and what does not fit is refused by name."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import medusa.heads.checkpoint
import medusa.hub
from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, load_heads, save_heads, save_tree
from medusa.assets import shipped_heads
from medusa.cli.main import main
from medusa.files import check_writable_target, write_json
from medusa.heads.causal_layer import LayerConfig
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head

KINDS = ["shared", "full", "token_map"]
MAP = [20, 3, 7, 0, 11]
DROPPED = object()
"""In place of a value: the key is taken out."""
TREE = CandidateTree.from_paths([(0,), (1,), (0, 2)])


def checkpoint_of(unembedding: str = "shared", seed: int = 0) -> HeadsCheckpoint:
    token_map = MAP if unembedding == "token_map" else None
    config = HeadsConfig(
        hidden_size=8,
        vocab_size=21,
        num_heads=3,
        num_layers=2,
        unembedding=unembedding,
        token_map_size=len(MAP) if token_map else None,
    )
    torch.manual_seed(seed)
    heads = MedusaHeads(config, token_map)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return HeadsCheckpoint(heads, "some/base", TREE, {"command": "train it", "loss": 1.5})


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below ``directory``, byte for byte."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_heads(checkpoint_of(), tmp_path / "heads")


def edit_config(directory: Path, **changes) -> None:
    raw = json.loads((directory / "config.json").read_text()) | changes
    kept = {key: value for key, value in raw.items() if value is not DROPPED}
    (directory / "config.json").write_text(json.dumps(kept))


def edit_weights(directory: Path, edit) -> None:
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors")


SIZES = LayerConfig(8, 4, 2, 4, 12)
OTHER_KINDS = {
    "eagle3": lambda: Eagle3Head(Eagle3Config(**vars(SIZES), vocab_size=21, fused_layers=(1,), max_depth=3)),
}


@pytest.mark.parametrize("kind", [*KINDS, *OTHER_KINDS])
def test_what_is_saved_is_what_is_loaded(kind, tmp_path):
    checkpoint = checkpoint_of(kind if kind in KINDS else "shared")
    if kind in OTHER_KINDS:
        checkpoint.heads = OTHER_KINDS[kind]()
    path = save_heads(checkpoint, tmp_path / "deep" / "heads")
    assert path == tmp_path / "deep" / "heads"
    loaded = load_heads(path)
    assert loaded.heads.config == checkpoint.heads.config
    assert loaded.base_model == "some/base"
    assert loaded.tree == TREE
    assert loaded.provenance == {"command": "train it", "loss": 1.5}
    before, after = checkpoint.heads.state_dict(), loaded.heads.state_dict()
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_written_in_half_precision_are_loaded_in_float32(dtype, tmp_path):
    checkpoint = checkpoint_of("token_map")
    whole, half = (
        save_heads(checkpoint, tmp_path / "whole"),
        save_heads(checkpoint, tmp_path / "half", dtype=dtype),
    )
    sizes = [(path / "model.safetensors").stat().st_size for path in (whole, half)]
    assert sizes[1] < 0.8 * sizes[0]
    loaded = load_heads(half).heads.state_dict()
    for name, tensor in checkpoint.heads.state_dict().items():
        expected = tensor.to(dtype).float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded[name], expected), name


def test_shipped_heads_are_loaded_by_name_and_listed_where_a_name_is_unknown():
    assert shipped_heads(), "some heads ship"
    for name in shipped_heads():
        loaded = load_heads(name)
        assert loaded.tree is not None and loaded.heads.num_heads >= loaded.tree.depth > 0
        assert all(each.isfinite().all() for each in loaded.heads.parameters())
        assert (shipped_heads()[name] / "README.md").read_text().startswith("# ")
    with pytest.raises(FileNotFoundError, match=f"one of those that ship: {', '.join(shipped_heads())}"):
        load_heads("no-such-heads")


def test_the_directory_holds_four_files_that_others_may_read(saved):
    assert sorted(contents(saved)) == ["config.json", "model.safetensors", "provenance.json", "tree.json"]
    assert saved.stat().st_mode & 0o055 == 0o055
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in saved.iterdir())
    assert sorted(path.name for path in saved.parent.iterdir()) == ["heads"]


def test_tree_and_provenance_may_be_absent(tmp_path):
    checkpoint = HeadsCheckpoint(checkpoint_of().heads, "some/base")
    saved = save_heads(checkpoint, tmp_path / "heads")
    (saved / "provenance.json").unlink()
    loaded = load_heads(saved)
    assert loaded.tree is None and loaded.provenance == {}


def test_a_tree_is_written_into_an_existing_directory_with_its_origin(saved):
    chain = CandidateTree.chain(2)
    path = save_tree(saved, chain, measured_on="some text", num_positions=7)
    assert json.loads(path.read_text())["measured_on"] == "some text"
    assert load_heads(str(saved)).tree == chain


@pytest.mark.parametrize(
    ("missing", "extra"),
    [("blocks.1.0.linear.bias", None), (None, "lm_head.weight"), (None, "blocks.extra")],
)
def test_a_tensor_that_is_missing_or_left_over_is_named(saved, missing, extra):
    weights = load_file(saved / "model.safetensors")
    kept = {name: each for name, each in weights.items() if name != missing}
    save_file(kept | ({extra: torch.zeros(2)} if extra else {}), saved / "model.safetensors")
    said = f"lacks {missing}, of 'shared' heads" if missing else f"no part of 'shared' heads: {extra};"
    with pytest.raises(ValueError, match=re.escape(said)):
        load_heads(saved)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(saved):
    edit_weights(saved, lambda weights: weights.update({"blocks.0.1.linear.bias": torch.zeros(9)}))
    message = r"tensor 'blocks.0.1.linear.bias' must have shape \(8,\), got \(9,\)"
    with pytest.raises(ValueError, match=message):
        load_heads(saved)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_weights_cut_short_are_refused(saved, kept):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or cut short .*train it again"):
        load_heads(saved)


def test_a_token_map_that_leaves_the_vocabulary_is_refused(tmp_path):
    saved = save_heads(checkpoint_of("token_map"), tmp_path / "heads")
    edit_weights(saved, lambda weights: weights["token_map"].__setitem__(0, 21))
    with pytest.raises(ValueError, match=r"token_map ids must be in \[0, 21\), got 0 to 21"):
        load_heads(saved)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("unembedding", KINDS)
def test_weights_that_are_not_finite_are_refused_in_every_tensor(unembedding, value, tmp_path):
    saved = save_heads(checkpoint_of(unembedding), tmp_path / "heads")
    good = load_file(saved / "model.safetensors")
    for name in set(good) - {"token_map"}:
        bad = good[name].clone()
        bad.view(-1)[-1] = value
        save_file({**good, name: bad}, saved / "model.safetensors")
        message = f"model.safetensors: tensor '{name}' must hold finite numbers, got NaN or infinity"
        with pytest.raises(ValueError, match=message):
            load_heads(saved)


def test_weights_that_overflow_float32_are_not_finite(saved):
    name = "blocks.0.0.linear.bias"
    edit_weights(saved, lambda weights: weights.update({name: torch.full((8,), 1e300, dtype=torch.float64)}))
    with pytest.raises(ValueError, match=f"tensor '{name}' must hold finite numbers"):
        load_heads(saved)


def test_heads_that_could_not_be_loaded_again_are_not_written(tmp_path):
    checkpoint = checkpoint_of()
    with torch.no_grad():
        checkpoint.heads.blocks[0][0].linear.bias[0] = 1e6
    with pytest.raises(ValueError, match=r"the heads to save: tensor 'blocks.0.0.linear.bias' must hold fin"):
        save_heads(checkpoint, tmp_path / "heads", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []
    save_heads(checkpoint, tmp_path / "heads", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "dtype", "rule"),
    [
        ("token_map", torch.float32, "token_map must hold token ids, which are ints"),
        ("blocks.0.0.linear.bias", torch.int64, "tensor 'blocks.0.0.linear.bias' must hold floats"),
    ],
)
def test_a_tensor_of_another_type_is_named_with_its_type(name, dtype, rule, tmp_path):
    saved = save_heads(checkpoint_of("token_map"), tmp_path / "heads")
    edit_weights(saved, lambda weights: weights.update({name: weights[name].to(dtype)}))
    with pytest.raises(ValueError, match=rf"model.safetensors.* {rule}, got {dtype}"):
        load_heads(saved)


@pytest.mark.parametrize(
    ("unembedding", "changes", "message"),
    [
        (
            "shared",
            {"hidden_size": 10**30},
            "config.json: hidden_size must be an int from 1 to 16777216, got",
        ),
        ("full", {"vocab_size": 2**24}, r"'unembed.0' must have shape \(16777216, 8\), got \(21, 8\)"),
        ("shared", {"hidden_size": 2**24}, r"must have shape \(16777216,.*\), got \(8,.*\)"),
        (
            "shared",
            {"num_heads": 10**9},
            "config.json: num_heads must be an int from 1 to 256, got 10",
        ),
        (
            "shared",
            {"fused_layers": list(range(1, 5000))},
            "fused_layers must be different ints from 1",
        ),
        ("token_map", {"token_map_size": 10**12}, "token_map_size must be an int from 1 to 21, got 10000"),
        ("token_map", {"token_map_size": [1.5]}, r"token_map_size must be an int from 1 to 21, got \[1.5\]"),
        ("shared", {"reads_path": "no"}, "config.json: reads_path must be true or false, got 'no'"),
        (
            "shared",
            {"unembedding": "low_rank"},
            "unembedding must be one of .*, got 'low_rank'",
        ),
        ("shared", {"unembedding": ["full"]}, r"unembedding must be one of .*, got \['full'\]"),
        ("shared", {"kind": ["medusa"]}, r"says kind=\['medusa'\], this version of medusa reads 'medusa' or"),
        ("shared", {"base_model": 7}, "config.json: base_model must be text, got 7"),
        *(
            (
                "shared",
                {name: said},
                f"says {name}={said}, model.safetensors holds {held}; the two files do not",
            )
            for name, said, held in (("num_heads", 4, 3), ("num_heads", 2, 3), ("num_layers", 1, 2))
        ),
        ("shared", {"unembedding": "full"}, r"lacks unembed.0, .* of 'full' heads"),
        ("shared", {"num_head": 3}, r"unknown key 'num_head'; did you mean 'num_heads'\?"),
        ("shared", {"zzz": 3}, r"unknown key 'zzz'; known are \['fused_layers', 'hidden_size'"),
        ("shared", {"context": {"hidden_size": 32}}, "a causal layer over the text .* train the heads again"),
        ("shared", {"hidden_size": DROPPED}, "config.json must say hidden_size"),
        ("shared", {"format_version": DROPPED}, "format_version=None, this version of medusa reads 2"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_config_that_does_not_fit_is_refused_before_memory_is_asked_for(
    unembedding, changes, message, tmp_path
):
    saved = save_heads(checkpoint_of(unembedding), tmp_path / "heads")
    edit_config(saved, **changes)
    with pytest.raises(ValueError, match=message):
        load_heads(saved)


def test_a_block_of_a_huge_number_counts_once(saved):
    """The number of heads is that of the blocks in the file, not the largest of their numbers."""
    edit_weights(saved, lambda weights: weights.update({f"blocks.{'9' * 5000}.0.x": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"says num_heads=3, model.safetensors holds 4"):
        load_heads(saved)


@pytest.mark.parametrize("name", ["config.json", "tree.json", "provenance.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"paths": ' + "[" * 100_000, "nested too deeply to be read"),
        ('{"paths": ' + "7" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
        ("\0", "is not valid JSON"),
        ("[1]", "must hold a JSON object"),
    ],
    ids=["nested", "long number", "not JSON", "a list"],
)
def test_json_that_cannot_be_read_is_named(saved, name, text, message):
    (saved / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} .*{message}"):
        load_heads(saved)


def test_a_tree_deeper_than_the_heads_is_refused(saved):
    save_tree(saved, CandidateTree.chain(4))
    with pytest.raises(ValueError, match=r"tree has depth 4, the heads are 3: .*use tree.subtree\(3\)"):
        load_heads(saved)


@pytest.mark.parametrize("unembedding", ["shared", "token_map"])
def test_a_rank_beyond_the_tokens_that_are_scored_is_refused(unembedding, tmp_path):
    saved = save_heads(checkpoint_of(unembedding), tmp_path / "heads")
    scored = 5 if unembedding == "token_map" else 21
    save_tree(saved, CandidateTree.from_paths([[scored - 1]]))
    assert load_heads(saved).tree.width_by_depth == (scored,)
    for rank in (scored, 10**30):
        save_tree(saved, CandidateTree.from_paths([[rank]]))
        with pytest.raises(ValueError, match=f"tree.json: tree asks for rank {rank}, .* {scored}"):
            load_heads(saved)


@pytest.mark.parametrize("is_tuned", [False, True])
def test_a_tree_file_of_too_many_nodes_is_refused_at_once(saved, is_tuned):
    """A tenth of the 200,000 nodes that would ask for 40 GB of ancestors: reading those takes a second."""
    paths = [[rank] for rank in range(20_000)]
    entry = {"device": "d", "dtype": "float32", "engine": "eager", "batch_size": 1, "paths": paths}
    raw = {"paths": [[]], "tuned": [entry]} if is_tuned else {"paths": paths}
    (saved / "tree.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"tree.json.*: a tree holds at most 4096 nodes, got 20000"):
        load_heads(saved)


def test_a_tree_file_without_paths_is_refused(saved):
    (saved / "tree.json").write_text('{"nodes": []}')
    with pytest.raises(ValueError, match=r"tree.json must hold 'paths', .*got \['nodes'\]"):
        load_heads(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_incomplete_directory_is_refused(saved, name):
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist"):
        load_heads(saved)


@pytest.mark.parametrize("source", ["/nowhere/heads", "./nowhere", "a/b/c", "nowhere"])
def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(medusa.hub, "snapshot_download", None)
    with pytest.raises(FileNotFoundError, match=f"no heads directory at '{source}'; train one"):
        load_heads(source)


def test_info_says_in_one_line_what_is_wrong(saved, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (saved / "config.json").write_text('{"model_type": "llama"}')
    for source, told in (
        (str(saved), rf"error: {saved}/config.json has format_version=None, .*\n"),
        ("no such/heads", r"error: no heads directory at 'no such/heads'[:;] .*\n"),
    ):
        assert main(["info", source]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and re.fullmatch(told, printed.err)


def test_an_output_directory_that_holds_something_is_refused_and_left_alone(saved):
    before = contents(saved)
    with pytest.raises(FileExistsError, match="is not empty; choose another, or allow overwriting"):
        save_heads(checkpoint_of("full"), saved)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        check_writable_target(saved)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        check_writable_target(saved / "config.json")
    assert contents(saved) == before


def test_an_empty_output_directory_is_used(tmp_path):
    (tmp_path / "heads").mkdir()
    assert load_heads(save_heads(checkpoint_of(), tmp_path / "heads")).tree == TREE


def test_overwriting_replaces_the_directory_whole(saved):
    (saved / "stale.txt").write_text("from the run before")
    save_heads(checkpoint_of("full"), saved, overwrite=True)
    assert load_heads(saved).heads.config.unembedding == "full"
    assert not (saved / "stale.txt").exists()
    assert [path.name for path in saved.parent.iterdir()] == ["heads"]


def disk_full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def cut_short(state, path, metadata=None):
    Path(path).write_bytes(b"half a file")
    disk_full()


def fails_on_call(number: int):
    """Makes an ``os.replace`` that fails at its call ``number``, counted from 1, and works otherwise."""

    def flaky_replace():
        calls, replace = [], os.replace

        def flaky(source, target):
            calls.append(source)
            if len(calls) == number:
                disk_full()
            replace(source, target)

        return flaky

    return flaky_replace


FAILURES = {
    "weights": (medusa.heads.checkpoint, "save_file", lambda: cut_short),
    "json": (medusa.heads.checkpoint, "write_json", lambda: disk_full),
    **{f"rename {number}": (os, "replace", fails_on_call(number)) for number in (1, 2, 3, 4)},
}


@pytest.mark.parametrize(
    ("is_there", "failure"),
    [
        *((False, failure) for failure in FAILURES.values()),
        *((True, failure) for failure in FAILURES.values()),
        (True, (os, "replace", fails_on_call(5))),
    ],
    ids=[*(f"new, {name}" for name in FAILURES), *(f"old, {name}" for name in FAILURES), "old, rename 5"],
)
def test_a_write_that_fails_half_way_leaves_what_was_there(is_there, failure, tmp_path, monkeypatch):
    """Renames 1 to 3 are the JSON files, 4 moves the old directory away, the last one the new one in."""
    target = tmp_path / "heads"
    if is_there:
        save_heads(checkpoint_of(), target)
    before = contents(tmp_path)
    owner, name, failing = failure
    monkeypatch.setattr(owner, name, failing())
    with pytest.raises(OSError, match="No space left on device"):
        save_heads(checkpoint_of("full", seed=9), target, overwrite=True)
    monkeypatch.undo()
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["heads"] if is_there else [])


def test_a_tree_write_that_fails_leaves_the_old_tree(saved, monkeypatch):
    before = contents(saved)
    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save_tree(saved, CandidateTree.chain(1))
    assert contents(saved) == before


def test_json_that_cannot_be_written_leaves_no_partial_file(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert list(tmp_path.iterdir()) == []
