"""A long measurement in parts that lose nothing: resumable, each in a process of its own, within a time.

A part is a list of cases, the most valuable first. After each case all results lie on the disk. A case that
fails does not cost the others theirs. One that hangs, or takes its process with it, is given up, and the
process is started again without it. What was measured before is not measured again. What the time does not
hold is listed as left out.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from medusa.files import replaced_file
from medusa.hardware import wait_for
from medusa.progress import log_console

GRACE_SECONDS = 20
"""A process may be late by so much before it is ended."""
DEVICE_LOST = 70
"""Exit status of a process whose device answers no more: only a new process can go on."""
WIDTH = 118
"""Columns of the tables in files."""

Results = dict[str, Any]
"""Plain JSON values."""


class Skipped(Exception):
    """A case cannot run here, and this is no fault; the message says why."""


@dataclass(frozen=True)
class Case:
    """One thing to measure."""

    name: str
    measure: Callable[[], Results]
    """Its results.

    Raises:
        Skipped: it cannot run here.
    """
    minutes: float = 0.0
    """What it takes, about: it is not begun when less is left."""


@dataclass(frozen=True)
class Part:
    """A list of cases, and the tables that their results make."""

    number: int
    name: str
    minutes: float
    """It is ended after so many, however many are left in all."""
    cases: Callable[[Any], Iterator[Case]]
    """The cases, given what all of them share."""
    tables: Callable[[Mapping[str, Results], Console], None]
    is_open_ended: bool = False
    """There is always more to do: the next run begins with all cases again."""

    @property
    def file(self) -> str:
        """What its files are called, without their ending."""
        return f"{self.number}-{self.name}"


@dataclass
class Record:
    """What is known of a part: its JSON file, and beside it the tables as text and a log."""

    part: Part
    folder: Path
    about: Results = field(default_factory=dict)
    """Where, when and with what it was measured."""
    cases: dict[str, Results] = field(default_factory=dict)
    """The results of those that are measured."""
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """What cannot run here, what went wrong, and what the time did not hold; each with its reason."""
    running: str | None = None
    """The case under way; of a process that is no more, the one that it ended in."""
    complete: bool = False
    """All cases are measured or skipped."""

    @classmethod
    def of(cls, part: Part, folder: Path) -> Record:
        """What is in the file, or an empty one."""
        record = cls(part, folder)
        if record.json.exists():
            vars(record).update(json.loads(record.json.read_text(encoding="utf-8")))
        return record

    @property
    def json(self) -> Path:
        return self.folder / f"{self.part.file}.json"

    @property
    def log(self) -> Path:
        """What the processes of the part say."""
        return self.folder / f"{self.part.file}.log"

    def write(self) -> None:
        """The JSON file and the tables, each whole or not at all."""
        values = {key: value for key, value in vars(self).items() if key not in ("part", "folder")}
        text = io.StringIO()
        self.show(Console(file=text, width=WIDTH, highlight=False))
        for path, content in (
            (self.json, json.dumps(values, indent=1) + "\n"),
            (self.json.with_suffix(".txt"), text.getvalue()),
        ):
            with replaced_file(path) as partial:
                partial.write_text(content, encoding="utf-8")

    def show(self, console: Console) -> None:
        """The tables, and what is missing from them."""
        if self.about:
            words = ", ".join(f"{key} {value}" for key, value in self.about.items())
            console.print(words, markup=False, soft_wrap=True)
            console.print()
        self.part.tables(self.cases, console)
        for label, reasons in (
            ("cannot run here", self.skipped),
            ("failed", self.failed),
            ("left out", self.left_out),
        ):
            style = "red" if reasons is self.failed else "yellow"
            for name, reason in reasons.items():
                console.print(f"{label}: {name}: {reason}", style=style, markup=False, soft_wrap=True)

    def begin(self, again: bool) -> None:
        """Have what failed or was left out tried once more; ``again`` has everything measured anew."""
        if again or (self.complete and self.part.is_open_ended):
            self.cases, self.skipped = {}, {}
        self.failed, self.left_out, self.running, self.complete = {}, {}, None, False
        self.write()

    def summary(self) -> Results:
        """All but the results."""
        kept = ("complete", "skipped", "failed", "left_out")
        return {**{name: getattr(self, name) for name in kept}, "measured": list(self.cases)}


# ------------------------------------------------------------------ inside a process


def run_cases(record: Record, cases: Iterable[Case], device: torch.device, ends: float) -> int:
    """Measure what is missing until ``ends`` on the monotonic clock, and write after every case.

    The exit status: 0, 1 where one has failed, or :data:`DEVICE_LOST`.
    """
    for case in cases:
        if case.name in (*record.cases, *record.skipped, *record.failed):
            continue
        left = (ends - time.monotonic()) / 60
        if left < case.minutes:
            reason = f"takes about {case.minutes:g} minutes, and {left:.1f} were left"
            record.left_out[case.name] = reason
            record.write()
            continue
        record.running = case.name
        record.write()
        log_console().print(f"{record.part.file}: {case.name}", style="bold", markup=False, soft_wrap=True)
        is_lost = _measure(record, case, device)
        record.running = None
        record.write()
        if is_lost:
            return DEVICE_LOST
    record.complete = not record.failed and not record.left_out
    record.write()
    return 1 if record.failed else 0


def _measure(record: Record, case: Case, device: torch.device) -> bool:
    """Measure, and keep what was found or what went wrong; whether the device answers no more."""
    began = time.monotonic()
    try:
        found = case.measure()
        wait_for(device)  # what was started and not waited for fails here, and not in the next case
        record.cases[case.name] = {**found, "seconds": time.monotonic() - began}
    except Skipped as reason:
        record.skipped[case.name] = str(reason)
    except Exception as error:  # whatever it is, the other cases are to be measured
        traceback.print_exc()
        record.failed[case.name] = in_a_line(error)
        try:
            wait_for(device)
        except RuntimeError as lost:
            log_console().print(f"the device answers no more: {lost}", style="red", markup=False)
            return True
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return False


def in_a_line(error: BaseException) -> str:
    """The kind of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


