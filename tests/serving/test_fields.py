"""What clients of today send: fields that nobody reads, reasoning, forms, and the smaller endpoints."""

from __future__ import annotations

import json
import logging
import re
import socket

import httpx
import pytest
from tiny_chat import TEMPLATE, TOOL_TEMPLATE, chat_model, tool_model
from tiny_server import HELLO, TOKENIZER, Running, client_of, running, wait_until
from transformers import AddedToken

import medusa
from medusa.serving import answer_streams
from medusa.serving.gate import as_header
from medusa.serving.settings import AccessOptions, ServiceOptions

ASKED = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0}
THINKING = TOOL_TEMPLATE + (
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
)
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}


@pytest.fixture(scope="module")
def server():
    with running(chat_model(), served_model_name=("tiny", "gpt-4o")) as started:
        yield started


@pytest.fixture(scope="module")
def thinker():
    with running(tool_model(THINKING)) as started:
        yield started


def post(server: Running, path: str, body: dict, **more) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **more)


def ask(server: Running, **more) -> httpx.Response:
    return post(server, "/v1/chat/completions", {**ASKED, **more})


LONG_NAME = "k" * 5000


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("chat/completions", {**ASKED, LONG_NAME: 1}, 200),
        ("chat/completions", {**ASKED, "chat_template_kwargs": {LONG_NAME: 1}}, 200),
        ("chat/completions", {**ASKED, "messages": [{**HELLO[0], LONG_NAME: 1}]}, 200),
        ("chat/completions", {**ASKED, "model": LONG_NAME}, 404),
        ("chat/completions", {**ASKED, "logit_bias": {LONG_NAME: 1}}, 400),
        ("responses", {"input": "a", "metadata": {LONG_NAME: "a"}}, 400),
        ("responses", {"input": "a", "metadata": {"a": LONG_NAME}}, 400),
    ],
)
def test_what_a_client_has_named_is_told_and_logged_in_a_few_characters(server, caplog, path, body, status):
    caplog.set_level(logging.INFO, "medusa.serving")
    reply = post(server, f"/v1/{path}", body)
    wait_until(lambda: caplog.messages)
    told = [*reply.headers.values(), *caplog.messages, *([reply.text] if status != 200 else [])]
    assert reply.status_code == status and max(map(len, told)) < 1000


def test_more_fields_or_pairs_than_anybody_has_are_refused(server):
    many = {f"k{number}": "a" for number in range(600)}
    for path, body, says in (
        ("chat/completions", {**ASKED, **many}, "the body: at most 512 fields, got 604"),
        ("chat/completions", {**ASKED, "chat_template_kwargs": many}, "chat_template_kwargs: at most 512"),
        ("responses", {"input": "a", "metadata": many}, "metadata: at most 16 pairs, got 600"),
    ):
        reply = post(server, f"/v1/{path}", body)
        assert reply.status_code == 400 and says in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_are_not_read_are_told_in_the_header_and_in_the_log(server, caplog, stream):
    messages = [{"role": "user", "content": "Hello", "audio": {}, "refusal": None}] * 2
    given = {"store": True, "metadata": {}, "user": None, "messages": messages, "enable_thinking": True}
    caplog.set_level(logging.INFO, "medusa.serving")
    reply = ask(server, **given, stream=stream, stream_options={"odd": 1}, chat_template_kwargs={"a": 1})
    names = {"store", "metadata", "messages[].audio", "stream_options.odd", "enable_thinking"}
    names |= {"chat_template_kwargs.a"}
    assert set(reply.headers["x-ignored-fields"].split(", ")) == names
    wait_until(lambda: caplog.messages)
    assert set(json.loads(caplog.messages[-1])["ignored"]) == names
    assert "x-ignored-fields" not in ask(server).headers


def test_names_of_fields_cannot_break_the_header(server):
    odd = {"a\r\nSet-Cookie: x": 1, "é" * 3000: 1}
    reply = ask(server, **odd)
    assert reply.status_code == 200 and "set-cookie" not in reply.headers
    assert len(reply.headers["x-ignored-fields"]) <= 1024
    assert as_header([f"f{number}" for number in range(99)]).count(b",") < 32


