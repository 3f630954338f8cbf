"""Drafters against each other: which pairs of drafter and rule exist, and what their answers add up to.

Every answer here was decoded after the same prompt with the same seed by each pair, plain decoding among
them, so pairs are compared answer by answer. Nothing here decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from medusa.acceptance.rules import rule_named
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.protocol import Drafter
from medusa.drafters.registry import DraftSource, UnionSource
from medusa.measurement.draft_length import ChainRecord, WatchedAnswer

PLAIN = ("plain", "exact")
UNCONDITIONAL_RULES = ("exact", "typical")
"""These compare a candidate with the base alone, so any drafter will do."""
NOTHING_LEFT_OUT = {"top_k": 0, "top_p": 1.0}
"""For ``generate``: sample from all tokens, whatever the base's own configuration leaves out."""


@dataclass(frozen=True)
class Pairing:
    """A drafter and a rule, or the reason why they do not go together."""

    drafter: str
    rule: str
    make: Callable[[], Drafter]
    """A new drafter, in the shape that the rule takes."""
    refusal: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.drafter, self.rule


@dataclass(frozen=True)
class Trial:
    """One answer of one pairing."""

    key: tuple[str, str]
    prompt: int
    seed: int
    category: str
    answer: WatchedAnswer


def pairing(source: DraftSource | UnionSource, rule: str, is_greedy: bool) -> Pairing:
    """``source`` under ``rule``; refused when the rule would be biased, or is another one in disguise."""
    if rule in UNCONDITIONAL_RULES:
        return Pairing(source.name, rule, source.drafter)
    required = rule_named(rule)
    make = partial(source.drafter, only_chain=required.only_chains)
    if is_greedy:
        return Pairing(source.name, rule, make, "at temperature 0 it is the exact rule")
    drafter = make()
    try:
        required.require(drafter.sampled_kind(required.draft_kinds[0]), drafter.context_only)
    except ValueError as reason:
        return Pairing(source.name, rule, make, str(reason))
    return Pairing(source.name, rule, make)


def summary(trials: Sequence[Trial], plain: Sequence[Trial], draft_depth: int) -> dict[str, Any]:
    """One pairing's numbers; ``plain`` holds the plain answers to the same prompts."""
    answers = [trial.answer for trial in trials]
    total = sum((answer.statistics for answer in answers), DecodingStatistics())
    record = sum((answer.record for answer in answers), ChainRecord())
    is_chain = draft_depth > 0 and all(answer.all_chains for answer in answers)
    num_identical = _num_identical(trials, plain)
    num_steps = max(1, total.num_steps)
    return {
        "tokens_per_step": total.tokens_per_step,
        "predicted_tokens_per_step": record.expected_tokens(draft_depth) if is_chain else None,
        "token_acceptance_rate": record.acceptance_rate if is_chain else None,
        "drafted_share": record.drafted_share,
        "draft_depth": draft_depth,
        "is_chain": is_chain,
        "nodes_per_step": sum(answer.num_nodes for answer in answers) / num_steps,
        "acceptance_rate": total.acceptance_rate,
        "conditional_acceptance_rate": total.conditional_acceptance_rate,
        "milliseconds_per_step": {
            phase: 1000 * seconds / num_steps for phase, seconds in total.phase_seconds.items()
        },
        "milliseconds_per_token": 1000 * _seconds_per_token(trials),
        "speedup_vs_plain": _seconds_per_token(plain) / _seconds_per_token(trials),
        "decode_speedup_vs_plain": _decode_speedup(trials, plain),
        "exactness": exactness(trials[0].key[1], num_identical, len(trials)),
        "num_identical": num_identical,
        "num_answers": len(trials),
        "num_steps": total.num_steps,
        "num_tokens": total.num_tokens,
    }


def exactness(rule: str, num_identical: int, num_answers: int) -> str:
    """What may be said of the text: the very tokens of plain decoding, its law, or neither."""
    if rule == "typical":
        return "LOSSY"
    if rule != "exact":
        return "in law"
    return "identical" if num_identical == num_answers else f"{num_identical} of {num_answers}"


