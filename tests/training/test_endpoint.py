import pytest
from fake_endpoint import fake_endpoints

from medusa.training.distillation.endpoint import ChatEndpoint, RefusedPrompt


@pytest.fixture
def serve():
    with fake_endpoints() as start:
        yield start


def ask(endpoint, text="hi"):
    return endpoint.answer([{"role": "user", "content": text}], temperature=0.5, max_new_tokens=9, seed=4)


def test_an_endpoint_is_asked_as_openai_compatible_servers_expect(serve):
    fake = serve()
    reply = ask(ChatEndpoint(fake.url + "/", "tiny", api_key="secret"))
    assert (reply.text, reply.finish_reason, reply.num_tokens) == ("you said hi", "stop", 3)
    (path, request), (key,) = fake.requests[0], fake.keys
    assert path == "/v1/chat/completions"
    assert key == "Bearer secret"
    assert request == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 4,
    }


def test_an_endpoint_that_is_busy_is_asked_again(serve):
    fake = serve(failures=[503, 429, 500])
    assert ask(ChatEndpoint(fake.url, "tiny", first_wait=0.001)).text == "you said hi"
    assert len(fake.requests) == 4


def test_an_endpoint_that_stays_away_is_given_up_with_its_last_words(serve):
    fake = serve(failures=[503] * 3)
    with pytest.raises(ConnectionError, match=r"no answer in 3 tries, last HTTP 503: .*says no"):
        ask(ChatEndpoint(fake.url, "tiny", max_attempts=3, first_wait=0.001))
    fake.stop()
    with pytest.raises(ConnectionError, match="no answer in 2 tries, last Connect"):
        ask(ChatEndpoint(fake.url, "tiny", max_attempts=2, first_wait=0.001))


def test_an_endpoint_that_refuses_a_prompt_is_not_asked_again(serve):
    fake = serve()
    with pytest.raises(RefusedPrompt, match=r"HTTP 400: .*says no"):
        ask(ChatEndpoint(fake.url, "tiny"), "REFUSE")
    assert len(fake.requests) == 1


def test_an_endpoint_that_speaks_another_language_is_named(serve):
    with pytest.raises(ConnectionError, match="did not answer as an OpenAI-compatible chat server does"):
        ask(ChatEndpoint(serve(body={"text": "hello"}).url, "tiny"))
    with pytest.raises(ValueError, match="must start with http"):
        ChatEndpoint("localhost:8000", "tiny")
