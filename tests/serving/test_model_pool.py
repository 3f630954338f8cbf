"""Several models behind one server: loaded once when asked for, put down when idle, never cut."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime

import httpx
import openai
import pytest
from tiny_chat import VOCAB_SIZE, chat_model, chat_tokenizer, save_chat_model
from tiny_server import HELLO, expected, running_pool, wait_until

from medusa import MedusaModel
from medusa.learning.learned_heads import LearnedHeads
from medusa.serving import answer_streams, endpoints
from medusa.serving.model_pool import ModelPool, ServedModel
from medusa.serving.replies import RequestError
from medusa.serving.service import Service
from medusa.serving.settings import ServiceOptions
from medusa.serving.tokenized_model import TokenizedModel

SMALL = ServiceOptions(max_rows=4, chunk=32, cache_mib=8, prefix_mib=1)


class FakeWorker:
    def end(self) -> None:
        pass


class FakeService:
    """A service that answers nothing, and notes what is done with it."""

    def __init__(self, name: str, done: list[str]):
        self.name, self.done = name, done
        self.is_draining, self.is_ready, self.worker = False, True, FakeWorker()

    def start(self) -> None:
        self.done.append(f"load {self.name}")

    def close(self) -> None:
        self.done.append(f"close {self.name}")

    def count_as_busy(self, is_other_work) -> None:
        pass

    def pause_learning(self) -> None:
        self.done.append(f"pause {self.name}")


class FakePool:
    """A pool of models of one byte each, called a, b and c; ``done`` is what was done in this order."""

    def __init__(self, budget: float = 1, keep_seconds: float = math.inf):
        self.done: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.may_load = threading.Event()
        self.may_load.set()
        models = [ServedModel((name,), num_bytes=1, load=self._loader(name)) for name in "abc"]
        self.pool = ModelPool(models, SMALL, budget, keep_seconds)

    def _loader(self, name: str):
        def load(_metrics):
            self.may_load.wait(10)
            if name in self.failures:
                raise self.failures.pop(name)
            return FakeService(name, self.done)

        return load

    def lease(self, name: str, *keep):
        return self.pool.lease(self.pool.named(name), *keep)

    @property
    def loads(self) -> list[str]:
        return [what for what in self.done if not what.startswith("pause")]


async def turns(seconds: float = 0.15) -> None:
    """Long enough for what may happen."""
    await asyncio.sleep(seconds)


async def until(condition) -> None:
    """Until it has come to pass; ten seconds are enough."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to pass")


def test_requests_that_come_together_load_a_model_once():
    async def ask():
        fake = FakePool()
        fake.may_load.clear()
        asking = [asyncio.ensure_future(fake.lease("a")) for _ in range(3)]
        await turns()
        fake.may_load.set()
        leases = await asyncio.gather(*asking)
        assert len({id(lease.service) for lease in leases}) == 1 and fake.loads == ["load a"]

    asyncio.run(ask())


def test_the_one_that_was_used_longest_ago_goes_and_comes_again():
    async def ask():
        fake = FakePool(budget=2)
        for name in ("a", "b", "a", "c", "b"):
            (await fake.lease(name)).release()
        assert fake.loads == ["load a", "load b", "close b", "load c", "close a", "load b"]

    asyncio.run(ask())


def test_a_model_that_answers_is_not_cut_and_who_comes_later_waits_behind():
    async def ask():
        fake = FakePool()
        first = await fake.lease("a")
        newcomer = asyncio.ensure_future(fake.lease("b"))
        await turns()
        behind = asyncio.ensure_future(fake.lease("a"))
        await turns()
        assert not newcomer.done() and not behind.done() and fake.loads == ["load a"]
        first.release()
        second = await newcomer
        assert fake.loads == ["load a", "close a", "load b"] and not behind.done()
        second.release()
        second.release()  # twice is no harm
        assert (await behind).service.name == "a"
        assert fake.loads[3:] == ["close b", "load a"]

    asyncio.run(ask())


