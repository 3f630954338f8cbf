"""``medusa heads``: what was learned on this machine."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from medusa.base.known_models import learned_for
from medusa.cli.option_types import HeadsOptions
from medusa.cli.options import asking_command, command
from medusa.console import TIMES, Column, log_console, megabytes
from medusa.learning.collected_texts import CollectedTexts
from medusa.learning.learned_heads import LearnedHeads, learned_home
from medusa.measurement.report import Report, end_with_json


def heads(options: HeadsOptions) -> list[str]:
    """List what was learned, undo the last of it, or forget all of it."""
    if options.action == "list":
        return _list(options)
    assert options.base is not None, "the options see to it"
    learned = _learned_for(options.base)
    say = partial(log_console().print, soft_wrap=True, markup=False)
    with learned.locked():
        base = learned.base
        if options.action == "forget":
            size = learned.num_bytes
            learned.forget()
            say(f"forgotten: all that was learned for {base}, {megabytes(size)} in {learned.directory}")
            end_with_json({"base": base, "bytes": size}, options.report.json)
            return [command("learn", base)]
        removed = learned.version
        version = learned.undo()
    if removed is not None:
        say(f"version {removed.number} of {removed.made} was removed")
    now = "no learned heads" if version is None else f"version {version.number} of {version.made}"
    say(f"{base} has {now} in use")
    end_with_json({"base": base, "in_use": None if version is None else version.number}, options.report.json)
    return [command("heads")]


def _learned_for(base: str) -> LearnedHeads:
    """What was learned for a base, by any name of it, by the name that it had then, or by its directory.

    Raises:
        ValueError: nothing was.
    """
    learned = learned_for(base)
    if learned is not None and learned.directory.is_dir():
        return learned
    everything = LearnedHeads.all()
    matching = [
        learned
        for learned in everything
        if base in (learned.base, learned.directory.name, str(learned.directory))
    ]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(learned.base for learned in everything) or "nothing"
    raise ValueError(
        f"base must be one for which heads were learned here, got {base!r}; {learned_home()} has {names}"
        if not matching
        else f"base {base!r} was the name of {len(matching)} models; name one by its directory in the list"
    )


def _list(options: HeadsOptions) -> list[str]:
    everything = LearnedHeads.all() if options.base is None else [_learned_for(options.base)]
    rows = [
        {
            "base": learned.base,
            "directory": str(learned.directory),
            "bytes": learned.num_bytes,
            "is_in_use": version == learned.version,
        }
        | asdict(version)
        for learned in everything
        for version in learned.versions
    ]
    collected = {
        learned.base: size for learned in everything if (size := CollectedTexts(learned.directory).num_bytes)
    }
    report = Report({"heads": rows, "collected": collected, "directory": str(learned_home())})
    for base, size in collected.items():
        report.add_line(f"{megabytes(size)} of texts that {base} wrote wait for `medusa learn {base}`")
    if not rows:
        report.add_line(f"nothing was learned yet in {learned_home()}")
    else:
        columns: dict[str, Column] = {
            "base": ("base", "{}"),
            "version": (lambda row: f"{row['number']}{', in use' if row['is_in_use'] else ''}", "{}"),
            "since": ("made", "{:.10}"),
            "learned from": (lambda row: ", ".join(row["learned_from"]), "{}"),
            "tokens": ("num_tokens", "{:,}"),
            "tok/step": ("tokens_per_step", "{:.2f}"),
            "x plain": ("speedup", TIMES),
            "x before": ("gain", TIMES),
            "disk": (lambda row: megabytes(row["bytes"]), "{}"),
            "directory": (lambda row: row["directory"].rpartition("/")[2], "{}"),
        }
        note = f"in {learned_home()}; disk: all versions of the base, and the round that is under way"
        report.add_table("Heads that were learned here", columns, rows, note=note)
    report.publish(options.report.json)
    if not rows:
        return [command("learn", "MODEL.gguf")]
    return [asking_command(everything[-1].has_template, "--base", everything[-1].base)]
