"""What a base wrote while it was used with ``--learn``: texts for the next round of learning.

An answer is kept with the end of its prompt, as text, in lines of JSON as training reads them. New texts are
in one file, and those of earlier rounds, from which later rounds learn again, in another. When either is
full, the oldest texts go.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medusa.files import replaced_file

NEW, EARLIER, TAKEN = "collected.jsonl", "collected-before.jsonl", "collected-taken.jsonl"
"""The file of new texts, of earlier ones, and of new ones on their way to these."""
MOST_BYTES = 2**24
"""Of each file."""
WINDOW = 900
"""Tokens of a text: training cuts longer ones."""
BEFORE = 600
"""Tokens of the prompt that are kept before an answer."""
SHORTEST = 16
"""Tokens of a text."""
MOST_KNOWN = 2**17
"""Texts that are known again, at most."""

Row = dict[str, Any]
"""``text``, and ``answer_from``: the characters of it before what the base wrote."""


class CollectedTexts:
    """The texts in ``directory``, which must be there: where it is removed, nothing is kept any more."""

    def __init__(self, directory: Path, tokenizer: Any = None):
        self.directory = directory
        self.tokenizer = tokenizer
        self.new, self.earlier, self._taken = (directory / name for name in (NEW, EARLIER, TAKEN))
        self._known: set[int] = set()
        """Hashes of texts that are there."""

    def read_known(self) -> None:
        """Know the texts that are there already, before any is added."""
        self._known = {hash(row["text"]) for row in self.newest_first()}

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer, in tokens, and the end of its prompt; a text that is there already teaches nothing.

        Raises:
            OSError: the disk is full, or the directory is gone.
        """
        before = [*prompt[-BEFORE:]]
        if before and before[0] == self.tokenizer.bos_token_id:
            del before[0]  # training puts it there again
        tokens = [*before, *answer]
        rows: list[Row] = []
        for start in range(0, len(tokens), WINDOW):
            window = tokens[start : start + WINDOW]
            if len(window) >= SHORTEST:
                text = self.tokenizer.decode(window)
                both = zip(text, self.tokenizer.decode(before[start : start + WINDOW]), strict=False)
                shared = itertools.takewhile(lambda pair: pair[0] == pair[1], both)
                rows.append({"text": text, "answer_from": sum(1 for _ in shared)})
        if len(self._known) > MOST_KNOWN:
            self.read_known()
        rows = [row for row in rows if hash(row["text"]) not in self._known]
        handle = os.open(self.new, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "ab") as file:
            file.write(_lines(rows))  # at once: other processes add theirs
        self._known.update(hash(row["text"]) for row in rows)
        if self.num_new_bytes > MOST_BYTES:
            self.end_new()

    def end_new(self) -> None:
        """Count all texts as earlier ones: a round learns from them."""
        if self.new.exists() and not self._taken.exists():  # it is there where this was killed
            os.replace(self.new, self._taken)
        kept: list[Row] = []
        room = MOST_BYTES
        for row in _newest_first(self._taken, self.earlier):
            room -= len(_lines([row]))
            if room < 0:
                break
            kept.append(row)
        with replaced_file(self.earlier) as partial:
            partial.touch(0o600)
            partial.write_bytes(_lines(kept[::-1]))
        self._taken.unlink(missing_ok=True)

    @property
    def num_new_bytes(self) -> int:
        return _size_of(self.new)

    @property
    def num_bytes(self) -> int:
        return sum(map(_size_of, (self.new, self.earlier, self._taken)))

    def new_rows(self) -> list[Row]:
        """Those that no round has learned from, the newest first."""
        return list(_newest_first(self.new))

    def newest_first(self) -> Iterator[Row]:
        """The texts; a line that was cut by a full disk is left out."""
        return _newest_first(self.new, self._taken, self.earlier)


def _newest_first(*paths: Path) -> Iterator[Row]:
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in reversed(text.split("\n")):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # cut, and perhaps the next text stands behind it
                continue


def _lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
