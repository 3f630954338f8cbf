"""scripts/on_gpu.py: every question is asked in a process of its own, and no answer is lost."""

from __future__ import annotations

import json
import re
import sys

import pytest
from conftest import REAL_BASE, program

from medusa.files import read_json


@pytest.fixture(scope="module")
def on_gpu():
    return program("scripts/on_gpu.py")


@pytest.fixture
def asked(on_gpu, monkeypatch, tmp_path):
    """Three questions: one that is answered, one that fails, one that hangs; how often each was asked."""
    report, times = tmp_path / "report.json", tmp_path / "times"
    count = f"open({str(times)!r}, 'a').write('x'); open({str(report)!r}, 'w').write('{{\"ms\": 2}}')"
    commands = {"good": count, "bad": "raise SystemExit(3)", "hangs": "import time; time.sleep(60)"}
    questions = [
        on_gpu.Experiment(name, [sys.executable, "-c", code], report) for name, code in commands.items()
    ]
    monkeypatch.setattr(on_gpu, "experiments", lambda options: questions)
    return times


def test_what_was_measured_is_kept_and_not_measured_again(on_gpu, asked, tmp_path):
    given = ["--dry-run", "--output", str(tmp_path / "out"), "--minutes", "0.03"]
    assert on_gpu.main([*given, "--only", "good", "bad"]) == 1
    assert on_gpu.main(given) == 1
    answers = read_json(tmp_path / "out/results.json")["answers"]
    assert {name: answer["status"] for name, answer in answers.items()} == {"good": 0, "bad": 3, "hangs": -1}
    assert answers["good"]["report"] == {"ms": 2} and answers["bad"]["report"] is None
    assert "the time was up" in (tmp_path / "out/logs/hangs.log").read_text()
    assert asked.read_text() == "x"
    on_gpu.main([*given, "--only", "good", "--again"])
    assert asked.read_text() == "xx"


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--dry-run", "--only", "speed"], r"only must be of \['tests', .* got \['speed'\]"), ([], "no CUDA")],
)
def test_what_cannot_be_asked_here_is_refused_with_what_to_do(
    on_gpu, capsys, tmp_path, monkeypatch, given, message
):
    monkeypatch.setattr(on_gpu.torch.cuda, "is_available", lambda: False)
    assert on_gpu.main(["--output", str(tmp_path / "out"), *given]) == 1
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.slow
@pytest.mark.skipif(not REAL_BASE.exists(), reason="the embedded base is not here; run `make models`")
def test_a_dry_run_asks_everything_of_a_tiny_model(on_gpu, tmp_path):
    assert on_gpu.main(["--dry-run", "--output", str(tmp_path), "--base", str(REAL_BASE)]) == 0
    answers = json.loads((tmp_path / "results.json").read_text())["answers"]
    assert list(answers) == [each.name for each in on_gpu.experiments(on_gpu.OnGpuOptions(dry_run=True))]
    assert answers["tiny: steps"]["report"]["by_num_nodes"]
    assert answers["tiny: training from stored states"]["report"]