def test_who_waits_looks_again_only_when_something_has_changed(monkeypatch):
    async def ask():
        fake = FakePool()
        first = await fake.lease("a")
        changes = fake.pool._changes
        looks = []
        wait = changes.wait
        monkeypatch.setattr(changes, "wait", lambda: looks.append(1) or wait())
        newcomer = asyncio.ensure_future(fake.lease("b"))
        await turns()
        num_looks = len(looks)
        await turns()
        assert len(looks) == num_looks == 2, "the newcomer, and who makes room for it"
        first.release()
        (await asyncio.wait_for(newcomer, 60)).release()

    asyncio.run(ask())


def test_who_gives_up_has_nothing_put_down():
    async def ask():
        fake = FakePool()
        first = await fake.lease("a")
        newcomer = asyncio.ensure_future(fake.lease("b"))
        await turns()
        newcomer.cancel()
        await turns()
        assert (await fake.lease("a")).service is first.service and fake.loads == ["load a"]

    asyncio.run(ask())


def test_what_a_client_left_while_it_was_loaded_serves_the_next_one():
    async def ask():
        fake = FakePool()
        fake.may_load.clear()
        asking = asyncio.ensure_future(fake.lease("a"))
        await turns()
        asking.cancel()
        fake.may_load.set()
        await fake.lease("a")
        assert fake.loads == ["load a"]

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("/home/x"), "too little memory"),
        (FileNotFoundError("/home/x"), "files cannot be read"),
        (ValueError("/home/x"), "none that can be loaded"),
    ],
)
def test_a_load_that_fails_is_told_to_all_without_paths_and_tried_again(error, words):
    async def ask():
        fake = FakePool()
        fake.failures["a"] = error
        refused = await asyncio.gather(*(fake.lease("a") for _ in range(2)), return_exceptions=True)
        for refusal in refused:
            assert isinstance(refusal, RequestError) and (refusal.status, refusal.code) == (
                503,
                "model_not_loaded",
            )
            assert words in str(refusal) and "/home" not in str(refusal)
        assert (await fake.lease("a")).service.name == "a"

    asyncio.run(ask())


def test_a_model_that_can_never_fit_is_refused_with_what_it_takes():
    async def ask():
        fake = FakePool()
        await fake.lease("a")
        fake.pool.named("b").num_bytes = 3 * 10**9
        fake.pool.budget = 2 * 10**9
        with pytest.raises(
            RequestError, match=r"'b' takes 3.0 GB .* may take 2.0 GB; ask for a smaller"
        ) as refused:
            await fake.lease("b")
        assert refused.value.code == "model_too_large" and fake.loads == ["load a"]

    asyncio.run(ask())


def test_an_idle_model_is_put_down_after_its_time_and_not_while_it_answers():
    async def ask():
        fake = FakePool(budget=3, keep_seconds=0.2)
        busy = await fake.lease("a")
        (await fake.lease("b")).release()
        (await fake.lease("c", math.inf)).release()
        await until(lambda: len(fake.loads) > 3)
        await turns(0.3)
        assert fake.loads == ["load a", "load b", "load c", "close b"]
        busy.release()
        await until(lambda: len(fake.loads) > 4)
        assert fake.loads[4:] == ["close a"]

    asyncio.run(ask())


def test_what_is_unwanted_goes_when_nobody_has_it_unless_it_is_asked_for_again():
    async def ask():
        fake = FakePool()
        model = fake.pool.named("a")
        lease = await fake.lease("a")
        fake.pool.put_down_when_idle(model)
        await turns()
        assert model.service is not None
        lease.release()
        await turns()
        assert model.service is None
        lease = await fake.lease("a")
        fake.pool.put_down_when_idle(model)
        other = await fake.lease("a")
        lease.release()
        other.release()
        await turns()
        assert model.service is not None

    asyncio.run(ask())


def test_whoever_waits_when_the_server_ends_is_told_and_what_was_being_loaded_is_closed():
    async def ask(fake):
        fake.may_load.clear()
        asking = asyncio.ensure_future(fake.lease("a"))
        await turns()
        fake.pool.drain()
        with pytest.raises(RequestError, match="shutting down"):
            await asking
        fake.may_load.set()

    fake = FakePool()
    asyncio.run(ask(fake))
    fake.pool.close()
    assert fake.done == ["load a", "close a"]
    assert not fake.pool.loaded and not fake.pool.is_ready


