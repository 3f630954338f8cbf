"""How good are these heads? Decodes prompts with them, then asks each head about every token.

Live decoding gives tokens per step and the acceptance rate by depth; reading the same answers again
(teacher forcing) gives each head's top-k accuracy, whatever the tree. With --also-at the prompts are
answered at other temperatures too. Prints a table, draws a PNG, and ends with one line of JSON.

    python inference/evaluate_heads.py
    python inference/evaluate_heads.py --base BASE --heads HEADS --prompts FILE --max-new-tokens 256
    python inference/evaluate_heads.py --temperature 0.7 --seed 3 --json result.json --plot result.png
    python inference/evaluate_heads.py --prompts FILE --tree-nodes 64 --calibrate-on OTHER_FILE --also-at 1
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from medusa.cli.flags import (
    PlotOptions,
    ProgramOptions,
    TreeOptions,
    add_plot_flag,
    add_tree_flags,
    not_negative_float,
    program_parser,
)
from medusa.cli.program import (
    decode_prompt,
    encode_prompts,
    exit_status,
    heads_of,
    load_model,
    load_prompts,
    log_picture,
    report_json,
    table_console,
)
from medusa.decoding.statistics import DecodingStatistics
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.measurement.calibrating import use_tree_asked_for
from medusa.model import MedusaModel
from medusa.plots import check_matplotlib, plot_evaluation
from medusa.progress import track
from medusa.trees.rank_counts import RankCounts

TOP_KS = (1, 2, 3, 5, 10)


class EvaluationOptions(PlotOptions, TreeOptions):
    """The flags, parsed."""

    also_at: list[float]


class Evaluated(NamedTuple):
    """What one prompt showed."""

    category: str
    statistics: DecodingStatistics
    counts: RankCounts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = program_parser(__doc__ or "")
    add_plot_flag(parser, "evaluate_heads")
    add_tree_flags(parser)
    parser.add_argument(
        "--also-at",
        type=not_negative_float,
        nargs="+",
        default=[],
        metavar="T",
        help="other temperatures to answer every prompt at, with the same tree",
    )
    options = parser.parse_args(arguments, namespace=EvaluationOptions())
    return exit_status(lambda: evaluate(options), options.traceback)


def evaluate(options: EvaluationOptions) -> None:
    """Measure, and print, draw and write what was found."""
    check_matplotlib()
    model = load_model(options)
    use_tree_asked_for(model, options)
    prompts = load_prompts(options)
    encoded = encode_prompts(model, prompts, options.max_new_tokens)
    pairs = list(zip(prompts, encoded, strict=True))
    evaluated = [
        evaluate_prompt(model, inputs, prompt.category, options)
        for prompt, inputs in track(pairs, "answering")
    ]
    others = {
        temperature: decoded_at(model, encoded, temperature, options) for temperature in options.also_at
    }
    report = make_report(evaluated, others)
    print_tables(report, table_console())
    if others:
        table_console().print(temperature_table(report, options.temperature))
    title = f"{options.heads}, {report['num_prompts']} prompts, temperature {options.temperature:g}"
    plot_evaluation(report, options.plot, title)
    log_picture(options)
    report_json(report, options)


def evaluate_prompt(
    model: MedusaModel, inputs: dict[str, Any], category: str, options: ProgramOptions
) -> Evaluated:
    """Answer one prompt with the heads, then rank every token of the answer."""
    tokens, statistics = decode_prompt(model, inputs, options)
    row = AnsweredTokens.after_prompt(tokens, prompt_length=inputs["input_ids"].shape[1])
    counts = calibrate(model.base, heads_of(model), [row], max_rank=max(TOP_KS))
    return Evaluated(category, statistics, counts)


def decoded_at(
    model: MedusaModel, encoded: Sequence[dict[str, Any]], temperature: float, options: EvaluationOptions
) -> list[DecodingStatistics]:
    """How decoding of every prompt goes at another temperature."""
    there = copy.copy(options)
    there.temperature = temperature
    label = f"answering at temperature {temperature:g}"
    return [decode_prompt(model, inputs, there)[1] for inputs in track(encoded, label)]


def make_report(
    evaluated: Sequence[Evaluated], others: Mapping[float, Sequence[DecodingStatistics]]
) -> dict[str, Any]:
    """The JSON object of this program. ``share`` is in tokens per step of the temperature asked for first."""
    counts = reduce(add, (item.counts for item in evaluated))
    categories = sorted({item.category for item in evaluated})
    by_category = {
        category: summary([item.statistics for item in evaluated if item.category == category])
        for category in categories
    }
    here = summary([item.statistics for item in evaluated])
    also_at = [{"temperature": temperature, **summary(each)} for temperature, each in others.items()]
    for entry in also_at:
        entry["share"] = entry["tokens_per_step"] / here["tokens_per_step"]
    return {
        **here,
        **({"also_at": also_at} if also_at else {}),
        "head_accuracy": {f"top{k}": [_known(rate) for rate in counts.top_k_accuracy(k)] for k in TOP_KS},
        "by_category": by_category,
    }


def summary(statistics: Sequence[DecodingStatistics]) -> dict[str, Any]:
    """Live decoding of some prompts, summed up."""
    total = sum(statistics, DecodingStatistics())
    return {
        "tokens_per_step": total.tokens_per_step,
        "acceptance_rate": total.acceptance_rate,
        "conditional_acceptance_rate": total.conditional_acceptance_rate,
        "num_prompts": len(statistics),
        "num_tokens": total.num_tokens,
    }


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Acceptance and accuracy by depth, then live decoding by category."""
    by_depth = Table(
        title="Heads",
        title_justify="left",
        caption=(
            "accepted: in live decoding; top k: the true token is among the head's k best (teacher-forced)"
        ),
        caption_justify="left",
    )
    for name in ("depth", "accepted", "once reached", *(f"top {k}" for k in TOP_KS)):
        by_depth.add_column(name, justify="right")
    accepted, reached = report["acceptance_rate"], report["conditional_acceptance_rate"]
    for head, accuracies in enumerate(zip(*report["head_accuracy"].values(), strict=True)):
        live = [accepted[head], reached[head]] if head < len(accepted) else [None, None]
        by_depth.add_row(str(head + 1), *(_percent(rate) for rate in (*live, *accuracies)))
    console.print(by_depth)

    by_category = Table(title="Live decoding", title_justify="left")
    by_category.add_column("category")
    for name in ("prompts", "tokens", "tokens per step", *(f"depth {d + 1}" for d in range(len(accepted)))):
        by_category.add_column(name, justify="right")
    for category, entry in report["by_category"].items():
        by_category.add_row(category, *_cells(entry, len(accepted)))
    by_category.add_section()
    by_category.add_row("all", *_cells(report, len(accepted)), style="bold")
    console.print(by_category)


def temperature_table(report: dict[str, Any], first: float) -> Table:
    """One row a temperature, ``first`` first."""
    table = Table(title="Live decoding by temperature", title_justify="left")
    for name in ("temperature", "tokens", "tokens per step", "share"):
        table.add_column(name, justify="right")
    for entry in ({**report, "temperature": first, "share": 1.0}, *report["also_at"]):
        cells = [f"{entry['temperature']:g}", str(entry["num_tokens"]), f"{entry['tokens_per_step']:.2f}"]
        table.add_row(*cells, f"{entry['share']:.1%}")
    return table


def _cells(entry: dict[str, Any], max_depth: int) -> list[str]:
    rates = [*entry["acceptance_rate"], *[0.0] * max_depth][:max_depth]
    counts = [str(entry["num_prompts"]), str(entry["num_tokens"]), f"{entry['tokens_per_step']:.2f}"]
    return counts + [_percent(rate) for rate in rates]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _known(rate: float) -> float | None:
    """JSON has no NaN: a head that never had a token to guess has no accuracy."""
    return None if math.isnan(rate) else rate


if __name__ == "__main__":
    sys.exit(main())
