"""``medusa serve``: from flags to a server, and a real one from its start to its end."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import openai
import pytest
from conftest import CHECKOUT, REAL_BASE
from reported import ran
from tiny_chat import chat_model, save_chat_model
from tiny_server import tiny_service, wait_until

from medusa.base.sampling_advice import SamplingAdvice
from medusa.cli import loading
from medusa.cli.main import main
from medusa.cli.served_models import model_names
from medusa.serving import server
from medusa.serving.model_pool import ModelPool
from medusa.serving.settings import AccessOptions, AddressOptions


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("served"))


def flags_of(directories) -> list[str]:
    base, heads = directories
    return ["serve", "--base", base, "--heads", heads, "--port", "0"]


def test_flags_reach_the_server(directories, monkeypatch, capsys):
    started = []

    def run(pool, access, bound, address):
        started.append((pool.models[0].service, access, bound.getsockname()[0], address.grace))

    monkeypatch.setattr(server, "run_server", run)
    monkeypatch.setenv("MEDUSA_API_KEY", "third, fourth")
    assert main(flags_of(directories)) == 0
    assert started.pop()[0].worker.batches[False].limits.chunk == 64
    flags = ["--allowed-host", "a.example", "b.example", "--cors-origin", "https://Chat.example"]
    flags += ["--api-key", "first", "--api-key=second", "--max-rows", "3", "--prefix-mib", "1"]
    flags += ["--chunk", "7", "--timeout", "9"]
    names = ["--served-model-name", "mine", "--served-model-name", "yours", "--no-any-model-name"]
    names += ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1"]
    names += ["--repeat-penalty", "1.1"]
    assert main([*flags_of(directories), *flags, "--host", "0.0.0.0", *names]) == 0
    ((service, access, host, grace),) = started
    limits = service.worker.batches[False].limits
    assert (limits.max_rows, limits.prefix_bytes, limits.chunk) == (3, 2**20, 7)
    assert (service.names, service.options.timeout) == (("mine", "yours"), 9)
    assert not service.options.any_model_name
    assert service.sampling == SamplingAdvice(0.5, 0.9, 40, 0.1, 1.1)
    assert service.sampling_sources == ["flags"]
    assert access.api_key == ("first", "second", "third", "fourth")
    assert access.allowed_host == ("0.0.0.0", "a.example", "b.example")
    assert access.cors_origin == ("https://chat.example",)
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
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("a model is loaded"))
    try:
        status = main(["serve", "--host", host, *flags])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status in (1, 2) and f"error: {source} must" in said
    assert not {"good", "clé"} & set(said.split())


def test_another_host_without_a_key_is_warned_of(directories, monkeypatch, capsys):
    monkeypatch.setattr(server, "run_server", lambda *_: None)
    monkeypatch.delenv("MEDUSA_API_KEY", raising=False)
    assert main([*flags_of(directories), "--host", "0.0.0.0"]) == 0
    assert "without --api-key" in " ".join(capsys.readouterr().err.split())


def test_a_port_in_use_is_said_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("a model is loaded"))
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
            server.run_server(
                ModelPool.of(tiny_service(chat_model())), AccessOptions(), bound, AddressOptions()
            )
    finally:
        server.log.removeFilter(connect)
    assert connected


@contextmanager
def served(monkeypatch, bound, **address):
    """A server that runs as ``medusa serve`` has it run; its end is as after a signal."""
    run, begun = server.SignalledServer.run, []

    def noted(self, sockets):
        begun.append(self)
        run(self, sockets)

    monkeypatch.setattr(server.SignalledServer, "run", noted)
    given = (
        ModelPool.of(tiny_service(chat_model())),
        AccessOptions(),
        bound,
        AddressOptions(grace=1.0, **address),
    )
    thread = threading.Thread(target=server.run_server, args=given)
    thread.start()
    try:
        wait_until(lambda: begun and begun[0].started)
        yield
    finally:
        begun[0].should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    made, key = tmp_path_factory.mktemp("tls") / "certificate.pem", tmp_path_factory.mktemp("tls") / "key.pem"
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(["openssl", "req", *words, "-keyout", key, "-out", made], check=True, capture_output=True)
    return str(made), str(key)


def test_with_a_certificate_a_server_answers_over_https_alone(monkeypatch, certificate):
    made, key = certificate
    with (
        server.bound_socket("127.0.0.1", 0) as bound,
        served(monkeypatch, bound, tls_certificate=made, tls_key=key),
    ):
        url = f"https://{server.address_of(bound)}"
        trusted = ssl.create_default_context(cafile=made)
        assert httpx.get(f"{url}/health", verify=trusted).json() == {"status": "ok"}
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url.replace('https', 'http')}/health")


def test_a_certificate_that_is_none_is_said_before_a_model_is_loaded(
    monkeypatch, capsys, certificate, tmp_path
):
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("a model is loaded"))
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    for flags, told in (
        (["--tls-certificate", str(wrong)], "must be a certificate and its key in PEM"),
        (["--tls-certificate", certificate[0]], "must be a certificate and its key in PEM"),
        (["--tls-certificate", str(tmp_path / "none.pem")], "cannot be read"),
    ):
        assert told in " ".join(ran(capsys, ["serve", "--port", "0", *flags], 1).err.split())


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


@pytest.mark.parametrize(
    ("base", "path", "names"),
    [
        (
            "qwen-1.5b",
            "/models/qwen-1.5b-q4_k_m.gguf",
            ("qwen-1.5b", "qwen-1.5b-q4_k_m.gguf", "qwen-1.5b-q4_k_m"),
        ),
        ("owner/name", "owner/name", ("name", "owner/name")),
        (None, "/models/smollm2-135m-instruct", ("smollm2-135m-instruct",)),
    ],
)
def test_clients_may_call_the_model_as_its_base_was_typed(base, path, names):
    assert model_names(base, path) == names
