"""``medusa export``, ``import``, ``check`` and ``push``: heads for others, from them, and on the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from medusa.assets import base_named
from medusa.base.causal_lm import CausalLM
from medusa.base.loading import BaseSource, find_base, load_tokenizer
from medusa.cli.loading import (
    chosen_device,
    encode_prompts,
    load_prompts,
    log_version,
    recorded_base,
)
from medusa.cli.option_types import CheckOptions, ExportOptions, ImportOptions, PushOptions
from medusa.cli.options import answer_command, command, to_argv
from medusa.console import PERCENT, counted, log_console, print_list, track
from medusa.engine.weights.load import load_base
from medusa.files import Layout, check_writable_target, replaceable_files, replaced_directory
from medusa.heads.checkpoint import (
    HEADS_LAYOUT,
    HeadsCheckpoint,
    heads_directory,
    load_heads,
    weights_digest,
)
from medusa.heads.eagle3 import Eagle3Head
from medusa.heads.protocol import Heads
from medusa.hub import looks_like_repository, split_revision
from medusa.interop.conversion import (
    EXPORT_LAYOUT,
    FORMATS,
    ChainCheck,
    check_chain,
    export_heads,
    foreign_directory,
    format_of,
    import_heads,
    save_base,
)
from medusa.interop.protocol import ForeignFormat, ReadRequest, ToExport
from medusa.interop.repository import (
    REPOSITORY_LAYOUT,
    CardFacts,
    check_repository_name,
    files_in,
    push_folder,
    read_evaluation,
    write_repository,
)
from medusa.measurement.report import Report, end_with_json
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import CandidateTree


def export(options: ExportOptions) -> list[str]:
    """Write heads for another project; list its differences."""
    log = log_version()
    foreign = FORMATS[options.to]
    _claim_output(options.output, options.overwrite, EXPORT_LAYOUT, (options.heads, options.base))
    checkpoint = load_heads(options.heads)
    _check_may_be_shared(options, checkpoint)
    name = base_named(options.base or recorded_base(checkpoint, options.heads))  # others know no name of ours
    dtype = getattr(torch, options.dtype)
    load = partial(_loaded, name, trust_remote_code=options.trust_remote_code)
    request = ToExport(options.heads, checkpoint, load, split_revision(name)[0], dtype)
    files = export_heads(request, options.to, options.output, options.overwrite)
    size = sum(path.stat().st_size for path in options.output.iterdir())
    log.print(f"{options.output}: model.safetensors and config.json, {size / 1e6:,.1f} MB", soft_wrap=True)
    changes = list(files.changes)
    revision = split_revision(name)[1]
    if revision is not None:
        changes.append(f"the base is named without its revision {revision!r}: tell {foreign.consumer} of it")
    print_list(log, f"what {foreign.consumer} does otherwise:", changes)
    end_with_json(
        {
            "output": str(options.output),
            "format": options.to,
            "base": name,
            "bytes": size,
            "changes": changes,
            "serve": _serve(foreign, str(options.output), name, checkpoint.heads),
        },
        options.report.json,
    )
    return [command("check", options.output, "--as", options.to, "--base", name)]


def import_foreign(options: ImportOptions) -> list[str]:
    """Read heads of another project into a heads directory; report them."""
    log = log_version()
    _claim_output(options.output, options.overwrite, HEADS_LAYOUT, (options.source, options.base))
    if options.base_output is not None:
        check_writable_target(options.base_output)  # nothing says that a model there is ours
    directory = foreign_directory(options.source)
    foreign = format_of(directory)
    _check_eagle3_alone(
        foreign, options.source, fused_layers=options.fused_layers, max_depth=options.max_depth
    )
    if options.base_output is not None and not foreign.holds_base:
        raise ValueError(
            f"base_output goes with a Medusa-2 model, whose files hold base and heads; {options.source} "
            "holds only heads; leave --base-output out"
        )
    name = options.base or _base_of(directory, foreign)
    source = find_base(name, trust_remote_code=options.trust_remote_code)
    base = _loaded(source, trust_remote_code=options.trust_remote_code)
    own_name = str(options.base_output or name)
    layers = tuple(options.fused_layers or ())
    request = ReadRequest(directory, base, options.trust_tensors, layers, options.max_depth)
    checkpoint, foreign_heads = import_heads(
        request,
        foreign,
        options.output,
        source=options.source,
        base_name=own_name,
        overwrite=options.overwrite,
    )
    tokenizer = load_tokenizer(source)
    if options.base_output is not None:
        save_base(base, tokenizer, options.base_output)
    heads = checkpoint.heads
    log.print(
        f"{options.output}: {heads.in_words()}, in {foreign.consumer}'s format, for {own_name}",
        soft_wrap=True,
    )
    print_list(log, "decided:", foreign_heads.notes)
    end_with_json(
        {
            "output": str(options.output),
            "format": foreign.name,
            "base": own_name,
            "kind": heads.kind,
            "num_heads": heads.num_heads,
            **asdict(heads.config),
            "notes": foreign_heads.notes,
        },
        options.report.json,
    )
    return [
        answer_command(tokenizer, "--base", own_name, "--heads", options.output),
        command("tune", "--base", own_name, "--heads", options.output),
    ]


def check(options: CheckOptions) -> list[str]:
    """Hold a directory to its consumer's rules, and measure its heads in a chain."""
    log = log_version()
    foreign = FORMATS[options.as_]
    directory = Path(options.directory)
    device = chosen_device(options.device)
    if not directory.is_dir():
        raise FileNotFoundError(f"no directory at {options.directory!r}; give one that `medusa export` wrote")
    _check_eagle3_alone(foreign, options.directory, max_depth=options.max_depth)
    prompts = load_prompts(options.prompts)
    name = base_named(options.base or _base_of(directory, foreign))
    source = find_base(name, trust_remote_code=options.trust_remote_code)
    base = load_base(source, device=device, dtype=options.dtype)
    foreign_heads = foreign.read(ReadRequest(directory, base, max_depth=options.max_depth))
    heads = foreign_heads.heads
    log.print(f"{directory}: {foreign.consumer} loads {heads.in_words()}", soft_wrap=True)
    print_list(log, "decided:", foreign_heads.notes)
    tokenizer = load_tokenizer(source)
    chain = CandidateTree.chain(heads.num_heads)
    model = MedusaModel(base, heads, chain, tokenizer, engine="auto")
    encoded = encode_prompts(model, prompts, options.max_new_tokens)
    result = check_chain(model, track(encoded, "answering"), options.max_new_tokens)
    serve = _serve(foreign, options.directory, name, heads)
    _check_report(options, name, result, serve).publish(options.report.json)
    if not result.is_trained:
        raise ValueError(
            f"the first head of {directory} is right for {result.top1[0]:.1%} of the tokens, an untrained "
            f"one for {result.untrained_top1[0]:.1%}: these heads would slow {foreign.consumer} down. Do "
            f"they belong to the base {name!r}, were they trained for long, and do they decode better here "
            "before the export?"
        )
    return [serve]


