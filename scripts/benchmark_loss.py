"""What the fused loss of all heads costs, beside the plain one that stacks their logits: memory and speed.

    python scripts/benchmark_loss.py
    python scripts/benchmark_loss.py --heads 1 4 8 --vocab 32768 131072 262144 --plot loss.png
    python scripts/benchmark_loss.py --device cuda --targets 8192 --hidden-size 4096

Forward and backward of cross-entropy over every head, shared unembedding, one residual block a head. Each
measurement runs in a process of its own, so its peak is that of the loss alone: what is allocated beyond the
hidden states, the weights and the gradients of the heads, which any training holds. Repeats are interleaved,
medians reported. A plain loss that would not fit is not run: its memory is predicted, and said to be.
Run it with nothing else running; on a CPU the peak is that of resident memory, and needs Linux. The C library
is told to give large blocks back when they are freed, so that the peak is what the loss holds, not what was
kept for later.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from medusa.cli.flags import positive_int
from medusa.cli.program import exit_status, log_console
from medusa.heads.checkpoint import write_json
from medusa.plots import BLUE, ORANGE, check_matplotlib, figure_of
from medusa.training.losses.loss import LossOptions
from medusa.training.losses.loss_cost import Cell, free_bytes, measured
from medusa.training.run.progress import ProgressLine

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""For glibc: blocks from 1 MiB are mapped one by one. Left alone it starts to keep those up to 32 MiB."""
FLATNESS = 0.10
"""How much the fused loss's peak may differ between cells."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parsed(arguments)
    if options.cell is not None:
        return exit_status(lambda: print(json.dumps(measured(Cell(**json.loads(options.cell))))), True)
    return exit_status(lambda: benchmark(options), show_traceback=False)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--heads", type=positive_int, nargs="+", default=[1, 4, 8], metavar="K", help="numbers of heads")
    add("--vocab", type=positive_int, nargs="+", default=[2**15, 2**17, 2**18], metavar="V", help="sizes")
    add("--targets", type=positive_int, default=512, metavar="S", help="tokens predicted (%(default)s)")
    add("--hidden-size", type=positive_int, default=256, metavar="D", help="of the base (%(default)s)")
    add("--block-elements", type=positive_int, default=LossOptions.block_elements, metavar="N")
    add("--repeats", type=positive_int, default=3, metavar="N", help="of every cell (%(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--memory-gib",
        type=float,
        metavar="G",
        help="largest plain loss to run (half of what is free)",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the table")
    add("--json", type=Path, metavar="FILE", help="write the closing JSON line to FILE too")
    add("--cell", help=argparse.SUPPRESS)  # what the program passes to the processes that it starts
    return parser.parse_args(arguments)


def benchmark(options: argparse.Namespace) -> None:
    """Measure every cell, print the table and the verdict, and end with one line of JSON."""
    if options.plot is not None:
        check_matplotlib()
    console = log_console()
    limit = (options.memory_gib or free_bytes(options.device) / 2**31) * 2**30
    cells = [
        Cell(name, heads, vocab, options.targets, options.hidden_size, options.block_elements, options.device)
        for heads, vocab, name in product(options.heads, options.vocab, ("fused", "plain"))
    ]
    skipped = {cell for cell in cells if cell.implementation == "plain" and cell.predicted_bytes > limit}
    for cell in sorted(skipped, key=lambda cell: cell.work):
        console.print(
            f"skipped: plain with {cell.heads} heads and {cell.vocab:,} tokens needs about "
            f"{cell.predicted_bytes / 2**30:.1f} GiB, more than {limit / 2**30:.1f} GiB",
            soft_wrap=True,
        )
    found = run_all([cell for cell in cells if cell not in skipped], options.repeats, console)
    rows = [
        row_of(cells, skipped, found, heads, vocab) for heads, vocab in product(options.heads, options.vocab)
    ]
    report = {
        "device": options.device,
        "threads": torch.get_num_threads(),
        "targets": options.targets,
        "hidden_size": options.hidden_size,
        "block_elements": options.block_elements,
        "repeats": options.repeats,
        "torch": torch.__version__,
        "cells": rows,
        **verdict(rows),
    }
    Console().print(table_of(rows))
    for line in verdict_lines(report):
        Console().print(line, soft_wrap=True)
    if options.plot is not None:
        title = f"{options.targets} targets, hidden size {options.hidden_size}, {options.device}"
        plot(rows, options.plot, title)
    if options.json is not None:
        write_json(options.json, report)
    print(json.dumps(report), flush=True)


def run_all(cells: list[Cell], repeats: int, console: Console) -> dict[Cell, list[dict[str, float]]]:
    """Every cell's measurements; neighbours in time are the two implementations of one size, in turns."""
    found: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in cells}
    done, everything, began = 0, repeats * sum(cell.work for cell in cells), time.monotonic()
    with ProgressLine("measuring", console) as line:
        for repeat in range(repeats):
            for cell in cells if repeat % 2 == 0 else reversed(cells):
                found[cell].append(in_own_process(cell))
                done += cell.work
                note = f"{cell.implementation}, {cell.heads} heads, {cell.vocab:,} tokens"
                line.show(done / everything, time.monotonic() - began, note)
    return found


