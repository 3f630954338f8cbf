"""``medusa compare-heads``: several sets of heads asked about the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

import medusa
from medusa.cli.options import GrowingInts, ProgramOptions, check_at_least, words_of
from medusa.cli.program import (
    answered_tokens,
    encode_prompts,
    load_model,
    load_prompts,
)
from medusa.cli.reporting import command, log_picture, report_json, table_console
from medusa.heads.calibration import AnsweredTokens
from medusa.measurement.heads import (
    NUM_NODES,
    NamedHeads,
    comparison_report,
    measured_steps,
    plot_heads,
    print_report,
    ranked,
    read_named,
)
from medusa.model import MedusaModel
from medusa.plots import short_name
from medusa.progress import track
from medusa.training.data.loading import held_out_answers
from medusa.trees.rank_counts import RankCounts

ROWS_PER_PASS = 4
"""Answers that the base reads together."""


@dataclass(frozen=True, kw_only=True)
class HeadsOptions(ProgramOptions):
    """Which heads guess best? Several sets of one base, asked about the same answers, in one table.

    For each set: how often each head's first guess is right, tokens per step with trees of several sizes,
    each judged on answers that did not choose it, parameters, the time that drafting and a whole step
    take, and what training cost. --heads are what the others are held against. The answers are the base's
    own to the prompts, those in the prompt file where it has some, or the conversations that the training
    runs held out. Intervals are 95 % bootstraps over answers. Prints a table, draws a PNG, and ends with
    a JSON report.

        medusa compare-heads --heads runs/a/heads runs/b/heads runs/c/heads --held-out
        medusa compare-heads --heads one=runs/a/heads two=runs/b/heads --prompts FILE
        medusa compare-heads runs/mine/heads --sizes 4,32 --rounds 0
    """

    others: tyro.conf.Positional[tuple[str, ...]] = ()
    """[LABEL=]HEADS ... to hold against those of --heads, which may have a label too."""
    held_out: bool = False
    """Ask about the conversations that the training runs of all these heads held out."""
    sizes: GrowingInts = NUM_NODES
    """Nodes of the trees, root included."""
    max_rank: int = 16
    """Guesses of each head that a tree may use."""
    rounds: int = 4
    """Answers on which steps are timed, after one to warm up; 0 times nothing."""
    step_nodes: int = 16
    """Nodes of the trees that are timed."""
    plot: Path = Path("runs/plots/compare_heads.png")
    """Where the picture goes."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_rank", "step_nodes")
        check_at_least(self, 0, "rounds")
        if self.held_out and self.prompts.prompts is not None:
            raise ValueError("held_out and prompts both say what to ask about; give one of them")


def compare(options: HeadsOptions) -> list[str]:
    """Ask all heads, and print, draw and write what was found."""
    compared = read_named([options.model.heads, *options.others])
    model = load_model(replace(options.model, heads=compared[0].source))
    rows = answers(model, compared, options)
    rows = sorted(rows, key=lambda row: len(row.token_ids))
    sets = [each.checkpoint.heads.to(model.device).eval() for each in compared]
    counts = ranked(model, sets, rows, options.max_rank, ROWS_PER_PASS)
    times = {}
    if options.rounds:
        beginnings = [beginning(row, model.device) for row in rows]
        chosen = [beginnings[place % len(rows)] for place in range(1 + options.rounds)]
        times = measured_steps(model, compared, counts, options.step_nodes, chosen, label="timing steps")
    report = make_report(model, compared, counts, comparison_report(compared, counts, options.sizes, times))
    report |= {"step_nodes": options.step_nodes, "asked_about": what_is_asked(options)}
    print_report(report, table_console())
    title = f"{short_name(model.base.name_or_path)}, {report['asked_about']}, {report['num_tokens']} tokens"
    plot_heads(report["heads"], options.plot, title)
    log_picture(options)
    report_json(report, options.report)
    best = max(report["heads"], key=lambda row: row["tokens_per_step"][str(max(options.sizes))]["value"])
    return [command("chat", *words_of(replace(options.model, heads=best["heads"])))]


def answers(
    model: MedusaModel, compared: Sequence[NamedHeads], options: HeadsOptions
) -> list[AnsweredTokens]:
    """The finished answers that all heads are asked about."""
    if options.held_out:
        found = held_out_answers(
            {each.label: each.checkpoint.provenance for each in compared}, model.tokenizer
        )
        return found[: options.prompts.limit]
    prompts = load_prompts(options.prompts)
    pairs = list(zip(prompts, encode_prompts(model, prompts, options.answers.max_new_tokens), strict=True))
    return [answered_tokens(model, *pair, options.answers) for pair in track(pairs, "answering")]


def beginning(row: AnsweredTokens, device: torch.device) -> dict[str, Tensor]:
    """What stands before the first answer of ``row``, as a prompt: (1, T) long each."""
    length = max(1, list(row.is_label).index(True))
    ids = torch.tensor([row.token_ids[:length]], device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def what_is_asked(options: HeadsOptions) -> str:
    """The answers in words."""
    if options.held_out:
        return "conversations held out in training"
    return f"answers to {options.prompts.prompts or 'the prompts of the demo'}"


def make_report(
    model: MedusaModel,
    compared: Sequence[NamedHeads],
    counts: Sequence[RankCounts],
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """The JSON object of this program, but for what its flags were."""
    return {
        "against": compared[0].label,
        "heads": rows,
        "num_answers": len(counts[0].ranks),
        "num_tokens": sum(len(ranks) for ranks in counts[0].ranks),
        "device": model.runtime.device,
        "dtype": model.runtime.dtype,
        "engine": model.runtime.engine,
        "num_threads": torch.get_num_threads(),
        "medusa": medusa.__version__,
    }
