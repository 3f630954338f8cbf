"""Conversations and texts from files and hub data sets.

A source is a file (``.jsonl``, ``.json``, ``.parquet``, ``.arrow``, ``.jsonl.gz``, ``.json.gz``), a pattern
of file names, a directory of files (also one of ``save_to_disk`` of the library datasets) or a hub data set
id. Where the names in a directory tell of several splits, one is read. A row is one of

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}
    {"text": "..."}
    {"prompt": {"role": "prompter", "text": "...", "replies": [...]}}
    {"message_id": "...", "parent_id": "...", "role": "prompter", "text": "..."}

The last two are trees of messages, as OASST has them. Other keys are ignored, except:
``finish_reason``, where "length" means that the last answer was cut, so nothing may be learned from its end;
``tools`` and ``chat_template_kwargs``, which the chat template gets; ``system``, which comes before the
messages; and beside an instruction ``history``, pairs of a question and an answer, and the keys of a message.
Messages are read by :mod:`medusa.conversations`: ``reasoning_content`` and ``tool_calls`` are the model's own
words, ``train`` and ``weight`` exclude a message from training. A text whose row says who speaks is no plain
text. A row that cannot be read is an error that names file and row; rows count from 1. Training leaves out
rows in which something that must be text is none, and counts them.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from medusa.conversations import (
    Message,
    NotText,
    check_keepable,
    checked_text,
    exchange,
    opened,
    parsed_json,
    read_messages,
    refuse_beside_messages,
    refuse_beside_text,
    template_options,
)
from medusa.training.data.message_trees import (
    TreeMessage,
    conversations_of,
    is_message_of_tree,
    is_tree,
    joined_trees,
    tree_in,
)

FILE_TYPES = (".jsonl", ".json", ".parquet", ".arrow", ".jsonl.gz", ".json.gz")
_CONVERSATIONS = ("messages", "conversations")
_SHAPES = "messages, conversations, instruction with output, or text"


@dataclass(frozen=True)
class Example:
    """One row: a conversation or a plain text."""

    origin: str
    """Source and row, for messages to the user."""
    messages: tuple[Message, ...] = ()
    text: str | None = None
    answer_was_cut: bool = False
    """The last answer stopped at a length limit, not at its end."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Chat template options: tools, and the row's chat_template_kwargs."""


def read_examples(
    sources: Sequence[str], split: str = "train", skipped: list[str] | None = None
) -> Iterator[Example]:
    """The rows of all ``sources`` in order; ``split`` names the part of a hub data set. ``skipped`` gets what
    is wrong with each row that has no text where it must; without it that is an error.

    Raises:
        FileNotFoundError: a source looks like a file and is not there.
        ValueError: a file of an unknown type, or a row that cannot be read.
    """
    for source in expanded(sources, split):
        of_trees: list[TreeMessage] = []
        for number, row in enumerate(_rows(source, split), start=1):
            origin = f"{source} row {number}"
            if is_message_of_tree(row):
                of_trees.append(TreeMessage.read(row, origin))
                continue
            try:
                examples = _examples_of(row, origin)
            except NotText as error:
                if skipped is None:
                    raise
                skipped.append(str(error))
            else:
                yield from examples
        for first in joined_trees(of_trees):
            yield from (Example(first.origin, messages) for messages in conversations_of(first))


def _examples_of(row: Any, origin: str) -> list[Example]:
    if not is_tree(row):
        return [parse_row(row, origin)]
    options = template_options(row, origin)
    conversations = conversations_of(tree_in(row["prompt"], origin))
    return [Example(origin, messages, template_options=options) for messages in conversations]


def expanded(sources: Sequence[str], split: str = "train") -> list[str]:
    """The files and hub ids that ``sources`` name: patterns and directories become their files, by name,
    each once. Of a directory with files of several splits those of ``split`` are taken.

    Raises:
        FileNotFoundError, ValueError: a source cannot be opened; before any long work.
    """
    return [each for source in sources for each in _files_of(source, split)]


def _files_of(source: str, split: str) -> list[str]:
    path = Path(source)
    types = ", ".join(FILE_TYPES)
    if path.is_file():
        if not source.endswith(FILE_TYPES):
            raise ValueError(f"data file {source!r} must end in one of {FILE_TYPES}")
        return [source]
    is_pattern = any(mark in source for mark in "*?[")
    if path.is_dir() or is_pattern:
        paths = glob.glob(source, recursive=True) if is_pattern else map(str, path.rglob("*"))
        named = sorted(each for each in paths if each.endswith(FILE_TYPES) and Path(each).is_file())
        named = [each for each in named if not _is_of_datasets(Path(each))]
        # a pattern follows links, and one to a folder above names every file again and again
        files = sorted({os.path.realpath(each): each for each in reversed(named)}.values())
        if not files:
            raise FileNotFoundError(f"data {source!r} names no file that ends in one of {types}")
        return files if is_pattern else _of_split(files, path, split)
    if source.endswith(FILE_TYPES) or path.is_absolute() or source.count("/") > 1:
        raise FileNotFoundError(
            f"data file {source!r} does not exist; data takes {types} files, patterns and directories of "
            "them, and hub ids of the form owner/name"
        )
    return [source]


