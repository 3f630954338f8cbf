"""Texts of use are kept with the end of their prompt, within bounds."""

import json

import pytest
from tiny_chat import chat_tokenizer

from medusa.learning import collected_texts
from medusa.learning.collected_texts import BEFORE, WINDOW, CollectedTexts


@pytest.fixture
def collected(tmp_path):
    return CollectedTexts(tmp_path, chat_tokenizer())


def tokens(text):
    return chat_tokenizer()(text, add_special_tokens=False)["input_ids"]


def texts(collected):
    return [row["text"] for row in collected.newest_first()]


def test_an_answer_is_kept_with_the_end_of_its_prompt(collected):
    collected.add(tokens("x" * 1000 + "<|user|>a question<|assistant|>"), tokens("an answer<|end|>"))
    (text,) = texts(collected)
    assert text.endswith("<|user|>a question<|assistant|>an answer<|end|>")
    assert len(tokens(text)) == BEFORE + len(tokens("an answer<|end|>"))


def test_a_long_answer_is_kept_in_pieces_and_a_rest_of_nothing_is_not(collected):
    answer = "".join(chr(97 + place % 26) for place in range(2 * WINDOW - BEFORE + 5))
    collected.add(tokens("p" * BEFORE), tokens(answer))
    first, second = reversed(texts(collected))
    assert len(first) == len(second) == WINDOW and (first + second)[BEFORE:] == answer[:-5]
    collected.add([], tokens("short"))
    assert len(texts(collected)) == 2


def test_a_text_that_is_there_already_is_no_new_one(collected, tmp_path, monkeypatch):
    collected.add(tokens("a question of some length"), tokens("answer"))
    size = collected.num_new_bytes
    collected.add(tokens("a question of some length"), tokens("answer"))
    assert collected.num_new_bytes == size
    collected.end_new()
    again = CollectedTexts(tmp_path, collected.tokenizer)
    again.read_known()
    again.add(tokens("a question of some length"), tokens("answer"))
    again.add(tokens("a question of some length"), tokens("another"))
    assert [row["text"] for row in again.new_rows()] == ["a question of some lengthanother"]
    monkeypatch.setattr(collected_texts, "MOST_KNOWN", 1)
    for _ in range(3):
        again.add(tokens("a question of some length"), tokens("another"))
        assert len(again.new_rows()) == 1


def test_the_token_that_begins_a_text_is_left_to_training(collected):
    collected.tokenizer.bos_token = "<|system|>"
    collected.add(tokens("<|system|>" + "question " * 4), tokens("answer"))
    assert texts(collected)[0].startswith("question")


def test_the_oldest_go_when_there_are_too_many(collected, monkeypatch):
    monkeypatch.setattr(collected_texts, "MOST_BYTES", 1000)
    for number in range(100):
        collected.add(tokens(f"question number {number:03}"), tokens(" and its answer"))
        assert collected.num_bytes < 2200
    kept = texts(collected)
    assert kept[0].startswith("question number 099") and kept == sorted(kept, reverse=True)


def test_nobody_else_reads_them_and_a_line_that_was_cut_is_left_out(collected):
    collected.add(tokens("a question of some length"), tokens("answer"))
    assert collected.new.stat().st_mode & 0o77 == 0
    with collected.new.open("a") as file:
        file.write(json.dumps({"text": "cut"})[:-4])
    assert texts(collected) == ["a question of some lengthanswer"]
    for _ in range(2):  # the first stands behind what was cut
        collected.add(tokens("a question of some length"), tokens("another"))
        collected.add(tokens("a question of some length"), tokens("one more"))
    assert texts(collected) == ["a question of some lengthone more", "a question of some lengthanswer"]


def test_where_the_directory_is_forgotten_nothing_is_kept(collected, tmp_path):
    gone = CollectedTexts(tmp_path / "gone", collected.tokenizer)
    with pytest.raises(FileNotFoundError):
        gone.add(tokens("a question of some length"), tokens("answer"))
    assert not (tmp_path / "gone").exists()
