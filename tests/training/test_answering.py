"""Answers of endpoints and of the base, and the file that keeps them: what is kept, cut and refused."""

from __future__ import annotations

import json
from collections import deque

import pytest
import torch
from fake_endpoint import fake_endpoints
from refusals import assert_refused
from tiny_chat import chat_base, chat_tokenizer

from medusa.model import MedusaModel
from medusa.training import endpoints
from medusa.training.distillation.answering import (
    ChatEndpoint,
    Conversation,
    LocalAnswerer,
    repeated_tail,
)
from medusa.training.distillation.distill import AnswerFile, configuration_path
from medusa.training.endpoints import Refusal


@pytest.fixture
def serve():
    with fake_endpoints() as start:
        yield start


@pytest.fixture(autouse=True)
def few_tries_at_once(monkeypatch):
    monkeypatch.setattr(endpoints, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(endpoints, "MAX_ATTEMPTS", 4)


def ask(endpoint, text="hi"):
    return endpoint.answer([{"role": "user", "content": text}], temperature=0.5, max_new_tokens=9, seed=4)


def test_an_endpoint_is_asked_as_openai_compatible_servers_expect(serve, monkeypatch):
    fake = serve()
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    reply = ask(ChatEndpoint(fake.url + "/", "tiny"))
    assert (reply.message["content"], reply.was_cut, reply.num_tokens) == ("you said hi", False, 3)
    (path, request), (key,) = fake.requests[0], fake.keys
    assert path == "/v1/chat/completions"
    assert key == "Bearer secret"
    assert request == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 4,
    }


def test_an_endpoint_that_is_busy_is_asked_again(serve):
    fake = serve(failures=[503, 429, 500])
    assert ask(ChatEndpoint(fake.url, "tiny")).message["content"] == "you said hi"
    assert len(fake.requests) == 4


def test_an_endpoint_that_stays_away_is_given_up_with_its_last_words(serve):
    fake = serve()
    fake.stop()
    assert_refused(lambda: ask(ChatEndpoint(fake.url, "tiny")), ConnectionError, "in 4 tries, last Connect")
    assert_refused(lambda: ChatEndpoint("localhost:8000", "tiny"), ValueError, "must start with http")


def completion(message, usage=None, finish_reason="stop"):
    return {"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}


@pytest.mark.parametrize(
    "garbage", [{"text": "hello"}, [], {"choices": []}, completion({"content": 7}), completion(None)], ids=str
)
def test_one_answer_that_is_none_is_asked_for_again(serve, garbage):
    fake = serve()
    answers = iter([garbage])
    answer = fake.answer
    fake.answer = lambda request: next(answers, None) or answer(request)
    if garbage == []:
        fake.answer = lambda request: next(answers, answer(request))
    reply = ask(ChatEndpoint(fake.url, "tiny"))
    assert reply.message == {"role": "assistant", "content": "you said hi"}
    assert len(fake.requests) == 2


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}], ids=str)
def test_an_endpoint_need_not_count_tokens_and_may_answer_in_parts(serve, usage):
    parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
    fake = serve(body=completion({"role": "assistant", "content": parts}, usage))
    reply = ask(ChatEndpoint(fake.url, "tiny"))
    assert (reply.message["content"], reply.num_tokens) == ("one, two", 0)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_and_tool_calls_are_kept_and_tools_are_sent(serve, name):
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    message = {"content": None, name: "Look.", "tool_calls": [{"id": "1", "function": function}]}
    fake = serve(body=completion(message, finish_reason="tool_calls"))
    reply = ChatEndpoint(fake.url, "tiny").answer(
        [{"role": "user", "content": "hi"}],
        temperature=0,
        max_new_tokens=9,
        seed=4,
        template_options={"tools": [{"type": "function"}], "enable_thinking": True},
    )
    parsed = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert reply.message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Look.",
        "tool_calls": [parsed],
    }
    (_, request) = fake.requests[0]
    assert request["tools"] == [{"type": "function"}]
    assert request["chat_template_kwargs"] == {"enable_thinking": True}


def deep(levels):
    value = "x"
    for _ in range(levels):
        value = [value]
    return value


