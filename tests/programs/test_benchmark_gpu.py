import json

import pytest
import torch
from conftest import program

import medusa.hardware
from medusa.engine import resolved_engine


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setitem(medusa.hardware.PROBE_BYTES, "cpu", 2**20)
    monkeypatch.setitem(medusa.hardware.PROBE_WIDTH, "cpu", 64)
    return program("scripts/benchmark_gpu.py")


def test_a_tiny_shape_is_timed_on_a_processor_on_every_engine_that_runs(script, capsys, tmp_path):
    report_file = tmp_path / "steps.json"
    flags = ["--device", "cpu", "--shapes", "tiny", "--dtype", "float32", "--rounds", "1", "--steps", "2"]
    assert script.main([*flags, "--nodes", "1,13", "--json", str(report_file)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert report == json.loads(report_file.read_text())
    ran = {(row["engine"], row["step"]) for row in report["rows"]}
    skipped = {tuple(name.split(", ")[1:]) for name in report["skipped"]}
    engines = [name for name in script.get_args(script.Engine) if name != "auto"]
    assert ran | skipped == set(script.product(engines, ["general", "captured"]))
    assert "needs a model on a CUDA device" in report["skipped"]["tiny, eager, captured"]
    eager = [row for row in report["rows"] if row["engine"] == "eager"]
    assert [(row["num_nodes"], row["batch_size"], row["context_length"]) for row in eager] == [
        (1, 1, 128),
        (13, 1, 128),
    ]
    assert eager[0]["overhead"] == 1.0
    assert eager[1]["overhead"] == pytest.approx(
        eager[1]["step_milliseconds"] / eager[0]["step_milliseconds"], rel=0.01
    )  # milliseconds are rounded
    assert eager[0]["f_hw"] == pytest.approx(
        eager[0]["floor_milliseconds"] / eager[0]["step_milliseconds"], rel=0.01
    )
    assert eager[1]["floor_milliseconds"] > eager[0]["floor_milliseconds"] > 0


def test_an_engine_that_cannot_run_is_listed_with_its_reason(script, capsys):
    flags = ["--device", "cpu", "--shapes", "tiny", "--rounds", "1", "--steps", "1", "--nodes", "2"]
    flags += ["--engines", "eager", "packed", "--step", "static"]
    assert script.main(flags) == 0  # packed wants float32, this is bfloat16
    printed = capsys.readouterr().out
    assert "tiny, packed, static did not run: engine='packed' needs" in printed
    report = json.loads(printed.splitlines()[-1])
    assert list(report["skipped"]) == ["tiny, packed, static"]
    assert {row["step"] for row in report["rows"]} == {"static"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_graphics_card_it_says_so_and_how_to_try_it_out(script, capsys):
    assert script.main([]) == 1
    assert "needs a CUDA device, and torch sees none" in capsys.readouterr().err


def test_the_tree_has_as_many_nodes_as_asked_and_no_more_depths_than_heads(script):
    assert script.tree_of(1).depth == 0
    tree = script.tree_of(64)
    assert (tree.num_nodes, tree.depth) == (64, script.NUM_HEADS)


def test_the_shapes_have_the_sizes_they_are_named_after(script):
    for name, billions in (("llama-1b", 1.24), ("llama-8b", 8.03)):
        with torch.device("meta"):
            model = script.LlamaForCausalLM(script.LlamaConfig(**script.SHAPES[name]))
        assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(
            billions, abs=0.01
        )


def test_auto_is_one_of_the_engines_that_are_timed(script):
    base = script.base_of("tiny", script.StepOptions(), torch.device("cpu"), torch.float32)
    assert resolved_engine(base, "auto") in script.get_args(script.Engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tiny_shape_is_timed_on_a_graphics_card(script, capsys):
    assert script.main(["--shapes", "tiny", "--rounds", "2", "--steps", "4"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["num_nodes"] for row in rows} == {1, 64}
    assert {row["step"] for row in rows} == {"general", "captured"}
    assert all((row["setup_seconds"] > 0) == (row["step"] == "captured") for row in rows)
