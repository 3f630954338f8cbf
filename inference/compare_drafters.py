"""Which drafter, and which acceptance rule, is fastest on this model and this machine?

Every drafter answers every prompt under every rule, and plain decoding does too, one after the other in an
order that rotates, so that a machine that slows down does so for all. Speed-ups are medians over prompts of
seconds per new token, prefill included. A pair that cannot be exact is listed with the reason. Where
--draft-length is not given, the length of each drafter's chains is chosen from measured step times. Prints
tables, draws a PNG, and ends with one line of JSON. Run it with nothing else running.

    python inference/compare_drafters.py --base MODEL
    python inference/compare_drafters.py --drafters heads suffix heads+suffix \\
        --prompts configs/repetitive_prompts.jsonl
    python inference/compare_drafters.py --drafters early-exit draft-model --exit-layer 10 --draft-model DIR
    python inference/compare_drafters.py --drafters draft-model --draft-model DIR --draft-length 8 \\
        --temperature 1 --rules exact token block --repeats 5
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

import medusa
from medusa.acceptance.rules import RULES
from medusa.cli.flags import (
    EMBEDDED_BASE,
    EMBEDDED_HEADS,
    CutOptions,
    DrafterOptions,
    PlotOptions,
    add_cut_flags,
    add_drafter_flags,
    add_plot_flag,
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
    log_picture,
    report_json,
    sampling_cuts,
    table_console,
)
from medusa.drafters.registry import (
    DRAFTERS,
    DraftSource,
    available_drafters,
    draft_sources,
    draft_with_heads,
    source_named,
)
from medusa.measurement.comparison import (
    NOTHING_LEFT_OUT,
    PLAIN,
    UNCONDITIONAL_RULES,
    Pairing,
    Trial,
    pairing,
)
from medusa.measurement.comparison_plot import plot_drafters
from medusa.measurement.comparison_report import length_report, pairing_report, print_tables, ratio_reports
from medusa.measurement.draft_length import Probe, probe_draft_length, verification_seconds, watched_answer
from medusa.model import MedusaModel
from medusa.plots import check_matplotlib
from medusa.progress import track
from medusa.prompts import Prompt

NUM_WARM_UPS = 3
WARM_UP_TOKENS = 8
PROBE_PROMPTS, PROBE_TOKENS = 3, 32
Encoded = Mapping[str, Tensor]


class CompareOptions(DrafterOptions, CutOptions, PlotOptions):
    """The flags, parsed."""

    drafters: list[str] | None
    rules: list[str]
    repeats: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = program_parser(__doc__ or "")
    add_drafter_flags(parser)
    add_cut_flags(parser)
    group = parser.add_argument_group("comparison")
    known = [name for name in DRAFTERS if name != PLAIN[0]]
    group.add_argument(
        "--drafters",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(known)}, or a union such as heads+suffix (default: all that can work)",
    )
    group.add_argument(
        "--rules",
        nargs="+",
        choices=(*UNCONDITIONAL_RULES, *RULES),
        default=["exact"],
        metavar="NAME",
        help=f"of {', '.join((*UNCONDITIONAL_RULES, *RULES))}; typical is LOSSY (default: exact)",
    )
    group.add_argument(
        "--repeats",
        type=positive_int,
        default=1,
        metavar="N",
        help="times each prompt is answered; when sampling, each time with the next seed (default: 1)",
    )
    add_plot_flag(parser, "compare_drafters")
    options = parser.parse_args(arguments, namespace=CompareOptions())
    return exit_status(lambda: compare(options), options.traceback)


def compare(options: CompareOptions) -> None:
    """Measure every pair, and print, draw and write what was found."""
    check_matplotlib()
    model = load_model(options, with_heads=wants_heads(options))
    prompts = load_prompts(options)
    encoded = encode_prompts(model, prompts, options.max_new_tokens)
    names, sources = chosen_sources(model, options)
    sources, probes = with_chosen_lengths(model, sources, encoded, options)
    pairings = plan(names, sources, options)
    trials = measure(model, [pair for pair in pairings if pair.refusal is None], prompts, encoded, options)
    report = make_report(model, pairings, trials, probes, options)
    print_tables(report, table_console())
    title = f"{options.base}, {len(prompts)} prompts, temperature {options.temperature:g}"
    plot_drafters([row for row in report["pairings"] if not row["refused"]], options.plot, title)
    log_picture(options)
    report_json(report, options)


def wants_heads(options: CompareOptions) -> bool:
    """Whether to load heads: when they take part, or might. The embedded ones fit the embedded base only."""
    if options.drafters is not None:
        return any(draft_with_heads(name) for name in options.drafters)
    return options.heads != EMBEDDED_HEADS or options.base == str(EMBEDDED_BASE)


def chosen_sources(model: MedusaModel, options: CompareOptions) -> tuple[list[str], dict[str, DraftSource]]:
    """The drafters to compare, and what they are made of."""
    settings = drafter_settings(options)
    names = options.drafters
    if names is None:
        names = available_drafters(model, settings)
        names += ["heads+suffix"] if "heads" in names else []
    names = [name for name in dict.fromkeys(names) if name != PLAIN[0]]
    return names, draft_sources([PLAIN[0], *names], model, settings)


def with_chosen_lengths(
    model: MedusaModel, sources: dict[str, DraftSource], encoded: Sequence[Encoded], options: CompareOptions
) -> tuple[dict[str, DraftSource], dict[str, Probe]]:
    """The sources with the chain lengths that this machine asks for, unless the user said how long."""
    tunable = [name for name, source in sources.items() if source.own_tree is None and source.max_length != 0]
    if options.draft_length is not None or not tunable:
        return sources, {}
    verify = verification_seconds(model, encoded[0])
    arguments = answer_arguments(options, options.seed) | {
        "max_new_tokens": min(PROBE_TOKENS, options.max_new_tokens)
    }
    some = encoded[:: -(-len(encoded) // PROBE_PROMPTS)]
    probes, sources = {}, dict(sources)
    for name in track(tunable, "choosing draft lengths"):
        probes[name] = probe_draft_length(model, sources[name], some, verify, **arguments)
        if choice := probes[name].choice:
            sources[name] = sources[name].with_length(choice.draft_length)
    return sources, probes


def plan(names: Sequence[str], sources: Mapping[str, DraftSource], options: CompareOptions) -> list[Pairing]:
    """Plain decoding, then every drafter under every rule."""
    pairs = product(names, dict.fromkeys(options.rules))
    is_greedy = options.temperature == 0
    plain = pairing(sources[PLAIN[0]], PLAIN[1], is_greedy)
    return [plain, *(pairing(source_named(name, sources), rule, is_greedy) for name, rule in pairs)]


def measure(
    model: MedusaModel,
    pairings: Sequence[Pairing],
    prompts: Sequence[Prompt],
    encoded: Sequence[Encoded],
    options: CompareOptions,
) -> list[Trial]:
    """Every pairing's answer to every prompt with every seed, in an order that rotates."""
    drafters = [pair.make() for pair in pairings]
    short = {"max_new_tokens": min(WARM_UP_TOKENS, options.max_new_tokens)}
    for number, turn in track(list(product(range(NUM_WARM_UPS), range(len(pairings)))), "warming up"):
        arguments = answer_arguments(options, options.seed) | short | {"acceptance": pairings[turn].rule}
        watched_answer(model, encoded[number % len(encoded)], drafters[turn], **arguments)
    rounds = list(product(range(options.repeats), range(len(prompts)), range(len(pairings))))
    trials = []
    for repeat, number, turn in track(rounds, "measuring"):
        which = (repeat + number + turn) % len(pairings)
        pair, seed = pairings[which], options.seed + repeat
        arguments = answer_arguments(options, seed) | {"acceptance": pair.rule}
        answer = watched_answer(model, encoded[number], drafters[which], **arguments)
        trials.append(Trial(pair.key, number, seed, prompts[number].category, answer))
    return trials


