"""Texts under way to their embeddings: the decode thread reads a part of one between the steps of answers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from medusa.decoding.pooled_states import PooledStates
from medusa.decoding.scheduler import LEAST_CHUNK, QueueFull

log = logging.getLogger("medusa.serving")


class EmbeddingLost(RuntimeError):
    """The vectors will not come; the words are those of a finish reason: "timeout", "shutdown", "error"."""


@dataclass(eq=False)
class EmbeddingTask:
    """The texts of one request; whoever cancels ``vectors`` has the rest left out."""

    texts: Sequence[Sequence[int]]
    """Their tokens."""
    begin: Callable[[Sequence[int]], PooledStates]
    deadline: float = float("inf")
    vectors: Future[list[Tensor]] = field(default_factory=Future)
    """(D,) float32 each."""

    def fail(self, reason: str) -> None:
        """End it with :class:`EmbeddingLost`, unless it has been cancelled."""
        if self.vectors.set_running_or_notify_cancel():
            self.vectors.set_exception(EmbeddingLost(reason))


class EmbeddingQueue:
    """The tasks of one model, first come first. One thread calls :meth:`step`; :meth:`add` is for any.

    Args:
        chunk: tokens of a part at first.
        seconds: the longest time of a part; after a longer one parts are half as long from then on.
        max_waiting: tasks that wait.
    """

    def __init__(self, chunk: int, seconds: float, max_waiting: int):
        self.chunk = chunk
        self.seconds = seconds
        self.max_waiting = max_waiting
        self._tasks = deque[EmbeddingTask]()
        self._reading: PooledStates | None = None
        self._vectors: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: EmbeddingTask) -> None:
        """Have ``task`` computed; QueueFull where too many wait."""
        if len(self._tasks) > self.max_waiting:
            raise QueueFull(f"{len(self._tasks)} requests wait already")
        self._tasks.append(task)

    def step(self) -> None:
        """Read a part of a text."""
        task = self._tasks[0]
        if task.vectors.cancelled():
            self._next()
        elif time.monotonic() > task.deadline:
            self._next()
            task.fail("timeout")
        else:
            try:
                self._read(task)
            except Exception as error:  # a text that breaks the pass fails alone
                log.error("an embedding failed: %s", type(error).__name__, exc_info=error)
                self._next()
                task.fail("error")

    def lose(self, reason: str) -> None:
        """End all tasks with an error."""
        while self._tasks:
            task = self._tasks[0]
            self._next()
            task.fail(reason)

    def _read(self, task: EmbeddingTask) -> None:
        if self._reading is None:
            self._reading = task.begin(task.texts[len(self._vectors)])
        reading = self._reading
        num_tokens = min(self.chunk, reading.num_left)
        began = time.perf_counter()
        reading.read(num_tokens)
        if num_tokens == self.chunk and time.perf_counter() - began > self.seconds:
            self.chunk = max(LEAST_CHUNK, self.chunk // 2)
        if reading.num_left:
            return
        self._vectors.append(reading.vector())
        self._reading = None
        if len(self._vectors) == len(task.texts):
            vectors = self._vectors
            self._next()
            if task.vectors.set_running_or_notify_cancel():
                task.vectors.set_result(vectors)

    def _next(self) -> None:
        """Go on to the next task."""
        self._tasks.popleft()
        self._reading = None
        self._vectors = []
