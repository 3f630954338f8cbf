"""OpenAI's newer endpoint, as its own client reads it."""

from __future__ import annotations

import json
import re

import httpx
import openai
import pytest
from tiny_chat import chat_model, tool_model
from tiny_server import WEATHER, Running, ScriptedReader, client_of, running

from medusa.serving import answer_streams
from medusa.serving.dialects import ReplyContext
from medusa.serving.output_parser import Part
from medusa.serving.responses import ResponsesRequest
from medusa.serving.worker import Update, Worker

ASKED = {"model": "tiny", "input": "Hello", "max_output_tokens": 12, "temperature": 0}
OFFERED = {"type": "function", **WEATHER, "strict": True}


@pytest.fixture(scope="module")
def server():
    with running(tool_model()) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as opened:
        yield opened


def post(server: Running, **body) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={**ASKED, **body}, timeout=60)


def chat_of(client: openai.OpenAI, messages: list[dict], **more) -> str:
    asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, **more}
    return client.chat.completions.create(**asked).choices[0].message.content


def test_a_response_is_the_chat_in_other_words(client):
    whole = client.responses.create(**ASKED, instructions="Be kind.", metadata={"a": "b"})
    system = {"role": "system", "content": "Be kind."}
    assert whole.output_text == chat_of(client, [system, {"role": "user", "content": "Hello"}])
    (message,) = whole.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.instructions, whole.metadata, whole.model) == ("Be kind.", {"a": "b"}, "tiny")
    usage = whole.usage
    assert usage.output_tokens == 12 and usage.total_tokens == usage.input_tokens + 12
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.model_extra["medusa"]["num_steps"] <= 12


def test_a_stream_tells_of_each_item_and_ends_with_the_whole(client):
    events = list(client.responses.create(**ASKED, stream=True))
    whole = client.responses.create(**ASKED)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    text = [kind for kind in kinds if kind == "output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *text,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[0].response.output == [] and events[-1].response.usage.output_tokens == 12
    with client.responses.stream(**ASKED, extra_body={"stop": said[5:8]}) as stream:
        ended = stream.get_final_response()
    assert ended.status == "completed" and ended.output_text == said[: said.find(said[5:8])]


def test_tools_are_called_and_what_came_of_it_is_read(client, server):
    pytest.importorskip("llguidance")
    asked = {**ASKED, "tools": [OFFERED], "max_output_tokens": 90}
    for choice in ("required", {"type": "function", "name": "weather"}):
        whole = client.responses.create(**asked, tool_choice=choice)
        (call,) = whole.output
        assert (call.type, call.name, whole.status) == ("function_call", "weather", "completed")
        events = list(client.responses.create(**asked, tool_choice=choice, stream=True))
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call.arguments and len(deltas) > 1
        assert isinstance(json.loads(call.arguments)["warm"], bool)
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    history = [{"role": "user", "content": "Hello"}, call.model_dump(exclude_none=True), output]
    called = {"id": call.call_id, "type": "function"}
    called["function"] = {"name": "weather", "arguments": call.arguments}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "warm"},
    ]
    tools = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    answer = client.responses.create(**{**asked, "input": history, "max_output_tokens": 12})
    assert answer.output_text == chat_of(client, messages, tools=tools)


def test_a_form_is_kept(client):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "name": "a", "schema": {"enum": ["yes", "no"]}, "strict": True}
    whole = client.responses.create(**{**ASKED, "max_output_tokens": 40}, text={"format": form})
    assert json.loads(whole.output_text) in ("yes", "no") and whole.status == "completed"
    assert whole.text.format.schema_ == {"enum": ["yes", "no"]}


def test_reasoning_is_an_item_of_its_own():
    model = chat_model()
    model.tokenizer.chat_template += "<think>\n"
    with running(model) as server:
        whole = post(server).json()
        assert [item["type"] for item in whole["output"]] == ["reasoning"]
        thought = whole["output"][0]["content"][0]["text"]
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        events = list(client_of(server).responses.create(**ASKED, stream=True))
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == thought


