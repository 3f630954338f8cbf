"""Several processes that share what one alone could not hold or do: the base, several machines, restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils.other import get_free_port
from tiny_training import MORTAL, accelerated, write_run

from medusa import load_heads
from medusa.training.states.format import StatesDirectory

TWO = accelerated("ddp")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A base model, data and a configuration file."""
    return write_run(
        tmp_path_factory.mktemp("shared"),
        max_steps=8,
        checkpoint_steps=2,
        logging_steps=1,
        evaluation_steps=4,
        tokens_per_batch=700,
        learning_rate=0.01,
        warmup_steps=2,
        objective="blend",
        fused_layers=[1],
    )


def start(place: Path, launcher: tuple[str, ...], *arguments: str, **environment: str) -> subprocess.Popen:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [*launcher, MORTAL, "--config", "run.yaml", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=place, env=variables, **pipes)


def run(place: Path, launcher: tuple[str, ...], *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit status and what was said."""
    process = start(place, launcher, *arguments, **environment)
    _, said = process.communicate(timeout=900)
    return process.returncode, said


def entries(place: Path, name: str, key: str = "train/loss") -> list[float]:
    lines = (place / name / "metrics.jsonl").read_text().splitlines()
    return [entry[key] for entry in map(json.loads, lines) if key in entry]


def assert_equal_runs(place: Path, ours: str, theirs: str, atol: float = 1e-4) -> None:
    for key in ("train/loss", "held_out/loss", "held_out/tokens_per_step"):
        assert entries(place, ours, key) == pytest.approx(entries(place, theirs, key), abs=atol), key
    mine, other = (load_heads(place / name / "heads").heads.state_dict() for name in (ours, theirs))
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], atol=atol, rtol=1e-3)


@pytest.fixture(scope="module")
def alone(place) -> str:
    """One process that has the whole base and takes two micro-batches a step."""
    arguments = ("--output_dir", "alone", "--gradient_accumulation_steps", "2")
    status, said = run(place, (sys.executable,), *arguments)
    assert status == 0, said
    assert len(entries(place, "alone")) == 8
    return "alone"


@pytest.mark.parametrize("placement", ["tensor_parallel", "fsdp"])
def test_a_base_that_two_processes_share_gives_the_losses_of_a_whole_one(place, alone, placement):
    arguments = ("--output_dir", placement, "--base_placement", placement)
    status, said = run(place, TWO, *arguments, SAY_LOADED="1")
    assert status == 0, said
    assert_equal_runs(place, placement, alone)
    whole = sum(each.numel() for each in base_of(place).model.layers.parameters())
    held = [int(line.rpartition(" ")[2]) for line in said.splitlines() if "holds parameters" in line]
    assert len(held) == 2
    assert all(each < 0.6 * whole for each in held), "each process has its part of the layers only"


@pytest.mark.parametrize("placement", ["tensor_parallel", "fsdp"])
def test_a_shared_base_stores_the_states_of_a_whole_one(place, alone, placement):
    name = f"stored_{placement}"
    arguments = ("--output_dir", name, "--base_placement", placement, "--cache_hidden_states", "true")
    status, said = run(place, TWO, *arguments, SHARD_BYTES="150000")
    assert status == 0, said
    shards = [line for line in said.splitlines() if "wrote" in line and "of training" in line]
    assert len(shards) == 2, "both processes write"
    assert_equal_runs(place, name, alone)


def base_of(place: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(place / "base")


def test_one_process_spreads_a_base_over_its_devices(place, alone):
    arguments = ("--output_dir", "auto", "--base_placement", "auto", "--gradient_accumulation_steps", "2")
    status, said = run(place, (sys.executable,), *arguments)
    assert status == 0, said
    assert_equal_runs(place, "auto", alone)


def test_a_placement_that_the_launch_does_not_fit_is_refused(place):
    status, said = run(place, (sys.executable,), "--output_dir", "refused", "--base_placement", "fsdp")
    assert status == 1
    assert "base_placement=fsdp goes with several processes, got 1; choose auto" in " ".join(said.split())
    assert "Traceback" not in said


def test_two_machines_of_one_process_each_have_the_losses_of_one(place, alone):
    """Two process groups on one machine, as each node of a cluster starts its own."""
    nodes, port = [], get_free_port()
    for rank in ("0", "1"):
        node = ("--num_machines", "2", "--machine_rank", rank, "--same_network", "--rdzv_backend", "static")
        where = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(port))
        arguments = ("--output_dir", "nodes", "--cache_hidden_states", "true")
        nodes.append(start(place, (*TWO, *node, *where), *arguments))
    said = [node.communicate(timeout=900)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert_equal_runs(place, "nodes", alone)
    assert "medusa 0." in said[0] and "heads written to nodes/heads" in " ".join(said[0].split())
    assert "medusa 0." not in said[1], "one node speaks"


def test_a_launcher_that_restarts_dead_processes_ends_with_the_undisturbed_weights(place, alone):
    """torchrun's elastic restart: all processes start again with the same command, and go on."""
    launcher = accelerated("ddp", "--max_restarts", "1", "--monitor_interval", "1")
    arguments = ("--output_dir", "elastic", "--resume", "auto")
    status, said = run(place, launcher, *arguments, KILL_AT_STEP="5", KILL_ONCE="killed_once")
    assert status == 0, said
    assert (place / "killed_once").exists()
    assert "resumed at step 4" in said
    assert_equal_runs(place, "elastic", alone)


def test_states_stored_without_a_base_a_kill_and_one_command_give_the_undisturbed_weights(place):
    """Two processes store states, train without the base, die and go on by the same command line."""
    common = ("--cache_hidden_states", "true", "--resume", "auto")
    status, said = run(place, TWO, "--output_dir", "undisturbed", *common, SHARD_BYTES="60000")
    assert status == 0, said
    command = (TWO, "--output_dir", "disturbed", *common)
    status, said = run(place, *command, SHARD_BYTES="60000", KILL_AT_STEP="5")
    assert status != 0
    assert not (place / "disturbed" / "heads").exists()
    states, _ = StatesDirectory.read(place / "disturbed" / "states" / "training")
    assert states.missing() == [] and len(states.ends) > 2
    written = {path: path.stat().st_mtime_ns for path in states.directory.iterdir()}
    status, said = run(place, *command, SHARD_BYTES="60000", FORBID_BASE="1")
    assert status == 0, said
    assert {path: path.stat().st_mtime_ns for path in states.directory.iterdir()} == written
    assert_equal_runs(place, "disturbed", "undisturbed", atol=1e-6)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_goes_on_with_another_number_of_processes_that_takes_the_same_batches(place, alone, processes):
    launchers = {1: (sys.executable,), 2: TWO}
    name = f"elastic_{processes}"
    arguments = ("--output_dir", name, "--resume", "auto", "--gradient_accumulation_steps")
    before, after = launchers[3 - processes], launchers[processes]
    status, said = run(place, before, *arguments, str(processes), KILL_AT_STEP="5")
    assert status in (1, -signal.SIGKILL), said
    status, said = run(place, after, *arguments, str(processes))
    assert status == 1
    assert f"--gradient_accumulation_steps {3 - processes}" in " ".join(said.split())
    status, said = run(place, after, *arguments, str(3 - processes))
    assert status == 0, said
    assert "resumed at step 4" in said
    assert_equal_runs(place, name, alone)
