"""scripts/load_server.py: many clients at once, and what they waited."""

import asyncio
import json

import pytest
from conftest import program
from tiny_chat import chat_model, chat_tokenizer
from tiny_server import running

from medusa.cli.options import parse

MESSAGES = [[{"role": "user", "content": "Hello"}]]


@pytest.fixture(scope="module")
def load():
    return program("scripts/load_server.py")


def test_servers_take_turns_and_what_comes_in_the_time_is_counted(load, tmp_path):
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text('{"prompt": "Hello"}\n{"prompt": "Hello there"}\n')
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    with running(chat_model()) as server:
        words = ["--servers", f"one={server.url}", f"other={server.url},tiny", "--prompts", str(prompts)]
        words += ["--json", str(report), "--clients", "1", "3", "--seconds", "0.4", "--pause", "0.001"]
        words += ["--rounds", "2", "--long-prompt", "10", "--max-new-tokens", "4", "9"]
        words += ["--tokenizer", str(tmp_path / "tokenizer")]
        load.load_server(parse(load.LoadTestOptions, words))
        found = json.loads(report.read_text())
    assert [(name, model) for name, _, model in found["servers"]] == [("one", "tiny"), ("other", "tiny")]
    for clients in (1, 3):
        assert list(found[f"clients_{clients}"]) == ["one", "other"]
        for waited in found[f"clients_{clients}"].values():
            assert waited["num_answers"] >= 1 and waited["refused"] == 0 and waited["num_long"] >= 1
            assert waited["tokens_per_second"] == pytest.approx(waited["num_tokens"] / 0.8)
            assert 0 <= waited["halves_differ_by"] < 2
            assert 0 < waited["time_to_first_token"]["p50"] <= waited["time_to_first_token"]["p99"]


def test_an_answer_under_way_counts_as_far_as_it_has_come(load):
    with running(chat_model(context=2**16), max_new_tokens=60_000, cache_mib=512) as server:
        words = ["--seconds", "0.5", "--max-new-tokens", "50000", "50000", "--temperature", "1"]
        asked = load.Load(parse(load.LoadTestOptions, words), 1, MESSAGES, "tiny")
        asyncio.run(asked.run(server.url))
    asked.end_round(chat_tokenizer())
    assert asked.waits.num_answers == 0 and asked.as_dict()["num_tokens"] > 0


def test_a_round_goes_on_with_the_next_question_and_halves_of_the_rounds_are_compared(load):
    with running(chat_model()) as server:
        words = ["--seconds", "0.3", "--max-new-tokens", "4", "4"]
        asked = load.Load(parse(load.LoadTestOptions, words), 1, MESSAGES, "tiny")
        asyncio.run(asked.run(server.url))
        asked.end_round(chat_tokenizer())
        before = set(asked.waits.texts)
        asyncio.run(asked.run(server.url))
        asked.end_round(chat_tokenizer())
    first, second = asked.tokens_by_round
    assert first > 0 < second and asked.as_dict()["num_tokens"] == first + second
    assert min(set(asked.waits.texts) - before) > max(before)
    assert asked.as_dict()["tokens_per_second"] == pytest.approx((first + second) / 0.6)
    assert load.difference([30, 20, 30, 20]) == pytest.approx(0.4)
    assert load.difference([30, 20, 30]) is None and load.difference([0, 0]) is None


def test_refusals_are_counted_and_failures_are_said(load):
    with running(chat_model(), max_rows=1, max_waiting=0) as server:
        server.service.is_draining = True
        given = parse(load.LoadTestOptions, ["--seconds", "2"])  # each comes back later, as it is told
        refused = load.Load(given, 2, MESSAGES, "tiny")
        asyncio.run(refused.run(server.url))
        assert refused.waits.refused in range(2, 5)
        with pytest.raises(ValueError, match="the server answered 404"):
            asyncio.run(load.Load(given, 1, MESSAGES, "gpt").run(server.url))


def test_a_server_that_is_not_there_is_named(load):
    complaint = r"one tells no model at http://127.0.0.1:9/v1/models \(.*\); start it first"
    with pytest.raises(ValueError, match=complaint):
        load.load_server(parse(load.LoadTestOptions, ["--servers", "one=http://127.0.0.1:9"]))


def test_percentiles_lie_between_the_values(load):
    assert load.percentiles([float(each) for each in range(101)]) == {"p50": 50, "p95": 95, "p99": 99}
    assert load.percentiles([2.0])["p99"] == 2 and load.percentiles([])["p50"] is None
