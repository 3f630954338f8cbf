"""Hidden states of the frozen base, computed once and kept in shards.

The base never changes, so neither do its states: the shards hold those that some depth predicts a label
from, or all for heads that read whole documents, and every later epoch does without the base's layers.

    manifest.json        what the states are of: base and fingerprint, documents, layers and types
    00000.safetensors    "states": (P, (1 + L) * D) of some documents, one after the other
    00001.safetensors    ...

A shard is there whole or not at all. It carries the digest of its manifest and a checksum of its states, so
that several processes, or one that was stopped, can write them in any order. Which documents a shard holds
depends on their number and size alone, never on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa.base.causal_lm import CausalLM, hidden_size, hidden_states
from medusa.files import read_json, replaced_file, write_json
from medusa.progress import ProgressReporter
from medusa.training.config.options import ConfigurationError, DataOptions
from medusa.training.data.batching import PaddedBatch, collate, plan_in_order
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import needed_states
from medusa.training.states.identity import identity_of

StateType = Literal["float32", "bfloat16", "float16"]
SHARD_BYTES = 2**28
"""Of a shard, about: what a run that dies has to compute again, and what is held in memory."""


def frozen_states(base: CausalLM, padded: PaddedBatch, layers: tuple[int, ...] = ()) -> Tensor:
    """States (B, T, (1 + L) * D) of a micro-batch, without gradients."""
    ids, positions = padded.input_ids.to(base.device), padded.positions.to(base.device)
    with torch.no_grad():
        return hidden_states(base, ids, position_ids=positions, layers=layers)


def states_width(base: CausalLM, layers: tuple[int, ...]) -> int:
    """(1 + L) * D: the numbers of one token's states."""
    return (1 + len(layers)) * hidden_size(base)


