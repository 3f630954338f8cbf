"""The loop on a tiny base: what it learns, what it repeats exactly, what survives a failure."""

from __future__ import annotations

import io
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from tiny_training import (
    EAGLE3,
    JOINT,
    assert_equal_weights,
    conversation,
    counting_rows,
    history,
    new_trainer,
    stop_after,
    tiny_base,
)
from torch.utils._python_dispatch import TorchDispatchMode

from medusa import load_heads
from medusa.heads.checkpoint import HeadsCheckpoint, save_heads
from medusa.training.data.loading import Dataset
from medusa.training.run.metrics import calibrated_tree
from medusa.training.run.trainer import Trainer, _peak_memory

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return counting_rows(40)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.heads.state_dict().items()}


@pytest.mark.parametrize("kind", [{}, EAGLE3], ids=["medusa", "eagle3"])
def test_training_lowers_the_held_out_loss_and_leaves_the_base_alone(tmp_path, rows, kind):
    trainer = new_trainer(tmp_path, rows, max_steps=30, **kind)
    trainer.run.start(trainer.configuration)
    before = trainer.evaluate()
    metrics = trainer.train()
    assert metrics["held_out/loss"] < 0.8 * before["held_out/loss"]
    assert all(
        f"held_out/{key}_{depth}" in metrics for key in ("loss", "top1", "top5") for depth in (1, 2, 3)
    )
    for name, tensor in tiny_base().state_dict().items():
        assert torch.equal(trainer.base.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"unembedding": "token_map", "token_map_size": 20},
        EAGLE3,
        {"fused_layers": [1]},
    ],
    ids=str,
)
def test_training_goes_on_from_given_heads_with_a_token_map_of_the_new_data(tmp_path, rows, kind):
    first = new_trainer(tmp_path, rows, max_steps=2, **kind)
    first.train()
    given = tmp_path / "given"
    save_heads(HeadsCheckpoint(first.heads, base_model="tiny"), given)
    again = new_trainer(tmp_path / "again", rows[:20], start_from=given, **kind)
    theirs = weights(first)
    for name, tensor in weights(again).items():
        assert name == "token_map" or torch.equal(tensor, theirs[name]), name
    if "token_map_size" in kind:
        before = theirs["token_map"].tolist()
        expected = again.data.training.most_frequent_labels(20, 258, theirs["token_map"].numpy())
        assert again.heads.token_map.tolist() == expected.tolist()
        other = [{"text": "WXYZ" * 10}] * 20
        fresh = new_trainer(tmp_path / "other", other, start_from=given, **kind)
        assert fresh.heads.token_map.tolist() != before, "what is written often enters"
        few = new_trainer(tmp_path / "few", rows[:4], start_from=given, **kind)
        written = {*few.data.training.tokens[few.data.training.is_label].tolist()}
        kept = {*few.heads.token_map.tolist()} - written
        assert kept and kept <= {*before}, "what a short text does not have stays"
        larger = new_trainer(tmp_path / "larger", rows, start_from=given, **kind | {"token_map_size": 40})
        assert len(larger.heads.token_map) == 40
        assert torch.equal(weights(larger)["blocks.0.0.linear.weight"], theirs["blocks.0.0.linear.weight"])


@pytest.mark.parametrize("more", [{"fused_layers": [1, 2]}, {"num_layers": 3}], ids=str)
def test_larger_heads_begin_as_the_heads_that_they_start_from(tmp_path, rows, more):
    first = new_trainer(tmp_path, rows)
    metrics = first.train()
    given = save_heads(HeadsCheckpoint(first.heads, base_model="tiny"), tmp_path / "given")
    again = new_trainer(tmp_path / "again", rows, start_from=given, **more)
    again.run.start(again.configuration)
    before = again.evaluate()
    assert before["held_out/loss"] == pytest.approx(metrics["held_out/loss"], rel=1e-5)
    again.train()
    assert all(block.linear.weight.abs().max() > 0 for blocks in again.heads.blocks for block in blocks)
    if "fused_layers" in more:
        assert (again.heads.layer_scale != 1).all()
        assert again.heads.fusion.weight.abs().max() > 0
        fused = save_heads(HeadsCheckpoint(again.heads, base_model="tiny"), tmp_path / "fused")
        third = new_trainer(tmp_path / "third", rows[:9], start_from=fused, **more)
        assert torch.equal(third.heads.layer_scale, again.heads.layer_scale)


