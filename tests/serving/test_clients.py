"""Clients that others wrote get from the server what `generate` gives.

Each client runs in a Python of its own, named by an environment variable, since two versions of one package
do not fit one environment:

    python3 -m venv openai2 && openai2/bin/pip install 'openai>=2,<3'
    python3 -m venv openai3 && openai3/bin/pip install 'openai>=3,<4'
    python3 -m venv others && others/bin/pip install langchain-openai litellm mcp
    OPENAI2_PYTHON=$PWD/openai2/bin/python OPENAI3_PYTHON=$PWD/openai3/bin/python \\
        LANGCHAIN_PYTHON=$PWD/others/bin/python LITELLM_PYTHON=$PWD/others/bin/python \\
        pytest -m slow tests/serving/test_clients.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tiny_chat import TOOL_TEMPLATE, chat_model
from tiny_server import Running, expected, running, wait_until

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says whether it is warm.",
        "parameters": {**WEATHER, "additionalProperties": False},
    },
}


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("llguidance")
    model = chat_model(context=2048)
    model.tokenizer.chat_template = TOOL_TEMPLATE
    with running(model) as started:
        yield started


@pytest.fixture(scope="module")
def answer() -> tuple[list[int], str]:
    return expected(chat_model(context=2048), HELLO, do_sample=False, max_new_tokens=24)


def found_by(variable: str, program: str, server: Running) -> dict:
    """What the client of that environment got."""
    python = os.environ.get(variable)
    if python is None:
        pytest.skip(f"{variable} names no Python with this client; the docstring says how to make one")
    script = Path(__file__).with_name(program)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [python, str(script), server.url, json.dumps(TOOL)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, env=plain)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "major"), [("OPENAI2_PYTHON", "2."), ("OPENAI3_PYTHON", "3.")])
def test_openai_streamed_or_not_async_or_not_and_cancelled_midway(server, answer, variable, major):
    found = found_by(variable, "ask_with_openai.py", server)
    tokens, text = answer
    assert found["version"].startswith(major) and found["models"] == ["tiny"] and found["completion"]
    assert {found[way] for way in ("whole", "streamed", "async", "async_streamed")} == {text}
    assert found["tokens"] == found["streamed_tokens"] == len(tokens)
    assert found["was_cancelled"] and found["refused"] == "temperature"
    assert found["called"] == "weather" and json.loads(found["formed"]) in ("yes", "no")
    wait_until(lambda: server.num_active == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "program"),
    [("LANGCHAIN_PYTHON", "ask_with_langchain.py"), ("LITELLM_PYTHON", "ask_with_litellm.py")],
)
def test_langchain_and_litellm(server, answer, variable, program):
    found = found_by(variable, program, server)
    tokens, text = answer
    assert {found[way] for way in ("whole", "streamed", "async")} == {text}
    assert found["tokens"] == len(tokens) and found["called"] == "weather"
    assert found.get("formed", ["ok"]) == ["ok"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_streamed_or_not_and_cut_off(server, answer):
    asked = {"messages": HELLO, "max_tokens": 24, "temperature": 0}

    def curl(body: dict, *words: str) -> str:
        url, data = f"{server.url}/v1/chat/completions", json.dumps(body)
        command = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", data, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout

    assert json.loads(curl(asked))["choices"][0]["message"]["content"] == answer[1]
    lines = [line for line in curl({**asked, "stream": True}).splitlines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == answer[1]
    curl({**asked, "max_tokens": 1500, "ignore_eos": True, "stream": True}, "--max-time", "0.3")
    wait_until(lambda: server.num_active == 0)
