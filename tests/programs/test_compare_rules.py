"""Two rules compared over many seeds: the counts add up, and one line of JSON comes last."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import program
from tiny_chat import save_chat_model

from medusa.measurement.comparison import bootstrapped_ratio


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the program on a tiny model; its exit status and what it printed."""
    module = program("inference/compare_rules.py")
    base, heads = save_chat_model(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "Count", "Go on")))
    flags = ["--base", base, "--heads", heads, "--prompts", str(prompts), "--max-new-tokens", "16"]

    def called(*more: str) -> tuple[int, str, str]:
        status = module.main([*flags, *more])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return called


def test_the_report_counts_every_answer_and_compares_with_the_first_rule(run):
    status, out, _ = run("--drafter", "low-precision", "--draft-length", "3", "--num-seeds", "4")
    report = json.loads(out.splitlines()[-1])
    assert status == 0
    assert report["num_prompts"] == 3 and report["num_seeds"] == 4 and report["draft_length"] == 3
    assert set(report["tokens_per_step"]) == {"token", "block"} and report["against"] == "token"
    assert all(1 < value <= 4 for value in report["tokens_per_step"].values())
    ratio = report["ratio"]["block"]
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    assert ratio["ratio"] == pytest.approx(
        report["tokens_per_step"]["block"] / report["tokens_per_step"]["token"]
    )


def test_greedy_decoding_and_impossible_pairs_are_refused(run):
    status, _, err = run("--temperature", "0")
    assert status == 1 and "--temperature must be above 0, got 0" in err
    status, _, err = run("--drafter", "suffix")
    assert status == 1 and "point mass" in err


def test_the_interval_is_about_prompts():
    alike = np.array([[10.0, 30.0, 10.0, 20.0]] * 5)  # 3 tokens a step against 2
    report = bootstrapped_ratio(alike)
    assert report["ratio"] == report["low"] == report["high"] == pytest.approx(1.5)
    mixed = bootstrapped_ratio(np.array([[10.0, 40.0, 10.0, 20.0], [10.0, 20.0, 10.0, 20.0]] * 10))
    assert mixed["low"] < 1.5 < mixed["high"]
    assert bootstrapped_ratio(alike[:1])["low"] is None
