"""The states format: hidden states of a base model, in the shards of one directory.

    manifest.json          source of the states: base and fingerprint, layers and types, where shards end
    documents.safetensors  "tokens" (T,) int32, "is_label" and "is_needed" (T,) bool, "starts" (n + 1,) long
    00000.safetensors      "states": (P, (1 + L) * D) of the needed positions of some documents, in order; of
                           those in float8 "scales" (P, 1 + L) float32 too, one for each layer of each row
    00001.safetensors      ...

A row has first the input of the LM head, then the states after the layers of the manifest. Shards are written
atomically. A shard carries the digest of its manifest, a checksum of its states and its writer, so that
several writers, or one that was stopped, can fill a directory in any order. The documents of a shard depend
only on their number and size.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa.files import read_json, replaced_file

MANIFEST = "manifest.json"
DOCUMENTS_FILE = "documents.safetensors"
SHARD_BYTES = 2**28
"""Approximate size of a shard: the work that a run loses when it dies, and its memory."""
STORED_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
}
"""The types of stored states, as a run names them."""
NUM_BLOCKS, BLOCK = 8, 4096
"""Blocks read of each tensor of a file of weights, evenly spread, and their bytes."""


class StatesDirectory:
    """The states of some documents, written or still to be written."""

    def __init__(self, directory: Path, header: Mapping[str, Any], starts: np.ndarray, is_needed: np.ndarray):
        """``header`` is the content of the manifest; document i has the positions ``starts[i]`` to ``starts[i
        + 1]``, and the states of positions with ``is_needed`` are kept."""
        self.directory = directory
        self.header = dict(header)
        self.starts = starts
        self.needed = is_needed
        self.first = np.concatenate([[0], np.cumsum(is_needed)])  # of each position: states before it
        self._stored_dtype = STORED_TYPES[self.header["dtype"]]
        self._num_layers = 1 + len(self.header["layers"])
        self.dtype = torch.bfloat16 if self._is_scaled else self._stored_dtype
        """The type in which states are read."""
        self.size: int = self.header["width"]
        self.ends: list[int] = self.header["shards"]
        self._digest = hashlib.sha256(json.dumps(self.header, sort_keys=True).encode()).hexdigest()
        self._opened: dict[int, list[Any]] = {}  # slices of shards, read on demand

    @classmethod
    def read(cls, directory: Path) -> tuple[StatesDirectory, np.ndarray]:
        """The states that the manifest in ``directory`` asks for, and the tokens (T,) int32 of all documents.

        Raises:
            FileNotFoundError, ValueError: the directory is none of states.
        """
        header = read_json(directory / MANIFEST)
        documents = {name: each.numpy() for name, each in load_file(directory / DOCUMENTS_FILE).items()}
        if digest_of_documents(documents) != header["documents"]:
            raise ValueError(
                f"{directory / DOCUMENTS_FILE} is not what manifest.json is of; delete {directory} "
                "and give the training command again"
            )
        return cls(directory, header, documents["starts"], documents["is_needed"]), documents["tokens"]

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return int(self.first[-1]) * self.bytes_of_state

    @property
    def bytes_of_state(self) -> int:
        """Bytes of a row of states."""
        return bytes_of_state(self.header["dtype"], self._num_layers, self.size)

    @property
    def _is_scaled(self) -> bool:
        return self._stored_dtype.itemsize == 1

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:05d}.safetensors"

    def missing(self) -> list[int]:
        """The shards that are still to be written."""
        return [shard for shard in range(len(self.ends)) if not self.path(shard).exists()]

    def documents_of(self, shard: int) -> range:
        """The documents whose states a shard holds."""
        return range(self.ends[shard - 1] if shard else 0, self.ends[shard])

    def span(self, index: int) -> slice:
        """The positions of the document at ``index`` in the concatenation of all documents."""
        return slice(self.starts[index], self.starts[index + 1])

    def write(self, shard: int, states: Iterable[tuple[int, Tensor]], writer: str) -> None:
        """Write one shard of the states (T, (1 + L) * D) of each of its documents, given in any order.

        The first D numbers are the input of the LM head. ``writer`` is recorded.

        Raises:
            ValueError: documents are missing, or their states are of other sizes or not finite.
            OSError: the disk refused; no part of the shard is left.
        """
        begin = self._first_state(shard)
        rows = torch.empty(self.num_states(shard), self.size, dtype=self._stored_dtype)
        scales = torch.ones(len(rows), self._num_layers)
        left = set(self.documents_of(shard))
        for index, document_states in states:
            span = self.span(index)
            shape = (int(span.stop - span.start), self.size)
            if document_states.shape != shape:
                raise ValueError(
                    f"the states of document {index} must be {shape}, got {tuple(document_states.shape)}"
                )
            needed = torch.from_numpy(self.needed[span]).to(document_states.device)
            kept = document_states[needed]
            place = slice(self.first[span.start] - begin, self.first[span.stop] - begin)
            if self._is_scaled:
                kept, scales_of_document = in_float8(kept, self._num_layers)
                scales[place] = scales_of_document.cpu()
                extremes = scales_of_document
            else:
                extremes = kept = kept.to(self.dtype)
            # the extremes are numbers where all are; isfinite takes nine times as long in bfloat16
            if kept.numel() and not torch.stack(extremes.aminmax()).isfinite().all():
                raise ValueError(
                    f"the states of document {index} in {self._stored_dtype} are not finite; store them in "
                    "bfloat16 or float32 (cache_dtype)"
                )
            rows[place] = kept.cpu()
            left.discard(index)
        if left:
            raise ValueError(f"shard {shard} lacks the states of documents {sorted(left)[:5]}")
        tensors = {"states": rows, **({"scales": scales} if self._is_scaled else {})}
        metadata = {
            "manifest": self._digest,
            "sha256": _checksum(tensors),
            "writer": writer,
            "last_state": "normed",
        }
        with replaced_file(self.path(shard)) as partial:
            save_file(tensors, partial, metadata=metadata)

    def damage(self, shard: int) -> str | None:
        """The fault of a shard, in words."""
        if not self.path(shard).exists():
            return "is not there"
        try:
            with safe_open(self.path(shard), "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            return f"is cut short or damaged ({error})"
        if metadata.get("manifest") != self._digest:
            return "belongs to other states than manifest.json"
        if metadata.get("last_state") != "normed":
            return "has states from before the base's final norm, which are not read any more"
        return None if metadata.get("sha256") == _checksum(tensors) else "has other bytes than were written"

    def of(self, indices: Iterable[int]) -> Tensor:
        """The kept states (P, (1 + L) * D) of the documents at ``indices``, one after the other."""
        return torch.cat([self._of(index) for index in indices])

    def row(self, index: int) -> Tensor:
        """The states (T, (1 + L) * D) of the document at ``index``, zeros where none are kept."""
        needed = torch.from_numpy(self.needed[self.span(index)])
        if needed.all():
            return self.of([index])
        states = torch.zeros(len(needed), self.size, dtype=self.dtype)
        states[needed] = self.of([index])
        return states

    def num_states(self, shard: int) -> int:
        return self._first_state(shard + 1) - self._first_state(shard)

    def _first_state(self, shard: int) -> int:
        """The number of states in the shards before ``shard``."""
        return int(self.first[self.starts[self.ends[shard - 1]]]) if shard else 0

    def _of(self, index: int) -> Tensor:
        shard = int(np.searchsorted(self.ends, index, side="right"))
        span = self.span(index)
        begin, end = self.first[[span.start, span.stop]] - self._first_state(shard)
        if begin == end:
            return torch.zeros(0, self.size, dtype=self.dtype)
        if shard not in self._opened:
            file = safe_open(self.path(shard), "pt")
            names = ("states", "scales") if self._is_scaled else ("states",)
            self._opened[shard] = [file.get_slice(name) for name in names]
        states, *scales = (each[int(begin) : int(end)] for each in self._opened[shard])
        return widened(states, scales[0]) if scales else states


def bytes_of_state(dtype: str, num_layers: int, width: int) -> int:
    """Bytes of a row of ``width`` numbers, of ``num_layers`` layers, as it is stored in ``dtype``."""
    stored = STORED_TYPES[dtype]
    return width * stored.itemsize + (4 * num_layers if stored.itemsize == 1 else 0)


def in_float8(states: Tensor, num_layers: int) -> tuple[Tensor, Tensor]:
    """``states`` (P, num_layers * D) in float8, and the scales (P, num_layers) float32 of each layer of each
    row: the least powers of two that bring its numbers into range, so that bfloat16 holds what is
    :func:`widened`."""
    parts = states.float().unflatten(1, (num_layers, -1))
    largest = parts.abs().amax(dim=-1)
    _, exponent = torch.frexp(largest / torch.finfo(torch.float8_e4m3fn).max)
    scales = torch.ldexp(torch.ones_like(largest), exponent)
    has_scale = largest.isfinite() & (largest > 0)
    scales = torch.where(has_scale, scales, largest + 1)  # of zeros 1, and of what is not finite neither
    rows = (parts / scales[..., None]).to(torch.float8_e4m3fn)
    return rows.flatten(1), scales


def widened(rows: Tensor, scales: Tensor) -> Tensor:
    """The states (P, num_layers * D) bfloat16 of :func:`in_float8`."""
    parts = rows.to(torch.bfloat16).unflatten(1, (scales.shape[1], -1))
    return (parts * scales[..., None].to(torch.bfloat16)).flatten(1)


DOCUMENTS = ("tokens", "is_label", "is_needed", "starts")


def write_documents(directory: Path, documents: Mapping[str, np.ndarray]) -> None:
    """Write the documents of the states, by the names of :data:`DOCUMENTS`, beside the manifest."""
    with replaced_file(directory / DOCUMENTS_FILE) as partial:
        save_file({name: torch.from_numpy(np.array(each)) for name, each in documents.items()}, partial)


def digest_of_documents(documents: Mapping[str, np.ndarray]) -> str:
    """A hash of everything in :func:`write_documents`'s file."""
    content = hashlib.sha256()
    for name in DOCUMENTS:
        content.update(np.ascontiguousarray(documents[name]).data)
    return content.hexdigest()