def in_own_process(cell: Cell) -> dict[str, float]:
    """Measure ``cell`` in a fresh interpreter."""
    command = [sys.executable, str(Path(__file__).resolve()), "--cell", json.dumps(asdict(cell))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **GIVES_BACK})
    if done.returncode != 0:
        raise ValueError(
            f"measuring {cell} failed with status {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def row_of(
    cells: list[Cell], skipped: set[Cell], found: dict[Cell, list[dict[str, float]]], heads: int, vocab: int
) -> dict[str, Any]:
    """The medians of both implementations at one size; None where the plain one was skipped."""
    row: dict[str, Any] = {"heads": heads, "vocab": vocab}
    for cell in (cell for cell in cells if (cell.heads, cell.vocab) == (heads, vocab)):
        name, runs = cell.implementation, found.get(cell)
        row[f"{name}_bytes"] = int(median(run["bytes"] for run in runs)) if runs else cell.predicted_bytes
        row[f"{name}_tokens_per_second"] = (
            cell.targets / median(run["seconds"] for run in runs) if runs else None
        )
        row["plain_is_predicted"] = cell in skipped
    plain = row["plain_tokens_per_second"]
    row["speed_ratio"] = None if plain is None else row["fused_tokens_per_second"] / plain
    return row


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Is the fused loss's peak flat, and is it nowhere slower?"""
    peaks = [row["fused_bytes"] for row in rows]
    ratios = [row["speed_ratio"] for row in rows if row["speed_ratio"] is not None]
    spread = max(peaks) / max(1, min(peaks)) - 1
    return {
        "peak_spread": spread,
        "is_flat": spread <= FLATNESS,
        "lowest_speed_ratio": min(ratios, default=None),
        "is_never_slower": all(ratio >= 1 for ratio in ratios),
    }


def verdict_lines(report: dict[str, Any]) -> list[str]:
    said, spread = {True: "holds", False: "FAILS"}, report["peak_spread"]
    slowest = report["lowest_speed_ratio"]
    slowest = "no plain loss was run" if slowest is None else f"lowest ratio {slowest:.2f}"
    return [
        f"peak memory flat within {FLATNESS:.0%}: {said[report['is_flat']]}, spread {spread:.1%}",
        f"never slower than plain: {said[report['is_never_slower']]}, {slowest}",
    ]


def table_of(rows: list[dict[str, Any]]) -> Table:
    shown = Table("heads", "tokens V", "fused MiB", "plain MiB", "fused tokens/s", "plain tokens/s", "ratio")
    for row in rows:
        plain = row["plain_tokens_per_second"]
        shown.add_row(
            str(row["heads"]),
            f"{row['vocab']:,}",
            f"{row['fused_bytes'] / 2**20:,.0f}",
            f"{row['plain_bytes'] / 2**20:,.0f}" + (" predicted" if row["plain_is_predicted"] else ""),
            f"{row['fused_tokens_per_second']:.1f}",
            "" if plain is None else f"{plain:.1f}",
            "" if plain is None else f"{row['speed_ratio']:.2f}x",
        )
    return shown


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Peak memory and speed over K * V."""
    ordered = sorted(rows, key=lambda row: row["heads"] * row["vocab"])
    with figure_of(path, title, [1.0, 1.0]) as (left, right):
        for name, color in (("plain", ORANGE), ("fused", BLUE)):
            sizes = [row["heads"] * row["vocab"] for row in ordered]
            left.plot(sizes, [row[f"{name}_bytes"] / 2**30 for row in ordered], "o-", color=color, label=name)
            timed = [row for row in ordered if row[f"{name}_tokens_per_second"] is not None]
            speeds = [row[f"{name}_tokens_per_second"] for row in timed]
            right.plot([row["heads"] * row["vocab"] for row in timed], speeds, "o-", color=color, label=name)
        left.set_title("Peak memory of the loss, GiB")
        right.set_title("Targets per second")
        for ax in (left, right):
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.set_xlabel("heads x vocabulary")
            ax.legend()


if __name__ == "__main__":
    sys.exit(main())
