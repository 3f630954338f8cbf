"""Whole directories: heads out to a format of another project, and in from one."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import medusa
from medusa.base.causal_lm import CausalLM
from medusa.files import check_writable_target, replaced_directory, write_json
from medusa.heads.checkpoint import HeadsCheckpoint, check_finite, save_heads
from medusa.heads.fingerprint import BaseFingerprint
from medusa.hub import hub_directory
from medusa.interop.medusa_reference import CONFIG_FILE
from medusa.interop.protocol import ExportedFiles, ForeignFormat, ForeignHeads, ReadRequest, ToExport
from medusa.interop.registry import FORMATS

DOWNLOADED = (
    CONFIG_FILE,
    "medusa_lm_head.*",
    "model*.safetensors",
    "pytorch_model*.bin",
    "*.index.json",
)
"""The files of a hub repository that are read."""


def export_heads(request: ToExport, to: str, output: str | Path, overwrite: bool = False) -> ExportedFiles:
    """Write heads for another project into the directory ``output``, whole or not at all.

    Args:
        to: a name of :data:`medusa.interop.registry.FORMATS` that has an export.

    Raises:
        FileExistsError: ``output`` holds something and ``overwrite`` is false.
        ValueError: the format has no place for such heads, or a weight is not finite in the type to write.
    """
    export = FORMATS[to].export
    if export is None:
        written = ", ".join(name for name, each in FORMATS.items() if each.export is not None)
        raise ValueError(f"heads are not written as {to!r}; choose one of {written}")
    if not overwrite:
        check_writable_target(output)
    files = export(request)
    check_finite(files.weights, f"the heads in {request.dtype}")
    with replaced_directory(output, overwrite) as partial:
        write_json(partial / CONFIG_FILE, files.config)
        save_file(files.weights, partial / files.weights_file, metadata={"format": "pt"})
    return files


def import_heads(
    request: ReadRequest,
    foreign: ForeignFormat,
    output: str | Path,
    *,
    source: str,
    base_name: str,
    overwrite: bool = False,
) -> tuple[HeadsCheckpoint, ForeignHeads]:
    """Read heads of another project and write them as a heads directory of ours, whole or not at all.

    They are written in the type that their file has.

    Args:
        source: where they come from, for the record.
        base_name: the base, as heads record it.

    Raises:
        FileExistsError: ``output`` holds something and ``overwrite`` is false.
        FileNotFoundError: a file is missing.
        ValueError: the files are damaged, contradict each other, or belong to another base.
    """
    if not overwrite:
        check_writable_target(output)
    read = foreign.read(request)
    record = {
        "command": shlex.join(sys.orig_argv),
        "medusa_version": medusa.__version__,
        "imported_from": source,
        "format": foreign.name,
        "notes": list(read.notes),
    }
    fingerprint = BaseFingerprint.of(request.base)
    checkpoint = HeadsCheckpoint(read.heads, base_name, provenance=record, fingerprint=fingerprint)
    save_heads(checkpoint, output, overwrite, None if read.dtype == torch.float32 else read.dtype)
    return checkpoint, read


def foreign_directory(source: str | Path) -> Path:
    """The directory ``source``, or the copy of a hub repository of that name.

    Raises:
        FileNotFoundError: there is neither.
    """
    return hub_directory(source, DOWNLOADED, "heads", "give a directory, or a hub id of the form owner/name")


def save_base(base: CausalLM, tokenizer: Any, output: str | Path) -> None:
    """Write a base model and its tokenizer without the heads that its files hold, whole or not at all."""
    for key in ("medusa_num_heads", "medusa_num_layers"):
        if hasattr(base.config, key):
            delattr(base.config, key)
    with replaced_directory(output) as partial:
        base.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
