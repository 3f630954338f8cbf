"""Rows in every shape that is accepted, and errors that name file and row."""

from __future__ import annotations

import codecs
import gzip
import json

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from refusals import assert_refused
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


GOOD = json.dumps(conversation("a", "b")).encode() + b"\n\n"
UTF_16 = '[{"text": "one"}]'.encode("utf-16")
FILES = [  # each with what it holds and what is said of it
    ("a.jsonl", GOOD + b"{not json", "row 2 is not valid JSON"),
    ("a.jsonl", GOOD + b'"text"', "row 2 must be an object"),
    ("a.jsonl", GOOD + b'{"question": "a"}', "row 2 must hold messages, conversations ... ['question']"),
    ("a.jsonl", GOOD + b'{"messages": "hello"}', "row 2: a conversation must be a list"),
    ("a.jsonl", GOOD + b'{"messages": [{"role": "user"}]}', "row 2, message 1 ... 'role' and 'content'"),
    ("a.jsonl", GOOD + b'{"messages": [{"role": "user", "content": null}]}', "message 1: content ... None"),
    ("a.jsonl", GOOD + b'{"instruction": "a", "output": 3}', "row 2: output must be text, got 3"),
    ("a.jsonl", GOOD + b"\xff", "row 2 is not valid JSON"),
    ("a.jsonl", UTF_16, "row 1 is not valid JSON: 'utf-8' codec can't decode byte"),
    ("a.json", UTF_16, "row 1 is not valid JSON: 'utf-8' codec can't decode byte"),
    ("a.parquet", b"PAR1 and nothing else", "is not a readable parquet file"),
    ("torn.jsonl.gz", gzip.compress(50 * GOOD, mtime=0)[:40], "is not a whole gzip file"),
]


@pytest.mark.parametrize(
    ("name", "content", "words"), FILES, ids=[f"{name}: {words}" for name, _, words in FILES]
)
def test_what_cannot_be_read_is_named_with_its_file_and_row(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    path = str(tmp_path / name)
    assert_refused(lambda: list(read_examples([path])), ValueError, f"{path} ... {words}")


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("missing.jsonl", FileNotFoundError, "data file 'missing.jsonl' does not exist"),
        ("/absolute/path", FileNotFoundError, "data file '/absolute/path' does not exist"),
        ("a/b/c", FileNotFoundError, "data file 'a/b/c' does not exist"),
        ("circle.jsonl", FileNotFoundError, "circle.jsonl' does not exist"),
        ("data.csv", ValueError, "must end in one of"),
        ("none/*.jsonl", FileNotFoundError, "names no file that ends in"),
        ("empty", FileNotFoundError, "names no file that ends in"),
    ],
)
def test_a_source_without_files_is_refused_and_not_taken_for_a_hub_id(
    tmp_path, monkeypatch, source, kind, words
):
    monkeypatch.setattr(reading, "_hub_rows", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "circle.jsonl").symlink_to("circle.jsonl")
    (tmp_path / "data.csv").write_text("a,b\n")
    assert_refused(lambda: expanded([source]), kind, words)


@pytest.mark.parametrize(
    "before", [codecs.BOM_UTF8, b" " * 3000, b"\n" * 2000 + b"  ", codecs.BOM_UTF8 + b"\n \n"]
)
def test_an_array_is_known_behind_a_byte_order_mark_and_any_blanks(tmp_path, before):
    rows = [{"text": "one"}, {"text": "two"}]
    for name, raw in (("a.json", json.dumps(rows, indent=1)), ("b.jsonl", "\n".join(map(json.dumps, rows)))):
        (tmp_path / name).write_bytes(before + raw.encode())
        assert [each.text for each in read_examples([str(tmp_path / name)])] == ["one", "two"]


def test_a_link_to_a_folder_above_repeats_no_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    (tmp_path / "circle").symlink_to(tmp_path)
    assert expanded([str(tmp_path / "**" / "*.jsonl")]) == [str(tmp_path / "a.jsonl")]


def node(role: str, text: str, *replies: dict) -> dict:
    return {"role": role, "text": text, "lang": "en", "replies": list(replies)}


TREE = node(
    "prompter",
    "Q1",
    node("assistant", "A1", node("prompter", "Q2", node("assistant", "A2"), node("assistant", "A3"))),
    node("assistant", "A4", node("prompter", "never answered")),
)
WAYS = [["Q1", "A4"], ["Q1", "A1", "Q2", "A2"], ["Q1", "A1", "Q2", "A3"]]


def flat(tree: dict, parent: str | None = None) -> list[dict]:
    """One row a message, as in OASST's own files."""
    own = {"message_id": f"id of {tree['text']}", "parent_id": parent, "deleted": False}
    rows = [{**{key: tree[key] for key in ("role", "text", "lang")}, **own}]
    return [*rows, *(row for each in tree["replies"] for row in flat(each, own["message_id"]))]


def write_tree(tmp_path, kind: str) -> str:
    others = [conversation("before", "it"), conversation("after", "it")]
    trees = {
        "tree": [{"message_tree_id": "1", "prompt": TREE}],
        "flat": flat(TREE),
        "turned": flat(TREE)[::-1],
    }
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat(TREE)), path := tmp_path / "a.parquet")
        return str(path)
    return str(write_rows(tmp_path / "a.jsonl", [others[0], *trees[kind], others[1]]))


