"""``medusa compare-drafters``: every drafter under every acceptance rule, in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import medusa
from medusa.acceptance.rules import RULES
from medusa.cli.options import (
    EMBEDDED_HEADS,
    DrafterOptions,
    ProgramOptions,
    check_at_least,
)
from medusa.cli.program import (
    chat_with,
    drafter_settings,
    encode_prompts,
    generation_arguments,
    load_model,
    load_prompts,
)
from medusa.cli.reporting import log_picture, report_json, table_console
from medusa.drafters.registry import (
    DEFAULT_DRAFTER,
    DraftSource,
    available_drafters,
    draft_sources,
    draft_with_heads,
    source_named,
)
from medusa.measurement.drafters import (
    NOTHING_LEFT_OUT,
    PLAIN,
    UNCONDITIONAL_RULES,
    Pairing,
    length_report,
    pairing,
    pairing_report,
    plot_drafters,
    print_tables,
    ratio_reports,
)
from medusa.measurement.timing import NUM_WARM_UPS, WARM_UP_TOKENS, Answer, by_contender, take_turns
from medusa.measurement.watching import Probe, probe_draft_length, verification_seconds, watched_answer
from medusa.model import MedusaModel
from medusa.places import is_embedded_base
from medusa.plots import short_name
from medusa.progress import track
from medusa.prompts import Prompt

PROBE_PROMPTS, PROBE_TOKENS = 3, 32
Encoded = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ProgramOptions):
    """Which drafter, and which acceptance rule, is fastest on this model and this machine?

    Every drafter answers every prompt under every rule, and plain decoding does too, one after the other
    in an order that rotates, so that a machine that slows down does so for all. Speed-ups are medians
    over prompts of seconds per new token, prefill included. A pair that cannot be exact is listed with
    the reason. Where --draft-length is not given, the length of each drafter's chains is chosen from
    measured step times.

    Rules for sampled drafts differ by little. --num-seeds answers each prompt with many seeds in one
    batch, which buys the precision that telling them apart takes: tokens per step do not depend on the
    batch. Speeds are then those of batches. Prints tables, draws a PNG, and ends with a JSON report. Run
    it with nothing else running.

        medusa compare-drafters --base MODEL
        medusa compare-drafters --drafters heads suffix heads+suffix \\
            --prompts repetitive_prompts
        medusa compare-drafters --drafters early-exit draft-model --exit-layer 10 --draft-model DIR
        medusa compare-drafters --drafters draft-model --draft-model DIR --draft-length 8 \\
            --temperature 1 --rules exact token block --repeats 5
        medusa compare-drafters --drafters low-precision --draft-length 8 --temperature 1 \\
            --rules token block --num-seeds 8
    """

    drafting: DrafterOptions = DrafterOptions()
    drafters: tuple[str, ...] | None = None
    """Of heads, dynamic-heads, suffix, eagle3, draft-model, early-exit, low-precision, or a union such as
    heads+suffix; none is all that can work, and the drafter of chat."""
    rules: tuple[str, ...] = ("exact",)
    """Of exact, typical (LOSSY), token, block, greedy_block, multi_draft, multi_draft_without_replacement,
    spectr, traversal."""
    repeats: int = 1
    """Times each prompt is answered; when sampling, each time with other seeds."""
    num_seeds: int = 1
    """Answers to each prompt in one batch, each with a seed of its own."""
    plot: Path = Path("runs/plots/compare_drafters.png")
    """Where the picture goes."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "repeats", "num_seeds")
        known = (*UNCONDITIONAL_RULES, *RULES)
        for rule in self.rules:
            if rule not in known:
                raise ValueError(f"rules must be of {', '.join(known)}; got {rule!r}")
        if self.drafters is not None:
            self.drafting.check_read_by(*self.drafters)


def compare(options: CompareOptions) -> list[str]:
    """Measure every pair, and print, draw and write what was found."""
    model = load_model(options.model, with_heads=wants_heads(options))
    prompts = load_prompts(options.prompts)
    encoded = encode_prompts(model, prompts, options.answers.max_new_tokens)
    names, sources = chosen_sources(model, options)
    sources, probes = with_chosen_lengths(model, sources, encoded, options)
    pairings = plan(names, sources, options)
    answers = measure(model, [pair for pair in pairings if pair.refusal is None], prompts, encoded, options)
    report = make_report(model, pairings, answers, probes, options)
    print_tables(report, table_console())
    title = (
        f"{short_name(report['base'])}, {len(prompts)} prompts, temperature {options.answers.temperature:g}"
    )
    plot_drafters([row for row in report["pairings"] if not row["refused"]], options.plot, title)
    log_picture(options)
    report_json(report, options.report)
    exact = [row for row in report["pairings"] if not row["refused"] and row["rule"] != "typical"]
    fastest = max(exact, key=lambda row: row["speedup_vs_plain"])["drafter"]
    return [chat_with(fastest, options.model, options.drafting)]


