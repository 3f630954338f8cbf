"""A server on a real socket, over a tiny model that runs on the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import uvicorn
from tiny_chat import chat_tokenizer

from medusa import CandidateTree, MedusaModel
from medusa.decoding.batch import Batch
from medusa.serving.application import create_application
from medusa.serving.model_pool import ModelPool
from medusa.serving.output_parser import Part
from medusa.serving.server import SignalledServer, bound_socket
from medusa.serving.service import Service
from medusa.serving.settings import AccessOptions, ServiceOptions

TOKENIZER = chat_tokenizer()
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "Whether it is warm.",
    "parameters": {
        "type": "object",
        "properties": {"warm": {"type": "boolean"}},
        "required": ["warm"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": WEATHER}


def tiny_service(model: MedusaModel, num_owners: int = 0, **options) -> Service:
    """A service of the model called tiny and nothing else, of few rows."""
    given = {"served_model_name": ("tiny",), "any_model_name": False, "max_rows": 4, "chunk": 32, **options}
    return Service(model, ServiceOptions(**given), num_owners=num_owners)


class ScriptedReader:
    """A reader of answers that hands out what it was given, one part for each update."""

    num_calls = 2
    is_call_open = False

    def __init__(self, *parts: Part):
        self.parts = [*parts]

    def feed(self, text: str) -> list[Part]:
        return [self.parts.pop(0)]

    def finish(self, is_cut: bool = False) -> list[Part]:
        return []


class Running:
    """A server and how to reach it."""

    def __init__(self, service: Service, port: int, server: SignalledServer):
        self.service, self.port, self.server = service, port, server
        self.url = f"http://127.0.0.1:{port}"

    @property
    def num_active(self) -> int:
        return self.service.worker.num_active

    def slowed(self, monkeypatch, seconds: float) -> Batch:
        """Its batch, each step of which takes so much longer for the rest of the test."""
        batch = self.service.worker.batches[False]
        step = batch.step
        monkeypatch.setattr(batch, "step", lambda: time.sleep(seconds) or step())
        return batch


def client_of(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def chat(server: Running, key: str = "none", **more) -> Any:
    """OpenAI's own client asks the model called tiny, :data:`HELLO` where no ``messages`` are given."""
    asked = {"model": "tiny", "messages": HELLO, **more}
    return client_of(server, key).chat.completions.create(**asked)


@contextmanager
def running(
    model: MedusaModel,
    access: AccessOptions | None = None,
    *,
    grace_seconds: float = 30.0,
    **options,
) -> Iterator[Running]:
    service = tiny_service(model, num_owners=len(access.api_key) if access else 0, **options)
    with running_pool(ModelPool.of(service), access, grace_seconds) as (port, server):
        yield Running(service, port, server)


@contextmanager
def running_pool(
    pool: ModelPool, access: AccessOptions | None = None, grace_seconds: float = 30.0
) -> Iterator[tuple[int, SignalledServer]]:
    """The port of a server of ``pool``, and the server."""
    listening = bound_socket("127.0.0.1", 0)
    app = create_application(pool, access or AccessOptions())
    server = SignalledServer(uvicorn.Config(app, log_level="error"), pool, grace_seconds)
    pool.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield listening.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join()
        for model in pool.loaded:
            model.service.worker.close()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Counts its own naps, so that a machine that stood still meanwhile is no failure."""
    for _ in range(round(seconds / 0.01)):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to pass")


def expected(model: MedusaModel, messages: list[dict], **options) -> tuple[list[int], str]:
    """The tokens and the text that ``generate`` gives alone, plainly."""
    ids = TOKENIZER.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    sequence = model.generate(**ids, tree=CandidateTree.chain(0), **options)
    tokens = sequence[0, ids["input_ids"].shape[1] :].tolist()
    return tokens, TOKENIZER.decode(tokens, skip_special_tokens=True)