@pytest.mark.parametrize("kind", ["tree", "flat", "turned", "parquet"])
def test_a_tree_of_messages_is_its_conversations(tmp_path, kind):
    examples = [
        each for each in read_examples([write_tree(tmp_path, kind)]) if "it" not in str(each.messages)
    ]
    assert sorted([turn["content"] for turn in each.messages] for each in examples) == sorted(WAYS)
    for each in examples:
        roles = [turn["role"] for turn in each.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            flat(TREE)[1:],
            "row 1: parent_id must be the message_id of a row of the same file or data set, got 'id of Q1'",
        ),
        (
            [flat(TREE)[0]] * 2,
            "row 2: message_id must differ between messages, got 'id of Q1' in ... row 1 too",
        ),
        ([{**flat(TREE)[0], "parent_id": "id of Q1"}], "row 1: parent_id must lead to a first message"),
        ([{**flat(TREE)[0], "message_id": ["x"]}], "row 1: message_id must be a text or a whole number"),
        ([{**flat(TREE)[0], "role": "robot"}, flat(TREE)[1]], "the role of a message must be one of"),
        (
            [{"prompt": node("prompter", "Q", 5)}],
            "row 1: a message of a tree must be an object with role and text",
        ),
        (
            [{"prompt": {**node("prompter", "Q"), "replies": "none"}}],
            "row 1: replies must be a list of messages",
        ),
    ],
)
def test_a_tree_that_is_none_is_refused(tmp_path, rows, words):
    path = str(write_rows(tmp_path / "a.jsonl", rows))
    assert_refused(lambda: list(read_examples([path])), ValueError, f"{path} ... {words}")


@pytest.mark.parametrize(
    "key",
    [
        *("role", "from", "author", "speaker", "parent_id", "Role", "FROM", "sender", "speaker_id"),
        *("message_role", "user_role", "parent_message_id", "message_tree_id", "reply_to"),
    ],
)
def test_a_text_whose_row_says_who_speaks_is_no_plain_text(key):
    row = {"text": "What is an eclipse?", key: "prompter"}
    assert_refused(
        lambda: parse_row(row, "x"), ValueError, f"x: text must be the model's own words, and {key} says"
    )
    assert parse_row({"text": "Once upon a time", key: None}, "x").text


def save_to_disk(directory, rows):
    """What the library datasets writes, a stream of batches with two files beside it."""
    directory.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(str(directory / "data-00000-of-00001.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=2)
    (directory / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (directory / "dataset_info.json").write_text('{"citation": "", "features": {}}')


def test_a_folder_of_save_to_disk_is_its_rows(tmp_path):
    rows = [conversation(f"q{at}", f"a{at}") for at in range(5)]
    save_to_disk(tmp_path / "one", rows)
    read = list(read_examples([str(tmp_path / "one")]))
    assert [each.messages[1]["content"] for each in read] == [f"a{at}" for at in range(5)]
    for name in ("train", "test"):
        save_to_disk(tmp_path / "both" / name, [conversation("q", name)])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name in ("train", "test"):
        (example,) = read_examples([str(tmp_path / "both")], name)
        assert example.messages[1]["content"] == name
    table = pyarrow.Table.from_pylist(rows[:2])
    with pyarrow.ipc.new_file(str(tmp_path / "table.arrow"), table.schema) as file:
        file.write_table(table)
    assert len(list(read_examples([str(tmp_path / "table.arrow")]))) == 2
    (tmp_path / "bad.arrow").write_bytes(b"no table")
    bad = str(tmp_path / "bad.arrow")
    assert_refused(lambda: list(read_examples([bad])), ValueError, f"{bad} is not a readable arrow file")


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.jsonl", "test.jsonl"),
        ("train-00000-of-00002.jsonl", "validation-00000-of-00001.jsonl"),
        ("train/part.jsonl", "dev/part.jsonl"),
        ("my_train_set.jsonl", "my_eval_set.jsonl"),
    ],
)
def test_a_folder_of_several_splits_gives_one(tmp_path, train, test):
    for name in (train, test):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(tmp_path / "data" / name, [conversation("q", name)])
    source = str(tmp_path / "data")
    for split, name in (("train", train), ("train_sft", train)):
        assert [each.messages[1]["content"] for each in read_examples([source], split)] == [name]
    whole = read_examples([str(tmp_path / "data" / "**" / "*.jsonl")])
    assert len(list(whole)) == 2, "a pattern says which files"
    write_rows(tmp_path / "data" / "more.jsonl", [conversation("q", "more")])
    words = f"data {source!r} must hold files of one split ... more.jsonl' of none ... name the files"
    assert_refused(lambda: expanded([source]), ValueError, words)
    (tmp_path / "data" / test).unlink()
    assert len(expanded([source])) == 2, "nothing else tells of a split"


@pytest.mark.parametrize("indent", [1, 4, None])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_one_object_over_several_lines_is_a_row(tmp_path, indent, suffix):
    path, text = tmp_path / f"row{suffix}", json.dumps(conversation("q", "a"), indent=indent)
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    (example,) = read_examples([str(path)])
    assert [each["content"] for each in example.messages] == ["q", "a"]
    path.write_bytes(gzip.compress(text[:-3].encode()) if suffix.endswith("gz") else text[:-3].encode())
    assert_refused(lambda: list(read_examples([str(path)])), ValueError, f"{path} ... is not valid JSON")
