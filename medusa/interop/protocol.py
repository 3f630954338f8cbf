"""The interface of a format of another project, and shared checks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, embedding_weight, lm_head
from medusa.base.gguf_file import is_gguf
from medusa.files import read_json
from medusa.heads.checkpoint import HeadsCheckpoint, check_sizes
from medusa.heads.medusa_heads import MedusaHeads
from medusa.heads.protocol import Heads

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class ToExport:
    """Heads that are to be written for another project."""

    source: str
    """The user's name of the heads, for messages."""
    checkpoint: HeadsCheckpoint
    load: Callable[[], CausalLM]
    """Loads the base; called once, and not for heads that are refused anyway."""
    base_name: str
    """Where the other project finds the base: a hub id or a directory."""
    dtype: torch.dtype
    """Type of the written tensors."""

    @cached_property
    def base(self) -> CausalLM:
        """The base that the heads were trained on."""
        return self.load()


@dataclass(frozen=True)
class ExportedFiles:
    """A directory of another project, before it is written."""

    config: dict[str, Any]
    """config.json."""
    weights: dict[str, Tensor]
    """Tensors of model.safetensors; floats are written in the requested type."""
    changes: tuple[str, ...]
    """Sentences on parts of the heads that the format has no place for."""


@dataclass(frozen=True)
class ForeignHeads:
    """Heads that were read from a directory of another project, with the same guesses."""

    heads: Heads
    dtype: torch.dtype
    """Type of the tensors in the file, float32 where they differ; ``heads`` are in float32."""
    notes: tuple[str, ...] = ()
    """Notes on decisions while reading, as sentences."""


@dataclass(frozen=True)
class ReadRequest:
    """A directory to read heads from, and the base that they sit on."""

    directory: Path
    base: CausalLM
    trust_tensors: bool = False
    """Where config.json contradicts the tensors, go by the tensors; else that is an error."""
    fused_layers: tuple[int, ...] = ()
    """The layers that an EAGLE-3 head reads, in place of the layers in config.json."""
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
    """Heads of the kind as this format; a ValueError where it has no place for them. None: nothing is written
    in it."""
    serve: Callable[[str, str, int], str] | None = None
    """The command that serves (directory, base, number of heads)."""
    holds_base: bool = False
    """Whether the same files are the base too."""
    holds: type[Heads] = MedusaHeads
    """The kind of the heads."""
    training_flags: str = ""
    """Flags of ``medusa train``, beside the kind, for heads that it has a place for."""


def config_in(directory: Path) -> dict[str, Any]:
    """The config.json of a directory; empty without one."""
    path = directory / CONFIG_FILE
    return read_json(path) if path.exists() else {}


def named_base(directory: Path) -> str | None:
    """The base that the config.json of a directory names."""
    name = read_json(directory / CONFIG_FILE).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def checked_against_config(
    config: Mapping[str, Any],
    held: Mapping[str, Any],
    config_path: Path,
    where: Path,
    trust: bool,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Notes of what config.json says otherwise than the tensors, which hold ``held``, by key.

    A key without counterpart in the tensors (None) is no contradiction, nor a missing key, unless
    ``defaults`` has its default value.

    Raises:
        ValueError: there is one, and the tensors are not trusted.
    """
    notes = []
    for key, value in held.items():
        configured = {**(defaults or {}), **config}.get(key)
        if value is None or configured is None or configured == value:
            continue
        says = (
            f"says {key}={configured!r}"
            if key in config
            else f"leaves out {key}, which is then taken for {configured!r}"
        )
        text = f"{config_path} {says}, and {where.name} holds {value!r}"
        if not trust:
            raise ValueError(
                f"{text}; mend the file that is wrong, or import by the tensors: --trust-tensors"
            )
        notes.append(f"{text}: the tensors are right")
    return tuple(notes)


def check_fits(where: Path | str, size: int, vocabulary: int | None, base: CausalLM) -> None:
    """Raise ValueError unless heads of these sizes can sit on ``base``; None are heads without rows."""
    advice = "give the base that they were trained on: --base"
    check_sizes(base, size, vocabulary, f"{where} holds heads", advice)


def check_belongs(request: ToExport) -> None:
    """Raise ValueError unless the heads sit on the base itself, and on this one."""
    checkpoint = request.checkpoint
    source = request.source
    if checkpoint.adapter is not None:
        raise ValueError(
            f"{source} was trained with a LoRA adapter on the base (joint training), and vLLM would "
            "run the base without it: other text, and fewer right guesses. Train heads without --joint"
        )
    base = request.base
    config = checkpoint.heads.config
    check_fits(source, config.hidden_size, config.vocab_size, base)
    fingerprint = checkpoint.fingerprint
    difference = None if fingerprint is None else fingerprint.difference(base)
    if difference is not None:
        raise ValueError(
            f"{source} was trained on another model ({checkpoint.base_model!r}) than the base "
            f"{request.base_name!r}: {difference}. Give the base that it was trained on: --base"
        )


def base_rows(request: ToExport) -> Tensor:
    """The rows (V, D) of the base's LM head, for heads that score with them.

    Raises:
        ValueError: a matrix of rows is not all there is to it.
    """
    embedding = lm_head(request.base)
    rows = embedding_weight(embedding).detach()
    if getattr(embedding, "bias", None) is not None:
        raise ValueError(
            f"the LM head of {request.base_name!r} has a bias, which vLLM's heads have no "
            "place for; train heads with --unembedding full, which hold rows of their own"
        )
    if not rows.is_floating_point():
        raise ValueError(
            f"the LM head of {request.base_name!r} is quantised ({rows.dtype}), and vLLM "
            "needs its rows; give the base before it was quantised: --base"
        )
    return rows


def quantised_base(checkpoint: HeadsCheckpoint) -> str | None:
    """The name of the quantised file that heads were trained on; None where it was none."""
    fingerprint = checkpoint.fingerprint
    if fingerprint is None or not fingerprint.is_quantised:
        return None
    return PurePath(checkpoint.base_model).name


def shared_changes(request: ToExport) -> list[str]:
    """Sentences on a base that is a quantised file, and on the trees of the heads."""
    checkpoint = request.checkpoint
    changes = []
    trained_on = quantised_base(checkpoint)
    if trained_on is not None:
        changes.append(
            f"the heads were trained on the quantised file {trained_on!r}: over other weights of the same "
            "model, such as those of 16 bits, somewhat fewer guesses may be right"
        )
    if is_gguf(request.base_name):
        changes.append(
            f"the base is named as a GGUF file, {request.base_name!r}, with which vLLM also wants "
            "--tokenizer; to name the model's own repository: --base owner/name"
        )
    if checkpoint.tree is not None:
        changes.append(
            f"the candidate tree of {checkpoint.tree.num_nodes} nodes is left out: vLLM verifies a "
            f"chain of the {checkpoint.heads.num_heads} best guesses"
        )
    if checkpoint.tuned:
        changes.append(f"the trees tuned for {len(checkpoint.tuned)} runtimes are left out")
    return changes


def vllm_command(method: str, directory: str, base: str, num_heads: int) -> str:
    """The command that serves an export with vLLM, which would guess the method from the directory's name."""
    settings = json.dumps({"method": method, "model": directory, "num_speculative_tokens": num_heads})
    return shlex.join(["vllm", "serve", base, "--speculative-config", settings])
