"""Running the application: one socket, one thread that decodes, and an end that loses no answer in time."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from medusa.serving import application
from medusa.serving.application import AccessSettings, create_application
from medusa.serving.connections import bounded_protocol
from medusa.serving.service import Service

MAX_CONNECTIONS = application.MAX_REQUESTS + 64
"""Connections at once, also to those paths that are never refused. Less than the 1,024 files that processes
usually may open."""

log = logging.getLogger("medusa.serving")


class SignalledServer(uvicorn.Server):
    """Refuses new requests from the first signal on; a second one does not wait for running answers."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.is_draining, self.force_exit, self.should_exit = True, self.should_exit, True


def run_server(
    service: Service, access: AccessSettings, host: str, port: int, grace_seconds: float = 30.0
) -> None:
    """Serve until SIGINT or SIGTERM; running answers then get ``grace_seconds`` to end.

    Raises:
        OSError: the address cannot be listened on.
    """
    with log_to_standard_error(), listening_socket(host, port) as listening:
        service.start()
        try:
            config = uvicorn.Config(
                create_application(service, access),
                log_level="warning",
                access_log=False,
                server_header=False,
                http=bounded_protocol(MAX_CONNECTIONS),
                timeout_graceful_shutdown=max(1, round(grace_seconds)),
            )
            address = f"[{host}]" if ":" in host else host
            log.info("ready: http://%s:%s", address, listening.getsockname()[1])
            SignalledServer(config, service).run(sockets=[listening])
        finally:
            service.worker.close()


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there; taken before anything else, so that a port in use is said at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # a client that connects before uvicorn accepts waits
    except OSError as error:
        listening.close()
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port"
        ) from error
    return listening


@contextmanager
def log_to_standard_error() -> Iterator[None]:
    """One line a record, JSON where the record is a request; the logger is as it was when the block ends."""
    handlers, propagate, level = log.handlers, log.propagate, log.level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)
