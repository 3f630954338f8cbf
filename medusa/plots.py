"""Pictures of measurements: how often heads are right, and what a tree's size buys.

Needs matplotlib, which the ``train`` extra brings; it is imported when a picture is drawn.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK, FAINT = "#22303c", "#c9d1d9"
BLUE, ORANGE, GREEN = "#2f6fb0", "#d9822b", "#3f8f5b"
SHADES = ("#0b3c6f", "#2f6fb0", "#5e97cf", "#93bce3", "#c3daf1")
"""Dark to light, for k growing."""


def check_matplotlib() -> None:
    """Raise ImportError, with what to install, when no picture can be drawn; call it before long work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("drawing needs matplotlib; install it, or medusa-heads[train], which brings it")


def plot_evaluation(report: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw an evaluation: acceptance by depth, accuracy by head and k, and tokens per step by category.

    ``report`` is the JSON object of ``inference/evaluate_heads.py``.
    """
    categories = report["by_category"]
    has_categories = len(categories) > 1
    widths = [1.0, 1.25, 1.0] if has_categories else [1.0, 1.25]
    with figure_of(path, title, widths) as axes:
        _plot_acceptance(axes[0], report)
        _plot_accuracy(axes[1], report["head_accuracy"])
        if has_categories:
            _plot_categories(axes[2], report["tokens_per_step"], categories)


def plot_tree_sizes(table: Sequence[Mapping[str, Any]], chosen: int, path: Path, title: str) -> None:
    """Draw what each tree size N gives: tokens per step against step time, and the speed that follows.

    ``table`` is the ``by_num_nodes`` list of ``inference/tune_tree.py``.
    """
    sizes = [row["num_nodes"] for row in table]
    plain = table[0]
    with figure_of(path, title, [1.0, 1.0]) as (left, right):
        gain = [row["tokens_per_step"] for row in table]
        cost = [row["step_seconds"] / plain["step_seconds"] for row in table]
        left.plot(sizes, gain, "o-", color=BLUE)
        left.plot(sizes, cost, "o-", color=ORANGE)
        left.annotate("tokens per step", (sizes[-1], gain[-1]), (-4, 7), **beside(BLUE))
        left.annotate("step time", (sizes[-1], cost[-1]), (-4, 7), **beside(ORANGE))
        left.set_title("What a larger tree gives and costs")
        left.set_ylabel("relative to plain decoding")
        speed = [row["tokens_per_second"] for row in table]
        best = sizes.index(chosen)
        right.plot(sizes, speed, "o-", color=BLUE)
        right.plot([chosen], [speed[best]], "o", color=GREEN, markersize=11, zorder=3)
        note = f"chosen: {chosen} nodes, {speed[best] / speed[0]:.2f}x plain"
        side = "right" if best > len(sizes) / 2 else "left"
        right.annotate(note, (chosen, speed[best]), (0, 12), textcoords="offset points", color=GREEN, ha=side)
        right.axhline(speed[0], color=FAINT, linewidth=1, zorder=0)
        right.set_title("Expected speed")
        right.set_ylabel("tokens per second")
        right.set_ylim(0, max(speed) * 1.2)
        left.set_ylim(0, max(*gain, *cost) * 1.12)
        for ax in (left, right):
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [str(size) for size in sizes])
            ax.set_xlabel("nodes in the tree (1 is plain decoding)")


def _plot_acceptance(ax: Any, report: Mapping[str, Any]) -> None:
    depths = range(1, len(report["acceptance_rate"]) + 1)
    in_any_step, once_reached = report["acceptance_rate"], report["conditional_acceptance_rate"]
    ax.plot(depths, once_reached, "o-", color=ORANGE, label="once its parent is accepted")
    ax.plot(depths, in_any_step, "o-", color=BLUE, label="in any step")
    for depth, rate, conditional in zip(depths, in_any_step, once_reached, strict=True):
        ax.annotate(f"{conditional:.0%}", (depth, conditional), (0, 8), **beside(ORANGE, ha="center"))
        if depth > 1:  # at depth 1 the two are one
            ax.annotate(f"{rate:.0%}", (depth, rate), (6, 5), **beside(BLUE, ha="left"))
    ax.set_title(f"Accepted by depth: {report['tokens_per_step']:.2f} tokens per step")
    ax.set_xlabel("depth of the guess")
    ax.legend(loc="upper center", ncols=2)
    _percent_axis(ax, depths, max([*in_any_step, *once_reached], default=1.0))


def _plot_accuracy(ax: Any, accuracy: Mapping[str, Sequence[float | None]]) -> None:
    num_heads = len(next(iter(accuracy.values())))
    width = 0.8 / len(accuracy)
    for i, (name, rates) in enumerate(accuracy.items()):
        places = [head + (i - (len(accuracy) - 1) / 2) * width for head in range(1, num_heads + 1)]
        heights = [rate or 0.0 for rate in rates]
        color = SHADES[min(i, len(SHADES) - 1)]
        ax.bar(places, heights, width * 0.92, color=color, label=name.replace("top", "top "))
        for place, height in zip(places, heights, strict=True):
            text = f"{100 * height:.0f}"
            ax.annotate(text, (place, height), (0, 2), **beside(INK, ha="center", fontsize=7.5))
    ax.set_title("The true token is among a head's k best")
    ax.set_xlabel("head")
    ax.legend(ncols=len(accuracy), loc="upper center", columnspacing=0.9, handlelength=0.9)
    _percent_axis(
        ax, range(1, num_heads + 1), max(rate or 0.0 for rates in accuracy.values() for rate in rates)
    )


def _plot_categories(ax: Any, overall: float, categories: Mapping[str, Mapping[str, Any]]) -> None:
    ordered = sorted(categories.items(), key=lambda item: item[1]["tokens_per_step"])
    values = [entry["tokens_per_step"] for _, entry in ordered]
    ax.barh(
        [name for name, _ in ordered], [value - 1 for value in values], left=1, height=0.65, color=SHADES[2]
    )
    for place, value in enumerate(values):
        ax.annotate(f"{value:.2f}", (value, place), (4, 0), **beside(INK, ha="left", va="center"))
    ax.grid(False)
    ax.axvline(overall, color=INK, linewidth=1, linestyle=":")
    ax.set_xlim(1, 1 + (max(values) - 1) * 1.2 + 0.05)
    ax.set_title("Tokens per step by category")
    ax.set_xlabel("1 is plain decoding; dotted: all prompts")


def _percent_axis(ax: Any, places: range, highest: float) -> None:
    ax.set_xticks(list(places))
    ax.set_xlim(0.4, len(places) + 0.6)
    ax.set_ylim(0, max(0.05, highest) * 1.25)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def beside(color: str, **alignment: Any) -> dict[str, Any]:
    """How a number is written beside its mark, for ``annotate``."""
    return {"textcoords": "offset points", "color": color, "fontsize": 8.5, "ha": "right", **alignment}


@contextmanager
def figure_of(
    path: Path, title: str, widths: Sequence[float], height: float = 4.2, grid_axis: str = "y"
) -> Iterator[Any]:
    """Axes side by side in one style, saved to ``path`` at the end."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.grid": True,
        "axes.grid.axis": grid_axis,
        "grid.color": "#e8edf1",
        "axes.axisbelow": True,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.6 * sum(widths), height), layout="constrained")
        axes = figure.subplots(1, len(widths), squeeze=False, gridspec_kw={"width_ratios": list(widths)})[0]
        figure.suptitle(title, x=0.008, ha="left", fontsize=10, color="#5b6b78")
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
