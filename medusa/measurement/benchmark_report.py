"""What the answers of a benchmark add up to: speeds, step times by phase, and who said the same.

All numbers of one setting (rows decoded together, length of the conversation before the question). Speeds are
medians over batches of seconds per new token, each batch the median of its repeats. Nothing here decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from medusa.decoding.statistics import PHASES, DecodingStatistics
from medusa.measurement.contenders import HEADS, PLAIN, THEIRS, TRANSFORMERS

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Timing:
    """One batch answered by one contender."""

    contender: str
    batch: int
    category: str
    """Of its only prompt; batches of several have none, ""."""
    tokens: tuple[Tokens, ...]
    """The new tokens of each row, the one that ends it included."""
    seconds: float
    """Of the whole call."""
    statistics: DecodingStatistics | None = None

    @property
    def seconds_per_token(self) -> float:
        """Over all rows together."""
        return self.seconds / sum(map(len, self.tokens))


def new_tokens(
    sequences: Sequence[Sequence[int]], prompt_length: int, eos_ids: Collection[int]
) -> tuple[Tokens, ...]:
    """The new tokens of each row: what follows the prompt, up to the first token that ends an answer."""
    rows = []
    for sequence in sequences:
        answer = tuple(sequence[prompt_length:])
        end = next((place for place, token in enumerate(answer, 1) if token in eos_ids), len(answer))
        rows.append(answer[:end])
    return tuple(rows)


def setting_report(
    timings: Sequence[Timing], is_greedy: bool, is_exact: bool = True, is_same_model: bool = True
) -> dict[str, Any]:
    """The numbers of one setting; what a missing contender would have told is None.

    When sampling, ``transformers`` draws from another generator, and an engine that changes the model
    (``is_same_model`` is then false) has a text of its own: ``compared`` are our own two only.
    ``is_exact`` says whether the precision promises identical tokens; without, ``identical`` is not claimed.
    """
    names = list(dict.fromkeys(timing.contender for timing in timings))
    wanted = (TRANSFORMERS, PLAIN, HEADS) if is_greedy and is_same_model else (PLAIN, HEADS)
    compared = sorted(name for name in wanted if name in names)
    plain = answers_of(timings, PLAIN)
    num_identical = sum(
        all(said == expected for name in compared for said in repeats_of(timings, name, place))
        for place, expected in plain.items()
    )
    categories = sorted({timing.category for timing in timings if timing.category})
    checked = [name for name in names if name != PLAIN and (is_greedy or name not in THEIRS)]
    return {
        **speeds(timings),
        "identical": num_identical == len(plain) if is_exact else None,
        "num_identical": num_identical,
        "compared": compared,
        "same_as_plain": {name: same_as(plain, answers_of(timings, name)) for name in checked},
        "num_prompts": len(plain),
        "num_tokens": sum(map(len, answers_of(timings, HEADS if HEADS in names else PLAIN).values())),
        "by_category": {
            category: speeds([timing for timing in timings if timing.category == category])
            for category in categories
        },
    }


def speeds(timings: Sequence[Timing]) -> dict[str, Any]:
    """Speeds over some batches."""
    names = list(dict.fromkeys(timing.contender for timing in timings))
    per_token = {name: _seconds_per_token(timings, name) for name in names}
    ours = [name for name in names if name not in THEIRS]
    step = {name: median_over_batches(timings, name, _step_seconds) for name in ours}
    totals = {name: total_statistics(timings, name) for name in ours}
    return {
        "tokens_per_step": totals[HEADS].tokens_per_step if HEADS in totals else None,
        "tokens_per_step_of": {name: total.tokens_per_step for name, total in totals.items()},
        "overhead": _ratio(step.get(HEADS), step.get(PLAIN)),
        "speedup_vs_plain": _ratio(per_token.get(PLAIN), per_token.get(HEADS)),
        "speedup_vs_transformers": _ratio(per_token.get(TRANSFORMERS), per_token.get(HEADS)),
        "speedup_of_heads_over": {name: _ratio(per_token[name], per_token.get(HEADS)) for name in names},
        "speedup_over_plain": {name: _ratio(per_token.get(PLAIN), per_token[name]) for name in names},
        "milliseconds_per_token": {name: 1000 * seconds for name, seconds in per_token.items()},
        "milliseconds_per_step": {
            name: None if seconds is None else 1000 * seconds for name, seconds in step.items()
        },
        "step_milliseconds": {name: step_split(timings, name) for name in ours},
    }


def step_split(timings: Sequence[Timing], name: str) -> dict[str, float | None]:
    """Milliseconds of a step that each phase takes, as the host sees it: medians over batches."""

    def of_phase(phase: str) -> float | None:
        def milliseconds(timing: Timing) -> float | None:
            counted = timing.statistics
            if counted is None or not counted.num_passes:
                return None
            return 1000 * counted.phase_seconds[phase] / counted.num_passes

        return median_over_batches(timings, name, milliseconds)

    return {phase: of_phase(phase) for phase in PHASES}


def answers_of(timings: Sequence[Timing], name: str) -> dict[tuple[int, int], Tokens]:
    """[batch, row] = the tokens of a contender's first answer."""
    first = {t.batch: t for t in reversed(timings) if t.contender == name}
    return {(batch, row): tokens for batch, t in first.items() for row, tokens in enumerate(t.tokens)}


def median_over_batches(
    timings: Sequence[Timing], contender: str, value: Callable[[Timing], float | None]
) -> float | None:
    """Median over batches of the medians over repeats; None where nothing was measured."""
    by_batch: dict[int, list[float]] = {}
    for timing in timings:
        if timing.contender == contender and (measured := value(timing)) is not None:
            by_batch.setdefault(timing.batch, []).append(measured)
    return median(median(repeats) for repeats in by_batch.values()) if by_batch else None


def repeats_of(timings: Sequence[Timing], name: str, place: tuple[int, int]) -> list[Tokens]:
    """Every answer that a contender gave at one [batch, row]."""
    batch, row = place
    return [t.tokens[row] for t in timings if t.contender == name and t.batch == batch]


def same_as(
    expected: Mapping[tuple[int, int], Tokens], given: Mapping[tuple[int, int], Tokens]
) -> dict[str, Any]:
    """How many answers are the expected ones, and how many tokens before the first that is not."""
    return {
        "num_answers": sum(given[place] == tokens for place, tokens in expected.items()),
        "num_tokens": sum(_common_prefix(tokens, given[place]) for place, tokens in expected.items()),
        "of_answers": len(expected),
        "of_tokens": sum(map(len, expected.values())),
    }


def total_statistics(timings: Sequence[Timing], name: str) -> DecodingStatistics:
    """Those of the first answer of every batch, all together."""
    first = {t.batch: t.statistics for t in reversed(timings) if t.contender == name}
    return sum((counted for counted in first.values() if counted is not None), DecodingStatistics())


def _seconds_per_token(timings: Sequence[Timing], name: str) -> float:
    seconds = median_over_batches(timings, name, lambda timing: timing.seconds_per_token)
    assert seconds is not None, "names come from the timings"
    return seconds


def _step_seconds(timing: Timing) -> float | None:
    """Seconds of a decode step; None when the answer ended with the prefill."""
    counted = timing.statistics
    return counted.decode_seconds / counted.num_passes if counted and counted.num_passes else None


def _common_prefix(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
