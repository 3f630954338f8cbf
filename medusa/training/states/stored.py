"""Hidden states of the frozen base, computed once and kept in shards; and a run's, stored or not.

The base never changes, so neither do its states: the shards hold the states from which some depth predicts a
label, for heads that read the text also all earlier ones, and later epochs need no layers of the base.
:mod:`medusa.training.states.format` has the files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import medusa
from medusa.base.causal_lm import CausalLM, hidden_size
from medusa.console import ProgressReporter
from medusa.files import Layout, read_json, replaceable_files, write_json
from medusa.heads.fingerprint import BaseFingerprint
from medusa.options import differences
from medusa.training.config import DataOptions
from medusa.training.data.batching import MicroBatch, PaddedBatch, collate
from medusa.training.data.dataset import Documents
from medusa.training.losses import needed_states
from medusa.training.states.base import DocumentStates, OnlineHiddenStates, has_own_arithmetic
from medusa.training.states.format import (
    DOCUMENTS,
    DOCUMENTS_FILE,
    MANIFEST,
    StatesDirectory,
    bytes_of_state,
    digest_of_documents,
    digest_of_weights,
    shard_ends,
    write_documents,
)

_STATES_LAYOUT = Layout(
    "stored states",
    (MANIFEST, "*.safetensors", ".*.partial-*"),
    lambda directory: (directory / DOCUMENTS_FILE).exists(),
)


class CachedHiddenStates(StatesDirectory):
    """The states of some documents in the shards of ``directory``, written or still to be written."""

    def __init__(
        self,
        directory: Path,
        base: CausalLM,
        documents: Documents,
        num_heads: int,
        dtype: str,
        layers: tuple[int, ...] = (),
        needs_context: bool = False,
        arithmetic: str | None = None,
    ):
        """The states from which ``num_heads`` heads and the base predict labels, and with ``needs_context``
        all before them; ``layers`` are the fused layers. ``base`` needs only embeddings and configuration
        here. ``arithmetic`` names whose it is, where another engine computes."""
        self.documents = documents
        self.layers = layers
        kind = base.device.type
        name = Path(base.name_or_path)
        # the type of matrix products is then another one
        has_autocast = torch.is_autocast_enabled(kind) and not has_own_arithmetic(base)
        needed = _needed(documents, num_heads, needs_context)
        parts = (documents.tokens, documents.is_label, needed, documents.starts)
        self._parts = dict(zip(DOCUMENTS, parts, strict=True))
        starts = documents.starts
        width = (1 + len(layers)) * hidden_size(base)
        states_before = np.concatenate([[0], np.cumsum(needed)])[starts]
        header = {
            "base_model": str(name.resolve()) if base.name_or_path and name.is_dir() else base.name_or_path,
            **_identity_of(base),
            "base_dtype": str(base.dtype),
            "arithmetic": arithmetic or str(torch.get_autocast_dtype(kind) if has_autocast else base.dtype),
            "documents": digest_of_documents(self._parts),
            "num_heads": num_heads,
            "layers": list(layers),
            "width": width,
            "dtype": dtype,
            "shards": shard_ends(states_before, bytes_of_state(dtype, 1 + len(layers), width)),
        }
        in_full = {**header, "arithmetic": header["base_dtype"]}
        manifest = directory / MANIFEST
        if arithmetic is None and manifest.exists() and _difference(manifest, in_full) is None:
            header = in_full  # such states are there and serve runs of any precision
        super().__init__(directory, header, starts, needed)

    def open(self, replace: bool, line: ProgressReporter) -> list[int]:
        """Make the directory ready and return the missing shards; for one process with exclusive access.

        ``replace`` takes away the states of something else, and shards that are damaged.

        Raises:
            ValueError: the directory holds the states of something else.
            FileExistsError: it holds other things than states, which are not replaced.
            OSError: the disk has too little room; no shard was written.
        """
        manifest = self.directory / MANIFEST
        difference = _difference(manifest, self.header) if manifest.exists() else None
        if difference is not None:
            if not replace:
                raise ValueError(
                    f"{manifest} is of other states: {difference}. Delete {self.directory}, or pass "
                    "--overwrite or --cache_hidden_states false"
                )
            files = replaceable_files(self.directory, _STATES_LAYOUT)
            line.say(f"replacing {len(files)} files of other states")
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        if not manifest.exists():
            write_documents(self.directory, self._parts)
            write_json(manifest, self.header)
        if replace:
            self.remove(self.damaged(set(range(len(self.ends))) - set(self.missing())), line)
        for left in self.directory.glob(".*.partial-*"):  # of a run that was killed
            left.unlink()
        missing = self.missing()
        if not missing:
            line.say(f"hidden states in {self.directory} belong to this run")
            return missing
        size = sum(self.num_states(shard) for shard in missing) * self.bytes_of_state
        room = shutil.disk_usage(self.directory).free
        if size > room:
            raise OSError(
                f"cache_hidden_states needs {size / 2**30:.1f} GiB in {self.directory}, which has "
                f"{room / 2**30:.1f} GiB free; choose cache_dtype=bfloat16 or float8, fewer documents, or "
                "cache_hidden_states=false"
            )
        line.say(
            f"hidden states of {len(self.documents)} documents: {size / 2**20:.0f} MiB to write in "
            f"{self.directory}, {len(missing)} shards ({len(self.ends) - len(missing)} are there); "
            f"{room / 2**30:.1f} GiB are free"
        )
        return missing

    def compute(
        self, shards: Sequence[int], states: DocumentStates, options: DataOptions, line: ProgressReporter
    ) -> None:
        """Compute and write ``shards``; all processes call it where ``states`` needs them, some with none.

        Raises:
            OSError: the disk refused; the shards before are whole.
        """
        in_full = self.header["arithmetic"] == self.header["base_dtype"]
        with torch.autocast(states.base.device.type, enabled=False) if in_full else nullcontext():
            number = sum(len(self.documents_of(shard)) for shard in shards)
            done = 0

            def counted(computed: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
                nonlocal done
                for pair in computed:
                    yield pair
                    done += 1
                    line.show(done / number, f"{done}/{number} documents")

            for shard in shards:
                computed = states.of_documents(self.documents, self.documents_of(shard), self.layers, options)
                self.write(shard, counted(computed), f"medusa {medusa.__version__}")
            states.finish()

    def damaged(self, shards: Iterable[int]) -> list[tuple[int, str]]:
        """Those of ``shards`` that are not as they were written, and why."""
        return [(shard, damage) for shard in shards if (damage := self.damage(shard)) is not None]

    def remove(self, damaged: Iterable[tuple[int, str]], line: ProgressReporter) -> None:
        """Take away ``damaged`` shards, which are then missing; for one process with exclusive access."""
        for shard, damage in damaged:
            line.say(f"{self.path(shard)} {damage}: its states are stored again")
            self.path(shard).unlink(missing_ok=True)

    def check(self, shards: Iterable[int]) -> None:
        """Raise ValueError for the first of ``shards`` that is not there or not as it was written."""
        for shard, damage in self.damaged(shards):
            raise ValueError(
                f"{self.path(shard)} {damage}, although it was stored again; on several machines states_dir "
                "must be a directory that all of them see"
            )


@dataclass(frozen=True)
class HiddenStateSource:
    """The base model of a run, and where its hidden states come from."""

    base: CausalLM
    """The base for everything but hidden states: without decoder layers where another source computes
    these."""
    live: OnlineHiddenStates
    stored: Mapping[str, CachedHiddenStates] = field(default_factory=dict)
    """Stored states of the "training" and the "held-out" documents, if any."""

    @classmethod
    def of(cls, base: CausalLM) -> HiddenStateSource:
        """The source for a base that this process runs by itself."""
        return cls(base, OnlineHiddenStates(base))

    def of_document(self, documents: Documents, name: str, index: int, layers: tuple[int, ...]) -> Tensor:
        """The states (T, (1 + L) * D) of one of the ``documents`` that are called ``name``; stored ones are
        zeros where none are kept."""
        stored = self.stored.get(name)
        if stored is not None:
            return stored.row(index)
        return self.live(collate(documents, [[index]]), layers)[0]

    def of_batch(
        self, documents: Documents, name: str, batch: MicroBatch, layers: tuple[int, ...]
    ) -> tuple[StateBatch, PaddedBatch]:
        """The states of a micro-batch of the ``documents`` that are called ``name``, on the base's device;
        and its rows. An empty micro-batch is one token."""
        padded = collate(documents, batch)
        base = self.base
        stored = self.stored.get(name)
        if stored is None:
            hidden = self.live(padded, layers)
        else:
            hidden = torch.zeros(*padded.input_ids.shape, stored.size, dtype=stored.dtype)
            for row, indices in zip(hidden, batch, strict=False):
                row_states = torch.cat([stored.row(index) for index in indices])
                row[: len(row_states)] = row_states
        # The token joined to a row's last state is never read.
        following = padded.input_ids.roll(-1, dims=1).to(base.device)
        rows = StateBatch(hidden.to(base.device, base.dtype), following, padded.positions.to(base.device))
        return rows, padded


class StateBatch(NamedTuple):
    """Rows of a micro-batch, as heads read them."""

    hidden: Tensor  # (B, T, (1 + L) * D); zeros where no state is kept
    next_tokens: Tensor  # (B, T) long; the token after each
    positions: Tensor  # (B, T) long; from 0 at the start of each document


def _difference(manifest: Path, header: Mapping[str, Any]) -> str | None:
    """The first difference between ``manifest`` and ``header``, in words."""
    try:
        earlier: dict[str, Any] = read_json(manifest)
    except ValueError as error:
        return str(error)
    ours = {key: value for key, value in header.items() if key != "base_model"}
    return next(iter(differences({key: earlier.get(key) for key in ours}, ours)), None)


def _needed(documents: Documents, num_heads: int, needs_context: bool) -> np.ndarray:
    """(T,) bool over all tokens of all documents: whose state is kept."""
    starts = np.repeat(documents.starts[:-1], documents.lengths)
    positions = torch.from_numpy(np.arange(documents.num_tokens) - starts)
    needed = needed_states(torch.from_numpy(documents.is_label), positions, num_heads).numpy()
    if needs_context:
        for start, end in pairwise(documents.starts):
            last = needed[start:end].nonzero()[0][-1:]
            needed[start : start + int(last.sum()) + len(last)] = True
    return needed


_NOT_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "architectures")
"""Keys of a configuration that do not change the model's arithmetic."""