def test_a_conversation_of_all_kinds_of_items_is_a_chat():
    called = [
        {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in ("f", "g")
    ]
    body = {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm"}],
            },
            *called,
            {"type": "function_call_output", "call_id": "g", "output": "1"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done"}]},
        ],
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": True,
        "top_k": 5,
    }
    asked = ResponsesRequest.model_validate(body)
    user, calls, output, said = asked.chat.messages
    assert user.as_conversation == {"role": "user", "content": "ab"}
    assert [call.function.name for call in calls.tool_calls] == ["f", "g"] and calls.reasoning_content == "Hm"
    assert output.as_conversation == {"role": "tool", "content": "1", "name": "g", "tool_call_id": "g"}
    assert (said.content, said.reasoning_content) == ("Done", "So")
    assert (asked.chat.reasoning_effort, asked.chat.top_k) == ("low", 5)
    assert set(asked.unread()) == {"store", "reasoning.summary"}


def test_fields_that_are_not_read_are_told_in_the_header(server):
    reply = post(server, store=True, reasoning={"summary": "auto", "effort": "low"})
    assert set(reply.headers["x-ignored-fields"].split(", ")) == {
        "store",
        "reasoning.summary",
        "reasoning.effort",
    }


LARK = {"type": "grammar", "syntax": "lark"}
LARK["definition"] = 'start: "*** Begin\\n" line line? "*** End"\nline: /[a-c]{1,3}/ "\\n"'
FREE = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": LARK}
WRONG = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
    ({"background": True}, "background", "keeps no answers"),
    ({"conversation": "c"}, "conversation", "keeps no answers"),
    ({"input": []}, "input", ""),
    ({"input": [{"role": "user"}]}, "input[0]", "needs content"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type", ""),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]},
        "input[0].content[0].type",
        "",
    ),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "name one of tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0]", "a tool of type 'custom' needs name"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format", "needs"),
    ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "a"}]}, "input[0]", "needs input"),
    (
        {"tools": [FREE | {"format": {**LARK, "definition": "start: nowhere"}}], "tool_choice": "required"},
        "tools[].format",
        "cannot be kept",
    ),
    ({"tools": [{**OFFERED, "parameters": {"properties": 5}}]}, "tools[0].parameters", "must be an object"),
    ({"tool_choice": "required"}, "tool_choice", ""),
    ({"input": [{"role": "user", "content": "a"}] * 2048, "instructions": "Be kind."}, "input", "2049"),
    ({"max_output_tokens": 0}, "max_output_tokens", ""),
    ({"input": "x" * 5000}, "input", ""),
    ({"n": 2}, "n", ""),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "needs schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "odd"}}}},
        "text.format",
        "",
    ),
]


@pytest.mark.parametrize(("given", "field", "text"), WRONG, ids=[str(each[0])[:50] for each in WRONG])
def test_what_cannot_be_had_is_refused_with_the_name_of_its_field(server, given, field, text):
    reply = post(server, **given)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == field and text in error["message"], error


def test_a_stream_that_fails_ends_with_the_failed_response(client, server, monkeypatch):
    tell = Worker._tell
    monkeypatch.setattr(
        Worker, "_tell", lambda self, given: self._end(given.row.tag(), "timeout") or tell(self, given)
    )
    *_, last = client.responses.create(**ASKED, stream=True)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "timeout" and "longer than" in last.response.error.message


def test_the_lines_of_a_stream_name_their_events(server):
    lines = post(server, stream=True).text.splitlines()
    data = [(number, json.loads(line[6:])) for number, line in enumerate(lines) if line.startswith("data: {")]
    assert len(data) > 10
    assert [lines[number - 1] for number, _ in data] == [f"event: {event['type']}" for _, event in data]


