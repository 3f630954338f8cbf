"""Tokenised documents on the disk: made once by one process, in little memory, and mapped by all.

    counts.json   what became of the rows; written last
    training/     tokens.npy (T,) int32, is_label.npy (T,) bool, starts.npy (n + 1,) long
    held-out/     the same

The directory's name is a digest of what the documents depend on: the data files, how they are cut and
filtered, the tokenizer and its chat template, and the version of medusa that made them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import medusa
from medusa.files import read_json, replaced_directory, write_json
from medusa.training.config.options import DataOptions
from medusa.training.data.documents import Document, Documents
from medusa.training.data.reading import expanded

ONLY_IN_TRAINING = ("train_on", "packing", "tokens_per_batch")
"""Data options that documents do not depend on."""
PARTS = ("tokens", "is_label", "starts")


def name_of(options: DataOptions, tokenizer: Any) -> str:
    """The name of the directory that holds these documents.

    Raises:
        FileNotFoundError, ValueError: a source cannot be opened.
    """
    cut = {key: value for key, value in dataclasses.asdict(options).items() if key not in ONLY_IN_TRAINING}
    sources: list[Any] = []
    for source in expanded(options.data):
        path = Path(source)
        state = path.stat() if path.is_file() else None
        where = str(path.resolve()) if state else source
        sources.append([where, *([state.st_size, state.st_mtime_ns] if state else [])])
    told = {**cut, "data": sources, "tokenizer": digest_of_tokenizer(tokenizer), "medusa": medusa.__version__}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def digest_of_tokenizer(tokenizer: Any) -> str:
    """A hash of what a tokenizer makes of text and of messages."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = [backend.to_str() if backend is not None else repr(tokenizer)]
    told += [str(tokenizer.chat_template), str(tokenizer.special_tokens_map)]
    return hashlib.sha256("\0".join(told).encode()).hexdigest()


class DocumentWriter:
    """Appends documents to the files of ``directory``; :meth:`documents` maps them."""

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._tokens = (directory / "tokens").open("wb")
        self._is_label = (directory / "is_label").open("wb")
        self._starts = [0]

    def extend(self, documents: Iterable[Document]) -> None:
        for each in documents:
            self._tokens.write(np.ascontiguousarray(each.tokens, dtype=np.int32).data)
            self._is_label.write(np.ascontiguousarray(each.is_label, dtype=bool).data)
            self._starts.append(self._starts[-1] + len(each.tokens))

    def documents(self) -> Documents:
        """All of them, on the disk."""
        self._tokens.close()
        self._is_label.close()
        starts = np.array(self._starts, dtype=np.int64)
        if not starts[-1]:
            return Documents.of([])
        tokens = np.memmap(self.directory / "tokens", np.int32, mode="r")
        return Documents(tokens, np.memmap(self.directory / "is_label", bool, mode="r"), starts)


def write_documents(directory: Path, documents: Documents, indices: np.ndarray) -> None:
    """Write the documents at ``indices``, in that order, one at a time; not through a mapped file, in which a
    full disk would end the process by a signal."""
    directory.mkdir()
    starts = np.concatenate([[0], np.cumsum(documents.lengths[indices], dtype=np.int64)]).astype(np.int64)
    np.save(directory / "starts.npy", starts)
    for name, kind in (("tokens", np.int32), ("is_label", bool)):
        described = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": (int(starts[-1]),)}
        with (directory / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, described)
            for index in indices:
                file.write(np.ascontiguousarray(getattr(documents[index], name), kind).data)


def read_documents(directory: Path) -> Documents:
    """The documents in ``directory``, mapped: they take memory as they are read, and processes share it."""
    parts = (directory / f"{name}.npy" for name in PARTS)
    # "c": whoever writes to a page gets a copy of his own, which torch wants to hear.
    return Documents(*(np.load(path, mmap_mode="c" if path.stat().st_size > 200 else None) for path in parts))


def write_set(
    directory: Path, documents: Documents, is_held_out: np.ndarray, counts: dict[str, int]
) -> dict[str, int]:
    """Write both sets and what became of the rows, whole or not at all; the counts come back.

    A run that began at the same time may have written them: the same, since the data is in the name.
    """
    with replaced_directory(directory, overwrite=True) as partial:
        for name, chosen in (("training", ~is_held_out), ("held-out", is_held_out)):
            write_documents(partial / name, documents, chosen.nonzero()[0])
        write_json(partial / "counts.json", counts)
    return counts


def read_set(directory: Path) -> tuple[Documents, Documents, dict[str, int]]:
    """Documents to train on, documents to measure on, and what became of the rows.

    Raises:
        FileNotFoundError: the directory is not there, on this machine.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory} is not on this machine: the tokenised documents lie in output_dir, which must be a "
            "directory that all machines of the launch see"
        )
    training, held_out = (read_documents(directory / name) for name in ("training", "held-out"))
    return training, held_out, read_json(directory / "counts.json")
