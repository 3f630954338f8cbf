"""``medusa evaluate``: acceptance by depth, and how often each head is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa.cli.options import ProgramOptions, TreeOptions, check_at_least, words_of
from medusa.cli.program import (
    answered_tokens,
    decode_prompt,
    encode_prompts,
    heads_of,
    load_model,
    load_prompts,
)
from medusa.cli.reporting import command, log_picture, report_json, table_console
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.registry import drafter_named
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.measurement.evaluation import (
    TOP_KS,
    Evaluated,
    evaluation_report,
    made_by,
    plot_evaluation,
    print_report,
)
from medusa.measurement.heads import ranked
from medusa.model import MedusaModel
from medusa.plots import short_name
from medusa.progress import log_console, track
from medusa.prompts import read_prompts
from medusa.tables import counted

MAX_RANK = 16
"""Guesses of each head that a tree of --tree-nodes may use."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(ProgramOptions):
    """How good are these heads? Decodes prompts with them, then asks each head about every token.

    Live decoding gives tokens per step and the acceptance rate by depth; reading the same answers again
    (teacher forcing) gives each head's top-k accuracy, whatever the tree. With --also-at the prompts are
    answered at other temperatures too. Prints a table, draws a PNG, and ends with a JSON report.

        medusa evaluate
        medusa evaluate --base BASE --heads HEADS --prompts FILE --max-new-tokens 256
        medusa evaluate --temperature 0.7 --seed 3 --json result.json --plot result.png
        medusa evaluate --prompts FILE --tree-nodes 64 --calibrate-on OTHER_FILE --also-at 1
        medusa evaluate --drafter dynamic-heads+suffix
    """

    tree: TreeOptions = TreeOptions()
    drafter: str | None = None
    """Who guesses in live decoding: dynamic-heads, or a union such as dynamic-heads+suffix, drafts as many
    nodes as the tree has; none is the heads in the tree itself."""
    also_at: tuple[float, ...] = ()
    """Other temperatures to answer every prompt at, with the same tree."""
    plot: Path = Path("runs/plots/evaluate_heads.png")
    """Where the picture goes."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "also_at")


def evaluate(options: EvaluationOptions) -> list[str]:
    """Measure, and print, draw and write what was found."""
    model = load_model(options.model)
    if options.drafter is not None:
        drafter_named(options.drafter, model)  # refused before anything is answered
    use_tree_asked_for(model, options)
    prompts = load_prompts(options.prompts)
    encoded = encode_prompts(model, prompts, options.answers.max_new_tokens)
    pairs = list(zip(prompts, encoded, strict=True))
    evaluated = [
        evaluate_prompt(model, inputs, prompt.category, options)
        for prompt, inputs in track(pairs, "answering")
    ]
    others = {
        temperature: decoded_at(model, encoded, temperature, options) for temperature in options.also_at
    }
    answers = {name: getattr(options.answers, name) for name in ("temperature", "max_new_tokens", "seed")}
    answers["drafter"] = options.drafter or "heads"
    report = {**evaluation_report(evaluated, others), "made": made_by(model, options.model.heads, answers)}
    print_report(report, options.answers.temperature, table_console())
    asked = f"{report['num_prompts']} prompts, temperature {options.answers.temperature:g}"
    title = f"{short_name(options.model.heads)}, {asked}"
    plot_evaluation(report, options.plot, title)
    log_picture(options)
    report_json(report, options.report)
    can_be_tuned = not model.tuned and Path(options.model.heads).is_dir()
    return [command("tune" if can_be_tuned else "benchmark", *words_of(options.model))]


def evaluate_prompt(
    model: MedusaModel, inputs: dict[str, Any], category: str, options: EvaluationOptions
) -> Evaluated:
    """Answer one prompt, then rank every token of the answer."""
    tokens, statistics = decode_prompt(model, inputs, options.answers, options.drafter)
    row = AnsweredTokens.after_prompt(tokens, prompt_length=inputs["input_ids"].shape[1])
    counts = calibrate(model.base, heads_of(model), [row], max_rank=max(TOP_KS))
    return Evaluated(category, statistics, counts)


def decoded_at(
    model: MedusaModel, encoded: Sequence[dict[str, Any]], temperature: float, options: EvaluationOptions
) -> list[DecodingStatistics]:
    """How decoding of every prompt goes at another temperature."""
    there = replace(options.answers, temperature=temperature)
    label = f"answering at temperature {temperature:g}"
    return [decode_prompt(model, inputs, there, options.drafter)[1] for inputs in track(encoded, label)]


def use_tree_asked_for(model: MedusaModel, options: EvaluationOptions) -> None:
    """Let ``model`` decode with the tree of --tree-nodes, if it is given."""
    tree, answers = options.tree, options.answers
    if tree.tree_nodes is None or tree.calibrate_on is None:
        return
    prompts = read_prompts(tree.calibrate_on)
    encoded = encode_prompts(model, prompts, options.answers.max_new_tokens)
    pairs = list(zip(prompts, encoded, strict=True))
    rows = [answered_tokens(model, *pair, answers) for pair in track(pairs, "answering to calibrate")]
    (counts,) = ranked(model, [heads_of(model)], rows, MAX_RANK)
    model.use_tree(counts.best_tree(tree.tree_nodes))
    log_console().print(
        f"tree of {counted(model.tree.num_nodes, 'node')}, {model.tree.depth} deep, chosen on "
        f"{counted(len(rows), 'conversation')} of {tree.calibrate_on}",
        style="dim",
        soft_wrap=True,
    )
