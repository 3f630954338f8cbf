"""The server as its users meet it: OpenAI's own client, and bytes, over a real socket."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import logging
import random
import re
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import tokenizer_kinds
from conftest import GROUPED, needs_newest
from mtp_models import load_base, save_base
from stateful_models import stateful_model
from tiny_chat import TEMPLATE, TOOL_TEMPLATE, chat_heads, chat_model, tool_model
from tiny_server import (
    HELLO,
    TOKENIZER,
    TOOL,
    WEATHER,
    Running,
    chat,
    client_of,
    expected,
    running,
    tiny_service,
    wait_until,
)
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, MedusaModel
from medusa.acceptance.grammar import GrammarFailed, GrammarProcessor
from medusa.decoding.adaptive import DraftCosts
from medusa.decoding.runners import Runner
from medusa.heads.mtp import own_head
from medusa.serving.chat_requests import ChatRequest
from medusa.serving.completion_requests import CompletionRequest
from medusa.serving.gate import refusal_of_host, refusal_of_origin
from medusa.serving.replies import RequestError
from medusa.serving.server import log, log_to_standard_error
from medusa.serving.service import Service
from medusa.serving.settings import AccessOptions

ALONE = {"max_new_tokens": 24, "do_sample": True, "top_k": 0}


@pytest.fixture(scope="module")
def tiny_chat_model():
    return chat_model()


@pytest.fixture(scope="module")
def server(tiny_chat_model):
    with running(tiny_chat_model, allow_plain=True) as started:
        yield started


@pytest.fixture(scope="module")
def tool_server():
    with running(tool_model()) as started:
        yield started


def said(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_an_answer_is_that_of_generate_streamed_or_not(server, tiny_chat_model):
    for seed, temperature in ((0, 0.0), (5, 0.7), (6, 1.0)):
        sampled = {"temperature": temperature, "seed": seed} if temperature else {"do_sample": False}
        tokens, text = expected(tiny_chat_model, HELLO, **{**ALONE, **sampled})
        asked = {
            "messages": HELLO,
            "max_tokens": 24,
            "temperature": temperature,
            "seed": seed,
        }
        whole = chat(server, **asked)
        assert whole.choices[0].message.content == text
        assert whole.usage.completion_tokens == len(tokens)
        ended = tokens[-1] == TOKENIZER.eos_token_id
        assert whole.choices[0].finish_reason == ("stop" if ended else "length")
        options = {"include_usage": True}
        chunks = list(chat(server, **asked, stream=True, stream_options=options))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert said(chunks) == text
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].choices == []
        for counted in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(chunks[-1].usage, counted) == getattr(whole.usage, counted)


@pytest.mark.parametrize("model_type", ["lfm2", "mamba2"])
def test_a_base_that_keeps_a_state_answers_as_generate_does_turn_after_turn(model_type):
    base = stateful_model(model_type, vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id)
    model = MedusaModel(base, chat_heads(), CandidateTree.chain(3), TOKENIZER)
    messages = list(HELLO)
    with running(model) as server:
        client = client_of(server)
        for question in ("And then?", "Why?"):
            _, text = expected(model, messages, max_new_tokens=24, do_sample=False)
            asked = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}
            whole = client.chat.completions.create(**asked)
            assert whole.choices[0].message.content == text
            assert said(client.chat.completions.create(**asked, stream=True)) == text
            answer = {"role": "assistant", "content": text}
            messages += [answer, {"role": "user", "content": question}]


@needs_newest
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_layers_that_a_base_comes_with_draft_the_answers_of_generate(tmp_path, family):
    sizes = {"vocab_size": len(TOKENIZER), "eos_token_id": TOKENIZER.eos_token_id}
    model = MedusaModel(load_base(save_base(tmp_path / family, family, **sizes)), tokenizer=TOKENIZER)
    _, text = expected(model, HELLO, max_new_tokens=24, do_sample=False)
    with running(MedusaModel(model.base, own_head(model.base), tokenizer=TOKENIZER)) as server:
        whole = chat(server, max_tokens=24, temperature=0)
    assert whole.choices[0].message.content == text
    assert whole.usage.model_extra["medusa"]["drafted_per_depth"]


def test_every_reply_and_its_line_in_the_log_say_what_guessing_did(tiny_chat_model, caplog, monkeypatch):
    monkeypatch.setattr(DraftCosts, "adaptive", lambda *_: None)  # whatever a draft costs here
    asked = {"max_tokens": 40, "temperature": 0}
    caplog.set_level(logging.INFO, "medusa.serving")
    with running(tiny_chat_model, allow_plain=True) as server:
        whole = chat(server, **asked).usage
        num_drafted = server.service.worker.batches[False].num_drafted
        plain = chat(server, **asked, extra_body={"medusa_plain": True}).usage
    guessed, logged = whole.model_extra["medusa"], json.loads(caplog.messages[-2])
    assert logged["medusa"] == guessed and logged["completion_tokens"] == whole.completion_tokens
    accepted = sum(guessed["accepted_per_depth"])
    drafted = guessed["drafted_per_depth"]
    assert sum(drafted) == num_drafted and drafted[0] >= guessed["num_steps"] - 1  # the first only reads
    assert 0 < accepted < num_drafted and len(drafted) == len(guessed["accepted_per_depth"])
    assert whole.completion_tokens == guessed["num_steps"] + accepted
    assert guessed["tokens_per_step"] == round(whole.completion_tokens / guessed["num_steps"], 3)
    assert guessed["accepted_per_depth"] == sorted(guessed["accepted_per_depth"], reverse=True)
    num_tokens, nothing = plain.completion_tokens, {"drafted_per_depth": [], "accepted_per_depth": []}
    assert plain.model_extra["medusa"] == {"num_steps": num_tokens, "tokens_per_step": 1.0, **nothing}


@pytest.mark.parametrize("num_choices", [1, 4])
def test_short_answers_are_whole_and_are_those_of_generate(server, tiny_chat_model, num_choices):
    for length in (1, 2, 3, 5, 8):
        alone = [
            expected(tiny_chat_model, HELLO, **{**ALONE, "max_new_tokens": length}, seed=length + index)
            for index in range(num_choices)
        ]
        before = num_ended(server)
        reply = chat(server, max_tokens=length, n=num_choices, seed=length)
        assert [choice.message.content for choice in reply.choices] == [text for _, text in alone]
        reasons = ["stop" if tokens[-1] == TOKENIZER.eos_token_id else "length" for tokens, _ in alone]
        assert [choice.finish_reason for choice in reply.choices] == reasons
        assert reply.usage.completion_tokens == sum(len(tokens) for tokens, _ in alone)
        assert num_ended(server) == before + num_choices
        assert [choice.index for choice in reply.choices] == [*range(num_choices)]


def num_ended(server: Running) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return sum(float(value) for value in re.findall(r"medusa:request_success_total{.*} (.*)", text))


@pytest.mark.parametrize("seed", [-1, 2**62 - 1, -(2**63), 2**63 - 2])
def test_a_choice_is_what_its_own_seed_gives_alone_wherever_seeds_begin_again(server, seed):
    asked = {"max_tokens": 12, "temperature": 1}
    together = chat(server, **asked, n=2, seed=seed).choices
    alone = [chat(server, **asked, seed=seed + index).choices[0] for index in range(2)]
    assert [each.message.content for each in together] == [each.message.content for each in alone]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_control_token_stops_an_answer(server, path):
    token = TOKENIZER.convert_tokens_to_ids("<|user|>")
    body = {"messages": HELLO, "prompt": "a", "max_tokens": 8, "logit_bias": {str(token): 100}}
    reply = httpx.post(f"{server.url}/v1/{path}", json={**body, "stop": "<|user|>"}, timeout=60).json()
    assert reply["choices"][0]["finish_reason"] == "stop" and reply["usage"]["completion_tokens"] == 1


def test_a_stop_string_in_the_first_token_ends_its_own_choice_alone(server, tiny_chat_model, caplog):
    options = {**ALONE, "max_new_tokens": 8}
    texts = [expected(tiny_chat_model, HELLO, **options, seed=7 + index)[1] for index in range(4)]
    before = num_ended(server)
    with caplog.at_level(logging.INFO, "medusa.serving"):
        reply = chat(server, max_tokens=8, n=4, seed=7, stop=texts[0][0])
    assert [choice.message.content for choice in reply.choices] == [
        text.partition(texts[0][0])[0] for text in texts
    ]
    reasons = ["stop" if texts[0][0] in text else "length" for text in texts]
    assert [choice.finish_reason for choice in reply.choices] == reasons
    assert json.loads(caplog.messages[-1])["ended"] == reasons
    assert num_ended(server) == before + 4


def test_many_clients_at_once_get_what_each_gets_alone(server, tiny_chat_model):
    async def answers(asked):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(client.chat.completions.create(**each) for each in asked))

    asked = [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hello " * (1 + index % 5)}],
            "max_tokens": 8 + index,
            "temperature": 0.8 * (index % 2),
            "seed": index,
        }
        for index in range(12)
    ]
    for each, reply in zip(asked, asyncio.run(answers(asked)), strict=True):
        sampled = {"do_sample": False}
        if each["temperature"]:
            sampled = {"do_sample": True, "top_k": 0, "temperature": 0.8, "seed": each["seed"]}
        _, text = expected(tiny_chat_model, each["messages"], max_new_tokens=each["max_tokens"], **sampled)
        assert reply.choices[0].message.content == text


def test_stop_strings_end_an_answer_and_are_not_sent(server, tiny_chat_model):
    asked = {"max_tokens": 40, "temperature": 0}
    text = chat(server, **asked).choices[0].message.content
    stop = text[5:8]
    for stream in (False, True):
        reply = chat(server, **asked, stop=[stop, "never said"], stream=stream)
        got = said(reply) if stream else reply.choices[0].message.content
        assert got == text[: text.find(stop)]
    wait_until(lambda: server.num_active == 0)


def test_penalties_and_biases_have_their_way(server):
    client = client_of(server)
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    letter = TOKENIZER("x")["input_ids"][0]
    biased = client.completions.create(**asked, logit_bias={str(letter): 100})
    assert biased.choices[0].text == "x" * 8
    penalised = client.completions.create(**asked, logit_bias={str(letter): 40}, presence_penalty=2)
    assert penalised.choices[0].text.startswith("x")
    once = client.completions.create(**asked, logit_bias={str(letter): 1}, frequency_penalty=2)
    assert max(map(once.choices[0].text.count, once.choices[0].text)) <= 3


def test_logprobs_are_the_base_models_own(server, tiny_chat_model):
    client = client_of(server)
    asked = {"max_tokens": 12, "temperature": 0.9, "seed": 4}
    reply = chat(server, **asked, logprobs=True, top_logprobs=3).choices[0]
    stream = chat(server, **asked, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert [each.token for each in streamed] == [each.token for each in reply.logprobs.content]
    tokens, _ = expected(tiny_chat_model, HELLO, **{**ALONE, "max_new_tokens": 12}, temperature=0.9, seed=4)
    ids = TOKENIZER.apply_chat_template(
        HELLO, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    whole = ids.new_tensor([ids[0].tolist() + tokens])
    logprobs = tiny_chat_model.base(whole).logits[0].detach().log_softmax(-1)
    kept = [token for token in tokens if token != TOKENIZER.eos_token_id]
    for index, (token, entry) in enumerate(zip(kept, reply.logprobs.content, strict=True)):
        assert entry.logprob == pytest.approx(float(logprobs[ids.shape[1] - 1 + index, token]), abs=1e-3)
        assert len(entry.top_logprobs) == 3
    completed = client.completions.create(model="tiny", prompt="ab", max_tokens=4, logprobs=2, seed=1)
    entries = completed.choices[0].logprobs
    assert len(entries.tokens) == len(entries.token_logprobs) == len(entries.text_offset)


def form(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_answers_keep_the_form_that_was_asked_for(server, tiny_chat_model):
    pytest.importorskip("llguidance")
    properties = {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bb", "ccc"]}}
    schema = {"type": "object", "properties": properties, "required": ["ok", "kind"]}
    asked = {"max_tokens": 60}
    given = form({**schema, "additionalProperties": False})
    for seed in range(3):
        reply = chat(server, **asked, seed=seed, response_format=given).choices[0]
        assert set(json.loads(reply.message.content)) == {"ok", "kind"} and reply.finish_reason == "stop"
        plain = chat(server, **asked, seed=seed, response_format=given, extra_body={"medusa_plain": True})
        assert plain.choices[0].message.content == reply.message.content
    reply = chat(server, **asked, seed=0, response_format={"type": "json_object"})
    assert reply.choices[0].message.content.startswith("{")


@pytest.fixture(scope="module", params=["llama_2", "gemma"])
def byte_fallback_server(request):
    """Most characters outside of ASCII take a token for each of their bytes."""
    tokenizer = getattr(tokenizer_kinds, request.param)()
    tokenizer.chat_template = TEMPLATE
    sizes = {**GROUPED, "vocab_size": len(tokenizer), "eos_token_id": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with running(MedusaModel(base, tokenizer=tokenizer)) as started:
        yield started


@pytest.mark.parametrize("text", ["你好世界", "讨论翡翠和鳄鱼 a 👩‍👩‍👧 ж"])
def test_characters_in_bytes_are_whole_in_forms_streams_and_log_probabilities(byte_fallback_server, text):
    pytest.importorskip("llguidance")
    asked = {"max_tokens": 90, "response_format": form({"const": text}), "logprobs": True, "top_logprobs": 2}
    told = f'"{text}"'
    reply = chat(byte_fallback_server, **asked).choices[0]
    assert reply.message.content == told
    entries = reply.logprobs.content
    assert b"".join(bytes(each.bytes) for each in entries).decode() == told
    assert all(each.token == bytes(each.bytes).decode(errors="replace") for each in entries)
    chunks = list(chat(byte_fallback_server, **asked, stream=True))
    assert said(chunks) == told
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks)
    stopped = chat(byte_fallback_server, **asked, stop=text[3]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (told[: told.find(text[3])], "stop")


def test_offsets_count_the_characters_of_the_text(byte_fallback_server):
    pytest.importorskip("llguidance")
    grammar = 'start: "a 你好 b"'
    asked = {"logprobs": 1, "extra_body": {"structured_outputs": {"grammar": grammar}}}
    client = client_of(byte_fallback_server)
    completed = client.completions.create(model="tiny", prompt="ab", max_tokens=40, **asked)
    text, entries = completed.choices[0].text, completed.choices[0].logprobs
    for name, offset in zip(entries.tokens, entries.text_offset, strict=True):
        assert name == "\ufffd" or name == "</s>" or text[offset:].startswith(name)


def test_without_the_grammar_library_forms_are_refused_with_what_to_install(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    server.service.__dict__.pop("_grammars", None)
    with pytest.raises(openai.BadRequestError, match="pip install llguidance") as refused:
        chat(server, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"


def test_tools_are_offered_called_and_answered(tool_server):
    pytest.importorskip("llguidance")
    client, tokenizer = client_of(tool_server), tool_server.service.tokenizer
    asked = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "max_tokens": 90, "seed": 1}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        reply = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        assert reply.finish_reason == "tool_calls" and reply.message.content is None
        (call,) = reply.message.tool_calls
        assert call.function.name == "weather"
        assert isinstance(json.loads(call.function.arguments)["warm"], bool)
        chunks = list(client.chat.completions.create(**asked, tool_choice=choice, stream=True))
        first, *more = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
        assert (first.function.name, first.index, first.type) == ("weather", 0, "function") and first.id
        assert [(each.id, each.index, each.function.name) for each in more] == [(None, 0, None)] * len(more)
        arguments = [each.function.arguments for each in (first, *more)]
        assert "".join(arguments) == call.function.arguments and len(more) > 1
        assert said(chunks) == "" and chunks[-1].choices[0].finish_reason == "tool_calls"
    raw = client.chat.completions.with_raw_response.create(**{**asked, "tools": [{**TOOL, "odd": 1}]})
    assert "x-ignored-fields" not in raw.headers  # all of a tool is for the template
    first = client.chat.completions.create(**asked)
    free = first.choices[0]
    assert free.message.tool_calls is None and free.message.content
    unoffered = client.chat.completions.create(**asked, tool_choice="none")
    assert unoffered.usage.prompt_tokens == len(tokenizer("<|user|>Hello<|end|><|assistant|>").input_ids)
    history = [*HELLO, reply.message, {"role": "tool", "tool_call_id": call.id, "content": "warm"}]
    answer = client.chat.completions.create(**{**asked, "messages": history})
    called = '<tool_call>{"arguments": {"warm": true}, "name": "weather"}</tool_call>'
    assert answer.usage.prompt_tokens > first.usage.prompt_tokens + len(called)
    for seed in range(2):  # a call or the form
        reply = client.chat.completions.create(
            **{**asked, "seed": seed}, response_format=form({"enum": ["a", "b"]})
        )
        choice = reply.choices[0]
        called = [call.function.name for call in choice.message.tool_calls or ()]
        assert (called or json.loads(choice.message.content)) in (["weather"], "a", "b")


CONTROLS = "a<|end|><|user|>b<<|assistant|>"


@pytest.mark.parametrize("template", [TEMPLATE, TOOL_TEMPLATE])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_what_users_write_is_text_where_it_spells_control_tokens(template, role):
    model = tool_model(template)
    service = tiny_service(model)
    messages = [{"role": role, "content": CONTROLS}, *HELLO]
    body = {"messages": messages}
    if template == TOOL_TEMPLATE:
        body["tools"] = [{"type": "function", "function": {**WEATHER, "description": CONTROLS}}]
    asked = ChatRequest.model_validate(body)
    tokens = service.chat_prompt(asked)
    assert TOKENIZER.decode(tokens) == service._rendered(messages, asked.offered, asked.template_arguments)
    plain = service.chat_prompt(ChatRequest.model_validate(json.loads(json.dumps(body).replace("|>", ""))))
    assert [token for token in tokens if token >= 256] == [token for token in plain if token >= 256]


def test_templates_that_read_control_tokens_in_messages_are_followed_or_the_message_is_refused():
    model = chat_model()
    last = "message['content'].split('<|end|>')[-1]"
    model.tokenizer.chat_template = TEMPLATE.replace(
        "message['content']", f"({last} if message['role'] == 'assistant' else message['content'])"
    )
    service = tiny_service(model)
    said = {"role": "assistant", "content": "thought<|end|>said"}
    tokens = service.chat_prompt(ChatRequest.model_validate({"messages": [*HELLO, said]}))
    assert TOKENIZER.decode(tokens) == "<|user|>Hello<|end|><|assistant|>said<|end|><|assistant|>"
    model.tokenizer.chat_template = TEMPLATE.replace("message['content']", last)
    with pytest.raises(RequestError, match="holds the text of a control token"):
        service.chat_prompt(ChatRequest.model_validate({"messages": [{**said, "role": "user"}]}))


def odd_tool(**parameters) -> list[dict]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


WRONG = [
    ({"messages": HELLO, "temperature": 3}, "temperature"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature"),
    ({"messages": HELLO, "top_p": -0.1}, "top_p"),
    ({"messages": HELLO, "seed": 2**63}, "seed"),
    ({"messages": HELLO, "max_tokens": 4.5}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": "4"}, "max_tokens"),
    ({"messages": HELLO, "n": True}, "n"),
    ({"messages": HELLO, "n": 0}, "n"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ({"messages": HELLO, "stop": ["a"] * 99}, "stop"),
    ({"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {f"{key:09}": 1 for key in range(9999)}}, "logit_bias"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": HELLO, "tools": odd_tool(properties=5)}, "tools[0].function.parameters"),
    ({"messages": HELLO, "tools": odd_tool(required=5)}, "tools[0].function.parameters"),
    ({"messages": HELLO, "tools": odd_tool(required=[{}])}, "tools[0].function.parameters"),
    ({"messages": HELLO, "tools": [TOOL]}, "tools"),
    ({"messages": [*HELLO, {"role": "tool", "content": "5"}]}, "messages"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HELLO, "tool_choice": 5}, "tool_choice"),
    ({"messages": HELLO, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": None}, "messages"),
    ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": HELLO, "response_format": form({"type": "nonsense"})}, "response_format"),
    ({"messages": HELLO, "response_format": form({}), "ignore_eos": True}, "ignore_eos"),
    ({"messages": []}, "messages"),
    ({"messages": HELLO, "stop": 5}, "stop"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({}, "messages"),
]
WRONG_PROMPTS = [
    ([], "prompt"),
    ([""], "prompt"),
    (["a", ""], "prompt"),
    ([[]], "prompt"),
    ([[5], []], "prompt"),
    (["a", 5], "prompt[1]"),
    ([5, "a"], "prompt[1]"),
    ([[5], ["a"]], "prompt[1][0]"),
    ([[5], [99999]], "prompt"),
    (["a"] * 65, "prompt"),
    (None, "prompt"),
    ({}, "prompt"),
]
WRONG_FIELDS = [("chat/completions", *each) for each in WRONG]
WRONG_FIELDS += [
    ("completions", {"prompt": prompt, "max_tokens": 1}, field) for prompt, field in WRONG_PROMPTS
]


@pytest.mark.parametrize(("path", "body", "field"), WRONG_FIELDS, ids=lambda each: str(each)[:40])
def test_a_wrong_value_is_refused_with_the_name_of_its_field(server, path, body, field):
    reply = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == field and error["type"] == "invalid_request_error" and error["message"]


def test_a_part_that_is_no_text_is_refused_in_words_that_say_so(server):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    content = [{"type": "text", "text": "What is this?"}, part]
    body = {"messages": [{"role": "user", "content": content}]}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "messages[0].content[1].type"
    assert "must be 'text': this server reads nothing but text, got 'image_url'" in error["message"]


DRAWN = {"do_sample": True, "top_k": 0, "seed": 5}
GREEDY = {"do_sample": False}
SAME = [
    ({"n": None, "stream": None, "ignore_eos": None, "medusa_plain": None, "seed": 5}, DRAWN),
    ({"stream_options": {"include_usage": None, "include_depths": None}, "seed": 5.0}, DRAWN),
    ({"stop": None, "logit_bias": None, "top_k": None, "response_format": {"type": None}, "seed": 5}, DRAWN),
    ({"max_tokens": 12.0, "n": 1.0, "top_k": 0.0, "top_logprobs": None, "tools": None, "seed": 5}, DRAWN),
    ({"seed": 5 - 2**62}, DRAWN),
    ({"top_k": 50, "seed": 5}, {"do_sample": True, "seed": 5}),  # the default of generate
    ({"top_p": 0, "seed": -1}, GREEDY),
    ({"temperature": 1e-40}, GREEDY),
    ({"temperature": 1e-6}, GREEDY),
]
"""Null leaves a field out, whole numbers may have a point, and next to no temperature is none."""


@pytest.mark.parametrize(("given", "options"), SAME, ids=[str(given)[:30] for given, _ in SAME])
def test_fields_of_sampling_give_the_text_that_generate_gives(server, tiny_chat_model, given, options):
    _, text = expected(tiny_chat_model, HELLO, max_new_tokens=12, **options)
    body = {"messages": HELLO, "max_tokens": 12, **given}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert [choice["message"]["content"] for choice in reply.json()["choices"]] == [text]


def test_calls_of_earlier_turns_may_have_nulls():
    called = {"id": None, "type": None, "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [called]}
    (message,) = ChatRequest.model_validate({"messages": [said]}).messages
    assert message.as_conversation["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_each_of_several_prompts_gets_the_answers_that_it_gets_alone(server, num_choices, as_tokens):
    client, prompts = client_of(server), ["Hello", "Once upon", "x"]
    given = [TOKENIZER(prompt)["input_ids"] for prompt in prompts] if as_tokens else prompts
    asked = {"model": "tiny", "max_tokens": 6, "seed": 3, "n": num_choices}
    alone = [client.completions.create(**asked, prompt=prompt) for prompt in prompts]
    texts = [choice.text for reply in alone for choice in reply.choices]
    one = client.completions.create(**asked, prompt=given[:1])
    assert [choice.text for choice in one.choices] == texts[:num_choices]
    together = client.completions.create(**asked, prompt=given)
    assert [choice.text for choice in together.choices] == texts
    assert [choice.index for choice in together.choices] == [*range(3 * num_choices)]
    for name in ("prompt_tokens", "completion_tokens"):
        assert getattr(together.usage, name) == sum(getattr(reply.usage, name) for reply in alone)
    streamed = dict.fromkeys(range(3 * num_choices), "")
    for chunk in client.completions.create(**asked, prompt=given, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert [*streamed.values()] == texts


def test_more_answers_than_ever_fit_are_refused_for_good():
    service = tiny_service(chat_model(), max_rows=2, max_waiting=1)
    for body in ({"prompt": ["a"] * 4}, {"prompt": "a", "n": 4}, {"prompt": ["a", "b"], "n": 2}):
        with pytest.raises(RequestError, match="a request may want 3 answers here, got 4") as refused:
            service.check(CompletionRequest.model_validate(body))
        assert refused.value.status == 400


@pytest.mark.parametrize(
    "path", ["/", "/health", "/metrics", "/v1/models", "/v1/models/tiny", "/vendor/purify.min.js"]
)
def test_what_can_be_got_has_a_head(server, path):
    reply, whole = httpx.head(server.url + path), httpx.get(server.url + path)
    assert reply.status_code == 200 and not reply.content
    assert reply.headers["content-type"] == whole.headers["content-type"]


def chain(length: int, link: str = "$ref") -> dict:
    """A schema of references that follow each other."""
    places = [{"$ref": f"#/$defs/{index + 1}"} for index in range(length)]
    definitions = [place if link == "$ref" else {link: [place]} for place in places]
    return {"$ref": "#/$defs/0", "$defs": {str(at): each for at, each in enumerate([*definitions, True])}}


def test_the_bytes_of_all_tokens_joined_are_the_text(server):
    letters = {str(token): 100 for token in TOKENIZER("é😀")["input_ids"]}
    reply = chat(server, max_tokens=12, seed=2, logit_bias=letters, logprobs=True, top_logprobs=1).choices[0]
    joined = bytes(byte for entry in reply.logprobs.content for byte in entry.bytes)
    assert len(joined) == 12 and joined.decode(errors="replace") == reply.message.content


LARGE_PATTERN = {"type": "object", "properties": {"a": {"pattern": "^a{1000000}$", "type": "string"}}}
BAD_SCHEMAS = {
    "refers to itself": {"$ref": "#"},
    "refer to each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#"}}},
    "is all of itself": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    "chain of references": chain(1000),
    "chain of alternatives": chain(1000, "anyOf"),
    "large enumeration": {"enum": ["x" * 100] * 3000},
    "large pattern": {**LARGE_PATTERN, "required": ["a"]},
    "definitions in a list": {"$defs": []},
    "definitions of null": {"definitions": None},
}


@pytest.mark.parametrize("schema", BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
def test_a_schema_that_cannot_be_kept_is_refused_before_anything_waits(tool_server, schema):
    pytest.importorskip("llguidance")
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = [
        ("response_format", {"response_format": form(schema)}),
        ("tool_choice", {"tools": [tool], "tool_choice": "required"}),
    ]
    for field, given in asked:
        reply = httpx.post(f"{tool_server.url}/v1/chat/completions", json={"messages": HELLO, **given})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] in (field, "messages")  # tools that are too long to show
        assert tool_server.num_active == 0


def test_arguments_that_are_nested_too_deeply_to_be_shown_are_text(tool_server):
    for depth in (70, 884, 1000):
        deep = {"name": "f", "arguments": '{"a": ' + "[" * depth + "]" * depth + "}"}
        called = {"role": "assistant", "tool_calls": [{"function": deep}]}
        reply = httpx.post(f"{tool_server.url}/tokenize", json={"messages": [*HELLO, called]})
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("place", ["$defs/kind", "definitions/kind", "properties/first"])
def test_a_forced_call_keeps_to_what_its_schema_refers_to(tool_server, place):
    pytest.importorskip("llguidance")
    kind = {"enum": ["x", "y"]}
    folder, _, name = place.partition("/")
    parameters = {
        "properties": {"a": {"$ref": f"#/{place}"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    parameters.setdefault(folder, {})[name] = kind
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    reply = chat(tool_server, max_tokens=120, seed=1, tools=tools, tool_choice="required")
    (call,) = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["a"] in ("x", "y")


def test_a_form_that_grows_too_large_while_it_is_written_is_the_requests_own_fault(server, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(GrammarProcessor, "_check", grows_too_large)
    with pytest.raises(openai.BadRequestError, match="ask for a simpler one"):
        chat(server, response_format=form({}))


def grows_too_large(_processor) -> None:
    raise GrammarFailed("too many items")


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 200}, {"cache_mib": 1}], ids=str)
@pytest.mark.parametrize("asks", [512, 10**9])
def test_an_answer_ends_where_the_room_for_it_does(options, asks):
    """512 is what clients ask for by default, and all that the smaller base has."""
    with running(chat_model(context=4096 if "cache_mib" in options else 512), **options) as server:
        most = server.service.max_tokens
        assert 512 < most < 4096 if "cache_mib" in options else most == 512
        body = {"prompt": [5] * (most - 300), "ignore_eos": True, "temperature": 0, "max_tokens": asks}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == options.get("max_new_tokens", 300)
        body["prompt"] = [5] * most
        error = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["error"]
        assert error["code"] == "context_length_exceeded"


def test_a_full_context_is_told_in_the_words_that_clients_look_for(server):
    """LiteLLM and LangChain know it by these, in any case of letters."""
    for path, body, param in (
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 90_000}]}, "messages"),
        ("completions", {"prompt": [5] * 512}, "prompt"),
        ("responses", {"input": "x" * 600}, "input"),
        (
            "completions",
            {"prompt": "x", "prediction": {"type": "content", "content": "x" * 600}},
            "prediction",
        ),
    ):
        reply = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
        error = reply.json()["error"]
        assert reply.status_code == 400
        assert "This model's maximum context length is 512 tokens" in error["message"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


LETTERS = {str(each): 100 for each in TOKENIZER("abcdefgh")["input_ids"]}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("num_letters", [1, 2, 5])
def test_logprobs_have_nothing_of_the_stop_string_that_ended_the_answer(server, streams, num_letters):
    body = {"max_tokens": 40, "logit_bias": LETTERS, "seed": 1, "logprobs": True}
    whole = chat(server, **body).choices[0]
    for start in range(0, 30, 3):
        stop = whole.message.content[start : start + num_letters]
        text = whole.message.content.partition(stop)[0]
        asked = {**body, "stop": stop, "prediction": {"type": "content", "content": whole.message.content}}
        if streams:
            told, entries = "", []
            for chunk in chat(server, **asked, stream=True):
                told += chunk.choices[0].delta.content or ""
                entries += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
                spelt = "".join(entry.token for entry in entries)
                assert spelt == told, "each chunk has the log-probabilities of its text"
        else:
            choice = chat(server, **asked).choices[0]
            told, entries = choice.message.content, choice.logprobs.content
        assert told == text
        assert "".join(entry.token for entry in entries) == text
        shown = whole.logprobs.content[: len(entries)]
        assert [entry.logprob for entry in entries] == pytest.approx(
            [entry.logprob for entry in shown], abs=1e-3
        )


def test_a_compressed_body_is_refused_with_a_word(server):
    body = gzip.compress(json.dumps({"messages": HELLO, "max_tokens": 1}).encode())
    for path in ("chat/completions", "completions", "responses"):
        reply = httpx.post(f"{server.url}/v1/{path}", content=body, headers={"Content-Encoding": "gzip"})
        assert reply.status_code == 415 and reply.json()["error"]["code"] == "compressed_body"
        assert "send the JSON as it is" in reply.json()["error"]["message"]
    as_it_is = {"Content-Encoding": "identity"}
    reply = httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}, headers=as_it_is)
    assert reply.status_code == 200


def test_other_refusals_are_in_the_same_form(server):
    client = client_of(server)
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not here; there is 'tiny'"):
        chat(server, model="gpt")
    with pytest.raises(
        openai.BadRequestError, match="maximum context length is 512 tokens, and the prompt has 600"
    ):
        client.completions.create(model="tiny", prompt=[5] * 600)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    for method, path, status in (("GET", "/v1/chat/completions", 405), ("GET", "/nowhere", 404)):
        reply = httpx.request(method, server.url + path)
        assert reply.status_code == status and reply.json()["error"]["message"]
    for body in (
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"temperature": NaN}',
        b'{"messages": "\\ud800"}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}",
    ):
        reply = httpx.post(f"{server.url}/v1/chat/completions", content=body)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_json"
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "unknown": 1, "max_tokens": 1})
    assert reply.status_code == 200 and reply.headers["x-request-id"]


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
@pytest.mark.parametrize(
    "path, body",
    [
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "x": "HERE"}}]}),
        ("chat/completions", {"response_format": {"json_schema": {"schema": {"maximum": "HERE"}}}}),
        ("responses", {"tools": [{"type": "function", "name": "f", "parameters": {"default": "HERE"}}]}),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": {"maximum": "HERE"}}}}),
        ("completions", {"prompt": "a", "unknown": ["HERE"]}),
    ],
)
def test_numbers_that_are_not_finite_are_refused_wherever_they_stand(server, path, body, number):
    content = json.dumps(body).replace('"HERE"', number)
    reply = httpx.post(f"{server.url}/v1/{path}", content=content)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_json"
    assert f"numbers must be finite, got {number}" in reply.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_row(server):
    stream = chat(server, max_tokens=480, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert server.num_active == 1
    stream.close()
    wait_until(lambda: server.num_active == 0)
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"messages": HELLO, "max_tokens": 480, "ignore_eos": True})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    wait_until(lambda: server.num_active == 1)
    connection.close()
    wait_until(lambda: server.num_active == 0)
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
    assert httpx.get(f"{server.url}/health").status_code == 200


def metrics_of(server: Running) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    parts = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name.removeprefix("medusa:"): float(value) for name, _, value in parts}


def test_a_request_runs_or_waits_in_the_metrics_while_its_prompt_is_read(server, monkeypatch):
    server.slowed(monkeypatch, 0.05)
    body, seen = {"prompt": "a" * 400, "max_tokens": 1}, []
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        wait_until(lambda: server.num_active == 1)
        while server.num_active:
            values = metrics_of(server)
            if server.num_active:
                seen.append(values["num_requests_running"] + values["num_requests_waiting"])
        asked.result().raise_for_status()
    assert (
        len(seen) > 4 and seen.count(1.0) >= len(seen) - 2
    )  # the moments in which it starts and ends may miss it


def test_tokens_behind_a_stop_string_are_not_counted_in_the_metrics(server):
    def asked(**more) -> dict:
        body = {"prompt": "Hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True, **more}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()

    text, before, num_told = asked()["choices"][0]["text"], metrics_of(server)["generation_tokens_total"], 0
    for stop in {*text}:  # several tokens a step, so that some stand behind it
        reply = asked(stop=stop, prediction={"type": "content", "content": text})
        num_told += reply["usage"]["completion_tokens"]
    assert metrics_of(server)["generation_tokens_total"] - before == num_told


def test_metrics_of_drafting_are_those_that_clients_are_told():
    def drafting(server) -> list[float]:
        values = metrics_of(server)
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        return [values[f"spec_decode_{name}_total"] for name in names]

    with running(chat_model(), allow_plain=True) as server:
        told, steps, known = [0, 0], 0, dict[str, dict]()
        cut = [{"max_tokens": 2}] * 12  # a guessed token may be the last one
        for more in ({}, {"stop": "e"}, {"n": 3}, *cut, {"medusa_plain": True}):
            body = {
                "prompt": "Hello",
                "max_tokens": 40,
                "ignore_eos": True,
                "temperature": 0,
                **known,
                **more,
            }
            reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            known = known or {"prediction": {"type": "content", "content": reply["choices"][0]["text"]}}
            told = [
                before + sum(reply["usage"]["medusa"][name])
                for before, name in zip(told, ("drafted_per_depth", "accepted_per_depth"), strict=True)
            ]
            steps += reply["usage"]["medusa"]["num_steps"]
        drafts, *tokens = drafting(server)
        assert tokens == told and told[1] > 0
        assert 0 < drafts <= min(tokens[0], steps)
        values = metrics_of(server)
        positions = [value for name, value in values.items() if "accepted_tokens_per_pos_total" in name]
        assert sum(positions) == told[1]


def test_a_step_that_drafted_nothing_is_no_draft():
    with running(chat_model(), plain=True) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 9}, timeout=60)
        values = metrics_of(server)
        assert values["generation_tokens_total"] > 1
        assert values["spec_decode_num_drafts_total"] == values["spec_decode_num_draft_tokens_total"] == 0


def test_metrics_count_what_was_done(server):
    client_of(server).completions.create(model="tiny", prompt="Hello", max_tokens=20, temperature=0)
    values = metrics_of(server)
    assert values["generation_tokens_total"] > 10
    assert values["spec_decode_num_draft_tokens_total"] > 0
    assert values["time_to_first_token_seconds_count"] > 0
    assert 'spec_decode_num_accepted_tokens_per_pos_total{position="0"}' in values
    assert values["num_requests_running"] == 0


def test_a_server_with_a_key_wants_it_and_large_bodies_are_refused():
    with running(chat_model(), AccessOptions(api_key=("secret", "other"), max_body_mib=1)) as guarded:
        url = f"{guarded.url}/v1/models"
        for given in ("", "Bearer wrong", "Bearer \xe9", "Bearer", "Basic other", "bearerother", "other"):
            reply = httpx.get(url, headers={"Authorization": given.encode("latin-1")} if given else {})
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        key = {"Authorization": "Bearer other"}
        for given in ("Bearer other", "bearer other", "BEARER   secret"):
            assert httpx.get(url, headers={"Authorization": given}).status_code == 200
        assert httpx.get(f"{guarded.url}/health").status_code == 200
        assert httpx.get(f"{guarded.url}/metrics").status_code == 401
        body = json.dumps({"prompt": "x" * 2**20}).encode()
        for content in (body, iter([body[:1500], body[1500:]])):
            reply = httpx.post(f"{guarded.url}/v1/completions", content=content, headers=key)
            assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"


def test_a_key_does_not_learn_what_another_has_asked(tiny_chat_model):
    with running(tiny_chat_model, AccessOptions(api_key=("a", "b"))) as guarded:

        def num_cached(key: str) -> int:
            client = client_of(guarded, key)
            asked = {"model": "tiny", "prompt": "my number is 1234", "max_tokens": 4, "seed": 1}
            return client.completions.create(**asked).usage.prompt_tokens_details.cached_tokens

        assert [num_cached(key) for key in "abab"] == [0, 0, 16, 16]


def test_decoding_plainly_is_for_servers_that_allow_it(server, open_server):
    body = {"messages": HELLO, "max_tokens": 4, "medusa_plain": True}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    refused = httpx.post(f"{open_server.url}/v1/chat/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "medusa_plain"
    assert [*open_server.service.worker.batches] == [False]
    assert ['id="race" hidden' in httpx.get(each.url).text for each in (server, open_server)] == [False, True]
    for each in (server, open_server):
        assert httpx.get(f"{each.url}/metrics").status_code == 200


OTHERS = AccessOptions(
    cors_origin=("https://chat.example", "tauri://localhost"), allowed_host=("medusa.example", "10.0.0.7")
)


@pytest.fixture(scope="module")
def open_server(tiny_chat_model):
    with running(tiny_chat_model, OTHERS) as started:
        yield started


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/completions"])
def test_a_name_that_is_not_the_servers_own_gets_nothing(open_server, path):
    method = "POST" if path == "/v1/completions" else "GET"
    headers = {"Host": "evil.example", "Origin": "http://evil.example"}
    reply = httpx.request(method, open_server.url + path, headers=headers, json={"prompt": "a"})
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "host_not_allowed"


FOREIGN_HOSTS = ["evil.example:8000", "127.0.0.1.evil.example:8000", "10.0.0.8", "", "localhost.evil.example"]
FOREIGN_HOSTS += ["[::2]:8000", "x@127.0.0.1", "127.0.0.1:1:2", "medusa.example.org"]
LOCAL_HOSTS = ["localhost:8000", "127.0.0.1", "127.0.0.9:8000", "[::1]:8000", "0.0.0.0:1"]
ALLOWED_HOSTS = ["medusa.example", "Medusa.Example:80", "10.0.0.7:5"]


def test_local_names_and_those_that_the_operator_allows_are_the_servers_own():
    for allowed in (OTHERS.allowed_host, ()):
        answered = [
            host
            for host in (*FOREIGN_HOSTS, *LOCAL_HOSTS, *ALLOWED_HOSTS)
            if refusal_of_host(host, "127.0.0.1", allowed) is None
        ]
        assert answered == [*LOCAL_HOSTS, *(ALLOWED_HOSTS if allowed else [])]
    for own in ("192.0.2.3", "::ffff:192.0.2.3"):  # the address on which it was asked
        assert refusal_of_host("192.0.2.3:8000", own, ()) is None
        assert refusal_of_host("192.0.2.4:8000", own, ()) is not None
    assert refusal_of_host("[2001:DB8:0::1]:8000", "2001:db8::1", ()) is None


FOREIGN_ORIGINS = ["https://evil.example", "null", "", "http://localhost:1", "http://127.0.0.1", "file://"]
FOREIGN_ORIGINS += ["https://chat.example.org", "http://chat.example", "https://chat.example:8000"]


def test_pages_of_other_origins_have_nothing_computed(open_server):
    body, before = json.dumps({"prompt": "a", "max_tokens": 1}), num_ended(open_server)
    for origin in FOREIGN_ORIGINS:
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        reply = httpx.post(f"{open_server.url}/v1/completions", content=body, headers=headers)
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "origin_not_allowed"
    assert num_ended(open_server) == before


def test_pages_of_the_server_and_of_origins_that_the_operator_names_may_ask(server, open_server):
    body = {"prompt": "a", "max_tokens": 1}
    for origin in ("http://127.0.0.1:{port}", "https://chat.example", "tauri://localhost"):
        headers = {"Origin": origin.format(port=open_server.port)}
        reply = httpx.post(f"{open_server.url}/v1/completions", json=body, headers=headers)
        assert reply.status_code == 200
        allowed = None if "port" in origin else origin
        assert reply.headers.get("access-control-allow-origin") == allowed
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 403
    own = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=own).status_code == 200
    assert refusal_of_origin("https://any.example", "127.0.0.1", ("*",)) is None


def test_past_the_queue_clients_are_told_when_to_come_back_and_late_answers_end(monkeypatch):
    with running(chat_model(), max_rows=1, max_waiting=0) as small:
        asked = {"max_tokens": 480, "extra_body": {"ignore_eos": True}}
        small.slowed(monkeypatch, 0.05)
        stream = chat(small, **asked, stream=True)
        next(iter(stream))
        with pytest.raises(openai.InternalServerError) as refused:
            chat(small, **asked)
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
        for answer in [*small.service.worker._active]:
            answer.deadline = 0.0
        with pytest.raises(openai.APIError, match="longer than this server allows"):
            list(stream)
        small.service.is_draining = True
        assert httpx.get(f"{small.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            chat(small, **asked)


def test_told_to_stop_a_server_ends_what_is_running_and_takes_nothing_new(tiny_chat_model, monkeypatch):
    with running(tiny_chat_model) as ending:
        ending.slowed(monkeypatch, 0.05)
        stream = chat(ending, max_tokens=24, temperature=0, stream=True)
        pieces = [next(iter(stream))]
        ending.server.handle_exit(signal.SIGTERM, None)
        pieces += list(stream)
        _, text = expected(tiny_chat_model, HELLO, max_new_tokens=24, do_sample=False)
        assert said(pieces) == text
        with pytest.raises(httpx.TransportError):  # refused, or reset
            for _ in range(500):
                assert httpx.get(f"{ending.url}/health").status_code == 503
                time.sleep(0.02)


@pytest.mark.parametrize(("grace", "num_signals"), [(0, 1), (0.4, 1), (60, 2)])
def test_answers_that_are_cut_off_at_the_end_are_told_so(
    tiny_chat_model, caplog, monkeypatch, grace, num_signals
):
    with running(tiny_chat_model, grace_seconds=grace) as ending, ThreadPoolExecutor() as pool:
        batch = ending.slowed(monkeypatch, 0.05)
        body = {"messages": HELLO, "max_tokens": 480, "ignore_eos": True}
        url = f"{ending.url}/v1/chat/completions"
        whole = pool.submit(httpx.post, url, json=body, timeout=60)
        streamed = pool.submit(httpx.post, url, json={**body, "stream": True}, timeout=60)
        wait_until(lambda: ending.num_active == 2 and batch.num_rows == 2)
        began = time.monotonic()
        for _ in range(num_signals):
            ending.server.handle_exit(signal.SIGTERM, None)
        assert whole.result().status_code == 503 and whole.result().headers["retry-after"]
        assert whole.result().json()["error"]["code"] == "shutting_down"
        *_, failure, done, rest = streamed.result().text.split("\n\n")
        assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert (done, rest) == ("data: [DONE]", "")
        assert grace * (num_signals == 1) <= time.monotonic() - began < 20
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_reads_nothing_does_not_keep_the_server_from_its_end(
    tiny_chat_model, monkeypatch, caplog
):
    monkeypatch.setattr("medusa.serving.server.LAST_SECONDS", 0.1)
    with running(tiny_chat_model, grace_seconds=0) as ending, socket.socket() as half:
        half.connect(("127.0.0.1", ending.port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
        wait_until(lambda: ending.server.server_state.tasks)
        ending.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: not ending.server.server_state.connections, 20)
    assert not [record for record in caplog.records if record.exc_info]


def test_half_a_body_leaves_one_line_in_the_log(server, caplog):
    caplog.set_level(logging.INFO)
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{")
    wait_until(lambda: [name for name, *_ in caplog.record_tuples if name == "medusa.serving"])
    (record,) = [each for each in caplog.records if each.name in ("medusa.serving", "uvicorn.error")]
    assert json.loads(record.message)["refused"] == 499 and not record.exc_info


REFUSED = [
    ({"path": "/nowhere/secret" * 100}, 404, None),
    ({"path": "/v1/completions", "method": "GET"}, 405, None),
    ({"json": {"prompt": "secret", "n": 99}}, 400, None),
    ({"json": {"prompt": "a", "model": "secret"}}, 404, "model_not_found"),
    ({"content": b"secret"}, 400, "invalid_json"),
    ({"content": b"secret" * 2**20}, 413, "body_too_large"),
    ({"headers": {"Origin": "https://secret.example"}}, 403, "origin_not_allowed"),
]


@pytest.mark.parametrize(("asked", "status", "code"), REFUSED)
def test_a_refused_request_leaves_one_line_without_what_was_written(server, caplog, asked, status, code):
    given = {"path": "/v1/completions", "method": "POST", **asked}
    with caplog.at_level(logging.INFO, "medusa.serving"):
        reply = httpx.request(url=server.url + given.pop("path"), **given)
        wait_until(lambda: caplog.messages)
    (line,) = [json.loads(message) for message in caplog.messages]
    assert reply.status_code == line["refused"] == status and line["code"] == code
    assert line["request_id"] == reply.headers["x-request-id"] and len(line["path"]) <= 200
    assert "secret" not in json.dumps({**line, "path": ""})


def test_a_fault_of_the_server_leaves_one_traceback_and_tells_nothing(server, caplog, monkeypatch):
    def fails(*_given):
        raise ArithmeticError("secret")

    monkeypatch.setattr(Service, "prompts", fails)
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 500 and reply.headers["x-request-id"] in reply.json()["error"]["message"]
    assert "secret" not in reply.text
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_a_request_that_breaks_the_model_is_told_so_and_no_more(caplog, monkeypatch):
    with running(chat_model()) as broken:

        def fails(*_args):
            raise RuntimeError("secret path /etc/passwd")

        monkeypatch.setattr(Runner, "verify", fails)
        asked = {"max_tokens": 30, "temperature": 0}
        with pytest.raises(openai.InternalServerError) as told:
            chat(broken, **asked)
        assert "secret" not in str(told.value)
        with pytest.raises(openai.APIError, match="the server failed on this answer"):
            list(chat(broken, **asked, stream=True))
        monkeypatch.undo()
        assert chat(broken, **asked).choices[0].message.content
        broken.service.worker.close()
        assert httpx.get(f"{broken.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="cannot answer any more"):
            chat(broken, **asked)


def test_requests_of_random_lengths_that_come_and_go_leave_nothing_behind(server):
    chance = random.Random(0)

    async def visit(client, index):
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": chance.randint(1, 40), "seed": index}
        stream = await client.chat.completions.create(**asked, stream=True)
        stay = chance.randint(0, 20)
        async for _ in stream:
            stay -= 1
            if stay < 0:
                break
        await stream.close()

    async def everybody():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            await asyncio.gather(*(visit(client, index) for index in range(12)))

    asyncio.run(everybody())
    wait_until(lambda: server.num_active == 0)
    batches = server.service.worker.batches.values()
    wait_until(lambda: not any(batch.is_busy for batch in batches))  # one that was left ends at its next step


def test_the_log_is_as_it_was_when_serving_ends():
    def state():
        return list(log.handlers), log.propagate, log.level

    before = state()
    with log_to_standard_error():
        assert state() != before
        assert log.isEnabledFor(logging.INFO)
    assert state() == before
