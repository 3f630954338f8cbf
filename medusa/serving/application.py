"""The HTTP application: the endpoints of all protocols over a :class:`medusa.serving.model_pool.ModelPool`.

Nothing here decodes. Requests have passed :mod:`medusa.serving.gate`, and an answer never shows a path, a
template or a traceback. A client that disconnects has its answers dropped before the next step.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

import medusa
from medusa.serving.chat_requests import ChatRequest, DetokenizeRequest, TokenizeRequest
from medusa.serving.completion_requests import CompletionRequest, InfillRequest, LlamaInfillRequest
from medusa.serving.dialects import Dialect
from medusa.serving.embedding_requests import EmbeddingsRequest
from medusa.serving.endpoints import Endpoints
from medusa.serving.gate import PAGE_SCRIPTS, Gate, answer_of
from medusa.serving.messages import MessagesRequest
from medusa.serving.model_pool import ModelPool, ServedModel
from medusa.serving.ollama import (
    OLLAMA_VERSION,
    EmbedRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    loaded_card,
    ollama_card,
)
from medusa.serving.replies import RequestError
from medusa.serving.responses import ResponsesRequest
from medusa.serving.service import Service
from medusa.serving.settings import AccessOptions


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

    endpoints = Endpoints(pool, access)
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
