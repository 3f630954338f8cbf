"""Sampling options that a request leaves out: flags, what the base comes with, or the plain distribution."""

from __future__ import annotations

import pytest
from quantised_files import write_model
from tiny_chat import chat_model
from tiny_server import HELLO, client_of, expected, running, tiny_service
from transformers import GenerationConfig

from medusa.base.sampling_advice import SamplingAdvice, sampling_advice
from medusa.engine.weights.load import load_base
from medusa.serving import server as serving
from medusa.serving.chat_requests import ChatRequest
from medusa.serving.model_pool import ModelPool
from medusa.serving.service import PLAIN_SAMPLING
from medusa.serving.settings import AccessOptions, AddressOptions
from medusa.serving.shared_fields import sampling_arguments

ADVISED = {"temperature": 0.5, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3}


def advised_model():
    model = chat_model()
    model.base.generation_config = GenerationConfig(
        **ADVISED, do_sample=True, eos_token_id=256, pad_token_id=256
    )
    return model


def test_what_the_base_comes_with_is_the_default_and_a_request_says_otherwise():
    model = advised_model()
    alone = {"max_new_tokens": 24, "do_sample": True, "seed": 3}
    with running(model) as server:

        def text(**more) -> str:
            chat = client_of(server).chat.completions
            asked = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "seed": 3}
            return chat.create(**asked, **more).choices[0].message.content

        advised = expected(model, HELLO, **ADVISED, **alone)[1]
        hot = {**ADVISED, "temperature": 1.5, "top_k": 0}
        assert text() == advised
        assert text(temperature=1.5, extra_body={"top_k": 0}) == expected(model, HELLO, **hot, **alone)[1]
        response = client_of(server).responses.create(model="tiny", input="Hello", max_output_tokens=24)
        assert (response.temperature, response.top_p) == (0.5, 0.8)


def test_flags_go_before_what_the_base_comes_with():
    service = tiny_service(advised_model(), temperature=0.0, min_p=0.1)
    assert service.sampling == SamplingAdvice(0.0, 0.8, 20, 0.1, 1.3)
    assert service.sampling_sources == ["flags", "what the base comes with"]
    request = ChatRequest(messages=HELLO)
    assert sampling_arguments(request, service.sampling) == {"do_sample": False, "repetition_penalty": 1.3}


def test_without_either_the_distribution_is_as_it_is():
    service = tiny_service(chat_model())
    assert (service.sampling, service.sampling_sources) == (PLAIN_SAMPLING, [])


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            advised_model,
            "temperature 0.5, top_p 0.8, top_k 20, min_p 0, repetition_penalty 1.3 "
            "(what the base comes with)",
        ),
        (
            chat_model,
            "temperature 1, top_p 1, top_k 0, min_p 0, repetition_penalty 1 (OpenAI's defaults)",
        ),
    ],
)
def test_a_server_says_at_its_start_how_it_samples(model, line, monkeypatch, capsys):
    monkeypatch.setattr(serving.SignalledServer, "run", lambda *_, **__: None)
    with serving.bound_socket("127.0.0.1", 0) as bound:
        serving.run_server(ModelPool.of(tiny_service(model())), AccessOptions(), bound, AddressOptions())
    assert f"sampling where a request leaves it out: {line}\n" in capsys.readouterr().err


def test_a_gguf_file_says_how_to_sample_it(tmp_path):
    keys = {"sampling_temp": 0.25, "sampling_top_k": 10, "sampling_penalty_repeat": 1.5}
    path = write_model(tmp_path / "tiny.gguf", **keys)
    advice = sampling_advice(load_base(path))
    assert advice == SamplingAdvice(temperature=0.25, top_k=10, repetition_penalty=1.5)
    assert sampling_advice(load_base(write_model(tmp_path / "other.gguf"))) == SamplingAdvice()
