"""Reasoning, text and calls of tools are told apart, however an answer is cut, and no stop string is sent."""

import functools
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import chat_tokenizer
from transformers import AddedToken
from transformers.generation.stopping_criteria import StopStringCriteria

from medusa.serving.output_formats import OutputFormat, detect_format
from medusa.serving.output_parser import OutputParser
from medusa.serving.replies import read as read_update
from medusa.serving.worker import Update
from medusa.text_stream import AnswerText, Piece

TOKENIZER = chat_tokenizer()
TOOLS = {
    "weather": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "now": {"type": "boolean"},
                "place": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "hour": {"type": ["integer", "string"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "time": {"name": "time"},
}
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
OTHER = '{"name": "time", "arguments": {}}'
OSLO = ("weather", {"city": "Oslo"})
TIME = ("time", {})
HERMES, XML, HARMONY = OutputFormat(call="hermes"), OutputFormat(call="xml"), OutputFormat(call="harmony")
PYTHON, THINKING = OutputFormat(call="python"), OutputFormat(("<think>", "</think>"), "hermes")


def xml(name: str, **given: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def read(
    form: OutputFormat, text: str, sizes: list[int], **options
) -> tuple[str, str, list[tuple[str, dict]]]:
    """What is thought, what is said, and the calls."""
    as_written = options.pop("as_written", False)
    reader, parts, at, turn = OutputParser(form, options.pop("tools", TOOLS), **options), [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        parts += reader.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    parts += reader.finish()
    calls: list[list[str]] = []
    for part in parts:
        assert part.text
        if part.kind == "call":
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[-1][1] += part.text
        assert part.kind not in ("call", "arguments") or part.number == len(calls) - 1
    thought, said = (
        "".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "text")
    )
    return (
        thought,
        said,
        [(name, arguments if as_written else json.loads(arguments)) for name, arguments in calls],
    )


WRITTEN = [
    (HERMES, "no call ", "no call ", []),
    (HERMES, "a < b, <tool", "a < b, <tool", []),
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [OSLO]),
    (HERMES, f"Let me see. <tool_call>{CALL}</tool_call> ", "Let me see.", [OSLO]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>\nDone.", "Done.", [OSLO, TIME]),
    (HERMES, f"<tool_call>{CALL}", "", [OSLO]),
    (HERMES, f"<tool_call>[{OTHER}, {CALL}]</tool_call>", "", [TIME, OSLO]),
    (HERMES, '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', "", [OSLO]),
    *(
        (
            HERMES,
            f'<tool_call>{{"arguments": {{"days": {days}}}, "name": "weather"}}</tool_call>',
            "",
            [("weather", {"days": days})],
        )
        for days in ("1e999", "NaN")
    ),
    (HERMES, '<tool_call>{"arguments": {}, "name": "rm"}</tool_call>', None, []),
    (HERMES, "<tool_call>{broken</tool_call>", None, []),
    (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
    (HERMES, CALL.replace("arguments", "parameters"), "", [OSLO]),
    (HERMES, f" [{CALL}, {OTHER}]", "", [OSLO, TIME]),
    (HERMES, f"{CALL} and more", "and more", [OSLO]),
    (HERMES, '{"name": "weather", "arguments": 5}', None, []),
    (HERMES, '{"name": "Oslo", "size": 1}', None, []),
    (HERMES, '[1, "a"]', None, []),
    (HERMES, "[" * 5000, None, []),
    (HERMES, '{"name": "weather", "arguments": {"city": "a}\\"]{"}} ', "", [("weather", {"city": 'a}"]{'})]),
    (HERMES, f"<tool_call>\n{CALL}\n{OTHER}\n</tool_call>", "", [OSLO, TIME]),
    (HERMES, f"{CALL}\n{OTHER}", "", [OSLO, TIME]),
    (HERMES, f"```json\n{CALL}\n```", "", [OSLO]),
    (HERMES, f"Let me see:\n\n```json\n{CALL}\n{OTHER}\n```\nDone.", "Let me see:Done.", [OSLO, TIME]),
    (HERMES, f"```\n[{CALL}, {OTHER}]\n```", "", [OSLO, TIME]),
    (HERMES, f"<tools>\n{CALL}\n</tools>", "", [OSLO]),
    (HERMES, "```python\nprint(1)\n```\n", "```python\nprint(1)\n```\n", []),
    (HERMES, '```json\n{"name": "rm", "arguments": {}}\n```', None, []),
    (HERMES, '```json\n{"name": "weather"}\n```', None, []),
    (HERMES, f"Call <tools> or `{CALL}`", None, []),
    (XML, f"```json\n{CALL}\n```", None, []),
    (XML, xml("weather", city="Oslo"), "", [OSLO]),
    (XML, f"First.\n{xml('time')}\n{xml('weather', city='Oslo')}", "First.", [TIME, OSLO]),
    (
        XML,
        xml("weather", city='two\nlines "<b>" \\', days="5", now="True"),
        "",
        [("weather", {"city": 'two\nlines "<b>" \\', "days": 5, "now": True})],
    ),
    (XML, xml("weather", days="many"), "", [("weather", {"days": "many"})]),
    (XML, xml("weather", place="5", hour="5"), "", [("weather", {"place": "5", "hour": 5})]),
    (XML, xml("weather", place="null", hour="[5]"), "", [("weather", {"place": None, "hour": "[5]"})]),
    *(
        (XML, xml("weather", days=text), "", [("weather", {"days": text})])
        for text in ("1e999", "-1e999", "1, z=2", "1, **{}", "1)(value=2")
    ),
    (XML, xml("weather", city="Oslo").removeprefix("<tool_call>\n"), "", [OSLO]),
    (XML, xml("rm", path="/"), None, []),
    (XML, f"<tool_call>{CALL}</tool_call>", "", [OSLO]),
    (PYTHON, '[weather(city="Oslo"), time()]', "", [OSLO, TIME]),
    (
        PYTHON,
        "[weather(city='a) b', days=-3, now=true)]",
        "",
        [("weather", {"city": "a) b", "days": -3, "now": True})],
    ),
    (PYTHON, "[link](https://a.example) and [rm(a=1)]", None, []),
    (PYTHON, "[weather(city=city)]", None, []),
    (PYTHON, "[weather(days=1e999)]", None, []),
    (PYTHON, '[weather("Oslo")]', None, []),
]


@pytest.mark.parametrize(("form", "text", "said", "calls"), WRITTEN, ids=[each[1][:30] for each in WRITTEN])
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_calls_are_found_and_all_else_stays_text_however_it_is_cut(form, text, said, calls, sizes):
    assert read(form, text, sizes) == ("", text if said is None else said, calls)
    assert read(form, text, sizes, tools={}) == ("", text, [])


@settings(max_examples=50, deadline=None)
@given(
    st.text(alphabet='ab <>/{}[]"tol_cal\n', max_size=30), st.lists(st.integers(1, 9), min_size=1, max_size=3)
)
def test_a_text_without_calls_is_what_the_model_wrote(text, sizes):
    for form in (HERMES, XML, PYTHON):
        assert read(form, text, sizes) == ("", text, [])


MARKED = "<tool_call>{}</tool_call>"
FENCED = "```json\n{}\n```"
IN_LINES = ("weather", {"city": 'Os\nlo\t"C:\\d"'})
NAMED = '"name": "weather", "arguments": {"city": "Oslo"}'
FORMS_OF_CALLS = [  # one call, or more of them, as models write it
    (f"{{{{{NAMED}}}}}", [OSLO]),
    ('{{"name": "weather", "arguments": {{"city": "Oslo"}}}}', [OSLO]),
    (f'{{{{"id": "call_1", {NAMED}}}}}', [OSLO]),
    (f'{{"type": "function", {NAMED}}}', [OSLO]),
    (f'{{"id": "call_1", {NAMED}}}', [OSLO]),
    (f'{{{NAMED}, "id": "call_1", "more": {{"a": [1, "}}"]}}}}', [OSLO]),
    ('{"name": "weather", "id": 1, "arguments": {"city": "Oslo"}}', [OSLO]),
    (f'{{"type": "function", "function": {{{NAMED}}}}}', [OSLO]),
    (f'{{"id": "call_1", "function": {{{NAMED}}}, "type": "function"}}', [OSLO]),
    ('{"function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}', [OSLO]),
    ('{"name": "weather", "arguments": "{\'city\': \'Oslo\',}"}', [OSLO]),
    ('{"name": "time", "arguments": ""}', [TIME]),
    ('{"name": "time", "arguments": null}', [TIME]),
    ('{"parameters": null, "name": "time"}', [TIME]),
    ('{"name": "time"}', [TIME]),
    ('{"type": "function", "function": {"name": "time"}}', [TIME]),
    (f"{CALL}; {OTHER};{OTHER}", [OSLO, TIME, TIME]),
    (f"{CALL}, {OTHER}", [OSLO, TIME]),
    (f'[{{{NAMED}, "id": "a"}}, {{"id": "b", {NAMED}}}, {OTHER},]', [OSLO, OSLO, TIME]),
    ("{'name': 'weather', 'arguments': {'city': 'Os\\nlo\\t\"C:\\\\d\"'}}", [IN_LINES]),
    ('{"name": "weather", "arguments": {"city": "Os\nlo\t\\"C:\\d\\""}}', [IN_LINES]),
    ('{"arguments": {"city": "Os\nlo\t\\"C:\\d\\""}, "name": "weather"}', [IN_LINES]),
    (
        '{"name": "weather", "arguments": {"place": None, "now": True, "days": 3,},}',
        [("weather", {"place": None, "now": True, "days": 3})],
    ),
]
NO_CALLS = [
    '{"name": "weather"}',  # which needs a city
    '{"name": "time", "size": 1}',
    '{"type": "function", "function": {"name": "time", "description": "", "parameters": {}}}',
    '{"name": "weather", "arguments": 5}',
    '{"name": "weather", "arguments": "Oslo"}',
    '{"id": "call_1", "name": "rm", "arguments": {}}',
    '{"type": "function", "function": "time"}',
    '{{"name": "rm", "arguments": {}}}',
    '{"title": "Oslo", "name": "time"}',
]


def cut_anywhere(text: str) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """What is read of ``text``: whole, letter by letter, and in two pieces for every place between them;
    each once."""
    found = [read(HERMES, text, [at, len(text)], as_written=True) for at in range(1, len(text) + 1)]
    found.append(read(HERMES, text, [1], as_written=True))
    return [each for at, each in enumerate(found) if each not in found[:at]]


PLACES = ["{}", MARKED, FENCED, "[{}]"]
IN_PLACES = [
    (place.replace("{}", text), calls)
    for text, calls in FORMS_OF_CALLS
    for place in PLACES[: 3 if text[0] == "[" or ";" in text else 4]
]


@pytest.mark.parametrize("text, calls", IN_PLACES)
def test_each_form_of_a_call_is_read_the_same_wherever_its_text_is_cut(text, calls):
    ((thought, said, written),) = cut_anywhere(text)
    assert (thought, said) == ("", "")
    assert [(name, json.loads(arguments)) for name, arguments in written] == calls


@pytest.mark.parametrize("place", ["{}", FENCED])
@pytest.mark.parametrize("text", NO_CALLS)
def test_objects_that_only_resemble_a_call_stay_text(text, place):
    text = place.replace("{}", text)
    assert cut_anywhere(text) == [("", text, [])]


@pytest.mark.parametrize("text", ['{"title": "Oslo', '```json\n{"title": "Oslo'])
def test_an_answer_that_is_json_is_not_held_back(text):
    assert "".join(part.text for part in OutputParser(HERMES, TOOLS).feed(text)) == text


UNCLOSED = [
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"</tool_call>', OSLO),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}</tool_call>', OSLO),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Oslo', OSLO),
    (XML, "<function=weather>\n<parameter=city>\nOslo", OSLO),
    (XML, "<function=weather>\n<parameter=days>\n5", ("weather", {"days": 5})),
    (XML, "<function=weather>\n<parameter=", ("weather", {"": ""})),
    (HARMONY, '<|channel|>commentary to=functions.weather<|message|>{"city": "Oslo"<|call|>', OSLO),
    (HARMONY, '<|channel|>commentary to=functions.weather<|message|>{"city": "Oslo', OSLO),
    (HARMONY, "<|channel|>commentary to=functions.time<|message|><|call|>", TIME),
    (HARMONY, '<|channel|>commentary to=functions.weather<|message|>{"city": "Oslo"}}\n<|call|>', OSLO),
]


@pytest.mark.parametrize("form, text, call", UNCLOSED)
def test_arguments_that_a_model_leaves_open_are_closed_where_its_answer_ends(form, text, call):
    assert read(form, text, [1]) == ("", "", [call])


@pytest.mark.parametrize(
    "reason, is_stopped, end", [("stop", False, '"}'), ("stop", True, ""), ("length", False, "")]
)
@pytest.mark.parametrize("form, text", [(form, text) for form, text, _ in UNCLOSED if text.endswith("Oslo")])
def test_arguments_stay_open_where_the_answer_was_cut(form, text, reason, is_stopped, end):
    update = Update([Piece(text, 0)], finish_reason=reason, stop_string="." if is_stopped else None)
    parts, finish_reason = read_update(OutputParser(form, TOOLS), update)
    assert "".join(part.text for part in parts if part.kind == "arguments") == f'{{"city": "Oslo{end}'
    assert finish_reason == ("tool_calls" if end else reason)


@pytest.mark.parametrize("form, text", [(form, text) for form, text, _, calls in WRITTEN if calls])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_answer_that_ends_behind_its_last_call_has_called(form, text, is_stopped):
    update = Update([Piece(text, 0)], finish_reason="stop", stop_string="." if is_stopped else None)
    assert read_update(OutputParser(form, TOOLS), update)[1] == "tool_calls"


def test_an_answer_that_is_cut_in_a_call_that_is_not_told_has_called():
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL.removesuffix('}}')}"
    update = Update([Piece(text, 0)], finish_reason="stop", stop_string=".")
    assert read_update(OutputParser(HERMES, TOOLS), update)[1] == "stop"
    assert read_update(OutputParser(HERMES, TOOLS, most=1), update)[1] == "tool_calls"


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
THOUGHT = [
    (THINKING, "<think>\nHm.\n</think>\n\nYes. ", False, ("Hm.", "Yes. ", [])),
    (THINKING, "Hm.\n</think>\n\nYes.", True, ("Hm.", "Yes.", [])),
    (THINKING, "Hm", True, ("Hm", "", [])),
    (THINKING, "Yes <think>.</think>", False, ("", "Yes <think>.</think>", [])),
    (THINKING, f"<think></think>\n\n<tool_call>{CALL}</tool_call>", False, ("", "", [OSLO])),
    (HARMONY, f"{ANALYSIS}<|channel|>final<|message|>Yes.<|return|>", False, ("Hm.", "Yes.", [])),
    (HARMONY, "<|channel|>final<|message|>Yes", False, ("", "Yes", [])),
    (
        HARMONY,
        f'{ANALYSIS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city":"Oslo"}}',
        False,
        ("Hm.", "", [OSLO]),
    ),
    (
        HARMONY,
        "<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}<|call|>",
        False,
        ("", "I look.", [TIME]),
    ),
    (HARMONY, "Yes.", False, ("", "Yes.", [])),
]


@pytest.mark.parametrize(
    ("form", "text", "in_reasoning", "found"), THOUGHT, ids=[each[1][:30] for each in THOUGHT]
)
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_what_is_thought_is_told_apart_from_what_is_said(form, text, in_reasoning, found, sizes):
    assert read(form, text, sizes, in_reasoning=in_reasoning) == found


def test_text_before_a_call_is_not_held_back():
    reader = OutputParser(HERMES, TOOLS)
    assert [part.text for part in reader.feed("I say <tool")] == ["I say"]
    assert [part.text for part in reader.feed(" bar")] == [" <tool bar"]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, f"<tool_call>{CALL}</tool_call>"),
        (XML, xml("weather", city="Oslo")),
        (HARMONY, '<|channel|>commentary to=functions.weather<|message|>{"city": "Oslo"}<|call|>'),
    ],
)
def test_arguments_come_as_they_are_written(form, text):
    reader = OutputParser(form, TOOLS)
    parts = reader.feed(text[: text.index("lo")])
    assert [part.kind for part in parts[:2]] == ["call", "arguments"]
    assert "".join(part.text for part in parts[1:]) == '{"city": "Os'


