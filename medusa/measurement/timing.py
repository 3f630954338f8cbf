"""Timing: systems take turns, and medians are compared.

A machine slows down and speeds up by itself. So systems do not run one after the other: in each round all of
them answer the same question, in an order that rotates, and a slow moment affects them all. The record of an
answer and its time is :class:`Answer`; speeds are medians over questions, each the median of its repeats, and
ratios come with an interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TypeVar

import numpy as np

from medusa.console import ProgressReporter
from medusa.decoding.statistics import PHASES, DecodingStatistics

NUM_WARM_UPS = 3
WARM_UP_TOKENS = 8

Tokens = tuple[int, ...]
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def take_turns(
    names: Sequence[Name],
    num_questions: int,
    run: Callable[[Name, int, int], Result],
    *,
    repeats: int = 1,
    num_warm_ups: int = 0,
    seconds: float | None = None,
    label: str | None = None,
) -> list[Result]:
    """``run(name, question, repeat)`` of every system for every question, ``repeats`` times.

    A round is one question for all systems; the order changes from round to round.

    Args:
        num_warm_ups: rounds at the beginning whose results are left out.
        seconds: time after which no new round begins; there is always one.
        label: the name of the job in the progress line; None shows nothing.
    """
    results: list[Result] = []
    rounds = [*product(range(repeats), range(num_questions))]
    began = time.monotonic()
    with ProgressReporter(label or "", is_shown=label is not None) as progress:
        for number, (repeat, question) in enumerate(rounds):
            shift = (repeat + question) % len(names)
            round_results = [run(name, question, repeat) for name in (*names[shift:], *names[:shift])]
            results += round_results if number >= num_warm_ups else []
            time_used = 0.0 if seconds is None else (time.monotonic() - began) / max(seconds, 1e-9)
            done = (number + 1) / len(rounds)
            progress.show(min(1.0, max(done, time_used)), f"{number + 1} of {len(rounds)} rounds")
            if time_used > 1 and results:
                break
    return results


@dataclass(frozen=True)
class Answer:
    """The answer of one system to one question, a batch of prompts, and its time."""

    system: str
    question: int
    tokens: tuple[Tokens, ...]
    """The new tokens of each row, the one that ends it included."""
    seconds: float
    """Seconds of the whole call, prefill included."""
    statistics: DecodingStatistics | None = None
    """None where ``transformers`` answered."""
    category: str = ""
    """Category of the only prompt; a batch of several has none."""
    seed: int = 0
    first_token_seconds: float | None = None
    """Until the first new token was there; None where nobody looked."""

    @property
    def seconds_per_token(self) -> float:
        """Over all rows together."""
        return self.seconds / sum(map(len, self.tokens))

    @property
    def steps_and_tokens(self) -> tuple[int, int]:
        """Decode steps, and the tokens they emitted."""
        counted = self.statistics or DecodingStatistics()
        return counted.num_steps, counted.num_steps + counted.num_accepted


def new_tokens(
    sequences: Sequence[Sequence[int]], prompt_length: int, eos_ids: Collection[int]
) -> tuple[Tokens, ...]:
    """The new tokens of each row: what follows the prompt, up to the first token that ends an answer."""
    rows = []
    for sequence in sequences:
        answer = tuple(sequence[prompt_length:])
        end = next((at for at, token in enumerate(answer, 1) if token in eos_ids), len(answer))
        rows.append(answer[:end])
    return tuple(rows)


def by_system(answers: Iterable[Answer]) -> dict[str, list[Answer]]:
    """The answers of each system, in the order of their first answers."""
    answers_by_system: dict[str, list[Answer]] = {}
    for answer in answers:
        answers_by_system.setdefault(answer.system, []).append(answer)
    return answers_by_system


def tokens_by_prompt(answers: Iterable[Answer]) -> dict[tuple[int, int, int], Tokens]:
    """[question, seed, row] = the tokens of one system's first answer there."""
    tokens_of: dict[tuple[int, int, int], Tokens] = {}
    for answer in answers:
        for row, tokens in enumerate(answer.tokens):
            tokens_of.setdefault((answer.question, answer.seed, row), tokens)
    return tokens_of


