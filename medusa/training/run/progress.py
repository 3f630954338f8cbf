"""How far a run is and how long it will still take: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

SECONDS_BETWEEN_LINES = 10.0


class ProgressLine:
    """One job's progress; a context manager. ``is_shown`` is false on every process but the main one."""

    def __init__(self, label: str, console: Console, is_shown: bool = True):
        self.label, self.console, self.is_shown = label, console, is_shown
        columns = (
            TextColumn("{task.fields[label]}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = Progress(*columns, console=console, disable=not (is_shown and console.is_terminal))
        self._task = self._bar.add_task("", total=1.0, label=label, note="")
        self._last_line = time.monotonic()

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, fraction: float, seconds: float, note: str = "") -> None:
        """``fraction`` of the job is done after ``seconds``."""
        if not self.is_shown:
            return
        if fraction > 0:
            minutes, rest = divmod(round(seconds / fraction * (1 - fraction)), 60)
            note = f"{note}  {minutes}:{rest:02d} left".strip()
        if self.console.is_terminal:
            self._bar.update(self._task, completed=fraction, note=note)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.console.print(f"{self.label} {fraction:4.0%}  {note}", soft_wrap=True)

    def say(self, text: object) -> None:
        """A line that stays."""
        if self.is_shown:
            self.console.print(text, soft_wrap=True)
