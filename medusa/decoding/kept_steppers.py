"""Steppers of earlier calls, whose memory and CUDA graphs the next call with such settings goes on with."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from medusa.decoding.static_stepper import StaticStepper
from medusa.hardware import available_memory

MAX_KEPT = 16
"""Settings whose graphs a model keeps at most."""
KEPT_SHARE = 4
"""Divisor: memory of kept steppers, the newest one's excluded, is at most free memory divided by this."""


class KeptSteppers:
    """Steppers of earlier calls by their settings, the least recently used first."""

    def __init__(self) -> None:
        self._steppers: dict[Hashable, StaticStepper] = {}

    def __len__(self) -> int:
        return len(self._steppers)

    def __iter__(self) -> Iterator[StaticStepper]:
        return iter(list(self._steppers.values()))

    def take(self, key: Hashable) -> StaticStepper | None:
        """The stepper of these settings, which is then the caller's alone; None where there is none."""
        return self._steppers.pop(key, None)

    def keep(self, key: Hashable, stepper: StaticStepper) -> None:
        """Keep ``stepper`` as the newest."""
        self.make_room(stepper.base.device)
        self._steppers[key] = stepper

    def make_room(self, device: torch.device) -> None:
        """Let the oldest go, so that with one more there are at most :data:`MAX_KEPT`, and they take no more
        memory than they may."""
        free = available_memory(device)
        others = list(self._steppers.items())
        while others:
            num_bytes = sum(stepper.num_bytes for _, stepper in others)
            if len(others) < MAX_KEPT and (free is None or num_bytes <= free // KEPT_SHARE):
                break
            oldest, _ = others.pop(0)
            self._steppers.pop(oldest, None)  # another thread may have dropped it

    def has_failed_with(self, processors: frozenset[type]) -> bool:
        """Whether capturing has failed before, with no other logits processors than these."""
        return any(not stepper.captures and stepper.processor_types <= processors for stepper in self)
