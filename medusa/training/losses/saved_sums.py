"""Sums of losses, and sums of such sums, as JSON has them, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def as_numbers(sums: Iterable[Any]) -> list[Any]:
    """The tensors of a named tuple as lists, those of named tuples within it as lists of lists."""
    return [each.tolist() if isinstance(each, Tensor) else as_numbers(each) for each in sums]


def from_numbers(zeros: Any, saved: list[Any]) -> Any:
    """What :func:`as_numbers` was given: a named tuple of the kind, types and device of ``zeros``."""
    pairs = zip(zeros, saved, strict=True)
    return type(zeros)(
        *(
            each.new_tensor(values) if isinstance(each, Tensor) else from_numbers(each, values)
            for each, values in pairs
        )
    )
