"""scripts/learning_curve.py lets a base learn for several times and draws what came out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import program


@pytest.fixture
def curve(monkeypatch, tmp_path):
    """The program, and the commands that it runs; each reports as much speed as it had minutes."""
    module = program("scripts/learning_curve.py")
    commands = []

    def run(words, env, **more):
        assert Path(env["MEDUSA_CACHE"], "compiled").is_symlink() and env["MEDUSA_CACHE"] != str(tmp_path)
        commands.append(words[3:])
        minutes = float(words[words.index("--minutes") + 1])
        report = {"minutes": minutes + 1, "speedup": 1 + minutes / 20, "speedup_before": 1.1}
        Path(words[-1]).write_text(json.dumps(report | {"tokens_per_step": 1.5}))

    monkeypatch.setattr(subprocess, "run", run)
    return module, commands


def test_each_time_is_learned_anew_and_drawn(curve, tmp_path, monkeypatch, capsys):
    module, commands = curve
    picture = tmp_path / "curve.png"
    words = ["--base", "model.gguf", "--minutes", "6", "12", "--plot", str(picture), "--json", "-"]
    monkeypatch.setattr(sys, "argv", ["learning_curve.py", *words])
    module.main()
    assert [command[:5] for command in commands] == [
        ["learn", "model.gguf", "--minutes", minutes, "--fresh"] for minutes in ("6", "12")
    ]
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [entry["speedup"] for entry in report["rounds"]] == [1.3, 1.6]
    assert picture.read_bytes().startswith(b"\x89PNG")