def test_heads_of_other_options_are_no_start(tmp_path, rows):
    given = tmp_path / "given"
    save_heads(HeadsCheckpoint(new_trainer(tmp_path, rows, num_layers=2).heads, base_model="tiny"), given)
    with pytest.raises(ValueError, match=r"start_from: .*num_layers was 2 and is 1"):
        new_trainer(tmp_path, rows, start_from=given)


def test_every_head_reaches_100_percent_on_a_counting_sequence(tmp_path):
    sequence = "abcdefghijklmnopqrstuvwxyz0123456789"
    trainer = new_trainer(
        tmp_path,
        [{"text": sequence}],
        num_heads=4,
        unembedding="full",
        max_steps=120,
        held_out_fraction=0,
        decay=1.0,
        logging_steps=120,
    )
    trainer.train()
    trainer.data = Dataset(trainer.data.training, trainer.data.training, {})
    final = trainer.evaluate()
    assert [final[f"held_out/top1_{depth}"] for depth in (1, 2, 3, 4)] == [1.0] * 4


EVERY_STEP = {**JOINT, "checkpoint_steps": 1, "evaluation_steps": 3, "lora_dropout": 0.2}
STOPPED = {
    "live states": ({}, 7),
    "stored states in bf16": ({"cache_hidden_states": True, "precision": "bf16"}, 7),
    "an EAGLE-3 head": (EAGLE3, 6),
    "an adapter, in the first stage": (EVERY_STEP, 3),
    "an adapter, as the second has begun": (EVERY_STEP, 5),
}
"""Options of a run, and the step at which it is killed."""


@pytest.mark.parametrize("what", STOPPED)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path, rows, monkeypatch, what):
    kind, step = STOPPED[what]
    options = {"checkpoint_steps": 5, "evaluation_steps": 4, "logging_steps": 2} | kind
    torch.manual_seed(0)
    whole = new_trainer(tmp_path / "whole", rows, **options)
    whole.train()
    torch.manual_seed(0)
    stop_after(new_trainer(tmp_path / "parts", rows, **options), step, monkeypatch)
    torch.manual_seed(99)
    resumed = new_trainer(tmp_path / "parts", rows, **options, resume="always")
    resumed.train()
    assert len(history(whole)) == whole.state.step // 2 >= 4
    assert history(resumed) == history(whole)
    assert history(resumed, "held_out") == history(whole, "held_out")
    assert_equal_weights(resumed, whole, rtol=0, atol=0)
    assert resumed.state.epoch == whole.state.epoch
    assert resumed.state.adapter_steps == whole.state.adapter_steps


def test_a_checkpoint_without_its_last_file_is_not_resumed_from(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows, checkpoint_steps=5, max_steps=10)
    trainer.train()
    (trainer.run.checkpoints / "step-00000010" / "run.json").unlink()
    resumed = new_trainer(tmp_path, rows, checkpoint_steps=5, resume="always")
    assert resumed.run.load_checkpoint(resumed.accelerator, resumed.state)[0].step == 5


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "name"),
    [(cut, "model.safetensors"), (zero, "optimizer.bin"), (Path.unlink, "model.safetensors")],
)
def test_a_damaged_checkpoint_is_named_and_an_older_whole_one_is_taken(tmp_path, rows, name, damage):
    options = {"checkpoint_steps": 5, "keep_checkpoints": 1}
    new_trainer(tmp_path, rows, **options | {"keep_checkpoints": 2, "max_steps": 10}).train()
    resumed = new_trainer(tmp_path, rows, **options, resume="always")
    damage(resumed.run.checkpoints / "step-00000010" / name)
    said = io.StringIO()
    resumed.console = Console(file=said, width=500)
    resumed.train()
    assert f"step-00000010/{name} is" in said.getvalue()
    assert "going on from step-00000005" in said.getvalue()
    assert resumed.state.step == 12
    assert [path.name for path in resumed.run.checkpoints.iterdir()] == ["step-00000012"]


def test_where_no_checkpoint_is_whole_the_files_are_named(tmp_path, rows):
    new_trainer(tmp_path, rows, max_steps=10).train()
    resumed = new_trainer(tmp_path, rows, resume="always")
    cut(resumed.run.checkpoints / "step-00000010" / "model.safetensors")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: .*model.safetensors is cut"):
        resumed.train()


