"""What is lost when something goes wrong: the requests concerned, and no others."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx
import openai
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.testclient import TestClient
from tiny_chat import TOOL_TEMPLATE, chat_model, save_chat_model, tool_model
from tiny_server import HELLO, Running, client_of, expected, running, tiny_service, wait_until

from medusa.acceptance.grammar import GrammarProcessor
from medusa.acceptance.sampling import OccurrencePenalty
from medusa.base.cache import TreeCache
from medusa.decoding import batch as decoding_batch
from medusa.decoding.batch import Batch
from medusa.serving import answer_streams, endpoints, gate
from medusa.serving.application import create_application
from medusa.serving.chat_requests import ChatRequest
from medusa.serving.completion_requests import CompletionRequest
from medusa.serving.model_pool import ModelPool
from medusa.serving.replies import Replies
from medusa.serving.responses import ResponseReplies
from medusa.serving.service import Service
from medusa.serving.settings import AccessOptions

LONG = [{"role": "user", "content": "long " * 50}]
ASKED = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "temperature": 0}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
]


@pytest.fixture(scope="module")
def server():
    with running(chat_model()) as started:
        yield started


@pytest.fixture(scope="module")
def text() -> str:
    return expected(chat_model(), HELLO, do_sample=False, max_new_tokens=60)[1]


def whole(server: Running, **more) -> str:
    return client_of(server).chat.completions.create(**{**ASKED, **more}).choices[0].message.content


def post(server: Running, body: dict) -> socket.socket:
    """A connection that has asked, and has read nothing."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(head.encode() + data)
    return connection


def test_clients_that_read_slowly_or_vanish_keep_nobody_waiting(server, text):
    endless = {**ASKED, "max_tokens": 200, "ignore_eos": True, "stream": True}
    slow = [post(server, endless) for _ in range(2)]
    assert whole(server) == text
    wait_until(lambda: server.num_active == 0)  # answered, though nobody has read it
    received = b""
    while b"[DONE]" not in received:
        received += slow[0].recv(65536)
    for connection in slow:
        connection.close()
    for _ in range(8):
        post(server, endless).close()
    assert whole(server) == text
    wait_until(lambda: server.num_active == 0)


