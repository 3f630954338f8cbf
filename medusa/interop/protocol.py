"""What a format of another project is to us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.heads.checkpoint import HeadsCheckpoint
from medusa.heads.eagle3 import Heads


@dataclass(frozen=True)
class ToExport:
    """Heads that are to be written for another project."""

    source: str
    """What the user called them, for messages."""
    checkpoint: HeadsCheckpoint
    load: Callable[[], CausalLM]
    """Loads the base; called once, and not for heads that are refused anyway."""
    base_name: str
    """Where the other project finds the base: a hub id or a directory."""
    dtype: torch.dtype
    """Of the tensors that are written."""

    @cached_property
    def base(self) -> CausalLM:
        """The base that the heads were trained on."""
        return self.load()


@dataclass(frozen=True)
class ExportedFiles:
    """A directory of another project, before it is written."""

    config: dict[str, Any]
    """config.json."""
    weights_file: str
    weights: dict[str, Tensor]
    changes: tuple[str, ...]
    """What became of parts of the heads that the format has no place for, as sentences."""


@dataclass(frozen=True)
class ForeignHeads:
    """Heads that were read from a directory of another project: they guess what they guess there."""

    heads: Heads
    dtype: torch.dtype
    """Of the tensors in the file, float32 where they differ; ``heads`` are in float32."""
    notes: tuple[str, ...] = ()
    """What was decided while reading, as sentences."""


@dataclass(frozen=True)
class ReadRequest:
    """A directory to read heads from, and the base that they sit on."""

    directory: Path
    base: CausalLM
    trust_tensors: bool = False
    """Where config.json contradicts the tensors, go by the tensors; else that is an error."""
    fused_layers: tuple[int, ...] = ()
    """The layers that an EAGLE-3 head reads, in place of those that config.json speaks of."""
    max_depth: int | None = None
    """How deep an EAGLE-3 head drafts, in place of what config.json says."""


@dataclass(frozen=True)
class ForeignFormat:
    """One format of another project."""

    name: str
    consumer: str
    """Who reads it, as a sentence calls them."""
    read: Callable[[ReadRequest], ForeignHeads]
    """The heads of a directory; a ValueError or FileNotFoundError that names file and key where the consumer
    would load something else, or nothing."""
    base_of: Callable[[Path], str | None]
    """The base that a directory names; None where it names none."""
    recognises: Callable[[Path], bool] | None = None
    """Whether a directory is of this format; None where another format covers it."""
    export: Callable[[ToExport], ExportedFiles] | None = None
    """Heads as this format; a ValueError where it has no place for them. None: nothing is written in it."""
    serve: Callable[[str, str, int], str] | None = None
    """The command that serves (directory, base, number of heads)."""
    holds_base: bool = False
    """Whether the same files are the base too."""
    holds_eagle3: bool = False
    """Whether the heads are an EAGLE-3 head, whose layers and depth can be given."""
