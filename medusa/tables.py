"""Tables on a terminal: what does not fit beside the rest follows below, and nothing is cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2
"""Blanks between columns."""
PERCENT, TIMES = "{:.1%}", "{:.2f}x"

Column = tuple[Any, str]
"""Where a row has the value, as a key or index of it or a function of it; and its form for ``str.format``."""


def cell(value: Any, form: str = "{}") -> str:
    """``value`` in ``form``, which takes the parts of a list one by one; a dash where one of them is None."""
    values = value if isinstance(value, list | tuple) else [value]
    return "-" if any(each is None for each in values) else form.format(*values)


def print_table(
    console: Console,
    title: str,
    columns: Mapping[str, Column],
    rows: Sequence[Any],
    *,
    num_labels: int = 1,
    note: str = "",
    styles: Mapping[int, str] | None = None,
) -> None:
    """Print ``title``, the table, and ``note`` under it.

    The first ``num_labels`` columns say what a row is; the others are numbers. Where the console is too
    narrow, the numbers that do not fit follow in a second table under the first, with the labels again.

    Args:
        columns: by their headers.
        styles: of rows, by their index.
    """
    headers = list(columns)
    cells = [
        [cell(value(row) if callable(value) else row[value], form) for value, form in columns.values()]
        for row in rows
    ]
    console.print(Text(title, style="bold"))
    widths = [max(map(cell_len, column)) for column in zip(headers, *cells, strict=True)]
    for part in _parts(widths, num_labels, console.width):
        table = Table(
            box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, GAP - 1, 0, 0)
        )  # the box adds 1
        for column in part:
            table.add_column(
                Text(headers[column]), justify="left" if column < num_labels else "right", no_wrap=True
            )
        for number, row in enumerate(cells):
            table.add_row(*(Text(row[column]) for column in part), style=(styles or {}).get(number))
        console.print(table)
        console.print()
    if note:
        console.print(Text(note, style="dim"))
        console.print()


def _parts(widths: Sequence[int], num_labels: int, width: int) -> list[list[int]]:
    """The columns of each table below the other: labels first, then as many others as fit."""
    labels = list(range(num_labels))
    taken = sum(widths[label] + GAP for label in labels)
    parts, used = [[*labels]], taken
    for column in range(num_labels, len(widths)):
        if len(parts[-1]) > num_labels and used + widths[column] > width:
            parts.append([*labels])
            used = taken
        parts[-1].append(column)
        used += widths[column] + GAP
    return parts


def percent(rate: float | None) -> str:
    """A share, or a dash where there is none."""
    return cell(rate, PERCENT)


def counted(number: int, noun: str) -> str:
    """1 node, 2 nodes."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
