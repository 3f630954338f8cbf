"""Conversations and texts from files and hub data sets.

A source is a file (``.jsonl``, ``.json``, ``.parquet``, and ``.jsonl.gz``, ``.json.gz``), a pattern of file
names, a directory of files or a hub data set id. A row is one of

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}
    {"text": "..."}

with other keys beside it left alone, but for ``finish_reason``, of which "length" says that the last answer
was cut, so nothing may be learned from where it ends, and for ``tools`` and ``chat_template_kwargs``, which
the chat template gets. Messages keep all their keys, ``reasoning_content`` and ``tool_calls`` among them;
whose content is null may be left empty. A row that cannot be read is an error that names file and row; rows
count from 1.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from medusa.prompts import check_keepable, parsed_json, template_options

Message = dict[str, Any]
FILE_TYPES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_BESIDE_CONTENT = ("reasoning_content", "reasoning", "tool_calls")
"""Keys of an assistant message that say something without content."""
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
    """What the chat template gets beside the messages: tools, and the row's chat_template_kwargs."""


def read_examples(sources: Sequence[str], split: str = "train") -> Iterator[Example]:
    """The rows of all ``sources`` in order; ``split`` names the part of a hub data set.

    Raises:
        FileNotFoundError: a source looks like a file and is not there.
        ValueError: a file of an unknown type, or a row that cannot be read.
    """
    for source in expanded(sources):
        for number, row in enumerate(_rows(source, split), start=1):
            yield parse_row(row, f"{source} row {number}")


def expanded(sources: Sequence[str]) -> list[str]:
    """The files and hub ids that ``sources`` name: patterns and directories become their files, by name,
    each once.

    Raises:
        FileNotFoundError, ValueError: a source cannot be opened; before any long work.
    """
    return [each for source in sources for each in _files_of(source)]


def _files_of(source: str) -> list[str]:
    path, types = Path(source), ", ".join(FILE_TYPES)
    if path.is_file():
        if not source.endswith(FILE_TYPES):
            raise ValueError(f"data file {source!r} must end in one of {FILE_TYPES}")
        return [source]
    is_pattern = any(mark in source for mark in "*?[")
    if path.is_dir() or is_pattern:
        paths = glob.glob(source, recursive=True) if is_pattern else map(str, path.rglob("*"))
        named = sorted(each for each in paths if each.endswith(FILE_TYPES) and Path(each).is_file())
        # a pattern follows links, and one to a folder above names every file again and again
        found = sorted({os.path.realpath(each): each for each in reversed(named)}.values())
        if not found:
            raise FileNotFoundError(f"data {source!r} names no file that ends in one of {types}")
        return found
    if source.endswith(FILE_TYPES) or path.is_absolute() or source.count("/") > 1:
        raise FileNotFoundError(
            f"data file {source!r} does not exist; data takes {types} files, patterns and directories of "
            "them, and hub ids of the form owner/name"
        )
    return [source]


def parse_row(row: Any, origin: str) -> Example:
    """The example in one row.

    Raises:
        ValueError: ``row`` is of no known shape; the message starts with ``origin``.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{origin} must be an object with {_SHAPES}, got {type(row).__name__}")
    check_keepable(row, origin)
    was_cut = row.get("finish_reason") == "length"
    given = template_options(row, origin)
    if row.get("messages") is not None:
        messages = _messages(row["messages"], "role", "content", origin)
        return Example(origin, messages, answer_was_cut=was_cut, template_options=given)
    if row.get("conversations") is not None:
        turns = row["conversations"]
        openai_names = isinstance(turns, list) and all(isinstance(t, dict) and "role" in t for t in turns)
        names = ("role", "content") if openai_names else ("from", "value")
        messages = _messages(turns, *names, origin)
        return Example(origin, messages, answer_was_cut=was_cut, template_options=given)
    if row.get("instruction") is not None and row.get("output") is not None:
        return Example(origin, _alpaca(row, origin), answer_was_cut=was_cut)
    if row.get("text") is not None:
        return Example(origin, text=_text(row["text"], "text", origin))
    raise ValueError(f"{origin} must hold {_SHAPES}; it holds {sorted(map(str, row))}")


def _messages(turns: Any, role_key: str, content_key: str, origin: str) -> tuple[Message, ...]:
    if not isinstance(turns, list):
        raise ValueError(f"{origin}: a conversation must be a list of messages, got {type(turns).__name__}")
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        where = f"{origin}, message {number}"
        says_more = isinstance(turn, dict) and any(turn.get(key) for key in _BESIDE_CONTENT)
        if not (isinstance(turn, dict) and role_key in turn and (content_key in turn or says_more)):
            raise ValueError(
                f"{where} must be an object with {role_key!r} and {content_key!r}, got {turn!r:.80}"
            )
        role = _text(turn[role_key], role_key, where)
        beside = {key: value for key, value in turn.items() if value is not None}
        beside = {key: value for key, value in beside.items() if key not in (role_key, content_key)}
        if "reasoning" in beside:  # as some servers call it
            beside.setdefault("reasoning_content", beside.pop("reasoning"))
        may_be_empty = _ROLES.get(role, role) == "assistant" and turn.get(content_key) is None
        content = "" if may_be_empty else _content(turn[content_key], where)
        messages.append({"role": _ROLES.get(role, role), "content": content, **beside})
    return tuple(messages)


def _content(value: Any, where: str) -> str:
    """Plain text, or the text of a list of text parts."""
    if isinstance(value, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in value):
        return "".join(_text(part.get("text"), "text", where) for part in value)
    return _text(value, "content", where)


def _alpaca(row: dict[str, Any], origin: str) -> tuple[Message, ...]:
    question = _text(row["instruction"], "instruction", origin)
    if row.get("input"):
        question = f"{question}\n\n{_text(row['input'], 'input', origin)}"
    answer = _text(row["output"], "output", origin)
    return ({"role": "user", "content": question}, {"role": "assistant", "content": answer})


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name} must be text, got {value!r:.80}")
    return value


def _rows(source: str, split: str) -> Iterator[Any]:
    path = Path(source)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.is_file():
        return _json_rows(path)
    return _hub_rows(source, split)


def _json_rows(path: Path) -> Iterator[Any]:
    """Rows of a JSON array, or of one JSON value a line, by content and not by name; blank lines skipped."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = (line for line in file if line.removeprefix(codecs.BOM_UTF8).strip())
            first = next(lines, b"")
            if first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                yield from parsed_json(first + file.read(), str(path))
                return
            for number, line in enumerate(chain([first] if first else [], lines), start=1):
                yield parsed_json(line, f"{path} row {number}")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


def _hub_rows(source: str, split: str) -> Iterator[Any]:
    from datasets import load_dataset

    return iter(load_dataset(source, split=split))
