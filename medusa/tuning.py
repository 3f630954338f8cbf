"""Which tree is fastest here: what a tree of N nodes is expected to give, against what it costs.

Tokens per step come from calibration, step times from this machine; the best N maximises their
ratio. N = 1 is plain decoding and takes part, so a tuned tree is never slower than none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa.calibration import RankCounts
from medusa.model import MedusaModel
from medusa.tree import CandidateTree

NUM_NODES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class TreeSize:
    """What one size of tree gives and costs."""

    num_nodes: int
    depth: int
    tokens_per_step: float
    """Expected, on answers that did not choose the tree."""
    step_seconds: float
    """Median time of a decode step on this machine."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds


def trees_by_size(
    counts: RankCounts, sizes: Iterable[int], max_depth: int | None = None
) -> dict[int, CandidateTree]:
    """The best tree of each size; sizes that the counts cannot fill are left out."""
    trees = {size: counts.best_tree(size, max_depth) for size in sorted(set(sizes))}
    return {size: tree for size, tree in trees.items() if tree.num_nodes == size}


def held_out_tokens_per_step(counts: RankCounts, num_nodes: int, max_depth: int | None = None) -> float:
    """Tokens per step that a best tree of ``num_nodes`` gives on answers it was not chosen on.

    The answers are dealt out in two halves; each half judges the tree of the other by replaying the
    decoding of its answers.
    """
    even, odd = counts.halves()
    judged = [
        judge.replayed_tokens_per_step(chooser.best_tree(num_nodes, max_depth))
        for chooser, judge in ((even, odd), (odd, even))
    ]
    return statistics.mean(judged)


def measure_step_seconds(
    model: MedusaModel,
    trees: Mapping[int, CandidateTree],
    inputs: Iterable[Mapping[str, Any]],
    num_steps: int = 8,
) -> dict[int, float]:
    """Median seconds of a decode step for each tree of ``trees``.

    Each of ``inputs`` (``input_ids`` and ``attention_mask`` of one prompt) is a round in which every
    tree decodes ``num_steps`` steps, so that a machine that slows down does so for all. The first
    round warms up and is not counted, nor is any prefill.

    Raises:
        ValueError: with some tree, no answer lasted a single step.
    """
    seconds: dict[int, list[float]] = {size: [] for size in trees}
    for number, prompt in enumerate(inputs):
        for size in _rotated(list(trees), number):
            taken = _step_seconds(model, trees[size], prompt, num_steps)
            seconds[size] += taken if number > 0 else []
    for size, taken in seconds.items():
        if not taken:
            raise ValueError(
                f"no answer lasted a step with the tree of {size} nodes; give prompts with longer answers"
            )
    return {size: statistics.median(taken) for size, taken in seconds.items()}


def fastest(table: Sequence[TreeSize]) -> TreeSize:
    """The row with the most tokens per second; the smaller tree where two are equal."""
    return max(table, key=lambda row: (row.tokens_per_second, -row.num_nodes))


def _step_seconds(
    model: MedusaModel, tree: CandidateTree, prompt: Mapping[str, Any], num_steps: int
) -> list[float]:
    budget = 1 + num_steps * (tree.depth + 1)
    steps = model.stream(**prompt, tree=tree, max_new_tokens=budget, do_sample=False)
    next(steps)
    seconds, before = [], time.perf_counter()
    for _, _ in zip(range(num_steps), steps, strict=False):
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    return seconds


def _rotated(sizes: list[int], by: int) -> list[int]:
    by %= len(sizes)
    return sizes[by:] + sizes[:by]
