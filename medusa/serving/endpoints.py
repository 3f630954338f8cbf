"""The endpoints that read a body: it is received, checked, and answered by the model that it names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from medusa.conversations import check_keepable
from medusa.serving.answer_streams import (
    AnswerRecord,
    EventStream,
    PatientResponse,
    answer_events,
    collected_updates,
    failure_of,
    give_up,
    late_events,
    replies_to,
    unless_disconnected,
    whole_answer,
)
from medusa.serving.body import Body, NotFinite, field_of, json_value, message_of, most_specific_error
from medusa.serving.chat_requests import ChatRequest
from medusa.serving.completion_requests import CompletionRequest
from medusa.serving.dialects import Dialect
from medusa.serving.embedding_requests import EmbeddingRequest
from medusa.serving.embeddings import EmbeddingLost
from medusa.serving.model_pool import Lease, ModelPool, ServedModel
from medusa.serving.ollama import (
    ShowRequest,
    ollama_facts,
)
from medusa.serving.replies import RequestError
from medusa.serving.service import Service, overloaded
from medusa.serving.settings import AccessOptions
from medusa.serving.worker import Update

log = logging.getLogger("medusa.serving")
BODY_SECONDS = 30.0
"""Seconds to receive a body."""
MAX_DEPTH = 128
"""Levels of lists and objects in a body."""
LOADING_SECONDS = 2.0
"""How long a stream waits for its model before it begins: a refusal within them is a status."""
NUM_PREPARING = 4
"""Requests that are read or tokenised at once."""


async def received_body(request: Request) -> bytes:
    """The body of a request, once all of it has come.

    Raises:
        RequestError: that takes too long.
    """
    try:
        return await asyncio.wait_for(request.body(), BODY_SECONDS)
    except TimeoutError as error:
        raise RequestError("the body did not come in time", 408, code="timeout") from error


def checked_body(raw: bytes, kind: Any) -> Any:
    """The body as ``kind``.

    Raises:
        RequestError: it is no JSON object, or a field of it is wrong.
    """
    try:
        body = json_value(raw)
    except NotFinite as error:
        raise RequestError(f"the body must be JSON: {error}", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise RequestError("the body must be JSON", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {type(body).__name__}", code="invalid_json")
    try:
        check_keepable(body, "the body", MAX_DEPTH)
        request = kind.model_validate(body)
        if isinstance(request, Dialect):
            _ = request.asked  # raises errors of the chat fields here
        return request
    except ValidationError as error:
        wrong = most_specific_error(
            error.errors(include_url=False, include_context=False, include_input=False)
        )
        name = field_of(wrong["loc"])
        raise RequestError(f"{name or 'the body'}: {message_of(wrong)}", param=name or None) from error
    except ValueError as error:
        raise RequestError(str(error), code="invalid_json") from error


class Endpoints:
    """Shared code of the endpoints that read a body."""

    def __init__(self, pool: ModelPool, access: AccessOptions):
        self.pool = pool
        self.access = access
        self.most_waiting = pool.options.max_rows + pool.options.max_waiting
        self.preparing = CapacityLimiter(NUM_PREPARING)
        self.compiling = CapacityLimiter(1)
        self.num_under_way: Counter[CapacityLimiter] = Counter()

    async def _run(self, threads: CapacityLimiter, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``work``, off the event loop, which answers everybody else meanwhile.

        A body or a grammar may take a second and a hundred megabytes, so few are worked on at once, and no
        more wait than could be answered.
        """
        # The limiter counts waiting requests only a turn of the loop later, and many may come in one turn.
        if self.num_under_way[threads] >= threads.total_tokens + self.most_waiting:
            raise overloaded()
        self.num_under_way[threads] += 1
        try:
            return await to_thread.run_sync(work, *arguments, limiter=threads)
        finally:
            self.num_under_way[threads] -= 1

    async def _body_of(self, http_request: Request, kind: type[Body]) -> Any:
        """The body as ``kind``; the header of the reply names the fields of it that nobody reads."""

        def read(raw: bytes) -> tuple[Any, list[str]]:
            body = checked_body(raw, kind)
            return body, [*body.unread()]

        body, unread = await self._run(self.preparing, read, await received_body(http_request))
        http_request.scope["state"]["unread"] = unread
        return body

    async def computed(
        self, http_request: Request, kind: type[Body], work: Callable[[Service, Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """The result of ``work`` on a body of this kind, by the model that it names."""
        body = await self._body_of(http_request, kind)
        lease = await self.pool.lease(self.pool.named(body.model), body.keep_seconds)
        try:
            return await self._run(self.preparing, work, lease.service, body)
        finally:
            lease.release()

    async def shown(self, http_request: Request) -> dict[str, Any]:
        """What Ollama's clients ask about a model first."""
        body = await self._body_of(http_request, ShowRequest)
        return await self._run(self.preparing, ollama_facts, self.pool.named(body.model or body.name))

    async def embedded(self, http_request: Request, kind: type[EmbeddingRequest]) -> Response:
        """The embeddings of the texts of a request of this kind."""
        body = await self._body_of(http_request, kind)
        model = self.pool.named(body.model)
        reply = await unless_disconnected(http_request, self._embedded(http_request, body, model))
        return Response(status_code=499) if reply is None else reply

    async def _embedded(self, http_request: Request, body: EmbeddingRequest, model: ServedModel) -> Response:
        began = time.monotonic()
        lease = await self.pool.lease(model, body.keep_seconds)
        try:
            service = lease.service
            texts = await self._run(self.preparing, service.embedded_texts, body)
            vectors = await asyncio.wrap_future(service.embed(texts))
            num_tokens = sum(map(len, texts))
            seconds = time.monotonic() - began

            def reply() -> JSONResponse:
                shown = service.embedded.shortened(vectors, body.dimensions)
                return PatientResponse(body.reply(model.real_name(body.model), shown, num_tokens, seconds))

            state = http_request.scope["state"]
            entry = {"request_id": state["request_id"], "path": http_request.url.path, "texts": len(texts)}
            log.info(json.dumps({**entry, "prompt_tokens": num_tokens, "seconds": round(seconds, 4)}))
            return await run_in_threadpool(reply)
        except EmbeddingLost as lost:
            failure = failure_of(str(lost))
            assert failure is not None
            raise failure from lost
        finally:
            lease.release()

    async def answered(
        self, http_request: Request, kind: type[ChatRequest | CompletionRequest | Dialect]
    ) -> Response:
        """The answers to a request of this kind, whole or as a stream. Where its model is not loaded after a
        moment, a stream begins, and says that it waits."""
        body = await self._body_of(http_request, kind)
        model = self.pool.named(body.model)
        immediate_reply = body.told_at_once(model.real_name(body.model))
        if immediate_reply is not None:
            await self._kept(model, body.keep_seconds)
            return JSONResponse(immediate_reply)
        answering = asyncio.ensure_future(self._answered(http_request, body, model))
        if not body.stream:
            reply = await unless_disconnected(http_request, answering)
            return Response(status_code=499) if reply is None else reply
        await asyncio.wait({answering}, timeout=None if model.is_ready else LOADING_SECONDS)
        if answering.done():
            return answering.result()
        replies = replies_to(body, body.asked, model.real_name(body.model))
        events = late_events(answering, kind, replies, http_request.scope["state"])
        return EventStream(events, partial(give_up, answering), replies.is_lines)

    async def _kept(self, model: ServedModel, keep_seconds: float | None) -> None:
        """Have ``model`` loaded, or put down, as a request wants that wants nothing else."""
        if keep_seconds == 0:
            self.pool.put_down_when_idle(model)
        else:
            (await self.pool.lease(model, keep_seconds)).release()

    async def _answered(
        self, http_request: Request, body: ChatRequest | CompletionRequest | Dialect, model: ServedModel
    ) -> Response:
        """The answers to ``body``, once its model is loaded."""
        lease = await self.pool.lease(model, body.keep_seconds)
        try:
            return await self._answered_by(lease, http_request, body)
        except BaseException:
            lease.release()
            raise

    async def _answered_by(
        self, lease: Lease, http_request: Request, body: ChatRequest | CompletionRequest | Dialect
    ) -> Response:
        """The answers to ``body``; ``lease`` ends with them, unless this raises."""
        service = lease.service
        request = body.asked
        state = http_request.scope["state"]
        of_template = await self._run(self.preparing, service.unread, request)
        state["unread"] = [*dict.fromkeys([*state["unread"], *map(body.own_name, of_template)])]
        service.check(request)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()

        def listener_of(number: int) -> Callable[[Update], None]:
            def listen(update: Update) -> None:
                with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                    loop.call_soon_threadsafe(queue.put_nowait, (number, update))

            return listen

        prompts = await self._run(self.preparing, service.prompts, request)
        grammar = None
        if request.is_formed:
            grammar = await self._run(self.compiling, service.grammar, request, prompts[0])
        owner = state.get("owner")
        name = lease.model.real_name(request.model)
        replies = await run_in_threadpool(replies_to, body, request, name, service, prompts)
        answers = await run_in_threadpool(service.answers, request, prompts, listener_of, grammar, owner)
        service.submit(answers)
        record = AnswerRecord(http_request, request, answers, sum(map(len, prompts)), self.access.log_prompts)

        def end() -> None:
            service.worker.cancel(answers)
            lease.release()
            record.state["is_logged"] = True
            if not record.is_written:  # the client has left, or the server failed: nobody waits for it
                loop.run_in_executor(None, record.write)

        if request.stream:
            return EventStream(answer_events(request, answers, queue, replies, record), end, replies.is_lines)
        try:
            updates = await collected_updates(queue, len(answers))
            return await run_in_threadpool(whole_answer, updates, replies, record)
        finally:
            end()
