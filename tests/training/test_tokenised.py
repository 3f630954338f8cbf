"""Tokenised documents: made once, mapped by all, and made anew when what they depend on changes."""

from __future__ import annotations

import gzip
import json
import os
import resource
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tiny_training import chat_tokenizer, counting_rows, write_rows

from medusa.training.config import DataOptions
from medusa.training.data import loading
from medusa.training.data.dataset import name_of, read_dataset, write_dataset
from medusa.training.data.loading import load_data, tokenised
from medusa.training.data.reading import expanded
from medusa.training.data.rendering import tokenise


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
    monkeypatch.setattr(loading, "tokenise", partial(loading.tokenise, batch_size=4))
    peaks = []
    for count in (40, 160):
        (tmp_path / "rows.jsonl").write_text((json.dumps({"text": "a word or two " * 20}) + "\n") * count)
        options = DataOptions(data=[str(tmp_path / "rows.jsonl")], max_length=4096, held_out_fraction=0)
        tracemalloc.start()
        tokenised(options, chat_tokenizer(), tmp_path / str(count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0]


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


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("none/*.jsonl", "names no file that ends in"), ("empty", "names no file that ends in")],
)
def test_a_pattern_or_directory_without_files_is_refused(tmp_path, name, complaint):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=complaint):
        expanded([str(tmp_path / name)])


def test_a_torn_gzip_file_is_refused_by_its_name(tmp_path):
    whole = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in counting_rows(50)))
    (tmp_path / "torn.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"torn.jsonl.gz is not a whole gzip file"):
        list(loading.read_examples([str(tmp_path / "torn.jsonl.gz")]))
