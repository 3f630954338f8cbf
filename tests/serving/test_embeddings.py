"""``/v1/embeddings`` and Ollama's forms of it, beside answers that are under way."""

from __future__ import annotations

import asyncio
import base64
import threading
import time

import gguf
import httpx
import numpy
import pytest
import torch
from quantised_files import write_model
from tiny_chat import chat_model
from tiny_server import Running, chat, client_of, running, wait_until

from medusa import MedusaModel
from medusa.base.loading import load_tokenizer
from medusa.base.pooling import Pooling
from medusa.decoding.pooled_states import PooledStates
from medusa.decoding.scheduler import LEAST_CHUNK, QueueFull
from medusa.engine.weights.load import load_base
from medusa.serving.embeddings import EmbeddingLost, EmbeddingQueue, EmbeddingTask

TEXTS = ["Hello", "a longer text about snakes " * 4, "z"]


@pytest.fixture(scope="module")
def server():
    with running(chat_model(), embeddings="mean") as started:
        yield started


def post(server: Running, path: str = "/v1/embeddings", **body) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)


def vectors_of(reply: httpx.Response) -> torch.Tensor:
    assert reply.status_code == 200, reply.text
    return torch.tensor([entry["embedding"] for entry in reply.json()["data"]])


def reference(model: MedusaModel, ids: list[int], kind: str = "mean") -> torch.Tensor:
    with torch.no_grad():
        states = model.base.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(dim=0) if kind == "mean" else states[-1], dim=0)


def test_embeddings_are_those_of_transformers_in_openais_form(server):
    tokenizer = server.service.tokenizer
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = torch.stack([reference(server.service.model, of_text) for of_text in ids])
    for texts in (TEXTS, ids):
        reply = post(server, input=texts)
        torch.testing.assert_close(vectors_of(reply), expected, rtol=1e-4, atol=1e-5)
    body = reply.json()
    assert body["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert [(entry["object"], entry["index"]) for entry in body["data"]] == [
        ("embedding", at) for at in range(3)
    ]
    for one in (TEXTS[0], ids[0]):
        torch.testing.assert_close(vectors_of(post(server, input=one))[0], expected[0], rtol=1e-4, atol=1e-5)
    created = client_of(server).embeddings.create(model="tiny", input=TEXTS)  # asks for base64
    torch.testing.assert_close(
        torch.tensor([entry.embedding for entry in created.data]), expected, rtol=1e-4, atol=1e-5
    )
    encoded = post(server, input="Hello", encoding_format="base64").json()["data"][0]["embedding"]
    decoded = numpy.frombuffer(base64.b64decode(encoded), "<f4")
    assert decoded.tolist() == vectors_of(post(server, input="Hello"))[0].tolist()


def test_fewer_dimensions_are_the_first_ones_at_length_1(server):
    (whole,) = vectors_of(post(server, input="Hello"))
    (first,) = vectors_of(post(server, input="Hello", dimensions=8))
    torch.testing.assert_close(first, whole[:8] / whole[:8].norm())
    refused = post(server, input="Hello", dimensions=33)
    assert refused.status_code == 400 and "dimensions must be at most 32" in refused.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": ""}, "input must not hold empty texts"),
        ({"input": ["a", ""]}, "input must not hold empty texts"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input must not hold empty texts"),
        ({"input": [260]}, "input must hold token ids of 0 to 259, got 260"),
        ({"input": [1.5]}, "input"),
        ({"input": "a" * 600}, "maximum context length is"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "model": "other"}, "the model 'other' is not here"),
    ],
)
def test_what_cannot_be_embedded_is_refused_in_words(server, body, words):
    refused = post(server, **body)
    assert refused.status_code in (400, 404) and words in refused.json()["error"]["message"]


def test_clients_of_ollama_get_the_same(server):
    expected = vectors_of(post(server, input=TEXTS))
    reply = post(server, "/api/embed", input=TEXTS).json()
    torch.testing.assert_close(torch.tensor(reply["embeddings"]), expected)
    assert reply["prompt_eval_count"] > 100 and reply["total_duration"] > 0 and reply["model"] == "tiny"
    one = post(server, "/api/embed", input="Hello", dimensions=4).json()["embeddings"]
    assert len(one) == 1 and len(one[0]) == 4
    old = post(server, "/api/embeddings", prompt="Hello").json()["embedding"]
    torch.testing.assert_close(torch.tensor(old), expected[0])
    most = server.service.max_tokens
    cut = post(server, "/api/embed", input="a" * 600).json()
    assert cut["prompt_eval_count"] == most
    refused = post(server, "/api/embed", input="a" * 600, truncate=False)
    assert refused.status_code == 400 and "maximum context length" in refused.json()["error"]


def test_a_chat_model_is_refused_with_the_flag_that_allows_it():
    with running(chat_model()) as server:
        refused = post(server, input="Hello")
        assert refused.status_code == 400 and "--embeddings last (or mean)" in refused.text
        assert refused.json()["error"]["code"] == "no_embeddings"


def gguf_server(path, **metadata):
    write_model(path, "qwen3", gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F32, **metadata)
    base = load_base(path)
    return running(MedusaModel(base, tokenizer=load_tokenizer(path), engine="eager"))