# ------------------------------------------------------------------ around the processes


def run_in_processes(record: Record, command: Callable[[float], Sequence[str]], ends: float) -> None:
    """Run a part until its cases are done or the time is up; ``record`` then has what is known of it.

    ``command`` gives the words that start a process which calls :func:`run_cases`, for so many seconds. One
    that dies, or has to be ended, is started again without the case that it ended in.
    """
    part_ends = min(ends, time.monotonic() + 60 * record.part.minutes)
    while (seconds := part_ends - time.monotonic()) > 0:
        text = f"{record.part.file}: {seconds / 60:.1f} minutes; {record.log} tells more"
        log_console().print(text, markup=False, soft_wrap=True)
        status = run_process(command(seconds), record.log, seconds + GRACE_SECONDS)
        vars(record).update(vars(Record.of(record.part, record.folder)))
        was_in, record.running = record.running, None
        if was_in is not None:
            record.failed[was_in] = (
                f"its process ended, or was ended, in it (status {status}); see {record.log}"
            )
        elif status not in (0, 1, DEVICE_LOST):  # outside of any case: once more would change nothing
            record.failed["the part"] = f"its process ended with status {status}; see {record.log}"
        record.write()
        if was_in is None and status != DEVICE_LOST:
            return
    record.left_out.setdefault("what is not listed", "no time was left")
    record.write()


def run_process(command: Sequence[str], log: Path, seconds: float) -> int:
    """Run ``command`` with what it says at the end of ``log``; its exit status, negative after a signal.

    After so many ``seconds`` it is ended, with all that it started, and so it is when this process is told to
    end (SIGTERM, Ctrl-C).
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with log.open("ab") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            signal.signal(signal.SIGTERM, before)
