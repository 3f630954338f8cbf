"""Hidden states of the frozen base, computed once and kept in shards.

The base never changes, so neither do its states: the shards hold those that some depth predicts a label
from, for heads that read the text also those before them, and every later epoch does without the base's
layers.
:mod:`medusa.training.states.format` has the files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import medusa
from medusa.base.causal_lm import CausalLM, switch_length
from medusa.files import Layout, read_json, replaceable_files, write_json
from medusa.progress import ProgressReporter
from medusa.training.config.options import ConfigurationError, DataOptions
from medusa.training.data.batching import collate, plan_in_order
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import needed_states
from medusa.training.states.final_norm import final_norm
from medusa.training.states.format import (
    DOCUMENTS_FILE,
    MANIFEST,
    ROOM,
    StatesDirectory,
    digest_of_documents,
    shard_ends,
    write_documents,
)
from medusa.training.states.identity import identity_of
from medusa.training.states.live import LiveStates, states_width

STATES_LAYOUT = Layout(
    "stored states",
    (MANIFEST, ROOM, "*.safetensors", ".*.partial-*"),
    lambda directory: (directory / DOCUMENTS_FILE).exists(),
)
StateType = Literal["float32", "bfloat16", "float16"]


class StateFile(StatesDirectory):
    """The states of some documents in the shards of ``directory``, written or still to be written."""

    def __init__(
        self,
        directory: Path,
        base: CausalLM,
        documents: Documents,
        num_heads: int,
        dtype: StateType,
        layers: tuple[int, ...] = (),
        reads_text: bool = False,
    ):
        """Those that ``num_heads`` heads and the base predict labels from, and with ``reads_text`` all before
        them; ``layers`` are those that the heads fuse. Of ``base`` its embeddings and its configuration are
        enough here."""
        self.documents, self.layers, self._base = documents, layers, base
        needed = _needed(documents, num_heads, reads_text)
        starts, width = documents.starts, states_width(base, layers)
        states_before = np.concatenate([[0], np.cumsum(needed)])[starts]
        header = {
            "base_model": _whole_name(base),
            **identity_of(base),
            "base_dtype": str(base.dtype),
            "arithmetic": _arithmetic(base),
            "documents": digest_of_documents(documents.tokens, documents.is_label, needed, starts),
            "num_heads": num_heads,
            "layers": list(layers),
            "width": width,
            "dtype": dtype,
            "shards": shard_ends(states_before, width * getattr(torch, dtype).itemsize),
        }
        in_full = {**header, "arithmetic": header["base_dtype"]}
        if (manifest := directory / MANIFEST).exists() and _difference(manifest, in_full) is None:
            header = in_full  # such states are there and serve runs of any precision
        super().__init__(directory, header, starts, needed)

    def begin(self, replace: bool, line: ProgressReporter) -> list[int]:
        """Make the directory ready and say which shards are missing; for one process, which has it alone.

        ``replace`` takes away the states of something else, and shards that are damaged.

        Raises:
            ConfigurationError: the directory holds the states of something else.
            FileExistsError: it holds other things than states, which are not replaced.
            OSError: the disk has too little room; no shard was written.
        """
        manifest = self.directory / MANIFEST
        if manifest.exists() and (difference := _difference(manifest, self.header)) is not None:
            if not replace:
                raise ConfigurationError(
                    f"{manifest} is of other states: {difference}. Delete {self.directory}, or pass "
                    "--overwrite or --cache_hidden_states false"
                )
            line.say(
                f"replacing {len(replaceable_files(self.directory, STATES_LAYOUT))} files of other states"
            )
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        if not manifest.exists():
            documents = self.documents
            write_documents(self.directory, documents.tokens, documents.is_label, self.needed, self.starts)
            write_json(manifest, self.header)
        if replace:
            for shard in set(range(len(self.ends))) - set(self.missing()):
                if self.damage(shard) is not None:
                    self.path(shard).unlink()
        for left in self.directory.glob(".*.partial-*"):  # of a run that was killed
            left.unlink()
        missing = self.missing()
        if not missing:
            line.say(f"hidden states in {self.directory} are those of this run")
            return missing
        size = sum(self.num_states(shard) for shard in missing) * self.size * self.dtype.itemsize
        (self.directory / ROOM).unlink(missing_ok=True)  # of a run that died
        room = shutil.disk_usage(self.directory).free
        try:
            is_kept = size <= room and self.reserve(size)
        except OSError:
            is_kept, room = False, min(room, size - 1)
        if size > room:
            raise OSError(
                f"cache_hidden_states needs {size / 2**30:.1f} GiB in {self.directory}, which has "
                f"{room / 2**30:.1f} GiB free; choose cache_dtype=bfloat16, fewer documents, or "
                "cache_hidden_states=false"
            )
        line.say(
            f"hidden states of {len(self.documents)} documents: {size / 2**20:.0f} MiB to write in "
            f"{self.directory}, {len(missing)} of {len(self.ends)} shards; {room / 2**30:.1f} GiB were free, "
            f"{'and the room is kept' if is_kept else 'and this file system keeps no room'}"
        )
        return missing

    def compute(
        self, shards: Sequence[int], live: LiveStates, options: DataOptions, line: ProgressReporter
    ) -> None:
        """Compute and write ``shards``; all processes call it where ``live`` needs them, some with none.

        Raises:
            OSError: the disk refused; the shards before are whole.
        """
        in_full = self.header["arithmetic"] == self.header["base_dtype"]
        with torch.autocast(live.base.device.type, enabled=False) if in_full else nullcontext():
            for number, shard in enumerate(shards, start=1):
                self.write(shard, self._computed(shard, live, options), f"medusa {medusa.__version__}", True)
                line.show(number / len(shards))
            live.finish()

    def check(self, shards: Iterable[int]) -> None:
        """Raise ConfigurationError for the first of ``shards`` that is not there or not as it was written."""
        for shard in shards:
            if (damage := self.damage(shard)) is not None:
                raise ConfigurationError(
                    f"{self.path(shard)} {damage}; delete it, and the same command with --resume auto stores "
                    "it again. On several machines the directory must be one that all of them see"
                )

    def begin_reading(self) -> None:
        """Take the final norm from the base where a shard was stored before it.

        Raises:
            ConfigurationError: the base has none.
        """
        if not all(self.is_normed(shard) for shard in range(len(self.ends))):
            self.norm = final_norm(self._base)

    def _computed(self, shard: int, live: LiveStates, options: DataOptions) -> Iterator[tuple[int, Tensor]]:
        """The states of each document of a shard."""
        documents = self.documents_of(shard)
        lengths = self.documents.lengths[documents.start : documents.stop]
        for batch in plan_in_order(lengths, options, switch_length(self._base)):
            rows = [[documents.start + index for index in row] for row in batch]
            found = live.of(collate(self.documents, rows), self.layers)
            for states, (index,) in zip(found, rows, strict=True):
                yield index, states[: self.documents.lengths[index]]


def _difference(manifest: Path, header: Mapping[str, Any]) -> str | None:
    """How the states of ``manifest`` are others than those of ``header``, in words."""
    try:
        earlier: dict[str, Any] = read_json(manifest)
    except ValueError as error:
        return str(error)
    for key, ours in header.items():
        if key != "base_model" and earlier.get(key) != ours:
            return f"{key} was {earlier.get(key)!r:.80} and is {ours!r:.80}"
    return None


def _needed(documents: Documents, num_heads: int, reads_text: bool) -> np.ndarray:
    """(T,) bool over all tokens of all documents: whose state is kept."""
    starts = np.repeat(documents.starts[:-1], documents.lengths)
    positions = torch.from_numpy(np.arange(documents.num_tokens) - starts)
    needed = needed_states(torch.from_numpy(documents.is_label), positions, num_heads).numpy()
    if reads_text:
        for start, end in pairwise(documents.starts):
            last = needed[start:end].nonzero()[0][-1:]
            needed[start : start + int(last.sum()) + len(last)] = True
    return needed


def _arithmetic(base: CausalLM) -> str:
    """The type that the base's matrix products run in: autocast's where it is on."""
    kind = base.device.type
    return str(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else base.dtype)


def _whole_name(base: CausalLM) -> str:
    """The name of ``base``, as another program in another directory would call it."""
    path = Path(base.name_or_path)
    return str(path.resolve()) if base.name_or_path and path.is_dir() else base.name_or_path