def test_fields_are_told_of_requests_that_are_refused_too(server):
    reply = ask(server, odd=1, n=99)
    assert reply.status_code == 400
    reply = ask(server, odd=1, model="nobody")
    assert reply.status_code == 404 and reply.headers["x-ignored-fields"] == "odd"


def test_a_server_answers_to_all_its_names_or_to_every_name(server):
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "gpt-4o"]
    assert {(card["max_model_len"], card["context_length"], card["root"]) for card in cards} == {
        (512, 512, "tiny")
    }
    assert ask(server, model="gpt-4o").json()["model"] == "gpt-4o"
    assert ask(server, model=None).json()["model"] == "tiny"
    refused = ask(server, model="other").json()["error"]
    assert refused["message"] == "the model 'other' is not here; there is 'tiny', 'gpt-4o'"
    with running(chat_model(), any_model_name=True) as open_server:
        assert ask(open_server, model="other").json()["model"] == "tiny"
        assert httpx.get(f"{open_server.url}/v1/models/o/ther").json()["id"] == "tiny"
    assert ServiceOptions().any_model_name, "a server of one model answers to every name by itself"


def test_the_version_is_told_and_browsers_may_ask_what_they_may(server):
    assert httpx.get(f"{server.url}/version").json() == {"version": medusa.__version__}
    for path, methods in (("/v1/chat/completions", {"POST"}), ("/v1/models", {"GET", "HEAD"})):
        reply = httpx.options(server.url + path)
        assert reply.status_code == 204 and set(reply.headers["allow"].split(", ")) == methods
    access = AccessOptions(api_key=("secret",), cors_origin=("https://chat.example",))
    with running(chat_model(), access) as guarded:
        asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        asks |= {"Access-Control-Request-Headers": "authorization"}
        reply = httpx.options(f"{guarded.url}/v1/responses", headers=asks)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://chat.example"
        assert (
            httpx.options(guarded.url, headers={**asks, "Origin": "https://evil.example"}).status_code == 400
        )
        key = {"Authorization": "Bearer secret", "Origin": "https://chat.example"}
        reply = post(guarded, "/v1/chat/completions", {**ASKED, "odd": 1}, headers=key)
        assert "X-Ignored-Fields" in reply.headers["access-control-expose-headers"]


