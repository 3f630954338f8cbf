"""``medusa push``: heads onto the Hugging Face hub, with a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from medusa.base.causal_lm import CausalLM
from medusa.base.loading import load_base
from medusa.cli.commands import PushOptions
from medusa.cli.interop import claim_output
from medusa.cli.loading import log_version, recorded_base
from medusa.cli.next_steps import command
from medusa.cli.options import words_of
from medusa.files import replaced_directory
from medusa.heads.checkpoint import HeadsCheckpoint, heads_directory, load_heads, weights_digest
from medusa.hub import looks_like_repository, split_revision
from medusa.interop.protocol import ToExport
from medusa.interop.repository import (
    REPOSITORY_LAYOUT,
    CardFacts,
    check_repository_name,
    files_in,
    push_folder,
    read_evaluation,
    write_repository,
)
from medusa.measurement.report import end_with_json
from medusa.progress import print_list
from medusa.tables import counted


def push(options: PushOptions) -> list[str]:
    """Write a repository of heads and push it, or leave it in the folder of a dry run."""
    log = log_version()
    check_repository_name(options.repository)
    directory = heads_directory(options.heads)
    checkpoint = load_heads(directory)
    base = hub_base(options, checkpoint)
    report = options.evaluation
    facts = CardFacts(
        options.repository,
        base,
        checkpoint,
        options.exports,
        None if report is None else read_evaluation(report, weights_digest(directory)),
        options.license,
        options.datasets,
    )
    load, dtype = partial(_load_base, options, checkpoint, base), getattr(torch, options.dtype)
    request = ToExport(options.heads, checkpoint, load, split_revision(base)[0], dtype)
    with _folder(options) as folder:
        changes = write_repository(folder, directory, facts, request)
        files = files_in(folder)
        size = sum((folder / name).stat().st_size for name in files)
        pushed = None
        if options.dry_run is None:
            pushed = push_folder(
                folder, options.repository, base, private=options.private, overwrite=options.overwrite
            )
    where = str(options.dry_run) if pushed is None else pushed.url
    deleted = [] if pushed is None else pushed.deleted
    listed = [*files, *(f"deleted: {name}" for name in deleted)]
    print_list(log, f"{where}: {counted(len(files), 'file')}, {size / 1e6:,.1f} MB", listed)
    print_list(log, "note:", [*changes, *_missing(options)])
    end_with_json(
        {
            "repository": options.repository,
            "base": base,
            "files": files,
            "deleted": deleted,
            "bytes": size,
            "changes": changes,
            "dry_run": where if pushed is None else None,
            "url": None if pushed is None else pushed.url,
            "commit": None if pushed is None else pushed.commit,
        },
        options.report.json,
    )
    if pushed is None:
        return [command("push", *words_of(replace(options, dry_run=None)))]
    return [command("chat", "--base", base, "--heads", options.repository)]


def hub_base(options: PushOptions, checkpoint: HeadsCheckpoint) -> str:
    """The base's hub id, perhaps with a revision.

    Raises:
        ValueError: what is given or recorded can be no hub id.
    """
    name = options.base or checkpoint.base_model
    where = "base" if options.base else f"{options.heads} records the base, which"
    if not name or Path(name).exists() or not looks_like_repository(name) or "/" not in name:
        raise ValueError(
            f"{where} must be a hub id, so that others find it, got {name!r}; give the one of the same "
            "weights: --base owner/name"
        )
    return name


def _load_base(options: PushOptions, checkpoint: HeadsCheckpoint, base: str) -> CausalLM:
    """The base for exports: where the heads were trained if it is still there, else the hub's."""
    recorded = recorded_base(checkpoint, options.heads)
    name = recorded if Path(recorded).is_dir() else base
    return load_base(name, dtype="auto", trust_remote_code=options.trust_remote_code)


@contextmanager
def _folder(options: PushOptions) -> Iterator[Path]:
    """The folder of the dry run, written whole or not at all; else one that goes with the push."""
    if options.dry_run is not None:
        claim_output(
            options.dry_run, options.overwrite, REPOSITORY_LAYOUT, (options.heads, options.evaluation)
        )
        with replaced_directory(options.dry_run, options.overwrite) as folder:
            yield folder
    else:
        with TemporaryDirectory(prefix="medusa-push-") as temporary:
            yield Path(temporary)


def _missing(options: PushOptions) -> list[str]:
    """What the reader of the card would like to know and is not told, and what is told to everyone."""
    lines = []
    if options.dry_run is not None:
        lines.append(
            f"nothing is pushed: read {options.dry_run}/README.md first. With a card of your own: `hf upload "
            f"{options.repository} {options.dry_run}`"
        )
    if options.evaluation is None:
        lines.append(
            "the card says that nothing was measured: --evaluation takes what `medusa evaluate` writes"
        )
    if options.license is None:
        lines.append("the card names no licence: --license")
    return [*lines, "provenance.json tells everyone the commands, paths and versions of the training"]