def test_no_more_wait_for_a_model_than_could_be_answered():
    async def ask():
        fake = FakePool()
        fake.may_load.clear()
        most = SMALL.max_rows + SMALL.max_waiting
        asking = [asyncio.ensure_future(fake.lease("a")) for _ in range(most)]
        await turns()
        with pytest.raises(RequestError, match="the queue is full"):
            await fake.lease("a")
        fake.may_load.set()
        assert len(await asyncio.gather(*asking)) == most

    asyncio.run(ask())


def test_who_waits_too_long_is_told_so(monkeypatch):
    async def ask():
        fake = FakePool()
        await fake.lease("a")
        monkeypatch.setattr(fake.pool, "options", ServiceOptions(timeout=0.2))
        with pytest.raises(RequestError, match="'b' was not loaded in the time"):
            await fake.lease("b")

    asyncio.run(ask())


def test_others_stop_learning_when_a_model_is_asked():
    async def ask():
        fake = FakePool(budget=2)
        await fake.lease("a")
        await fake.lease("b")
        assert fake.done == ["load a", "load b", "pause a"]

    asyncio.run(ask())


def test_names_choose_a_model_and_others_are_told_which_there_are():
    pool = FakePool().pool
    assert pool.named(None) is pool.named("") is pool.named("a") is pool.named("a:latest")
    with pytest.raises(RequestError, match="the model 'd' is not here; there is 'a', 'b', 'c'") as refused:
        pool.named("d")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    with pytest.raises(ValueError, match="two called 'a'; write NAME=PATH"):
        ModelPool([ServedModel(("a",)), ServedModel(("a",))], SMALL)


# ------------------------------------------------------------------ over a socket

MODELS = {"one": chat_model(0), "two": chat_model(7)}


class Served:
    """A server of two tiny models, only one of which has room."""

    def __init__(self, keep_seconds: float = math.inf, budget: float = 1, load=None):
        self.alive = weakref.WeakSet()
        self.load = load or self._service
        models = [
            ServedModel(
                (name,),
                family="llama",
                num_bytes=1,
                load=self._loader(name),
                aliases=(f"{name}.gguf",),
                load_tokenized=lambda: TokenizedModel(chat_tokenizer(), VOCAB_SIZE),
            )
            for name in MODELS
        ]
        self.pool = ModelPool(models, SMALL, budget, keep_seconds)

    def _loader(self, name: str):
        return lambda metrics: self.load(name, metrics)

    def _service(self, name: str, metrics) -> Service:
        model = chat_model(0 if name == "one" else 7)
        self.alive.update((model, model.base))
        return Service(
            model, ServiceOptions(**{**vars(SMALL), "served_model_name": (name,)}), metrics=metrics
        )

    def get(self, path: str):
        return httpx.get(f"{self.url}{path}")

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def chat(self, model: str, **more) -> httpx.Response:
        asked = {"model": model, "messages": HELLO, "max_tokens": 12, "temperature": 0, **more}
        return self.post("/v1/chat/completions", **asked)


@contextmanager
def serving(**options):
    served = Served(**options)
    with running_pool(served.pool, grace_seconds=2.0) as (port, server):
        served.url, served.server = f"http://127.0.0.1:{port}", server
        yield served
    served.pool.close()


def text_of(name: str) -> str:
    return expected(MODELS[name], HELLO, do_sample=False, max_new_tokens=12)[1]


