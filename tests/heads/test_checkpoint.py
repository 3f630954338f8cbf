"""The heads directory: what goes in comes out, and what does not fit is refused by name."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import READING
from damage import changed, config_says, cut, removed, says, written
from gguf import GGMLQuantizationType, quants
from refusals import assert_refused
from reported import ran
from safetensors.torch import load_file, save_file
from torch import Tensor

import medusa.heads.checkpoint
import medusa.hub
from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, load_heads, save_heads, save_tree
from medusa.assets import shipped_heads
from medusa.files import check_writable_target, write_json
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.heads.fingerprint import relative_distance
from medusa.heads.stored_types import exact_four_bits, stored, widened

MAP = torch.tensor([20, 3, 7, 0, 11])
TREE = CandidateTree.from_paths([(0,), (1,), (0, 2)])


WEIGHTS, TREES, BIAS = "model.safetensors", "tree.json", "blocks.0.0.linear.bias"


KINDS = ["shared", "full", "token_map", "eagle3"]


def heads_of(kind: str):
    if kind == "eagle3":
        return Eagle3Head(Eagle3Config(8, 4, 2, 4, 12, vocab_size=21, fused_layers=(1, 2), max_depth=3))
    token_map = MAP if kind == "token_map" else None
    sizes = {"num_heads": 3, "num_layers": 2, "token_map_size": len(MAP) if kind == "token_map" else None}
    return MedusaHeads(HeadsConfig(8, 21, unembedding=kind, **sizes), token_map)


def checkpoint_of(kind: str = "shared", seed: int = 0) -> HeadsCheckpoint:
    torch.manual_seed(seed)
    heads = heads_of(kind)
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_is_loaded(kind, tmp_path):
    checkpoint = checkpoint_of(kind)
    path = save_heads(checkpoint, tmp_path / "deep" / "heads")
    assert path == tmp_path / "deep" / "heads"
    loaded = load_heads(path)
    assert loaded.heads.config == checkpoint.heads.config
    assert (loaded.base_model, loaded.tree) == ("some/base", TREE)
    assert loaded.provenance == {"command": "train it", "loss": 1.5}
    before, after = checkpoint.heads.state_dict(), loaded.heads.state_dict()
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    (path / "provenance.json").unlink()
    (path / "tree.json").unlink()
    without = load_heads(path)
    assert without.tree is None and without.provenance == {}


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("dtype", [None, "Q4_0"])
def test_heads_are_loaded_with_all_that_they_read(reading, dtype, tmp_path):
    heads = MedusaHeads(HeadsConfig(32, 21, num_heads=3, num_layers=2, **READING[reading]))
    path = save_heads(HeadsCheckpoint(heads, "some/base"), tmp_path / "heads", dtype=dtype)
    loaded = load_heads(path).heads
    assert loaded.config == heads.config and list(loaded.state_dict()) == list(heads.state_dict())
    if dtype is None:
        for name, tensor in heads.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_written_in_half_precision_are_loaded_in_float32(dtype, tmp_path):
    checkpoint = checkpoint_of("token_map")
    whole = save_heads(checkpoint, tmp_path / "whole")
    half = save_heads(checkpoint, tmp_path / "half", dtype=dtype)
    sizes = [(path / "model.safetensors").stat().st_size for path in (whole, half)]
    assert sizes[1] < 0.8 * sizes[0]
    loaded = load_heads(half).heads.state_dict()
    for name, tensor in checkpoint.heads.state_dict().items():
        expected = tensor.to(dtype).float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded[name], expected), name


def wide_checkpoint() -> HeadsCheckpoint:
    """Heads whose matrices are a multiple of 32 wide, so that they can be written in groups."""
    config = HeadsConfig(64, 21, 2, unembedding="token_map", token_map_size=5, reads_path=True)
    heads = MedusaHeads(config, token_map=range(5))
    torch.manual_seed(0)
    with torch.no_grad():
        for each in heads.parameters():
            each.normal_(std=0.1)
    return HeadsCheckpoint(heads, "some/base")


@pytest.mark.parametrize(("dtype", "share", "error"), [("Q8_0", 0.3, 0.006), ("Q4_0", 0.18, 0.09)])
def test_heads_in_whole_numbers_are_near_and_small(dtype, share, error, tmp_path):
    checkpoint = wide_checkpoint()
    whole = save_heads(checkpoint, tmp_path / "whole")
    small = save_heads(checkpoint, tmp_path / "small", dtype=dtype)
    sizes = [(path / WEIGHTS).stat().st_size for path in (whole, small)]
    assert sizes[1] < share * sizes[0]
    loaded = load_heads(small).heads
    assert loaded.config == checkpoint.heads.config
    for name, tensor in checkpoint.heads.state_dict().items():
        ours = loaded.state_dict()[name]
        assert ours.dtype == tensor.dtype
        if tensor.dim() == 2:
            # the same numbers as gguf, which others read such rows with, means by them
            rows = load_file(small / WEIGHTS)[name].numpy()
            assert torch.equal(ours, torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[dtype])))
            assert relative_distance(ours, tensor) < error
        elif tensor.is_floating_point():
            assert torch.equal(ours, tensor.half().float())
        else:
            assert torch.equal(ours, tensor)
    again = save_heads(load_heads(small), tmp_path / "again", dtype=dtype)
    assert all(
        torch.allclose(mine, loaded.state_dict()[name], rtol=1e-2)
        for name, mine in load_heads(again).heads.state_dict().items()
    )


def test_four_bits_are_nearer_than_the_usual_scale_of_a_group():
    numbers = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    numbers[3] = 0
    ours = widened(stored({"it": numbers}, "Q4_0")["it"], "Q4_0", numbers.shape)
    theirs = quants.dequantize(
        quants.quantize(numbers.numpy(), GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0
    )
    assert relative_distance(ours, numbers) < 0.96 * relative_distance(torch.from_numpy(theirs), numbers)
    assert (ours[3] == 0).all()


def test_numbers_that_were_read_in_four_bits_are_those_four_bits_again():
    numbers = torch.randn(7, 96)
    numbers[2, 32:64] = 0
    numbers[3, :32] = torch.arange(32).remainder(8) - 7.0  # the largest is no -8
    rows = stored({"it": numbers}, "Q4_0")["it"]
    again = exact_four_bits(widened(rows, "Q4_0", numbers.shape))
    assert torch.equal(widened(again, "Q4_0", numbers.shape), widened(rows, "Q4_0", numbers.shape))
    assert exact_four_bits(numbers) is None
    assert exact_four_bits(torch.zeros(3, 40)) is None, "no groups of 32"


def test_whole_numbers_that_are_damaged_are_refused(tmp_path):
    saved = save_heads(wide_checkpoint(), tmp_path / "heads", dtype="Q4_0")
    good, config = load_file(saved / WEIGHTS), json.loads((saved / "config.json").read_text())
    name = "blocks.0.0.linear.weight"
    for bad, message in (
        (good[name][:, :-18].contiguous(), "must be (64, 36) bytes to hold (64, 64) numbers in Q4_0"),
        (torch.zeros(64, 36), "must be ... got torch.float32"),
        (torch.full_like(good[name], 255), "must hold finite numbers"),
    ):
        save_file({**good, name: bad}, saved / WEIGHTS)
        assert_refused(lambda: load_heads(saved), ValueError, f"tensor '{name}' {message}")
    save_file(good, saved / WEIGHTS)
    for value in ("Q9_9", ["Q4_0"]):
        (saved / "config.json").write_text(json.dumps({**config, "weights_type": value}))
        assert_refused(lambda: load_heads(saved), ValueError, "this version of medusa reads Q8_0 and Q4_0")


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


def test_a_tree_is_written_into_an_existing_directory_with_its_origin(saved):
    chain = CandidateTree.chain(2)
    path = save_tree(saved, chain, measured_on="some text", num_positions=7)
    assert json.loads(path.read_text())["measured_on"] == "some text"
    assert load_heads(str(saved)).tree == chain


def bias(value: Tensor | None):
    return changed(WEIGHTS, {BIAS: value})


MISFITS = [
    ("shared", bias(None), f"lacks {BIAS}, of 'shared' heads"),
    ("shared", changed(WEIGHTS, {"lm_head.weight": torch.zeros(2)}), "no part of 'shared' heads: lm_head"),
    ("shared", changed(WEIGHTS, {"blocks.extra": MAP.float()}), "no part of 'shared' heads: blocks.extra"),
    ("shared", bias(torch.zeros(9)), f"'{BIAS}' must have shape (8,), got (9,)"),
    ("shared", bias(torch.full((8,), 1e300, dtype=torch.float64)), f"'{BIAS}' must hold finite"),
    ("shared", bias(torch.zeros(8, dtype=torch.int64)), f"'{BIAS}' must hold floats, got torch.int64"),
    ("token_map", changed(WEIGHTS, {"token_map": MAP + 1}), "token_map ids ... [0, 21), got 1 to 21"),
    ("token_map", changed(WEIGHTS, {"token_map": MAP.float()}), "ids, which are ints, got torch.float32"),
    # the number of heads is that of the blocks in the file, not the largest of their numbers
    ("shared", changed(WEIGHTS, {f"blocks.{'9' * 5000}.0.x": torch.zeros(1)}), "num_heads=3, ... holds 4"),
    ("shared", config_says(hidden_size=10**30), "config.json: hidden_size ... from 1 to 16777216, got"),
    ("full", config_says(vocab_size=2**24), "'unembed.0' must have shape (16777216, 8), got (21, 8)"),
    ("shared", config_says(hidden_size=2**24), "must have shape (16777216, ... got (8,"),
    ("shared", config_says(num_heads=10**9), "config.json: num_heads ... from 1 to 256, got 10"),
    ("shared", config_says(fused_layers=[*range(1, 5000)]), "fused_layers ... different ints from 1"),
    ("token_map", config_says(token_map_size=10**12), "token_map_size ... from 1 to 21, got 10000"),
    ("token_map", config_says(token_map_size=[1.5]), "token_map_size ... from 1 to 21, got [1.5]"),
    ("shared", config_says(reads_path="no"), "config.json: reads_path ... true or false, got 'no'"),
    ("shared", config_says(unembedding="low_rank"), "unembedding must be one of ... got 'low_rank'"),
    ("shared", config_says(unembedding=["full"]), "unembedding must be one of ... got ['full']"),
    ("shared", config_says(kind=["medusa"]), "kind=['medusa'] ... reads 'medusa' or"),
    ("shared", config_says(base_model=7), "config.json: base_model must be text, got 7"),
    ("shared", config_says(num_heads=4), f"num_heads=4, {WEIGHTS} holds 3"),
    ("shared", config_says(num_heads=2), f"num_heads=2, {WEIGHTS} holds 3"),
    ("shared", config_says(num_layers=1), f"num_layers=1, {WEIGHTS} holds 2"),
    ("shared", config_says(unembedding="full"), "lacks unembed.0, ... of 'full' heads"),
    ("shared", config_says(num_head=3), "unknown key 'num_head'; did you mean 'num_heads'?"),
    ("shared", config_says(zzz=3), "unknown key 'zzz'; known are ['fused_layers', 'hidden_size'"),
    ("shared", config_says(context={"hidden_size": 32}), "a causal layer ... train the heads again"),
    ("shared", config_says(drop="hidden_size"), "config.json must say hidden_size"),
    ("shared", config_says(drop="format_version"), "format_version=None ... reads 2"),
    *(
        ("shared", config_says(base_fingerprint=said), "base_fingerprint ... a sample, null or a list")
        for said in (7, [], {"sample": []}, {"sample": ["1"]}, {"sample": [math.nan]}, {"sample": [10**400]})
    ),
    ("shared", removed("config.json"), "config.json does not exist"),
    ("shared", removed(WEIGHTS), f"{WEIGHTS} does not exist"),
    ("shared", cut(WEIGHTS, -1), f"{WEIGHTS} is damaged or cut short"),
    ("shared", says(TREES, paths=[[0] * depth for depth in range(1, 5)]), "depth 4, the heads are 3"),
    ("shared", written(TREES, '{"nodes": []}'), "tree.json must hold 'paths', ... got ['nodes']"),
    *(
        ("shared", written(name, text), f"{name} ... {words}")
        for name in ("config.json", TREES, "provenance.json")
        for text, words in (
            ('{"paths": ' + "[" * 100_000, "nested too deeply"),
            ('{"paths": ' + "7" * 5000 + "}", "not valid JSON: Exceeds the limit"),
            ("\0", "not valid JSON"),
            ("[1]", "must hold a JSON object"),
        )
    ),
    ("eagle3", config_says(kind="hydra"), "kind='hydra' ... reads 'medusa' or 'eagle3' or 'mtp'"),
    ("eagle3", config_says(kind="medusa"), "unknown key 'num_attention_heads'"),
    ("eagle3", config_says(max_dept=3), "unknown key 'max_dept'; did you mean 'max_depth'?"),
    ("eagle3", config_says(hidden_size=16), "fc.weight' must have shape (16, 32), got (8, 16)"),
    ("eagle3", config_says(num_attention_heads=5), "num_attention_heads=5, got 2"),
    ("eagle3", config_says(head_dim=7), "head_dim must be even, got 7"),
    ("eagle3", config_says(fused_layers=[2, 1]), "fused_layers ... ascending order, at least 1, got [2, 1]"),
    ("eagle3", config_says(fused_layers=[]), "fused_layers ... at least 1, got"),
    ("eagle3", config_says(fused_layers=[1, 2, 3]), "fc.weight' must have shape (8, 24), got (8, 16)"),
    ("eagle3", config_says(rope_parameters={"rope_type": "dynamic"}), "rope_type ... default, linear"),
    ("eagle3", config_says(rope_parameters={"rope_type": "default"}), "rope_theta ... above 0, got None"),
    ("eagle3", config_says(rms_norm_eps="1e-5"), "rms_norm_eps ... between 0 and 1"),
    ("eagle3", config_says(fc_norm=1), "fc_norm must be true or false, got 1"),
    ("eagle3", config_says(fc_norm=True), "lacks fc_norm.0.weight, fc_norm.1.weight, of"),
    ("eagle3", config_says(max_depth=10**9), "config.json: max_depth ... from 1 to 256, got 1000000000"),
    ("eagle3", config_says(intermediate_size=10**12), "intermediate_size ... from 1 to 16777216"),
    ("eagle3", config_says(intermediate_size=2**24), "must have shape (16777216, 8), got"),
    ("eagle3", changed(WEIGHTS, {"fc.weight": None}), "lacks fc.weight, of an 'eagle3' head"),
]
"""The kind of heads, what becomes of their directory, and what is said of it."""


@pytest.mark.parametrize(("kind", "change", "words"), MISFITS, ids=[words[:60] for *_, words in MISFITS])
def test_a_directory_that_does_not_fit_is_refused_before_memory_is_asked_for(kind, change, words, tmp_path):
    saved = save_heads(checkpoint_of(kind), tmp_path / "heads")
    change(saved)
    assert_refused(lambda: load_heads(saved), (ValueError, FileNotFoundError), words)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_are_refused_in_every_tensor(kind, tmp_path):
    saved = save_heads(checkpoint_of(kind), tmp_path / "heads")
    good = load_file(saved / WEIGHTS)
    for name in set(good) - {"token_map"}:
        bad = good[name].clone()
        bad.view(-1)[-1] = math.nan
        save_file({**good, name: bad}, saved / WEIGHTS)
        assert_refused(lambda: load_heads(saved), ValueError, f"{WEIGHTS}: tensor '{name}' must hold finite")


def test_heads_that_could_not_be_loaded_again_are_not_written(tmp_path):
    checkpoint = checkpoint_of()
    with torch.no_grad():
        checkpoint.heads.blocks[0][0].linear.bias[0] = 1e6
    with pytest.raises(ValueError, match=r"the heads to save: tensor 'blocks.0.0.linear.bias' must hold fin"):
        save_heads(checkpoint, tmp_path / "heads", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []
    save_heads(checkpoint, tmp_path / "heads", dtype=torch.bfloat16)


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
        (str(saved), rf"error: {saved} is a base model of type 'llama', .*\n"),
        ("no such/heads", r"error: no heads directory at 'no such/heads'[:;] .*\n"),
    ):
        printed = ran(capsys, ["info", source], 1)
        assert printed.out == "" and re.fullmatch(told, printed.err)


def test_an_output_directory_that_holds_something_is_refused_and_left_alone(saved):
    before = contents(saved)
    with pytest.raises(FileExistsError, match="is not empty; choose another, or overwrite it"):
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
