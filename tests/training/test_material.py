"""A user's files become questions and texts, and a tenth is kept apart."""

import json
from pathlib import Path

import pytest

from medusa.training.data import material
from medusa.training.data.material import PIECE, TASKS, material_of, pieces, text_files


def write_texts(folder, count, length=400):
    for number in range(count):
        path = folder / f"part{number % 3}" / f"text{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"number {number} of the texts\n" * (length // 20))
    return folder


def test_a_folder_is_its_text_files_without_what_is_hidden_large_data_or_no_text(tmp_path, monkeypatch):
    write_texts(tmp_path, 3)
    expected = {path.name for path in text_files(tmp_path)}
    assert expected == {"text0.py", "text1.py", "text2.py"}
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x" * 300)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.txt").write_text("x" * 300)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe" * 100)
    (tmp_path / "zeros.txt").write_bytes(b"\0" * 300)
    (tmp_path / "rows.jsonl").write_text('{"text": "no text file"}\n')
    (tmp_path / "around").symlink_to(tmp_path)
    monkeypatch.setattr(material, "LARGEST_FILE", 1000)
    (tmp_path / "large.txt").write_text("x" * 1001)
    assert {path.name for path in text_files(tmp_path)} == expected


def test_whole_files_are_kept_apart_where_there_are_enough(tmp_path):
    write_texts(tmp_path, 40, length=3 * PIECE)
    made = material_of([str(tmp_path)], has_template=True)
    learned = {row["text"].split()[1] for row in made.texts}
    measured = {row["prompt"].split("number ")[1].split()[0] for row in made.held_out}
    assert len(learned) == 36 and measured and not learned & measured
    assert len(made.questions) == len(made.texts) and len(made.held_out) <= material.MOST_HELD_OUT


def test_of_few_files_pieces_are_kept_apart(tmp_path):
    (tmp_path / "one.txt").write_text("a line of it\n" * (10 * PIECE // 13))
    made = material_of([str(tmp_path / "one.txt")], has_template=True)
    assert len(made.texts) == 8 and len(made.held_out) == 2
    with pytest.raises(ValueError, match="at least 3 conversations or pieces of text of 200 characters"):
        short = tmp_path / "short.txt"
        short.write_text("word " * 50)
        material_of([str(short)], has_template=True)


def test_a_chat_model_gets_tasks_in_turn_and_a_model_that_continues_text_the_text(tmp_path):
    write_texts(tmp_path, 30)
    asked = material_of([str(tmp_path)], has_template=True).questions
    assert [row["prompt"].split("\n")[0] for row in asked[:4]] == [*TASKS]
    begun = material_of([str(tmp_path)], has_template=False)
    assert [row["prompt"] for row in begun.questions] == [row["text"].rstrip() for row in begun.texts]


def test_conversations_are_asked_again_and_read_with_their_options(tmp_path):
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    rows = [
        {"messages": [{"role": "system", "content": str(number)}, *turns], "finish_reason": "length",
         "tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False}}
        for number in range(30)
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = material_of([str(path)], has_template=True)
    assert len(made.texts) == 27 and all(row in rows for row in made.texts)
    assert made.questions == [{**row, "messages": row["messages"][:-1]} for row in made.texts]


def test_the_same_sources_and_seed_give_the_same_material(tmp_path):
    write_texts(tmp_path, 30)
    first, second, other = (material_of([str(tmp_path)], True, seed) for seed in (1, 1, 2))
    assert first == second and first.texts != other.texts


def test_pieces_end_with_lines_and_lose_nothing_but_a_short_rest():
    text = "".join(f"line {number}\n" for number in range(2000))
    cut = pieces(text)
    assert all(len(piece) <= PIECE and piece.endswith("\n") for piece in cut)
    assert text.startswith("".join(cut)) and len(text) - len("".join(cut)) < material.SHORTEST
    assert [len(piece) for piece in pieces("x" * (2 * PIECE))] == [PIECE, PIECE]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("a.pdf", b"%PDF\xff\xfe", "must be text in UTF-8"), ("none.jsonl", None, "does not exist")],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path, name, content, words):
    path = Path(tmp_path, name)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        material_of([str(path)], has_template=True)
