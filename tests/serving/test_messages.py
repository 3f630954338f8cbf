"""Anthropic's endpoint, as its clients send and read it; requests of Claude Code in their shape."""

from __future__ import annotations

import json

import httpx
import pytest
from tiny_chat import chat_model, tool_model
from tiny_server import HELLO, WEATHER, Running, ScriptedReader, chat, running

from medusa.serving import answer_streams
from medusa.serving.dialects import ReplyContext
from medusa.serving.messages import MessageReplies, MessagesRequest
from medusa.serving.output_parser import Part
from medusa.serving.service import overloaded
from medusa.serving.settings import AccessOptions
from medusa.serving.worker import Update, Worker

ASKED = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
OFFERED = {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def server():
    with running(tool_model()) as started:
        yield started


def post(server: Running, path: str = "", headers: dict | None = None, **body) -> httpx.Response:
    url = f"{server.url}/v1/messages{path}"
    return httpx.post(url, json={**ASKED, **body}, timeout=60, headers=headers)


def events_of(server: Running, **body) -> list[dict]:
    """The events of a stream, each of which has its type for a name."""
    lines = post(server, **{**body, "stream": True}).text.splitlines()
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert named == [event["type"] for event in events]
    return events


def deltas(events: list[dict], kind: str, field: str) -> str:
    parts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return "".join(part[field] for part in parts if part["type"] == kind)


def test_a_message_is_the_chat_in_other_words(server):
    whole = post(server, system="Be kind.").json()
    system = {"role": "system", "content": "Be kind."}
    same = chat(server, messages=[system, *HELLO], max_tokens=12, temperature=0)
    assert whole["content"] == [{"type": "text", "text": same.choices[0].message.content}]
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    usage = whole["usage"]
    assert usage["output_tokens"] == 12 and usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same.usage.prompt_tokens
    again = post(server, system="Be kind.").json()["usage"]
    assert again["cache_read_input_tokens"] == same.usage.prompt_tokens - 1 and again["input_tokens"] == 1


def test_a_stream_has_the_events_in_their_order(server):
    whole = post(server).json()
    events = events_of(server)
    kinds = [event["type"] for event in events]
    text = [kind for kind in kinds if kind == "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", "ping", *text,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    started = events[0]["message"]
    assert started["content"] == [] and started["stop_reason"] is None
    assert started["usage"]["input_tokens"] == sum(whole["usage"][name] for name in PROMPT)
    assert deltas(events, "text_delta", "text") == whole["content"][0]["text"]
    ended = events[-2]
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 12


PROMPT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


def test_a_stop_sequence_is_named_and_is_the_first_one(server):
    text = post(server).json()["content"][0]["text"]
    body = {"stop_sequences": [text[8:10], text[4:6], "nowhere"]}
    whole = post(server, **body).json()
    first = min(body["stop_sequences"][:2], key=text.find)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", first)
    assert whole["content"] == [{"type": "text", "text": text[: text.find(first)]}]
    assert events_of(server, **body)[-2]["delta"]["stop_sequence"] == first


def test_tools_are_called_and_what_came_of_it_is_read(server):
    pytest.importorskip("llguidance")
    body = {"tools": [OFFERED], "max_tokens": 90}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        whole = post(server, **body, tool_choice=choice).json()
        (call,) = whole["content"]
        assert (call["type"], call["name"], whole["stop_reason"]) == ("tool_use", "weather", "tool_use")
        assert isinstance(call["input"]["warm"], bool)
        events = events_of(server, **body, tool_choice=choice)
        begun = events[1]["content_block"]
        assert (begun["type"], begun["name"], begun["input"]) == ("tool_use", "weather", {})
        assert json.loads(deltas(events, "input_json_delta", "partial_json")) == call["input"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
    came = {"type": "tool_result", "tool_use_id": call["id"], "content": "warm"}
    history = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [came]}]
    function = {"name": "weather", "arguments": json.dumps(call["input"])}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [{"id": call["id"], "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call["id"], "content": "warm"},
    ]
    answer = post(server, tools=[OFFERED], messages=history).json()["content"][0]["text"]
    tools = [{"type": "function", "function": WEATHER}]
    same = chat(server, messages=messages, tools=tools, max_tokens=12, temperature=0)
    assert answer == same.choices[0].message.content


def test_a_tool_choice_says_whether_and_how_often_the_model_calls():
    def of(**choice) -> tuple:
        request = MessagesRequest(messages=HELLO, tools=[OFFERED], tool_choice=choice).chat
        return [tool["function"] for tool in request.offered], request.parallel_tool_calls, request.refused()

    assert of(type="auto") == ([WEATHER], None, None)
    assert of(type="none") == ([], None, None)
    assert of(type="any", disable_parallel_tool_use=True)[1] is False
    assert of(type="tool", name="time")[2][0] == "tool_choice"


def test_reasoning_is_a_block_that_is_signed():
    model = chat_model()
    model.tokenizer.chat_template += "<think>\n"
    with running(model) as server:
        (block,) = post(server).json()["content"]
        assert block["type"] == "thinking" and block["signature"]
        events = events_of(server)
        assert deltas(events, "thinking_delta", "thinking") == block["thinking"] != ""
        assert events[-4]["delta"]["type"] == "signature_delta"


BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a", **MARK}, {"type": "text", "text": "b"}]},
    {"role": "user", "content": "c"},
    {"role": "system", "content": [{"type": "text", "text": "later"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "s"},
            {"type": "text", "text": "Two."},
            {"type": "tool_use", "id": "f", "name": "f", "input": {"é": 1}},
            {"type": "tool_use", "id": "g", "name": "g", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "g", "content": [{"type": "text", "text": "1"}] * 2},
            {"type": "tool_result", "tool_use_id": "f", "content": "no file", "is_error": True},
            {"type": "tool_result", "tool_use_id": "f"},
            {"type": "text", "text": "Go on."},
        ],
    },
]


def test_blocks_of_all_kinds_are_messages_of_a_chat():
    asked = MessagesRequest.model_validate({"system": "first", "messages": BLOCKS, "max_tokens": 5})
    system, user, later, answer, *results, last = (each.as_conversation for each in asked.chat.messages)
    assert system == {"role": "system", "content": "first"}
    assert user == {"role": "user", "content": "a\nb\nc"}, "turns that follow each other are one"
    assert later == {"role": "system", "content": "later"}
    assert (answer["content"], answer["reasoning_content"]) == ("Two.", "Hm")
    functions = [call["function"] for call in answer["tool_calls"]]
    assert functions == [{"name": "f", "arguments": '{"é": 1}'}, {"name": "g", "arguments": "{}"}]
    assert [result["content"] for result in results] == ["1\n1", "Error: no file", ""]
    assert [(result["name"], result["tool_call_id"]) for result in results] == [(n, n) for n in "gff"]
    assert last == {"role": "user", "content": "Go on."}
    assert asked.chat.longest == 5 and not asked.chat.continue_final_message


def test_a_last_message_of_the_assistant_is_continued(server):
    begun = {"role": "assistant", "content": "It is"}
    answer = post(server, messages=[*HELLO, begun]).json()["content"][0]["text"]
    body = {"continue_final_message": True}
    same = chat(server, messages=[*HELLO, begun], max_tokens=12, temperature=0, extra_body=body)
    assert answer == same.choices[0].message.content


def as_claude_code_asks(first_words: str) -> dict:
    """A request in the shape of Claude Code 2.1.197's, with texts of our own."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}
    schema |= {"properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}
    return {
        "model": "tiny",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>It is Sunday.</system-reminder>\n"},
                    {"type": "text", "text": first_words, **MARK},
                ],
            },
            {"role": "system", "content": "There is one kind of agent."},
        ],
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{len(first_words)};"},
            {"type": "text", "text": "You are an agent.", **MARK},
            {"type": "text", "text": "\nRead files before you edit them.", **MARK},
        ],
        "tools": [
            {"name": "Read", "description": "Reads a file.", "input_schema": {**schema}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": '{"device_id":"0"}'},
        "max_tokens": 8,
        "temperature": 0,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


IGNORED = {
    "metadata",
    "context_management",
    "output_config.effort",
    "system[].cache_control",
    "messages[].content[].cache_control",
    "tools[].max_uses",
    "tools[web_search_20250305]",
    "system[x-anthropic-billing-header]",
}


def test_a_turn_of_claude_code_is_answered_and_tells_what_was_ignored(server):
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24", "x-app": "cli"}
    body = as_claude_code_asks("Say hello.")
    reply = post(server, "?beta=true", headers, **body)
    assert reply.status_code == 200 and "event: message_stop" in reply.text
    assert {*reply.headers["x-ignored-fields"].split(", ")} == IGNORED
    assert reply.headers["request-id"] == reply.headers["x-request-id"]


def test_conversations_of_claude_code_begin_with_the_same_tokens(server):
    texts = [
        server.service.text_of(server.service.chat_prompt(MessagesRequest(**as_claude_code_asks(words)).chat))
        for words in ("Say hello.", "Read calc.py")
    ]
    before, after = (text.partition("<system-reminder>") for text in texts)
    assert (
        before[0] == after[0] and "You are an agent.\n\nRead files" in before[0] and "billing" not in texts[0]
    )
    assert "<|system|>There is one kind of agent.<|end|>" in texts[0]


@pytest.mark.parametrize("late", ["", "{{ raise_exception('the system message comes first') }}"])
def test_a_late_system_message_is_said_by_the_user_where_the_template_has_no_place_for_it(late):
    model = chat_model()
    model.tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        f"{late}{{% else %}}<|{{{{ message.role }}}}|>{{{{ message.content }}}}<|end|>"
        "{% endif %}{% endfor %}"
    )
    answer = {"role": "assistant", "content": "Hm"}
    told = {"role": "system", "content": "Be brief."}
    with running(model) as server:
        service = server.service
        for messages, text in (
            ([*HELLO, told], "<|user|>Hello\n\nBe brief.<|end|>"),
            ([*HELLO, answer, told], "<|user|>Hello<|end|><|assistant|>Hm<|end|><|user|>Be brief.<|end|>"),
            ([told, *HELLO], "<|system|>Be brief.<|end|><|user|>Hello<|end|>"),
        ):
            prompt = service.chat_prompt(MessagesRequest(messages=messages).chat)
            assert service.text_of(prompt) == text


def test_tokens_are_counted_as_they_would_be_read(server):
    body = as_claude_code_asks("Say hello.")
    counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body, timeout=60)
    usage = events_of(server, **body)[-2]["usage"]
    assert counted.json() == {"input_tokens": sum(usage[name] for name in PROMPT)}
    assert post(server, "/count_tokens", messages=[]).json()["type"] == "error"


def test_thinking_and_forms_are_those_of_a_chat():
    schema = {"type": "object"}
    output = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    asked = MessagesRequest(messages=HELLO, thinking={"type": "disabled"}, output_config=output, top_k=5)
    chat_request = asked.chat
    assert chat_request.enable_thinking is False and chat_request.reasoning_effort == "low"
    assert chat_request.text_form.constraint == schema and chat_request.top_k == 5
    enabled = MessagesRequest(messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1024})
    assert enabled.chat.enable_thinking is True and [*enabled.unread()] == ["thinking.budget_tokens"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
SHOWN = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
WRONG = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: the type of a block"),
    (
        {"messages": [{"role": "user", "content": [SHOWN]}]},
        "messages[0].content[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "needs id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
        "a message of the user has no blocks of type 'thinking'",
    ),
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences: at most 16"),
    ({"tool_choice": {"type": "any"}}, "tool_choice must name one of tools"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{**OFFERED, "input_schema": {"properties": 5}}]}, "tools[0].input_schema"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
        "output_config.format cannot be kept",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "text"), WRONG, ids=[str(body)[:60] for body, _ in WRONG])
def test_what_cannot_be_had_is_refused_in_words(server, body, text):
    reply = post(server, **body)
    assert reply.status_code == 400 and reply.json()["type"] == "error"
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and text in error["message"], error
    assert reply.json()["request_id"] == reply.headers["x-request-id"]


def test_a_prompt_that_is_too_long_is_told_in_the_words_by_which_clients_shorten_it(server):
    error = post(server, messages=[{"role": "user", "content": "a" * 3000}]).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: 3003 tokens > 2048 maximum")
    error = post(server, messages=[{"role": "user", "content": "a" * 300_000}]).json()["error"]
    assert error["message"].startswith("prompt is too long: This model's maximum context length is 2048")


def test_errors_have_the_names_and_the_statuses_of_the_protocol(server, monkeypatch):
    missing = post(server, model="gpt")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    elsewhere = post(server, headers={"Host": "elsewhere.example"})
    assert (elsewhere.status_code, elsewhere.json()["error"]["type"]) == (403, "permission_error")

    def is_full(*_) -> None:
        raise overloaded()

    monkeypatch.setattr(server.service, "check", is_full)
    full = post(server)
    assert (full.status_code, full.json()["error"]["type"]) == (529, "overloaded_error")
    assert full.headers["retry-after"]


def test_a_key_comes_as_either_client_sends_it():
    with running(chat_model(), AccessOptions(api_key=("one", "two"))) as server:
        for headers in ({"x-api-key": "two"}, {"Authorization": "Bearer two"}):
            assert post(server, headers=headers).status_code == 200
        assert post(server, headers={"x-api-key": "two", "Authorization": "Bearer none"}).status_code == 200
        for headers in ({}, {"x-api-key": "three"}, {"Authorization": "Basic two"}):
            refused = post(server, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_a_stream_that_fails_ends_with_an_error(server, monkeypatch):
    tell = Worker._tell
    monkeypatch.setattr(
        Worker, "_tell", lambda self, given: self._end(given.row.tag(), "timeout") or tell(self, given)
    )
    first, last = events_of(server)
    assert first["type"] == "message_start"
    assert last["type"] == "error" and last["error"]["type"] == "timeout_error"


def test_a_stream_pings_while_a_long_prompt_is_read(server, monkeypatch):
    monkeypatch.setattr(answer_streams, "AWAKE_SECONDS", 0.01)
    server.slowed(monkeypatch, 0.05)
    kinds = [event["type"] for event in events_of(server, max_tokens=1)]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-1] == "message_stop"


def test_a_block_is_closed_before_the_next_is_opened_and_a_call_that_is_cut_is_an_object():
    parts = [Part("reasoning", "a"), Part("text", "b"), Part("text", "c"), Part("call", "weather")]
    parts += [Part("arguments", '{"warm":'), Part("arguments", " true}"), Part("call", "time", 1)]
    parts += [Part("arguments", '{"at": [1', 1)]
    replies = MessageReplies(ReplyContext("tiny", None, ScriptedReader(*parts), 7))
    events = replies.start(1)
    for _ in parts:
        events += replies.part(0, Update())
    counts = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}
    events += replies.end({**counts, "medusa": {}})
    kinds = [(event["type"].removeprefix("content_block_"), event.get("index")) for event in events]
    assert kinds == [
        ("message_start", None),
        ("start", 0), ("ping", None), ("delta", 0), ("delta", 0), ("stop", 0),
        ("start", 1), ("delta", 1), ("delta", 1), ("stop", 1),
        ("start", 2), ("delta", 2), ("delta", 2), ("stop", 2),
        ("start", 3), ("delta", 3), ("stop", 3),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block.get("text", block.get("input", block.get("thinking"))) for block in begun] == [
        "",
        "",
        {},
        {},
    ]
    whole = replies._whole()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in whole["content"][2:]] == [{"warm": True}, {"at": [1]}]
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (4, 3)
