"""The picture of a benchmark: who is how fast at each setting, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa.decoding.statistics import PHASES
from medusa.measurement.contenders import HEADS, PLAIN
from medusa.plots import BLUE, FAINT, GREEN, INK, ORANGE, SHADES, beside, figure_of

PHASE_COLORS = {"draft": ORANGE, "verify": SHADES[2], "accept": GREEN, "commit": INK}
COLORS = {PLAIN: "#93a1ad", HEADS: BLUE}
OTHERS = (GREEN, ORANGE, "#8a63b8", "#b8637f", "#5e97cf", "#7a8b2f")


def plot_benchmark(report: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw the speed-up over plain decoding of every contender, and the parts of a step of our own.

    ``report`` is the JSON object of ``inference/benchmark.py``.
    """
    settings = report["by_setting"]
    num_bars = sum(len(setting["step_milliseconds"]) for setting in settings)
    height = max(4.2, 0.34 * num_bars + 1.6)
    num_groups = len(settings) * len(settings[0]["speedup_over_plain"])
    with figure_of(path, title, [max(1.15, 0.09 * num_groups), 1.0], height=height) as (left, right):
        _plot_speed_ups(left, settings)
        _plot_splits(right, settings)


def _plot_speed_ups(ax: Any, settings: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for setting in settings for name in setting["speedup_over_plain"]))
    colors = dict(zip([n for n in names if n not in COLORS], OTHERS, strict=False)) | COLORS
    width = 0.8 / len(names)
    highest = 1.0
    for i, name in enumerate(names):
        for place, setting in enumerate(settings):
            value = setting["speedup_over_plain"].get(name)
            if value is None:
                continue
            x = place + (i - (len(names) - 1) / 2) * width
            label = name if all(name not in s["speedup_over_plain"] for s in settings[:place]) else None
            ax.bar([x], [value], width * 0.92, color=colors.get(name, FAINT), label=label)
            ax.annotate(f"{value:.2f}", (x, value), (0, 2), **beside(INK, ha="center", fontsize=7.5))
            highest = max(highest, value)
    ax.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    ax.set_xticks(range(len(settings)), [_label(setting).replace(", ", "\n") for setting in settings])
    ax.set_ylim(0, highest * 1.3)
    ax.set_title("Tokens per second, relative to plain decoding")
    ax.legend(ncols=min(3, len(names)), loc="upper left", columnspacing=1.0, handlelength=1.0)


def _plot_splits(ax: Any, settings: Sequence[Mapping[str, Any]]) -> None:
    bars = [
        (name if len(settings) == 1 else f"{name}, {_label(setting)}", split)
        for setting in settings
        for name, split in setting["step_milliseconds"].items()
        if split["verify"] is not None
    ]
    starts = [0.0] * len(bars)
    for phase in PHASES:
        widths = [split[phase] for _, split in bars]
        ax.barh(range(len(bars)), widths, left=starts, height=0.6, color=PHASE_COLORS[phase], label=phase)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, total in enumerate(starts):
        ax.annotate(f"{total:.1f}", (total, place), (4, 0), **beside(INK, ha="left", va="center"))
    ax.set_yticks(range(len(bars)), [name for name, _ in bars])
    ax.set_ylim(len(bars) + 0.2, -0.6)  # the last row is the legend's
    ax.set_xlim(0, max(starts, default=1.0) * 1.15)
    ax.grid(False)
    ax.set_xlabel("milliseconds")
    ax.set_title("Where a step's time goes")
    ax.legend(ncols=len(PHASES), loc="lower right", columnspacing=1.0, handlelength=1.0)


def _label(setting: Mapping[str, Any]) -> str:
    rows = "1 row" if setting["batch_size"] == 1 else f"{setting['batch_size']} rows"
    return rows if setting["context_length"] is None else f"{rows}, {setting['context_length']} tokens"
