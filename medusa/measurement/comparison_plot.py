"""A comparison of drafters as a picture. Needs matplotlib, as ``medusa.plots`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa.plots import BLUE, FAINT, GREEN, INK, ORANGE, SHADES, beside, figure_of


def plot_drafters(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw a comparison of drafters, one row each: tokens per step, step time, speed, acceptance by depth.

    ``rows`` are the measured entries of ``pairings`` of ``inference/compare_drafters.py``, plain first.
    """
    plain, drafted = rows[0], list(rows[1:])
    height = 1.9 + 0.42 * max(4, len(drafted))
    with figure_of(path, title, [1.0, 1.0, 0.8, 1.0], height, grid_axis="x") as axes:
        _plot_tokens_per_step(axes[0], drafted)
        _plot_step_times(axes[1], drafted, plain)
        _plot_speedups(axes[2], drafted)
        _plot_depths(axes[3], drafted)
        for ax in axes:
            ax.set_ylim(len(drafted) - 0.5, -0.5)
            ax.set_yticks(range(len(drafted)), [""] * len(drafted))
            ax.tick_params(left=False)
        many_rules = len({row["rule"] for row in drafted}) > 1
        names = [f"{row['drafter']}\n{row['rule']}" if many_rules else row["drafter"] for row in drafted]
        axes[0].set_yticklabels(names)


def _plot_tokens_per_step(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    places, values = range(len(rows)), [row["tokens_per_step"] for row in rows]
    ax.barh(places, [value - 1 for value in values], left=1, height=0.62, color=SHADES[2])
    predicted = [(row["predicted_tokens_per_step"], place) for place, row in enumerate(rows)]
    marks = [(value, place) for value, place in predicted if value is not None]
    if marks:
        ax.plot(*zip(*marks, strict=True), "|", color=ORANGE, markersize=15, markeredgewidth=2.2)
        ax.set_xlabel("1 is plain decoding; orange: predicted for a chain")
    else:
        ax.set_xlabel("1 is plain decoding")
    furthest = [max(value, mark or 0) for value, (mark, _) in zip(values, predicted, strict=True)]
    for place, value in enumerate(values):
        ax.annotate(f"{value:.2f}", (furthest[place], place), (6, 0), **beside(INK, ha="left", va="center"))
    ax.set_xlim(1, 1 + (max(furthest, default=1) - 1) * 1.25 + 0.05)
    ax.set_title("Tokens per step")


def _plot_step_times(ax: Any, rows: Sequence[Mapping[str, Any]], plain: Mapping[str, Any]) -> None:
    parts = (
        ("draft", ("draft",), ORANGE),
        ("verify", ("verify",), BLUE),
        ("rest", ("accept", "commit"), FAINT),
    )
    left = [0.0] * len(rows)
    for label, phases, color in parts:
        widths = [sum(row["milliseconds_per_step"][phase] for phase in phases) for row in rows]
        ax.barh(range(len(rows)), widths, left=left, height=0.62, color=color, label=label)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        ax.annotate(f"{total:.0f}", (total, place), (4, 0), **beside(INK, ha="left", va="center"))
    whole = sum(plain["milliseconds_per_step"].values())
    ax.axvline(whole, color=INK, linewidth=1, linestyle=":")
    ax.set_xlim(0, max(whole, *left) * 1.2)
    ax.set_title("Milliseconds of a step")
    ax.set_xlabel(f"dotted: plain decoding, {whole:.0f} ms")
    ax.legend(
        loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, ncols=3, columnspacing=1, handlelength=1
    )


def _plot_speedups(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    values = [row["speedup_vs_plain"] for row in rows]
    colors = [GREEN if value >= 1 else FAINT for value in values]
    ax.barh(range(len(rows)), values, height=0.62, color=colors)
    ax.axvline(1, color=INK, linewidth=1, linestyle=":", zorder=0.5)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        note = f"{value:.2f}x" + (" LOSSY" if row["rule"] == "typical" else "")
        text = ax.annotate(note, (value, place), (4, 0), **beside(INK, ha="left", va="center"))
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    ax.set_xlim(0, max(1.0, *values) * 1.5)
    ax.set_title("Speed against plain")
    ax.set_xlabel("tokens a second; plain is 1")


def _plot_depths(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    deepest = max(len(row["acceptance_rate"]) for row in rows)
    rates = [[*row["acceptance_rate"], *[float("nan")] * deepest][:deepest] for row in rows]
    ax.imshow(rates, aspect="auto", cmap=_shades(), vmin=0, vmax=1)
    for place, row in enumerate(rates):
        for depth, rate in enumerate(row):
            if rate == rate:
                color = "white" if rate > 0.55 else INK
                ax.text(depth, place, f"{100 * rate:.0f}", color=color, ha="center", va="center", fontsize=8)
    for place in range(1, len(rows)):
        ax.axhline(place - 0.5, color="white", linewidth=2)
    ax.set_xticks(range(deepest), [str(depth) for depth in range(1, deepest + 1)])
    ax.grid(False)
    ax.set_title("Accepted by depth, % of steps")
    ax.set_xlabel("depth of the guess")


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ["#f4f8fc", *reversed(SHADES)])
