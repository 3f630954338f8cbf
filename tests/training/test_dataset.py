"""Tokenised documents: made once, mapped by all, and made anew when what they depend on changes."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from refusals import assert_refused
from tiny_training import chat_tokenizer, conversation, counting_rows, write_rows

from medusa.files import locked
from medusa.training.config import DataOptions
from medusa.training.data import loading
from medusa.training.data.dataset import Document, Documents, name_of, read_dataset, write_dataset
from medusa.training.data.loading import (
    filtered,
    held_out_indices,
    load_data,
    tokenise,
    tokenised,
)
from medusa.training.data.reading import expanded


@pytest.fixture
def options(tmp_path):
    write_rows(tmp_path / "rows.jsonl", counting_rows(40))
    return DataOptions(data=[str(tmp_path / "rows.jsonl")], held_out_fraction=0.2)


def test_documents_are_tokenised_once_and_mapped_from_the_disk(options, tmp_path, monkeypatch):
    directory = tokenised(options, chat_tokenizer(), tmp_path / "documents")
    assert [each.name for each in (tmp_path / "documents").iterdir()] == [directory.name], "no spool is left"
    monkeypatch.setattr(loading, "tokenise", lambda *_: pytest.fail("tokenised again"))
    assert tokenised(options, chat_tokenizer(), tmp_path / "documents") == directory
    read = read_dataset(directory)
    training, held_out, counts = read.training, read.held_out, read.counts
    assert isinstance(training.tokens, np.memmap)
    monkeypatch.undo()
    alone = load_data(options, chat_tokenizer())
    assert (training.digest(), held_out.digest()) == (alone.training.digest(), alone.held_out.digest())
    assert counts == alone.counts
    assert counts["training documents"] == len(training) and counts["held-out documents"] == len(held_out) > 0
    assert counts["training tokens"] == training.num_tokens
    assert counts["training labels"] == training.num_labels
    assert counts["held-out labels"] == held_out.num_labels
    assert len(training) + len(held_out) == 40


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("training/is_label.bool", lambda raw: bytes(1 - each for each in raw), "has other bytes"),
        ("training/tokens.int32", lambda raw: raw[4:] + raw[:4], "has other bytes"),
        ("held-out/is_label.bool", lambda raw: raw[: len(raw) // 2], "has other bytes"),
        ("training/starts.npy", lambda raw: b"", "has other bytes"),
        ("counts.json", lambda raw: raw.replace(b"4", b"5"), "has other bytes"),
        ("held-out/tokens.int32", None, "is missing"),
        ("template.json", None, "is missing"),
        ("checksums.json", None, "is missing"),
        ("checksums.json", lambda raw: b"{", "is missing or damaged"),
        ("checksums.json", lambda raw: b"[]", "is missing or damaged"),
    ],
)
def test_documents_that_were_damaged_are_made_again_after_a_word(options, tmp_path, name, damage, complaint):
    directory = tokenised(options, chat_tokenizer(), tmp_path / "documents")
    path = directory / name
    whole = {each: each.read_bytes() for each in directory.rglob("*") if each.is_file()}
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    told = []
    assert tokenised(options, chat_tokenizer(), tmp_path / "documents", told.append) == directory
    (word,) = told
    assert word.startswith(f"{path}") and complaint in word and "tokenised again" in word
    assert {each: each.read_bytes() for each in directory.rglob("*") if each.is_file()} == whole
    assert [each.name for each in (tmp_path / "documents").iterdir()] == [directory.name]


def test_what_a_run_that_was_killed_while_tokenising_left_is_removed(options, tmp_path):
    """A kill that nothing in the process hears of; meanwhile another run works beside it."""
    program = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from tiny_training import chat_tokenizer
from medusa.training.config import DataOptions
from medusa.training.data import loading
from pathlib import Path
loading.write_dataset = lambda *_: os.kill(os.getpid(), 9)
loading.tokenised(DataOptions(data={options.data!r}), chat_tokenizer(), Path({str(tmp_path / "documents")!r}))
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -9
    (left,) = (tmp_path / "documents").iterdir()
    assert (left / "all").is_dir()
    other = tmp_path / "documents" / ".rows-other"
    with locked(other):
        directory = tokenised(options, chat_tokenizer(), tmp_path / "documents")
        assert {each.name for each in (tmp_path / "documents").iterdir()} == {directory.name, other.name}
    tokenised(options, chat_tokenizer(), tmp_path / "documents")
    assert [each.name for each in (tmp_path / "documents").iterdir()] == [directory.name]


def test_two_runs_may_tokenise_the_same_data_at_once(options, tmp_path, monkeypatch):
    others = []

    def tokenise_while_another_run_does(*arguments):
        monkeypatch.undo()
        others.append(tokenised(options, chat_tokenizer(), tmp_path / "documents"))
        return tokenise(*arguments)

    monkeypatch.setattr(loading, "tokenise", tokenise_while_another_run_does)
    directory = tokenised(options, chat_tokenizer(), tmp_path / "documents")
    assert others == [directory]
    alone = load_data(options, chat_tokenizer())
    assert read_dataset(directory).training.digest() == alone.training.digest()
    assert [each.name for each in (tmp_path / "documents").iterdir()] == [directory.name], "nothing is left"


def test_a_full_disk_is_an_error_in_words_and_no_signal(tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", counting_rows(99))
    documents = load_data(DataOptions(data=[str(tmp_path / "rows.jsonl")]), chat_tokenizer()).training
    why = "where a file is mapped, a full disk ends the process by SIGBUS"
    monkeypatch.setattr(np, "memmap", lambda *_, **__: pytest.fail(why))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"set could not be written, and .* GiB are free there; make room"):
            write_dataset(tmp_path / "set", documents, np.zeros(len(documents), bool), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_the_name_follows_data_tokenizer_template_and_version_and_nothing_else(
    options, tmp_path, monkeypatch
):
    name = name_of(options, chat_tokenizer())
    assert name_of(replace(options, tokens_per_batch=7, packing=True), chat_tokenizer()) == name
    others = [
        name_of(replace(options, max_length=77), chat_tokenizer()),
        name_of(replace(options, seed=1), chat_tokenizer()),
        name_of(options, chat_tokenizer("{{ messages[0]['content'] }}")),
    ]
    path = tmp_path / "rows.jsonl"
    os.utime(path, ns=(1, 1))
    others.append(name_of(options, chat_tokenizer()))
    path.write_text(path.read_text() + json.dumps({"text": "more"}) + "\n")
    others.append(name_of(options, chat_tokenizer()))
    extended = chat_tokenizer()
    extended.add_tokens(["<new>"])
    others.append(name_of(options, extended))
    monkeypatch.setattr("medusa.__version__", "0.0.1")
    others.append(name_of(options, chat_tokenizer()))
    assert len({name, *others}) == 1 + len(others)


def test_tokenising_four_times_the_data_takes_no_more_memory(tmp_path, monkeypatch):
    """But for where each document starts."""
    monkeypatch.setattr(loading, "TEXTS_AT_ONCE", 4)
    peaks = []
    for count in (40, 160):
        (tmp_path / "rows.jsonl").write_text((json.dumps({"text": "a word or two " * 20}) + "\n") * count)
        options = DataOptions(data=[str(tmp_path / "rows.jsonl")], max_length=4096, held_out_fraction=0)
        tracemalloc.start()
        tokenised(options, chat_tokenizer(), tmp_path / str(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0]


def test_rows_without_text_where_it_must_be_are_left_out_counted_and_named(tmp_path):
    rows = [conversation("Hello?", f"Hello {index}.") for index in range(4)]
    bad = [conversation("a", 3), conversation("half \ud83d", "b"), {"text": ["a"]}, conversation(None, "b")]
    bad += [{"text": None, "messages": None}, {"instruction": "a", "output": None}]
    write_rows(tmp_path / "rows.jsonl", [rows[0], *bad, *rows[1:]])
    counts = load_data(DataOptions(data=[str(tmp_path / "rows.jsonl")]), chat_tokenizer()).counts
    ((why, num_skipped),) = [each for each in counts.items() if each[0].startswith("skipped:")]
    assert (counts["rows"], num_skipped) == (10, 6)
    assert "rows without text where it must be (the first: " in why
    assert why.endswith("rows.jsonl row 2, message 2: content must be text, got 3)")
    write_rows(tmp_path / "bad.jsonl", bad[1:2])
    options = DataOptions(data=[str(tmp_path / "bad.jsonl")])
    says = f"data {options.data} holds nothing to train on ... bad.jsonl row 1 holds text that is not Unicode"
    assert_refused(lambda: load_data(options, chat_tokenizer()), ValueError, says)


def test_patterns_directories_and_compressed_files_are_read_in_the_order_of_their_names(tmp_path):
    rows = counting_rows(6)
    for number, row in enumerate(rows):
        content = json.dumps(row).encode()
        name = f"{number}.jsonl" if number % 2 else f"{number}.jsonl.gz"
        path = tmp_path / "deep" / str(number // 3) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if number % 2 else gzip.compress(content))
    (tmp_path / "deep" / "notes.txt").write_text("nothing")
    names = [path.rpartition("/")[2][0] for path in expanded([str(tmp_path / "deep")])]
    assert names == list("012345")
    assert expanded([str(tmp_path / "deep")]) == expanded([f"{tmp_path}/deep/*/*.jsonl*"])
    read = [each.messages for each in loading.read_examples([str(tmp_path / "deep")])]
    assert [messages[1]["content"] for messages in read] == [row["messages"][1]["content"] for row in rows]


random = np.random.default_rng(0)


def document(answer: np.ndarray | list[int], prompt: int = 0) -> Document:
    """A prompt of 4 tokens and its answer."""
    tokens = np.concatenate([np.full(4, prompt), answer]).astype(np.int32)
    return Document(tokens, np.arange(len(tokens)) >= 4)


def prose(length: int) -> np.ndarray:
    return random.integers(0, 1000, length)


def kept(documents: list[Document], **options) -> tuple[int, Counter]:
    counts: Counter[str] = Counter()
    return len(list(filtered(documents, DataOptions(**options), counts))), counts


def test_looping_answers_are_dropped_and_counted():
    loop, fine = document(np.tile(prose(10), 30)), document(prose(300))
    assert kept([loop, fine], max_repeated_fraction=0.3) == (1, {"documents": 2, "dropped: looping": 1})
    assert kept([loop, fine])[0] == 2


def test_a_loop_in_the_prompt_is_no_reason():
    tokens = np.concatenate([np.tile(prose(10), 30), prose(100)])
    asked = Document(tokens.astype(np.int32), np.arange(400) >= 300)
    assert kept([asked], max_repeated_fraction=0.3)[0] == 1


def test_equal_documents_are_kept_once():
    answer = prose(50)
    same, other_prompt = document(answer), document(answer, prompt=1)
    number, counts = kept([same, same, other_prompt], drop_duplicates=True)
    assert (number, counts["dropped: duplicate"]) == (2, 1)


def test_long_documents_are_cut_and_dropped_when_no_label_is_left():
    number, counts = kept([document(prose(50)), document(prose(2))], max_length=10)
    assert (number, counts["cut to max_length"]) == (2, 1)
    unlabelled = Document(prose(20).astype(np.int32), np.arange(20) >= 15)
    number, counts = kept([unlabelled], max_length=10)
    assert (number, counts["dropped: no label"]) == (0, 1)


def many(prompts: int) -> Documents:
    """Two answers to each prompt."""
    return Documents.of(document(prose(20), prompt) for prompt in range(prompts) for _ in range(2))


def test_the_held_out_part_has_about_the_size_asked_for():
    assert 60 <= len(held_out_indices(many(500), 0.1, at_most=1000, seed=0)) <= 140


def test_answers_to_one_prompt_lie_on_one_side():
    documents = many(100)
    chosen = held_out_indices(documents, 0.2, at_most=1000, seed=0)
    training = Documents.of(documents[i] for i in np.setdiff1d(range(len(documents)), chosen))
    held_out = Documents.of(documents[i] for i in chosen)
    prompts = [{int(part[index].tokens[0]) for index in range(len(part))} for part in (training, held_out)]
    assert prompts[1]
    assert not prompts[0] & prompts[1]
    assert len(training) + len(held_out) == len(documents)


def test_the_split_repeats_and_stays_when_documents_are_added():
    documents = many(100)
    before = held_out_indices(documents, 0.2, at_most=1000, seed=0)
    assert held_out_indices(documents, 0.2, at_most=1000, seed=0).tolist() == before.tolist()
    assert held_out_indices(documents, 0.2, at_most=1000, seed=1).tolist() != before.tolist()
    more = Documents.of([*(documents[i] for i in range(len(documents))), document(prose(20), 777)])
    after = held_out_indices(more, 0.2, at_most=1000, seed=0)
    assert [index for index in after if index < len(documents)] == before.tolist()


@pytest.mark.parametrize(("prompts", "expected"), [(1, 0), (2, 2)])
def test_few_prompts_still_leave_something_on_both_sides(prompts, expected):
    assert len(held_out_indices(many(prompts), 0.01, at_most=10, seed=0)) == expected


def test_no_more_is_held_out_than_allowed():
    documents = many(100)
    assert len(held_out_indices(documents, 0.5, at_most=10, seed=0)) == 10
    assert len(held_out_indices(documents, 0.0, at_most=10, seed=0)) == 0


def test_the_token_map_holds_the_most_frequent_answer_tokens():
    documents = Documents.of([document([7, 7, 7, 9, 9, 3], prompt=50)])
    assert documents.most_frequent_labels(2, 100).tolist() == [7, 9]
    assert documents.most_frequent_labels(4, 100).tolist() == [0, 3, 7, 9]
    before = np.array([1, 3, 50, 99, 130])  # of heads with a larger vocabulary
    assert documents.most_frequent_labels(5, 100, before).tolist() == [1, 3, 7, 50, 99]
    longer = Documents.of([document([7] * 5 + [9] * 6 + [3], prompt=50)])
    assert longer.most_frequent_labels(4, 100, before).tolist() == [1, 3, 7, 9], "but often is often"
    with pytest.raises(ValueError, match=r"token_map_size must be in \[1, 100\], got 101"):
        documents.most_frequent_labels(101, 100)


def test_rows_without_an_answer_are_dropped_and_counted(tmp_path):
    unanswered = {"messages": [{"role": "user", "content": "hello?"}]}
    path = write_rows(tmp_path / "data.jsonl", [conversation("a", "b"), unanswered, conversation("c", "d")])
    data = load_data(DataOptions(data=[str(path)], held_out_fraction=0.0), chat_tokenizer())
    assert data.counts["rows"] == 3
    assert data.counts["rows without an answer"] == 1
    assert len(data.training) == 2
    assert data.counts["training labels"] == 2 * len("b#")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no rows"),
        (
            [{"messages": [{"role": "user", "content": "a?"}]}] * 3,
            "nothing to train on ... 3 rows without an",
        ),
    ],
)
def test_data_without_any_label_is_an_error_that_says_why(tmp_path, rows, words):
    options = DataOptions(data=[str(write_rows(tmp_path / "data.jsonl", rows))])
    assert_refused(lambda: load_data(options, chat_tokenizer()), ValueError, words)