class StateFile:
    """The states of some documents in the shards of ``directory``, written or still to be written."""

    def __init__(
        self,
        directory: Path,
        base: CausalLM,
        documents: Documents,
        num_heads: int | None,
        dtype: StateType,
        layers: tuple[int, ...] = (),
    ):
        """Those that ``num_heads`` heads and the base predict labels from, or all when it is None; ``layers``
        are those that the heads fuse. Of ``base`` its embeddings and its configuration are enough here."""
        self.directory, self.documents, self.layers = directory, documents, layers
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.size = states_width(base, layers)
        self.starts = documents.starts
        self.needed = _needed(documents, num_heads)
        self.first = np.concatenate([[0], np.cumsum(self.needed)])  # of each position: states before it
        self.ends = _shard_ends(self.first[self.starts], self.size * self.dtype.itemsize)
        self.header = {
            "base_model": base.name_or_path,
            **identity_of(base),
            "base_dtype": str(base.dtype),
            "arithmetic": _arithmetic(base),
            "documents": documents.digest(),
            "num_heads": num_heads,
            "layers": list(layers),
            "width": self.size,
            "dtype": dtype,
            "shards": self.ends,
        }
        self._digest = hashlib.sha256(json.dumps(self.header, sort_keys=True).encode()).hexdigest()
        self._opened: dict[int, np.ndarray] = {}

    @property
    def num_bytes(self) -> int:
        """Of all states."""
        return int(self.first[-1]) * self.size * self.dtype.itemsize

    def begin(self, replace: bool, line: ProgressReporter) -> list[int]:
        """Make the directory ready and say which shards are missing; for one process.

        ``replace`` takes away the states of something else, and shards that are damaged.

        Raises:
            ConfigurationError: the directory holds the states of something else.
            OSError: the disk has too little room; no shard was written.
        """
        manifest = self.directory / "manifest.json"
        if manifest.exists() and (difference := self._difference(manifest)) is not None:
            if not replace:
                raise ConfigurationError(
                    f"{manifest} is of other states: {difference}. Delete {self.directory}, or pass "
                    "--overwrite or --cache_hidden_states false"
                )
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        write_json(manifest, self.header)
        if replace:
            for shard in self._present():
                if self._damage(shard) is not None:
                    self.path(shard).unlink()
        missing = [shard for shard in range(len(self.ends)) if not self.path(shard).exists()]
        if not missing:
            line.say(f"hidden states in {self.directory} are those of this run")
            return missing
        size = sum(self._num_states(shard) for shard in missing) * self.size * self.dtype.itemsize
        room = shutil.disk_usage(self.directory).free
        if size > room:
            raise OSError(
                f"cache_hidden_states needs {size / 2**30:.1f} GiB in {self.directory}, which has "
                f"{room / 2**30:.1f} GiB free; choose cache_dtype=bfloat16, fewer documents, or "
                "cache_hidden_states=false"
            )
        line.say(
            f"hidden states of {len(self.documents)} documents: {size / 2**20:.0f} MiB to write in "
            f"{self.directory}, {len(missing)} of {len(self.ends)} shards; {room / 2**30:.1f} GiB are free"
        )
        return missing

    def write(
        self, shards: Sequence[int], base: CausalLM, options: DataOptions, line: ProgressReporter
    ) -> None:
        """Compute and write ``shards``.

        Raises:
            OSError: the disk refused; the shards before are whole.
        """
        for number, shard in enumerate(shards, start=1):
            states = self._computed(shard, base, options)
            metadata = {"manifest": self._digest, "sha256": _checksum(states)}
            with replaced_file(self.path(shard)) as partial:
                save_file({"states": states}, partial, metadata=metadata)
            line.show(number / len(shards))

    def check(self, shards: Iterable[int]) -> None:
        """Raise ConfigurationError for the first of ``shards`` that is not there or not as it was written."""
        for shard in shards:
            if (damage := self._damage(shard)) is not None:
                raise ConfigurationError(
                    f"{self.path(shard)} {damage}; delete it, and the same command with --resume auto stores "
                    "it again. On several machines the directory must be one that all of them see"
                )

    def path(self, shard: int) -> Path:
        return self.directory / f"{shard:05d}.safetensors"

    def span(self, index: int) -> slice:
        """The positions of the document at ``index`` among those of all documents."""
        return slice(self.starts[index], self.starts[index + 1])

    def of(self, indices: Iterable[int]) -> Tensor:
        """The kept states (P, (1 + L) * D) of the documents at ``indices``, one after the other."""
        return torch.from_numpy(np.concatenate([self._bits(index) for index in indices])).view(self.dtype)

    def row(self, index: int) -> Tensor:
        """The states (T, (1 + L) * D) of the document at ``index``, zeros where none are kept."""
        needed = torch.from_numpy(self.needed[self.span(index)])
        states = torch.zeros(len(needed), self.size, dtype=self.dtype)
        states[needed] = self.of([index])
        return states

    def _bits(self, index: int) -> np.ndarray:
        shard = int(np.searchsorted(self.ends, index, side="right"))
        if shard not in self._opened:
            self._opened[shard] = self._mapped(shard)
        span, begin = self.span(index), self.first[self.starts[self._first_document(shard)]]
        return self._opened[shard][self.first[span.start] - begin : self.first[span.stop] - begin]

    def _mapped(self, shard: int) -> np.ndarray:
        """The states of a whole shard as bits, (P, (1 + L) * D)."""
        with self.path(shard).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
        shape = (self._num_states(shard), self.size)
        if not shape[0]:
            return np.zeros(shape, _storage(self.dtype))
        return np.memmap(self.path(shard), _storage(self.dtype), mode="r", offset=8 + length, shape=shape)

    def _computed(self, shard: int, base: CausalLM, options: DataOptions) -> Tensor:
        start, end = self._first_document(shard), self.ends[shard]
        begin = self.first[self.starts[start]]
        states = torch.empty(self._num_states(shard), self.size, dtype=self.dtype)
        for batch in plan_in_order(self.documents.lengths[start:end], options):
            rows = [[start + index for index in row] for row in batch]
            found = frozen_states(base, collate(self.documents, rows), self.layers).to(self.dtype).cpu()
            for row, (index,) in zip(found, rows, strict=True):
                span = self.span(index)
                wanted = torch.from_numpy(self.needed[span])
                kept = row[: len(wanted)][wanted]
                states[self.first[span.start] - begin : self.first[span.stop] - begin] = kept
        return states

    def _first_document(self, shard: int) -> int:
        return self.ends[shard - 1] if shard else 0

    def _num_states(self, shard: int) -> int:
        bounds = self.starts[[self._first_document(shard), self.ends[shard]]]
        return int(np.diff(self.first[bounds])[0])

    def _present(self) -> list[int]:
        return [shard for shard in range(len(self.ends)) if self.path(shard).exists()]

    def _difference(self, manifest: Path) -> str | None:
        """How the states of ``manifest`` are others, in words."""
        try:
            earlier: dict[str, Any] = read_json(manifest)
        except ValueError as error:
            return str(error)
        for key, ours in self.header.items():
            if key != "base_model" and earlier.get(key) != ours:
                return f"{key} was {earlier.get(key)!r:.80} and is {ours!r:.80}"
        return None

    def _damage(self, shard: int) -> str | None:
        """What is wrong with a shard, in words."""
        path, size = self.path(shard), self._num_states(shard) * self.size * self.dtype.itemsize
        if not path.exists():
            return "is not there"
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not length or path.stat().st_size != 8 + length + size:
                return "is cut short, or no shard of these states"
            header = file.read(length)
        try:
            metadata = json.loads(header)["__metadata__"]
        except (ValueError, KeyError):
            return "is damaged: its header cannot be read"
        if metadata.get("manifest") != self._digest:
            return "belongs to other states than those of manifest.json"
        if metadata.get("sha256") != hashlib.sha256(self._mapped(shard).data).hexdigest():
            return "has other bytes than were written"
        return None


def _shard_ends(states_before: np.ndarray, bytes_of_state: int) -> list[int]:
    """The document behind the last one of each shard, given the states before each document (n + 1,)."""
    per_shard = max(1, SHARD_BYTES // bytes_of_state)
    shard_of = states_before[:-1] // per_shard
    return [*(np.flatnonzero(np.diff(shard_of)) + 1).tolist(), len(states_before) - 1]


def _checksum(states: Tensor) -> str:
    return hashlib.sha256(states.view(torch.uint8).numpy().data if len(states) else b"").hexdigest()


def _needed(documents: Documents, num_heads: int | None) -> np.ndarray:
    """(T,) bool over all tokens of all documents: whose state is kept."""
    if num_heads is None:
        return np.ones(documents.num_tokens, dtype=bool)
    starts = np.repeat(documents.starts[:-1], documents.lengths)
    positions = torch.from_numpy(np.arange(documents.num_tokens) - starts)
    return needed_states(torch.from_numpy(documents.is_label), positions, num_heads).numpy()


def _arithmetic(base: CausalLM) -> str:
    """The type that the base's matrix products run in: autocast's where it is on."""
    kind = base.device.type
    return str(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else base.dtype)


def _storage(dtype: torch.dtype) -> type[np.generic]:
    """numpy has no bfloat16: states are read as bits."""
    return np.int32 if dtype.itemsize == 4 else np.int16