def _identity_of(base: CausalLM) -> dict[str, str]:
    """``weights`` and ``configuration`` of ``base``, which change when the model does.

    A hub id has its commit, of a directory blocks of the weight files are read, and of a model that was made
    in memory its LM head is known. The configuration includes rotary settings, windows and scales.
    """
    config = base.config.to_dict()
    directory = Path(base.name_or_path)
    weights = digest_of_weights(directory) if base.name_or_path and directory.is_dir() else None
    commit = getattr(base.config, "_commit_hash", None)
    if commit is not None:
        weights = f"commit {commit}"
    return {
        "weights": weights or f"sample {BaseFingerprint.of(base).sample}",
        "configuration": _digest_of_settings(config),
    }


def written_identity(base: CausalLM) -> dict[str, str]:
    """The same of the files of ``base``, which a newer ``transformers`` does not change."""
    identity = _identity_of(base)
    directory = Path(base.name_or_path)
    if base.name_or_path and (directory / "config.json").is_file():
        identity["configuration"] = _digest_of_settings(read_json(directory / "config.json"))
    elif identity["weights"].startswith("commit "):
        del identity["configuration"]
    return identity


def _digest_of_settings(config: Mapping[str, Any]) -> str:
    settings = {key: each for key, each in config.items() if key not in _NOT_THE_MODEL and key[:1] != "_"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