def test_each_request_is_answered_by_the_model_that_it_names():
    with serving() as served:
        for name in ("one", "two", "two.gguf", "one"):
            reply = served.chat(name).json()
            assert reply["choices"][0]["message"]["content"] == text_of(name.removesuffix(".gguf"))
            assert reply["model"] == name.removesuffix(".gguf")
        assert [card["id"] for card in served.get("/v1/models").json()["data"]] == ["one", "two"]
        assert served.get("/v1/models/two.gguf").json()["id"] == "two"
        assert "there is 'one', 'two'" in served.chat("three").json()["error"]["message"]
        assert served.post("/tokenize", model="two", prompt="a").json()["count"] == 1
        metrics = served.get("/metrics").text
        assert 'medusa:model_loaded{model_name="two"} 1.0' in metrics
        assert 'medusa:model_loaded{model_name="one"} 0.0' in metrics
        ended = [line for line in metrics.splitlines() if line.startswith("medusa:request_success_total")]
        assert len(ended) == 2 and all(line.endswith(" 2.0") for line in ended), (
            "they go on when loaded again"
        )
        assert served.get("/health").json() == {"status": "ok"}
        assert served.get("/v1/heads?model=one").json()["in_use"] is None
        assert served.get("/v1/heads?model=two").json()["in_use"]["num_heads"] == 3


def test_a_model_that_is_put_down_leaves_neither_memory_nor_threads_nor_learning(tmp_path, monkeypatch):
    monkeypatch.setattr("medusa.model.learning_place", lambda _name: LearnedHeads(tmp_path / "learned"))
    base, _ = save_chat_model(tmp_path)
    learnings = []

    def load(name, metrics):
        model = MedusaModel.from_pretrained(base, engine="eager", learn=True)
        served.alive.update((model, model.base))
        learnings.append(model.learning._thread)
        return Service(model, ServiceOptions(**{**vars(SMALL), "suffix_cache_mib": 1}), metrics=metrics)

    with serving(load=load) as served:
        names = [thread.name for thread in threading.enumerate()]
        assert served.chat("one").status_code == 200
        assert served.alive and learnings[0].is_alive()
        assert served.post("/api/generate", model="one", keep_alive=0).json()["done_reason"] == "unload"
        wait_until(lambda: not served.pool.loaded)
        wait_until(lambda: gc.collect() is not None and not served.alive, 0.2)
        assert not learnings[0].is_alive()
        left = [thread.name for thread in threading.enumerate()]
        assert left.count("medusa-decoding") == names.count("medusa-decoding")
        metrics = served.get("/metrics").text
        assert "num_requests_running" not in metrics and "request_success_total" in metrics


def test_a_stream_begins_before_its_model_is_loaded_and_says_so(monkeypatch):
    monkeypatch.setattr(endpoints, "LOADING_SECONDS", 0.05)
    monkeypatch.setattr(answer_streams, "AWAKE_SECONDS", 0.1)
    may_load = threading.Event()

    def load(name, metrics):
        may_load.wait(20)
        return served._service(name, metrics)

    with serving(load=load) as served:
        asked = {"model": "two", "messages": HELLO, "max_tokens": 12, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=asked, timeout=60) as reply:
            lines = reply.iter_lines()
            assert reply.status_code == 200 and next(lines) == ": the model is being loaded"
            may_load.set()
            chunks = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert chunks.pop() == "[DONE]"
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == text_of("two")
        wait_until(lambda: not served.pool.named("two").num_users)


LATE = [
    ("/v1/chat/completions", {"messages": HELLO}, "data: [DONE]", '"code": "model_not_loaded"'),
    ("/v1/completions", {"prompt": "a"}, "data: [DONE]", '"code": "model_not_loaded"'),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "", '"code": "model_not_loaded"'),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 4}, "", '"type": "error"'),
    ("/v1/responses", {"input": "a"}, "", '"type": "response.failed"'),
    ("/api/chat", {"messages": HELLO}, "", '{"error": "the model'),
]


@pytest.mark.parametrize(("path", "body", "last", "words"), LATE)
def test_a_stream_that_waited_in_vain_says_why_in_the_words_of_its_protocol(
    monkeypatch, path, body, last, words
):
    monkeypatch.setattr(endpoints, "LOADING_SECONDS", 0.01)
    monkeypatch.setattr(answer_streams, "AWAKE_SECONDS", 0.05)

    def load(name, metrics):
        time.sleep(0.2)
        raise OSError("/home/x")

    with serving(load=load) as served:
        reply = served.post(path, model="one", stream=True, **body)
        assert reply.status_code == 200
        lines = [line for line in reply.text.splitlines() if line]
        assert words in reply.text and "files cannot be read" in reply.text and "/home" not in reply.text
        assert not last or lines[-1] == last
        if path == "/v1/responses":  # clients take no event before it
            assert next(line for line in lines if line[0] == "e") == "event: response.created"


