"""`medusa write-prompts`: templates and words become different prompts."""

import json
from collections import Counter

import pytest

from medusa.cli.main import main


def write_prompts(*arguments):
    return main(["write-prompts", *map(str, arguments)])


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_shipped_parts_give_different_prompts_of_every_kind_in_turn(tmp_path):
    assert write_prompts("--number", 160, "--output", tmp_path / "new" / "prompts.jsonl") == 0
    rows = written(tmp_path / "new" / "prompts.jsonl")
    assert len({row["prompt"] for row in rows}) == 160
    assert set(Counter(row["category"] for row in rows).values()) == {20}
    assert not any("{" in row["prompt"] for row in rows)


def test_the_same_seed_gives_the_same_prompts_and_another_gives_others(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert write_prompts("--number", 20, "--seed", seed, "--output", tmp_path / name) == 0
    assert written(tmp_path / "a") == written(tmp_path / "b") != written(tmp_path / "c")


def test_two_blanks_of_one_name_get_different_words(tmp_path, capsys):
    (tmp_path / "parts.yaml").write_text("kinds: {talk: ['{who} meets {who}']}\nwords: {who: [Ann, Bo]}")
    output = tmp_path / "prompts.jsonl"
    assert write_prompts("--number", 2, "--parts", tmp_path / "parts.yaml", "--output", output) == 0
    assert {row["prompt"] for row in written(output)} == {"Ann meets Bo", "Bo meets Ann"}
    next_step = f"medusa distill --prompts {output} --output {tmp_path / 'answers.jsonl'}"
    assert next_step in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("kinds: {talk: ['{who} speaks']}\nwords: {who: [Ann]}", "no more than about 1 different prompts"),
        ("kinds: {talk: ['{who} speaks']}\nwords: {where: [here]}", "no words for ['who']"),
        ("kinds: {talk: ['hello']}", "`kinds` and `words`"),
    ],
)
def test_parts_that_cannot_serve_are_refused_and_nothing_is_written(tmp_path, capsys, parts, said):
    (tmp_path / "parts.yaml").write_text(parts)
    output = tmp_path / "prompts.jsonl"
    assert write_prompts("--number", 2, "--parts", tmp_path / "parts.yaml", "--output", output) == 1
    assert said in capsys.readouterr().err
    assert not output.exists()
