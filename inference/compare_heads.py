"""Which heads guess best? Several sets of one base, asked about the same answers, in one table.

For each set: how often each head's first guess is right, tokens per step with trees of several sizes, each
judged on answers that did not choose it, parameters, the time that drafting and a whole step take, and what
training cost. --heads are what the others are held against. The answers are the base's own to the prompts,
those in the prompt file where it has some, or the conversations that the training runs held out. Intervals
are 95 % bootstraps over answers. Prints a table, draws a PNG, and ends with one line of JSON.

    python inference/compare_heads.py --heads runs/a/heads runs/b/heads runs/c/heads --held-out
    python inference/compare_heads.py --heads one=runs/a/heads two=runs/b/heads --prompts FILE
    python inference/compare_heads.py runs/mine/heads --sizes 4,32 --rounds 0
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import medusa
from medusa.cli.flags import (
    PlotOptions,
    add_plot_flag,
    not_negative_int,
    positive_int,
    positive_ints,
    program_parser,
)
from medusa.cli.program import (
    answered_tokens,
    encode_prompts,
    exit_status,
    load_model,
    load_prompts,
    log_picture,
    report_json,
    table_console,
)
from medusa.heads.calibration import AnsweredTokens
from medusa.measurement.calibrating import ranked_each
from medusa.measurement.heads_comparison import (
    NUM_NODES,
    NamedHeads,
    comparison_report,
    measured_steps,
    read_named,
    split_label,
)
from medusa.measurement.heads_comparison_plot import plot_heads
from medusa.model import MedusaModel
from medusa.plots import check_matplotlib
from medusa.progress import track
from medusa.training.data.held_out import held_out_answers
from medusa.trees.rank_counts import RankCounts

ROWS_PER_PASS = 4
"""Answers that the base reads together."""
TABLE_WIDTH = 180
"""Where standard output is no terminal."""


class HeadsOptions(PlotOptions):
    """The flags, parsed."""

    others: list[str]
    held_out: bool
    sizes: tuple[int, ...]
    max_rank: int
    rounds: int
    step_nodes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = program_parser(__doc__ or "")
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "others",
        nargs="*",
        metavar="[LABEL=]HEADS",
        help="heads to hold against those of --heads, which may have a label too",
    )
    group.add_argument(
        "--held-out",
        action="store_true",
        help="ask about the conversations that the training runs of all these heads held out",
    )
    group.add_argument(
        "--sizes",
        type=positive_ints,
        default=NUM_NODES,
        metavar="N,N,...",
        help=f"nodes of the trees, root included (default: {','.join(map(str, NUM_NODES))})",
    )
    group.add_argument(
        "--max-rank",
        type=positive_int,
        default=16,
        metavar="R",
        help="guesses of each head that a tree may use (default: %(default)s)",
    )
    group.add_argument(
        "--rounds",
        type=not_negative_int,
        default=4,
        metavar="N",
        help="answers on which steps are timed, after one to warm up; 0 times nothing (default: %(default)s)",
    )
    group.add_argument(
        "--step-nodes",
        type=positive_int,
        default=16,
        metavar="N",
        help="nodes of the trees that are timed (default: %(default)s)",
    )
    add_plot_flag(parser, "compare_heads")
    options = parser.parse_args(arguments, namespace=HeadsOptions())
    return exit_status(lambda: compare(options), options.traceback)


def compare(options: HeadsOptions) -> None:
    """Ask all heads, and print, draw and write what was found."""
    check_matplotlib()
    if options.held_out and options.prompts is not None:
        raise ValueError("--held-out and --prompts both say what to ask about; give one of them")
    compared = read_named([options.heads, *options.others])
    _, options.heads = split_label(options.heads)
    model = load_model(options)
    rows = answers(model, compared, options)
    counts = ranked(model, compared, rows, options.max_rank)
    times = {}
    if options.rounds:
        beginnings = [beginning(row, model.device) for row in rows]
        chosen = [beginnings[place % len(rows)] for place in range(1 + options.rounds)]
        times = measured_steps(model, compared, counts, options.step_nodes, track(chosen, "timing steps"))
    report = make_report(model, compared, counts, comparison_report(compared, counts, options.sizes, times))
    report |= {"step_nodes": options.step_nodes, "asked_about": what_is_asked(options)}
    print_table(report, table_console(TABLE_WIDTH))
    title = f"{options.base}, {report['asked_about']}, {report['num_tokens']} tokens"
    plot_heads(report["heads"], options.plot, title)
    log_picture(options)
    report_json(report, options)


def answers(
    model: MedusaModel, compared: Sequence[NamedHeads], options: HeadsOptions
) -> list[AnsweredTokens]:
    """The finished answers that all heads are asked about."""
    if options.held_out:
        found = held_out_answers(
            {each.label: each.checkpoint.provenance for each in compared}, model.tokenizer
        )
        return found[: options.limit]
    prompts = load_prompts(options)
    pairs = list(zip(prompts, encode_prompts(model, prompts, options.max_new_tokens), strict=True))
    return [answered_tokens(model, *pair, options) for pair in track(pairs, "answering")]


def ranked(
    model: MedusaModel, compared: Sequence[NamedHeads], rows: Sequence[AnsweredTokens], max_rank: int
) -> list[RankCounts]:
    """What each set of heads thinks of the answers; the base reads them once."""
    by_length = sorted(rows, key=lambda row: len(row.token_ids))
    sets = [each.checkpoint.heads.to(model.device).eval() for each in compared]
    return ranked_each(model, sets, by_length, max_rank, ROWS_PER_PASS)


def beginning(row: AnsweredTokens, device: torch.device) -> dict[str, Tensor]:
    """What stands before the first answer of ``row``, as a prompt: (1, T) long each."""
    length = max(1, list(row.is_label).index(True))
    ids = torch.tensor([row.token_ids[:length]], device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def what_is_asked(options: HeadsOptions) -> str:
    """The answers in words."""
    if options.held_out:
        return "conversations held out in training"
    return f"answers to {options.prompts or 'the prompts of the demo'}"


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


def print_table(report: dict[str, Any], console: Console) -> None:
    """One row a set of heads."""
    sizes = list(report["heads"][0]["tokens_per_step"])
    table = Table(
        title=f"Heads on {report['num_answers']} answers, {report['num_tokens']} tokens",
        title_justify="left",
        caption=f"against: tokens per step of {sizes[-1]} nodes over those of {report['against']}, and its "
        f"95 % interval; draft, step: ms of decoding with {report['step_nodes']} nodes; training: ms of an "
        "optimisation step, as recorded",
        caption_justify="left",
    )
    table.add_column("heads", no_wrap=True)
    deepest = max(len(row["top1"]) for row in report["heads"])
    names = ["parameters", *(f"head {d + 1}" for d in range(deepest)), *(f"{size} nodes" for size in sizes)]
    for name in (*names, "against", "draft", "step", "training"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report["heads"]:
        table.add_row(row["label"], *_cells(row, deepest, sizes))
    console.print(table)


def _cells(row: dict[str, Any], deepest: int, sizes: Sequence[str]) -> list[str]:
    ratio = row["against_first"][sizes[-1]]
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.3f} to {ratio['high']:.3f})"
    times = ("draft_milliseconds", "step_milliseconds", "training_milliseconds_per_step")
    return [
        f"{row['num_parameters'] / 1e6:.1f} M",
        *(_percent(rate) for rate in [*row["top1"], *[None] * deepest][:deepest]),
        *(f"{row['tokens_per_step'][size]['value']:.3f}" for size in sizes),
        f"{ratio['value']:.3f}{interval}",
        *("-" if row[name] is None else f"{row[name]:.4g}" for name in times),
    ]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


if __name__ == "__main__":
    sys.exit(main())
