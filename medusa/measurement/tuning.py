"""Which tree is fastest here: what a tree of N nodes is expected to give, against what it costs.

Tokens per step come from calibration, step times from this machine; the best N maximises their
ratio, for each batch size by itself. N = 1 is plain decoding and takes part, and a larger tree must beat
it by more than noise, so a tuned tree is never slower than none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa.decoding.static_loop import DEFAULT_STEPS_UNSEEN
from medusa.decoding.statistics import DecodingStatistics
from medusa.hardware import wait_for
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.rank_counts import RankCounts

NUM_NODES = (1, 2, 4, 8, 16, 32, 64, 128)
MIN_GAIN = 1.03
"""How much faster than plain decoding a tree must look before it is taken: below is noise."""
HOPELESS = 0.5
"""A size that could not reach this share of the best speed, did it cost no more than a smaller one, is not
timed."""


@dataclass(frozen=True)
class TreeSize:
    """What one size of tree gives and costs."""

    num_nodes: int
    depth: int
    tokens_per_step: float
    """Of one row; expected, on answers that did not choose the tree."""
    step_seconds: float
    """Median time of a decode step of the whole batch on this machine."""
    batch_size: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return self.batch_size * self.tokens_per_step / self.step_seconds


def trees_by_size(
    counts: RankCounts, sizes: Iterable[int], max_depth: int | None = None
) -> dict[int, CandidateTree]:
    """The best tree of each size; sizes that the counts cannot fill are left out."""
    trees = {size: counts.best_tree(size, max_depth) for size in sorted(set(sizes))}
    return {size: tree for size, tree in trees.items() if tree.num_nodes == size}


def measured_sizes(
    model: MedusaModel,
    trees: Mapping[int, CandidateTree],
    tokens_per_step: Mapping[int, float],
    inputs: Iterable[Mapping[str, Any]],
    batch_size: int = 1,
) -> list[TreeSize]:
    """What each size of ``trees`` gives and costs for the batches ``inputs``, hopeless sizes left out.

    ``tokens_per_step`` is what a tree of each size is expected to give.
    """
    seconds = measure_step_seconds(model, trees, inputs, tokens_per_step=tokens_per_step)
    return [
        TreeSize(size, trees[size].depth, tokens_per_step[size], taken, batch_size)
        for size, taken in seconds.items()
    ]


def measure_step_seconds(
    model: MedusaModel,
    trees: Mapping[int, CandidateTree],
    inputs: Iterable[Mapping[str, Any]],
    num_steps: int = 8,
    tokens_per_step: Mapping[int, float] | None = None,
) -> dict[int, float]:
    """Seconds of a decode step for each tree of ``trees``: medians over rounds.

    Each of ``inputs`` (``input_ids`` and ``attention_mask`` (B, T) of a batch) is a round in which every
    tree decodes ``num_steps`` steps, so that a machine that slows down does so for all. The first
    round warms up and is not counted, nor is any prefill, nor a step with fewer rows than B. With
    ``tokens_per_step`` the first round also drops the sizes that are :data:`HOPELESS`.

    Raises:
        ValueError: with some tree, no answer lasted two steps.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sorted(trees)}
    for number, batch in enumerate(inputs):
        if number == 0:
            first = _first_round(model, trees, batch, num_steps, tokens_per_step)
            seconds = {size: [] for size in first}
            continue
        for size in _rotated(list(seconds), number):
            taken = _step_seconds(model, trees[size], batch, num_steps)
            seconds[size] += [] if taken is None else [taken]
    for size, measured in seconds.items():
        if not measured:
            raise ValueError(
                f"no answer lasted two steps with the tree of {size} nodes; give prompts with longer answers"
            )
    return {size: statistics.median(measured) for size, measured in seconds.items()}


def fastest(table: Sequence[TreeSize], min_gain: float = MIN_GAIN) -> TreeSize:
    """The row with the most tokens per second; the smaller tree where two are equal.

    Plain decoding, where it is in the table and no tree is ``min_gain`` times as fast.
    """
    best = max(table, key=lambda row: (row.tokens_per_second, -row.num_nodes))
    plain = next((row for row in table if row.num_nodes == 1), best)
    return best if best.tokens_per_second >= min_gain * plain.tokens_per_second else plain


def _first_round(
    model: MedusaModel,
    trees: Mapping[int, CandidateTree],
    batch: Mapping[str, Any],
    num_steps: int,
    tokens_per_step: Mapping[int, float] | None,
) -> list[int]:
    """Run every tree once, small ones first; the sizes that are worth timing."""
    kept, best, longest = [], 0.0, 0.0
    for size in sorted(trees):
        gain = 1.0 if tokens_per_step is None else tokens_per_step[size]
        if tokens_per_step is not None and longest and gain / longest < HOPELESS * best:
            continue  # a larger tree takes no less time than the smaller ones did
        kept.append(size)
        # Twice: a first run pays for what is set up once, and would make every later size hopeless.
        runs = [_step_seconds(model, trees[size], batch, num_steps) for _ in range(2)]
        taken = min((each for each in runs if each is not None), default=None)
        if taken is not None:
            best, longest = max(best, gain / taken), max(longest, taken)
    return kept


def _step_seconds(
    model: MedusaModel, tree: CandidateTree, batch: Mapping[str, Any], num_steps: int
) -> float | None:
    """Mean seconds of the steps after the first, while all rows decode; None where there is none.

    The first step pays for what is set up once for a shape, and a loop that looks at its tokens every few
    steps gives them out in bursts: hence a mean over a stretch, from one burst to another.
    """
    most_steps = 1 + num_steps + 2 * DEFAULT_STEPS_UNSEEN  # so that no burst is cut short by the budget
    budget = 1 + most_steps * (tree.depth + 1)
    counted = DecodingStatistics()
    steps = model.stream(**batch, tree=tree, max_new_tokens=budget, do_sample=False, statistics=counted)
    next(steps)
    began, num_before, num_seen, seconds = 0.0, 0, 0, None
    for step in steps:
        if not all(step.tokens):
            break
        if counted.num_passes == num_seen:
            continue  # came together with the step before
        num_seen = counted.num_passes
        wait_for(model.device)
        now = time.perf_counter() - counted.setup_seconds
        if not num_before:
            began, num_before = now, num_seen
            continue
        seconds = (now - began) / (num_seen - num_before)
        if num_seen - num_before >= num_steps:
            break
    return seconds


def _rotated(sizes: list[int], by: int) -> list[int]:
    by %= len(sizes)
    return sizes[by:] + sizes[:by]
