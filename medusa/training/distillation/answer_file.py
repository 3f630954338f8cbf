"""The file that self-distillation fills: append-only JSON lines, safe to kill at any moment.

    {"index": 3, "category": "qa", "messages": [...], "temperature": 0.8, "finish_reason": "stop"}

``index`` counts the prompts from 0, so a later run knows what is done. Beside ``data.jsonl`` stands
``data.config.json``, what the answers were made with: a file never mixes two configurations.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from medusa.files import read_json, write_json


class AnswerFile:
    """Appends rows to ``path``; a context manager.

    A last line that a killed run left half-written is cut off on opening.

    Raises:
        BlockingIOError: another run fills it.
        ValueError: the file was made with another configuration, or with none on record.
    """

    def __init__(self, path: str | Path, configuration: Mapping[str, Any]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        try:
            _lock(self._file, self.path)
            _check_configuration(self.path, configuration)
            _cut_torn_line(self.path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and hand it to the operating system."""
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    @property
    def is_empty(self) -> bool:
        """Whether no row was ever written, by an earlier run either."""
        return self.path.stat().st_size == 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that are there.

        Raises:
            ValueError: a row is not ours; the message names file and row.
        """
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                origin = f"{self.path} row {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{origin} is not valid JSON ({error}); remove that line") from error
                is_row = isinstance(row, dict) and {"index", "messages", "finish_reason"} <= set(row)
                if not is_row or not isinstance(row["index"], int) or not isinstance(row["messages"], list):
                    raise ValueError(
                        f"{origin} must hold index, a number, messages, a list, and finish_reason, got "
                        f"{line[:80]!r}; remove that line"
                    )
                yield row


def _lock(file: TextIO, path: Path) -> None:
    """Keep the file from all other runs, until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            f"output {str(path)!r} is being filled by another run, and two would write every answer twice; "
            "wait until that has ended, or choose another output"
        ) from error


def configuration_path(path: Path) -> Path:
    """Where the configuration of ``path`` is recorded."""
    return path.with_suffix(".config.json")


def _check_configuration(path: Path, configuration: Mapping[str, Any]) -> None:
    """Record the configuration of a new file; compare it with the record of one that has rows."""
    record = configuration_path(path)
    if not path.exists() or path.stat().st_size == 0:
        write_json(record, configuration)
        return
    if not record.exists():
        raise ValueError(
            f"output {str(path)!r} holds rows, but {record} is missing, so they may come from another "
            "configuration; choose another output"
        )
    made_with, asked = _what_matters(read_json(record)), json.loads(json.dumps(_what_matters(configuration)))
    different = [key for key in sorted({*made_with, *asked}) if made_with.get(key) != asked.get(key)]
    if different:
        changes = ", ".join(f"{key}={made_with.get(key)!r} (now {asked.get(key)!r})" for key in different)
        raise ValueError(
            f"output {str(path)!r} was made with {changes}; use the same options to go on with it, "
            "or choose another output"
        )


def _what_matters(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """All but the addresses of the servers that answer: they may change, the model may not."""
    return {**configuration, "endpoint": bool(configuration.get("endpoint"))}


def _cut_torn_line(path: Path) -> None:
    """Drop what follows the last newline."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)
