"""The questions that heads for code are trained on: of all kinds, each once, none that measures."""

import json
import subprocess
import sys
from collections import Counter

from medusa.assets import checkout
from medusa.prompts import read_prompts

ROOT = checkout()


def questions(path, limit: int, seed: int = 0) -> list[dict]:
    program = [sys.executable, ROOT / "scripts/coding_prompts.py", "--output", path]
    subprocess.run([*program, "--limit", str(limit), "--seed", str(seed)], check=True, capture_output=True)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_any_part_holds_all_kinds_and_no_question_comes_twice(tmp_path):
    rows = questions(tmp_path / "some.jsonl", 60)
    assert questions(tmp_path / "again.jsonl", 40) == rows[:40]
    assert questions(tmp_path / "others.jsonl", 40, seed=1) != rows[:40]
    kinds = Counter(row["category"] for row in rows[:20])
    assert kinds["write"] == 6 and len(kinds) == 9 and min(kinds.values()) == 1
    assert len({row["prompt"] for row in rows}) == 60
    assert all("{" not in row["prompt"].partition("```")[0].replace("{{name}}", "") for row in rows)
    read_prompts(tmp_path / "some.jsonl")


def test_no_question_is_one_that_measures(tmp_path):
    held_out = {prompt.messages[-1]["content"] for prompt in read_prompts("coding_heldout")}
    assert len(held_out) == 40
    assert not held_out & {row["prompt"] for row in questions(tmp_path / "many.jsonl", 2000)}