def test_a_late_response_begins_with_the_event_that_clients_want_first(monkeypatch):
    monkeypatch.setattr(endpoints, "LOADING_SECONDS", 0.01)
    monkeypatch.setattr(answer_streams, "AWAKE_SECONDS", 0.05)

    def load(name, metrics):
        time.sleep(0.3)
        return served._service(name, metrics)

    with serving(load=load) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with client.responses.stream(
            model="one", input="Hello", max_output_tokens=12, temperature=0
        ) as stream:
            events = [*stream]
        assert events[0].type == "response.created"
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == text_of("one")


def test_a_refusal_that_comes_soon_is_a_status():
    def load(name, metrics):
        raise MemoryError

    with serving(load=load) as served:
        for stream in (False, True):
            reply = served.chat("one", stream=stream)
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "model_not_loaded"


def test_a_client_that_leaves_while_its_model_is_loaded_holds_nothing(monkeypatch):
    monkeypatch.setattr(endpoints, "LOADING_SECONDS", 0.05)
    may_load = threading.Event()

    def load(name, metrics):
        may_load.wait(20)
        return served._service(name, metrics)

    with serving(load=load) as served:
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                asked = {"model": "one", "messages": HELLO, "stream": stream}
                with httpx.stream(
                    "POST", f"{served.url}/v1/chat/completions", json=asked, timeout=0.5
                ) as reply:
                    for _ in reply.iter_lines():
                        pass
        model = served.pool.named("one")
        wait_until(lambda: not model.num_waiting)
        may_load.set()
        wait_until(lambda: model.service is not None)
        assert not model.num_users
        assert served.chat("one").status_code == 200 and model.num_loads == 1


def test_clients_of_several_models_at_once_all_get_their_own():
    with serving() as served, ThreadPoolExecutor(6) as threads:
        names = ["one", "two"] * 3
        replies = [*threads.map(lambda name: served.chat(name, stream=False).json(), names)]
        assert [reply["choices"][0]["message"]["content"] for reply in replies] == [*map(text_of, names)]
        assert max(model.num_loads for model in served.pool.models) <= 3


def test_clients_of_ollama_see_what_is_loaded_and_for_how_long():
    with serving(budget=2) as served:

        def loaded() -> dict[str, dict]:
            return {card["name"]: card for card in served.get("/api/ps").json()["models"]}

        assert [card["name"] for card in served.get("/api/tags").json()["models"]] == ["one", "two"]
        assert not loaded()
        assert served.post("/api/chat", model="one", keep_alive="5m").json()["done_reason"] == "load"
        asked = {"messages": HELLO, "stream": False, "options": {"num_predict": 3}}
        served.post("/api/chat", model="two:latest", keep_alive=-1, **asked)
        left = datetime.fromisoformat(loaded()["one"]["expires_at"]) - datetime.now(UTC)
        assert 200 < left.total_seconds() < 301 and loaded()["one"]["size"] == 1
        assert loaded()["two"]["expires_at"] > "9999"
        served.post("/api/chat", model="two", keep_alive="0s", **asked)
        wait_until(lambda: [*loaded()] == ["one"])
        refused = served.post("/api/chat", model="one", keep_alive="soon", **asked)
        assert (
            refused.status_code == 400 and "keep_alive: must be seconds, or a time such as 5m" in refused.text
        )
        assert served.post("/api/chat", model="one", keep_alive="1h30m0.5s", **asked).status_code == 200
        left = datetime.fromisoformat(loaded()["one"]["expires_at"]) - datetime.now(UTC)
        assert 5300 < left.total_seconds() < 5401
        assert served.post("/api/show", model="two").json()["capabilities"] == ["completion"]
        assert [*loaded()] == ["one"], "telling what a model can do loads nothing"
