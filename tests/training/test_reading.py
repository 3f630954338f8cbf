"""Rows in every shape that is accepted, and errors that name file and row."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tiny_training import conversation, write_rows

from medusa.training.data import reading
from medusa.training.data.reading import expanded, parse_row, read_examples

MESSAGES = (
    {"role": "user", "content": "Name a river.\n\nIn Asia."},
    {"role": "assistant", "content": "The Mekong."},
)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": list(MESSAGES)},
        {
            "messages": [
                MESSAGES[0],
                {"role": "assistant", "content": [{"type": "text", "text": "The Mekong."}]},
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": MESSAGES[0]["content"]},
                {"from": "gpt", "value": MESSAGES[1]["content"]},
            ]
        },
        {"conversations": list(MESSAGES)},
        {"instruction": "Name a river.", "input": "In Asia.", "output": "The Mekong."},
        {"messages": None, "text": None, "conversations": list(MESSAGES), "id": 7},
    ],
    ids=["messages", "text parts", "sharegpt", "conversations with roles", "alpaca", "absent keys are null"],
)
def test_every_chat_shape_gives_the_same_conversation(row):
    assert parse_row(row, "x").messages == MESSAGES


def test_a_plain_text_row_is_a_text():
    assert parse_row({"text": "Once upon a time"}, "x").text == "Once upon a time"


@pytest.mark.parametrize(("reason", "was_cut"), [("length", True), ("stop", False), (None, False)])
def test_only_finish_reason_length_says_that_the_answer_was_cut(reason, was_cut):
    assert parse_row(conversation("a", "b", finish_reason=reason), "x").answer_was_cut is was_cut


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_file_type_gives_its_rows_in_order(tmp_path, suffix):
    rows = [conversation(f"question {i}", f"answer {i}") for i in range(3)]
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_rows(path, rows)
    examples = list(read_examples([str(path)]))
    assert [each.messages[1]["content"] for each in examples] == ["answer 0", "answer 1", "answer 2"]
    assert examples[2].origin == f"{path} row 3"


def test_a_json_file_may_hold_json_lines(tmp_path):
    path = write_rows(tmp_path / "data.json", [conversation("a", "b"), conversation("c", "d")])
    assert len(list(read_examples([str(path)]))) == 2


def test_a_hub_id_is_loaded_with_its_split(monkeypatch):
    def load_dataset(name: str, split: str):
        assert (name, split) == ("owner/name", "train_sft")
        return [conversation("a", "b")]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (example,) = read_examples(["owner/name"], "train_sft")
    assert example.origin == "owner/name row 1"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "row 2 is not valid JSON"),
        ('"text"', "row 2 must be an object"),
        ('{"question": "a"}', r"row 2 must hold messages, conversations.*it holds \['question'\]"),
        ('{"messages": "hello"}', "row 2: a conversation must be a list"),
        ('{"messages": [{"role": "user"}]}', "row 2, message 1 must be an object with 'role' and 'content'"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            "row 2, message 1: content must be text, got None",
        ),
        ('{"instruction": "a", "output": 3}', "row 2: output must be text, got 3"),
        ("\udcff", "row 2 is not valid JSON"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_its_file(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    good = json.dumps(conversation("a", "b"))
    path.write_text(f"{good}\n\n{line}\n", encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=f"{path} {message}"):
        list(read_examples([str(path)]))


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match=f"{path} is not a readable parquet file"):
        list(read_examples([str(path)]))


@pytest.mark.parametrize("source", ["missing.jsonl", "/absolute/path", "a/b/c"])
def test_a_file_that_is_not_there_is_not_taken_for_a_hub_id(source, monkeypatch):
    monkeypatch.setattr(reading, "_hub_rows", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match=f"data file '{source}' does not exist"):
        expanded([source])


def test_an_unknown_file_type_is_refused(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match="must end in one of"):
        expanded([str(path)])
    assert Path(path).exists()


@pytest.mark.parametrize(
    "before", [codecs.BOM_UTF8, b" " * 3000, b"\n" * 2000 + b"  ", codecs.BOM_UTF8 + b"\n \n"]
)
def test_an_array_is_known_behind_a_byte_order_mark_and_any_blanks(tmp_path, before):
    rows = [{"text": "one"}, {"text": "two"}]
    for name, raw in (("a.json", json.dumps(rows, indent=1)), ("b.jsonl", "\n".join(map(json.dumps, rows)))):
        (tmp_path / name).write_bytes(before + raw.encode())
        assert [each.text for each in read_examples([str(tmp_path / name)])] == ["one", "two"]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_file_in_utf_16_is_named_with_its_row(tmp_path, name):
    (tmp_path / name).write_text('[{"text": "one"}]', encoding="utf-16")
    with pytest.raises(ValueError, match=r"row 1 is not valid JSON: 'utf-8' codec can't decode byte"):
        list(read_examples([str(tmp_path / name)]))


def test_a_link_to_a_folder_above_repeats_no_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    (tmp_path / "circle").symlink_to(tmp_path)
    assert expanded([str(tmp_path / "**" / "*.jsonl")]) == [str(tmp_path / "a.jsonl")]
