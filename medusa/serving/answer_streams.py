"""Answers as HTTP responses: whole, or as a stream of events; and what the log says of them."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from medusa.serving.chat_requests import ChatRequest
from medusa.serving.completion_requests import CompletionRequest, InfillRequest, LlamaInfillRequest
from medusa.serving.dialects import Dialect, ReplyContext
from medusa.serving.gate import MAX_UNREAD
from medusa.serving.output_formats import OutputFormat
from medusa.serving.output_parser import OutputParser
from medusa.serving.replies import DONE, LlamaReplies, Replies, RequestError, StreamedReplies, usage_of
from medusa.serving.service import Service, overloaded, shutting_down
from medusa.serving.worker import Answer, Update

log = logging.getLogger("medusa.serving")
AWAKE_SECONDS = 10.0
"""After which a stream that has nothing to tell says how much of the prompt is read, so that proxies go on
waiting."""
SHOWN_SECONDS = 1.0
"""The same, for who watches."""


async def late_events(
    answering: asyncio.Task[Any],
    kind: type[ChatRequest | CompletionRequest | Dialect],
    refused: StreamedReplies,
    state: dict[str, Any],
) -> AsyncIterator[str]:
    """The events of a stream that began before its model was loaded. Until then there are comments alone:
    clients want the events of a protocol in order. ``refused`` writes a refusal, which goes into ``state``
    too, for the log."""
    encoded = _line if refused.is_lines else _event
    while not answering.done():
        if not refused.is_lines:
            yield ": the model is being loaded\n\n"
        await asyncio.wait({answering}, timeout=AWAKE_SECONDS)
    try:
        stream = answering.result()
    except RequestError as error:
        state["refusal"] = kind.own_error(error)
        for body in (*refused.start(1), *refused.failed(state["refusal"])):
            yield encoded(body)
        return
    async for event in stream.body_iterator:
        yield event


def give_up(answering: asyncio.Task[Any]) -> None:
    """End what a late stream waited for, or showed."""
    if not answering.done():
        answering.cancel()
    elif not answering.cancelled() and answering.exception() is None:
        answering.result().at_end()


def whole_answer(
    updates: Sequence[Sequence[Update]], replies: StreamedReplies, record: AnswerRecord
) -> JSONResponse:
    """The reply that is not streamed, once all updates of each answer are there.

    Raises:
        RequestError: an answer has failed.
    """
    record.write()
    for of_choice in updates:
        failure = failure_of(of_choice[-1].finish_reason)
        if failure is not None:
            raise failure
    return PatientResponse(replies.whole(updates, record.usage))


class PatientResponse(JSONResponse):
    """JSON that is written a part at a time: one call for all of a long answer's log-probabilities would keep
    the event loop waiting for the interpreter."""

    def render(self, content: Any) -> bytes:
        return "".join(self._parts(content, levels=5)).encode()  # down to the entry of a token

    def _parts(self, content: Any, levels: int) -> Iterator[str]:
        if not levels or not isinstance(content, dict | list):
            yield json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            return
        named = isinstance(content, dict)
        yield "{" if named else "["
        for number, key_or_item in enumerate(content):
            key = f"{json.dumps(key_or_item, ensure_ascii=False)}:" if named else ""
            yield f",{key}" if number else key
            yield from self._parts(content[key_or_item] if named else key_or_item, levels - 1)
        yield "}" if named else "]"


def replies_to(
    body: ChatRequest | CompletionRequest | Dialect,
    request: ChatRequest | CompletionRequest,
    name: str,
    service: Service | None = None,
    prompts: Sequence[Sequence[int]] = (),
) -> StreamedReplies:
    """The writer of replies of the requested kind, which call the model ``name``; without a service of what
    is told before an answer begins: that it waits, or that it failed."""
    if isinstance(body, Dialect):
        context = ReplyContext(name, None, OutputParser(OutputFormat()))
        if service is not None:
            reader = service.reader(request, prompts[0])
            context = ReplyContext(name, service.tokenizer, reader, len(prompts[0]), service.sampling)
        return body.replies(context)
    if isinstance(request, LlamaInfillRequest):
        return LlamaReplies(request, name)
    if service is None:
        return Replies(request, name, None)
    echoed: list[str] = []
    if isinstance(request, CompletionRequest) and not isinstance(request, InfillRequest):
        if request.echo:
            texts = [text if isinstance(text, str) else service.text_of(text) for text in request.prompts]
            echoed = [text for text in texts for _ in range(request.n)]
        return Replies(request, name, service.tokenizer, echoed=echoed)
    return Replies(request, name, service.tokenizer, partial(service.reader, request, prompts[0]))


class EventStream(StreamingResponse):
    """Server-sent events, or lines; ``at_end`` is called however it ends, also when it never began."""

    def __init__(self, events: AsyncIterator[str], at_end: Callable[[], object], is_lines: bool):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        media_type = "application/x-ndjson" if is_lines else "text/event-stream"
        super().__init__(events, media_type=media_type, headers=headers)
        self.at_end = at_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.at_end()


async def answer_events(
    request: ChatRequest | CompletionRequest,
    answers: Sequence[Answer],
    queue: asyncio.Queue[tuple[int, Update]],
    replies: StreamedReplies,
    record: AnswerRecord,
) -> AsyncIterator[str]:
    """Server-sent events, and comments where nothing has come for long, for which proxies wait; or lines."""
    encoded = _line if replies.is_lines else _event
    shows = request.stream_options is not None and request.stream_options.include_depths
    for event in await run_in_threadpool(lambda: [*map(encoded, replies.start(len(answers)))]):
        yield event
    left = len(answers)
    while left:
        try:
            async with asyncio.timeout(SHOWN_SECONDS if shows else AWAKE_SECONDS):
                index, update = await queue.get()
        except TimeoutError:
            num_read = sum(min(answer.row.num_read, len(answer.row.prompt)) for answer in answers)
            if not replies.is_lines:
                yield f": read {num_read} of {record.num_to_read}\n\n"
            for body in replies.waiting():
                yield encoded(body)
            continue
        failure = failure_of(update.finish_reason)
        for body in replies.part(index, update) if failure is None else ():
            yield encoded(body)
        if failure is not None:
            break
        left -= update.finish_reason is not None

    def last_events() -> list[str]:
        record.write()
        return [*map(encoded, replies.end(record.usage) if failure is None else replies.failed(failure))]

    for event in await run_in_threadpool(last_events):
        yield event


def _line(body: Any) -> str:
    return f"{json.dumps(body, ensure_ascii=False)}\n"


def _event(body: Any) -> str:
    """An event; where its data has a type, clients know it by that name too."""
    if body == DONE:
        return f"data: {DONE}\n\n"
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body, ensure_ascii=False)}\n\n"


def failure_of(reason: str | None) -> RequestError | None:
    """The error for an answer that ended in this way; None for a good end."""
    if reason == "timeout":
        return RequestError("the answer took longer than this server allows", 504, code="timeout")
    if reason == "overloaded":
        return overloaded()
    if reason == "shutdown":
        return shutting_down()
    if reason == "form":
        text = "the answer cannot go on in the form that was asked for; ask for a simpler one"
        return RequestError(text, code="form_failed")
    if reason == "error":
        return RequestError("the server failed on this answer", 500, code="internal_error")
    return None


async def collected_updates(queue: asyncio.Queue[tuple[int, Update]], num_answers: int) -> list[list[Update]]:
    """All updates of each answer."""
    updates: list[list[Update]] = [[] for _ in range(num_answers)]
    left = num_answers
    while left:
        index, update = await queue.get()
        updates[index].append(update)
        left -= update.finish_reason is not None
    return updates


async def unless_disconnected(request: Request, work: Any) -> Any:
    """The result of ``work``; None, with the work cancelled, if the client leaves before."""

    async def leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(leaves())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


class AnswerRecord:
    """The metrics and the log entry of one request."""

    def __init__(
        self,
        http_request: Request,
        request: ChatRequest | CompletionRequest,
        answers: Sequence[Answer],
        num_prompt: int,
        log_prompts: bool,
    ):
        self.answers = answers
        self.num_prompt = num_prompt
        self.began = time.monotonic()
        self.is_written = False
        self.state = http_request.scope["state"]
        self.entry = {"request_id": self.state["request_id"], "path": http_request.url.path}
        self.entry |= {"stream": request.stream, "n": request.n}
        self.num_choices = request.n  # of each prompt
        self.num_to_read = num_prompt * request.n
        unread = self.state["unread"]
        if unread:
            self.entry["ignored"] = unread[:MAX_UNREAD]
        if log_prompts:
            prompt = request.messages if isinstance(request, ChatRequest) else request.prompt
            self.entry["prompt"] = prompt if isinstance(prompt, str) else [*map(_as_json, prompt)]

    @functools.cached_property
    def usage(self) -> dict[str, Any]:
        """Once the answers have ended; not to be asked for on the event loop."""
        reused = sum(answer.row.num_reused for answer in self.answers[:: self.num_choices])
        return usage_of(self.num_prompt, reused, self.answers)

    def write(self) -> None:
        ended = [answer.finish_reason or "cancelled" for answer in self.answers]
        counted = {**self.usage, "seconds": round(time.monotonic() - self.began, 4), "ended": ended}
        self.is_written = True
        log.info(json.dumps({**self.entry, **counted}, default=str))


def _as_json(part: Any) -> Any:
    return part.model_dump() if hasattr(part, "model_dump") else part
