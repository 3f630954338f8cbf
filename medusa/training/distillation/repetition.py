"""Answers that only repeat themselves, and where that began."""

from __future__ import annotations

from collections.abc import Sequence


def repeated_tail(tokens: Sequence[int], max_period: int = 64, min_repeated: int = 48) -> int:
    """How many tokens at the end only repeat what stands before them; 0 when it is no loop.

    A loop is a stretch of at most ``max_period`` tokens said at least three times, with at least
    ``min_repeated`` tokens of repetition. Taking that many tokens off leaves the stretch said once.
    """
    for period in range(1, min(max_period, len(tokens) // 3) + 1):
        repeated = 0
        while repeated + period < len(tokens) and tokens[-1 - repeated] == tokens[-1 - repeated - period]:
            repeated += 1
        if repeated >= max(min_repeated, 2 * period):
            return repeated
    return 0
