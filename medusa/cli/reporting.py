"""What every program does around its work: tables, the closing report, errors as one sentence.

Standard output carries answers, tables and the report; all talk to the reader goes to standard error.
This module imports no torch, so that a program can answer --help and Ctrl-C at once.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from medusa.cli.options import ReportOptions
from medusa.files import write_json
from medusa.progress import log_console

STANDARD_OUTPUT = Path("-")


def table_console(width: int = 118) -> Console:
    """Where programs print tables: standard output, ``width`` columns wide where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def log_picture(options: Any) -> None:
    """Say where the picture of ``options.plot`` is."""
    log_console().print(f"picture: {options.plot}", soft_wrap=True)


def print_list(log: Console, title: str, lines: Sequence[str]) -> None:
    """Print ``lines`` under ``title``; nothing where there are none."""
    for line in [title, *(f"  {line}" for line in lines)] if lines else []:
        log.print(line, soft_wrap=True, markup=False)


def command(name: str, *words: object) -> str:
    """``medusa NAME WORD ...`` as a shell reads it."""
    return shlex.join(["medusa", name, *map(str, words)])


def print_next(commands: Sequence[str]) -> None:
    """End with ``commands``: what to do next, to be pasted as it stands."""
    own = _own_name()
    print_list(log_console(), "next:", [re.sub("^medusa ", f"{own} ", line) for line in commands])


def _own_name() -> str:
    """What a shell calls this installation's ``medusa``: its path, where the name finds none or another."""
    script, found = Path(sys.executable).with_name("medusa"), shutil.which("medusa")
    if not script.is_file() or (found is not None and script.samefile(found)):
        return "medusa"
    return shlex.quote(os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script))


def report_json(report: Mapping[str, Any], options: ReportOptions) -> None:
    """Write ``report`` where --json says, and as last line of standard output where that is no terminal."""
    if options.json not in (None, STANDARD_OUTPUT):
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, report)
    if options.json == STANDARD_OUTPUT or not sys.stdout.isatty():
        sys.stdout.write(json.dumps(report, allow_nan=False) + "\n")
        sys.stdout.flush()


def checked_utf8(text: str, where: str) -> str:
    """``text``, which came from outside the program.

    Raises:
        ValueError: it came from bytes that are no UTF-8; the message names ``where`` it came from.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(_no_utf8(where)) from error
    return text


def utf8_lines() -> Iterator[str]:
    """The lines of standard input.

    Raises:
        ValueError: they are not UTF-8.
    """
    try:
        for line in sys.stdin:
            yield checked_utf8(line, "standard input")
    except UnicodeDecodeError as error:
        raise ValueError(_no_utf8("standard input")) from error


def _no_utf8(where: str) -> str:
    return f"{where} must be UTF-8 text, and is not; convert it first, for example with iconv"


def exit_status(program: Callable[[], object], show_traceback: bool) -> int:
    """Run a program: 0, or 1 with the error as one sentence on standard error, or 130 when it was stopped.

    Raises:
        BrokenPipeError: nobody reads standard output any more, which is no error: see :mod:`medusa.cli.main`.
    """
    try:
        program()
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, FloatingPointError, MemoryError) as error:
        if show_traceback:
            traceback.print_exc()
        text = str(error)
        if isinstance(error, ModuleNotFoundError) and text == f"No module named {error.name!r}":
            text = f"this needs the package {error.name}, which is not installed: pip install {error.name}"
        log_console().print(f"error: {text}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console = log_console()
        console.print("\nstopped" if console.is_terminal else "stopped", style="bold red")
        return 130
    return 0
