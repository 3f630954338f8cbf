"""Whole characters, nothing of a stop string, and calls of tools, however tokens come."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import chat_tokenizer

from medusa.serving.answer_text import AnswerText, ToolCallReader, forced_call

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


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
OTHER = '{"name": "time", "arguments": {}}'


def read(text: str, sizes: list[int], most: int | None = None) -> tuple[str, list[tuple[str, dict]]]:
    reader, said, calls, at, turn = ToolCallReader(["weather", "time"], most), "", [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        more, found = reader.feed(text[at : at + size])
        said, calls, at, turn = said + more, calls + found, at + size, turn + 1
    more, found = reader.finish()
    return said + more, [(call.name, json.loads(call.arguments)) for call in calls + found]


WRITTEN = [
    ("no call", "no call", []),
    ("a < b, <tool", "a < b, <tool", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", {"city": "Oslo"})]),
    (f"Let me see. <tool_call>{CALL}</tool_call>", "Let me see. ", [("weather", {"city": "Oslo"})]),
    (
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>\n",
        "",
        [("weather", {"city": "Oslo"}), ("time", {})],
    ),
    (f"<tool_call>{CALL}", "", [("weather", {"city": "Oslo"})]),
    ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
    ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
    (CALL.replace("arguments", "parameters"), "", [("weather", {"city": "Oslo"})]),
    (f"[{CALL}, {OTHER}]", "", [("weather", {"city": "Oslo"}), ("time", {})]),
    (f"{CALL} and more", f"{CALL} and more", []),
    ('{"name": "weather", "arguments": 5}', '{"name": "weather", "arguments": 5}', []),
    ("[" * 5000, "[" * 5000, []),
]


@pytest.mark.parametrize(("text", "said", "calls"), WRITTEN, ids=[text[:30] for text, _, _ in WRITTEN])
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_calls_are_found_and_all_else_stays_text_however_it_is_cut(text, said, calls, sizes):
    assert read(text, sizes) == (text if said is None else said, calls)


def test_text_before_a_call_is_not_held_back():
    reader = ToolCallReader(["weather"])
    assert reader.feed("I say <tool") == ("I say ", [])
    assert reader.feed(" bar") == ("<tool bar", [])


def test_no_more_calls_are_read_than_may_be():
    assert read(f"<tool_call>{CALL}</tool_call><tool_call>{OTHER}</tool_call>", [9], most=1) == (
        "",
        [("weather", {"city": "Oslo"})],
    )


def test_a_forced_call_is_written_as_the_template_teaches_it():
    tools = [{"name": "weather", "parameters": {"type": "object", "$defs": {"A": {}}}}, {"name": "time"}]
    schema, before, after = forced_call(tools, "... <tool_call> ...")
    assert (before, after) == ("<tool_call>\n", "\n</tool_call>")
    assert [kind["properties"]["name"]["const"] for kind in schema["anyOf"]] == ["weather", "time"]
    schema, before, after = forced_call(tools, 'write {"name": ..., "parameters": ...}')
    assert (before, after) == ("", "") and schema["anyOf"][0]["required"] == ["name", "parameters"]


def test_references_of_a_tool_stay_inside_of_its_own_schema():
    tree = {"properties": {"left": {"$ref": "#"}, "const": {"const": {"$ref": "#"}}}}
    schema, _, _ = forced_call([{"name": "a"}, {"name": "b", "parameters": tree}], "")
    kept = schema["$defs"]["1"]["properties"]
    assert kept["left"] == {"$ref": "#/$defs/1"} and kept["const"] == {"const": {"$ref": "#"}}
