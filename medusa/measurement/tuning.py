"""Chooses the fastest tree: the expected tokens per step of a tree of N nodes, against its step time.

Tokens per step come from calibration, step times from this machine; the best N maximises their ratio, for
each batch size by itself. N = 1 is plain decoding and takes part, and a larger tree must beat it by more than
noise, so a tuned tree is never slower than none.

Tuned trees are written into the heads directory under the machine, precision, engine and kind of step that
they were timed with. The default tree serves a single row wherever nothing was tuned; a card takes the trees
of another card first. So it changes only when
batch size 1 is tuned, and only if it was never timed or was timed on this very machine: tuning on one more
machine leaves the trees of the others as they were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa.console import counted
from medusa.decoding.static_stepper import DEFAULT_HOST_SYNC_INTERVAL
from medusa.decoding.statistics import DecodingStatistics
from medusa.hardware import wait_for
from medusa.heads.checkpoint import HeadsCheckpoint, load_heads, save_tree
from medusa.measurement.timing import take_turns
from medusa.model import MedusaModel
from medusa.options import FALLBACK_STEP
from medusa.plots import FAINT, GREEN, ORANGE, beside, figure_of, shade, size_axis
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.rank_counts import RankCounts
from medusa.trees.tuned_trees import (
    RUNTIME_KEYS,
    Runtime,
    TunedTree,
    for_runtime,
    merged,
)

TUNED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
MIN_GAIN = 1.03
"""How much faster than plain decoding a tree must look before it is taken: below is noise."""
HOPELESS = 0.5
"""Sizes whose best possible speed is below this fraction of the best measured speed are skipped."""


@dataclass(frozen=True)
class TreeSize:
    """Tokens per step and step time of one tree size."""

    num_nodes: int
    depth: int
    tokens_per_step: float
    """Expected tokens per step of one row, on answers that did not choose the tree."""
    step_seconds: float
    """Median time of a decode step of the whole batch on this machine."""
    batch_size: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all rows together."""
        return self.batch_size * self.tokens_per_step / self.step_seconds


def trees_by_size(
    counts: RankCounts, sizes: Iterable[int], max_depth: int | None = None
) -> dict[int, CandidateTree]:
    """The best tree of each size; sizes that the counts cannot fill are left out."""
    trees = {size: counts.best_tree(size, max_depth) for size in sorted(set(sizes))}
    return {size: tree for size, tree in trees.items() if tree.num_nodes == size}


def measure_step_seconds(
    model: MedusaModel,
    trees: Mapping[int, CandidateTree],
    inputs: Sequence[Mapping[str, Any]],
    num_steps: int = 8,
    tokens_per_step: Mapping[int, float] | None = None,
    label: str | None = None,
) -> dict[int, float]:
    """Seconds of a decode step for each tree of ``trees``: medians over rounds.

    Each of ``inputs`` (``input_ids`` and ``attention_mask`` (B, T) of a batch) is a round in which every
    tree decodes ``num_steps`` steps. The first round warms up and is not counted, nor is any prefill, nor a
    step with fewer rows than B. With ``tokens_per_step`` the first round also drops the sizes that are
    :data:`HOPELESS`.

    Raises:
        ValueError: with some tree, no answer lasted two steps.
    """
    kept = _first_round(model, trees, inputs[0], num_steps, tokens_per_step)

    def timed(size: int, question: int, repeat: int) -> tuple[int, float | None]:
        return size, _step_seconds(model, trees[size], inputs[1 + question], num_steps)

    taken = take_turns(kept, len(inputs) - 1, timed, label=label)
    seconds_by_size = {
        size: [seconds for timed_size, seconds in taken if timed_size == size and seconds is not None]
        for size in kept
    }
    for size, measured in seconds_by_size.items():
        if not measured:
            raise ValueError(
                f"no answer lasted two steps with the tree of {counted(size, 'node')}; give prompts with "
                "longer answers"
            )
    return {size: statistics.median(measured) for size, measured in seconds_by_size.items()}