def test_no_process_leaves_before_the_checkpoint_has_its_name(tmp_path, rows, monkeypatch):
    """The end of one process makes a launcher stop the others, among them the one that writes."""
    trainer, there = new_trainer(tmp_path, rows), []
    target = trainer.run.checkpoints / "step-00000000"
    trainer.run.start(trainer.configuration)
    monkeypatch.setattr(trainer.accelerator, "wait_for_everyone", lambda: there.append(target.exists()))
    trainer.checkpoint()
    assert there[-1] and not there[0]


def test_one_process_says_whether_there_is_something_to_resume(tmp_path, rows, monkeypatch):
    """The others may see a shared directory as it was a while ago."""
    new_trainer(tmp_path, rows, checkpoint_steps=5).train()
    resumed = new_trainer(tmp_path, rows, checkpoint_steps=5, resume="auto")
    monkeypatch.setattr("medusa.training.run.trainer.on_main_process", lambda *_: False)
    resumed._begin()
    assert resumed.state.step == 0


def test_a_checkpoint_lies_on_the_disk_before_it_has_its_name(tmp_path, rows, monkeypatch):
    synced, at_rename = set(), {}
    fsync, replace = os.fsync, os.replace

    def noting_fsync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def noting_replace(source: Any, target: Any) -> None:
        if Path(target).name == "step-00000005":
            written = {path: path.stat().st_ino for path in Path(source).rglob("*")}
            at_rename.update({path.name: inode in synced for path, inode in written.items()})
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    new_trainer(tmp_path, rows, checkpoint_steps=5, max_steps=5).train()
    assert at_rename.keys() >= {"model.safetensors", "optimizer.bin", "run.json"}
    assert all(at_rename.values()), at_rename


def test_there_is_a_checkpoint_every_half_hour_without_asking(tmp_path, rows, monkeypatch):
    assert new_trainer(tmp_path, rows).configuration.run.checkpoint_minutes == 30
    trainer = new_trainer(tmp_path, rows)
    at, clock = iter(range(0, 10**6, 12 * 60)), time.monotonic  # a step takes twelve minutes
    do_step, offset = trainer._step, [0.0]

    def slow(*arguments: Any) -> None:
        do_step(*arguments)
        offset[0] = next(at) + 12 * 60

    monkeypatch.setattr(trainer, "_step", slow)
    monkeypatch.setattr("medusa.training.run.trainer.time.monotonic", lambda: clock() + offset[0])
    trainer.train()
    names = [path.name for path in sorted(trainer.run.checkpoints.iterdir())]
    assert names == ["step-00000009", "step-00000012"]  # the last two of those after 3, 6, 9 and 12 steps


def test_the_best_heads_are_kept_beside_the_last(tmp_path, rows, monkeypatch):
    found = iter([1.5, 1.9, 1.2, 1.8])
    monkeypatch.setattr(
        "medusa.training.run.trainer.replayed_metrics",
        lambda *_: {"held_out/tokens_per_step": next(found)},
    )
    trainer = new_trainer(tmp_path, rows, evaluation_steps=3, replayed_documents=1)
    trainer.train()
    best, last = (load_heads(path) for path in (trainer.run.best, trainer.run.heads))
    assert best.provenance["metrics"]["held_out/tokens_per_step"] == 1.9
    assert best.provenance["training"]["steps"] == 6
    assert last.provenance["training"]["steps"] == 12
    assert not torch.equal(best.heads.blocks[0][0].linear.weight, last.heads.blocks[0][0].linear.weight)


def test_what_a_finished_run_measured_is_not_logged_again_when_it_is_resumed(tmp_path, rows):
    options = {"checkpoint_steps": 4, "evaluation_steps": 4}
    finished = new_trainer(tmp_path, rows, **options)
    finished.train()
    again = new_trainer(tmp_path, rows, **options, resume="always")
    again.train()
    assert history(again, "held_out") == history(finished, "held_out")  # history refuses a step logged twice
    assert list(history(again, "held_out")) == [4, 8, 12]


def test_the_log_has_the_gradient_norm_and_the_memory(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows)
    trainer.train()
    entries = [entry for entry in trainer.run.logged_metrics() if "train/loss" in entry]
    for entry in entries:
        assert entry["gradient_norm"] > 0
        assert 0.05 < entry["peak_gib"] < 100
    assert len({entry["gradient_norm"] for entry in entries}) > 1


