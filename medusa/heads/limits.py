"""The largest sizes that a configuration of heads may give, and checks of them."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

MAX_SIZE = 2**24
"""Largest hidden size or vocabulary that is read: far above any model's. A file that says more is refused
before memory is asked for."""
MAX_DEPTH = 256
"""How far ahead heads may guess: far above what they guess right."""
MAX_LAYERS = 4096
"""Largest number of layers, of a head or of a base."""


def check_counts(**counts: tuple[Any, int]) -> None:
    """Raise ValueError unless each count, given as (value, largest), is an int from 1 to largest."""
    for name, (value, largest) in counts.items():
        if not _is_count(value, largest):
            raise ValueError(f"{name} must be an int from 1 to {largest}, got {reprlib.repr(value)}")


def _is_count(value: Any, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest


def ascends(layers: Sequence[Any]) -> bool:
    """Whether ``layers`` are different numbers of layers, in ascending order."""
    return all(_is_count(layer, MAX_LAYERS) for layer in layers) and list(layers) == sorted(set(layers))
