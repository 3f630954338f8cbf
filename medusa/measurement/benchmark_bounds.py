"""What a benchmark's numbers are held against: the device, the heads, and the base's own choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medusa.decoding.statistics import DecodingStatistics
from medusa.hardware import DeviceRates
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.measurement.benchmark_report import Timing, answers_of, total_statistics
from medusa.measurement.benchmarking import Setting
from medusa.measurement.contenders import HEADS, PLAIN
from medusa.measurement.roofline import best_expected_tokens, step_floor_seconds
from medusa.measurement.teacher_forcing import total_divergence
from medusa.model import MedusaModel
from medusa.trees.rank_counts import RankCounts

MOST_ANSWERS = 24
"""Answers that the heads are calibrated on."""


def answered_prompts(
    timings: Sequence[Timing], setting: Setting, name: str
) -> dict[int, tuple[list[int], list[int]]]:
    """[prompt] = its tokens, and a contender's answer."""
    pairs = {}
    for (batch, row), tokens in answers_of(timings, name).items():
        place = setting.places(batch)[row]
        pairs[place] = (setting.prompts[place]["input_ids"][0].tolist(), list(tokens))
    return pairs


def calibrated_counts(model: MedusaModel, timings: Sequence[Timing], setting: Setting) -> RankCounts | None:
    """Which guesses of the heads would have been right on the plain answers; None when they are too short."""
    assert model.heads is not None, "asked only with heads"
    pairs = list(answered_prompts(timings, setting, PLAIN).values())[:MOST_ANSWERS]
    rows = [AnsweredTokens.after_prompt(prompt + answer, len(prompt)) for prompt, answer in pairs]
    counts = calibrate(model.base, model.heads, rows, batch_size=1)
    return counts if counts.num_positions else None


def bounds(
    model: MedusaModel,
    setting: Setting,
    timings: Sequence[Timing],
    report: Mapping[str, Any],
    rates: DeviceRates,
    counts: RankCounts | None,
) -> dict[str, Any]:
    """``num_nodes`` and ``f_hw`` of plain decoding and the heads, and ``f_tree``; None where not known."""
    tree = model.tree_for(setting.batch_size)
    names = [name for name in (PLAIN, HEADS) if name in report["milliseconds_per_step"]]
    nodes = {name: tree.num_nodes if name == HEADS else 1 for name in names}
    f_tree = None
    if counts is not None and HEADS in nodes:
        f_tree = report["tokens_per_step"] / best_expected_tokens(counts, nodes[HEADS])
    return {
        "num_nodes": nodes,
        "f_hw": {
            name: _f_hw(
                model,
                setting,
                rates,
                nodes[name],
                total_statistics(timings, name),
                report["milliseconds_per_step"][name],
            )
            for name in names
        },
        "f_tree": f_tree,
    }


def _f_hw(
    model: MedusaModel,
    setting: Setting,
    rates: DeviceRates,
    num_nodes: int,
    counted: DecodingStatistics,
    milliseconds: float | None,
) -> float | None:
    """The least time that the device needs for a step, over the time it took; None when no step was timed."""
    if milliseconds is None:
        return None
    num_rows = counted.num_steps / counted.num_passes  # rows that finish leave the batch
    num_cached = setting.num_prompt_tokens + counted.num_tokens / counted.num_rows / 2
    floor = step_floor_seconds(model, rates, num_nodes, num_rows, num_cached, with_heads=num_nodes > 1)
    return 1000 * floor / milliseconds


def divergences(model: MedusaModel, timings: Sequence[Timing], setting: Setting) -> dict[str, dict[str, Any]]:
    """How far each contender's greedy answers stray from the base's likeliest tokens."""
    found = {}
    for name in dict.fromkeys(timing.contender for timing in timings):
        total = total_divergence(model.base, answered_prompts(timings, setting, name).values())
        found[name] = {
            "rate": total.rate,
            "num_diverging": total.num_diverging,
            "num_tokens": total.num_tokens,
            "largest_gap": total.largest_gap,
        }
    return found