def test_a_gguf_file_is_pooled_as_it_says_behind_the_token_that_it_adds(tmp_path):
    path = tmp_path / "embedding.gguf"
    with gguf_server(path, pooling_type=gguf.PoolingType.LAST, add_eos_token=True) as server:
        service = server.service
        ids = service.tokenizer("abc abc")["input_ids"]
        assert ids[-1] == service.tokenizer.eos_token_id
        (vector,) = vectors_of(post(server, input="abc abc"))
        torch.testing.assert_close(vector, reference(service.model, ids, "last"), rtol=1e-4, atol=1e-5)
        long = [*service.tokenizer("abc " * 600, add_special_tokens=False)["input_ids"]]
        long = [*long[: service.max_tokens - 1], ids[-1]]
        cut = torch.tensor(post(server, "/api/embed", input="abc " * 600).json()["embeddings"][0])
        torch.testing.assert_close(cut, reference(service.model, long, "last"), rtol=1e-3, atol=1e-4)


def test_a_file_that_states_another_pooling_is_refused(tmp_path):
    with gguf_server(tmp_path / "rank.gguf", pooling_type=gguf.PoolingType.RANK) as server:
        refused = post(server, input="abc")
        assert (
            refused.status_code == 400 and "not computed here" in refused.text and ".gguf" not in refused.text
        )


def test_a_vector_does_not_depend_on_what_else_is_done(server):
    alone = post(server, input=TEXTS).json()["data"]
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            chat(server, max_tokens=24)

    talking = [threading.Thread(target=talk) for _ in range(2)]
    for thread in talking:
        thread.start()
    try:
        wait_until(lambda: server.num_active > 0)
        assert [post(server, input=TEXTS).json()["data"] for _ in range(3)] == [alone] * 3
    finally:
        stop.set()
        for thread in talking:
            thread.join()


def test_answers_go_on_while_a_long_text_is_embedded_and_who_leaves_frees_the_thread(server, monkeypatch):
    read = PooledStates.read
    monkeypatch.setattr(PooledStates, "read", lambda self, num: time.sleep(0.05) or read(self, 1))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": "a" * 400}, timeout=0.3)
    embeddings = server.service.worker.embeddings
    wait_until(lambda: not len(embeddings), 5)
    asking = threading.Thread(target=post, args=(server,), kwargs={"input": "a" * 60})
    asking.start()
    wait_until(lambda: len(embeddings) > 0)
    chat(server, max_tokens=4)
    assert len(embeddings) > 0, "the answer came first"
    asking.join()


# ------------------------------------------------------------------ the queue alone


class FakeStates:
    """A text of so many tokens, each of which takes so long."""

    def __init__(self, num_left: int, seconds: float = 0.0):
        self.num_left, self.seconds, self.parts = num_left, seconds, []

    def read(self, num_tokens: int) -> None:
        if self.seconds < 0:
            raise RuntimeError("out of memory")
        time.sleep(self.seconds * num_tokens)
        self.parts.append(num_tokens)
        self.num_left -= num_tokens

    def vector(self) -> torch.Tensor:
        return torch.ones(2)


def queued(*texts: FakeStates, **options) -> tuple[EmbeddingQueue, EmbeddingTask]:
    queue = EmbeddingQueue(64, 0.02, max_waiting=1)
    task = EmbeddingTask([[text] for text in texts], lambda ids: ids[0], **options)
    queue.add(task)
    return queue, task


def test_parts_that_take_too_long_are_halved_down_to_the_least():
    states = FakeStates(200, seconds=0.001)
    queue, task = queued(states)
    while len(queue):
        queue.step()
    assert states.parts[:4] == [64, 32, LEAST_CHUNK, LEAST_CHUNK] and len(task.vectors.result()) == 1


def test_a_text_that_fails_or_is_late_ends_its_own_request_alone():
    for options, reason in (({}, "error"), ({"deadline": 0.0}, "timeout")):
        queue, failing = queued(FakeStates(3, seconds=-1.0), **options)
        other = EmbeddingTask([[FakeStates(3)]], lambda ids: ids[0])
        queue.add(other)
        with pytest.raises(QueueFull):
            queue.add(other)
        while len(queue):
            queue.step()
        with pytest.raises(EmbeddingLost, match=reason):
            failing.vectors.result()
        assert len(other.vectors.result()) == 1


def test_what_was_cancelled_is_left_out_and_the_rest_is_told_at_the_end():
    queue, task = queued(FakeStates(100), FakeStates(100))
    queue.step()
    assert task.vectors.cancel()
    other = EmbeddingTask([[FakeStates(3)]], lambda ids: ids[0])
    queue.add(other)
    queue.step()
    assert len(queue) == 1
    queue.lose("shutdown")
    with pytest.raises(EmbeddingLost, match="shutdown"):
        other.vectors.result()


def test_the_end_of_the_server_is_told_to_who_waits(monkeypatch):
    monkeypatch.setattr(PooledStates, "read", lambda self, num: time.sleep(0.05))
    with running(chat_model(), embeddings="last", grace_seconds=0.2) as server:

        async def ask():
            async with httpx.AsyncClient(timeout=30) as client:
                body = {"model": "tiny", "input": "abc"}
                asking = asyncio.ensure_future(client.post(f"{server.url}/v1/embeddings", json=body))
                while not len(server.service.worker.embeddings):
                    await asyncio.sleep(0.01)
                server.server.should_exit = True
                return await asking

        reply = asyncio.run(ask())
    assert reply.status_code == 503 and "shutting down" in reply.text


def test_pooling_of_the_flag_is_for_bases_whose_files_state_none(server):
    assert server.service.embedded.pooling == Pooling("mean")


def test_texts_are_read_in_parts_as_long_as_those_of_prompts_and_as_many_may_wait(server):
    embeddings = server.service.worker.embeddings
    assert embeddings.chunk <= server.service.limits.chunk == 32
    assert (embeddings.seconds, embeddings.max_waiting) == (0.25, server.service.options.max_waiting)
