"""The gate before the application: hosts, origins, keys, body sizes and request ids, before anything is read.

A browser lets any page reach every address that it can reach itself. A page of another site may resolve its
own name to the address of this server (DNS rebinding), and then has the same origin for the browser. The
``Host`` that it sends is still that name. Keys are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from medusa.serving.replies import ANTHROPIC_STATUS, RequestError, anthropic_error
from medusa.serving.service import overloaded
from medusa.serving.settings import AccessOptions

log = logging.getLogger("medusa.serving")
HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?")
PAGE_SCRIPTS = ("marked.umd.js", "purify.min.js")
"""Libraries of the chat page, in ``vendor/``."""
ABSOLUTE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
OPEN_PATHS = ("/", "/health", *(f"/vendor/{name}" for name in PAGE_SCRIPTS))
"""Paths that need no key: they disclose nothing."""
ANTHROPIC_PATH = "/v1/messages"
"""Errors of what begins with it have Anthropic's form."""
OLLAMA_PATH = "/api/"
"""Errors of what begins with it have Ollama's form."""
MAX_REQUESTS = 704
"""Requests under way at once, whether they wait, decode or are being read."""
MAX_LOGGED_PATH = 200
"""Characters of a path in the log."""
MAX_UNREAD, MAX_HEADER = 32, 1024
"""Fields that were not read, in the header and in the log; and the header's characters."""


