"""The models of a server: the one that a request names is loaded when it is asked for, and put down when it
is idle or its memory is wanted.

All of this is on the event loop but loading and putting down, which are on one thread of their own, one after
the other. What a model takes is planned before it is loaded. A model with requests under way is not put down:
who asks for another one waits for their end, and requests that come meanwhile wait behind, so that nobody
waits for ever. A server of one model is a pool with one that stays.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from medusa.console import gigabytes
from medusa.engine.weights.memory import give_back_freed_memory
from medusa.hardware import release_threads
from medusa.serving.body import shortened
from medusa.serving.metrics import ServerMetrics, exposed_by_model
from medusa.serving.replies import RequestError
from medusa.serving.service import RETRY_AFTER, Service, overloaded, shutting_down
from medusa.serving.settings import ServiceOptions
from medusa.serving.tokenized_model import TokenizedModel

log = logging.getLogger("medusa.serving")

EARLY_SECONDS = 0.05
"""What a timer of the event loop may come too early by."""
NOT_LOADED = "the model %r could not be loaded"
LATEST = ":latest"
"""What clients of Ollama put behind a name."""


@dataclass(eq=False)
class ServedModel:
    """A model of a pool: what is known of it without loading it, and its service while it is loaded."""

    names: tuple[str, ...]
    """Names that are listed; the first is the official one."""
    path: str = ""
    """Where its files are; "" where it is in none."""
    family: str = ""
    """The type of its configuration."""
    context: int | None = None
    """Tokens that prompt and answer may have together."""
    num_bytes: int = 0
    """Memory that is planned for it: weights, caches, and what else a start takes."""
    aliases: tuple[str, ...] = ()
    """Names that are answered and not listed."""
    load: Callable[[ServerMetrics], Service] | None = None
    """Loads it; None for one that stays in memory."""
    load_tokenized: Callable[[], TokenizedModel] | None = None
    """Loads its tokenizer alone; None where it is always loaded."""
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    """Its counters, which go on when it is loaded again."""
    service: Service | None = None
    """Answers its requests; None while it is not loaded."""
    began_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    num_users: int = field(default=0, init=False)
    """Requests that have its service."""
    num_waiting: int = field(default=0, init=False)
    """Requests that wait for it."""
    num_loads: int = field(default=0, init=False)
    is_leaving: bool = field(default=False, init=False)
    """Another model wants its memory: who asks for it now waits until it is loaded again."""
    is_unwanted: bool = field(default=False, init=False)
    """A client has had it put down, and nobody has asked for it since."""
    last_used: float = field(default=0.0, init=False)
    keep_seconds: float = field(default=math.inf, init=False)
    """How long it stays after its last request."""
    loading: asyncio.Task[None] | None = field(default=None, init=False)
    timer: asyncio.TimerHandle | None = field(default=None, init=False)

    @classmethod
    def staying(cls, service: Service) -> ServedModel:
        """The model of ``service``, which is never put down."""
        base = service.model.base
        return cls(
            service.names,
            str(base.name_or_path or ""),
            base.config.model_type,
            service.context,
            metrics=service.metrics,
            service=service,
            began_at=service.began_at,
        )

    @property
    def is_ready(self) -> bool:
        """Whether a request gets its service at once."""
        return self.service is not None and not self.is_leaving

    @property
    def expires_at(self) -> datetime:
        """When it is put down unless it is used again; the end of all times where it stays."""
        latest = datetime.max.replace(tzinfo=UTC)
        if self.load is None or self.keep_seconds == math.inf:
            return latest
        left = self.keep_seconds - (0.0 if self.num_users else time.monotonic() - self.last_used)
        return datetime.fromtimestamp(min(time.time() + max(0.0, left), latest.timestamp() - 1), UTC)

    def tokenized(self) -> TokenizedModel:
        """The model as its tokenizer knows it; its weights are not loaded for this.

        Raises:
            RequestError: the tokenizer cannot be loaded.
        """
        service = self.service
        if service is not None:
            return service
        assert self.load_tokenized is not None
        try:
            return self.load_tokenized()
        except (OSError, ValueError) as error:
            log.info("the tokenizer of %r cannot be loaded: %s", self.names[0], error)
            text = (
                f"the tokenizer of the model {self.names[0]!r} cannot be loaded; the server's log says more"
            )
            raise RequestError(text, 503, "model", "model_not_loaded") from error

    def real_name(self, name: str | None) -> str:
        """The name that answers have where a client calls it ``name``, or nothing."""
        return name if name in self.names and name is not None else self.names[0]

    def card(self, name: str) -> dict[str, Any]:
        """The entry of ``GET /v1/models`` under a name."""
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "medusa",
            "root": self.names[0],
            "max_model_len": self.context,
            "context_length": self.context,
        }

    def heads_card(self) -> dict[str, Any]:
        """What ``GET /v1/heads`` says of it; nothing is known while it is not loaded."""
        if self.service is None:
            return {"object": "heads", "in_use": None, "learning": None}
        return self.service.heads_card()


class Lease:
    """A service that is not put down until :meth:`release`."""

    def __init__(self, model: ServedModel, service: Service, at_end: Callable[[], None]):
        self.model = model
        self._service: Service | None = service
        self._at_end = at_end

    @property
    def service(self) -> Service:
        assert self._service is not None, "the lease has ended"
        return self._service

    def release(self) -> None:
        """Have no more need of the service; once is enough, and twice is no harm."""
        if self._service is not None:
            self._service = None
            self._at_end()


class Changes:
    """What wakes all who wait for a change of a pool, on its event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self) -> None:
        """Until the next :meth:`tell`."""
        self._loop = asyncio.get_running_loop()
        await self._next.wait()

    def tell(self) -> None:
        """Wake who waits; from any thread, and from the handler of a signal."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


class ModelPool:
    """Models by name, of which as many are loaded as are used and have room.

    Args:
        models: at least one; the first answers requests that name none.
        options: those of all services.
        budget: bytes that loaded models may take together.
        keep_seconds: how long a model stays after its last request, unless the request says.

    Raises:
        ValueError: two models have one name.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        options: ServiceOptions,
        budget: float = math.inf,
        keep_seconds: float = math.inf,
    ):
        self.models = [*models]
        self.options = options
        self.budget = budget
        self.keep_seconds = keep_seconds
        self.is_draining = False
        """New requests are refused: :meth:`drain`."""
        self._by_name: dict[str, ServedModel] = {}
        for model in self.models:
            for name in model.names:
                if name in self._by_name:
                    raise ValueError(
                        f"models must have names of their own, got two called {name!r}; write NAME=PATH"
                    )
                self._by_name[name] = model
        for model in self.models:
            for name in model.aliases:
                self._by_name.setdefault(name, model)
        self._changes = Changes()  # of who has and who waits for a model, and of draining
        self._turn = asyncio.Lock()  # one model is loaded or put down at a time
        self._thread = ThreadPoolExecutor(1, "medusa-loading")
        self._tasks = set[asyncio.Task[None]]()

    @classmethod
    def of(cls, service: Service) -> ModelPool:
        """A pool of one model that is loaded and stays."""
        return cls([ServedModel.staying(service)], service.options)

    @property
    def loaded(self) -> list[ServedModel]:
        """The models that are in memory."""
        return [model for model in self.models if model.service is not None]

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered: none is refused, and what is loaded decodes."""
        services = [model.service for model in self.models]
        return not self.is_draining and all(service.is_ready for service in services if service is not None)

    def listed(self, card: Callable[[ServedModel, str], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The ``card`` of each model under each of its names."""
        for model in self.models:
            for name in model.names:
                yield card(model, name)

    # ------------------------------------------------------------------ on the event loop

    def named(self, name: str | None) -> ServedModel:
        """The model that a client calls ``name``, or nothing.

        Raises:
            RequestError: there are several and none is called so, or other names are refused.
        """
        known = (
            None if name is None else self._by_name.get(name, self._by_name.get(name.removesuffix(LATEST)))
        )
        if known is not None:
            return known
        if name and (len(self.models) > 1 or not self.options.any_model_name):
            served_names = ", ".join(repr(name) for model in self.models for name in model.names)
            text = f"the model {shortened(name)!r} is not here; there is {served_names}"
            raise RequestError(text, 404, "model", "model_not_found")
        return self.models[0]

    async def lease(self, model: ServedModel, keep_seconds: float | None = None) -> Lease:
        """The service of ``model``, which is loaded if it is not; waits for the memory.

        Args:
            keep_seconds: how long the model stays after this request; None is what the server says.

        Raises:
            RequestError: it can never fit, or cannot be loaded, or not in time, or the server ends, or too
                many wait already.
        """
        if model.num_waiting >= self.options.max_rows + self.options.max_waiting:
            raise overloaded()
        model.num_waiting += 1
        until = time.monotonic() + self.options.timeout
        try:
            while not model.is_ready:
                if time.monotonic() > until:
                    text = f"the model {model.names[0]!r} was not loaded in the time that this server allows"
                    raise RequestError(text, 504, "model", "timeout")
                await self._step_of_loading(model, until)
        finally:
            model.num_waiting -= 1
            self._changes.tell()
        assert model.service is not None
        model.num_users += 1
        model.is_unwanted = False
        for other in self.models:  # their learning would take from this one's time
            if other is not model and other.service is not None:
                other.service.pause_learning()
        return Lease(model, model.service, functools.partial(self._released, model, keep_seconds))

    async def _step_of_loading(self, model: ServedModel, until: float) -> None:
        """Have ``model`` loaded, and wait for it, for a change, or for the time ``until``."""
        if self.is_draining:
            raise shutting_down()
        if model.num_bytes > self.budget:
            raise RequestError(
                f"the model {model.names[0]!r} takes {gigabytes(model.num_bytes)} with its caches, and this "
                f"server may take {gigabytes(self.budget)}; ask for a smaller one, or have the server "
                "started with a larger --memory-mib",
                503,
                "model",
                "model_too_large",
            )
        if model.loading is None:
            model.loading = self._task(self._load(model))
        loading = model.loading
        change = asyncio.ensure_future(self._changes.wait())
        try:
            seconds = max(0.0, until - time.monotonic())
            await asyncio.wait({loading, change}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        if loading.done():
            loading.result()

    def put_down_when_idle(self, model: ServedModel) -> None:
        """Have ``model`` put down as soon as no request has it."""
        model.is_unwanted = True
        model.keep_seconds = 0.0
        self._set_timer(model)

    def _task(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # told to who waits
        return task

    async def _on_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _load(self, model: ServedModel) -> None:
        try:
            async with self._turn:
                if model.service is None and await self._has_room(model):
                    await self._on_thread(functools.partial(self._load_now, model))
                    self._set_timer(model)  # perhaps nobody waits any more
        finally:
            model.loading = None

    async def _has_room(self, model: ServedModel) -> bool:
        """Put down what must go for ``model``, the idle first, then what was used longest ago; False where
        nobody waits for it any more."""
        for other in self.loaded:  # who waited for one that has just been loaded gets it first
            while other.num_waiting and other.is_ready:
                await self._changes.wait()
        left = self.budget - sum(other.num_bytes for other in self.loaded)
        leaving = []
        for other in sorted(self.loaded, key=lambda other: (other.num_users > 0, other.last_used)):
            if left < model.num_bytes and other.load is not None:
                leaving.append(other)
                left += other.num_bytes
        for other in leaving:
            other.is_leaving = True
        try:
            for other in leaving:
                while other.num_users and model.num_waiting and not self.is_draining:
                    await self._changes.wait()
                if not model.num_waiting or self.is_draining:
                    return False
                await self._put_down(other)
        finally:
            for other in leaving:
                other.is_leaving = False
        return model.num_waiting > 0

    async def _put_down(self, model: ServedModel) -> None:
        service = model.service
        assert service is not None
        model.service = None
        self._stop_timer(model)
        await self._on_thread(service.close)
        del service
        await self._on_thread(_free_memory)
        log.info("the model %r is put down", model.names[0])

    def _released(self, model: ServedModel, keep_seconds: float | None) -> None:
        model.num_users -= 1
        self._changes.tell()
        model.last_used = time.monotonic()
        seconds = self.keep_seconds if keep_seconds is None else keep_seconds
        model.keep_seconds = 0.0 if model.is_unwanted else seconds
        self._set_timer(model)

    def _set_timer(self, model: ServedModel) -> None:
        self._stop_timer(model)
        if model.load is not None and not model.num_users and model.keep_seconds < math.inf:
            loop = asyncio.get_running_loop()
            model.timer = loop.call_later(model.keep_seconds, self._expire, model)

    def _stop_timer(self, model: ServedModel) -> None:
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None

    def _expire(self, model: ServedModel) -> None:
        self._task(self._put_down_idle(model))

    async def _put_down_idle(self, model: ServedModel) -> None:
        async with self._turn:
            is_over = time.monotonic() >= model.last_used + model.keep_seconds - EARLY_SECONDS
            if model.service is not None and is_over and not model.num_users and not model.num_waiting:
                await self._put_down(model)

    # ------------------------------------------------------------------ on any thread

    def _load_now(self, model: ServedModel) -> None:
        """Load ``model``, on the thread for it.

        Raises:
            RequestError: that failed. It holds no frame, and so no memory, of what was loaded.
        """
        assert model.load is not None
        began = time.monotonic()
        why = ""
        try:
            service = model.load(model.metrics)
            service.count_as_busy(lambda: any(other.num_users for other in self.models))
            service.start()
            model.num_loads += 1
            model.keep_seconds = self.keep_seconds
            model.last_used = time.monotonic()
            model.service = service
            service.is_draining = self.is_draining
            log.info("the model %r is loaded, after %.1f s", model.names[0], model.last_used - began)
        except MemoryError:
            log.exception(NOT_LOADED, model.names[0])
            why = "there is too little memory for it now"
        except OSError:
            log.exception(NOT_LOADED, model.names[0])
            why = "its files cannot be read"
        except Exception:  # of libraries, of files of another kind: the next request tries again
            log.exception(NOT_LOADED, model.names[0])
            why = "it is none that can be loaded here"
        if why:
            _free_memory()
            text = f"the model {model.names[0]!r} could not be loaded: {why}; the server's log says more"
            raise RequestError(text, 503, "model", "model_not_loaded", RETRY_AFTER)

    def start(self) -> None:
        """Decode with what is loaded; the log says what the others will take."""
        for model in self.models:
            if model.service is not None:
                model.service.start()
                continue
            fits = "" if model.num_bytes <= self.budget else ", which is refused: that is more"
            log.info(
                "%r takes %s of %s once it is asked for%s",
                model.names[0],
                gigabytes(model.num_bytes),
                gigabytes(self.budget),
                fits,
            )

    def drain(self) -> None:
        """Refuse new requests from here on."""
        self.is_draining = True
        for model in self.models:
            if model.service is not None:
                model.service.is_draining = True
        self._changes.tell()

    def end(self) -> None:
        """:meth:`drain`, and end the answers under way with an error."""
        self.drain()
        for model in self.models:
            if model.service is not None:
                model.service.worker.end()

    def close(self) -> None:
        """Put everything down, once a model that is being loaded is there: a thread cannot be ended."""
        self.drain()
        self._thread.shutdown(cancel_futures=True)
        for model in self.loaded:
            service = model.service
            model.service = None
            if service is not None:
                service.close()

    def exposed(self) -> bytes:
        """The text that Prometheus reads."""
        if len(self.models) == 1 and self.models[0].load is None:
            return self.models[0].metrics.exposed()
        return exposed_by_model({model.names[0]: model.metrics for model in self.models})


def _free_memory() -> None:
    """Give the memory of a model that nobody holds back to the system, on the thread that computed for it."""
    gc.collect()
    give_back_freed_memory()
    release_threads()