def test_texts_and_conversations_are_tokenised_as_they_would_be_answered(server):
    ids = TOKENIZER("Hé", add_special_tokens=False)["input_ids"]
    given = post(server, "/tokenize", {"prompt": "Hé", "return_token_strs": True}).json()
    assert (given["tokens"], given["count"], given["max_model_len"]) == (ids, len(ids), 512)
    assert given["token_strs"] == TOKENIZER.convert_ids_to_tokens(ids)
    assert post(server, "/detokenize", {"tokens": ids}).json() == {"prompt": "Hé"}
    chat = post(server, "/tokenize", {"messages": HELLO, "odd": 1})
    assert chat.json()["count"] == ask(server).json()["usage"]["prompt_tokens"]
    assert chat.headers["x-ignored-fields"] == "odd"
    wrong = [
        ("/tokenize", {}, None),
        ("/tokenize", {"messages": HELLO, "prompt": "a"}, None),
        ("/tokenize", {"prompt": "x" * 9000}, "prompt"),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ]
    for path, body, field in wrong:
        reply = post(server, path, body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field, reply.text


@pytest.mark.parametrize("prompt", ["Hello", TOKENIZER("Hello")["input_ids"], ["Hello", "x"]])
def test_a_prompt_is_given_back_before_its_answer(server, prompt):
    asked = {"prompt": prompt, "max_tokens": 6, "seed": 3, "n": 2}
    texts = [choice["text"] for choice in post(server, "/v1/completions", asked).json()["choices"]]
    prompts = ["Hello", "Hello", "x", "x"][: len(texts)]
    echoed = [first + text for first, text in zip(prompts, texts, strict=True)]
    reply = post(server, "/v1/completions", {**asked, "echo": True})
    assert [choice["text"] for choice in reply.json()["choices"]] == echoed
    streamed = [""] * len(texts)
    for line in post(server, "/v1/completions", {**asked, "echo": True, "stream": True}).text.split("\n\n"):
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            streamed[choice["index"]] += choice["text"]
    assert streamed == echoed
    refused = post(server, "/v1/completions", {**asked, "echo": True, "logprobs": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "echo"


FORMS = [
    ({"regex": r"[ab]{3}/\d\n"}, r"[ab]{3}/\d\n"),
    ({"choice": ['one "1"', "twó"]}, 'one "1"|twó'),
    ({"grammar": 'root ::= "a" | digit "b"\ndigit ::= [0-9]'}, r"a|\db"),
    ({"grammar": 'start: "x" DIGIT\nDIGIT: /[0-9]/'}, r"x\d"),
    ({"json": {"type": "boolean"}}, "true|false"),
]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=[next(iter(form)) for form, _ in FORMS])
def test_answers_keep_to_a_structure(server, form, pattern, path):
    pytest.importorskip("llguidance")
    body = {"prompt": "Hello"} if path == "completions" else {"messages": HELLO}
    for seed in range(3):
        reply = post(
            server, f"/v1/{path}", {**body, "max_tokens": 40, "seed": seed, "structured_outputs": form}
        )
        (choice,) = reply.json()["choices"]
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert re.fullmatch(pattern, text) and choice["finish_reason"] == "stop", text


WRONG_FORMS = [
    {},
    {"regex": "a", "choice": ["b"]},
    {"regex": "("},
    {"regex": ""},
    {"regex": "(a{1000}){1000}"},
    {"choice": []},
    {"grammar": "nonsense"},
    {"grammar": 'root ::= "a'},
    {"grammar": "start: other"},
    {"json": {"type": "nonsense"}},
]


@pytest.mark.parametrize("form", WRONG_FORMS, ids=str)
def test_a_structure_that_cannot_be_kept_is_refused(server, form):
    pytest.importorskip("llguidance")
    reply = ask(server, structured_outputs=form)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("structured_outputs")
    both = ask(server, structured_outputs={"regex": "a"}, response_format={"type": "json_object"})
    assert both.json()["error"]["param"] == "structured_outputs"


def test_reasoning_is_told_apart_and_the_same_in_streams(thinker):
    pytest.importorskip("llguidance")
    client = client_of(thinker)
    tokens = post(thinker, "/tokenize", {"messages": HELLO}).json()["tokens"]
    asked = {**ASKED, "logit_bias": {str(TOKENIZER("<")["input_ids"][0]): -100}}
    alone = {**asked, "prompt": tokens, "messages": None}
    text = post(thinker, "/v1/completions", alone).json()["choices"][0]["text"]
    whole = client.chat.completions.create(**asked).choices[0].message
    assert whole.content == "" and whole.reasoning == whole.reasoning_content == text.strip()
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == text.strip()
    assert not any(delta.content for delta in deltas)
    stopped = client.chat.completions.create(**asked, stop=text.strip()[:1]).choices[0]
    assert (stopped.message.reasoning, stopped.finish_reason) == (
        text.strip(),
        "length",
    )  # in it none is found


def test_the_template_is_told_whether_and_how_much_to_think(thinker):
    def rendered(**more) -> str:
        tokens = post(thinker, "/tokenize", {"messages": HELLO, **more}).json()["tokens"]
        return post(thinker, "/detokenize", {"tokens": tokens}).json()["prompt"]

    assert rendered().endswith("<think>\n")
    assert rendered(chat_template_kwargs={"enable_thinking": False}).endswith("</think>\n\n")
    for given in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        reply = ask(thinker, **given)
        assert reply.json()["choices"][0]["message"].get("reasoning") is None
        assert "x-ignored-fields" not in reply.headers
    assert ask(thinker, reasoning_effort="low").headers["x-ignored-fields"] == "reasoning_effort"
    refused = ask(thinker, chat_template_kwargs={"tools": [], "a": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("has_token", [False, True])
def test_a_form_begins_behind_the_reasoning(has_token):
    pytest.importorskip("llguidance")
    model = tool_model(THINKING)
    if has_token:
        model.tokenizer.add_tokens([AddedToken("</think>", special=False)])
        model.base.resize_token_embeddings(len(model.tokenizer), mean_resizing=False)
        model = medusa.MedusaModel(model.base, tokenizer=model.tokenizer)
    ends = {str(token): 5.0 for token in model.tokenizer("</think>")["input_ids"]}
    with running(model) as server:
        for seed in range(2):
            message = ask(
                server, response_format=FORM, max_tokens=150, seed=seed, temperature=1, logit_bias=ends
            ).json()["choices"][0]
            said = message["message"]
            assert message["finish_reason"] == "length" or json.loads(said["content"]) in ("yes", "no")
            if message["finish_reason"] == "length":
                assert said["content"] == "" and said["reasoning"]
        without = ask(server, response_format=FORM, enable_thinking=False, max_tokens=40).json()["choices"][0]
        assert json.loads(without["message"]["content"]) in ("yes", "no")


def test_earlier_reasoning_reaches_the_template():
    model = chat_model()
    model.tokenizer.chat_template = TEMPLATE.replace(
        "{{ message['content'] }}", "{{ message.reasoning_content or '' }}:{{ message['content'] }}"
    )
    with running(model) as server:
        for name in ("reasoning", "reasoning_content"):
            said = {"role": "assistant", "content": "Hi", name: "Hm"}
            tokens = post(server, "/tokenize", {"messages": [*HELLO, said]}).json()["tokens"]
            assert "<|assistant|>Hm:Hi<|end|>" in TOKENIZER.decode(tokens)


def test_the_last_message_is_gone_on_with_where_that_is_asked_for(server):
    begun = [*HELLO, {"role": "assistant", "content": "Good d"}]
    reply = ask(server, messages=begun, continue_final_message=True, add_generation_prompt=False)
    prompt = "<|user|>Hello<|end|><|assistant|>Good d"
    text = post(server, "/v1/completions", {**ASKED, "messages": None, "prompt": prompt}).json()
    assert reply.json()["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert "x-ignored-fields" not in reply.headers
    refused = ask(server, continue_final_message=True)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "continue_final_message"
    for more, rendered in (
        ({"add_generation_prompt": False}, prompt + "<|end|>"),
        ({}, prompt + "<|end|><|assistant|>"),
    ):
        tokens = post(server, "/tokenize", {"messages": begun, **more}).json()["tokens"]
        assert TOKENIZER.decode(tokens) == rendered


def test_a_stream_says_how_far_the_reading_is_while_nothing_else_comes(server, monkeypatch):
    monkeypatch.setattr(answer_streams, "AWAKE_SECONDS", 0.05)
    server.slowed(monkeypatch, 0.2)
    long = [{"role": "user", "content": "long " * 40}]
    lines = ask(server, messages=long, stream=True, max_tokens=2).text.split("\n\n")
    comments = [line for line in lines if line.startswith(": read ")]
    counts = [int(line.split()[2]) for line in comments]
    assert counts == sorted(counts) and len(set(counts)) > 2 and comments[0].endswith(" of 203")
    assert " of 406\n" in ask(server, messages=long, stream=True, max_tokens=2, n=2).text
    stream = client_of(server).chat.completions.create(**{**ASKED, "messages": long}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@pytest.mark.parametrize("written", ["{{ given }}", "{{ '```' + given + '```' }}"], ids=["shown", "joined"])
def test_templates_that_write_arguments_as_they_are_get_the_text_of_calls(written):
    """DeepSeek's do; an object would be shown as Python writes it, or refused."""
    said = "{% set given = call.function.arguments %}" + written
    call = {"function": {"name": "weather", "arguments": '{"city":"Oslo", "warm":true}'}}
    with running(tool_model(TOOL_TEMPLATE.replace("{{ call.function | tojson }}", said))) as server:
        asked = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}
        ids = post(server, "/tokenize", asked).json()["tokens"]
        assert '{"city":"Oslo", "warm":true}' in TOKENIZER.decode(ids)


ONE_SYSTEM = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}HERE{% else %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
BRIEF = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}]


@pytest.mark.parametrize("otherwise", ["", "{{ raise_exception('one system message') }}"])
def test_several_system_messages_are_one_for_a_template_that_takes_one(otherwise):
    model = chat_model()
    model.tokenizer.chat_template = ONE_SYSTEM.replace("HERE", otherwise)
    with running(model) as one:
        for given in (BRIEF, [BRIEF[1]] * 3, BRIEF[:1]):
            told = "\n\n".join(each["content"] for each in given)
            ids = post(one, "/tokenize", {"messages": [*given, *HELLO]}).json()["tokens"]
            assert TOKENIZER.decode(ids) == f"<|system|>{told}<|end|><|user|>Hello<|end|>"
        reply = post(one, "/v1/responses", {"instructions": "Be brief.", "input": [BRIEF[1], *HELLO]})
        told = "<|system|>Be brief.\n\nBe kind.<|end|><|user|>Hello<|end|>"
        assert reply.json()["usage"]["input_tokens"] == len(TOKENIZER(told)["input_ids"])


def test_several_system_messages_stay_apart_where_the_template_takes_them(server):
    ids = post(server, "/tokenize", {"messages": [*BRIEF, *HELLO]}).json()["tokens"]
    assert "Be brief.<|end|><|system|>Be kind." in TOKENIZER.decode(ids)


CALL = {"id": "c", "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    "path, body",
    [
        ("chat/completions", {"messages": [*HELLO, {"role": "assistant", "tool_calls": [CALL]}]}),
        ("responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": " "}]}),
        ("chat/completions", {"messages": HELLO, "logprobs": False, "top_logprobs": 0}),
        ("responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}),
    ],
)
def test_what_clients_write_for_nothing_is_taken(thinker, path, body):
    if "schema" in str(body):
        pytest.importorskip("llguidance")
    reply = post(thinker, f"/v1/{path}", {**body, "max_tokens": 2, "max_output_tokens": 2})
    assert reply.status_code == 200, reply.text


def test_the_chosen_token_of_a_completion_is_among_the_likeliest(server):
    for number in (0, 2):
        body = {"prompt": "Hello", "max_tokens": 30, "logprobs": number, "temperature": 2, "seed": 3}
        logprobs = post(server, "/v1/completions", body).json()["choices"][0]["logprobs"]
        rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        for token, logprob, top in rows:
            assert 1 <= len(top) <= number + 1 and (top[token] == logprob or "\ufffd" in token)


def test_a_completion_of_no_tokens_reads_its_prompt(server):
    body = {"prompt": ["Hello, nobody has asked", "a"], "max_tokens": 0, "n": 2, "logprobs": 1}
    whole = post(server, "/v1/completions", body).json()
    for choice in whole["choices"]:
        assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("", "length", [])
    assert whole["usage"]["completion_tokens"] == 0
    echoed = post(server, "/v1/completions", {"prompt": "Hello", "max_tokens": 0, "echo": True}).json()
    assert echoed["choices"][0]["text"] == "Hello"
    streamed = post(server, "/v1/completions", {"prompt": "Hello", "max_tokens": 0, "stream": True}).text
    assert json.loads(streamed.splitlines()[0].removeprefix("data: "))["choices"][0]["text"] == ""
    following = post(server, "/v1/completions", {"prompt": "Hello, nobody has asked", "max_tokens": 1}).json()
    usage = following["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


@pytest.mark.parametrize("stop", ["", [""], ["", "\x00"]])
def test_an_empty_stop_string_is_none(server, stop):
    text = ask(server, seed=1, temperature=1).json()["choices"][0]
    assert ask(server, seed=1, temperature=1, stop=stop).json()["choices"][0] == text


def target(server: Running, line: str, host: str = "localhost") -> str:
    """The head of the answer to a request with this target."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as asking:
        asking.sendall(f"GET {line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: asking.recv(65536), b"")).decode().partition("\r\n\r\n")[0]


def test_a_path_with_a_trailing_slash_and_an_absolute_target_are_the_same(server):
    for line in ("/health/", "/v1/models/?a=1", "/v1/models/tiny/", "//", "http://localhost/health/"):
        assert " 200 " in target(server, line), line
    assert " 404 " in target(server, "/v1/model/")
    for line in ("http://localhost/health", "HTTP://127.0.0.1:80/health", "http://localhost/v1/models?a=1"):
        assert " 200 " in target(server, line, "elsewhere.example")
    assert " 403 " in target(server, "http://elsewhere.example/health")
