"""A comparison of heads as a picture. Needs matplotlib, as ``medusa.plots`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa.plots import INK, SHADES, beside, figure_of


def plot_heads(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw sets of heads, one row each: tokens per step by tree size, then how often each head is right.

    ``rows`` are the ``heads`` of ``inference/compare_heads.py``.
    """
    height = 1.6 + 0.36 * max(4, len(rows))
    with figure_of(path, title, [1.6, 1.0], height, grid_axis="x") as (left, right):
        _plot_tokens_per_step(left, rows)
        _plot_top1(right, rows)
        for ax in (left, right):
            ax.set_ylim(len(rows) - 0.5, -0.5)
            ax.set_yticks(range(len(rows)), [""] * len(rows))
            ax.tick_params(left=False)
        left.set_yticklabels([row["label"] for row in rows])


def _plot_tokens_per_step(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    sizes = list(rows[0]["tokens_per_step"])
    places = range(len(rows))
    highest = 1.0
    for shade, size in enumerate(reversed(sizes)):
        found = [row["tokens_per_step"][size] for row in rows]
        values = [each["value"] for each in found]
        color = SHADES[min(shade + 1, len(SHADES) - 1)]
        ax.plot(values, places, "o", color=color, label=f"{size} nodes")
        for place, each in zip(places, found, strict=True):
            if each["low"] is not None:
                ax.plot([each["low"], each["high"]], [place, place], color=color, linewidth=1.2)
                highest = max(highest, each["high"])
        highest = max(highest, *values)
        if shade == 0:
            for place, each in enumerate(found):
                end = each["high"] or each["value"]
                note = f"{each['value']:.2f}"
                ax.annotate(note, (end, place), (5, 0), **beside(INK, ha="left", va="center"))
    ax.set_xlim(1, 1 + (highest - 1) * 1.15 + 0.02)
    ax.set_title("Tokens per step")
    ax.set_xlabel("1 is plain decoding; trees chosen on other answers; lines: 95 % intervals")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(sizes), borderaxespad=0.2)


def _plot_top1(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    deepest = max(len(row["top1"]) for row in rows)
    rates = [[float("nan") if rate is None else rate for rate in row["top1"]] for row in rows]
    rates = [[*row, *[float("nan")] * deepest][:deepest] for row in rates]
    ax.imshow(rates, aspect="auto", cmap=_shades(), vmin=0)
    highest = max((rate for row in rates for rate in row if rate == rate), default=1.0)
    for place, row in enumerate(rates):
        for depth, rate in enumerate(row):
            if rate == rate:
                color = "white" if rate > 0.55 * highest else INK
                ax.text(depth, place, f"{100 * rate:.1f}", color=color, ha="center", va="center", fontsize=8)
    ax.set_xticks(range(deepest), [str(depth) for depth in range(1, deepest + 1)])
    ax.grid(False)
    ax.set_title("First guess right, % by head")
    ax.set_xlabel("head")


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ["#f4f8fc", *reversed(SHADES)])