def shard_ends(states_before: np.ndarray, bytes_of_each: int) -> list[int]:
    """The index after the last document of each shard, given the number of states before each document (n +
    1,) and their bytes."""
    per_shard = max(1, SHARD_BYTES // bytes_of_each)
    shard_of = states_before[:-1] // per_shard
    return [*(np.flatnonzero(np.diff(shard_of)) + 1).tolist(), len(states_before) - 1]


def digest_of_weights(directory: Path) -> str | None:
    """A hash of the weight files in ``directory``; None where there are none.

    In safetensors files the header is read, and the first, the last and some middle bytes of every tensor;
    small tensors, and files of other kinds, are read completely.

    Raises:
        ValueError: a file is damaged.
    """
    for pattern in ("*.safetensors", "*.bin", "*.gguf"):
        files = sorted(directory.glob(pattern))
        if files:
            break
    else:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            for start, end in _spans(path):
                for block in _blocks(start, end):
                    file.seek(block)
                    digest.update(file.read(min(BLOCK, end - block)))
    return f"files {digest.hexdigest()}"


def _spans(path: Path) -> list[tuple[int, int]]:
    """Start and end of each part of a file: the header and each tensor, or each block."""
    whole = path.stat().st_size
    tensors = list[tuple[int, int]]()
    if path.suffix == ".safetensors":
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            whole = 8 + length
            places = [each["data_offsets"] for name, each in header.items() if name != "__metadata__"]
            tensors = [(whole + start, whole + end) for start, end in places]
        except (struct.error, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is damaged or cut short ({error}); get it again") from error
    return [(each, min(each + BLOCK, whole)) for each in range(0, whole, BLOCK)] + tensors


def _blocks(start: int, end: int) -> Iterable[int]:
    """Where the blocks begin that are read of a tensor: all of a small one, else some, and both ends."""
    if end - start <= NUM_BLOCKS * BLOCK:
        return range(start, end, BLOCK)
    return (start + number * (end - start - BLOCK) // (NUM_BLOCKS - 1) for number in range(NUM_BLOCKS))


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """A hash of ``tensors`` (P, ...), by their names."""
    content = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        content.update(tensor.view(torch.uint8).numpy().data if len(tensor) else b"")
    return content.hexdigest()
