"""Servers that a run asks many things: each request is tried several times, and a server that dies is given
up for the others."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

import httpx

_RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_REFUSED_CLIENT = frozenset({401, 402, 403, 404, 405})
"""Statuses about the client or the address; every other request would get them too."""
REQUEST_SECONDS = 600.0
MAX_ATTEMPTS = 6
"""Tries per request."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds between two tries: doubled each time, or as the server asks, up to the second number."""

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Kind = TypeVar("Kind", bound="Endpoint")


class Refusal(ValueError):
    """Why something that was asked for will not be answered, so that asking again is no use."""


class Endpoint:
    """A server that speaks ``POST {url}`` in JSON. Safe to call from several threads. The environment's
    OPENAI_API_KEY, if set, is sent as bearer token.

    Args:
        url: up to and including the version, for example ``http://localhost:8000/v1``.
        path: what follows in the address of a request, ``/chat/completions``.
        model: the server's name of the model.
        say: called with a message when the server asks for a longer wait.
    """

    def __init__(self, url: str, path: str, model: str, *, say: Callable[[str], None] = lambda text: None):
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"endpoint must start with http:// or https://, got {url!r}; e.g. http://localhost:8000/v1"
            )
        self.url = url.rstrip("/").removesuffix(path) + path
        self.model = model
        self.say = say
        key = os.environ.get("OPENAI_API_KEY")
        self._client = httpx.Client(
            timeout=REQUEST_SECONDS,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None),
        )

    def close(self) -> None:
        self._client.close()

    def post(
        self, request: Mapping[str, Any], kind: str, parse: Callable[[httpx.Response], Answer | None]
    ) -> Answer:
        """What ``parse`` makes of the answer to ``request``; it returns None for what no ``kind`` of server
        answers.

        Raises:
            Refusal: the server refuses this request (HTTP 4xx), for example as too long, or returns invalid
                answers :data:`MAX_ATTEMPTS` times.
            PermissionError: the server refuses the client, or has no such model.
            ConnectionError: no answer after this number of tries.
        """
        problem = ""
        wait = FIRST_WAIT
        garbage = ""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                if wait > LONGEST_WAIT:
                    self.say(f"{self.url} asks to wait {wait:.0f} s; waiting {LONGEST_WAIT:.0f} s")
                wait = min(wait, LONGEST_WAIT)
                time.sleep(wait)
                wait *= 2
            try:
                response = self._client.post(self.url, json=request)
            except httpx.DecodingError as error:
                problem = garbage = f"endpoint {self.url} sent a body that cannot be unpacked: {error}"
                continue
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code in _RETRIED_STATUS:
                problem = f"HTTP {response.status_code}: {response.text[:300]}"
                retry_after = response.headers.get("retry-after", "")  # in seconds
                wait = float(retry_after) if re.fullmatch("[0-9]{1,9}", retry_after) else wait
                continue
            if response.status_code in _REFUSED_CLIENT:
                raise PermissionError(
                    f"{self.url} answered HTTP {response.status_code}: {response.text[:300]}; check "
                    f"OPENAI_API_KEY, the address and the model's name, {self.model!r}. The same command "
                    "goes on where it stopped"
                )
            if response.status_code != 200:
                raise Refusal(f"{self.url} answered HTTP {response.status_code}: {response.text[:300]}")
            answer = parse(response)
            if answer is not None:
                return answer
            problem = garbage = f"endpoint {self.url} did not answer as {kind} does: {response.text[:300]}"
        if problem == garbage:
            raise Refusal(garbage)
        raise ConnectionError(
            f"endpoint {self.url} gave no answer in {MAX_ATTEMPTS} tries, last {problem}; "
            "is it running? The same command goes on where it stopped"
        )


class EndpointPool(Generic[Kind, Item, Answer]):
    """Endpoints that serve one model, ``concurrency`` requests at once to each.

    The least busy endpoint takes the next item. An endpoint that stops answering is dropped, and its items go
    to the others.
    """

    def __init__(
        self,
        endpoints: Sequence[Kind],
        concurrency: int,
        ask: Callable[[Kind, Item], Answer],
        say: Callable[[str], None] = lambda text: None,
    ):
        """``ask`` asks an endpoint for an item; ``say`` gets a message for each that is given up."""
        self.endpoints = endpoints
        self.concurrency = concurrency
        self.ask = ask
        self.say = say

    def outcomes(
        self, next_item: Callable[[], Item | None], is_time_up: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Item, Answer | Refusal]]:
        """Each item with its answer, in the order they end, until ``next_item`` gives None and all that were
        taken are done. When ``is_time_up`` those that are still asked for are left out.

        Raises:
            ConnectionError, PermissionError: no endpoint is left; the error of the last one.
        """
        ended: SimpleQueue[tuple[Kind, Item, Answer | Exception]] = SimpleQueue()
        queues = {endpoint: SimpleQueue[Item | None]() for endpoint in self.endpoints}
        for endpoint in [*queues] * self.concurrency:  # daemons: nobody waits for them after the time is up
            Thread(target=self._work, args=(endpoint, queues[endpoint], ended), daemon=True).start()
        try:
            yield from self._outcomes(queues, ended, next_item, is_time_up)
        finally:
            for endpoint in [*queues] * self.concurrency:
                queues[endpoint].put(None)

    def _outcomes(
        self,
        queues: Mapping[Kind, SimpleQueue],
        ended: SimpleQueue,
        next_item: Callable[[], Item | None],
        is_time_up: Callable[[], bool],
    ) -> Iterator[tuple[Item, Answer | Refusal]]:
        num_asked = dict.fromkeys(queues, 0)
        alive = list(queues)
        left = deque[Item]()
        last_words = None
        while True:
            is_up = is_time_up()
            while alive and not is_up:
                endpoint = min(alive, key=num_asked.__getitem__)
                if num_asked[endpoint] == self.concurrency:
                    break
                item = left.popleft() if left else next_item()
                if item is None:
                    break
                queues[endpoint].put(item)
                num_asked[endpoint] += 1
            if not any(num_asked.values()) or (is_up and ended.empty()):
                if last_words is not None and not alive:
                    raise last_words
                return
            try:
                endpoint, item, outcome = ended.get(timeout=0.2)
            except Empty:
                continue
            num_asked[endpoint] -= 1
            if isinstance(outcome, ConnectionError | PermissionError):
                last_words = outcome
                left.append(item)  # for the others
                if endpoint in alive:
                    alive.remove(endpoint)
                    self.say(f"{endpoint.url} is given up, {len(alive)} of {len(queues)} go on: {outcome}")
                continue
            if isinstance(outcome, Exception) and not isinstance(outcome, Refusal):
                raise outcome
            yield item, outcome

    def _work(self, endpoint: Kind, waiting: SimpleQueue, ended: SimpleQueue) -> None:
        """The work of a thread: ask ``endpoint`` for items, one after the other, until one is None."""
        while (item := waiting.get()) is not None:
            try:
                outcome: Answer | Exception = self.ask(endpoint, item)
            except Exception as error:
                outcome = error  # raised where the outcomes are read
            ended.put((endpoint, item, outcome))
