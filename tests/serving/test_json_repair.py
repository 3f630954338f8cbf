"""What models write for JSON becomes valid JSON, and valid JSON stays as it is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa.serving.json_repair import JsonRepair


def repaired(text: str, size: int = 10**6, mark: str = "") -> tuple[str, str]:
    """The JSON of ``text``, in pieces of this size, and what is behind it."""
    repair, written, num_taken = JsonRepair(mark), "", 0
    for at in range(0, len(text), size):
        num_new, piece = repair.feed(text[at : at + size])
        written, num_taken = written + piece, num_taken + num_new
    return written + repair.finish(), text[num_taken:]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, max_examples=150)
@given(VALUES, st.sampled_from([None, 2]), st.booleans(), st.sampled_from([(", ", ": "), (" ,\r\n", "\t:")]))
def test_valid_json_stays_as_it_is(value, indent, ensure_ascii, separators):
    text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators)
    assert repaired(text) == (text, "")


@settings(deadline=None, max_examples=400)
@given(st.text(alphabet="{}[]\":,' \n\\u1aNx-.t<>\x0b", max_size=25), st.integers(1, 5))
def test_every_text_becomes_json_and_the_same_in_pieces(text, size):
    written, behind = repaired(text, mark="<>")
    json.loads(written)
    assert repaired(text, size, mark="<>") == (written, behind)


@pytest.mark.parametrize(
    "text, written",
    [
        ('{"a": "b\n\t\x01"}', '{"a": "b\\n\\t\\u0001"}'),
        (r'{"a": "\d\'\u12 \\"}', r'{"a": "\\d' + r"'\\u12 \\" + '"}'),
        ('{"a": "b\\\nc"}', '{"a": "b\\\\\\nc"}'),
        ('{"a": [1, 2,], "b": {"c": 1,},}', '{"a": [1, 2], "b": {"c": 1}}'),
        ('{"a": None, "b": [True, False], "None": nil}', '{"a": null, "b": [true, false], "None": "nil"}'),
        ("{'a': 'it\\'s \"b\"', c: d e}", '{"a": "it\'s \\"b\\"", "c": "d e"}'),
        ('{{"a": {{"b": 1}}}}', '{"a": {"b": 1}}'),
        ('{"a": 1 "b" 2, "c", "d":}', '{"a": 1, "b": 2, "c":null, "d":null}'),
        ('{"a": [1}', '{"a": [1]}'),
        ('{"a": 1]}', '{"a": 1}'),
        ('{"a": 1e999, "b": -Infinity, "c": 1.5e3}', '{"a": "1e999", "b": "-Infinity", "c": 1.5e3}'),
        ('{"a": [{"b": "c', '{"a": [{"b": "c"}]}'),
        ("", "{}"),
    ],
)
def test_what_is_no_json_becomes_what_was_meant(text, written):
    assert repaired(text) == (written, "")
    assert repaired(text, 1) == (written, "")


def test_a_mark_outside_of_strings_ends_a_value_that_is_open():
    assert repaired('{"a": "<end>", "b": 5 <end>}', mark="<end>") == ('{"a": "<end>", "b": 5}', "}")


@pytest.mark.parametrize("text", ["[" * 20_000 + "}" * 20_000, '{"a": ' + "{" * 20_000 + "}" * 20_000])
def test_deep_text_is_read_once(text):
    repair = JsonRepair()
    assert repair.feed(text)[0] == len(text)