def test_half_a_body_is_given_up(server, text, monkeypatch):
    monkeypatch.setattr(endpoints, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        assert b" 408 " in half.recv(65536)
    assert whole(server) == text and server.num_active == 0


def assert_lost_alone(server: Running, text: str, **asked) -> None:
    """What is ``asked`` gets an error; who asks meanwhile gets the ``text``."""
    with ThreadPoolExecutor(4) as pool:
        fine = [pool.submit(whole, server) for _ in range(3)]
        with pytest.raises(openai.InternalServerError, match="the server failed on this answer"):
            whole(server, **asked)
        assert [each.result() for each in fine] == [text] * 3


def fails(*_args, **_options):
    raise ArithmeticError("secret")


def test_a_processor_that_raises_loses_its_own_request(server, text, monkeypatch):
    monkeypatch.setattr(OccurrencePenalty, "__call__", fails)
    assert_lost_alone(server, text, presence_penalty=1)


def out_of_memory(state):
    raise torch.OutOfMemoryError("no memory for the prompt")


def no_numbers(state):
    for layer in state.cache.tree_layers:
        layer.entries[1][0, :, 0] = float("nan")


@pytest.mark.parametrize("harm", [out_of_memory, no_numbers])
def test_a_prompt_that_fails_or_gives_no_numbers_loses_its_own_request(server, text, monkeypatch, harm):
    fill = decoding_batch.prefill_request

    def begin(base, request, *given, **options):
        state, advance = fill(base, request, *given, **options)
        if int(request.lengths[0]) > 100:
            harm(state)
        return state, advance

    monkeypatch.setattr(decoding_batch, "prefill_request", begin)
    assert_lost_alone(server, text, messages=LONG)


@pytest.mark.slow  # a race: an answer that ends before the kill arrives loses nothing
def test_a_thread_that_is_killed_loses_what_was_under_way_and_answers_who_comes_later(server, text):
    stream = client_of(server).chat.completions.create(
        **{**ASKED, "max_tokens": 480}, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    ident = ctypes.c_ulong(server.service.worker._thread.ident)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
    with pytest.raises(openai.APIError, match="the server failed on this answer"):
        list(stream)
    assert whole(server) == text and httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.slow
def test_a_process_that_is_killed_loses_what_was_under_way_and_answers_when_started_again(tmp_path):
    base, heads = save_chat_model(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "medusa", "serve", "--base", base, "--heads", heads]
    url, answers = f"http://127.0.0.1:{port}", []
    for _ in range(2):
        process = subprocess.Popen([*command, "--port", str(port), "--served-model-name", "tiny"])
        try:
            wait_until(lambda: is_healthy(url), 120)
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            answers.append(client.chat.completions.create(**ASKED).choices[0].message.content)
            stream = client.chat.completions.create(
                **{**ASKED, "max_tokens": 480}, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            process.send_signal(signal.SIGKILL)
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                list(stream)
        finally:
            process.kill()
            process.wait()
    assert answers == [expected(chat_model(), HELLO, do_sample=False, max_new_tokens=60)[1]] * 2


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


MIXED = [
    ("chat/completions", {}),
    ("chat/completions", {"tools": TOOLS, "store": True}),
    ("chat/completions", {"tools": TOOLS, "tool_choice": "required", "stop": ["xyz"]}),
    ("chat/completions", {"response_format": {"type": "json_object"}, "tools": TOOLS, "logprobs": True}),
    ("chat/completions", {"structured_outputs": {"regex": "[a-z]{1,30}"}, "chat_template_kwargs": {"a": 1}}),
    ("completions", {"echo": True, "n": 2}),
    (
        "completions",
        {"structured_outputs": {"choice": ["yes", "no"]}, "stream_options": {"include_depths": True}},
    ),
    ("responses", {}),
    ("responses", {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required", "store": False}),
]
"""Where a visitor asks, and with which fields beside."""


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_churn_lets_neither_memory_nor_threads_nor_files_grow():
    """MEDUSA_CHURN_SECONDS=600 is two hours of users who ask every five seconds."""
    seconds = float(os.environ.get("MEDUSA_CHURN_SECONDS", "60"))
    chance, seen, num_asked = random.Random(0), [], 0
    of_little = {"prefix_mib": 1, "allow_plain": True}  # full within seconds
    with running(tool_model(TOOL_TEMPLATE + "<think>"), **of_little) as server:

        async def visit(client: httpx.AsyncClient) -> None:
            words = [{"role": "user", "content": "Hello " * chance.randint(1, 40)}]
            body = {**ASKED, "messages": words, "max_tokens": chance.randint(1, 60), "stream": True}
            body |= {"temperature": chance.choice([0, 1]), "medusa_plain": chance.random() < 0.1}
            path, more = chance.choice(MIXED)
            body |= more
            if path == "responses":
                body = {"input": words, "max_output_tokens": body["max_tokens"], "stream": True, **more}
            elif path == "completions":
                body |= {"prompt": "Hello " * chance.randint(1, 40), "messages": None}
            leaves_after = chance.choice([0, 1, 3, 10**6])
            async with client.stream("POST", f"{server.url}/v1/{path}", json=body) as reply:
                assert reply.status_code in (200, 503), await reply.aread()
                async for _ in reply.aiter_lines():
                    leaves_after -= 1
                    if leaves_after < 0:
                        break

        async def churn(until: float) -> int:
            async with httpx.AsyncClient(timeout=600) as client:
                number = 0
                while time.monotonic() < until:
                    await asyncio.gather(*(visit(client) for _ in range(6)))
                    number += 6
                return number

        began = time.monotonic()
        while time.monotonic() < began + seconds:
            num_asked += asyncio.run(churn(min(time.monotonic() + seconds / 12, began + seconds)))
            wait_until(lambda: server.num_active == 0)
            gc.collect()
            seen.append((resident_mib(), threading.active_count(), len(os.listdir("/proc/self/fd"))))
    settled, last = seen[len(seen) // 3], seen[-1]
    print(f"{num_asked} requests; MiB, threads, files: {seen}")
    assert last[0] <= settled[0] + 16, seen
    assert last[1] <= settled[1] + 1 and last[2] <= settled[2] + 2, seen


def test_ended_answers_leave_no_cache_but_stored_prefixes_without_the_collector(monkeypatch):
    """All ways to end: n, a form, a stop string, a client that leaves, a processor that raises."""

    def ask_in_all_ways(server: Running, number: int) -> None:
        url, body = f"{server.url}/v1/chat/completions", {**ASKED, "temperature": 1}
        for more in ({"n": 2}, {"response_format": {"type": "json_object"}}, {"stop": ["a", "e"]}):
            httpx.post(url, json={**body, "seed": number, **more}, timeout=60).raise_for_status()
        endless = {**body, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url, json=endless, timeout=60) as left:
            next(left.iter_lines())
        with monkeypatch.context() as patch:
            patch.setattr(OccurrencePenalty, "__call__", fails)
            assert httpx.post(url, json={**body, "presence_penalty": 1}, timeout=60).status_code == 500
        wait_until(lambda: server.num_active == 0)

    def counted(server: Running) -> tuple[int, int]:
        """Caches that are not stored prefixes, and grammars."""
        found = [type(each) for each in gc.get_objects() if type(each) in (TreeCache, GrammarProcessor)]
        num_kept = len(server.service.worker.batches[False].prefixes)
        return found.count(TreeCache) - num_kept, found.count(GrammarProcessor)

    with running(chat_model(), prefix_mib=1) as server:
        monkeypatch.setattr(logging.getLogger("medusa.serving"), "disabled", True)  # records hold tracebacks
        ask_in_all_ways(server, 0)  # drafters keep a cache of their own for each size of a batch
        gc.collect()
        before = counted(server)
        gc.disable()
        try:
            for number in range(1, 4):
                ask_in_all_ways(server, number)
            wait_until(lambda: counted(server) == before, seconds=2)
        finally:
            gc.enable()


LARGE = {
    "prediction": {"prediction": {"type": "content", "content": "1" * 200_000}, "n": 4},
    "fields": {f"k{number}": 1 for number in range(100_000)},
    "variables of the template": {"chat_template_kwargs": {f"k{number}": 1 for number in range(100_000)}},
    "metadata": {"metadata": {f"k{number}": 1 for number in range(150_000)}},
    "log-probabilities": {
        "logprobs": True,
        "top_logprobs": 20,
        "n": 4,
        "max_tokens": 200,
        "ignore_eos": True,
    },
}
"""Bodies and answers that take long to read or to write."""


@pytest.fixture(scope="module")
def roomy():
    """A server whose prompts and answers may be long."""
    with running(chat_model(context=2**18), cache_mib=4096) as started:
        yield started


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
def test_no_body_keeps_the_others_waiting(roomy, body):
    path, told = "chat/completions", {"messages": HELLO, "max_tokens": 8}
    if "metadata" in body:
        path, told = "responses", {"input": "Hello"}
    data = json.dumps({**told, "temperature": 0, **body})

    def longest_wait() -> float:
        """Of who asks for the health of the server meanwhile."""
        waits = [0.0]
        with ThreadPoolExecutor(1) as pool, httpx.Client() as client:
            asked = pool.submit(httpx.post, f"{roomy.url}/v1/{path}", content=data, timeout=300)
            while not asked.done():
                began = time.monotonic()
                assert client.get(f"{roomy.url}/health", timeout=60).status_code == 200
                waits.append(time.monotonic() - began)
                time.sleep(0.002)
        assert asked.result().status_code in (200, 400)
        return max(waits)

    gc.collect()
    gc.freeze()  # as the command has it
    try:  # a machine that stood still meanwhile does not do so every time
        assert any(longest_wait() < 0.2 for _ in range(3))
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "completions"])
def test_what_grows_with_a_body_or_an_answer_is_computed_off_the_event_loop(
    server, monkeypatch, path, stream
):
    found: dict[str, set[bool]] = {}
    watched = [(Service, "unread"), (answer_streams, "usage_of"), (endpoints, "replies_to"), (json, "loads")]
    watched += [(each, name) for each in (Replies, ResponseReplies) for name in ("start", "end", "whole")]

    def watching(name, call):
        def noted(*given, **options):
            found.setdefault(name, set()).add(asyncio._get_running_loop() is not None)
            return call(*given, **options)

        return noted

    for place, name in watched:
        monkeypatch.setattr(place, name, watching(name, getattr(place, name)))
    body = {"stream": stream, "temperature": 0, "messages": HELLO, "prompt": "a", "input": "a", "x": 1}
    httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60).raise_for_status()
    body |= {"stream": True, "max_tokens": 400, "max_output_tokens": 400, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=60) as left:
        next(left.iter_lines())
    wait_until(lambda: server.num_active == 0)
    assert {"unread", "usage_of", "replies_to", "loads"} < found.keys()
    assert set().union(*found.values()) == {False}, found


def test_where_too_many_requests_are_under_way_health_is_answered_and_others_come_back_later(
    server, monkeypatch
):
    monkeypatch.setattr(gate, "MAX_REQUESTS", 0)
    assert httpx.get(f"{server.url}/health").status_code == 200
    refused = httpx.get(f"{server.url}/v1/models")
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "overloaded"


MANY = 50_000
WRONG_ITEMS = {
    "messages": {"messages": [1] * MANY},
    "keys of messages": {"messages": [{}] * MANY},
    "parts": {"messages": [{"role": "user", "content": [{}] * MANY}]},
    "calls": {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]},
    "stop strings": {"messages": HELLO, "stop": [1] * MANY},
    "tools": {"messages": HELLO, "tools": [1] * MANY},
    "biased tokens": {"messages": HELLO, "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")},
    "names of biased tokens": {"messages": HELLO, "logit_bias": {f"{key}x": 1 for key in range(MANY)}},
    "prompt": {"prompt": ["a"] * MANY},
}


@pytest.mark.parametrize("body", WRONG_ITEMS.values(), ids=WRONG_ITEMS)
def test_of_many_wrong_items_few_are_looked_at(body):
    kind = CompletionRequest if "prompt" in body else ChatRequest
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 8


def test_the_server_answers_others_while_it_reads_a_body(server, text, monkeypatch):
    checked, may_go_on = endpoints.checked_body, threading.Event()
    monkeypatch.setattr(endpoints, "checked_body", lambda *given: may_go_on.wait(60) and checked(*given))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(whole, server)
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        may_go_on.set()
        assert answer.result() == text


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("completions", {"prompt": "x" * 9000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 9000}]}),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_without_being_tokenised(server, path, prompt):
    error = httpx.post(f"{server.url}/v1/{path}", json=prompt).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] in prompt
    assert "characters, of which at most 6656 can fit" in error["message"]


