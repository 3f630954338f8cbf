"""The numbers and the picture of a run that people read: of loss sums, and of replaying the decoding of
held-out documents."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.heads.calibration import calibrate
from medusa.heads.protocol import Heads
from medusa.plots import BLUE, INK, SHADES, beside, figure_of
from medusa.training.data.dataset import Documents
from medusa.trees.candidate_tree import CandidateTree

NUM_NODES = 64
"""Nodes of the tree whose tokens per step are reported: a GPU verifies them in about the time of one node."""


def one_line(name: str, metrics: Mapping[str, float]) -> str:
    """The weighted loss, the hit rates by depth, and what else is measured: tokens per step, perplexity."""
    if not metrics:
        return f"{name}: no labels"
    rates = {
        key: "/".join(f"{metrics[each]:.2f}" for each in metrics if each.startswith(f"{name}/{key}_"))
        for key in ("top1", "top5")
    }
    line = f"{name}: loss {metrics[f'{name}/loss']:.3f}  top-1 {rates['top1']}  top-5 {rates['top5']}"
    value = metrics.get(f"{name}/tokens_per_step")
    if value is not None:
        line += f"  tokens per step {value:.3f} ({NUM_NODES} nodes)"
    value = metrics.get(f"{name}/base_perplexity")
    if value is not None:
        line += f"  base perplexity {value:.3f}"
    return line


def table(name: str, metrics: Mapping[str, float]) -> Table:
    """One row a head."""
    shown = Table("head", "loss", "top-1", "top-5", title=f"{name.replace('_', '-')} documents")
    depth = 1
    while f"{name}/loss_{depth}" in metrics:
        loss, top1, top5 = (metrics[f"{name}/{key}_{depth}"] for key in ("loss", "top1", "top5"))
        shown.add_row(str(depth), f"{loss:.3f}", f"{top1:.1%}", f"{top5:.1%}")
        depth += 1
    return shown


def replayed_metrics(
    base: CausalLM,
    heads: Heads | None,
    documents: Documents,
    at_most: int,
    states: Sequence[Tensor] | None = None,
) -> dict[str, float]:
    """``held_out/tokens_per_step`` of greedy decoding with a tree of :data:`NUM_NODES` nodes, by ``heads``;
    and ``held_out/tokens_per_step_d`` by the first d of them.

    Replayed, not decoded: each head's guesses are read once along the answers of ``at_most`` documents. Each
    half of the answers is judged with the tree of the other. ``states`` are the known hidden states of these
    documents: the base is then not run. Empty without heads, and where a half has no answer long enough to
    see every head guess.
    """
    rows = [(index, row) for index, row in enumerate(documents.answers(at_most)) if any(row.is_label[1:])]
    if heads is None or not rows:
        return {}
    known = None if states is None else [states[index] for index, _ in rows]
    counts = calibrate(base, heads, [row for _, row in rows], states=known)
    if len(counts.ranks) < 2 or not all(half.num_positions for half in counts.halves()):
        return {}
    key = "held_out/tokens_per_step"
    depths = range(1, heads.num_heads + 1)
    by_head = {f"{key}_{depth}": counts.held_out_tokens_per_step(NUM_NODES, depth) for depth in depths}
    return {key: by_head[f"{key}_{heads.num_heads}"], **by_head}


_SECONDS_BETWEEN_PICTURES = 30.0


def draw_training(entries: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw held-out top-1 by head and tokens per step against the training tokens seen, to ``path``.

    ``entries`` come from the metrics file. False, and no picture, with fewer than two evaluations.
    """
    points = [entry for entry in entries if "held_out/loss" in entry and entry.get("num_tokens")]
    if len(points) < 2:
        return False
    has_steps = all("held_out/tokens_per_step" in point for point in points)
    partial = path.with_name(f".{path.name}.partial.png")
    with figure_of(partial, path.parent.name, [1.0, 1.0] if has_steps else [1.0]) as axes:
        _plot_top1(axes[0], points)
        if has_steps:
            _plot_tokens_per_step(axes[1], points)
    os.replace(partial, path)
    return True


def is_stale(path: Path) -> bool:
    """Whether the picture at ``path`` is missing or half a minute old: drawing takes a moment."""
    return not path.exists() or time.time() - path.stat().st_mtime > _SECONDS_BETWEEN_PICTURES


def _plot_top1(ax: Any, points: Sequence[Mapping[str, Any]]) -> None:
    seen = [point["num_tokens"] for point in points]
    num_heads = sum(key.startswith("held_out/top1_") for key in points[-1])
    for head in range(1, num_heads + 1):
        rates = [point[f"held_out/top1_{head}"] for point in points]
        color = SHADES[min(head - 1, len(SHADES) - 1)]
        ax.plot(seen, rates, "o-", markersize=3, color=color)
        ax.annotate(
            f"head {head}  {rates[-1]:.0%}",
            (seen[-1], rates[-1]),
            (6, 0),
            **beside(color, ha="left", va="center"),
        )
    ax.set_title("A head's first guess is right (held out)")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylim(0, max(0.05, ax.dataLim.y1) * 1.15)
    _token_axis(ax, seen)


def _plot_tokens_per_step(ax: Any, points: Sequence[Mapping[str, Any]]) -> None:
    seen = [point["num_tokens"] for point in points]
    values = [point["held_out/tokens_per_step"] for point in points]
    ax.plot(seen, values, "o-", markersize=3, color=BLUE)
    ax.annotate(f"{values[-1]:.2f}", (seen[-1], values[-1]), (6, 0), **beside(INK, ha="left", va="center"))
    ax.set_title(f"Tokens per step, tree of {NUM_NODES} nodes (replayed)")
    ax.set_ylim(1, 1 + (max(*values, 1.05) - 1) * 1.15)
    _token_axis(ax, seen)


def _token_axis(ax: Any, seen: Sequence[int]) -> None:
    """Logarithmic: a curve that rises as a line gains as much by every doubling of the data."""
    from matplotlib.ticker import EngFormatter

    lowest = seen[0] / 1.1
    highest = seen[-1] * (seen[-1] / lowest) ** 0.4  # two sevenths of the width are for the labels
    marks = [digit * 10**power for power in range(13) for digit in (1, 2, 5)]
    marks = [mark for mark in marks if lowest <= mark <= seen[-1]]
    marks = marks if len(marks) > 1 else [seen[0], seen[-1]]
    ax.set_xscale("log")
    ax.set_xticks(marks)
    ax.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))  # 500k, 2M
    ax.minorticks_off()
    ax.set_xlim(lowest, highest)
    ax.set_xlabel("training tokens seen, epochs added up")


def calibrated_tree(
    base: CausalLM,
    heads: Heads,
    held_out: Documents,
    num_nodes: int,
    states: Sequence[Tensor] | None = None,
) -> CandidateTree | None:
    """The best tree of ``num_nodes`` nodes on the held-out documents; None when no answer among them is long
    enough to see every head guess. ``states`` are the known hidden states of each document."""
    answers = held_out.answers()
    if not any(sum(row.is_label) > heads.num_heads + 1 for row in answers):
        return None
    return calibrate(base, heads.eval(), answers, states=states).best_tree(num_nodes)
