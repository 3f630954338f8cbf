"""The HTTP application: the endpoints of all protocols over a :class:`medusa.serving.model_pool.ModelPool`.

Nothing here decodes. Requests have passed :mod:`medusa.serving.gate`, and an answer never shows a path, a
template or a traceback. A client that disconnects has its answers dropped before the next step.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

import medusa
from medusa.conversations import check_keepable
from medusa.serving.body import Body, NotFinite, field_of, json_value, message_of, most_specific_error
from medusa.serving.chat_requests import ChatRequest, DetokenizeRequest, TokenizeRequest
from medusa.serving.completion_requests import CompletionRequest, InfillRequest, LlamaInfillRequest
from medusa.serving.dialects import Dialect, ReplyContext
from medusa.serving.embedding_requests import EmbeddingRequest, EmbeddingsRequest
from medusa.serving.embeddings import EmbeddingLost
from medusa.serving.gate import MAX_UNREAD, PAGE_SCRIPTS, Gate, answer_of
from medusa.serving.messages import MessagesRequest
from medusa.serving.model_pool import Lease, ModelPool, ServedModel
from medusa.serving.ollama import (
    OLLAMA_VERSION,
    EmbedRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
    loaded_card,
    ollama_card,
    ollama_facts,
)
from medusa.serving.output_formats import OutputFormat
from medusa.serving.output_parser import OutputParser
from medusa.serving.replies import DONE, LlamaReplies, Replies, RequestError, StreamedReplies, usage_of
from medusa.serving.responses import ResponsesRequest
from medusa.serving.service import Service, overloaded, shutting_down
from medusa.serving.settings import AccessOptions
from medusa.serving.worker import Answer, Update

log = logging.getLogger("medusa.serving")
BODY_SECONDS = 30.0
"""Seconds to receive a body."""
MAX_DEPTH = 128
"""Levels of lists and objects in a body."""
AWAKE_SECONDS = 10.0
"""After which a stream that has nothing to tell says how much of the prompt is read, so that proxies go on
waiting."""
SHOWN_SECONDS = 1.0
"""The same, for who watches."""
LOADING_SECONDS = 2.0
"""How long a stream waits for its model before it begins: a refusal within them is a status."""
NUM_PREPARING = 4
"""Requests that are read or tokenised at once."""


def create_application(pool: ModelPool, access: AccessOptions) -> FastAPI:
    """The application; ``pool`` must have been started."""
    app = FastAPI(title="medusa", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Gate, access=access)
    if access.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.cors_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Ignored-Fields"],
        )
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _http_refused)

    endpoints = _Endpoints(pool, access)
    home = files("medusa.serving")
    page = (home / "page.html").read_text(encoding="utf-8")
    if pool.options.allow_plain:
        page = page.replace('id="race" hidden', 'id="race"')
    scripts = {name: (home / "vendor" / name).read_bytes() for name in PAGE_SCRIPTS}

    readable = partial(app.api_route, methods=["GET", "HEAD"])

    @readable("/")
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers=_page_headers(page))

    @readable("/vendor/{name}")
    async def page_script(name: str) -> Response:
        if name not in scripts:
            raise HTTPException(404)
        return Response(scripts[name], media_type="text/javascript; charset=utf-8")

    @readable("/health")
    async def health() -> JSONResponse:
        ready = pool.is_ready
        return JSONResponse({"status": "ok" if ready else "unavailable"}, 200 if ready else 503)

    @readable("/metrics")
    async def metrics() -> Response:
        return Response(pool.exposed(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @readable("/version")
    async def version() -> dict[str, str]:
        return {"version": medusa.__version__}

    @readable("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [*pool.listed(ServedModel.card)]}

    @readable("/v1/models/{name:path}")
    async def model_named(name: str) -> Any:
        model = pool.named(name)
        return model.card(model.real_name(name))

    @readable("/v1/heads")
    async def heads(model: str | None = None) -> dict[str, Any]:
        return pool.named(model).heads_card()

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        return await endpoints.computed(request, TokenizeRequest, Service.tokens)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Any:
        return await endpoints.computed(request, DetokenizeRequest, Service.text)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await endpoints.answered(request, ChatRequest)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await endpoints.answered(request, CompletionRequest)

    @app.post("/v1/fim/completions")
    async def fill(request: Request) -> Response:
        return await endpoints.answered(request, InfillRequest)

    @app.post("/infill")
    async def fill_as_llama_cpp(request: Request) -> Response:
        return await endpoints.answered(request, LlamaInfillRequest)

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        with _own_words(ResponsesRequest):
            return await endpoints.answered(request, ResponsesRequest)

    @app.post("/v1/messages")
    async def respond_as_anthropic(request: Request) -> Response:
        with _own_words(MessagesRequest):
            return await endpoints.answered(request, MessagesRequest)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Any:
        with _own_words(MessagesRequest):
            return await endpoints.computed(request, MessagesRequest, Service.num_tokens)

    @app.post("/v1/embeddings")
    async def embed(request: Request) -> Response:
        return await endpoints.embedded(request, EmbeddingsRequest)

    @app.post("/api/embed")
    async def embed_as_ollama(request: Request) -> Response:
        return await endpoints.embedded(request, EmbedRequest)

    @app.post("/api/embeddings")
    async def embed_as_old_ollama(request: Request) -> Response:
        return await endpoints.embedded(request, OldEmbedRequest)

    @readable("/api/version")
    async def ollama_version() -> dict[str, str]:
        return {"version": OLLAMA_VERSION, "medusa": medusa.__version__}

    @readable("/api/tags")
    async def ollama_models() -> dict[str, Any]:
        return {"models": [*pool.listed(ollama_card)]}

    @readable("/api/ps")
    async def ollama_loaded() -> dict[str, Any]:
        return {"models": [*map(loaded_card, pool.loaded)]}

    @app.post("/api/show")
    async def ollama_show(request: Request) -> Any:
        return await endpoints.shown(request)

    @app.post("/api/chat")
    async def chat_as_ollama(request: Request) -> Response:
        with _own_words(OllamaChatRequest):
            return await endpoints.answered(request, OllamaChatRequest)

    @app.post("/api/generate")
    async def generate_as_ollama(request: Request) -> Response:
        with _own_words(OllamaGenerateRequest):
            return await endpoints.answered(request, OllamaGenerateRequest)

    return app


@contextlib.contextmanager
def _own_words(kind: type[Dialect]) -> Iterator[None]:
    """Names fields in errors as this dialect does."""
    try:
        yield
    except RequestError as error:
        raise kind.own_error(error) from error


def _page_headers(page: str) -> dict[str, str]:
    """The content security policy of ``page``: only its own scripts and style, HTML only from DOMPurify, and
    no request to another host."""
    allowed = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
            for body in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("script", "style")
    }
    policy = (
        "require-trusted-types-for 'script'; trusted-types dompurify; "
        f"default-src 'none'; script-src 'self' {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


async def _refused(request: Request, error: Any) -> JSONResponse:
    return answer_of(error, request.scope)


async def _http_refused(request: Request, error: Any) -> Response:
    if request.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=error.headers)
    says = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
    refusal = RequestError(says.get(error.status_code, "the request cannot be read"), error.status_code)
    return answer_of(refusal, request.scope, error.headers)


async def _body(request: Request) -> bytes:
    try:
        return await asyncio.wait_for(request.body(), BODY_SECONDS)
    except TimeoutError as error:
        raise RequestError("the body did not come in time", 408, code="timeout") from error


def _checked(raw: bytes, kind: Any) -> Any:
    """The body as ``kind``."""
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


class _Endpoints:
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
            body = _checked(raw, kind)
            return body, [*body.unread()]

        body, unread = await self._run(self.preparing, read, await _body(http_request))
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
        reply = await _unless_disconnected(http_request, self._embedded(http_request, body, model))
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
                return _PatientResponse(body.reply(model.real_name(body.model), shown, num_tokens, seconds))

            state = http_request.scope["state"]
            entry = {"request_id": state["request_id"], "path": http_request.url.path, "texts": len(texts)}
            log.info(json.dumps({**entry, "prompt_tokens": num_tokens, "seconds": round(seconds, 4)}))
            return await run_in_threadpool(reply)
        except EmbeddingLost as lost:
            failure = _failure(str(lost))
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
            reply = await _unless_disconnected(http_request, answering)
            return Response(status_code=499) if reply is None else reply
        await asyncio.wait({answering}, timeout=None if model.is_ready else LOADING_SECONDS)
        if answering.done():
            return answering.result()
        replies = _replies(body, body.asked, model.real_name(body.model))
        events = _late_events(answering, kind, replies, http_request.scope["state"])
        return _Stream(events, partial(_give_up, answering), replies.is_lines)

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
        replies = await run_in_threadpool(_replies, body, request, name, service, prompts)
        answers = await run_in_threadpool(service.answers, request, prompts, listener_of, grammar, owner)
        service.submit(answers)
        record = _Record(http_request, request, answers, sum(map(len, prompts)), self.access.log_prompts)

        def end() -> None:
            service.worker.cancel(answers)
            lease.release()
            record.state["is_logged"] = True
            if not record.is_written:  # the client has left, or the server failed: nobody waits for it
                loop.run_in_executor(None, record.write)

        if request.stream:
            return _Stream(_events(request, answers, queue, replies, record), end, replies.is_lines)
        try:
            updates = await _collected(queue, len(answers))
            return await run_in_threadpool(_whole, updates, replies, record)
        finally:
            end()


async def _late_events(
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


def _give_up(answering: asyncio.Task[Any]) -> None:
    """End what a late stream waited for, or showed."""
    if not answering.done():
        answering.cancel()
    elif not answering.cancelled() and answering.exception() is None:
        answering.result().at_end()


def _whole(updates: Sequence[Sequence[Update]], replies: StreamedReplies, record: _Record) -> JSONResponse:
    """The reply that is not streamed, once all updates of each answer are there.

    Raises:
        RequestError: an answer has failed.
    """
    record.write()
    for of_choice in updates:
        failure = _failure(of_choice[-1].finish_reason)
        if failure is not None:
            raise failure
    return _PatientResponse(replies.whole(updates, record.usage))


class _PatientResponse(JSONResponse):
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


def _replies(
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


class _Stream(StreamingResponse):
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


async def _events(
    request: ChatRequest | CompletionRequest,
    answers: Sequence[Answer],
    queue: asyncio.Queue[tuple[int, Update]],
    replies: StreamedReplies,
    record: _Record,
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
        failure = _failure(update.finish_reason)
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


def _failure(reason: str | None) -> RequestError | None:
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


async def _collected(queue: asyncio.Queue[tuple[int, Update]], num_answers: int) -> list[list[Update]]:
    """All updates of each answer."""
    updates: list[list[Update]] = [[] for _ in range(num_answers)]
    left = num_answers
    while left:
        index, update = await queue.get()
        updates[index].append(update)
        left -= update.finish_reason is not None
    return updates


async def _unless_disconnected(request: Request, work: Any) -> Any:
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


class _Record:
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
