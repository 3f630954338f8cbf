"""scripts/on_gpu.py: what runs, and that every part runs, at tiny size on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import program
from tiny_chat import chat_base, chat_heads, chat_tokenizer, wide_tree

import medusa.hardware
from gpu_parts import exactness, steps
from gpu_parts.lab import TINY_SIZES, GpuOptions, Lab
from medusa import HeadsCheckpoint, save_heads
from medusa.cli.options import parse
from medusa.engine import resolved_engine
from medusa.measurement.parts import Record


@pytest.fixture
def small_probes(monkeypatch):
    monkeypatch.setitem(medusa.hardware.PROBE_BYTES, "cpu", 2**20)
    monkeypatch.setitem(medusa.hardware.PROBE_WIDTH, "cpu", 64)


@pytest.fixture
def script(small_probes):
    return program("scripts/on_gpu.py")


def inside(script, part: str, output: Path, *flags: str) -> dict:
    """The record of a part that ran in this process."""
    words = ["--part", part, "--output", str(output), "--device", "cpu", *flags, "--inside"]
    output.mkdir(exist_ok=True)
    assert script.run_inside(parse(GpuOptions, words), watch=False) == 0
    return json.loads(next(output.glob(f"*-{part}.json")).read_text())


SMALL = ("--shapes", "tiny", "--dtype", "float32", "--rounds", "1", "--steps", "2", "--batch-sizes", "1")
SMALL += ("--context-lengths", "16", "--nodes", "1,6")


def test_steps_are_timed_for_every_engine_and_kind_that_runs_here(script, tmp_path):
    flags = [*SMALL, "--engines", "eager", "packed", "--step", "general", "captured", "--attention", "sdpa"]
    record = inside(script, "steps", tmp_path, *flags)
    rows = [row for each in record["cases"].values() for row in each.get("steps", ())]
    assert {(row["engine"], row["step"]) for row in rows} == {("eager", "general"), ("packed", "general")}
    assert [row["num_nodes"] for row in rows] == [1, 6, 1, 6]
    assert "needs a model on a CUDA device" in record["skipped"]["tiny, eager, captured, sdpa, 1, 16"]
    (parts,) = record["cases"]["tiny, parts of a step"]["parts"]
    assert 0 < parts["forward"] < parts["step"] and parts["num_nodes"] == 6
    waits = record["cases"]["tiny, what the host waits for, general"]
    assert waits["traffic"]["aten._local_scalar_dense.default"] > 0
    assert waits["setup_seconds"] == 0
    assert record["complete"] and record["about"]["device"].startswith("cpu")
    table = (tmp_path / "2-steps.txt").read_text()
    assert "Decode steps: " in table and "around the forward" in table


def test_grouped_attention_is_timed_in_captured_steps_and_put_back(small_probes, tmp_path):
    lab = Lab(parse(GpuOptions, ["--device", "cpu", *SMALL, "--output", str(tmp_path)]), steps.PART)
    names = [case.name for case in steps.cases(lab)]
    grouped = [name for name in names if "grouped" in name]
    assert grouped == ["tiny, eager, captured, grouped, 1, 16"]
    assert names.index("tiny, eager, compiled, sdpa, 1, 16") == len(names) - 1, "compiling takes minutes"
    found = steps.steps_of(lab, steps.Setting("tiny", "eager", "general", "grouped", 1, 16))
    assert {row["attention"] for row in found["steps"]} == {"grouped"}
    assert steps.base_of(lab, "tiny").config._attn_implementation == "sdpa"


def test_parts_are_named_or_numbered_and_run_in_their_order(script):
    assert [part.name for part in script.chosen_parts(["speed", "2"])] == ["steps", "speed"]
    assert len(script.chosen_parts([])) == 5
    with pytest.raises(ValueError, match=r"part must be one of 1 exactness, .* 5 longer, got 'fast'"):
        script.chosen_parts(["fast"])
    assert all(part.minutes < 10 for part in script.PARTS)


def test_a_part_gets_a_process_with_the_flags_of_the_program(script):
    given = ["--part", "speed", "2", "--minutes", "25", "--dtype", "float32"]
    line = script.command_for(steps.PART, given, 90.0)
    options = parse(GpuOptions, line[line.index("--part") :])
    assert (options.part, options.minutes, options.inside) == (("steps",), 1.5, True)
    assert options.sizes.dtype == "float32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_graphics_card_it_says_so_and_how_to_try_it_out(script, tmp_path, capsys):
    assert script.main(["--output", str(tmp_path / "none")]) == 1
    assert "it sees no CUDA device; run this where there is one, or see it work here with --dry-run" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "none").exists()


def test_finished_parts_are_skipped_and_failures_end_with_status_1(script, tmp_path, capsys, monkeypatch):
    finished = Record(exactness.PART, tmp_path, complete=True, cases={})
    finished.write()

    def fail(record, command, ends):
        record.failed["a case"] = "RuntimeError: no"

    monkeypatch.setattr(script, "run_in_processes", fail)
    assert script.main(["--part", "1", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert "1-exactness is finished; --again measures it anew" in capsys.readouterr().err
    assert script.main(["--part", "1", "2", "--device", "cpu", "--output", str(tmp_path)]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["parts"]["steps"]["failed"] == {"a case": "RuntimeError: no"}
    assert report["parts"]["exactness"]["complete"] is True


def test_auto_is_one_of_the_engines_that_can_be_timed():
    lab = Lab(GpuOptions(device="cpu", dry_run=True, sizes=TINY_SIZES), steps.PART)
    assert resolved_engine(steps.base_of(lab, "tiny"), "auto") == "packed"


@pytest.mark.slow
def test_a_dry_run_measures_every_part_and_a_second_one_finds_it_done(script, tmp_path, capsys):
    """In processes of their own, as on a card, with a chat model of a few thousand weights."""
    base, heads, output = tmp_path / "base", tmp_path / "heads", tmp_path / "results"
    chat_base(context=4096).save_pretrained(base)
    chat_tokenizer().save_pretrained(base)
    save_heads(HeadsCheckpoint(chat_heads(), base_model=str(base), tree=wide_tree()), heads)
    flags = ["--dry-run", "--base", str(base), "--heads", str(heads), "--output", str(output)]
    assert script.main([*flags, "--minutes", "30"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name for name, found in report["parts"].items() if found["complete"]} == {
        part.name for part in script.PARTS
    }
    for part in script.PARTS:
        record = Record.of(part, output)
        assert record.cases and not record.left_out and record.log.exists()
        assert (output / f"{part.file}.txt").read_text().count("\n") > 4
    exact = Record.of(exactness.PART, output).cases
    rows = [row for each in exact.values() for row in each.get("rows", ())]
    assert len(rows) > 50 and all(row["num_answers"] == row["of_answers"] for row in rows)
    assert (output / "5-longer" / "run" / "heads" / "model.safetensors").exists()
    assert script.main([*flags, "--part", "1", "2", "3", "4"]) == 0
    assert capsys.readouterr().err.count("is finished") == 4
