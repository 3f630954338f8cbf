"""How a run is optimised: AdamW, how long, and with which learning rate.

The schedule is a pure function of steps done and time spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

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


def schedule_of(options: OptimisationOptions, steps_in_epoch: Callable[[int], int]) -> Schedule:
    """The schedule that ``options`` ask for, given how many steps each epoch, from 0, has."""
    limits = [] if options.max_steps is None else [options.max_steps]
    if options.num_epochs is not None:
        limits.append(sum(steps_in_epoch(epoch) for epoch in range(options.num_epochs)))
    seconds = None if options.max_minutes is None else 60 * options.max_minutes
    return Schedule(min(limits, default=None), seconds, options.warmup_steps, options.final_learning_rate)


def new_optimiser(
    groups: Sequence[Sequence[nn.Parameter]], options: OptimisationOptions
) -> torch.optim.Optimizer:
    """AdamW over what is trained of each group, in that order."""
    return torch.optim.AdamW(
        [{"params": [each for each in group if each.requires_grad]} for group in groups],
        lr=options.learning_rate,
        betas=(0.9, options.adam_beta2),
        weight_decay=options.weight_decay,
    )
