"""Output of programs: tables that fit the terminal, and the progress of jobs.

Where a table is too wide, what does not fit beside the rest follows below, and nothing is cut off. Progress
is a bar on a terminal, and a line now and then elsewhere. Programs talk to the reader on standard error;
standard output is for results.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, TypeVar, cast

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
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

    The first ``num_labels`` columns label the row; the others are numbers. If the console is too narrow, the
    remaining numbers follow in a second table under the first, with the labels again.

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
    """The columns of each partial table: labels first, then the others that fit."""
    labels = list(range(num_labels))
    taken = sum(widths[label] + GAP for label in labels)
    parts = [[*labels]]
    used = taken
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


def megabytes(size: float) -> str:
    """A number of bytes in words."""
    return f"{size / 1e6:,.1f} MB"


def gigabytes(size: float) -> str:
    """The same of many bytes."""
    return f"{size / 1e9:.1f} GB"


SECONDS_BETWEEN_LINES = 10.0
"""Where there is no terminal."""

Item = TypeVar("Item")


class _StandardError:
    """Loses what cannot be written, as on a full disk: that is no reason to lose the work as well."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class _PipedConsole(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command that nobody reads its output any more: rich would end it with status 1."""
        raise


def output_console(width: int | None = None) -> Console:
    """Standard output, for results; a reader that goes away is a BrokenPipeError."""
    return _PipedConsole(highlight=False, width=width)


def log_console() -> Console:
    """Where programs talk to the reader: standard error."""
    return Console(file=cast(IO[str], _StandardError()), highlight=False)


def print_list(log: Console, title: str, lines: Sequence[str]) -> None:
    """Print ``lines`` under ``title``; nothing where there are none."""
    for line in [title, *(f"  {line}" for line in lines)] if lines else []:
        log.print(line, soft_wrap=True, markup=False)


class ProgressReporter:
    """Reports one job's progress; a context manager."""

    def __init__(self, label: str, console: Console | None = None, is_shown: bool = True):
        """``is_shown`` is false on every process of a launch but the main one."""
        self.label = label
        self.console = console or log_console()
        self.is_shown = is_shown
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not (is_shown and self.console.is_terminal),
        )
        self._task = self._bar.add_task(label, total=1.0, note="")
        self._began = self._last_line = time.monotonic()
        self._has_ended = False

    def __enter__(self) -> ProgressReporter:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, fraction: float, note: str = "", seconds: float | None = None) -> None:
        """Report that ``fraction`` of the job is done after ``seconds``, from the start by default."""
        if not self.is_shown:
            return
        now = time.monotonic()
        if fraction > 0:
            elapsed = now - self._began if seconds is None else seconds
            minutes, rest = divmod(round(elapsed / fraction * (1 - fraction)), 60)
            note = f"{note}, about {minutes}:{rest:02d} left".removeprefix(", ")
        if self.console.is_terminal:
            self._bar.update(self._task, completed=fraction, note=note)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES or (fraction == 1 and not self._has_ended):
            self._last_line = now
            self._has_ended = fraction == 1
            self.console.print(f"{self.label} {fraction:4.0%}: {note}", soft_wrap=True)

    def say(self, text: object) -> None:
        """Print a line that stays."""
        if self.is_shown:
            self.console.print(text, soft_wrap=True)


def track(items: Sequence[Item], label: str) -> Iterator[Item]:
    """The items, with a report after each."""
    with ProgressReporter(label) as progress:
        for done, item in enumerate(items, start=1):
            yield item
            progress.show(done / len(items), f"{done}/{len(items)}")
