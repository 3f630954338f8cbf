"""Running the application: one socket, one thread that decodes, and an end that loses no answer in time."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from medusa.serving.application import create_application
from medusa.serving.model_pool import ModelPool
from medusa.serving.settings import AccessOptions, AddressOptions

LAST_SECONDS = 2.0
"""Seconds to flush error events to clients after shutdown."""

log = logging.getLogger("medusa.serving")


class SignalledServer(uvicorn.Server):
    """Refuses new requests from the first signal on; a second one does not wait for running answers."""

    def __init__(self, config: uvicorn.Config, pool: ModelPool, grace_seconds: float = 30.0):
        super().__init__(config)
        self.pool = pool
        self.grace_seconds = grace_seconds
        self.is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.pool.drain()
        self.is_hurried = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._end_what_is_late())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_what_is_late(self) -> None:
        until = time.monotonic() + self.grace_seconds
        while time.monotonic() < until and not self.is_hurried:
            await asyncio.sleep(0.05)
        self.pool.end()
        await asyncio.sleep(LAST_SECONDS)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()  # its client reads nothing, or sends nothing more


def check_certificate(address: AddressOptions) -> None:
    """Raise where the certificate and its key, if there are any, cannot be read or do not belong together."""
    if address.tls_certificate is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(address.tls_certificate, address.tls_key, password="")
    except ssl.SSLError as error:
        raise ValueError(
            "tls_certificate and tls_key must be a certificate and its key in PEM, without a password, got "
            f"{address.tls_certificate} and {address.tls_key or 'no other file'} ({error.reason or error})"
        ) from error
    except OSError as error:
        raise OSError(f"tls_certificate or tls_key cannot be read: {error.strerror}") from error


def run_server(pool: ModelPool, access: AccessOptions, bound: socket.socket, address: AddressOptions) -> None:
    """Serve on ``bound``, which has this ``address``, until SIGINT or SIGTERM.

    Raises:
        OSError: another listens there since it was bound.
    """
    with log_to_standard_error():
        try:
            pool.start()
            config = uvicorn.Config(
                create_application(pool, access),
                log_level="warning",
                access_log=False,
                server_header=False,
                ssl_certfile=address.tls_certificate,
                ssl_keyfile=address.tls_key,
            )
            where = address_of(bound)
            with _address_errors(where):
                bound.listen()  # a client that connects before uvicorn accepts waits
            scheme = "https://" if address.tls_certificate else "http://"
            gc.collect()
            gc.freeze()  # a full collection need not look at model and libraries, with all clients waiting
            log.info("ready: %s%s", scheme, where)
            SignalledServer(config, pool, address.grace).run(sockets=[bound])
        finally:
            pool.close()


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket with this address, which does not listen yet; bound before a model is loaded, so that a port
    in use is reported at once.

    Raises:
        OSError: the address cannot be had.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with _address_errors(f"{host} port {port}"):
            bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def address_of(bound: socket.socket) -> str:
    """The host and port of a URL."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def _address_errors(where: str) -> Iterator[None]:
    """Names the address in an OSError, and what to do."""
    try:
        yield
    except OSError as error:
        advice = "choose another --host or --port"
        raise OSError(f"cannot listen on {where}: {error.strerror or error}; {advice}") from error


@contextmanager
def log_to_standard_error() -> Iterator[None]:
    """One line a record, JSON where the record is a request; the logger is as it was when the block ends."""
    handlers = log.handlers
    propagate = log.propagate
    level = log.level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.handlers = handlers
        log.propagate = propagate
        log.setLevel(level)
