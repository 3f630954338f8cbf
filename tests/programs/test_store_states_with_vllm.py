"""The real vLLM stores the states that we store, and training from either ends at the same loss.

It needs a Python with vLLM, in an environment of its own: see ``tests/interop/test_vllm.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CHECKOUT

from medusa.cli.main import main
from medusa.training.states.format import StatesDirectory
from medusa.training.states.stored import final_norm

PYTHON = os.environ.get("VLLM_PYTHON")
PROGRAM = str(CHECKOUT / "scripts" / "store_states_with_vllm.py")
STATES_TOLERANCE = 1e-4
"""Of a state's own length: float32 on both sides, in another order of sums."""
LOSS_TOLERANCE = 1e-3
"""Of the loss at the end of the same training."""


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no Python with vLLM")
@pytest.mark.usefixtures("fresh_accelerator")
def test_states_that_vllm_stores_are_ours_and_train_to_the_same_loss(
    real_base, tmp_path, monkeypatch, repetitive_answers
):
    arguments = {
        "base": Path(real_base.name_or_path).resolve(),
        "base_dtype": "float32",
        "data": repetitive_answers,
        "num_heads": 2,
        "fused_layers": ("8", "16"),
        "unembedding": "token_map",
        "token_map_size": 500,
        "objective": "kl",
        "held_out_fraction": 0.2,
        "max_steps": 8,
        "learning_rate": 0.001,
        "warmup_steps": 2,
        "logging_steps": 1,
        "tokens_per_batch": 512,
        "cache_hidden_states": "true",
        "resume": "auto",
    }
    command = ["train"]
    for key, value in arguments.items():
        command += [f"--{key}", *(value if isinstance(value, tuple) else (str(value),))]
    assert main([*command, "--output_dir", str(tmp_path / "theirs"), "--stop_after", "plan"]) == 0
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for part in ("0/2", "1/2"):
        done = subprocess.run(
            [str(PYTHON), PROGRAM, str(tmp_path / "theirs" / "states"), "--part", part],
            env=environment | {"VLLM_CPU_KVCACHE_SPACE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    assert main([*command, "--output_dir", str(tmp_path / "ours")]) == 0
    monkeypatch.setattr("medusa.training.run.job.load_live", lambda *_: pytest.fail("loaded the base"))
    assert main([*command, "--output_dir", str(tmp_path / "theirs")]) == 0

    ours, theirs = (
        StatesDirectory.read(tmp_path / name / "states/training")[0] for name in ("ours", "theirs")
    )
    theirs.norm = final_norm(real_base)
    assert ours.header == theirs.header
    mine, other = (each.of(range(len(each.starts) - 1)) for each in (ours, theirs))
    distances = (mine - other).unflatten(-1, (3, -1)).norm(dim=-1) / mine.unflatten(-1, (3, -1)).norm(dim=-1)
    losses = [last_loss(tmp_path / name / "metrics.jsonl") for name in ("ours", "theirs")]
    print(json.dumps({"largest distance": distances.amax(0).tolist(), "losses": losses}))
    assert distances.max() < STATES_TOLERANCE
    assert not torch.equal(mine, other)
    assert losses[0] == pytest.approx(losses[1], abs=LOSS_TOLERANCE)
    assert "vllm" in header_of(theirs.path(0))


def test_the_program_explains_itself_and_its_mistakes_without_vllm():
    for arguments, status, said in (
        (["--help"], 0, "medusa train"),
        (["x", "--part", "4/4"], 2, "NUMBER/COUNT"),
    ):
        done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True)
        assert done.returncode == status
        assert said in done.stdout + done.stderr


def last_loss(path: Path) -> float:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry["train/loss"] for entry in entries if "train/loss" in entry][-1]


def header_of(path: Path) -> str:
    return path.read_bytes()[:400].decode(errors="replace")


@pytest.fixture
def repetitive_answers(tmp_path) -> Path:
    """A few conversations; what they say does not matter."""
    rows = []
    for number, topic in enumerate(
        ("rain", "bread", "the sea", "a bridge", "snow", "a violin", "tea", "maps")
    ):
        answer = f"Here is what there is to say of {topic}: " + " ".join(
            f"fact {index} of {topic} is that it was known {index * (number + 3)} years ago."
            for index in range(6)
        )
        messages = [
            {"role": "user", "content": f"Tell me about {topic}."},
            {"role": "assistant", "content": answer},
        ]
        rows.append(json.dumps({"messages": messages}))
    (tmp_path / "answers.jsonl").write_text("\n".join(rows))
    return tmp_path / "answers.jsonl"
