"""What is dropped is counted; what is held out shares no prompt with what is trained on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tiny_training import chat_tokenizer, conversation, write_rows

from medusa.training.config import DataOptions
from medusa.training.data.dataset import Document, Documents
from medusa.training.data.loading import (
    NearDuplicates,
    filtered,
    held_out_indices,
    load_data,
    repeated_fraction,
)

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


def test_a_loop_is_told_from_prose():
    assert repeated_fraction(prose(300)) == 0
    assert repeated_fraction(np.tile(prose(10), 30)) > 0.9
    assert repeated_fraction(prose(5)) == 0


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


def test_answers_that_differ_in_a_few_words_are_near_duplicates():
    answer = prose(400)
    near, far = answer.copy(), prose(400)
    near[[20, 300]] = 1001
    number, counts = kept([document(each) for each in (answer, near, far)], near_duplicate_similarity=0.8)
    assert (number, counts["dropped: near duplicate"]) == (2, 1)


@pytest.mark.parametrize("similarity", [0.5, 0.9])
def test_the_estimate_of_similarity_decides_near_its_threshold(similarity):
    """Half the shingles shared is a Jaccard index of 1/3: below both thresholds."""
    first = prose(1000)
    second = np.concatenate([first[:500], prose(500)])
    duplicates = NearDuplicates(similarity)
    assert not duplicates.is_near_earlier(first)
    assert not duplicates.is_near_earlier(second)
    assert duplicates.is_near_earlier(first)


def test_short_answers_are_never_near_duplicates():
    assert kept([document([5, 6, 7])] * 3, near_duplicate_similarity=0.8)[0] == 3


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
    training, held_out = (
        documents.subset(np.setdiff1d(range(len(documents)), chosen)),
        documents.subset(chosen),
    )
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
    with pytest.raises(ValueError, match=r"token_map_size must be in \[1, 100\], got 101"):
        documents.most_frequent_labels(101, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"max_repeated_fraction": 0.0}, r"max_repeated_fraction must be in \(0, 1\], got 0.0"),
        ({"near_duplicate_similarity": 2.0}, r"near_duplicate_similarity must be in \(0, 1\], got 2.0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataOptions(**options)


def test_rows_without_an_answer_are_dropped_and_counted(tmp_path):
    unanswered = {"messages": [{"role": "user", "content": "hello?"}]}
    path = write_rows(tmp_path / "data.jsonl", [conversation("a", "b"), unanswered, conversation("c", "d")])
    data = load_data(DataOptions(data=[str(path)], held_out_fraction=0.0), chat_tokenizer())
    assert data.counts["rows"] == 3
    assert data.counts["rows without an answer"] == 1
    assert len(data.training) == 2
    assert data.counts["training labels"] == 2 * len("b#")


def test_data_without_any_label_is_an_error_that_says_why(tmp_path):
    unanswered = {"messages": [{"role": "user", "content": "hello?"}]}
    path = write_rows(tmp_path / "data.jsonl", [unanswered] * 3)
    with pytest.raises(ValueError, match=r"holds nothing to train on .*3 rows without an answer"):
        load_data(DataOptions(data=[str(path)]), chat_tokenizer())


def test_data_without_rows_is_an_error(tmp_path):
    path = write_rows(tmp_path / "data.jsonl", [])
    with pytest.raises(ValueError, match="holds no rows"):
        load_data(DataOptions(data=[str(path)]), chat_tokenizer())
