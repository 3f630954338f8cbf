"""The report of a command: one JSON object, tables for people, and a picture.

Standard output carries answers, tables and the object; all talk to the reader goes to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from medusa.console import Column, log_console, output_console, print_table
from medusa.files import write_json

STANDARD_OUTPUT = Path("-")
TABLE_WIDTH = 118
"""Columns of tables where standard output is no terminal."""


class Report:
    """The results and their presentation: tables and lines in the order in which they were added."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = dict(values)
        """Plain values, for JSON."""
        self._parts: list[Callable[[Console], None]] = []
        self._pictures: dict[Path, Callable[[Path], None]] = {}

    def add_table(
        self, title: str, columns: Mapping[str, Column], rows: Sequence[Any], **layout: Any
    ) -> None:
        """``columns`` and ``layout`` are arguments of :func:`medusa.console.print_table`."""
        self._parts.append(partial(print_table, title=title, columns=columns, rows=rows, **layout))

    def add_line(self, text: str, style: str | None = None, soft_wrap: bool = False) -> None:
        """``text``, with ``soft_wrap`` in lines as long as they are, else as wide as the console."""
        self._parts.append(
            lambda console: console.print(text, style=style, markup=False, soft_wrap=soft_wrap)
        )

    def add_picture(self, path: Path, draw: Callable[[Path], None]) -> None:
        """``draw`` writes the picture to ``path``."""
        self._pictures[path] = draw

    def show(self, console: Console) -> None:
        """Print the tables and lines."""
        for part in self._parts:
            part(console)

    def publish(self, json_path: Path | None) -> None:
        """Print and draw, and end with the JSON object: :func:`end_with_json`."""
        terminal = output_console()
        self.show(terminal if terminal.is_terminal else output_console(TABLE_WIDTH))
        for path, draw in self._pictures.items():
            draw(path)
            log_console().print(f"picture: {path}", soft_wrap=True)
        end_with_json(self.values, json_path)


def end_with_json(values: Mapping[str, Any], path: Path | None) -> None:
    """Write ``values`` to ``path``, or as last line of standard output where ``path`` is ``-``, or None and
    standard output no terminal."""
    if path not in (None, STANDARD_OUTPUT):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, values)
    if path == STANDARD_OUTPUT or (path is None and not sys.stdout.isatty()):
        sys.stdout.write(json.dumps(values, allow_nan=False) + "\n")
        sys.stdout.flush()