def call_of(arguments):
    return {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


ODD = "did not answer as an OpenAI-compatible chat server does"
PACKED = {"raw": b"no gzip", "headers": {"Content-Encoding": "gzip"}}
REFUSED = [  # how it answers; the exception, its words, and how often it is asked
    ({"failures": [503] * 4}, ConnectionError, "no answer in 4 tries, last HTTP 503: ... says no", 4),
    ({"failures": [401]}, PermissionError, "HTTP 401: ... says no ... check OPENAI_API_KEY ... 'tiny'", 1),
    ({"failures": [403]}, PermissionError, "HTTP 403: ... says no ... check OPENAI_API_KEY ... 'tiny'", 1),
    ({"failures": [404]}, PermissionError, "HTTP 404: ... says no ... check OPENAI_API_KEY ... 'tiny'", 1),
    ({"failures": [400]}, Refusal, "HTTP 400: ... says no", 1),
    ({"body": {"text": "hello"}}, Refusal, ODD, 4),
    ({"body": completion({"content": "half \ud83d"})}, Refusal, ODD, 4),
    ({"body": completion({"content": "x", "reasoning": "half \udc00"})}, Refusal, ODD, 4),
    ({"body": completion({"content": "x", "reasoning": {"a": 1}})}, Refusal, ODD, 4),
    ({"body": completion(call_of({"a": deep(100)}))}, Refusal, ODD, 4),
    ({"body": completion(call_of("[" * 100_000))}, Refusal, ODD, 4),
    ({"raw": b"[" * 100_000}, Refusal, ODD, 4),
    ({"raw": b"9" * 5000}, Refusal, ODD, 4),
    (PACKED, Refusal, "sent a body that cannot be unpacked", 4),
]


@pytest.mark.parametrize(("how", "kind", "words", "count"), REFUSED, ids=lambda each: str(each)[:50])
def test_an_answer_that_is_none_refuses_its_prompt_or_ends_the_run(serve, how, kind, words, count):
    fake = serve(**how)
    assert_refused(lambda: ask(ChatEndpoint(fake.url, "tiny")), kind, words)
    assert len(fake.requests) == count


@pytest.mark.parametrize("count", ["1e999", "-1e999", "NaN", "-3", "[]", '"many"', "9" * 300])
def test_a_count_of_tokens_that_is_none_costs_no_answer(serve, count):
    usage = json.dumps(completion({"content": "yes"}, {"completion_tokens": 0})).replace(
        ": 0}", f": {count}}}"
    )
    fake = serve(raw=usage.encode())
    assert ask(ChatEndpoint(fake.url, "tiny")).num_tokens == 0


@pytest.mark.parametrize("asked", ["3600", "9" * 400, "²", "Wed, 21 Oct 2099 07:28:00 GMT"])
def test_a_long_wait_is_bounded_and_told(serve, monkeypatch, asked):
    waits, said = [], []
    monkeypatch.setattr(endpoints.time, "sleep", waits.append)
    fake = serve(failures=[503], headers={"Retry-After": asked.encode("utf-8").decode("latin-1")})
    ask(ChatEndpoint(fake.url, "tiny", say=said.append))
    assert waits == [60 if asked == "3600" else 0.001]
    assert said == (
        [f"{fake.url}/chat/completions asks to wait 3600 s; waiting 60 s"] if asked == "3600" else []
    )


def test_a_very_long_torn_line_is_cut_and_nothing_else(tmp_path):
    path = tmp_path / "rows.jsonl"
    with AnswerFile(path, {}) as answers:
        answers.append({"index": 0, "messages": [], "finish_reason": "stop", "note": "é" * 50_000})
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"index": 1, "text": "' + b"y" * 200_000)
    with AnswerFile(path, {}):
        assert path.read_bytes() == kept


def test_an_output_that_one_run_fills_is_refused_to_another(tmp_path):
    path = tmp_path / "rows.jsonl"
    with AnswerFile(path, {}) as answers:
        with pytest.raises(BlockingIOError, match=r"rows.jsonl' is being filled by another run.*wait until"):
            AnswerFile(path, {"seed": 1})
        answers.append({"index": 0, "messages": [], "finish_reason": "stop"})
    with AnswerFile(path, {}) as answers:
        assert len(list(answers.rows())) == 1


def test_an_output_of_another_configuration_is_refused_by_the_option_that_differs(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"index": 0, "messages": [], "finish_reason": "stop"}
    with AnswerFile(path, {"seed": 0, "temperatures": (0.0,)}) as answers:
        answers.append(row)
    with AnswerFile(path, {"seed": 0, "temperatures": (0.0,)}):
        pass
    with pytest.raises(ValueError, match=r"seed was 0 and is 1.*choose another output"):
        AnswerFile(path, {"seed": 1, "temperatures": (0.0,)})
    configuration_path(path).unlink()
    with pytest.raises(ValueError, match=r"rows\.config\.json is missing"):
        AnswerFile(path, {"seed": 0, "temperatures": (0.0,)})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"index": 0\n{"a": 1}\n', r"row 1 is not valid JSON .*; remove that line"),
        (b"\xff\xfe\n", r"row 1 is not valid JSON"),
        (b"[" * 100_000 + b"\n", r"row 1 is not valid JSON"),
        (b'{"a": 1}\n', r"row 1 must hold index, a number, messages, a list, and finish_reason, got"),
        (b'{"index": "0", "messages": [], "finish_reason": "stop"}\n', r"row 1 must hold index, a number"),
        (b'{"index": 0, "messages": 7, "finish_reason": "stop"}\n', r"row 1 must hold index, a number"),
    ],
    ids=lambda each: str(each[:12]),
)
def test_a_damaged_row_in_the_output_is_named(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    with AnswerFile(path, {}) as answers:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"rows\.jsonl {message}"):
            list(answers.rows())


def test_an_answer_that_repeats_itself_is_cut_where_it_began_to():
    loop = [5, 6, 7]
    assert repeated_tail([1, 2, 3, 4] + loop * 17) == 48
    assert repeated_tail([1, 2, 3, 4] + loop * 16) == 0
    assert repeated_tail([9] * 49) == 48
    assert repeated_tail(list(range(60)) * 3) == 120
    assert repeated_tail(list(range(60)) * 2) == 0
    assert repeated_tail(list(range(200))) == 0


def test_stopping_loops_can_be_turned_off():
    base = chat_base()
    with torch.no_grad():  # this model says token 65 for ever
        base.lm_head.weight.zero_()
        base.lm_head.weight[65] = 1.0
        base.model.norm.weight.zero_()

    model = MedusaModel(base, tokenizer=chat_tokenizer())

    def answer(stop_loops):
        answerer = LocalAnswerer(model, 1, max_new_tokens=80, stop_loops=stop_loops)
        waiting = deque([Conversation(0, [{"role": "user", "content": "Hello"}])])
        ((_, reply),) = answerer.replies(
            lambda: waiting.popleft() if waiting else None, lambda _: None, lambda: False
        )
        return reply.num_tokens, reply.was_cut

    assert answer(stop_loops=True) == (1, True)
    assert answer(stop_loops=False) == (80, True)
