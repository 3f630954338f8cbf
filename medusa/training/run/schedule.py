"""How long a run lasts and what its learning rate is: pure functions of steps done and time spent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from medusa.training.config.options import OptimisationOptions


@dataclass(frozen=True)
class Schedule:
    """A run ends at the first of its limits; the learning rate follows the one that is nearest."""

    total_steps: int | None
    """Optimiser steps of the whole run; None when only time limits it."""
    max_seconds: float | None
    warmup_steps: int
    final_fraction: float
    """Where the cosine ends, as a fraction of the peak."""

    def progress(self, step: int, seconds: float) -> float:
        """The part of the run that is over, 0 to 1."""
        parts = [0.0]
        if self.total_steps is not None:
            parts.append(step / self.total_steps)
        if self.max_seconds is not None:
            parts.append(seconds / self.max_seconds)
        return min(1.0, max(parts))

    def learning_rate_factor(self, step: int, seconds: float) -> float:
        """Of the peak, for the step after ``step`` ones: a linear rise times a cosine."""
        rise = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        fall = 0.5 * (1 + math.cos(math.pi * self.progress(step, seconds)))
        return rise * (self.final_fraction + (1 - self.final_fraction) * fall)

    def is_over(self, step: int, seconds: float) -> bool:
        return self.progress(step, seconds) >= 1.0


def schedule_of(options: OptimisationOptions, steps_in_epoch: Callable[[int], int]) -> Schedule:
    """The schedule that ``options`` ask for, given how many steps each epoch, from 0, has."""
    limits = [] if options.max_steps is None else [options.max_steps]
    if options.num_epochs is not None:
        limits.append(sum(steps_in_epoch(epoch) for epoch in range(options.num_epochs)))
    seconds = None if options.max_minutes is None else 60 * options.max_minutes
    return Schedule(min(limits, default=None), seconds, options.warmup_steps, options.final_learning_rate)