def test_a_run_that_diverged_goes_on_with_a_lower_learning_rate_and_says_so(tmp_path, rows, monkeypatch):
    trainer = new_trainer(tmp_path, rows, checkpoint_steps=4, evaluation_steps=4, precision="bf16")
    do_step = trainer._step

    def spoiled(*arguments: Any) -> None:
        if trainer.state.step == 5:
            with torch.no_grad():
                trainer.heads.blocks[1][0].linear.weight[0, 0] = float("nan")
        do_step(*arguments)

    monkeypatch.setattr(trainer, "_step", spoiled)
    with pytest.raises(FloatingPointError, match=r"of step 6 is .* lower learning_rate .* --resume takes"):
        trainer.train()
    assert [path.name for path in trainer.run.checkpoints.iterdir()] == ["step-00000004"]
    AcceleratorState._reset_state(True)
    mended = {"learning_rate": 1e-3, "precision": "fp32", "base_dtype": "float32"}
    resumed = new_trainer(tmp_path, rows, checkpoint_steps=4, resume="always", **mended)
    resumed.train()
    assert resumed.state.step == 12
    assert max(entry["learning_rate"] for step, entry in history(resumed).items() if step > 4) <= 1e-3
    assert load_heads(resumed.run.heads).provenance["training"]["changes"] == [
        "from step 4 on learning_rate: 0.01 -> 0.001",
        "from step 4 on precision: 'bf16' -> 'fp32'",
        "from step 4 on base_dtype: 'auto' -> 'float32'",
    ]


@pytest.mark.parametrize("kind", [{}, {**JOINT, "joint_warmup_fraction": 0.25}], ids=["heads", "joint"])
def test_accumulated_micro_batches_train_like_one_large_batch(tmp_path, kind):
    """Two conversations with very different numbers of labels: weighting them alike would be wrong."""
    rows = [conversation("a", "short"), conversation("b", "a much longer answer than the other one, " * 3)]
    options = {**kind, "held_out_fraction": 0, "max_steps": 4, "learning_rate": 1e-3}
    joined = new_trainer(tmp_path / "joined", rows, tokens_per_batch=1000, **options)
    parts = new_trainer(
        tmp_path / "parts", rows, tokens_per_batch=1, gradient_accumulation_steps=2, **options
    )
    assert [len(group) for group in joined._plan(0)] == [1]
    assert [len(group) for group in parts._plan(0)] == [2]
    joined.train()
    parts.train()
    assert_equal_weights(parts, joined, rtol=1e-3, atol=2e-6)


def test_prompts_are_trained_on_when_asked_and_never_measured(tmp_path, rows):
    counts = {}
    for train_on in ("answers", "everything"):
        trainer = new_trainer(
            tmp_path / train_on, rows, objective="kl", train_on=train_on, max_steps=2, held_out_fraction=0.3
        )
        assert trainer.data.held_out.num_labels < trainer.data.held_out.num_tokens
        trainer.train()
        counts[train_on] = trainer.training.num_labels
    assert counts["answers"] < counts["everything"] == trainer.training.num_tokens


@pytest.mark.parametrize("kind", [{}, EAGLE3 | {"cache_hidden_states": True}], ids=["medusa", "eagle3"])
def test_bfloat16_losses_are_those_of_float32_to_a_hundredth(tmp_path, rows, kind):
    runs = []
    for precision in ("fp32", "bf16"):
        AcceleratorState._reset_state(True)
        options = {"precision": precision, "objective": "kl", "max_steps": 5, **kind}
        trainer = new_trainer(tmp_path / precision, rows, **options)
        trainer.train()
        runs.append({step: entry["train/loss"] for step, entry in history(trainer).items()})
        assert all(tensor.dtype == torch.float32 for tensor in weights(trainer).values())
    exact, rounded = runs
    assert rounded != exact, "bf16 rounded nothing"
    assert rounded == pytest.approx(exact, rel=1e-2)


