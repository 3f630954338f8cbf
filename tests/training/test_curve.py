"""What a run says of itself as it goes: tokens per step on held-out documents, and the picture of it."""

from __future__ import annotations

import json
import os

import pytest
from tiny_training import conversation, counting_rows, new_trainer

from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.training.data.dataset import Documents
from medusa.training.run.metrics import NUM_NODES, draw_training, is_stale, replayed_metrics
from medusa.training.run.trainer import Trainer

PNG = b"\x89PNG"
pytestmark = pytest.mark.usefixtures("fresh_accelerator")


def entries_of(trainer: Trainer) -> list[dict]:
    return [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]


def test_a_run_records_tokens_per_step_by_tokens_seen_and_draws_the_curve(tmp_path):
    options = {"unembedding": "full", "max_steps": 24, "evaluation_steps": 8, "warmup_steps": 12}
    trainer = new_trainer(tmp_path, counting_rows(60), replayed_documents=32, **options)
    metrics = trainer.train()
    measured = [entry for entry in entries_of(trainer) if "held_out/loss" in entry]
    seen = [entry["num_tokens"] for entry in measured]
    assert [entry["step"] for entry in measured] == [8, 16, 24]
    assert 0 < seen[0] < seen[1] < seen[2] == trainer.state.num_tokens
    gains = [entry["held_out/tokens_per_step"] for entry in measured]
    assert 1 < gains[0] < gains[-1] <= 1 + trainer.heads.num_heads
    assert metrics["held_out/tokens_per_step"] == gains[-1]
    held_out = trainer.data.held_out
    rows = [held_out[index] for index in range(len(held_out))]
    answers = [AnsweredTokens(row.tokens.tolist(), row.is_label.tolist()) for row in rows]
    counts = calibrate(trainer.base, trainer.heads, answers)
    assert gains[-1] == pytest.approx(counts.held_out_tokens_per_step(NUM_NODES))
    assert trainer.run.picture.read_bytes().startswith(PNG)


def test_replaying_reads_as_many_documents_as_asked_for_and_none_is_none(tmp_path):
    trainer = new_trainer(tmp_path, counting_rows(60), replayed_documents=0)
    assert "held_out/tokens_per_step" not in trainer.train()
    assert not trainer.run.picture.exists(), "one evaluation makes no curve"
    everything = trainer.data.held_out
    two = Documents.of(everything[index] for index in (0, 1))
    arguments = trainer.base, trainer.heads
    assert replayed_metrics(*arguments, everything, 2) == replayed_metrics(*arguments, two, 99) != {}
    assert replayed_metrics(*arguments, everything, 1) == {}, "nothing to judge a tree on"
    assert replayed_metrics(trainer.base, None, everything, 2) == {}


def test_answers_too_short_for_every_head_are_not_replayed(tmp_path):
    rows = [conversation(f"Say it {i}", "ab") for i in range(40)]
    trainer = new_trainer(tmp_path, rows, num_heads=6, max_steps=2, replayed_documents=32)
    assert "held_out/tokens_per_step" not in trainer.train()


def evaluation(step: int, **more: float) -> dict[str, float]:
    top1 = {f"held_out/top1_{head}": 0.1 * step / head for head in (1, 2, 3)}
    return {"step": step, "num_tokens": 1000 * step, "held_out/loss": 1.0 / step, **top1, **more}


@pytest.mark.parametrize(
    "more", [{}, {"held_out/tokens_per_step": 1.5}], ids=["top-1", "tokens per step too"]
)
def test_two_evaluations_make_a_picture_and_nothing_half_written_stays(tmp_path, more):
    entries = [{"step": 1, "train/loss": 2.0}, evaluation(1, **more), evaluation(4, **more)]
    assert draw_training(entries, tmp_path / "training.png")
    assert [path.name for path in tmp_path.iterdir()] == ["training.png"]
    assert (tmp_path / "training.png").read_bytes().startswith(PNG)


def test_a_picture_is_drawn_again_after_half_a_minute(tmp_path):
    picture = tmp_path / "training.png"
    assert is_stale(picture)
    picture.write_bytes(PNG)
    assert not is_stale(picture)
    old = picture.stat().st_mtime - 31
    os.utime(picture, (old, old))
    assert is_stale(picture)