def paired_ratio(
    trials: Sequence[Trial], baseline: Sequence[Trial], resamples: int = 4000, seed: int = 0
) -> dict[str, Any]:
    """Tokens per step of ``trials`` over those of ``baseline``, with a 95 % confidence interval.

    Both answered the same prompts with the same seeds. The interval is a percentile bootstrap over prompts: a
    prompt is drawn with all its answers on both sides. With one prompt there is none.

    Raises:
        ValueError: the two did not answer the same prompts with the same seeds.
    """
    ours, theirs = _steps_and_tokens(trials), _steps_and_tokens(baseline)
    if {(t.prompt, t.seed) for t in trials} != {(t.prompt, t.seed) for t in baseline}:
        raise ValueError("a paired ratio needs the same prompts and seeds on both sides")
    prompts = [prompt for prompt in sorted(ours) if ours[prompt][0] and theirs[prompt][0]]
    if not prompts:
        raise ValueError(
            "every answer ended with its first token, so no step can be compared; give other prompts"
        )
    counts = np.array([(*ours[prompt], *theirs[prompt]) for prompt in prompts], dtype=float)  # (P, 4)
    return {**bootstrapped_ratio(counts, resamples, seed), "num_answers": len(trials)}


def bootstrapped_ratio(counts: np.ndarray, resamples: int = 4000, seed: int = 0) -> dict[str, Any]:
    """Ratio of tokens per step with its 95 % interval, a percentile bootstrap over prompts.

    counts (P, 4): for each prompt our steps, the tokens they emitted, and the baseline's alike.
    """
    result = {"num_prompts": len(counts), "ratio": float(_ratio(counts.sum(0)))}
    if len(counts) < 2:
        return {**result, "low": None, "high": None}
    drawn = np.random.default_rng(seed).integers(len(counts), size=(resamples, len(counts)))
    low, high = np.percentile(_ratio(counts[drawn].sum(1)), [2.5, 97.5])
    return {**result, "low": float(low), "high": float(high)}


def _ratio(counts: np.ndarray) -> np.ndarray:
    """Tokens per step over tokens per step, of counts (..., 4): our steps, our tokens, theirs alike."""
    return counts[..., 1] / counts[..., 0] * counts[..., 2] / counts[..., 3]


def _steps_and_tokens(trials: Sequence[Trial]) -> dict[int, tuple[int, int]]:
    """Steps and the tokens they emitted, by prompt."""
    totals: dict[int, tuple[int, int]] = {}
    for trial in trials:
        counted = trial.answer.statistics
        steps, tokens = totals.get(trial.prompt, (0, 0))
        emitted = counted.num_steps + counted.num_accepted
        totals[trial.prompt] = (steps + counted.num_steps, tokens + emitted)
    return totals


def _seconds_per_token(trials: Sequence[Trial]) -> float:
    """Median over prompts, each the median of its answers."""
    by_prompt: dict[int, list[float]] = {}
    for trial in trials:
        by_prompt.setdefault(trial.prompt, []).append(trial.answer.seconds / len(trial.answer.tokens))
    return median(median(times) for times in by_prompt.values())


def _decode_speedup(trials: Sequence[Trial], plain: Sequence[Trial]) -> float | None:
    """Tokens a second without prefills, all answers together; None when no answer lasted a step."""
    speeds = []
    for part in (trials, plain):
        total = sum((trial.answer.statistics for trial in part), DecodingStatistics())
        speeds.append(total.decode_seconds / (total.num_tokens - total.num_rows) if total.num_steps else None)
    ours, theirs = speeds
    return theirs / ours if ours and theirs else None


def _num_identical(trials: Sequence[Trial], plain: Sequence[Trial]) -> int:
    expected: Mapping[tuple[int, int], tuple[int, ...]] = {
        (trial.prompt, trial.seed): trial.answer.tokens for trial in plain
    }
    return sum(expected[trial.prompt, trial.seed] == trial.answer.tokens for trial in trials)