def answer_arguments(options: CompareOptions, seed: int) -> dict[str, Any]:
    """For ``model.stream``: how long, greedy or sampled, and the seed.

    Only what the flags say is left out, whatever the base's own configuration says, so that the same command
    compares the same distributions on every base.
    """
    cuts = sampling_cuts(options)
    arguments = {**generation_arguments(options), "seed": seed, **cuts}
    return NOTHING_LEFT_OUT | arguments if options.temperature else arguments


def make_report(
    model: MedusaModel,
    pairings: Sequence[Pairing],
    trials: Sequence[Trial],
    probes: Mapping[str, Probe],
    options: CompareOptions,
) -> dict[str, Any]:
    """The JSON object of this program."""
    by_key = {pair.key: [trial for trial in trials if trial.key == pair.key] for pair in pairings}
    return {
        "base": options.base,
        "medusa": medusa.__version__,
        "device": str(model.device),
        "dtype": str(model.base.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "num_prompts": len({trial.prompt for trial in trials}),
        "repeats": options.repeats,
        "seed": options.seed,
        "pairings": [pairing_report(pair, by_key) for pair in pairings],
        "draft_lengths": [length_report(name, probe) for name, probe in probes.items()],
        "ratios": ratio_reports(by_key),
    }


if __name__ == "__main__":
    sys.exit(main())