def total_statistics(answers: Iterable[Answer]) -> DecodingStatistics:
    """The summed statistics of one system's answers; a repeated answer to the same seed counts once."""
    first: dict[tuple[int, int], DecodingStatistics] = {}
    for answer in answers:
        if answer.statistics is not None:
            first.setdefault((answer.question, answer.seed), answer.statistics)
    return sum(first.values(), DecodingStatistics())


def _medians_by_question(
    answers: Iterable[Answer], value: Callable[[Answer], float | None]
) -> dict[int, float]:
    """[question] = the median of ``value`` over one system's answers to it, without None."""
    values_by_question: dict[int, list[float]] = {}
    for answer in answers:
        measured = value(answer)
        if measured is not None:
            values_by_question.setdefault(answer.question, []).append(measured)
    return {question: median(values) for question, values in values_by_question.items()}


def median_of(answers: Iterable[Answer], value: Callable[[Answer], float | None]) -> float | None:
    """Median over questions of :func:`_medians_by_question`; None where nothing was measured."""
    medians = _medians_by_question(answers, value)
    return median(medians.values()) if medians else None


def seconds_per_token(answers: Iterable[Answer]) -> float:
    """Seconds per token of one system, prefill included."""
    return median(_medians_by_question(answers, lambda answer: answer.seconds_per_token).values())


def step_seconds(answers: Iterable[Answer]) -> float | None:
    """Seconds per decode step of one system; None where every answer ended with the prefill."""
    return median_of(answers, lambda answer: _per_pass(answer, lambda counted: counted.decode_seconds))


def step_split(answers: Sequence[Answer]) -> dict[str, float | None]:
    """[phase] = milliseconds of a decode step that it takes, as the host sees it; None for steps of fixed
    shape, which run as one."""

    def milliseconds(answer: Answer, phase: str) -> float | None:
        if answer.statistics is not None and not any(answer.statistics.phase_seconds.values()):
            return None
        return _per_pass(answer, lambda counted: 1000 * counted.phase_seconds[phase])

    return {
        phase: median_of(answers, lambda answer, phase=phase: milliseconds(answer, phase))  # type: ignore[misc]
        for phase in PHASES
    }


def _per_pass(answer: Answer, value: Callable[[DecodingStatistics], float]) -> float | None:
    counted = answer.statistics
    return value(counted) / counted.num_passes if counted and counted.num_passes else None


# ------------------------------------------------------------------ ratios with intervals

Ratio = dict[str, float | None]
"""``ratio`` and the ends of its 95 % interval, ``low`` and ``high``: None with a single sample."""


NUM_RESAMPLES = 4000
"""Resamples of the bootstrap."""


def with_interval(samples: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Ratio:
    """``statistic`` of ``samples`` with a 95 % interval: a percentile bootstrap over samples.

    ``samples`` (P, C): C numbers for each of P questions. ``statistic`` maps (..., P, C) to (...).
    """
    value = float(statistic(samples))
    if len(samples) < 2:
        return {"ratio": value, "low": None, "high": None}
    drawn = np.random.default_rng(0).integers(len(samples), size=(NUM_RESAMPLES, len(samples)))
    low, high = np.percentile(statistic(samples[drawn]), [2.5, 97.5])
    return {"ratio": value, "low": float(low), "high": float(high)}


def tokens_per_step_ratio(counts: np.ndarray) -> Ratio:
    """Tokens per step over the baseline's. counts (P, 4): our steps and tokens, the baseline's alike."""

    def ratio(samples: np.ndarray) -> np.ndarray:
        steps, tokens, other_steps, other_tokens = np.moveaxis(samples.sum(-2), -1, 0)
        return tokens / steps * other_steps / other_tokens

    return with_interval(counts.astype(float), ratio)


def speedup(answers: Iterable[Answer], baseline: Iterable[Answer]) -> Ratio:
    """The speed-up of one system over ``baseline``: medians of seconds per token, with prefill.

    Taken over the questions that both answered.
    """
    ours, theirs = (
        _medians_by_question(each, lambda answer: answer.seconds_per_token) for each in (answers, baseline)
    )
    both = np.array([(ours[question], theirs[question]) for question in ours if question in theirs])

    def ratio(samples: np.ndarray) -> np.ndarray:
        return np.median(samples[..., 1], axis=-1) / np.median(samples[..., 0], axis=-1)

    return with_interval(both, ratio)