def test_an_item_is_closed_before_the_next_is_opened_and_what_was_told_stays_as_it_was():
    parts = [Part("reasoning", "a"), Part("text", "b"), Part("text", "c")]
    parts += [
        Part("call", "weather"),
        Part("arguments", "{}"),
        Part("call", "weather"),
        Part("arguments", "1"),
    ]
    events = scripted(ResponsesRequest(input="Hello"), *parts)
    told = [(event["type"], event["item"]["type"]) for event in events if "item" in event]
    kinds = ["reasoning", "message", "function_call", "function_call"]
    steps = ("response.output_item.added", "response.output_item.done")
    assert told == [(step, kind) for kind in kinds for step in steps]
    assert events[0]["response"]["output"] == [], "though items came later"
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("arguments", item.get("content")) for item in added] == [[], [], "", ""]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"] and done[1]["content"][0]["text"] == "bc"
    assert [item["arguments"] for item in done[2:]] == ["{}", "1"]


def as_codex_asks() -> dict:
    """A request in the shape of Codex 0.171.0's, with texts of our own."""

    def message(role: str, *texts: str) -> dict:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}

    schema = {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}
    close = {"type": "function", "name": "close_agent", "strict": False, "parameters": schema}
    return {
        "model": "tiny",
        "stream": True,
        "input": [
            message("developer", "You are an agent."),
            message("developer", "Commands run in a sandbox.", "Skills lie in folders."),
            message("user", "<environment_context><cwd>/repo</cwd></environment_context>"),
            message("user", "Say hello."),
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "strict": False, "parameters": schema},
            {"type": "namespace", "name": "agents", "description": "Of agents.", "tools": [close]},
            FREE,
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0",
        "client_metadata": {"turn_id": "0"},
        "max_output_tokens": 8,
    }


def test_a_turn_of_codex_is_answered_and_tells_what_was_ignored(server):
    reply = post(server, **as_codex_asks())
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] in ("response.incomplete", "response.completed")
    assert {*reply.headers["x-ignored-fields"].split(", ")} == {
        "store",
        "include",
        "prompt_cache_key",
        "client_metadata",
        "reasoning.summary",
        "tools[].external_web_access",
        "tools[web_search]",
        "tools[local_shell]",
        "tools[namespace].description",
    }


def test_a_namespace_is_unfolded_and_a_custom_tool_is_a_function_of_one_text():
    functions = [tool["function"] for tool in ResponsesRequest(**as_codex_asks()).chat.offered]
    assert [function["name"] for function in functions] == [
        "exec_command",
        "agents.close_agent",
        "apply_patch",
    ]
    assert functions[1]["parameters"]["required"] == ["target"]
    parameters = functions[2]["parameters"]
    assert parameters["properties"] == {"input": {"type": "string"}} and parameters["required"] == ["input"]
    assert functions[2]["description"].startswith(
        "Edits files.\n\nThe input keeps to this lark grammar:\nstart:"
    )


def scripted(request: ResponsesRequest, *parts: Part) -> list[dict]:
    """The events of an answer of these parts."""
    context = ReplyContext("tiny", lambda text: {"input_ids": [*text]}, ScriptedReader(*parts))
    replies = request.replies(context)
    events = replies.start(1)
    for _ in parts:
        events += replies.part(0, Update())
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return [*events, *replies.end(counts | {"prompt_tokens_details": {}, "medusa": {}})]


