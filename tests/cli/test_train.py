"""`medusa train`, through both doors: launched as the README says, told off politely, tracked offline."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import CHECKOUT
from peft import PeftModel
from reported import ran
from tiny_training import MORTAL, accelerated, write_run
from transformers import AutoModelForCausalLM

from medusa import MedusaModel, load_heads
from medusa.cli.main import main
from medusa.training.run.processes import STOPPED

PROGRAM = (str(CHECKOUT / "train" / "train_heads.py"),)
MODULE = ("-m", "medusa", "train")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A base model, data and a configuration file."""
    return write_run(tmp_path_factory.mktemp("workplace"), max_steps=6, tokens_per_batch=512, logging_steps=2)


def launch(
    workplace: Path,
    *arguments: str,
    launcher: tuple[str, ...] = (sys.executable,),
    program: tuple[str, ...] = PROGRAM,
    **environment: str,
):
    """The finished process, run in ``workplace`` as a user would run it elsewhere than in a checkout."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **environment}
    command = [*launcher, *program, "--config", "run.yaml", *arguments]
    return subprocess.run(command, cwd=workplace, env=variables, capture_output=True, text=True, timeout=600)


@pytest.fixture
def here(workplace, monkeypatch, fresh_accelerator) -> None:
    """Runs in this process are runs in ``workplace``."""
    monkeypatch.chdir(workplace)


def train_here(workplace: Path, *arguments: str) -> None:
    """A run of one process, this one, with two micro-batches a step."""
    AcceleratorState._reset_state(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace)
        given = ("--config", "run.yaml", *arguments, "--gradient_accumulation_steps", "2")
        assert main(["train", *given]) == 0
    AcceleratorState._reset_state(True)


ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")


def losses(run: Path) -> list[float]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry["train/loss"] for entry in entries if "train/loss" in entry]


def test_a_launched_run_leaves_heads_with_a_tree_and_their_history_and_goes_on_in_this_process(
    workplace, here, capsys
):
    launcher = (*ACCELERATE, "--mixed_precision", "bf16")
    arguments = ("--output_dir", "out", "--cache_hidden_states", "true", "--checkpoint_steps", "3")
    done = launch(workplace, *arguments, "--tracker", "wandb", launcher=launcher)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert next(line for line in said if "from" in line).startswith("medusa 0.")
    chat = f"medusa chat --base {workplace / 'base'} --heads out/heads"
    assert any(line.endswith(chat) for line in said)
    assert not any("medusa export" in line for line in said), "heads that read their path have no other home"
    assert "bf16 products" in done.stderr
    header = json.loads((workplace / "out" / "states" / "training" / "manifest.json").read_text())
    assert header["arithmetic"] == "torch.bfloat16"
    loaded = load_heads(workplace / "out" / "heads")
    assert loaded.heads.num_heads == 3
    assert loaded.tree.num_nodes == 6
    assert all(each.dtype == torch.float32 for each in loaded.heads.parameters())
    assert loaded.provenance["configuration"]["precision"] == "bf16"
    assert "train_heads.py --config run.yaml" in loaded.provenance["command"]
    assert len(losses(workplace / "out")) == 3
    (tracked,) = (workplace / "out" / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/top1_3" in tracked.read_bytes()
    assert (workplace / "out" / "config.yaml").exists()

    assert main(["train", "--config", "run.yaml", "--output_dir", "out"]) == 1  # the directory is now taken
    said = capsys.readouterr().err
    assert "error: output directory 'out' exists and is not empty" in said
    assert "Traceback" not in said
    more = ("--resume", "--max_steps", "8", "--cache_hidden_states", "false")
    assert main(["train", "--config", "run.yaml", *arguments, *more]) == 0
    assert "from step 6 on precision: 'bf16' -> 'fp32'" in capsys.readouterr().err


def test_inspect_shows_what_is_trained_on_and_trains_nothing(workplace, here, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = ran(capsys, ["train", "--config", "run.yaml", "--output_dir", "inspected", "--inspect"]).err
    assert "\x1b[1;32m" in shown
    assert "tokens trained on" in shown
    assert "38 training documents" in shown
    assert not (workplace / "inspected").exists()


JOINT = ("--joint", "--joint_warmup_fraction", "0.5", "--lora_rank", "4", "--learning_rate", "1e-2")


def test_a_joint_run_leaves_heads_and_adapter_that_decode_as_the_adapted_model_does(workplace, here, capsys):
    arguments = ("--output_dir", "joint", "--base_objective", "ce", *JOINT)
    assert main(["train", "--config", "run.yaml", *arguments]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "step 3: from here on the adapter is trained with the heads" in said
    assert "perplexity on held-out answers" in said
    assert "heads and adapter written to joint/heads" in said
    heads = workplace / "joint" / "heads"
    provenance = load_heads(heads).provenance
    assert provenance["configuration"]["joint"] is True
    assert provenance["versions"]["peft"]
    last = json.loads((workplace / "joint" / "metrics.jsonl").read_text().splitlines()[-1])
    perplexities = [last[f"held_out/base_perplexity{when}"] for when in ("", "_before")]
    assert perplexities[0] != perplexities[1]
    assert provenance["metrics"]["held_out/base_perplexity"] == perplexities[0]

    model = MedusaModel.from_pretrained(workplace / "base", heads)
    options = {"max_new_tokens": 30, "do_sample": False}
    ids = model.tokenizer("Count from c, 2", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(workplace / "base")
    adapted = PeftModel.from_pretrained(base, heads / "adapter").get_base_model()
    assert model.generate(ids, **options).tolist() == adapted.generate(ids, **options).tolist()


@pytest.fixture(scope="module")
def one_joint(workplace) -> Path:
    """The run of one process that takes two micro-batches a step, heads alone and then with an adapter."""
    train_here(workplace, "--output_dir", "one_joint", *JOINT)
    return workplace / "one_joint"


TRACKED = ("learning_rate", "gradient_norm", "tokens_per_second", "peak_gib", "minutes")


def tracked(directory: Path) -> list[dict[str, float]]:
    """What wandb wrote of one process, entry by entry."""
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.glob("*.wandb")
    entries = []
    for data in logged_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        items = {(each.key or "/".join(each.nested_key)): each.value_json for each in record.history.item}
        if items:
            entries.append({key: json.loads(value) for key, value in items.items()})
    return entries


def logged_records(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log with a header of 7 bytes, as wandb keeps it: blocks of 32 KiB, in which a
    record is a checksum, a length and whether it is whole (1), a start (2), a middle (3) or an end (4)."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        _, length, kind = struct.unpack("<IHB", content[place : place + 7]) if left >= 7 else (0, 0, 0)
        if not kind:  # the rest of a block is padding
            place += left
            continue
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandb_sees_one_run_across_resumes_with_the_values_of_the_metrics_file(workplace):
    arguments = ("--output_dir", "seen", "--tracker", "wandb", "--resume", "auto", "--logging_steps", "1")
    arguments += ("--evaluation_steps", "2")
    # By SIGTERM: what wandb was told in the last 15 seconds before a SIGKILL is not in its file yet.
    stopped = launch(workplace, *arguments, program=(MORTAL,), KILL_AT_STEP="4", KILL_BY="SIGTERM")
    assert stopped.returncode == STOPPED, stopped.stderr
    assert "stopped by SIGTERM at step 5" in stopped.stderr
    resumed = launch(workplace, *arguments)
    assert resumed.returncode == 0, resumed.stderr
    parts = sorted((workplace / "seen" / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert len({part.name.rpartition("-")[2] for part in parts}) == 1, "one run"
    seen: dict[int, dict[str, float]] = {}
    for entry in (entry for part in parts for entry in tracked(part)):
        seen.setdefault(int(entry["_step"]), {}).update(entry)
    lines = [json.loads(line) for line in (workplace / "seen" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(seen) == sorted({line["step"] for line in lines}) == [1, 2, 3, 4, 5, 6]
    by_head = [f"{key}_{head}" for key in ("loss", "top1", "top5") for head in (1, 2, 3)]
    for line in lines:
        is_held_out = "held_out/loss" in line
        name = "held_out" if is_held_out else "train"
        wanted = [f"{name}/loss", *(f"{name}/{key}" for key in by_head), "num_tokens"]
        if is_held_out:
            wanted += [
                "held_out/tokens_per_step",
                *(f"held_out/tokens_per_step_{head}" for head in (1, 2, 3)),
            ]
        else:
            wanted += TRACKED
        for key in wanted:
            assert line[key] == pytest.approx(seen[line["step"]][key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_two_processes_train_heads_and_adapter_like_one(workplace, one_joint, name):
    environment = {"DS_ACCELERATOR": "cpu"} if name == "zero2" else {}
    if name == "zero2":
        pytest.importorskip("deepspeed")
    run = f"{name}_joint"
    two = launch(workplace, "--output_dir", run, *JOINT, launcher=accelerated(name), **environment)
    assert two.returncode == 0, two.stderr
    assert "2 x cpu" in two.stderr
    assert losses(workplace / run) == pytest.approx(losses(one_joint), abs=1e-4)
    ours, theirs = (load_heads(path / "heads").adapter for path in (workplace / run, one_joint))
    for key, tensor in ours.weights.items():
        torch.testing.assert_close(tensor, theirs.weights[key], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_joint_run_under_zero_2_that_was_killed_goes_on_to_the_result_of_one_process(workplace, one_joint):
    pytest.importorskip("deepspeed")
    arguments = ("--output_dir", "zero2_killed", *JOINT, "--checkpoint_steps", "1")
    options = {"launcher": accelerated("zero2"), "program": (MORTAL,), "DS_ACCELERATOR": "cpu"}
    killed = launch(workplace, *arguments, **options, KILL_AT_STEP="5")
    assert killed.returncode != 0
    resumed = launch(workplace, *arguments, "--resume", **options)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(workplace / "zero2_killed") == pytest.approx(losses(one_joint), abs=1e-4)


# Three micro-batches a step are an odd number for two processes: one of them has nothing to do at times.
STEPS = ("--max_steps", "12", "--checkpoint_steps", "3", "--logging_steps", "1", "--tokens_per_batch", "700")
STEPS += ("--unembedding", "full", "--learning_rate", "0.01", "--warmup_steps", "2", "--fused_layers", "1")


@pytest.fixture(scope="module")
def alone(workplace) -> list[float]:
    """The losses of one process that takes two micro-batches a step."""
    train_here(workplace, "--output_dir", "alone", *STEPS)
    assert len(losses(workplace / "alone")) == 12
    return losses(workplace / "alone")


def assert_same_result(workplace: Path, run: str, alone: list[float]) -> None:
    """The losses to 1e-4, and whole heads that are those of the one process."""
    assert losses(workplace / run) == pytest.approx(alone, abs=1e-4)
    ours, theirs = (load_heads(workplace / name / "heads").heads.state_dict() for name in (run, "alone"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-4, rtol=1e-3)


def test_two_processes_have_the_losses_of_one(workplace, alone):
    two = launch(workplace, "--output_dir", "two", *STEPS, launcher=accelerated("ddp"), program=MODULE)
    assert two.returncode == 0, two.stderr
    assert "2 x cpu" in two.stderr
    assert_same_result(workplace, "two", alone)


def test_a_run_killed_at_any_step_goes_on_to_the_same_losses(workplace, alone):
    step = random.randrange(4, 12)
    arguments = ("--output_dir", "killed", *STEPS)
    two = ("--gradient_accumulation_steps", "2")
    killed = launch(workplace, *arguments, *two, program=(MORTAL,), KILL_AT_STEP=str(step))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (workplace / "killed" / "heads").exists()
    train_here(workplace, *arguments, "--resume")
    assert losses(workplace / "killed") == alone, f"killed at step {step}"


@pytest.mark.slow
def test_two_processes_store_their_own_shards_and_one_command_starts_and_resumes(workplace, alone):
    arguments = ("--output_dir", "shards", *STEPS, "--cache_hidden_states", "true", "--resume", "auto")
    options = {"launcher": accelerated("ddp"), "program": (MORTAL,), "SHARD_BYTES": "100000"}
    killed = launch(workplace, *arguments, **options, KILL_AT_STEP="7")
    assert killed.returncode != 0
    for rank in (0, 1):
        assert f"rank {rank} wrote " in killed.stderr
    assert not (workplace / "shards" / "heads").exists()
    resumed = launch(workplace, *arguments, **options)
    assert resumed.returncode == 0, resumed.stderr
    assert "wrote" not in resumed.stderr.replace("written", "")
    assert_same_result(workplace, "shards", alone)


@pytest.mark.slow
def test_two_processes_share_out_heads_in_bfloat16_products_like_one(workplace):
    arguments = ("--objective", "kl", "--precision", "bf16", "--fused_layers", "1", "--logging_steps", "1")
    train_here(workplace, "--output_dir", "bf16_one", *arguments)
    options = {"launcher": accelerated("fsdp2"), "program": (MORTAL,), "PRETEND_DEVICES": "1"}
    two = launch(workplace, "--output_dir", "bf16_two", *arguments, **options)
    assert two.returncode == 0, two.stderr
    assert "bf16 products, 2 x cpu" in two.stderr
    assert losses(workplace / "bf16_two") == pytest.approx(losses(workplace / "bf16_one"), rel=1e-3)
    weights = load_heads(workplace / "bf16_two" / "heads").heads.parameters()
    assert all(each.dtype == torch.float32 for each in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp2"])
def test_a_sharded_run_that_was_killed_goes_on_to_the_result_of_one_process(workplace, alone, name):
    environment = {"PRETEND_DEVICES": "1"} if name == "fsdp2" else {"DS_ACCELERATOR": "cpu"}
    if name != "fsdp2":
        pytest.importorskip("deepspeed")
    arguments, launcher = ("--output_dir", name, *STEPS), accelerated(name)
    killed = launch(
        workplace, *arguments, launcher=launcher, program=(MORTAL,), KILL_AT_STEP="7", **environment
    )
    assert killed.returncode != 0
    assert len(losses(workplace / name)) == 7, killed.stderr
    resumed = launch(workplace, *arguments, "--resume", launcher=launcher, program=(MORTAL,), **environment)
    assert resumed.returncode == 0, resumed.stderr
    assert "2 x cpu" in resumed.stderr
    assert_same_result(workplace, name, alone)
