"""What clients expect and what was answered before: guesses are copied from it, and no text tells of it."""

from __future__ import annotations

import openai
import pytest
from conftest import needs_kernels
from tiny_chat import chat_model
from tiny_server import HELLO, client_of, running

from medusa.serving.replies import common_subsequence_length
from medusa.serving.settings import AccessOptions
from medusa.serving.worker import Worker

pytestmark = needs_kernels

ASKED = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "temperature": 0}


@pytest.fixture(scope="module")
def server():
    with running(chat_model(), allow_plain=True) as started:
        yield started


def test_a_prediction_is_counted_and_never_changes_the_answer(server):
    client = client_of(server)
    plain = client.chat.completions.create(**ASKED, extra_body={"medusa_plain": True})
    text = plain.choices[0].message.content
    for content in (text, [{"type": "text", "text": text}], text[10:], "anything else " * 20, ""):
        expected = {"type": "content", "content": content}
        reply = client.chat.completions.create(**ASKED, prediction=expected)
        assert reply.choices[0].message.content == text
        counted = reply.usage.completion_tokens_details
        total = counted.accepted_prediction_tokens + counted.rejected_prediction_tokens
        if content == text:
            assert counted.accepted_prediction_tokens > 20  # random tokens: their text is cut otherwise
        assert (total > 0) == bool(content)
    given = {"prediction": {"type": "content", "content": text}, "extra_body": {"medusa_plain": True}}
    again = client.chat.completions.create(**ASKED, **given)
    assert again.usage.model_extra["medusa"]["num_steps"] == again.usage.completion_tokens


def test_a_prediction_that_is_none_is_refused_in_words(server):
    client = client_of(server)
    for wrong in ({"type": "file", "content": "x"}, {"type": "content"}, {"type": "content", "content": 3}):
        with pytest.raises(openai.BadRequestError, match="prediction"):
            client.chat.completions.create(**ASKED, prediction=wrong)
    long = {"type": "content", "content": "x" * 10**6}
    with pytest.raises(openai.BadRequestError, match="prediction has 1000000 characters, of which at most"):
        client.chat.completions.create(**ASKED, prediction=long)


def num_steps(client):
    return client.chat.completions.create(**ASKED).usage.model_extra["medusa"]["num_steps"]


def test_what_was_answered_to_one_key_drafts_for_no_other():
    access = AccessOptions(api_key=("a", "b"))
    with running(chat_model(), access, suffix_cache_mib=1) as server:
        first, other = client_of(server, "a"), client_of(server, "b")
        fresh = num_steps(first)
        again, of_other = num_steps(first), num_steps(other)
        owned = {id(corpus): corpus.capacity for corpus in map(server.service.corpus_of, (0, 1))}
        texts = {each.chat.completions.create(**ASKED).choices[0].message.content for each in (first, other)}
    assert again < 0.7 * fresh
    assert of_other >= 0.7 * fresh
    assert len(texts) == 1
    assert [*owned.values()] == [2**15] * 2  # tokens, of 16 bytes each


def test_an_answer_that_was_given_up_is_not_remembered(monkeypatch):
    with running(chat_model(), suffix_cache_mib=1) as server:
        client, tell = client_of(server), Worker._tell
        with monkeypatch.context() as broken:
            broken.setattr(
                Worker,
                "_tell",
                lambda self, given: self._end(given.row.tag(), "timeout") or tell(self, given),
            )
            with pytest.raises(openai.APIStatusError):
                client.with_options(max_retries=0).chat.completions.create(**ASKED)
        assert server.service.corpus_of(None).num_tokens == 0
        client.chat.completions.create(**ASKED)
        assert server.service.corpus_of(None).num_tokens > 60


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [
        ([], [1, 2], 0),
        ([1, 2], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3, 4], [0, 2, 9, 4], 2),
        ([1] * 5, [1] * 3, 3),
        ([3, 1, 2], [1, 2, 3], 2),
    ],
)
def test_the_longest_common_subsequence_is_counted(first, second, length):
    assert common_subsequence_length(first, second) == length
