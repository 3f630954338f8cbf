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
    assert (reply.message["content"], reply.finish_reason, reply.num_tokens) == ("you said hi", "stop", 3)
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
    assert ask(ChatEndpoint(fake.url, "tiny", first_wait=0.001)).message["content"] == "you said hi"
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
    fake = serve(body={"text": "hello"})
    with pytest.raises(RefusedPrompt, match="did not answer as an OpenAI-compatible chat server does"):
        ask(ChatEndpoint(fake.url, "tiny", max_attempts=3, first_wait=0.001))
    assert len(fake.requests) == 3
    with pytest.raises(ValueError, match="must start with http"):
        ChatEndpoint("localhost:8000", "tiny")


def completion(message, usage=None, finish_reason="stop"):
    return {"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}


@pytest.mark.parametrize(
    "garbage", [{"text": "hello"}, [], {"choices": []}, completion({"content": 7}), completion(None)], ids=str
)
def test_one_answer_that_is_none_is_asked_for_again(serve, garbage):
    fake = serve()
    answers = iter([garbage])
    answer = fake.answer
    fake.answer = lambda request: next(answers, None) or answer(request)
    if garbage == []:
        fake.answer = lambda request: next(answers, answer(request))
    reply = ask(ChatEndpoint(fake.url, "tiny", first_wait=0.001))
    assert reply.message == {"role": "assistant", "content": "you said hi"}
    assert len(fake.requests) == 2


@pytest.mark.parametrize("status", [401, 403, 404])
def test_an_endpoint_that_refuses_whoever_asks_ends_the_run(serve, status):
    fake = serve(failures=[status])
    with pytest.raises(PermissionError, match=rf"HTTP {status}: .*says no.*check OPENAI_API_KEY.*'tiny'"):
        ask(ChatEndpoint(fake.url, "tiny", first_wait=0.001))
    assert len(fake.requests) == 1


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}], ids=str)
def test_an_endpoint_need_not_count_tokens_and_may_answer_in_parts(serve, usage):
    parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
    fake = serve(body=completion({"role": "assistant", "content": parts}, usage))
    reply = ask(ChatEndpoint(fake.url, "tiny"))
    assert (reply.message["content"], reply.num_tokens) == ("one, two", 0)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_and_tool_calls_are_kept_and_tools_are_sent(serve, name):
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    message = {"content": None, name: "Look.", "tool_calls": [{"id": "1", "function": function}]}
    fake = serve(body=completion(message, finish_reason="tool_calls"))
    reply = ChatEndpoint(fake.url, "tiny").answer(
        [{"role": "user", "content": "hi"}],
        temperature=0,
        max_new_tokens=9,
        seed=4,
        template_options={"tools": [{"type": "function"}], "enable_thinking": True},
    )
    parsed = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert reply.message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Look.",
        "tool_calls": [parsed],
    }
    (_, request) = fake.requests[0]
    assert request["tools"] == [{"type": "function"}]
    assert request["chat_template_kwargs"] == {"enable_thinking": True}