class Products(TorchDispatchMode):
    """The types that matrix products run in."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.types |= {each.dtype for each in args if isinstance(each, torch.Tensor)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cache", [False, True], ids=["live states", "stored states"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_product_of_base_teacher_and_heads_has_the_precision_of_the_run(
    tmp_path, rows, precision, cache
):
    options = {"cache_hidden_states": cache, "objective": "kl", "max_steps": 2, "held_out_fraction": 0}
    trainer = new_trainer(tmp_path, rows, precision=precision, **options)
    with Products() as products:
        trainer.train()
    assert products.types == {{"fp32": torch.float32, "bf16": torch.bfloat16}[precision]}


def test_a_time_limit_ends_the_run(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows, max_steps=None, max_minutes=0.02)
    began = time.monotonic()
    trainer.train()
    assert 1.2 <= trainer.state.seconds < 3
    assert time.monotonic() - began < 6
    rates = [entry["learning_rate"] for entry in history(trainer).values()]
    assert rates[-1] < 0.2 * max(rates)


def test_a_run_plans_for_the_switch_of_its_base(tmp_path, rows, monkeypatch):
    trainer = new_trainer(tmp_path, rows)
    lengths = trainer.training.lengths
    switch = int(np.median(lengths))
    assert {len({lengths[index] > switch for (index,) in batch}) for (batch,) in trainer._plan(0)} == {1, 2}
    monkeypatch.setattr("medusa.training.run.trainer.longrope_threshold", lambda base: switch)
    assert {len({lengths[index] > switch for (index,) in batch}) for (batch,) in trainer._plan(0)} == {1}


def test_running_out_of_memory_names_what_to_lower_and_other_errors_stay(tmp_path, rows, monkeypatch):
    advice = r"lower tokens_per_batch \(it is 1024.*or block_elements \(it is 16777216"
    trainer = new_trainer(tmp_path, rows)
    for error, kind, message in (
        (torch.OutOfMemoryError("tried to allocate"), MemoryError, advice),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError, advice),
        (RuntimeError("shapes do not match"), RuntimeError, "shapes do not match"),
    ):
        monkeypatch.setattr(trainer, "_step", Mock(side_effect=error))
        with pytest.raises(kind, match=message):
            trainer.train()


def test_the_data_may_lie_in_the_output_directory(tmp_path, rows):
    for name in ("rows.config.json", ".answered"):
        (tmp_path / name).write_text("{}")
    trainer = new_trainer(tmp_path, rows, output_dir=tmp_path, max_steps=1)
    trainer.train()
    assert (tmp_path / "rows.config.json").exists()


def test_there_must_be_something_to_resume(tmp_path, rows):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint to resume from"):
        new_trainer(tmp_path, rows, resume="always")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data", "the data has changed since the run in"),
        ("processes", "holds a run of 1 processes, this one has 2"),
        ("sharding", "holds a run under NO, this one is under FSDP"),
    ],
)
def test_a_run_whose_batches_would_be_others_is_not_resumed(tmp_path, rows, change, message):
    new_trainer(tmp_path, rows, checkpoint_steps=5).train()
    if change == "data":
        rows[20:] = rows[21:]
    trainer = new_trainer(tmp_path, rows, resume="always")
    trainer.state.num_processes = 2 if change == "processes" else 1
    trainer.state.sharding = "FSDP" if change == "sharding" else "NO"
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_the_result_loads_and_says_how_it_was_made(tmp_path, rows):
    trainer = new_trainer(tmp_path, rows, unembedding="token_map", token_map_size=40)
    metrics = trainer.train()
    tree = calibrated_tree(trainer.base, trainer.heads, trainer.data.held_out, num_nodes=6)
    trainer.save(trainer.run.heads, trainer.heads, metrics, tree)
    loaded = load_heads(trainer.run.heads)
    for name, tensor in weights(trainer).items():
        assert torch.equal(loaded.heads.state_dict()[name], tensor)
    assert loaded.tree.num_nodes == 6
    assert loaded.base_model == "tiny"
    provenance = loaded.provenance
    assert provenance["configuration"]["learning_rate"] == 0.01
    assert provenance["metrics"] == metrics
    assert provenance["data"]["rows"] == 40
    assert provenance["training"]["steps"] == 12
    assert {"python", "torch", "transformers"} <= set(provenance["versions"])
    assert provenance["command"]


def test_answers_too_short_for_the_heads_give_no_tree(tmp_path):
    rows = [conversation(f"question {i}", "ok") for i in range(20)]
    trainer = new_trainer(tmp_path, rows)
    assert calibrated_tree(trainer.base, trainer.heads, trainer.data.held_out, 6) is None


def test_peak_memory_is_counted_in_bytes_where_the_system_counts_in_kib_and_where_it_counts_in_bytes(
    monkeypatch,
):
    monkeypatch.setattr(resource, "getrusage", lambda who: Mock(ru_maxrss=3 * 2**20))
    peaks = []
    for system in ("linux", "darwin"):
        monkeypatch.setattr(sys, "platform", system)
        peaks.append(_peak_memory(torch.device("cpu")))
    assert peaks == [3 * 2**30, 3 * 2**20]
