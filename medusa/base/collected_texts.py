"""What a base wrote while it was used with ``--learn``: texts for the next ``medusa learn``.

An answer is kept with the end of its prompt, as text, in lines of JSON as training reads them. There are two
files, and when the newer one is full it takes the place of the older: the oldest texts go.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FILES = ("collected.jsonl", "collected-before.jsonl")
"""The newer one and the older one."""
MOST_BYTES = 2**24
"""Of each file."""
WINDOW = 900
"""Tokens of a text: training cuts longer ones."""
BEFORE = 600
"""Tokens of the prompt that are kept before an answer."""
SHORTEST = 16
"""Tokens of a text."""


class CollectedTexts:
    """The texts in ``directory``, which must be there: where it is removed, nothing is kept any more."""

    def __init__(self, directory: Path, tokenizer: Any = None):
        self.directory = directory
        self.tokenizer = tokenizer
        self.newer, self.older = (directory / name for name in FILES)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer, in tokens, and the end of its prompt.

        Raises:
            OSError: the disk is full, or the directory is gone.
        """
        tokens = [*prompt[-BEFORE:], *answer]
        if tokens and tokens[0] == self.tokenizer.bos_token_id:
            tokens = tokens[1:]  # training puts it there again
        windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
        texts = [self.tokenizer.decode(window) for window in windows if len(window) >= SHORTEST]
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        handle = os.open(self.newer, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "ab") as file:
            file.write(lines.encode())  # at once: other processes add theirs
        if self.num_bytes_of(self.newer) > MOST_BYTES:
            os.replace(self.newer, self.older)

    @property
    def num_bytes(self) -> int:
        return self.num_bytes_of(self.newer) + self.num_bytes_of(self.older)

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """The texts as rows; a line that was cut by a full disk is left out."""
        for path in (self.newer, self.older):
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for line in reversed(lines):
                if line.endswith("}"):
                    yield json.loads(line)

    @staticmethod
    def num_bytes_of(path: Path) -> int:
        return path.stat().st_size if path.exists() else 0
