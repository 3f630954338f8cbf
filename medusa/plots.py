"""Shared parts of all pictures: colours, the figure, numbers beside their marks.

Each picture is drawn where its numbers are made. Needs matplotlib, which the ``train`` extra brings; it is
imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK, FAINT = "#22303c", "#c9d1d9"
BLUE, ORANGE, GREEN = "#2f6fb0", "#d9822b", "#3f8f5b"
SHADES = ("#0b3c6f", "#2f6fb0", "#5e97cf", "#93bce3", "#c3daf1")
"""Dark to light, for a number that grows."""


def short_name(source: str) -> str:
    """A model or heads as a title calls them: by its last part, and ``RUN/heads`` by its run's."""
    path = Path(source)
    return (path.parent.name if path.name == "heads" else path.name) or source


def shade(index: int) -> str:
    """The colour of the ``index``-th of a growing series."""
    return SHADES[min(index, len(SHADES) - 1)]


def beside(color: str, **alignment: Any) -> dict[str, Any]:
    """How a number is written beside its mark, for ``annotate``."""
    return {"textcoords": "offset points", "color": color, "fontsize": 8.5, "ha": "right", **alignment}


def percent_axis(ax: Any, places: range, highest: float) -> None:
    """Numbers 1, 2, ... below, percent beside, and room for a legend above ``highest``."""
    ax.set_xticks(list(places))
    ax.set_xlim(0.4, len(places) + 0.6)
    ax.set_ylim(0, max(0.05, highest) * 1.25)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def heat_map(
    ax: Any, rows: Sequence[Sequence[float | None]], title: str, form: str, top: float | None = None
) -> None:
    """Draw shares as shaded cells with their percent in ``form``, a row of cells for each of ``rows``.

    The darkest shade is ``top``, by default the largest share.
    """
    from matplotlib.colors import LinearSegmentedColormap

    deepest = max(map(len, rows))
    rates = [[float("nan") if rate is None else rate for rate in row] for row in rows]
    rates = [[*row, *[float("nan")] * deepest][:deepest] for row in rates]
    shades = LinearSegmentedColormap.from_list("shades", ["#f4f8fc", *reversed(SHADES)])
    image = ax.imshow(rates, aspect="auto", cmap=shades, vmin=0, vmax=top)
    for place, row in enumerate(rates):
        for depth, rate in enumerate(row):
            if rate == rate:
                color = "white" if image.norm(rate) > 0.55 else INK
                text = format(100 * rate, form)
                ax.text(depth, place, text, color=color, ha="center", va="center", fontsize=8)
    for place in range(1, len(rows)):
        ax.axhline(place - 0.5, color="white", linewidth=2)
    ax.set_xticks(range(deepest), [str(depth) for depth in range(1, deepest + 1)])
    ax.grid(False)
    ax.set_title(title)


def name_rows(axes: Sequence[Any], names: Sequence[str]) -> None:
    """Give panels side by side the same rows, named at the left one."""
    for ax in axes:
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_yticks(range(len(names)), [""] * len(names))
        ax.tick_params(left=False)
    axes[0].set_yticklabels(names)


def size_axis(ax: Any, sizes: Sequence[int]) -> None:
    """Nodes of trees below, each size a step to the right of the one before."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    ax.set_xlabel("nodes in the tree (1 is plain decoding)")


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