def _claim_output(
    output: Path, overwrite: bool, layout: Layout, sources: Iterable[str | Path | None] = ()
) -> None:
    """See before long work that ``output`` may be written, and name what ``overwrite`` replaces."""
    if not overwrite:
        check_writable_target(output)
    gone = replaceable_files(output, layout, filter(None, sources))
    print_list(log_console(), "to be replaced:", gone)


def _base_of(directory: Path, foreign: ForeignFormat) -> str:
    name = foreign.base_of(directory)
    if name is None:
        raise ValueError(f"{directory / 'config.json'} names no base model; give it: --base")
    return name


def _check_eagle3_alone(foreign: ForeignFormat, source: str, **eagle3_options: object) -> None:
    """Raise ValueError where one of ``eagle3_options`` is given for heads of another kind."""
    for name, value in eagle3_options.items():
        if value is not None and foreign.holds is not Eagle3Head:
            raise ValueError(
                f"{name} is for an EAGLE-3 head, and {source} holds Medusa heads; leave --"
                f"{name.replace('_', '-')} out"
            )


def _check_report(options: CheckOptions, base: str, result: ChainCheck, serve: str) -> Report:
    """Acceptance by position, beside what untrained heads guess."""
    statistics = result.statistics
    accepted = statistics.acceptance_rate
    reached = statistics.conditional_acceptance_rate
    report = Report(
        {
            "format": options.as_,
            "directory": options.directory,
            "base": base,
            "num_tokens": statistics.num_tokens,
            "num_steps": statistics.num_steps,
            "tokens_per_step": statistics.tokens_per_step,
            "acceptance_rate": accepted,
            "top1": result.top1,
            "untrained_top1": result.untrained_top1,
            "serve": serve,
        }
    )
    rows = list(zip(accepted, reached, result.top1, result.untrained_top1, strict=True))
    report.add_table(
        f"A chain of {len(rows)} guesses, greedily: {statistics.tokens_per_step:.2f} tokens per step over "
        f"{statistics.num_steps} steps",
        {
            "position": (0, "{}"),
            **{
                name: (at, PERCENT)
                for at, name in enumerate(("accepted", "reached", "top 1", "untrained"), 1)
            },
        },
        [(position, *rates) for position, rates in enumerate(rows, start=1)],
        note="accepted: of all steps, the consumer's acceptance per position; reached: of the steps that "
        "accepted the position before. top 1: the head's best guess is right (teacher-forced).",
    )
    return report


