import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tiny_training import counting_rows, save_tiny_base, write_rows

from medusa.cli.program import exit_status

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_stored_states.py"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script in this process; its exit status."""
    base = save_tiny_base(tmp_path / "base")
    data = write_rows(tmp_path / "data.jsonl", counting_rows(40))
    spec = importlib.util.spec_from_file_location("script_benchmark_stored_states", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    flags = ["--base", str(base), "--data", str(data), "--output_dir", str(tmp_path / "run")]

    def start(*more):
        monkeypatch.setattr(sys, "argv", ["benchmark_stored_states.py", *flags, *more])
        return exit_status(module.main, show_traceback=False)

    return start


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_both_ways_train_alike_and_are_timed(run, capsys, objective):
    status = run("--tokens_per_batch", "256", "--max_steps", "3", "--objective", objective)
    printed = capsys.readouterr()
    assert status == 0, printed.err
    report = json.loads(printed.out.splitlines()[-1])
    assert report["largest_relative_loss_gap"] < 1e-5, "float32 states lose nothing"
    assert report["num_steps"] == 3
    assert 0 < report["num_tokens"] <= 3 * 256
    speeds = report["tokens_per_second"]
    assert set(speeds) == {"live", "stored", "storing"} and min(speeds.values()) > 0
    assert report["speedup"] == pytest.approx(speeds["stored"] / speeds["live"])
    assert 0 < report["bytes_per_token"] <= 4 * 32
    assert "storing them, once" in printed.out


def test_the_layers_that_heads_fuse_are_stored_and_the_precision_is_the_runs(run, capsys):
    def report(*flags):
        assert run("--tokens_per_batch", "256", "--max_steps", "2", *flags) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    fused = ["--fused_layers", "1", "2"]
    last_alone, exact, rounded = report(), report(*fused), report(*fused, "--precision", "bf16")
    assert exact["bytes_per_token"] == pytest.approx(3 * last_alone["bytes_per_token"])
    assert (exact["precision"], rounded["precision"]) == ("fp32", "bf16")
    assert exact["last_loss"] != rounded["last_loss"] == pytest.approx(exact["last_loss"], rel=1e-2)


def test_more_steps_than_the_data_have_are_refused(run, capsys):
    assert run("--max_steps", "1000") == 1
    assert "max_steps must be below the" in capsys.readouterr().err


def test_an_eagle_head_is_refused(run, capsys):
    assert run("--head_kind", "eagle", "--num_attention_heads", "4", "--max_steps", "2") == 1
    assert "head_kind must be medusa here, got 'eagle'" in capsys.readouterr().err
