"""The picture of trees by batch size: what more rows make of the best tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa.plots import GREEN, SHADES, figure_of


def plot_batch_sizes(tables: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw step time and speed against the nodes in the tree, a line for each batch size.

    ``tables`` is ``by_batch_size`` of ``inference/tune_tree.py``; both panels are relative to plain decoding
    with as many rows.
    """
    sizes = sorted({row["num_nodes"] for entry in tables.values() for row in entry["by_num_nodes"]})
    with figure_of(path, title, [1.0, 1.0]) as (left, right):
        for i, (batch, entry) in enumerate(tables.items()):
            rows, color = entry["by_num_nodes"], SHADES[min(i, len(SHADES) - 1)]
            nodes = [row["num_nodes"] for row in rows]
            cost = [row["step_seconds"] / rows[0]["step_seconds"] for row in rows]
            speed = [row["tokens_per_second"] / rows[0]["tokens_per_second"] for row in rows]
            label = f"{batch} row" + ("" if batch == "1" else "s")
            left.plot(nodes, cost, "o-", color=color, label=label)
            right.plot(nodes, speed, "o-", color=color, label=label)
            best = nodes.index(entry["chosen"])
            right.plot([nodes[best]], [speed[best]], "o", color=GREEN, markersize=10, zorder=3)
        left.set_title("What a larger tree costs")
        left.set_ylabel("step time relative to plain decoding")
        left.set_ylim(0, None)
        right.set_title("Expected speed; green: chosen")
        right.set_ylabel("tokens per second relative to plain decoding")
        right.axhline(1.0, color=GREEN, linewidth=1, linestyle=":", zorder=0)
        right.set_ylim(0, None)
        left.legend(loc="upper left")
        for ax in (left, right):
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [str(size) for size in sizes])
            ax.set_xlabel("nodes in the tree (1 is plain decoding)")
