"""The benchmark of the loss: both implementations compute the same, and the program says what it found."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import program as load_program
from torch import nn

from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.training.losses.loss_cost import fused_step, plain_step


@pytest.fixture(scope="module")
def program():
    return load_program("scripts/benchmark_loss.py")


def test_the_two_implementations_have_the_same_loss_and_gradients():
    torch.manual_seed(0)
    embedding = nn.Linear(16, 40, bias=False).requires_grad_(False)
    hidden, tokens = torch.randn(24, 16), torch.randint(0, 40, (24,))
    losses, gradients = [], []
    for step in (fused_step, plain_step):
        torch.manual_seed(1)
        heads = MedusaHeads(HeadsConfig(16, 40, num_heads=3))
        for parameter in heads.parameters():
            nn.init.normal_(parameter, std=0.3)
        losses.append(step(heads, embedding, hidden, tokens, 200))
        gradients.append([parameter.grad for parameter in heads.parameters()])
    torch.testing.assert_close(*losses)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_it_measures_says_what_it_skipped_and_ends_with_json(program, capsys, tmp_path):
    sizes = ["--heads", "1", "--vocab", "500", "60000", "--targets", "64", "--hidden-size", "16"]
    limits = ["--repeats", "1", "--device", "cpu", "--memory-gib", "0.03"]
    plot = tmp_path / "loss.png"
    assert program.main([*sizes, *limits, "--plot", str(plot)]) == 0
    shown = capsys.readouterr()
    assert "skipped: plain with 1 heads and 60,000 tokens needs about 0.0 GiB" in shown.err
    report = json.loads(shown.out.splitlines()[-1])
    small, large = report["cells"]
    assert small["plain_tokens_per_second"] > 0 and large["plain_tokens_per_second"] is None
    assert large["plain_is_predicted"] and not small["plain_is_predicted"]
    assert large["fused_bytes"] > 10 * 2**20
    assert "peak memory flat within 10%: FAILS" in shown.out
    assert plot.stat().st_size > 1000


def test_the_verdict_takes_the_worst_cell(program):
    cells = [
        {"fused_bytes": 100, "speed_ratio": 1.4},
        {"fused_bytes": 109, "speed_ratio": None},
        {"fused_bytes": 105, "speed_ratio": 1.1},
    ]
    assert program.verdict(cells) == {
        "peak_spread": pytest.approx(0.09),
        "is_flat": True,
        "lowest_speed_ratio": 1.1,
        "is_never_slower": True,
    }
    worse = program.verdict([*cells, {"fused_bytes": 120, "speed_ratio": 0.9}])
    assert not worse["is_flat"] and not worse["is_never_slower"]
