"""How far a job is and how long it still takes: a bar on a terminal, a line now and then elsewhere.

Programs talk to the reader on standard error; standard output is for results.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Any, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

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
        self.label, self.console, self.is_shown = label, console or log_console(), is_shown
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._bar = Progress(
            *columns,
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
            self._last_line, self._has_ended = now, fraction == 1
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
