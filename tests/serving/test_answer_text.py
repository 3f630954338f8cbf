"""Whole characters and nothing of a stop string, however tokens come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import chat_tokenizer

from medusa.serving.answer_text import AnswerText

TOKENIZER = chat_tokenizer()


def sent(text: str, stops: list[str], sizes: list[int]) -> tuple[list[str], AnswerText]:
    """The pieces of ``text``, a token a byte, in steps of these sizes over and over."""
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    answer, pieces, size = AnswerText(TOKENIZER, stops), [], 0
    while tokens and not answer.is_stopped:
        now, tokens = tokens[: sizes[size]], tokens[sizes[size] :]
        size = (size + 1) % len(sizes)
        pieces += [piece.text for piece in answer.feed(now, [0] * len(now))[1]]
    return pieces + [piece.text for piece in answer.finish()], answer


@settings(deadline=None, max_examples=200)
@given(
    st.text(alphabet="abé😀", max_size=20),
    st.lists(st.text(alphabet="abé😀", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_a_stop_string_is_never_sent_whatever_tokens_and_steps_it_spans(text, stops, sizes):
    pieces, answer = sent(text, stops, sizes)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(start for end, start in ends if end == min(ends)[0])] if ends else text
    assert "".join(pieces) == expected
    assert answer.is_stopped == bool(ends)
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_that_cannot_become_a_stop_string_is_sent_at_once():
    answer = AnswerText(TOKENIZER, ["STOP"])
    fed = [answer.feed([token], [1])[1] for token in TOKENIZER("a STU")["input_ids"]]
    assert [[piece.text for piece in each] for each in fed] == [["a"], [" "], [], [], ["S", "T", "U"]]
    assert {piece.depth for each in fed for piece in each} == {1}


@pytest.mark.parametrize("size", [1, 7])
def test_tokens_behind_a_stop_string_are_not_counted(size):
    answer = AnswerText(TOKENIZER, ["b"])
    tokens = TOKENIZER("aab" + "c" * 4)["input_ids"]
    counts = [answer.feed(tokens[at : at + size], [0] * size)[0] for at in range(0, 7, size)]
    assert sum(counts) == 3 and answer.finish() == []


def test_control_tokens_are_no_text_unless_they_tell_parts_apart():
    tokens = TOKENIZER("a<|user|>b<|end|>é")["input_ids"]
    user = TOKENIZER.convert_tokens_to_ids("<|user|>")
    for marks, text in (({}, "abé"), ({user: "<|user|>"}, "a<|user|>bé")):
        answer = AnswerText(TOKENIZER, marks=marks)
        pieces = answer.feed(tokens, [0] * len(tokens))[1] + answer.finish()
        assert "".join(piece.text for piece in pieces) == text