def test_no_more_calls_are_read_than_may_be():
    text = f"<tool_call>{CALL}</tool_call><tool_call>{OTHER}</tool_call>"
    assert read(HERMES, text, [9], most=1) == ("", "", [OSLO])


TEMPLATES = [
    ("<tool_call>{{ call }}</tool_call>", HERMES),
    ("{% if enable_thinking %}<think></think>{% endif %} <tool_call>", THINKING),
    ("<tool_call>\n<function={{ name }}>", XML),
    ("<|start|>assistant<|channel|>final<|message|>", HARMONY),
    ("in the format of [func_name1(params_name1=params_value1)]", PYTHON),
    ("<|python_start|>{{ call }}<|python_end|>", PYTHON),
    ('respond with {"name": ..., "parameters": {}}', OutputFormat(arguments_key="parameters")),
    ("{{ message }}", OutputFormat()),
]


@pytest.mark.parametrize(("template", "form"), TEMPLATES, ids=[each[0][:30] for each in TEMPLATES])
def test_the_form_is_found_from_the_template(template, form):
    assert detect_format(template) == form


FORMS = [*dict.fromkeys(form for _, form in TEMPLATES)]
REFERENCE = {
    "properties": {"kind": {"$ref": "#/$defs/kind"}},
    "required": ["kind"],
    "$defs": {"kind": {"enum": ["x"]}},
}
GIVEN = [
    ({}, {}),
    ({"properties": {"city": {"type": "string"}}, "required": ["city"]}, {"city": 'O"s\nlo'}),
    (
        {"properties": {"b": {"type": "array"}, "a": {"enum": ["x", "y"]}}, "required": ["b"]},
        {"b": [1, None], "a": "y"},
    ),
    *[
        ({"properties": {name: {"type": "boolean"} for name in "abcd"}}, dict.fromkeys(names, True))
        for names in ("", "b", "ac", "bcd")
    ],
    ({"properties": {"city": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, {"city": 'O"s\nlo'}),
    ({"properties": {"city": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, {"city": None}),
    ({"properties": {"a": {"type": "string", "enum": ["x y", "z"]}}}, {"a": "x y"}),
    ({**REFERENCE, "additionalProperties": False}, {"kind": "x"}),
]


def written(form: OutputFormat, name: str, given: dict) -> str:
    if form.call == "xml":  # only what the schema calls a string is written as it stands
        as_it_stands = [key for key, each in given.items() if (key == "city" and each) or each == "x y"]
        return xml(
            name, **{key: each if key in as_it_stands else json.dumps(each) for key, each in given.items()}
        )
    if form.call == "python":
        return f"[{name}({', '.join(f'{key}={json.dumps(each)}' for key, each in given.items())})]"
    before, after = form._around_arguments(name)
    return before + json.dumps(given) + after


@functools.cache
def tokenizer_and_compiler(form: OutputFormat, has_tokens: bool):
    """Of a model whose tokenizer has the marks of ``form`` as tokens, or has not."""
    from medusa.acceptance.grammar import GrammarCompiler

    tokenizer = chat_tokenizer()
    if has_tokens or form.is_harmony:
        tokenizer.add_tokens([AddedToken(mark, special=form.is_harmony) for mark in form.marks])
    return tokenizer, GrammarCompiler(tokenizer, len(tokenizer), [256])


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.call)
@pytest.mark.parametrize(("schema", "arguments"), GIVEN)
def test_a_forced_call_may_be_written_in_the_form_and_is_read_again(form, schema, arguments, has_tokens):
    pytest.importorskip("llguidance")
    tokenizer, compiler = tokenizer_and_compiler(form, has_tokens)
    functions = [{"name": "other"}, {"name": "f", "parameters": schema}]
    rules = ["answer: call", *form.call_rules(functions, compiler.as_terminals)]
    for in_reasoning in (None, True) if form.reasoning_tags[0] else (None,):
        thought = ("Hm." if in_reasoning else "") + form.reasoning_tags[1] if in_reasoning else ""
        text = thought + written(form, "f", arguments)
        grammar = compiler.compile(rules, *form.reasoning_before(compiler.as_terminals, in_reasoning))
        processor, ids = grammar.processor(0), tokenizer(text, add_special_tokens=False)["input_ids"]
        assert processor._moved_to(ids), tokenizer.decode(processor._consumed)
        assert processor._matcher.is_accepting()
        found = read(form, text, [7], tools={"f": functions[1]}, in_reasoning=bool(in_reasoning))
        assert found == ("Hm." if in_reasoning else "", "", [("f", arguments)])
        for right, wrong in (("f", "g"), ("x y", "y x")):  # another function, and none of the values
            other = tokenizer(text.replace(right, wrong), add_special_tokens=False)["input_ids"]
            assert right not in text or not grammar.processor(0)._moved_to(other)


def text(**more) -> dict:
    """The parameters of a function that takes a text."""
    return {"properties": {"a": {"type": "string", **more}}}


ANY = {"type": "string"}
NOT_KEPT = [  # forms, name, parameters, what is said of them
    *((XML, "f", text(**{key: value}), f"'{key}' of the parameter 'a' of 'f'") for key, value in (
        ("pattern", "x"), ("format", "date"), ("minLength", 2), ("maxLength", 3), ("not", {"const": "x"}))),
    (XML, "f", text(enum=["a", "b"], maxLength=1), "'maxLength' of the parameter 'a'"),
    (XML, "f", {"properties": {"a": {"anyOf": [ANY, {"type": "number", "minimum": 3}]}}}, "'minimum' of"),
    (XML, "f", {"properties": {"a": {"anyOf": [ANY], "enum": ["x"]}}}, "'enum' of the parameter"),
    (XML, "f", text(enum=["</parameter>"]), "none that ends a parameter"),
    (XML, "f", {"properties": {"a": False}}, "may be nothing"),
    *((form, "f", {"properties": {"a": ANY}, **more}, says) for form in (XML, PYTHON) for more, says in (
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf' of the parameters of 'f'"),
        ({"minProperties": 1}, "'minProperties' of the parameters of 'f'"),
        ({"required": ["b"]}, "require 'b', which is not among"),
        ({"type": "string"}, "must be an object, got 'string'"))),
    *((PYTHON, "f", {"properties": {key: {}}}, f"parameter {key!r} of 'f'") for key in ("a b", "class", "é")),
    *((XML, "f", {"properties": {key: {}}}, f"the parameter {key!r} of 'f'") for key in ("a>b", "a\n", " a")),
    *((form, "f g", None, "name of the function 'f g'") for form in (XML, PYTHON, HARMONY)),
    (PYTHON, "1f", None, "name of the function '1f'"),
    (HERMES, "f<|user|>", None, "name of the function"),
]  # fmt: skip


@pytest.mark.parametrize("form, name, parameters, says", NOT_KEPT)
def test_what_a_forced_call_could_not_keep_or_be_read_with_is_refused(form, name, parameters, says):
    pytest.importorskip("llguidance")
    _, compiler = tokenizer_and_compiler(form, False)
    with pytest.raises(ValueError, match=re.escape(says)):
        form.call_rules([{"name": name, "parameters": parameters}], compiler.as_terminals)


CONST = {"properties": {"a": {"type": "string", "const": "x y"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "form, parameters, call, is_allowed",
    [
        (XML, CONST, xml("f", a="x y"), True),
        (XML, CONST, xml("f", a="x"), False),
        (XML, text(), xml("f", a="x</parameter>y"), False),  # which would be read as x
        *((form, None, written(form, "f", {"a": 1}), False) for form in FORMS),
        *((form, None, written(form, "f", {}), True) for form in FORMS),
        *((form, {}, written(form, "f", {"a": 1}), True) for form in (HERMES, HARMONY)),
    ],
)
def test_a_forced_call_is_held_to_its_parameters_and_has_none_where_none_are_said(
    form, parameters, call, is_allowed
):
    pytest.importorskip("llguidance")
    tokenizer, compiler = tokenizer_and_compiler(form, False)
    rules = form.call_rules([{"name": "f", "parameters": parameters}], compiler.as_terminals)
    processor = compiler.compile(["answer: call", *rules]).processor(0)
    ids = tokenizer(call, add_special_tokens=False)["input_ids"]
    assert (processor._moved_to(ids) and processor._matcher.is_accepting()) == is_allowed


# ------------------------------------------------------------------ from tokens to text


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


def test_the_stop_string_that_begins_first_has_ended_an_answer():
    answer = AnswerText(TOKENIZER, ["b", "ab"])
    tokens = TOKENIZER("xab")["input_ids"]
    pieces = answer.feed(tokens, [0] * len(tokens))[1]
    assert [piece.text for piece in pieces] == ["x"] and answer.stop_string == "ab"


def test_control_tokens_are_no_text_unless_they_tell_parts_apart():
    tokens = TOKENIZER("a<|user|>b<|end|>é")["input_ids"]
    user = TOKENIZER.convert_tokens_to_ids("<|user|>")
    for marks, text in (({}, "abé"), ({user: "<|user|>"}, "a<|user|>bé")):
        answer = AnswerText(TOKENIZER, marks=marks)
        pieces = answer.feed(tokens, [0] * len(tokens))[1] + answer.finish()
        assert "".join(piece.text for piece in pieces) == text


REASONING = [  # the format, whether the prompt has begun the reasoning, the answer, and its text up to "b"
    (THINKING, False, "<think>a b</think>\n\nab", "<think>a b</think>\n\na"),
    (THINKING, False, " <think>b", " <think>b"),
    (THINKING, True, "b</thin b</think>ab", "b</thin b</think>a"),
    (THINKING, True, "ab", "ab"),
    (THINKING, False, "a <think>b</think>b", "a <think>"),
    (THINKING, False, "<thib", "<thi"),
    (THINKING, False, "<", "<"),
    (OutputFormat(), False, "<think>b</think>", "<think>"),
    (
        HARMONY,
        False,
        f"{ANALYSIS}b<|channel|>final<|message|>ab",
        f"{ANALYSIS}b<|channel|>final<|message|>a",
    ),
    (HARMONY, False, "ab", "a"),
]


@pytest.mark.parametrize("form, in_reasoning, text, sent_text", REASONING)
@pytest.mark.parametrize("size", [1, 3, 99])
def test_stop_strings_are_not_looked_for_in_reasoning(form, in_reasoning, text, sent_text, size):
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    marks = {id: token.content for id, token in TOKENIZER.added_tokens_decoder.items()}
    answer = AnswerText(TOKENIZER, ["b"], marks, None, form.unsearched, in_reasoning)
    steps = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    pieces = [answer.feed(step, [0] * len(step))[1] for step in steps]
    assert "".join(piece.text for each in [*pieces, answer.finish()] for piece in each) == sent_text
    assert answer.is_stopped == (sent_text != text)


def test_reasoning_is_sent_as_it_comes_and_a_stop_string_that_ends_an_answer_in_its_tag_is_found():
    answer = AnswerText(TOKENIZER, ["think"], reasoning_tags=("<think>", "</think>"))
    fed = [answer.feed([token], [0])[1] for token in TOKENIZER("<think>ab</a")["input_ids"]]
    texts = ["".join(piece.text for piece in each) for each in fed]
    assert texts == ["", "", "", "", "", "", "<think>", "a", "b", "", "", "</a"]
    answer = AnswerText(TOKENIZER, ["hi"], reasoning_tags=("<think>", "</think>"))
    tokens = TOKENIZER("<thi")["input_ids"]
    assert answer.feed(tokens, [0] * 4) == (4, [])
    assert [piece.text for piece in answer.finish()] == ["<", "t"] and answer.is_stopped


@pytest.mark.parametrize("step", [1, 2, 9])
@pytest.mark.parametrize(
    "stop, num_tokens, text",
    [
        ("<|user|>", 3, "ab"),  # a token,
        ("b<|user|>", 3, "a"),  # with text before it,
        ("<|user|>c", 4, "ab"),  # behind it
        ("b<|user|>c", 4, "a"),  # and on both sides;
        ("ser|><|system|>", 7, "abcd"),  # a part of two
        ("abcd", 5, ""),  # text that a token parts
        ("de", 8, "abc"),
        ("x<|user|>", 8, "abcde"),
    ],
)
def test_a_stop_string_may_hold_control_tokens_which_are_no_text(stop, num_tokens, text, step):
    controls = {token: each.content for token, each in TOKENIZER.added_tokens_decoder.items() if each.special}
    tokens = TOKENIZER("ab<|user|>cd<|user|><|system|>e")["input_ids"]
    answer, pieces, num_fed = AnswerText(TOKENIZER, [stop], controls=controls), [], 0
    for at in range(0, len(tokens), step):
        part = tokens[at : at + step]
        num_new, new = answer.feed(part, [0] * len(part))
        num_fed, pieces = num_fed + num_new, pieces + new
    assert answer.is_stopped == (text != "abcde") and num_fed == num_tokens
    assert "".join(piece.text for piece in [*pieces, *answer.finish()]) == text
    criterion = StopStringCriteria(TOKENIZER, [stop])  # of `generate`, which looks for what stands there
    read = [end for end in range(1, 9) if "<" in stop and criterion(torch.tensor([tokens[:end]]), None)]
    assert not read or read[0] == num_tokens
