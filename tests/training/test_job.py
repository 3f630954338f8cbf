"""A whole run: in what order it writes, who may work in its directory, what a stop and a start leave."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import configuration_of, save_base_and_rows, tiny_base, write_rows

from medusa import load_heads
from medusa.files import locked
from medusa.training.run import job, processes
from medusa.training.run.run_directory import RunDirectory
from medusa.training.run.trainer import Trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return save_base_and_rows(tmp_path_factory.mktemp("place"))


@pytest.fixture
def train(place, tmp_path):
    """Runs a short run in ``tmp_path / "run"``; options as in the YAML file."""

    def run(**options: Any) -> RunDirectory:
        defaults = {
            "base": place / "base",
            "data": place / "rows.jsonl",
            "output_dir": tmp_path / "run",
            "num_heads": 2,
            "max_steps": 4,
            "tokens_per_batch": 1024,
            "logging_steps": 1,
            "held_out_fraction": 0.1,
        }
        job.train(configuration_of(**defaults | options))
        return RunDirectory(tmp_path / "run")

    return run


def losses(run: RunDirectory) -> list[float]:
    return [entry["train/loss"] for entry in run.logged_metrics() if "train/loss" in entry]


def fails(*_: Any, **__: Any) -> None:
    raise MemoryError("no memory for the calibration")


@pytest.mark.parametrize(
    "at", ["medusa.training.run.job.calibrated_tree", "medusa.training.run.trainer.replayed_metrics"]
)
def test_heads_are_written_before_anything_else_can_fail(train, tmp_path, monkeypatch, at):
    monkeypatch.setattr(at, fails)
    with pytest.raises(MemoryError, match="no memory for the calibration"):
        train()
    assert load_heads(tmp_path / "run" / "heads").heads.num_heads == 2


def test_a_directory_in_which_a_run_works_is_refused_to_another(train, tmp_path):
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="is in use by another process"):
            train()
    assert not (tmp_path / "run" / "heads").exists()


@pytest.mark.parametrize("mended", [{}, {"resume": "auto", "num_heads": 3}, {"overwrite": True}])
def test_a_run_whose_data_cannot_be_used_leaves_nothing_in_the_way_of_the_mended_one(train, tmp_path, mended):
    useless = write_rows(tmp_path / "useless.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(ValueError, match="nothing to train on"):
        train(data=useless)
    assert len(losses(train(**mended))) == 4


def test_what_a_stranger_put_beside_a_run_that_never_began_is_kept(train, tmp_path):
    with pytest.raises(ValueError, match="holds no rows"):
        train(data=write_rows(tmp_path / "none.jsonl", []))
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        train()


def test_resume_auto_starts_and_goes_on_with_one_command(train, monkeypatch):
    class Killed(BaseException):
        pass

    do_step = Trainer._step

    def mortal(trainer: Trainer, *arguments: Any) -> None:
        if trainer.state.step == 3:
            raise Killed
        do_step(trainer, *arguments)

    options = {"resume": "auto", "checkpoint_steps": 2}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", mortal)
        with pytest.raises(Killed):
            train(**options)
    run = train(**options)
    train(output_dir=run.path.parent / "whole")
    assert losses(run) == losses(RunDirectory(run.path.parent / "whole"))
    assert len(losses(run)) == 4
    assert load_heads(run.heads).provenance["training"]["steps"] == 4


def test_resume_auto_goes_on_before_there_was_a_checkpoint_and_refuses_other_runs(train, tmp_path):
    train()
    assert len(losses(train(resume="auto"))) == 4
    with pytest.raises(ValueError, match=r"another configuration.*num_heads was 2 and is 3"):
        train(resume="auto", num_heads=3)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"exists and is not empty.*--overwrite.*--resume auto"):
        train(resume="auto", output_dir=tmp_path / "other")


@pytest.mark.parametrize("change", ["weights", "configuration"])
def test_a_run_on_another_base_is_not_resumed(train, place, tmp_path, change):
    base = tmp_path / "base"
    shutil.copytree(place / "base", base)
    options: dict[str, Any] = {"base": base, "resume": "auto"}
    run = train(**options)
    assert json.loads((run.checkpoints / "step-00000004" / "run.json").read_text())["base"].keys() == {
        "weights",
        "configuration",
    }
    if change == "weights":
        other = tiny_base()
        with torch.no_grad():
            other.model.layers[0].mlp.down_proj.weight[3, 5] += 1  # the LM head is the same
        other.save_pretrained(base)
    else:
        config = json.loads((base / "config.json").read_text())
        config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 77.0
        (base / "config.json").write_text(json.dumps(config))
    before = contents(run.path)
    with pytest.raises(ValueError, match=f"the base has changed since the run in .* began.*{change} was"):
        train(**options, max_steps=8)
    assert {path for path in before if "heads" in path} <= contents(run.path).keys()


def test_a_run_goes_on_with_its_base_in_another_version_of_transformers(train, place, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(place / "base", base)
    train(base=base, resume="auto")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"transformers_version": "99", "dtype": "float32"}))
    assert len(losses(train(base=base, resume="auto", max_steps=6))) == 6


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("limit", "higher", "resume"),
    [
        ({"max_steps": 4}, {"max_steps": 6}, "always"),
        ({"max_steps": None, "num_epochs": 1}, {"num_epochs": 2}, "auto"),
    ],
    ids=["steps", "epochs"],
)
def test_a_finished_run_stays_as_it_is_and_a_higher_limit_goes_on_from_its_end(
    train, monkeypatch, capsys, limit, higher, resume
):
    run = train(**limit, evaluation_steps=2, tree_nodes=5)
    (run.heads / "notes.txt").write_text("a tuned tree")
    before = contents(run.path)
    with monkeypatch.context() as patch:
        patch.setattr(job, "build_trainer", fails)  # nothing is loaded
        train(**limit, evaluation_steps=2, tree_nodes=5, resume=resume)
    assert contents(run.path) == before
    assert "is finished" in capsys.readouterr().err
    first = losses(run)
    train(**limit | higher, resume=resume)
    assert losses(run)[: len(first)] == first
    assert len(losses(run)) > len(first)
    assert load_heads(run.heads).provenance["training"]["steps"] == len(losses(run))


def test_a_time_limit_that_was_reached_is_a_finished_run(train, monkeypatch):
    run = train(max_steps=None, max_minutes=0.004)
    before = contents(run.path)
    train(max_steps=None, max_minutes=0.004, resume="auto")
    assert contents(run.path) == before


def test_a_run_whose_tree_is_missing_is_not_finished(train, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("medusa.training.run.job.calibrated_tree", fails)
        train(tree_nodes=5)
    run = train(tree_nodes=5, resume="auto")
    assert load_heads(run.heads).tree.num_nodes == 5
    assert len(losses(run)) == 4


def test_heads_without_a_checkpoint_are_not_trained_again_from_the_start(train):
    run = train()
    shutil.rmtree(run.checkpoints)
    before = contents(run.heads)
    with pytest.raises(FileExistsError, match=r"holds the heads of a run and no checkpoint .* --overwrite"):
        train(resume="auto", max_steps=6)
    assert contents(run.heads) == before


def test_sigterm_leaves_a_checkpoint_and_a_status_of_its_own(train, tmp_path, monkeypatch):
    do_step = Trainer._step

    def stopped(trainer: Trainer, *arguments: Any) -> None:
        if trainer.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        do_step(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopped)
        with pytest.raises(SystemExit) as ended:
            train(resume="auto")
    assert ended.value.code == processes.STOPPED == 75
    run = RunDirectory(tmp_path / "run")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000003"]
    assert not run.heads.exists()
    train(resume="auto")
    train(output_dir=tmp_path / "whole")
    assert losses(run) == losses(RunDirectory(tmp_path / "whole"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_stop_in_a_step_with_an_evaluation_leaves_that_evaluation_to_the_run_that_goes_on(
    train, tmp_path, monkeypatch
):
    do_step, options = Trainer._step, {"evaluation_steps": 1, "replayed_documents": 4, "max_steps": 5}

    def stopped(trainer: Trainer, *arguments: Any) -> None:
        do_step(trainer, *arguments)
        if trainer.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluations(run: RunDirectory) -> list[dict[str, float]]:
        return [entry for entry in run.logged_metrics() if "held_out/loss" in entry]

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopped)
        with pytest.raises(SystemExit):
            train(resume="auto", **options)
    run, whole = train(resume="auto", **options), RunDirectory(tmp_path / "whole")
    train(output_dir=whole.path, **options)
    assert [entry["step"] for entry in evaluations(run)] == [1, 2, 3, 4, 5]
    assert evaluations(run) == evaluations(whole)
    best, expected = (load_heads(each.best) for each in (run, whole))
    assert best.provenance["training"]["steps"] == expected.provenance["training"]["steps"]
    for name, weight in expected.heads.state_dict().items():
        assert torch.equal(best.heads.state_dict()[name], weight)


def test_stored_states_that_were_damaged_are_stored_again_after_a_word(train, tmp_path, capsys):
    options = {"cache_hidden_states": True, "resume": "auto"}
    run = train(**options)
    shards = sorted(run.states.glob("*/0*.safetensors"))
    before = [load_file(path)["states"].clone() for path in shards]  # else it is mapped
    assert len(shards) >= 2
    for path in shards:
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    train(**options, max_steps=6)
    said = capsys.readouterr().err.replace("\n", "")
    for path in shards:
        assert f"{path} has other bytes than were written: its states are stored again" in said
    for path, states in zip(shards, before, strict=True):
        assert torch.equal(load_file(path)["states"], states)


def test_sigterm_while_the_run_is_set_up_ends_it_with_the_same_status(train, monkeypatch):
    monkeypatch.setattr(job, "tokenised", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 75


def test_overwriting_takes_the_old_heads_away_before_anything_else_and_says_so(train, monkeypatch, capsys):
    run = train(checkpoint_steps=2)
    assert run.heads.exists()
    assert run.best.exists()
    monkeypatch.setattr(job, "tokenised", fails)
    with pytest.raises(MemoryError):
        train(overwrite=True, num_heads=3)
    assert "num_heads: 3" in run.config.read_text()
    assert not run.heads.exists()
    assert not run.best.exists()
    assert not run.checkpoints.exists()
    said = capsys.readouterr().err
    assert all(f"removed {path} of" in said for path in (run.heads, run.best, run.checkpoints, run.metrics))


@pytest.mark.parametrize(
    "stranger",
    [
        "checkpoints/model.pt",
        "checkpoints/step-1/model.pt",
        "best/notes.txt",
        "heads/config.json",
        "metrics.jsonl",
        "config.yaml",
    ],
)
def test_overwriting_removes_no_file_of_a_stranger(train, tmp_path, stranger):
    path = tmp_path / "run" / stranger
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(FileExistsError, match=r"replaces only .* (choose another|move that away)"):
        train(overwrite=True)
    assert path.read_text() == "{}"


def test_overwriting_keeps_the_heads_that_the_run_starts_from(train):
    run = train()
    before = contents(run.path)
    with pytest.raises(ValueError, match=r"heads' must not contain its own inputs, got .*heads"):
        train(overwrite=True, start_from=str(run.heads))
    assert contents(run.path) == before


def test_what_a_killed_run_left_half_written_goes(tmp_path):
    run = RunDirectory(tmp_path / "run")
    left = [run.path / name for name in (".heads.partial-0123abcd", ".config.yaml.partial-0123abcd")]
    for path in (
        *left,
        run.checkpoints / ".step-00000003.partial",
        run.path / ".notes.partial-of-a-stranger",
    ):
        path.mkdir(parents=True)
    run.start(configuration_of(base="tiny", data="rows.jsonl", output_dir=run.path, max_steps=1))
    assert {path.name for path in run.path.rglob(".*")} == {".notes.partial-of-a-stranger"}


@pytest.mark.parametrize("content", [b"", b"- a\n- b\n", b"just text", b"a: [", b"\xff\xfe", b"other: 1\n"])
@pytest.mark.parametrize("how", [{"resume": "auto"}, {"overwrite": True}], ids=str)
def test_a_configuration_that_is_none_is_named(train, tmp_path, content, how):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes(content)
    with pytest.raises((ValueError, FileExistsError), match=r"config.yaml.* choose another"):
        train(**how)
    assert (tmp_path / "run" / "config.yaml").read_bytes() == content


def test_runs_that_share_states_store_them_one_after_the_other(train, tmp_path, capsys):
    states = tmp_path / "states"
    options = {"cache_hidden_states": True, "states_dir": states}
    has_it = threading.Event()

    def hold() -> None:
        with locked(states):
            has_it.set()
            time.sleep(0.5)

    other = threading.Thread(target=hold)
    other.start()
    has_it.wait()
    train(**options)
    other.join()
    assert f"{states} is in use by process" in capsys.readouterr().err
    with locked(states), pytest.raises(BlockingIOError, match="states is in use by process"):
        train(output_dir=tmp_path / "late", timeout_minutes=1e-3, **options)


@pytest.mark.parametrize("name", ["states_dir", "documents_dir"])
@pytest.mark.parametrize("inside", [".", "heads", "best/states", "checkpoints"])
def test_states_and_documents_may_not_lie_where_the_run_puts_something_else(train, tmp_path, name, inside):
    with pytest.raises(ValueError, match=rf"{name} must be a directory of its own, got .* choose another"):
        train(cache_hidden_states=True, timeout_minutes=1e-3, **{name: str(tmp_path / "run" / inside)})
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_installed_is_refused_before_any_work(train, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name)
    )
    with pytest.raises(ImportError, match=r"tracker=tensorboard needs tensorboard.*pip install tensorboard"):
        train(tracker="tensorboard")
    assert not (tmp_path / "run").exists()


def test_the_tracker_sees_one_run_however_often_it_is_resumed(train, monkeypatch):
    """What wandb is given; it is not asked to start."""
    started = []
    monkeypatch.setattr(
        "accelerate.Accelerator.init_trackers", lambda self, *arguments: started.append(arguments)
    )
    for steps in (4, 5):
        train(tracker="wandb", resume="auto", max_steps=steps, fused_layers=[1])
    (project, values, settings), again = started
    assert project == "medusa-heads"
    assert settings["wandb"]["id"] == again[2]["wandb"]["id"]
    assert settings["wandb"]["resume"] == "allow"
    assert values["learning_rate"] == 0.001
    assert values["max_steps"] == 4
    assert values["fused_layers"] == "[1]"


def test_only_the_main_process_looks_into_the_output_directory(tmp_path, monkeypatch, place):
    """The main process may have begun to write there when a slower one looks."""
    run = tmp_path / "run"
    (run / "wandb").mkdir(parents=True)
    options = {"base": place / "base", "data": place / "rows.jsonl", "output_dir": run, "max_steps": 1}
    slow: Any = SimpleNamespace(is_main_process=False, num_processes=2)
    monkeypatch.setattr(processes, "broadcast_object_list", lambda values: [None, False])
    with job.locked_run(configuration_of(**options), slow):
        pass
    monkeypatch.setattr(processes, "broadcast_object_list", lambda values: [None, True])
    with pytest.raises(SystemExit, match="1"), job.locked_run(configuration_of(**options), slow):
        pass


def test_a_full_disk_is_one_sentence_and_costs_no_checkpoint(train, tmp_path, monkeypatch):
    save_state = torch.save

    def refused(value: Any, file: Any, **options: Any) -> None:
        if "step-00000004" in str(file):
            raise RuntimeError(
                "[enforce fail] PytorchStreamWriter failed writing file data/0: file write failed"
            )
        save_state(value, file, **options)

    monkeypatch.setattr(torch, "save", refused)
    with pytest.raises(OSError, match=r"step-00000004 could not be written, and .* GiB are free"):
        train(checkpoint_steps=2)
    run = RunDirectory(tmp_path / "run")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]
    record = json.loads((run.checkpoints / "step-00000002" / "run.json").read_text())
    assert record["step"] == 2


def test_training_from_stored_states_has_no_layer_of_the_base_in_memory(train, tmp_path, monkeypatch):
    train(output_dir=tmp_path / "live")
    loaded = []
    live_states = job.live_states
    monkeypatch.setattr(job, "live_states", lambda *given: loaded.append(1) or live_states(*given))
    bases = []
    recipe = job.RECIPES["medusa"]
    monkeypatch.setitem(
        job.RECIPES, "medusa", lambda c, states, data: bases.append(states.base) or recipe(c, states, data)
    )
    options = {"cache_hidden_states": True, "resume": "auto", "tree_nodes": 5}
    run = train(**options)
    (base,) = bases
    assert [len(base.model.layers), base.config.num_hidden_layers] == [0, 2]
    ours, theirs = (each.logged_metrics()[-1] for each in (run, RunDirectory(tmp_path / "live")))
    for key, value in theirs.items():  # the last evaluation, tokens per step among it
        assert ours[key] == pytest.approx(value, rel=1e-4), key
    assert load_heads(run.heads).fingerprint.configuration["num_hidden_layers"] == 2
    assert load_heads(run.heads).tree.num_nodes == 5
    assert loaded == [1]
    train(**options, max_steps=5)  # the states are there: the layers are not even read
    assert loaded == [1]


@pytest.mark.parametrize(
    "kind",
    [
        {"fused_layers": [1]},
        {"fused_layers": [1], "objective": "kl", "train_on": "everything"},
        {"packing": True},
    ],
    ids=str,
)
def test_every_kind_of_heads_trains_from_stored_states_alone(train, tmp_path, kind):
    train(output_dir=tmp_path / "live", **kind)
    live = RunDirectory(tmp_path / "live")
    run = train(cache_hidden_states=True, states_dir=tmp_path / "states", **kind)
    assert losses(run) == pytest.approx(losses(live), rel=1e-4)
    ours, theirs = (load_heads(each.heads).heads.state_dict() for each in (run, live))
    torch.testing.assert_close(ours.get("layer_scale"), theirs.get("layer_scale"), rtol=1e-4, atol=0)
    assert (tmp_path / "states" / "training" / "00000.safetensors").exists()