def wants_heads(options: CompareOptions) -> bool:
    """Whether to load heads: when they take part, or might. The embedded ones fit the embedded base only."""
    if options.drafters is not None:
        return any(draft_with_heads(name) for name in options.drafters)
    base = options.model.base
    return options.model.heads != EMBEDDED_HEADS or base is None or is_embedded_base(base)


def chosen_sources(model: MedusaModel, options: CompareOptions) -> tuple[list[str], dict[str, DraftSource]]:
    """The drafters to compare, and what they are made of."""
    settings = drafter_settings(options.drafting)
    names = list(options.drafters or ())
    if options.drafters is None:
        names = available_drafters(model, settings)
        names += ["heads+suffix"] if "heads" in names else []
        names += [DEFAULT_DRAFTER] if model.heads is not None else []
    names = [name for name in dict.fromkeys(names) if name != PLAIN[0]]
    return names, draft_sources([PLAIN[0], *names], model, settings)


def with_chosen_lengths(
    model: MedusaModel, sources: dict[str, DraftSource], encoded: Sequence[Encoded], options: CompareOptions
) -> tuple[dict[str, DraftSource], dict[str, Probe]]:
    """The sources with the chain lengths that this machine asks for, unless the user said how long."""
    tunable = [name for name, source in sources.items() if source.own_tree is None and source.max_length != 0]
    if options.drafting.draft_length is not None or not tunable:
        return sources, {}
    verify = verification_seconds(model, encoded[0])
    arguments = answer_arguments(options, options.answers.seed) | {
        "max_new_tokens": min(PROBE_TOKENS, options.answers.max_new_tokens)
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
    is_greedy = options.answers.temperature == 0
    plain = pairing(sources[PLAIN[0]], PLAIN[1], is_greedy)
    return [plain, *(pairing(source_named(name, sources), rule, is_greedy) for name, rule in pairs)]


def measure(
    model: MedusaModel,
    pairings: Sequence[Pairing],
    prompts: Sequence[Prompt],
    encoded: Sequence[Encoded],
    options: CompareOptions,
) -> list[Answer]:
    """Every pairing's answers to every prompt, with --num-seeds seeds at once and --repeats times."""
    pairs = {pair.name: pair for pair in pairings}
    drafters = {name: pair.make() for name, pair in pairs.items()}

    def run(name: str, prompt: int, repeat: int, **more: Any) -> Answer:
        seed = options.answers.seed + repeat * options.num_seeds
        arguments = answer_arguments(options, seed) | {"acceptance": pairs[name].rule} | more
        inputs = {key: value.expand(options.num_seeds, -1) for key, value in encoded[prompt].items()}
        arguments |= {"contender": name, "question": prompt, "category": prompts[prompt].category}
        return watched_answer(model, inputs, drafters[name], **arguments)

    def warm_up(name: str, number: int, repeat: int) -> Answer:
        short = min(WARM_UP_TOKENS, options.answers.max_new_tokens)
        return run(name, number % len(encoded), 0, max_new_tokens=short)

    take_turns(list(pairs), NUM_WARM_UPS, warm_up, label="warming up")
    return take_turns(list(pairs), len(encoded), run, repeats=options.repeats, label="measuring")


def answer_arguments(options: CompareOptions, seed: int) -> dict[str, Any]:
    """For ``model.stream``: how long, greedy or sampled, and the seed.

    Only what the flags say is left out, whatever the base's own configuration says, so that the same command
    compares the same distributions on every base.
    """
    arguments = {**generation_arguments(options.answers), "seed": seed}
    return NOTHING_LEFT_OUT | arguments if options.answers.temperature else arguments


def make_report(
    model: MedusaModel,
    pairings: Sequence[Pairing],
    answers: Sequence[Answer],
    probes: Mapping[str, Probe],
    options: CompareOptions,
) -> dict[str, Any]:
    """The JSON object of this program."""
    given = by_contender(answers)
    return {
        "base": model.base.name_or_path,
        "medusa": medusa.__version__,
        "device": str(model.device),
        "dtype": str(model.base.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "temperature": options.answers.temperature,
        "max_new_tokens": options.answers.max_new_tokens,
        "num_prompts": len({answer.question for answer in answers}),
        "repeats": options.repeats,
        "num_seeds": options.num_seeds,
        "seed": options.answers.seed,
        "pairings": [pairing_report(pair, given) for pair in pairings],
        "draft_lengths": [length_report(name, probe) for name, probe in probes.items()],
        "ratios": ratio_reports(pairings, given),
    }
