"""Ollama's endpoints, as its clients send and read them."""

from __future__ import annotations

import json

import httpx
import pytest
from tiny_chat import chat_model, tool_model
from tiny_server import HELLO, TOOL, WEATHER, Running, ScriptedReader, chat, running

from medusa.serving.completion_requests import InfillRequest
from medusa.serving.dialects import ReplyContext
from medusa.serving.ollama import OllamaChatRequest, OllamaGenerateRequest
from medusa.serving.output_parser import Part
from medusa.serving.settings import AccessOptions
from medusa.serving.worker import Update, Worker

OPTIONS = {"temperature": 0, "num_predict": 12}
ASKED = {"model": "tiny", "messages": HELLO, "options": OPTIONS}


@pytest.fixture(scope="module")
def server():
    with running(tool_model()) as started:
        yield started


def post(server: Running, path: str = "chat", **body) -> httpx.Response:
    given = {**ASKED, **body} if path == "chat" else {"model": "tiny", "options": OPTIONS, **body}
    return httpx.post(f"{server.url}/api/{path}", json=given, timeout=60)


def lines_of(reply: httpx.Response) -> list[dict]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def test_an_answer_is_that_of_a_chat_in_lines_or_whole(server):
    same = chat(server, max_tokens=12, temperature=0)
    whole = post(server, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": same.choices[0].message.content}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("tiny", True, "length")
    assert whole["prompt_eval_count"] == same.usage.prompt_tokens and whole["eval_count"] == 12
    *lines, last = lines_of(post(server))
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert {line["done"] for line in lines} == {False} and len(lines) > 1
    assert last["done"] and last["message"]["content"] == "" and last["eval_count"] == 12
    assert last["total_duration"] == last["prompt_eval_duration"] + last["eval_duration"]


def test_a_question_to_generate_is_a_chat_and_raw_text_is_gone_on_with(server):
    system = {"role": "system", "content": "Be kind."}
    same = chat(server, messages=[system, *HELLO], max_tokens=12, temperature=0).choices[0].message.content
    asked = {"prompt": "Hello", "system": "Be kind."}
    assert post(server, "generate", **asked, stream=False).json()["response"] == same
    assert "".join(line["response"] for line in lines_of(post(server, "generate", **asked))) == same
    body = {"prompt": "Hello", "max_tokens": 12, "temperature": 0}
    text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert post(server, "generate", prompt="Hello", raw=True, stream=False).json()["response"] == text


def test_a_suffix_makes_the_text_between(server):
    asked = OllamaGenerateRequest(prompt="a", suffix="b", options={"num_predict": 3, "stop": ["x"]}).asked
    assert (type(asked), asked.prompt, asked.suffix) == (InfillRequest, "a", "b")
    assert (asked.longest, asked.stops, asked.stream) == (3, ["x"], True)
    refused = post(server, "generate", prompt="a", suffix="b")
    assert refused.status_code == 400 and "fill in the middle" in refused.json()["error"]


def test_options_are_those_of_a_chat_and_the_machines_are_reported(server):
    options = {"temperature": 0.5, "top_k": 7, "repeat_penalty": 1.1, "num_predict": -1, "seed": 3}
    asked = OllamaChatRequest(messages=HELLO, options=options, stream=False).asked
    assert (asked.temperature, asked.top_k, asked.repetition_penalty, asked.seed) == (0.5, 7, 1.1, 3)
    assert asked.longest is None and asked.stream is False
    reply = post(server, options={**OPTIONS, "num_ctx": 4096}, keep_alive="5m")
    assert reply.headers["x-ignored-fields"] == "options.num_ctx"


def test_thinking_and_forms_are_those_of_a_chat():
    def of(**more):
        return OllamaChatRequest(messages=HELLO, **more).chat

    thinking = [
        (of(think=each).enable_thinking, of(think=each).reasoning_effort) for each in (True, False, "low")
    ]
    assert thinking == [(True, None), (False, None), (True, "low")]
    assert of(format="json").text_form.constraint == {"type": "object"}
    assert of(format={"enum": [1]}).text_form.constraint == {"enum": [1]} and of(format="").text_form is None


def test_calls_and_what_came_of_them_are_messages_of_a_chat():
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g")]
    messages = [
        *HELLO,
        {"role": "assistant", "content": "So", "thinking": "Hm", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_name": "f"},
        {"role": "tool", "content": "2"},
    ]
    _, answer, *results = (
        each.as_conversation for each in OllamaChatRequest(messages=messages).chat.messages
    )
    assert (answer["content"], answer["reasoning_content"]) == ("So", "Hm")
    identities = [call["id"] for call in answer["tool_calls"]]
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == ['{"a": 1}'] * 2
    assert [(each["name"], each["tool_call_id"]) for each in results] == [*zip("fg", identities, strict=True)]
    offered = OllamaChatRequest(messages=HELLO, tools=[TOOL]).chat.offered
    assert offered == [{"type": "function", "function": WEATHER}]


def test_calls_come_whole_and_reasoning_apart():
    parts = [Part("reasoning", "a"), Part("text", "b"), Part("call", "weather")]
    parts += [Part("arguments", '{"warm":'), Part("arguments", " true}"), Part("call", "time", 1)]
    replies = OllamaChatRequest(messages=HELLO).replies(ReplyContext("tiny", None, ScriptedReader(*parts)))
    events = replies.start(1)
    for _ in parts:
        events += replies.part(0, Update())
    events += replies.end({"prompt_tokens": 7, "completion_tokens": 1})
    said = [{k: v for k, v in event["message"].items() if v and k != "role"} for event in events]
    weather = {"function": {"index": 0, "name": "weather", "arguments": {"warm": True}}}
    time = {"function": {"index": 1, "name": "time", "arguments": {}}}
    called = [{"tool_calls": [weather]}, {"tool_calls": [time]}]
    assert said == [{"thinking": "a"}, {"content": "b"}, *called, {}]
    whole = replies._whole()["message"]
    assert (whole["thinking"], whole["content"], whole["tool_calls"]) == ("a", "b", [weather, time])


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_who_says_nothing_wants_the_model_loaded_or_put_down(server, path):
    for keep_alive, reason in (("5m", "load"), (0, "unload")):
        reply = post(server, path, messages=[], keep_alive=keep_alive).json()
        assert (reply["done"], reply["done_reason"], reply["model"]) == (True, reason, "tiny")
    assert post(server, path, messages=[], model="other").status_code == 404


def test_clients_read_what_there_is_and_what_it_can_do(server):
    def of(path: str) -> dict:
        return httpx.get(f"{server.url}/api/{path}").json()

    major, minor, _ = map(int, of("version")["version"].split("."))
    assert (major, minor) >= (0, 6), "clients ask for 0.6.4"
    (card,) = of("tags")["models"]
    assert card["name"] == card["model"] == "tiny" and len(card["digest"]) == 64
    assert of("ps")["models"][0]["name"] == "tiny"
    facts = post(server, "show").json()
    assert facts["capabilities"] == ["completion", "tools"]
    assert facts["model_info"]["llama.context_length"] == 2048
    assert facts["details"]["family"] == facts["model_info"]["general.architecture"] == "llama"


def test_errors_have_the_form_of_the_protocol(server):
    wrong = [
        (
            {"messages": [{**HELLO[0], "images": ["AAAA"]}]},
            400,
            "messages[0].images: this server",
        ),
        ({"options": {"temperature": 9}}, 400, "temperature"),
        ({"model": "other"}, 404, "the model 'other' is not here"),
        ({"format": {"type": "odd"}}, 400, "format cannot be kept"),
    ]
    for body, status, text in wrong:
        refused = post(server, **body)
        assert refused.status_code == status and text in refused.json()["error"], refused.text
    with running(chat_model(), AccessOptions(api_key=("one",))) as guarded:
        assert post(guarded).json() == {"error": "the API key is missing or wrong"}


def test_a_stream_that_fails_ends_with_an_error(server, monkeypatch):
    tell = Worker._tell
    monkeypatch.setattr(
        Worker, "_tell", lambda self, given: self._end(given.row.tag(), "timeout") or tell(self, given)
    )
    assert list(lines_of(post(server))[-1]) == ["error"]
