"""Hidden states of the frozen base, computed once and kept in a file.

The base never changes, so neither do its states: the file holds those that some depth predicts a label
from, or all for heads that read whole documents, and every later epoch does without the base's layers.

    states.bin     (P, (1 + L) * D) bits of the states, document after document
    states.json    what they were made of; written last, so that a file without it is not used
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, hidden_size, hidden_states
from medusa.files import read_json, write_json
from medusa.progress import ProgressReporter
from medusa.training.config.options import DataOptions
from medusa.training.data.batching import PaddedBatch, collate, plan_in_order
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import needed_states

StateType = Literal["float32", "bfloat16", "float16"]


def frozen_states(base: CausalLM, padded: PaddedBatch, layers: tuple[int, ...] = ()) -> Tensor:
    """States (B, T, (1 + L) * D) of a micro-batch, without gradients."""
    ids, positions = padded.input_ids.to(base.device), padded.positions.to(base.device)
    with torch.no_grad():
        return hidden_states(base, ids, position_ids=positions, layers=layers)


def states_width(base: CausalLM, layers: tuple[int, ...]) -> int:
    """(1 + L) * D: the numbers of one token's states."""
    return (1 + len(layers)) * hidden_size(base)


class StateFile:
    """The states of some documents, in ``directory``, where :func:`store_states` wrote them."""

    def __init__(self, directory: Path, documents: Documents, num_heads: int | None):
        header = read_json(directory / "states.json")
        self.dtype = getattr(torch, header["dtype"])
        self.size = header["width"]
        self.starts = documents.starts
        self.needed = _needed(documents, num_heads)
        self.first = np.concatenate([[0], np.cumsum(self.needed)])  # of each position: states before it
        shape = (int(self.first[-1]), self.size)
        self.states = np.memmap(directory / "states.bin", mode="r", shape=shape, dtype=_storage(self.dtype))

    def span(self, index: int) -> slice:
        """The positions of the document at ``index`` among those of all documents."""
        return slice(self.starts[index], self.starts[index + 1])

    def of(self, indices: Iterable[int]) -> Tensor:
        """The kept states (P, (1 + L) * D) of the documents at ``indices``, one after the other."""
        spans = [self.span(index) for index in indices]
        bits = np.concatenate([self.states[self.first[span.start] : self.first[span.stop]] for span in spans])
        return torch.from_numpy(bits).view(self.dtype)


def states_size(
    base: CausalLM,
    documents: Documents,
    num_heads: int | None,
    dtype: StateType,
    layers: tuple[int, ...] = (),
) -> int:
    """Bytes that the states of ``documents`` take on disk."""
    width = states_width(base, layers)
    return int(_needed(documents, num_heads).sum()) * width * getattr(torch, dtype).itemsize


def store_states(
    directory: Path,
    base: CausalLM,
    documents: Documents,
    num_heads: int | None,
    dtype: StateType,
    options: DataOptions,
    line: ProgressReporter,
    layers: tuple[int, ...] = (),
) -> None:
    """Write the states of ``documents`` into ``directory``, unless it holds exactly these already.

    Those that ``num_heads`` heads and the base predict labels from, or all when it is None; ``layers`` are
    those that the heads fuse.

    Raises:
        OSError: the disk has too little room; nothing was written.
    """
    header = _header(base, documents, num_heads, dtype, layers)
    if (directory / "states.json").exists() and read_json(directory / "states.json") == header:
        line.say(f"hidden states in {directory} are those of this run")
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "states.json").unlink(missing_ok=True)
    size = states_size(base, documents, num_heads, dtype, layers)
    room = shutil.disk_usage(directory).free
    if size > room:
        raise OSError(
            f"cache_hidden_states needs {size / 2**30:.1f} GiB in {directory}, which has "
            f"{room / 2**30:.1f} GiB free; choose cache_dtype=bfloat16, fewer documents, or "
            "cache_hidden_states=false"
        )
    line.say(f"hidden states of {len(documents)} documents: {size / 2**20:.0f} MiB in {directory}")
    needed = _needed(documents, num_heads)
    first = np.concatenate([[0], np.cumsum(needed)])
    num_done = 0
    partial = directory / "states.bin.partial"
    shape = (int(first[-1]), header["width"])
    stored = np.memmap(partial, mode="w+", shape=shape, dtype=_storage(getattr(torch, dtype)))
    for batch in plan_in_order(documents.lengths, options):
        padded = collate(documents, batch)
        states = frozen_states(base, padded, layers).to(getattr(torch, dtype)).cpu()
        for row, (index,) in zip(states, batch, strict=True):
            span = slice(documents.starts[index], documents.starts[index + 1])
            wanted = torch.from_numpy(needed[span])
            kept = row[: len(wanted)][wanted]
            stored[first[span.start] : first[span.stop]] = (
                kept.view(_integers(kept.dtype)).numpy().view(stored.dtype)
            )
            num_done += len(wanted)
        line.show(num_done / documents.num_tokens)
    stored.flush()
    del stored
    os.replace(partial, directory / "states.bin")
    write_json(directory / "states.json", header)


def _needed(documents: Documents, num_heads: int | None) -> np.ndarray:
    """(T,) bool over all tokens of all documents: whose state is kept."""
    if num_heads is None:
        return np.ones(documents.num_tokens, dtype=bool)
    starts = np.repeat(documents.starts[:-1], documents.lengths)
    positions = torch.from_numpy(np.arange(documents.num_tokens) - starts)
    return needed_states(torch.from_numpy(documents.is_label), positions, num_heads).numpy()


def _header(
    base: CausalLM, documents: Documents, num_heads: int | None, dtype: str, layers: tuple[int, ...]
) -> dict:
    """What the file was made of: another header is another file."""
    return {
        "base_model": base.name_or_path,
        "base_dtype": str(base.dtype),
        "arithmetic": _arithmetic(base),
        "documents": documents.digest(),
        "num_heads": num_heads,
        "layers": list(layers),
        "width": states_width(base, layers),
        "dtype": dtype,
    }


def _arithmetic(base: CausalLM) -> str:
    """The type that the base's matrix products run in: autocast's where it is on."""
    kind = base.device.type
    return str(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else base.dtype)


def _storage(dtype: torch.dtype) -> type[np.generic]:
    """numpy has no bfloat16: states are stored as bits."""
    return np.int32 if dtype.itemsize == 4 else np.int16


def _integers(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16
