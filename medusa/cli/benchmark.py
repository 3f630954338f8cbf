"""``medusa benchmark``: drafters, rules, plain decoding, transformers and llama.cpp, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from medusa.acceptance.rules import RULES
from medusa.cli.loading import encode_prompts, load_model, load_prompts, measured_on
from medusa.cli.options import (
    GrowingInts,
    ProgramOptions,
    answer_with,
)
from medusa.console import log_console
from medusa.engine import QUANTISED
from medusa.hardware import DeviceRates, measured_rates
from medusa.measurement.benchmark import (
    Request,
    Setting,
    bounds,
    build_history,
    calibrated_counts,
    divergences,
    measure,
    pad_with_history,
    runnable,
    setting_report,
)
from medusa.measurement.benchmark_report import add_tables, add_texts, plot_benchmark
from medusa.measurement.report import Report
from medusa.measurement.systems import (
    ALL_DRAFTERS,
    ASSISTED,
    EXACT,
    HEADS,
    PLAIN,
    THEIRS,
    TYPICAL,
    System,
    check_names,
    default_names,
    drafter_and_rule,
    make_systems,
    needs_heads,
)
from medusa.measurement.timing import Answer
from medusa.model import MedusaModel
from medusa.options import DrafterSettings, check_above, check_at_least, check_read_by
from medusa.plots import short_name
from medusa.trees.rank_counts import RankCounts

NOTHING_LEFT_OUT = {"top_k": 0, "top_p": 1.0}
"""For ``generate``: sample from all tokens, whatever the base's own configuration leaves out."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(ProgramOptions):
    """How fast are these heads? Against plain decoding on the same engine, every way transformers
    generates, llama.cpp where it is installed and has a GGUF file of the base, other drafters, other rules
    and other heads.

    All systems answer each batch of prompts one after the other, in an order that rotates, so that a machine
    that slows down does so for all; each warms up first. Times are medians over batches of seconds per new
    token, prefill included; tokens are counted in the same way for all. Each batch size and each context
    length is a setting of its own; a context length puts earlier turns (other prompts with the model's own
    answers) before each question. f_hw is the least time the device needs for a step over the step's time;
    bandwidth and arithmetic are measured first, by a sum over a large buffer and a large matrix product.
    f_tree is tokens per step over the estimate for the heads' best tree of the same size on these answers.
    Prints tables, draws a PNG, and ends with a JSON report. Run it with nothing else running.

        medusa benchmark
        medusa benchmark --heads HEADS --prompts FILE --limit 20 --max-new-tokens 128 --repeats 3
        medusa benchmark --batch-sizes 1,2,4,8,16 --max-minutes 30
        medusa benchmark --context-lengths 128,1024,4096 --systems transformers heads
        medusa benchmark --systems heads llama.cpp-q8_0 --engine int8 --llama-cpp MODEL-q8_0.gguf
        medusa benchmark --heads runs/mine/heads --systems heads shipped=smollm2-135m-instruct --show
        medusa benchmark --systems drafters --prompts repetitive_prompts
        medusa benchmark --systems draft-model --draft-model DIR --draft-length 8 \\
            --temperature 1 --acceptance exact token block --num-seeds 8

    Rules for sampled drafts differ by little. --num-seeds answers each prompt with many seeds in one batch,
    which gives the precision to tell them apart: tokens per step do not depend on the batch. Speeds are then
    measured on batches.
    """

    drafters: DrafterSettings = DrafterSettings()
    systems: tuple[str, ...] | None = None
    """Systems to compare: transformers, transformers-static, prompt-lookup, assisted, llama.cpp, default
    (generate with nothing named), LABEL=HEADS (other heads of this base, in the tree that they come with), a
    drafter (heads, dynamic-heads, suffix, eagle3, draft-model, early-exit, low-precision) or a union such as
    heads+suffix, or drafters, all that can work; plain always takes part. None is transformers' own,
    llama.cpp, plain, heads if there are any, and default; transformers-static, which compiles, not on a CPU,
    and none of transformers on a base whose own weights are quantised."""
    acceptance: tuple[str, ...] = (EXACT,)
    """Rules that each drafter is measured under: exact, typical (LOSSY), token, block, greedy_block,
    multi_draft, spectr. Rules for sampled drafts sample from all tokens that the flags allow. A pair that
    cannot be exact is listed with the reason."""
    llama_cpp: tuple[Path, ...] | None = None
    """GGUF files of the base for llama.cpp, each a system of its own: MODEL-q8_0.gguf is llama.cpp-q8_0. None
    takes the base itself where it is one, or the files in its directory."""
    batch_sizes: GrowingInts = (1,)
    """Rows decoded together."""
    context_lengths: GrowingInts | None = None
    """Length in tokens to which prompts are filled with earlier turns; none leaves prompts as they are."""
    repeats: int = 1
    """Times each prompt is answered; when sampling, each time with other seeds."""
    num_seeds: int = 1
    """Answers to each prompt in one batch, each with a seed of its own."""
    max_minutes: float | None = None
    """Stop measuring about then, each setting having had its share; none measures everything."""
    show: bool = False
    """Show the texts of the first setting, each beside plain decoding's."""
    plot: Path = Path("runs/plots/benchmark.png")
    """Where the picture goes."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "repeats", "num_seeds")
        check_above(self, 0, "max_minutes")
        check_names(self.systems or ())
        known = (EXACT, TYPICAL, *RULES)
        for rule in self.acceptance:
            if rule not in known:
                raise ValueError(f"acceptance must be of {', '.join(known)}; got {rule!r}")
        if self.systems is not None and ALL_DRAFTERS not in self.systems:
            reads_draft_model = ["draft-model"] if ASSISTED in self.systems else []
            check_read_by(self.drafters, *self.systems, *reads_draft_model)


def benchmark(options: BenchmarkOptions) -> list[str]:
    """Measure all systems in all settings, print tables, draw, and report."""
    model = load_model(options.model, _wants_heads(options), options.prompts, _holds_weights(options))
    settings = list(_make_settings(model, options))
    names = options.systems or default_names(model)
    systems, skipped = make_systems(
        names if PLAIN in names else [PLAIN, *names],
        model,
        options.drafters,
        options.llama_cpp,
        options.acceptance,
        options.answers.temperature == 0,
    )
    rates = measured_rates(model.device, model.base.dtype)
    by_setting: list[dict[str, Any]] = []
    counts: RankCounts | None = None
    shown: list[Answer] = []
    for setting in settings:
        answers, reasons = _answers_in(setting, model, systems, options)
        if counts is None and options.answers.temperature == 0 and any(a.system == HEADS for a in answers):
            counts = calibrated_counts(model, answers, setting)
        by_setting.append(_measured_setting(model, setting, answers, rates, counts, options))
        skipped = reasons | skipped
        shown = shown or answers
    values = {
        **by_setting[0],
        "by_setting": by_setting,
        "skipped": skipped,
        "device_rates": asdict(rates),
        **measured_on(model),
        "temperature": options.answers.temperature,
        "max_new_tokens": options.answers.max_new_tokens,
        "repeats": options.repeats,
        "num_seeds": options.num_seeds,
        "seed": options.answers.seed,
    }
    report = Report(values)
    if options.show:
        add_texts(report, model.tokenizer, load_prompts(options.prompts), settings[0], shown)
    add_tables(report)
    machine = f"{values['device']}, {values['dtype']}, {values['engine']}"
    heads = short_name(options.model.named_heads or "no heads")
    title = f"{short_name(values['base'])} with {heads} on {machine}"
    report.add_picture(options.plot, partial(plot_benchmark, values, title=title))
    report.publish(options.report.json)
    return [_answer_with_fastest(model.tokenizer, values, options)]


def _wants_heads(options: BenchmarkOptions) -> bool:
    """Whether to load heads: when they take part, or might."""
    if needs_heads(options.systems):
        return True
    return options.model.named_heads is not None and ALL_DRAFTERS in (options.systems or ())


def _holds_weights(options: BenchmarkOptions) -> bool | None:
    """Whether the base's own weights are wanted: ``transformers`` takes part, or answers of a quantised model
    are held against them. None is by default, or for that: not of a base whose own weights are quantised."""
    if any(name in THEIRS for name in options.systems or ()):
        return True
    compares = options.model.engine in QUANTISED and options.answers.temperature == 0
    return None if options.systems is None or compares else False


def _make_settings(model: MedusaModel, options: BenchmarkOptions) -> Iterator[Setting]:
    """Every batch size after every context length, with the prompts that these make."""
    prompts = load_prompts(options.prompts)
    lengths = options.context_lengths or (None,)
    longest = max((length for length in lengths if length is not None), default=0)
    exchanges = []
    if longest:
        everything = load_prompts(options.prompts, take_all=True)
        exchanges = build_history(model, everything, longest)
    for length, batch_size in product(lengths, options.batch_sizes):
        filled = prompts
        if length is not None:
            filled = [pad_with_history(model, prompt, exchanges, length) for prompt in prompts]
        encoded = encode_prompts(model, filled, options.answers.max_new_tokens)
        categories = [prompt.category for prompt in prompts]
        yield Setting(batch_size, length, encoded, categories, options.num_seeds)


def _answer_arguments(options: BenchmarkOptions) -> dict[str, Any]:
    """For ``generate``: how long, and greedy or sampled; from all tokens where rules for sampled drafts are
    compared, so that the same command compares the same distributions on every base."""
    arguments = {"max_new_tokens": options.answers.max_new_tokens, **options.answers.sampling}
    compares_rules = options.answers.temperature > 0 and {*options.acceptance} - {EXACT, TYPICAL}
    return NOTHING_LEFT_OUT | arguments if compares_rules else arguments


def _answers_in(
    setting: Setting, model: MedusaModel, systems: Mapping[str, System], options: BenchmarkOptions
) -> tuple[list[Answer], dict[str, str]]:
    """The answers of all systems in one setting, and the reasons of missing ones."""
    request = Request.for_base(model.base, _answer_arguments(options), options.repeats, options.answers.seed)
    log_console().print(f"warming up, {setting.label}", style="dim")
    working, reasons = runnable(systems, setting, request)
    num_settings = len(options.batch_sizes) * len(options.context_lengths or (None,))
    seconds = None if options.max_minutes is None else 60 * options.max_minutes / num_settings
    return measure(working, setting, request, seconds, f"measuring, {setting.label}"), reasons


def _measured_setting(
    model: MedusaModel,
    setting: Setting,
    answers: Sequence[Answer],
    rates: DeviceRates,
    counts: RankCounts | None,
    options: BenchmarkOptions,
) -> dict[str, Any]:
    """One setting's numbers; ``counts`` is the heads' calibration."""
    is_greedy = options.answers.temperature == 0
    is_exact = model.base.dtype == torch.float32
    is_same_model = model.runtime.engine not in QUANTISED
    values = setting_report(answers, is_greedy, is_exact, is_same_model, options.num_seeds)
    return {
        "label": setting.label,
        "batch_size": setting.batch_size,
        "context_length": setting.context_length,
        "num_prompt_tokens": setting.num_prompt_tokens,
        **values,
        **bounds(model, setting, answers, values, rates, counts),
        "divergence": {} if is_exact or not is_greedy else divergences(model, answers, setting),
    }


def _answer_with_fastest(tokenizer: Any, values: Mapping[str, Any], options: BenchmarkOptions) -> str:
    """The command that answers with the drafter or the heads that answered fastest, exactly."""
    milliseconds = values["milliseconds_per_token"]
    exact = [name for name in values["step_milliseconds"] if drafter_and_rule(name)[1] == EXACT]
    fastest = min(exact, key=milliseconds.__getitem__)
    others = dict(name.split("=", 1) for name in options.systems or () if "=" in name)
    if fastest in others:
        return answer_with(tokenizer, HEADS, replace(options.model, heads=others[fastest]), options.drafters)
    return answer_with(tokenizer, fastest, options.model, options.drafters)
