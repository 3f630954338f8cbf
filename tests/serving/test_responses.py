"""OpenAI's newer endpoint, as its own client reads it."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from tiny_chat import chat_model, tool_model
from tiny_server import WEATHER, Running, ScriptedReader, client_of, running

from medusa.serving.output_parser import Part
from medusa.serving.responses import ResponseReplies, ResponsesRequest
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
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", ""),
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
    replies = ResponseReplies(
        ResponsesRequest(input="Hello"), "tiny", lambda text: {"input_ids": [*text]}, ScriptedReader(*parts)
    )
    events = replies.start(1)
    for _ in parts:
        events += replies.part(0, Update())
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    events += replies.end(counts | {"prompt_tokens_details": {}, "medusa": {}})
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
