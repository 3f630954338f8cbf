"""Connections that ask nothing: given up after a while, and the first to go where there are too many.

Nothing here needs a key, so a stranger could otherwise hold every connection that the process may have.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_SECONDS = 10.0
"""In which the head of a request must have come, from the connection or the last answer on."""


def bounded_protocol(most: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol, for one server with ``most`` connections at once.

    One more takes the place of that which has asked nothing for longest; where all have asked, it is closed.
    """
    waiting: dict[Any, None] = {}  # the longest first

    class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                oldest = next(iter(waiting), self)
                waiting.pop(oldest, None)
                oldest.transport.close()
            self._look()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _look(self) -> None:
            """Have it wait where no request of it is under way."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()
            elif self.patience is None and not self.transport.is_closing():
                waiting[self] = None
                self.patience = self.loop.call_later(HEADER_SECONDS, self.transport.close)

        def _forget(self) -> None:
            waiting.pop(self, None)
            if self.patience is not None:
                self.patience.cancel()
                self.patience = None

    return BoundedProtocol
