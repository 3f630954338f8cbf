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
import sys
from collections.abc import Sequence
from typing import Any

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
    answered_tokens,
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
from medusa.measurement.evaluation import TOP_KS, Evaluated, evaluation_report, plot_evaluation, print_report
from medusa.measurement.heads import ranked
from medusa.model import MedusaModel
from medusa.plots import check_matplotlib, short_name
from medusa.progress import log_console, track
from medusa.prompts import read_prompts
from medusa.tables import how_many

MAX_RANK = 16
"""Guesses of each head that a tree of --tree-nodes may use."""


class EvaluationOptions(PlotOptions, TreeOptions):
    """The flags, parsed."""

    also_at: list[float]


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
    report = evaluation_report(evaluated, others)
    print_report(report, options.temperature, table_console())
    title = (
        f"{short_name(options.heads)}, {report['num_prompts']} prompts, temperature {options.temperature:g}"
    )
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


def use_tree_asked_for(model: MedusaModel, options: TreeOptions) -> None:
    """Let ``model`` decode with the tree of --tree-nodes, if it is given."""
    if options.tree_nodes is None and options.calibrate_on is None:
        return
    if options.tree_nodes is None or options.calibrate_on is None:
        raise ValueError(
            "--tree-nodes and --calibrate-on go together: a tree of another size is chosen on conversations, "
            "which must not be the prompts that it is measured on; give both, or neither"
        )
    prompts = read_prompts(options.calibrate_on)
    encoded = encode_prompts(model, prompts, options.max_new_tokens)
    pairs = list(zip(prompts, encoded, strict=True))
    rows = [answered_tokens(model, *pair, options) for pair in track(pairs, "answering to calibrate")]
    (counts,) = ranked(model, [heads_of(model)], rows, MAX_RANK)
    model.use_tree(counts.best_tree(options.tree_nodes))
    log_console().print(
        f"tree of {how_many(model.tree.num_nodes, 'node')}, {model.tree.depth} deep, chosen on "
        f"{how_many(len(rows), 'conversation')} of {options.calibrate_on}",
        style="dim",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
