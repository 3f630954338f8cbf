"""A server whose batch runs static steps, as on a card: several steps pass before the host looks."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tiny_chat import chat_model
from tiny_server import HELLO, TOKENIZER, chat, expected, running

from medusa import MedusaModel

QUESTIONS = [
    [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": word}] for word in "abcd"
]


@pytest.fixture(scope="module")
def tiny_chat_model():
    return chat_model()


@pytest.fixture(scope="module")
def server(tiny_chat_model):
    model = tiny_chat_model
    static = MedusaModel(model.base, model.heads, model.tree, model.tokenizer, model.engine, step="static")
    with running(static) as started:
        started.service.worker.batches[False]._stepper.interval = 8
        yield started


def test_clients_that_come_and_go_get_what_each_gets_alone(server, tiny_chat_model):
    """Some stream, some are sampled, and some ask for what static steps do not give."""
    sampled = {"temperature": 0.7, "seed": 5}
    asked = [
        (question, rule, more, max_tokens)
        for question, max_tokens in zip(QUESTIONS, (24, 9, 40, 15), strict=True)
        for rule in ({"temperature": 0.0}, sampled)
        for more in ({}, {"logprobs": True}, {"stream": True})
    ]

    def answer(question, rule, more, max_tokens):
        found = chat(server, messages=question, max_tokens=max_tokens, **rule, **more)
        if "stream" not in more:
            return found.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)

    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda each: answer(*each), asked)]
    for text, (question, rule, _, max_tokens) in zip(found, asked, strict=True):
        options = {"do_sample": True, "top_k": 0, **rule} if rule["temperature"] else {"do_sample": False}
        assert text == expected(tiny_chat_model, question, **options, max_new_tokens=max_tokens)[1]


def test_tokens_after_a_stop_string_are_told_to_nobody_and_not_learned_from(
    server, tiny_chat_model, monkeypatch
):
    _, text = expected(tiny_chat_model, HELLO, do_sample=False, max_new_tokens=60)
    stop = re.search("[A-Za-z]{2}", text.split("|>")[-1])[0]
    learned: list[list[int]] = []
    learning = SimpleNamespace(pause=lambda: None, add=lambda prompt, tokens: learned.append([*tokens]))
    monkeypatch.setattr(server.service.worker, "learning", learning)
    answer = chat(server, max_tokens=60, temperature=0.0, stop=[stop])
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    (tokens,) = learned
    assert len(tokens) == answer.usage.completion_tokens
    assert stop in TOKENIZER.decode(tokens) and stop not in TOKENIZER.decode(tokens[:-1])