def test_calls_of_these_tools_are_items_as_codex_reads_them():
    request = ResponsesRequest(**as_codex_asks())
    parts = [Part("call", "agents.close_agent"), Part("arguments", '{"target": "a"}')]
    texts = ('{"inp', 'ut": "a\\', "n\\ud83d", '\\ude00 \\"b', '"', "}")
    parts += [Part("call", "apply_patch", 1), *(Part("arguments", text, 1) for text in texts)]
    events = scripted(request, *parts)
    closed, patched = events[-1]["response"]["output"]
    assert (closed["name"], closed["namespace"]) == ("close_agent", "agents")
    assert closed["arguments"] == '{"target": "a"}'
    assert (patched["type"], patched["name"]) == ("custom_tool_call", "apply_patch")
    assert patched["input"] == 'a\n😀 "b'
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["a", "\n", '😀 "b']
    (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == patched["input"] and "arguments" not in patched and "namespace" not in patched


def test_an_input_that_was_cut_or_has_another_name_is_given_as_it_is():
    for arguments, text in (('{"input": "a', "a"), ('{"patch": "a"}', '{"patch": "a"}'), ("{", "{")):
        request = ResponsesRequest(**as_codex_asks())
        *_, last = scripted(request, Part("call", "apply_patch"), Part("arguments", arguments))
        assert last["response"]["output"][0]["input"] == text


def test_a_custom_tool_that_must_be_called_keeps_to_its_grammar(client):
    pytest.importorskip("llguidance")
    asked = {**ASKED, "max_output_tokens": 60}
    regex = {"type": "grammar", "syntax": "regex", "definition": "[xyz]{3}"}
    for form, rule in ((LARK, r"\*\*\* Begin\n([a-c]{1,3}\n){1,2}\*\*\* End"), (regex, "[xyz]{3}")):
        tools = [{**FREE, "format": form}]
        for choice in ("required", {"type": "custom", "name": "apply_patch"}):
            (call,) = client.responses.create(**asked, tools=tools, tool_choice=choice).output
            assert (call.type, call.name) == ("custom_tool_call", "apply_patch")
            assert re.fullmatch(rule, call.input)
    with client.responses.stream(**asked, tools=tools, tool_choice="required") as stream:
        deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input and len(deltas) > 1
    (free,) = client.responses.create(
        **asked, tools=[{"type": "custom", "name": "a"}], tool_choice="required", extra_body={"stop": "zzz"}
    ).output
    assert free.type == "custom_tool_call"


def test_an_answer_that_is_the_input_of_a_tool_is_no_call_though_the_model_sees_the_tool():
    asked = {"tools": [FREE, OFFERED], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    chat = ResponsesRequest(input="Hello", **asked).chat
    assert (chat.may_call, chat.must_call, len(chat.offered)) == ([], [], 2)
    assert ResponsesRequest(input="Hello", **{**asked, "tool_choice": "auto"}).chat.may_call != []


def test_what_came_of_these_calls_is_read_with_the_turn_in_which_they_were_made():
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I edit."}]}
    call = {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": 'a "b"'}
    other = {"type": "function_call", "call_id": "b", "namespace": "agents", "name": "close_agent"}
    came = [{"type": "custom_tool_call_output", "call_id": "a", "output": "Done"}]
    came += [{"type": "function_call_output", "call_id": "b", "output": "Closed"}]
    body = {"input": [{"role": "user", "content": "Go"}, said, call, {**other, "arguments": "{}"}, *came]}
    _, answer, *results = (each.as_conversation for each in ResponsesRequest(**body).chat.messages)
    functions = [call["function"] for call in answer["tool_calls"]]
    assert answer["content"] == "I edit." and functions[0]["arguments"] == '{"input": "a \\"b\\""}'
    assert [function["name"] for function in functions] == ["apply_patch", "agents.close_agent"]
    assert [(each["name"], each["content"]) for each in results] == [
        ("apply_patch", "Done"),
        ("agents.close_agent", "Closed"),
    ]


def test_a_stream_has_an_event_now_and_then_while_a_long_prompt_is_read(server, monkeypatch):
    monkeypatch.setattr(answer_streams, "AWAKE_SECONDS", 0.01)
    server.slowed(monkeypatch, 0.05)
    lines = post(server, stream=True, max_output_tokens=1).text.splitlines()
    assert lines.count("event: response.in_progress") > 1