class Gate:
    """Hosts, origins, keys, body sizes and request ids, before anything is read or parsed."""

    def __init__(self, app: Callable[..., Any], access: AccessOptions):
        self.app = app
        self.access = access
        self.num_under_way = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        absolute = ABSOLUTE.match(scope["path"])
        behind_host = 0 if absolute is None else absolute.end()  # in the target of a request to a proxy
        path = scope["path"][behind_host:].rstrip("/") or "/"
        if path != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        scope.setdefault("state", {})["request_id"] = identity = uuid.uuid4().hex
        has_begun = False

        async def send_with_id(message: Any) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                own = [(name, identity.encode()) for name in (b"x-request-id", b"request-id")]
                own.append((b"x-content-type-options", b"nosniff"))
                unread = scope["state"].get("unread")
                if unread:
                    own.append((b"x-ignored-fields", as_header(unread)))
                message["headers"] = [*message["headers"], *own]
            await send(message)

        headers = dict(scope["headers"])
        if absolute is not None:
            headers[b"host"] = absolute[1].encode()  # which RFC 9112, section 3.2.2, has count instead
        refusal = self._refusal_of_place(scope, headers) or self._refusal(scope, headers)
        if refusal is None:
            self.num_under_way += 1
            try:
                await self.app(scope, _limited(receive, self.access.max_body_bytes), send_with_id)
            except ClientDisconnect:
                scope["state"]["refusal"] = RequestError("the client has left", 499, code="disconnected")
            except Exception as error:
                log.error("request %s failed", identity, exc_info=error)
                refusal = RequestError(
                    f"the server failed on this request; its log knows it as {identity}", 500
                )
            finally:
                self.num_under_way -= 1
        if refusal is not None and not has_begun:
            await answer_of(refusal, scope)(scope, receive, send_with_id)
        _log_refusal(scope)

    def _refusal_of_place(self, scope: Any, headers: dict[bytes, bytes]) -> RequestError | None:
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        refusal = None
        if b"host" in headers:  # without one it is no browser
            refusal = refusal_of_host(host, scope["server"][0], self.access.allowed_host)
        if refusal is None and b"origin" in headers:
            refusal = refusal_of_origin(origin, host, self.access.cors_origin)
        return refusal

    def _refusal(self, scope: Any, headers: dict[bytes, bytes]) -> RequestError | None:
        path = scope["path"]
        if self.access.api_key and path not in OPEN_PATHS:
            sent_keys = _keys_in(headers)
            known = [
                any([hmac.compare_digest(sent, key.encode()) for sent in sent_keys])
                for key in self.access.api_key
            ]
            if not any(known):
                return RequestError("the API key is missing or wrong", 401, code="invalid_api_key")
            key = self.access.api_key[known.index(True)]
            scope["state"]["owner"] = hashlib.sha256(key.encode()).hexdigest()  # the same after a restart
        if self.num_under_way >= MAX_REQUESTS and path not in OPEN_PATHS:
            return overloaded()
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if encoding not in ("", "identity"):
            return RequestError(
                f"bodies must not be compressed here, got Content-Encoding {encoding[:40]!r}; send the "
                "JSON as it is",
                415,
                code="compressed_body",
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.access.max_body_bytes:
            return _too_large(self.access.max_body_bytes)
        return None


def _keys_in(headers: dict[bytes, bytes]) -> list[bytes]:
    """The keys that a client has sent: OpenAI's clients send a Bearer key, Anthropic's also ``x-api-key``."""
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    keys = [credentials.strip()] if scheme.lower() == b"bearer" else []
    return [*keys, headers[b"x-api-key"].strip()] if b"x-api-key" in headers else keys


def as_header(names: Sequence[str]) -> bytes:
    """Names that clients have written, with commas between, as a header may hold them."""
    kept = ", ".join(names[:MAX_UNREAD])
    return re.sub(r"[^ -~]", "?", kept)[:MAX_HEADER].encode()


def _limited(receive: Any, most: int) -> Any:
    """``receive``, refusing bodies that turn out too large."""
    received = 0

    async def counted() -> Any:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > most:
            raise _too_large(most)
        return message

    return counted


def _too_large(most: int) -> RequestError:
    return RequestError(f"the body must have at most {most} bytes", 413, code="body_too_large")


def answer_of(refusal: RequestError, scope: Any, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The reply that refuses a request; :class:`Gate` logs it."""
    scope["state"]["refusal"] = refusal
    status = refusal.status
    body = refusal.body
    if scope["path"].startswith(ANTHROPIC_PATH):
        status = ANTHROPIC_STATUS.get(status, status)
        body = {**anthropic_error(refusal), "request_id": scope["state"]["request_id"]}
    if scope["path"].startswith(OLLAMA_PATH):
        body = {"error": str(refusal)}
    return JSONResponse(body, status, headers or refusal.headers)


def _log_refusal(scope: Any) -> None:
    """One log line for a request that was refused before it was counted, without the client's text."""
    state = scope["state"]
    refusal = state.get("refusal")
    if refusal is not None and "is_logged" not in state:
        entry = {"request_id": state["request_id"], "path": scope["path"][:MAX_LOGGED_PATH]}
        log.info(
            json.dumps({**entry, "refused": refusal.status, "code": refusal.code, "param": refusal.param})
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def refusal_of_host(host_header: str, own_address: str, allowed: Collection[str]) -> RequestError | None:
    """The refusal of a request with this ``host_header``; None where it is allowed.

    Args:
        own_address: the address of the connection's local end.
        allowed: names and addresses, in addition to that one and the loopback.
    """
    match = HOST.fullmatch(host_header)
    name = (match[1] or match[2] or "") if match else host_header
    address = _address(name)
    # A page cannot rebind an address, and a server that listens everywhere has the address "any".
    if is_loopback(name) or (address is not None and address.is_unspecified):
        return None
    if _normal(name) in map(_normal, (own_address, *allowed)):
        return None
    return RequestError(
        f"this server does not answer to the host {name[:200]!r}; its operator may add --allowed-host",
        403,
        code="host_not_allowed",
    )


def refusal_of_origin(origin_header: str, host: str, allowed: Collection[str]) -> RequestError | None:
    """The refusal of a page with this ``origin_header``; None where it is from this ``host``, or
    ``allowed``."""
    origin = origin_header.lower()
    if origin.partition("://")[2] == host.lower() or "*" in allowed or origin in allowed:
        return None
    return RequestError(
        f"pages of {origin_header[:200]!r} may not ask this server; its operator may add --cors-origin",
        403,
        code="origin_not_allowed",
    )


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _normal(host: str) -> str:
    return str(_address(host) or host.lower())