def fastest(table: Sequence[TreeSize]) -> TreeSize:
    """The row with the most tokens per second; the smaller tree where two are equal.

    Plain decoding, where it is in the table and no tree is :data:`MIN_GAIN` times as fast.
    """
    best = max(table, key=lambda row: (row.tokens_per_second, -row.num_nodes))
    plain = next((row for row in table if row.num_nodes == 1), best)
    return best if best.tokens_per_second >= MIN_GAIN * plain.tokens_per_second else plain


def _first_round(
    model: MedusaModel,
    trees: Mapping[int, CandidateTree],
    batch: Mapping[str, Any],
    num_steps: int,
    tokens_per_step: Mapping[int, float] | None,
) -> list[int]:
    """Run every tree once, small ones first; the sizes that are worth timing."""
    kept = []
    best = 0.0
    longest = 0.0
    for size in sorted(trees):
        gain = 1.0 if tokens_per_step is None else tokens_per_step[size]
        if tokens_per_step is not None and longest and gain / longest < HOPELESS * best:
            continue  # a larger tree takes no less time than the smaller ones did
        kept.append(size)
        # Twice: a first run includes one-time setup, and would make every later size look hopeless.
        runs = [_step_seconds(model, trees[size], batch, num_steps) for _ in range(2)]
        taken = min((each for each in runs if each is not None), default=None)
        if taken is not None:
            best = max(best, gain / taken)
            longest = max(longest, taken)
    return kept


def _step_seconds(
    model: MedusaModel, tree: CandidateTree, batch: Mapping[str, Any], num_steps: int
) -> float | None:
    """Mean seconds of the steps after the first, while all rows decode; None where there is none.

    The first step includes the setup for its shape, and a loop that reads its tokens every few steps emits
    them in bursts: hence a mean over a stretch, from one burst to another.
    """
    most_steps = 1 + num_steps + 2 * DEFAULT_HOST_SYNC_INTERVAL  # so that no burst is cut short by the budget
    budget = 1 + most_steps * (tree.depth + 1)
    decoding_statistics = DecodingStatistics()
    steps = model.stream(
        **batch, tree=tree, max_new_tokens=budget, do_sample=False, statistics=decoding_statistics
    )
    next(steps)
    began, num_before, num_seen, seconds = 0.0, 0, 0, None
    for step in steps:
        if not all(step.tokens):
            break
        if decoding_statistics.num_passes == num_seen:
            continue  # came together with the step before
        num_seen = decoding_statistics.num_passes
        wait_for(model.device)
        now = time.perf_counter() - decoding_statistics.setup_seconds
        if not num_before:
            began = now
            num_before = num_seen
            continue
        seconds = (now - began) / (num_seen - num_before)
        if num_seen - num_before >= num_steps:
            break
    return seconds


# ------------------------------------------------------------------ writing trees


def file_tuned(directory: str | Path, tuned: Sequence[TunedTree], origin: Mapping[str, Any]) -> list[str]:
    """Write ``tuned``, of one runtime and kind of step; returns sentences on written and kept trees.

    ``origin`` says how the tree of batch size 1 came about, in plain JSON values, its runtime among them.
    """
    before = load_heads(directory)
    single = next((entry for entry in tuned if entry.batch_size == 1), None)
    reason = _why_default_stays(before, single)
    default = before.tree or CandidateTree.chain(before.heads.num_heads)
    if single is None or reason is not None:
        path = save_tree(directory, default, merged(before.tuned, tuned), **before.tree_origin)
        about_default = f"left as it was ({_nodes(default)}): {reason}"
    else:
        path = save_tree(directory, single.tree, merged(before.tuned, tuned), **origin)
        about_default = f"now the tree of batch size 1 ({_nodes(single.tree)}; before, {_nodes(default)})"
    entries = [f"{_nodes(entry.tree)} for {entry.in_words()}" for entry in tuned]
    others = len(merged(before.tuned, tuned)) - len(tuned)
    return [
        f"written to {path}: {'; '.join(entries)}",
        f"default tree: {about_default}",
        f"tuned trees for anything else, left as they were: {others}",
    ]


