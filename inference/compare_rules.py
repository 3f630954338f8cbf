"""How many more tokens a step does one acceptance rule give than another? With an interval.

Every prompt is answered with many seeds in one batch, under each rule. Tokens per step do not depend on the
batch, so a batch buys the precision that telling two rules apart takes; speed is not measured here
(`compare_drafters.py` does that). The interval is a 95 % bootstrap over prompts.

    python inference/compare_rules.py --drafter low-precision --rules token block --draft-length 8
    python inference/compare_rules.py --drafter draft-model --draft-model DIR --rules token block traversal
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product

import numpy as np
from rich.console import Console
from rich.table import Table

from medusa.acceptance.rules import RULES, rule_named
from medusa.cli.flags import (
    CutOptions,
    DrafterOptions,
    add_cut_flags,
    add_drafter_flags,
    positive_int,
    program_parser,
)
from medusa.cli.program import (
    drafter_settings,
    encode_prompts,
    exit_status,
    generation_arguments,
    load_model,
    load_prompts,
    report_json,
    sampling_cuts,
    table_console,
)
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.registry import DRAFTERS, draft_with_heads, drafter_named
from medusa.measurement.comparison import NOTHING_LEFT_OUT, bootstrapped_ratio
from medusa.progress import track


class RuleOptions(DrafterOptions, CutOptions):
    """The flags, parsed."""

    drafter: str
    rules: list[str]
    num_seeds: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = program_parser(__doc__ or "", max_new_tokens=96)
    parser.set_defaults(temperature=1.0)
    add_drafter_flags(parser)
    add_cut_flags(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--drafter", default="low-precision", help=f"of {', '.join(DRAFTERS)} (default: %(default)s)"
    )
    group.add_argument(
        "--rules",
        nargs="+",
        choices=tuple(RULES),
        default=["token", "block"],
        metavar="NAME",
        help=f"of {', '.join(RULES)}; the first is what the others are held against (default: token block)",
    )
    group.add_argument(
        "--num-seeds", type=positive_int, default=8, metavar="N", help="answers per prompt (default: 8)"
    )
    options = parser.parse_args(arguments, namespace=RuleOptions())
    return exit_status(lambda: compare(options), options.traceback)


def compare(options: RuleOptions) -> None:
    """Answer everything under every rule, print the ratios and the report."""
    if options.temperature == 0:
        raise ValueError("--temperature must be above 0, got 0: greedily all rules are one")
    model = load_model(options, with_heads=draft_with_heads(options.drafter))
    encoded = encode_prompts(model, load_prompts(options), options.max_new_tokens)
    only_chain = any(rule_named(rule).only_chains for rule in options.rules)
    drafter = drafter_named(options.drafter, model, drafter_settings(options), only_chain=only_chain)
    counted: dict[str, list[DecodingStatistics]] = {rule: [] for rule in options.rules}
    for inputs, rule in track(list(product(encoded, options.rules)), "answering"):
        output = model.generate(
            inputs["input_ids"].expand(options.num_seeds, -1),
            **generation_arguments(options),
            **(NOTHING_LEFT_OUT | sampling_cuts(options)),
            seed=options.seed,
            drafter=drafter,
            acceptance=rule,
            return_dict_in_generate=True,
        )
        counted[rule].append(output.statistics)
    report = make_report(counted, drafter.max_depth, options)
    print_table(report, table_console())
    report_json(report, options)


def make_report(
    counted: dict[str, list[DecodingStatistics]], draft_length: int, options: RuleOptions
) -> dict[str, object]:
    """The JSON object of this program."""
    steps = {
        rule: np.array([(s.num_steps, s.num_steps + s.num_accepted) for s in each], dtype=float)
        for rule, each in counted.items()
    }
    baseline, *others = options.rules
    totals = {rule: sum(each, DecodingStatistics()) for rule, each in counted.items()}
    return {
        "drafter": options.drafter,
        "draft_length": draft_length,
        "temperature": options.temperature,
        "num_prompts": len(counted[baseline]),
        "num_seeds": options.num_seeds,
        "num_tokens": {rule: total.num_tokens for rule, total in totals.items()},
        "tokens_per_step": {rule: total.tokens_per_step for rule, total in totals.items()},
        "acceptance_rate": {rule: total.acceptance_rate for rule, total in totals.items()},
        "against": baseline,
        "ratio": {
            rule: bootstrapped_ratio(np.concatenate([steps[rule], steps[baseline]], axis=1))
            for rule in others
        },
    }


def print_table(report: dict, console: Console) -> None:
    """One row a rule."""
    table = Table(
        title=f"{report['drafter']}, {report['draft_length']} draft tokens, temperature "
        f"{report['temperature']:g}, {report['num_prompts']} prompts x {report['num_seeds']} seeds",
        title_justify="left",
    )
    for name in ("rule", "tokens per step", f"against {report['against']}", "95 % interval"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for rule, value in report["tokens_per_step"].items():
        ratio = report["ratio"].get(rule)
        interval = "-"
        if ratio is not None and ratio["low"] is not None:
            interval = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        table.add_row(rule, f"{value:.2f}", "1" if ratio is None else f"{ratio['ratio']:.3f}", interval)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
