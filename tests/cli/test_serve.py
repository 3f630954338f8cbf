"""``medusa serve``: from flags to a server, and a real one from its start to its end."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys

import openai
import pytest
from conftest import CHECKOUT, REAL_BASE
from tiny_chat import chat_model, save_chat_model

from medusa.cli import serve
from medusa.cli.main import main
from medusa.serving import server
from medusa.serving.gate import AccessSettings
from medusa.serving.service import Service, ServiceSettings


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("served"))


def flags_of(directories) -> list[str]:
    base, heads = directories
    return ["serve", "--base", base, "--heads", heads, "--port", "0"]


def test_flags_reach_the_server(directories, monkeypatch, capsys):
    started = []

    def run(service, access, bound, grace):
        started.append((service, access, bound.getsockname()[0], grace))

    monkeypatch.setattr(server, "run_server", run)
    monkeypatch.setenv("MEDUSA_API_KEY", "third, fourth")
    assert main(flags_of(directories)) == 0
    assert started.pop()[0].worker.batches[False].limits.chunk == 64
    flags = ["--allowed-host", "a.example", "b.example", "--cors-origin", "https://Chat.example"]
    flags += ["--api-key", "first", "--api-key=second", "--max-rows", "3", "--prefix-mib", "1"]
    flags += ["--chunk", "7", "--timeout", "9"]
    assert main([*flags_of(directories), *flags, "--host", "0.0.0.0", "--model-name", "mine"]) == 0
    ((service, access, host, grace),) = started
    limits = service.worker.batches[False].limits
    assert (limits.max_rows, limits.prefix_bytes, limits.chunk) == (3, 2**20, 7)
    assert (service.settings.model_name, service.settings.seconds) == ("mine", 9)
    assert access.api_keys == ("first", "second", "third", "fourth")
    assert access.allowed_hosts == ("0.0.0.0", "a.example", "b.example")
    assert access.cors_origins == ("https://chat.example",)
    assert (host, grace) == ("0.0.0.0", 30)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "variable", "source"),
    [
        (["--api-key", ""], None, "--api-key"),
        (["--api-key="], None, "--api-key"),
        (["--api-key", "good", "--api-key", " "], None, "--api-key"),
        (["--api-key"], None, "--api-key"),
        (["--api-key", "a\nb"], None, "--api-key"),
        (["--api-key", "clé"], None, "--api-key"),
        ([], "", "MEDUSA_API_KEY"),
        ([], "good, ", "MEDUSA_API_KEY"),
        (["--api-key", "good"], ",", "MEDUSA_API_KEY"),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_key_that_is_none_starts_no_server(monkeypatch, capsys, flags, variable, source, host):
    monkeypatch.delenv("MEDUSA_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("MEDUSA_API_KEY", variable)
    monkeypatch.setattr(serve, "load_model", lambda *_: pytest.fail("a model is loaded"))
    try:
        status = main(["serve", "--host", host, *flags])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status in (1, 2) and f"error: {source} must" in said
    assert not {"good", "clé"} & set(said.split())


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("host", ""),
        ("host", "http://127.0.0.1"),
        ("allowed-host", ""),
        ("allowed-host", "chat.example:8000"),
        ("allowed-host", "*"),
        ("cors-origin", "chat.example"),
        ("cors-origin", "https://chat.example/"),
        ("cors-origin", "null"),
        ("cors-origin", ""),
    ],
)
def test_a_name_that_no_browser_sends_is_refused(capsys, flag, value):
    with pytest.raises(SystemExit):
        main(["serve", f"--{flag}", value])
    assert f"{flag.replace('-', '_')} must be" in " ".join(capsys.readouterr().err.split())


def test_another_host_without_a_key_is_warned_of(directories, monkeypatch, capsys):
    monkeypatch.setattr(server, "run_server", lambda *_: None)
    monkeypatch.delenv("MEDUSA_API_KEY", raising=False)
    assert main([*flags_of(directories), "--host", "0.0.0.0"]) == 0
    assert "without --api-key" in " ".join(capsys.readouterr().err.split())


def test_a_port_in_use_is_said_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(serve, "load_model", lambda *_: pytest.fail("a model is loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in " ".join(capsys.readouterr().err.split())


class FullDisk(io.StringIO):
    def write(self, _text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_server_whose_log_cannot_be_written_serves(directories, monkeypatch):
    started = []
    monkeypatch.setattr(server.SignalledServer, "run", lambda *_, **__: started.append(True))
    monkeypatch.setattr(sys, "stderr", FullDisk())
    assert main([*flags_of(directories), "--host", "0.0.0.0"]) == 0
    assert started


def test_a_port_that_is_none_is_refused_by_its_flag(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--port", "99999"])
    assert "port must be at most 65535, got 99999" in " ".join(capsys.readouterr().err.split())


def test_clients_can_connect_from_the_moment_that_the_server_says_ready(monkeypatch):
    connected = []

    def connect(record):
        if record.getMessage().startswith("ready: http://127.0.0.1:"):
            socket.create_connection(bound.getsockname(), timeout=5).close()
            connected.append(record)
        return True

    monkeypatch.setattr(server.SignalledServer, "run", lambda *_, **__: None)
    server.log.addFilter(connect)
    try:
        with server.bound_socket("127.0.0.1", 0) as bound:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(bound.getsockname(), timeout=5)
            server.run_server(Service(chat_model(), ServiceSettings("tiny")), AccessSettings(), bound)
    finally:
        server.log.removeFilter(connect)
    assert connected


@pytest.mark.slow
@pytest.mark.skipif(not REAL_BASE.exists(), reason="the embedded base model is not here")
def test_the_real_model_answers_as_alone_and_ends_what_is_running_when_told_to_stop(
    real_base, real_tokenizer
):
    started = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "medusa.cli.main",
            "serve",
            "--port",
            "0",
            "--engine",
            "eager",
            "--grace",
            "300",
        ],
        stderr=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    try:
        address = next(found[1] for line in started.stderr if (found := re.search(r"ready: (\S+)", line)))
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        asked = {"model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": 40}
        first = client.chat.completions.create(messages=messages, **asked).choices[0].message.content
        ids = real_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        alone = real_base.generate(**ids, do_sample=False, max_new_tokens=40)[0, ids["input_ids"].shape[1] :]
        assert first == real_tokenizer.decode(alone, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And at dusk?"}]
        second = client.chat.completions.create(messages=messages, **asked)
        assert second.usage.prompt_tokens_details.cached_tokens > 40
        stream = client.chat.completions.create(messages=messages, stream=True, **asked)
        pieces = [next(iter(stream))]
        started.send_signal(signal.SIGTERM)
        pieces += list(stream)
        said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert said == second.choices[0].message.content
        assert started.wait(60) == 0
    finally:
        started.kill()