_SAVED = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What ``save_to_disk`` of the library datasets writes beside the rows."""
_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
}
"""Words in names of files and folders that tell of which split they are."""


def _is_of_datasets(path: Path) -> bool:
    is_beside_rows = any(path.parent.glob("*.arrow")) or path.name == _SAVED[-1]
    return path.name in _SAVED and is_beside_rows


def _split_of(name: str) -> str | None:
    words = re.findall("[a-z]+", name.lower())
    return next((split for split, known in _SPLITS.items() if any(word in known for word in words)), None)


def _of_split(files: Sequence[str], directory: Path, split: str) -> list[str]:
    """Those of ``files`` in ``directory`` whose names tell that they are of ``split``; all of them where the
    names tell of no two.

    Raises:
        ValueError: they tell of several, and not for all files.
    """
    split_of_file = {each: _split_of(os.path.relpath(each, directory)) for each in files}
    splits = {each for each in split_of_file.values() if each is not None}
    if len(splits) < 2:
        return [*files]
    wanted = _split_of(split)
    unclear = [each for each, its in split_of_file.items() if its is None]
    if unclear or wanted not in splits:
        problem = (
            f"{unclear[0]!r} of none that its name tells" if unclear else f"none of data_split={split!r}"
        )
        raise ValueError(
            f"data {str(directory)!r} must hold files of one split, or say by their names which is which: it "
            f"holds files of {', '.join(sorted(splits))}, and {problem}; name the files to train on"
        )
    return [each for each, its in split_of_file.items() if its == wanted]


def parse_row(row: Any, origin: str) -> Example:
    """The example in one row.

    Raises:
        ValueError: ``row`` is of no known shape; the message starts with ``origin``.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{origin} must be an object with {_SHAPES}, got {type(row).__name__}")
    check_keepable(row, origin)
    was_cut = row.get("finish_reason") == "length"
    options = template_options(row, origin)
    named = next((key for key in _CONVERSATIONS if row.get(key) is not None), None)
    if named is not None:
        refuse_beside_messages(row, origin)
        messages = opened(row, _messages(row[named], named, origin), origin)
        return Example(origin, messages, answer_was_cut=was_cut, template_options=options)
    if row.get("instruction") is not None and row.get("output") is not None:
        return Example(origin, _alpaca(row, origin), answer_was_cut=was_cut, template_options=options)
    if row.get("text") is not None:
        refuse_beside_text(row, origin)
        return Example(origin, text=checked_text(row["text"], "text", origin))
    nulls = [key for key in (*_CONVERSATIONS, "instruction", "output", "text") if row.get(key, "") is None]
    if nulls:
        raise NotText(f"{origin}: {nulls[0]} must not be null where no other key holds {_SHAPES}")
    advice = "" if "prompt" not in row else "; prompts are answered first: `medusa distill --prompts FILE`"
    raise ValueError(f"{origin} must hold {_SHAPES}; it holds {sorted(map(str, row))}{advice}")


def _messages(turns: Any, named: str, origin: str) -> list[Message]:
    have_roles = isinstance(turns, list) and all(isinstance(t, dict) and "role" in t for t in turns)
    names = ("role", "content") if named == "messages" or have_roles else ("from", "value")
    return read_messages(turns, origin, *names)


def _alpaca(row: dict[str, Any], origin: str) -> tuple[Message, ...]:
    question = checked_text(row["instruction"], "instruction", origin)
    if row.get("input"):
        question = f"{question}\n\n{checked_text(row['input'], 'input', origin)}"
    return exchange(row, question, checked_text(row["output"], "output", origin), origin)


def _rows(source: str, split: str) -> Iterator[Any]:
    path = Path(source)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix == ".arrow" and path.is_file():
        return _arrow_rows(path)
    if path.is_file():
        return _json_rows(path)
    return _hub_rows(source, split)


def _json_rows(path: Path) -> Iterator[Any]:
    """Rows of a JSON array, or of one JSON value a line, by content and not by name; blank lines skipped. A
    .json file may also be one object over several lines."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = (line for line in file if line.removeprefix(codecs.BOM_UTF8).strip())
            first = next(lines, b"").removeprefix(codecs.BOM_UTF8)
            if first.lstrip().startswith(b"["):
                yield from parsed_json(first + file.read(), str(path))
                return
            is_begun = path.name.endswith((".json", ".json.gz")) and first.lstrip().startswith(b"{")
            if is_begun and not _is_json(first):
                yield parsed_json(first + file.read(), str(path))  # one object over several lines
                return
            for number, line in enumerate(chain([first] if first else [], lines), start=1):
                yield parsed_json(line, f"{path} row {number}")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error


def _is_json(line: bytes) -> bool:
    try:
        parsed_json(line, "")
    except ValueError:
        return False
    return True


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from map(_as_written, batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


def _arrow_rows(path: Path) -> Iterator[Any]:
    """Rows of a file as ``save_to_disk`` of the library datasets writes it."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as file:
            for batch in _arrow_batches(file):
                yield from map(_as_written, batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a readable arrow file: {error}") from error


def _arrow_batches(file: Any) -> Iterator[Any]:
    """A stream of batches, or the file format of a table."""
    import pyarrow.ipc

    if file.read(6) == b"ARROW1":
        whole = pyarrow.ipc.open_file(file)
        yield from map(whole.get_batch, range(whole.num_record_batches))
        return
    file.seek(0)
    yield from pyarrow.ipc.open_stream(file)


def _hub_rows(source: str, split: str) -> Iterator[Any]:
    from datasets import load_dataset

    return map(_as_written, load_dataset(source, split=split))


def _as_written(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Arrow's without the nulls that are Arrow's own: it gives every object the keys of all.

    A null in a list is kept, and so is the null of a message, which then has no content.
    """
    kept = _without_nulls(row)
    for name in _CONVERSATIONS:
        turns = row.get(name)
        if isinstance(turns, list):
            kept[name] = [
                {key: _without_nulls(value) for key, value in turn.items()}
                if isinstance(turn, dict)
                else turn
                for turn in turns
            ]
    return kept


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
