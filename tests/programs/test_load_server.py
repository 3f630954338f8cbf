"""scripts/load_server.py: many clients at once, and what they waited."""

import asyncio
import json

import pytest
from conftest import program
from tiny_chat import chat_model
from tiny_server import running

from medusa.cli.options import parse
from medusa.decoding.continuous_batch import BatchLimits


@pytest.fixture(scope="module")
def load():
    return program("scripts/load_server.py")


def test_every_question_is_asked_and_counted(load, tmp_path):
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text('{"prompt": "Hello"}\n{"prompt": "Hello there"}\n')
    with running(chat_model()) as server:
        words = ["--url", server.url, "--prompts", str(prompts), "--json", str(report), "--clients", "1", "3"]
        words += ["--requests", "5", "--max-new-tokens", "4", "9", "--pause", "0.001"]
        load.load_server(parse(load.LoadTestOptions, words))
        found = json.loads(report.read_text())
        assert found["model"] == "tiny"
    for clients in (1, 3):
        waited = found[f"clients_{clients}"]
        assert 5 <= waited["num_tokens"] <= 45 and waited["refused"] == 0
        assert 0 < waited["time_to_first_token"]["p50"] <= waited["time_to_first_token"]["p99"]


def test_refusals_are_counted_and_failures_are_said(load):
    with running(chat_model(), limits=BatchLimits(max_rows=1, max_waiting=0)) as server:
        server.service.is_draining = True
        given = parse(load.LoadTestOptions, ["--url", server.url, "--requests", "2"])
        messages = [[{"role": "user", "content": "Hello"}]]
        assert asyncio.run(load.run(given, 2, messages, "tiny")).refused == 2
        with pytest.raises(ValueError, match="the server answered 404"):
            asyncio.run(load.run(given, 1, messages, "gpt"))


def test_percentiles_lie_between_the_values(load):
    assert load.percentiles([float(each) for each in range(101)]) == {"p50": 50, "p95": 95, "p99": 99}
    assert load.percentiles([2.0])["p99"] == 2 and load.percentiles([])["p50"] is None
