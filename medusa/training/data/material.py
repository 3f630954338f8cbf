"""What a base can learn heads from, made of a user's files: questions to answer, and texts to read.

Files that ``medusa train`` reads are conversations and texts, row by row. Every other file is one text, and a
folder or a repository is all the text files in it. A tenth is kept apart, to measure on: whole files where
there are enough of them, so that no part of one is on both sides.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa.conversations import template_columns
from medusa.training.data.reading import FILE_TYPES, Example, read_examples

PIECE = 2400
"""Characters of a piece of text that is read as it is: some 600 tokens of prose, 900 of code."""
ASKED = 1200
"""Characters of a piece that a question is asked about."""
SHORTEST = 200
"""Characters of a piece."""
LARGEST_FILE = 2**20
"""Bytes of a file in a folder; larger ones are data more often than text."""
MOST_CHARACTERS = 2**25
"""Characters that are read of all files together."""
HELD_OUT = 0.1
"""The part that is kept apart."""
LEAST_HELD_OUT, MOST_HELD_OUT = 2, 24
"""Questions that are kept apart: trees are chosen on a half of the answers and judged on the other."""
TASKS = (
    "Explain this briefly.",
    "Continue this; write only what follows.",
    "Rewrite this so that it is easier to read.",
    "What could be wrong here? Answer in a few sentences.",
)
"""What a chat model is asked to do with a piece of text, in turn."""

Row = dict[str, Any]


@dataclass
class Material:
    """Rows of JSON, shuffled, so that any first part of them is a sample."""

    questions: list[Row] = field(default_factory=list)
    """For :func:`medusa.prompts.read_prompts`."""
    held_out: list[Row] = field(default_factory=list)
    """Questions about what is in neither of the others."""
    texts: list[Row] = field(default_factory=list)
    """For :func:`medusa.training.data.reading.read_examples`: conversations, and texts."""


def material_of(sources: Sequence[str], has_template: bool, seed: int = 0) -> Material:
    """The material in ``sources``: files, folders, patterns of file names and hub ids. ``has_template`` says
    whether the base answers, by its chat template, or continues text.

    Raises:
        FileNotFoundError: a source is not there.
        ValueError: a row of it cannot be read, or there is too little in all of them.
    """
    units = list(_units(sources))
    if len(units) < 2 / HELD_OUT:  # few files: then by their pieces
        units = [[row] for unit in units for row in unit]
    order = random.Random(seed)
    order.shuffle(units)
    count = num_held_out(len(units))
    kept_apart = [row for unit in units[:count] for row in unit]
    learned = [row for unit in units[count:] for row in unit]
    if not learned:
        raise ValueError(
            f"data must hold at least {LEAST_HELD_OUT + 1} conversations or pieces of text of {SHORTEST} "
            f"characters, to learn from one and to measure on the others; {', '.join(sources)} hold "
            f"{len(kept_apart)}"
        )
    for rows in (learned, kept_apart):
        order.shuffle(rows)
    questions = [_question(row, number, has_template) for number, row in enumerate(learned)]
    held_out = [_question(row, number, has_template) for number, row in enumerate(kept_apart)]
    return Material(questions, held_out[:MOST_HELD_OUT], learned)


def num_held_out(count: int) -> int:
    """How many of ``count`` are kept apart."""
    return max(LEAST_HELD_OUT, round(HELD_OUT * count))


def _units(sources: Iterable[str]) -> Iterator[list[Row]]:
    """The pieces of each text, or each conversation alone, until there are enough."""
    num_characters = 0
    for example in _examples(sources):
        if example.text is None:
            rows = [_conversation(example)] if _is_answered(example) else []
        else:
            rows = [{"text": piece} for piece in pieces(example.text)]
        if rows:
            yield rows
        num_characters += sum(len(str(row)) for row in rows)
        if num_characters > MOST_CHARACTERS:
            return


def _examples(sources: Iterable[str]) -> Iterator[Example]:
    for source in sources:
        path = Path(source)
        if path.is_dir():
            for file in text_files(path):
                yield Example(str(file), text=file.read_text(encoding="utf-8"))
        elif path.is_file() and not source.endswith(FILE_TYPES):
            yield Example(source, text=_checked_text(path))
        else:
            yield from read_examples([source], skipped=[])


def text_files(folder: Path) -> Iterator[Path]:
    """The text files in ``folder``, in the order of their names: without what begins with a dot, links,
    files of data, and what is not UTF-8."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(files):
            path = Path(place, name)
            if name.startswith(".") or name.endswith(FILE_TYPES) or path.is_symlink():
                continue
            if path.stat().st_size <= LARGEST_FILE and _is_text(path):
                yield path


def _is_text(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, PermissionError):
        return False
    return "\0" not in text


def _checked_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data file {str(path)!r} must be text in UTF-8, or end in one of {', '.join(FILE_TYPES)}; name "
            f"another, or the folder that it is in ({error})"
        ) from error


def pieces(text: str) -> list[str]:
    """``text`` in pieces of at most :data:`PIECE` characters, cut at the ends of lines where there are some;
    a rest that is too short to teach anything is left out."""
    cut = []
    while len(text) > PIECE:
        end = text.rfind("\n", PIECE // 2, PIECE) + 1 or PIECE
        cut.append(text[:end])
        text = text[end:]
    return [piece for piece in (*cut, text) if len(piece.strip()) >= SHORTEST]


def _is_answered(example: Example) -> bool:
    return len(example.messages) > 1 and example.messages[-1]["role"] == "assistant"


def _conversation(example: Example) -> Row:
    cut = {"finish_reason": "length"} if example.answer_was_cut else {}
    return {"messages": list(example.messages), **template_columns(example.template_options), **cut}


def _question(row: Row, number: int, has_template: bool) -> Row:
    """What the base is asked about a row: the conversation before its last answer, or the beginning of a
    text, with a task where the base has a chat template."""
    if "messages" in row:
        return {**row, "messages": row["messages"][:-1]}
    beginning = row["text"][:ASKED].rstrip()
    return {"prompt": f"{TASKS[number % len(TASKS)]}\n\n{beginning}" if has_template else beginning}
