"""Rows of earlier calls, whose memory and CUDA graphs the next call with such settings goes on with."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from medusa.decoding.static_stepper import StaticStepper
from medusa.hardware import available_memory

MAX_KEPT = 16
"""Settings whose graphs a model keeps at most."""
KEPT_SHARE = 4
"""Divisor: memory of kept rows, the newest one's excluded, is at most free memory divided by this."""


class KeptSteppers:
    """Rows of earlier calls by their settings, the least recently used first."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, StaticStepper] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StaticStepper]:
        return iter(list(self._rows.values()))

    def take(self, key: Hashable) -> StaticStepper | None:
        """The rows of these settings, which are then the caller's alone; None where there are none."""
        return self._rows.pop(key, None)

    def keep(self, key: Hashable, rows: StaticStepper) -> None:
        """Keep ``rows`` as the newest."""
        self.make_room(rows.base.device)
        self._rows[key] = rows

    def make_room(self, device: torch.device) -> None:
        """Let the oldest go, so that with one more there are at most :data:`MAX_KEPT`, and they take no more
        memory than they may."""
        free = available_memory(device)
        others = list(self._rows.items())
        while others:
            num_bytes = sum(rows.num_bytes for _, rows in others)
            if len(others) < MAX_KEPT and (free is None or num_bytes <= free // KEPT_SHARE):
                break
            oldest, _ = others.pop(0)
            self._rows.pop(oldest, None)  # another thread may have dropped it

    def has_failed_with(self, processors: frozenset[type]) -> bool:
        """Whether capturing has failed before, with no other logits processors than these."""
        return any(not rows.captures and rows.processor_types <= processors for rows in self)