def test_where_there_is_no_room_nothing_is_prepared(text, monkeypatch):
    with running(chat_model(), max_rows=1, max_waiting=0) as small:
        monkeypatch.setattr(small.service, "chat_prompt", fails)
        monkeypatch.setattr(Batch, "free_capacity", 0)
        with pytest.raises(openai.InternalServerError, match="the queue is full"):
            whole(small)


def test_of_bodies_that_come_in_one_turn_of_the_loop_no_more_are_taken_either(monkeypatch):
    monkeypatch.setattr(endpoints, "NUM_PREPARING", 1)
    service = tiny_service(chat_model(), max_rows=1, max_waiting=1)

    async def at_once(shared):
        given = (shared._run(shared.preparing, str, number) for number in range(5))
        return await asyncio.gather(*given, return_exceptions=True)

    async def twice():
        shared = endpoints.Endpoints(service, AccessOptions())
        return [await at_once(shared), await at_once(shared)]

    for taken in asyncio.run(twice()):
        assert taken[:3] == ["0", "1", "2"], "one is read, two wait"
        assert [error.status for error in taken[3:]] == [503, 503]


def test_no_more_bodies_wait_to_be_read_than_could_be_answered(monkeypatch):
    may_go_on = threading.Event()
    monkeypatch.setattr(endpoints, "checked_body", lambda *_: may_go_on.wait(60) and fails())
    monkeypatch.setattr(endpoints, "NUM_PREPARING", 1)
    with running(chat_model(), max_rows=1, max_waiting=1) as small, ThreadPoolExecutor(4) as pool:
        posts = [pool.submit(httpx.post, f"{small.url}/v1/completions", timeout=60) for _ in range(4)]
        refused = next(as_completed(posts)).result()  # one is read, two wait
        may_go_on.set()
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert sorted(each.result().status_code for each in posts) == [500, 500, 500, 503]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = st.recursive(
    JSON,
    lambda inner: st.dictionaries(
        st.sampled_from(["type", "properties", "required", "enum", "anyOf", "$ref", "$defs", "a"]),
        inner | st.sampled_from(["string", "object", "#/$defs/a"]) | st.dictionaries(st.just("a"), inner),
        max_size=4,
    ),
    max_leaves=6,
)
FIELDS = [
    "messages", "prompt", "model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p",
    "top_k", "min_p", "stop", "seed", "logit_bias", "logprobs", "top_logprobs", "tools", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "response_format", "tool_choice", "medusa_plain", "echo",
    "structured_outputs", "chat_template_kwargs", "reasoning_effort", "enable_thinking",
    "continue_final_message", "add_generation_prompt",
    "input", "instructions", "max_output_tokens", "text", "reasoning", "previous_response_id", "metadata",
    "tokens", "add_special_tokens", "return_token_strs", "parallel_tool_calls", "unheard of",
]  # fmt: skip
WHOLE = {
    "messages": HELLO,
    "prompt": "a",
    "max_tokens": 1,
    "input": "a",
    "max_output_tokens": 1,
    "tokens": [5],
}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
PARTS = [
    {"structured_outputs": {"regex": "a[b"}}, {"structured_outputs": {"grammar": "start: x\nx: /a/"}},
    {"structured_outputs": {"choice": ["a"]}}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"},
    {"response_format": {"type": "json_object"}, "tools": TOOLS}, {"stream": True}, {"echo": True},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
    {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": [1]}}}},
    {"chat_template_kwargs": {"x": "<|end|>"}}, {"enable_thinking": False},
]  # fmt: skip
"""What is right by itself, and may not be beside the rest."""


@st.composite
def bodies(draw) -> bytes:
    """Bytes, fields with wrong values, and a good body with some bytes changed, missing or doubled."""
    kind = draw(st.sampled_from(["bytes", "fields", "cut"]))
    if kind == "bytes":
        return draw(st.binary(max_size=40))
    fields = draw(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
    right = {
        key: value
        for part in draw(st.lists(st.sampled_from(PARTS), max_size=2))
        for key, value in part.items()
    }
    if draw(st.booleans()):
        function = {"name": "f", "parameters": draw(SCHEMAS)}
        tool = {"type": "function", "function": function, **function}  # for chats and for responses
        right |= {"tools": [tool], "tool_choice": draw(st.sampled_from(["required", "auto"]))}
    body = json.dumps({**(WHOLE if draw(st.booleans()) else {}), **right, **fields}).encode()
    if kind == "cut":
        at, length = draw(st.integers(0, len(body))), draw(st.integers(0, 6))
        body = body[:at] + draw(st.binary(max_size=4)) + body[at + length :]
    return body


@pytest.fixture(scope="module")
def in_process():
    """A service, and its application without a socket."""
    model = tool_model(TOOL_TEMPLATE.replace("{...}", "<function=") + "<think>")
    service = tiny_service(model, allow_plain=True, max_new_tokens=64)
    service.start()
    with TestClient(
        create_application(ModelPool.of(service), AccessOptions()), base_url="http://localhost"
    ) as client:
        yield service, client
    service.worker.close()


NUM_BODIES = int(os.environ.get("MEDUSA_FUZZ_BODIES", "150"))


@settings(
    max_examples=NUM_BODIES,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(path=st.sampled_from(PATHS), body=bodies())
def test_no_body_breaks_the_server(in_process, path, body):
    service, client = in_process
    reply = client.post(path, content=body)
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
    assert service.worker.num_active == 0 and service.is_ready
