"""Statistics of a run: the histogram of accepted tokens, and everything derived from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from transformers.generation import GenerateDecoderOnlyOutput

PHASES = ("draft", "verify", "accept", "commit")


@dataclass
class DecodingStatistics:
    """Counts of one or more decoded rows; ``a + b`` is the statistics of both.

    A *step* is one forward pass of one row. It emits its accepted draft tokens and one token of the
    base model's own. Tokens cut off by the end of an answer are not counted as accepted.

    Steps in which guessing paused (:mod:`medusa.decoding.adaptive`) are steps that accepted nothing, so they
    lower ``tokens_per_step``, which is about speed. The acceptance rates, which are about guesses, leave them
    out.
    """

    num_rows: int = 0
    num_steps: int = 0
    """Steps after the prefill, which emits each row's first token."""
    num_passes: int = 0
    """Forward passes after the prefill, each a step of every row that still decoded."""
    num_paused: int = 0
    """Steps in which guessing paused."""
    accepted_histogram: list[int] = field(default_factory=list)
    """[a]: steps that accepted a draft tokens; steps without a draft accepted none."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """decode_seconds by phase, as the host sees it; zero where a step runs as a whole."""
    setup_seconds: float = 0.0
    """Compiling and capturing steps, once for each size; not in decode_seconds."""

    @property
    def num_tokens(self) -> int:
        """Tokens emitted, each row's first included."""
        return self.num_rows + self.num_steps + self.num_accepted

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(a * count for a, count in enumerate(self.accepted_histogram))

    @property
    def tokens_per_step(self) -> float:
        """1 + mean accepted draft tokens; 1.0 before any step."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_rate(self) -> list[float]:
        """[d-1] = P(accepted >= d), for each depth d of the tree, of the steps that guessed."""
        return [self._reached(d) / self._reached(0) for d in self._depths()] if self._reached(0) else []

    @property
    def conditional_acceptance_rate(self) -> list[float]:
        """[d-1] = P(accepted >= d given accepted >= d-1); 0.0 where depth d-1 was never reached."""
        return [
            self._reached(d) / self._reached(d - 1) if self._reached(d - 1) else 0.0 for d in self._depths()
        ]

    def record_step(self, num_accepted: Sequence[int], max_depth: int, is_paused: bool = False) -> None:
        """Count one step of each row, given its accepted draft tokens."""
        missing = max_depth + 1 - len(self.accepted_histogram)
        self.accepted_histogram += [0] * max(0, missing)
        for accepted in num_accepted:
            self.accepted_histogram[accepted] += 1
        self.num_steps += len(num_accepted)
        self.num_paused += len(num_accepted) if is_paused else 0
        self.num_passes += 1

    def __add__(self, other: DecodingStatistics) -> DecodingStatistics:
        histograms = zip_longest(self.accepted_histogram, other.accepted_histogram, fillvalue=0)
        return DecodingStatistics(
            num_rows=self.num_rows + other.num_rows,
            num_steps=self.num_steps + other.num_steps,
            num_passes=self.num_passes + other.num_passes,
            num_paused=self.num_paused + other.num_paused,
            accepted_histogram=[a + b for a, b in histograms],
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            decode_seconds=self.decode_seconds + other.decode_seconds,
            phase_seconds={name: self.phase_seconds[name] + other.phase_seconds[name] for name in PHASES},
            setup_seconds=self.setup_seconds + other.setup_seconds,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, counts and rates, for JSON."""
        return {
            "num_rows": self.num_rows,
            "num_steps": self.num_steps,
            "num_passes": self.num_passes,
            "num_paused": self.num_paused,
            "num_tokens": self.num_tokens,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_rate": self.acceptance_rate,
            "conditional_acceptance_rate": self.conditional_acceptance_rate,
            "accepted_histogram": list(self.accepted_histogram),
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "phase_seconds": dict(self.phase_seconds),
            "setup_seconds": self.setup_seconds,
        }

    def _reached(self, depth: int) -> int:
        """Steps that guessed and accepted at least ``depth`` draft tokens."""
        return sum(self.accepted_histogram[depth:]) - (self.num_paused if depth == 0 else 0)

    def _depths(self) -> range:
        return range(1, len(self.accepted_histogram))


@dataclass
class MedusaOutput(GenerateDecoderOnlyOutput):
    """The result of ``generate`` with ``return_dict_in_generate=True``."""

    statistics: DecodingStatistics | None = None


class PhaseClock:
    """Host time by phase, written into statistics."""

    def __init__(self, statistics: DecodingStatistics, now: Callable[[], float] = time.perf_counter):
        self.statistics = statistics
        self.now = now
        self.began = self.last = now()

    def start(self) -> None:
        self.began = self.last = self.now()

    @property
    def step_seconds(self) -> float:
        """From the last start to the last lap."""
        return self.last - self.began

    def _since_last(self) -> float:
        """The time since the last lap, which ends here."""
        now = self.now()
        elapsed = now - self.last
        self.last = now
        return elapsed

    def lap(self, phase: str) -> None:
        """Count the time since the last lap as a phase of a step, or as "prefill"."""
        elapsed = self._since_last()
        if phase == "prefill":
            self.statistics.prefill_seconds += elapsed
        else:
            self.statistics.phase_seconds[phase] += elapsed
            self.statistics.decode_seconds += elapsed

    def lap_whole(self, setup_seconds: float = 0.0) -> None:
        """As :meth:`lap`, of steps that have no phases; ``setup_seconds`` of it were spent on setting up."""
        elapsed = self._since_last()
        self.statistics.setup_seconds += setup_seconds
        self.statistics.decode_seconds += elapsed - setup_seconds