def file_asked_for(
    directory: str | Path, tree: CandidateTree, runtime: Runtime, origin: Mapping[str, Any]
) -> list[str]:
    """Write ``tree`` as the default; returns sentences on written and removed trees.

    Trees that ``runtime``, where ``tree`` is to be used, would take go: they would hide it.
    """
    before = load_heads(directory).tuned
    kept = before
    while hiding := for_runtime(kept, runtime):  # another card's, once its own are gone
        kept = tuple(entry for entry in kept if entry not in hiding)
    path = save_tree(directory, tree, kept, **origin)
    return [
        f"written to {path}: {_nodes(tree)}, the default tree",
        f"tuned trees removed, since they would hide it on {runtime.in_words()}: {len(before) - len(kept)}",
        f"tuned trees for anything else, left as they were: {len(kept)}",
    ]


def _why_default_stays(before: HeadsCheckpoint, single: TunedTree | None) -> str | None:
    """The reason against ``single`` as the default tree of ``before``; None without any."""
    if single is None:
        return "batch size 1 was not tuned"
    origin = before.tree_origin
    if not all(isinstance(origin.get(key), str) for key in RUNTIME_KEYS):  # never timed
        return None
    runtime = Runtime(*(origin[key] for key in RUNTIME_KEYS))
    step = origin.get("step", FALLBACK_STEP)
    if (runtime, step) == (single.runtime, single.step):
        return None
    return f"it was tuned on {runtime.in_words()}, {step} steps"


def _nodes(tree: CandidateTree) -> str:
    return counted(tree.num_nodes, "node") if tree.num_nodes > 1 else "the root alone"


# ------------------------------------------------------------------ the picture


def plot_tuning(tables: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw what more nodes in the tree give, cost and come to: a line for each batch size.

    ``tables`` is ``by_batch_size`` of ``medusa tune``.
    """
    sizes = sorted({row["num_nodes"] for entry in tables.values() for row in entry["by_num_nodes"]})
    gains = {row["num_nodes"]: row["tokens_per_step"] for e in tables.values() for row in e["by_num_nodes"]}
    with figure_of(path, title, [1.0, 1.0]) as (left, right):
        left.plot(sizes, [gains[size] for size in sizes], "o-", color=ORANGE, label="tokens per step")
        for i, (batch, entry) in enumerate(tables.items()):
            rows = entry["by_num_nodes"]
            rows_in_words = counted(int(batch), "row")
            nodes = [row["num_nodes"] for row in rows]
            cost = [row["step_seconds"] / rows[0]["step_seconds"] for row in rows]
            speed = [row["tokens_per_second"] / rows[0]["tokens_per_second"] for row in rows]
            left.plot(nodes, cost, "o-", color=shade(i), label=f"time of a step, {rows_in_words}")
            right.plot(nodes, speed, "o-", color=shade(i), label=rows_in_words)
            best = nodes.index(entry["chosen"])
            right.plot([nodes[best]], [speed[best]], "o", color=GREEN, markersize=10, zorder=3)
            note = f"{counted(nodes[best], 'node')}, {speed[best]:.2f}x"
            text = right.annotate(note, (nodes[best], speed[best]), (0, 10), **beside(GREEN, ha="center"))
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
        left.set_title("Gain and cost of larger trees")
        left.set_ylabel("relative to plain decoding")
        right.set_title("Expected tokens per second; green: chosen")
        right.set_ylabel("relative to plain decoding")
        right.axhline(1.0, color=FAINT, linewidth=1, zorder=0)
        for ax in (left, right):
            size_axis(ax, sizes)
            ax.set_ylim(0, ax.dataLim.y1 * 1.2)
        left.legend(loc="upper left")
        if len(tables) > 1:
            right.legend(loc="lower left")
