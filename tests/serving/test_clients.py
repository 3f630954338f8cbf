"""Clients that others wrote get from the server what `generate` gives.

A client runs in the first Python that has it: this one, or one of CLIENT_PYTHONS, since two versions of one
package do not fit one environment:

    python3 -m venv clients
    clients/bin/pip install 'openai<3' langchain-openai litellm llm anthropic ollama
    CLIENT_PYTHONS=$PWD/clients/bin/python pytest -m slow tests/serving/test_clients.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tiny_chat import chat_model, tool_model
from tiny_server import HELLO, TOOL, expected, running, wait_until


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("llguidance")
    with running(tool_model()) as started:
        yield started


@pytest.fixture(scope="module")
def answer() -> tuple[list[int], str]:
    return expected(chat_model(context=2048), HELLO, do_sample=False, max_new_tokens=24)


PYTHONS = [sys.executable, *filter(None, os.environ.get("CLIENT_PYTHONS", "").split(os.pathsep))]
VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=plain)


def python_with(package: str, version: str) -> str:
    for python in PYTHONS:
        found = ran(python, "-c", VERSION, package)
        if found.returncode == 0 and found.stdout.startswith(version):
            return python
    wanted = f"{package} {version}".strip()
    pytest.skip(f"no Python of CLIENT_PYTHONS has {wanted}; the docstring says how to make one")


CLIENTS = [("openai", "2."), ("openai", "3."), ("langchain-openai", ""), ("litellm", ""), ("llm", "")]
CLIENTS += [("anthropic", ""), ("ollama", "")]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "version"), CLIENTS, ids=[" ".join(each).strip() for each in CLIENTS])
def test_a_client_gets_the_answer_of_generate_calls_and_forms_streamed_or_not(
    server, answer, package, version, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    program = Path(__file__).with_name(f"ask_with_{package.partition('-')[0]}.py")
    asking = ran(python_with(package, version), str(program), server.url, json.dumps(TOOL))
    assert asking.returncode == 0, asking.stderr
    found = json.loads(asking.stdout.splitlines()[-1])
    tokens, text = answer
    assert found["texts"] == dict.fromkeys(found["texts"], text)
    assert {*found["tokens"]} == {len(tokens)}
    for name, arguments in found["calls"]:
        assert name == "weather" and isinstance(json.loads(arguments)["warm"], bool)
    assert {*map(json.loads, found["formed"])} <= {"yes", "no"}
    if package in ("anthropic", "ollama"):
        assert found["refused"] == "max_tokens" if package == "anthropic" else "images" in found["refused"]
    if package == "openai":
        assert found["models"] == ["tiny"] and found["completion"] and found["refused"] == "temperature"
    wait_until(lambda: server.num_active == 0)


def test_the_calls_of_open_webui_are_answered_as_it_reads_them(server, answer):
    """As `routers/openai.py` and `utils/middleware.py` of its version 0.12.4 ask and read."""
    headers = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "A%20B", "X-OpenWebUI-Chat-Id": "c"}
    with httpx.Client(base_url=f"{server.url}/v1", headers=headers, timeout=60) as client:

        def streamed(**more) -> tuple[str, list[dict], dict]:
            """The text, the calls and the usage."""
            body = {"model": model["id"], "messages": HELLO, "temperature": 0, "max_tokens": 24, **more}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            text, calls, usage = "", list[dict](), {}
            with client.stream("POST", "/chat/completions", json=body) as reply:
                assert reply.status_code == 200 and "text/event-stream" in reply.headers["content-type"]
                for line in reply.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    usage |= chunk.get("usage") or {}
                    for choice in chunk["choices"][:1]:
                        text += choice["delta"].get("content") or ""
                        for call in choice["delta"].get("tool_calls") or ():
                            known = [each for each in calls if each["index"] == call["index"]]
                            if known:
                                known[0]["function"]["arguments"] += call["function"]["arguments"]
                            else:
                                calls.append(call)
            return text, calls, usage

        (model,) = client.get("/models").json()["data"]
        text, _, usage = streamed()
        assert (text, usage["completion_tokens"]) == (answer[1], len(answer[0]))
        _, calls, _ = streamed(tools=[TOOL], tool_choice="required", max_tokens=90)
        (call,) = calls
        assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])
        said = {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": calls}
        came = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "yes"}]}
        text, _, usage = streamed(messages=[*HELLO, said, came], tools=[TOOL])
        assert text and usage["prompt_tokens"] > 100
        title = {"model": model["id"], "messages": HELLO, "stream": False, "max_tokens": 24, "temperature": 0}
        reply = client.post("/chat/completions", json=title).json()
        assert reply["choices"][0]["message"]["content"] == answer[1]


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
