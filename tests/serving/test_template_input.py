"""What a client sends reaches the chat template as it came: keys in their order, and calls that are cut."""

from __future__ import annotations

import itertools
import json

import pytest
from tiny_chat import TOOL_TEMPLATE, tool_model
from tiny_server import HELLO, TOKENIZER, tiny_service

from medusa.conversations import as_template
from medusa.serving.chat_requests import ChatRequest, TokenizeRequest
from medusa.serving.responses import ResponsesRequest
from medusa.training.data.loading import Renderer
from medusa.training.data.reading import parse_row

SHOWING_ALL = "{{ tools | tojson }}{{ messages | tojson }}{{ (extra or 0) | tojson }}"
SCHEMA = {
    "type": "object",
    "required": ["b", "a"],
    "properties": {"b": {"description": "B", "type": "string"}, "a": {"default": None, "type": "integer"}},
    "$defs": {},
    "additionalProperties": False,
}
FUNCTION = {"strict": True, "parameters": SCHEMA, "name": "f", "description": "F"}
ORDERS = [*itertools.permutations(["name", "description", "parameters", "strict"])]


def ordered(given: dict, order) -> dict:
    return {key: given[key] for key in order}


@pytest.fixture(scope="module")
def service():
    return tiny_service(tool_model(SHOWING_ALL))


def shown(service, asked: ChatRequest) -> str:
    return TOKENIZER.decode(service.chat_prompt(asked))


def as_transformers_shows_it(messages, tools=None, **variables) -> str:
    tokenizer = tool_model(SHOWING_ALL).tokenizer
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **variables)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("outside", [("type", "function"), ("function", "type")])
def test_tools_have_the_keys_of_the_client_in_its_order(service, order, outside):
    function = ordered(FUNCTION, order)
    tool = ordered({"type": "function", "function": function, "cache_control": {"b": 1, "a": 2}}, outside)
    body = {"messages": HELLO, "tools": [tool], "chat_template_kwargs": {"extra": {"z": 1, "a": [2]}}}
    whole = as_transformers_shows_it(HELLO, [tool], extra={"z": 1, "a": [2]})
    assert shown(service, ChatRequest.model_validate(body)) == whole
    assert shown(service, TokenizeRequest.model_validate(body).chat) == whole

    flat = {"type": "function", **function}
    asked = ResponsesRequest.model_validate({"input": "Hello", "tools": [flat]}).chat
    assert shown(service, asked) == as_transformers_shows_it(
        HELLO, [{"type": "function", "function": function}]
    )


@pytest.mark.parametrize("order", [*itertools.permutations(["id", "type", "function"])])
@pytest.mark.parametrize("inside", [("name", "arguments"), ("arguments", "name")])
def test_messages_and_calls_have_the_keys_of_the_client_in_its_order(service, order, inside):
    arguments = {"b": "é", "a": {"d": 1.5, "c": None}}
    function = ordered({"name": "f", "arguments": arguments}, inside)
    call = ordered({"id": "call_1", "type": "function", "function": function}, order)
    messages = [
        {"content": "Hello", "name": "me", "role": "user"},
        {"tool_calls": [call], "role": "assistant", "content": "", "prefix": True},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    ]
    sent = json.loads(json.dumps(messages))
    sent[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
    asked = ChatRequest.model_validate({"messages": sent})
    assert shown(service, asked) == as_transformers_shows_it(messages)

    (document,) = Renderer(tool_model("{{ messages | tojson }}").tokenizer).render(
        parse_row({"messages": [*messages, {"role": "assistant", "content": "Done"}]}, "row 1")
    )
    assert json.dumps(call, ensure_ascii=False) in document.text, "rows of training data as well"


def test_a_field_of_a_message_that_the_template_does_not_read_is_told(service):
    body = {"messages": [{**HELLO[0], "audio": None, "voice": "low", "given": 1}]}
    assert service.unread(ChatRequest.model_validate(body)) == ["messages[].voice", "messages[].given"]


CUT = [
    '{"city": "Par',
    '{"city": "Oslo"} and',
    "[1]",
    '"Oslo"',
    "None",
    '{"no": 1e400}',
    '{"a": ' + "[" * 900,
]
WRITTEN = {
    "as JSON": ("{{ call.function.arguments | tojson }}", lambda text: json.dumps(text)),
    "by their type": (
        "{% set given = call.function.arguments %}{{ given if given is string else given | tojson }}",
        lambda text: text,
    ),
    "as they are": ("{{ call.function.arguments }}", lambda text: text),
    "joined": ("{{ '' + call.function.arguments }}", lambda text: text),
    "by name": (
        "{% for name, value in call.function.arguments | items %}{{ name }}={{ value }};{% endfor %}",
        lambda text: f"arguments={text};",
    ),
}


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("text", CUT, ids=lambda text: text[:20])
def test_a_call_of_earlier_whose_arguments_are_no_object_is_shown_as_text(kind, text):
    written, as_shown = WRITTEN[kind]
    service = tiny_service(tool_model(TOOL_TEMPLATE.replace("{{ call.function | tojson }}", written)))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    body = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO]}
    assert f"<tool_call>{as_shown(text)}</tool_call>" in shown(service, ChatRequest.model_validate(body))
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
    asked = ResponsesRequest.model_validate({"input": [item, {"role": "user", "content": "Hello"}]}).chat
    assert f"<tool_call>{as_shown(text)}</tool_call>" in shown(service, asked)


def test_a_call_that_is_an_object_is_one_for_every_template_that_takes_one():
    for kind, (written, _) in WRITTEN.items():
        tokenizer = tool_model(TOOL_TEMPLATE.replace("{{ call.function | tojson }}", written)).tokenizer
        function = {"name": "f", "arguments": '{"a":1}'}
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }
        (given,) = as_template([message], tokenizer)
        is_text = kind in ("as they are", "joined")
        assert given["tool_calls"][0]["function"]["arguments"] == ('{"a":1}' if is_text else {"a": 1})