def _serve(foreign: ForeignFormat, directory: str, base: str, heads: Heads) -> str:
    assert foreign.serve is not None, "formats that are written say how they are served"
    return foreign.serve(directory, split_revision(base)[0], heads.num_heads)


# ------------------------------------------------------------------ the hub


def push(options: PushOptions) -> list[str]:
    """Write a repository of heads and push it, or leave it in the folder of a dry run."""
    log = log_version()
    check_repository_name(options.repository)
    directory = heads_directory(options.heads)
    checkpoint = load_heads(directory)
    _check_may_be_shared(options, checkpoint)
    base = _hub_base(options, checkpoint)
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
    load = partial(_load_base, options, checkpoint, base)
    dtype = getattr(torch, options.dtype)
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
        return [command("push", *to_argv(replace(options, dry_run=None)))]
    return [command("chat", "--base", base, "--heads", options.repository)]


def _check_may_be_shared(options: ExportOptions | PushOptions, checkpoint: HeadsCheckpoint) -> None:
    """Refuse heads that learned from a user's own texts: weights, token map and provenance tell of them.

    Raises:
        ValueError: they did, and nobody said that they may be shared.
    """
    learned = checkpoint.provenance.get("learned", {})
    if learned.get("is_private") and not options.share_learned:
        raise ValueError(
            f"the heads in {options.heads!r} were learned from texts of your own "
            f"({', '.join(learned['learned_from'])}), of which they tell others; --share-learned writes them "
            "all the same"
        )


def _hub_base(options: PushOptions, checkpoint: HeadsCheckpoint) -> str:
    """The base's hub id, perhaps with a revision."""
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
    name = recorded if Path(base_named(recorded)).exists() else base
    return _loaded(name, trust_remote_code=options.trust_remote_code)


def _loaded(source: str | BaseSource, trust_remote_code: bool = False) -> CausalLM:
    """A base in the type that it was saved in."""
    return load_base(source, dtype="auto", trust_remote_code=trust_remote_code)


@contextmanager
def _folder(options: PushOptions) -> Iterator[Path]:
    """The folder of the dry run, written whole or not at all; else one that goes with the push."""
    if options.dry_run is not None:
        _claim_output(
            options.dry_run, options.overwrite, REPOSITORY_LAYOUT, (options.heads, options.evaluation)
        )
        with replaced_directory(options.dry_run, options.overwrite) as folder:
            yield folder
    else:
        with TemporaryDirectory(prefix="medusa-push-") as temporary:
            yield Path(temporary)


def _missing(options: PushOptions) -> list[str]:
    """Warnings about facts that the card lacks, or that it makes public."""
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
