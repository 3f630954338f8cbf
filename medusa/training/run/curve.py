"""The picture of a run: what more training has bought, and so what more of it would."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa.plots import BLUE, INK, SHADES, beside, figure_of
from medusa.training.run.metrics import NUM_NODES

SECONDS_BETWEEN_PICTURES = 30.0


def draw_training(entries: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw held-out top-1 by head and tokens per step against the training tokens seen, to ``path``.

    ``entries`` are those of the metrics file. False, and no picture, where fewer than two evaluations make
    no curve.
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
    return not path.exists() or time.time() - path.stat().st_mtime > SECONDS_BETWEEN_PICTURES


def _plot_top1(ax: Any, points: Sequence[Mapping[str, Any]]) -> None:
    seen = [point["num_tokens"] for point in points]
    num_heads = sum(key.startswith("held_out/top1_") for key in points[-1])
    for head in range(1, num_heads + 1):
        rates = [point[f"held_out/top1_{head}"] for point in points]
        color = SHADES[min(head - 1, len(SHADES) - 1)]
        ax.plot(seen, rates, "o-", markersize=3, color=color)
        ax.annotate(f"head {head}  {rates[-1]:.0%}", (seen[-1], rates[-1]), (6, 0), **_after(color))
    ax.set_title("A head's first guess is right (held out)")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylim(0, max(0.05, ax.dataLim.y1) * 1.15)
    _token_axis(ax, seen)


def _plot_tokens_per_step(ax: Any, points: Sequence[Mapping[str, Any]]) -> None:
    seen = [point["num_tokens"] for point in points]
    values = [point["held_out/tokens_per_step"] for point in points]
    ax.plot(seen, values, "o-", markersize=3, color=BLUE)
    ax.annotate(f"{values[-1]:.2f}", (seen[-1], values[-1]), (6, 0), **_after(INK))
    ax.set_title(f"Tokens per step, tree of {NUM_NODES} nodes (replayed)")
    ax.set_ylim(1, 1 + (max(*values, 1.05) - 1) * 1.15)
    _token_axis(ax, seen)


def _token_axis(ax: Any, seen: Sequence[int]) -> None:
    """Logarithmic: a curve that rises as a line gains as much by every doubling of the data."""
    lowest = seen[0] / 1.1
    highest = seen[-1] * (seen[-1] / lowest) ** 0.4  # two sevenths of the width are for the labels
    marks = [digit * 10**power for power in range(13) for digit in (1, 2, 5)]
    marks = [mark for mark in marks if lowest <= mark <= seen[-1]]
    marks = marks if len(marks) > 1 else [seen[0], seen[-1]]
    ax.set_xscale("log")
    ax.set_xticks(marks, [_short(mark) for mark in marks])
    ax.minorticks_off()
    ax.set_xlim(lowest, highest)
    ax.set_xlabel("training tokens seen, epochs added up")


def _short(number: int) -> str:
    """500k, 2M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)


def _after(color: str) -> dict[str, Any]:
    return beside(color, ha="left", va="center")
