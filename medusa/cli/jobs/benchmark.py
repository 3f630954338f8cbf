"""``medusa benchmark``: heads against plain decoding, transformers and llama.cpp, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import medusa
from medusa.cli.options import (
    DrafterOptions,
    GrowingInts,
    ProgramOptions,
    check_above,
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
from medusa.engine import QUANTISED_BYTES
from medusa.hardware import DeviceRates, measured_rates
from medusa.measurement.benchmark import (
    Asking,
    Setting,
    able,
    bounds,
    calibrated_counts,
    divergences,
    measure,
    plot_benchmark,
    print_tables,
    setting_report,
)
from medusa.measurement.contenders import (
    HEADS,
    PLAIN,
    Contender,
    check_names,
    default_names,
    make_contenders,
    needs_heads,
)
from medusa.measurement.prompts import earlier_exchanges, lengthened
from medusa.model import MedusaModel
from medusa.plots import short_name
from medusa.progress import log_console
from medusa.trees.rank_counts import RankCounts


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(ProgramOptions):
    """How fast are these heads? Against plain decoding on the same engine, every way transformers
    generates, and llama.cpp where it is installed and has a GGUF file of the base.

    All contenders answer each batch of prompts one after the other, in an order that rotates, so that a
    machine that slows down does so for all; each warms up first. Times are medians over batches of
    seconds per new token, prefill included; tokens are counted alike for all. Each batch size and each
    context length is a setting of its own; a context length puts earlier turns (other prompts with the
    model's own answers) before each question. f_hw is the least time the device needs for a step over the
    step's time; bandwidth and arithmetic are measured first, by a sum over a large buffer and a large
    matrix product. f_tree is tokens per step over what the heads' best tree of as many nodes should give
    on these answers. Prints tables, draws a PNG, and ends with a JSON report. Run it with nothing else
    running.

        medusa benchmark
        medusa benchmark --heads HEADS --prompts FILE --limit 20 --max-new-tokens 128 --repeats 3
        medusa benchmark --batch-sizes 1,2,4,8,16 --max-minutes 30
        medusa benchmark --context-lengths 128,1024,4096 --contenders transformers heads
        medusa benchmark --contenders heads heads+suffix suffix --temperature 0.7 --seed 3
        medusa benchmark --contenders heads llama.cpp-q8_0 --engine int8 --llama-cpp MODEL-q8_0.gguf
    """

    drafters: DrafterOptions = DrafterOptions()
    contenders: tuple[str, ...] | None = None
    """Of transformers, transformers-static, prompt-lookup, assisted, llama.cpp, default (generate with
    nothing named), the drafters, or a union such as heads+suffix; plain always takes part. None is
    transformers' own, llama.cpp, plain, heads and default; transformers-static, which compiles, not on a
    CPU."""
    llama_cpp: tuple[Path, ...] | None = None
    """GGUF files of the base for llama.cpp, each a contender: MODEL-q8_0.gguf is llama.cpp-q8_0. None is
    those in the base's directory."""
    batch_sizes: GrowingInts = (1,)
    """Rows decoded together."""
    context_lengths: GrowingInts | None = None
    """Fill prompts with earlier turns up to so many tokens; none leaves prompts as they are."""
    repeats: int = 1
    """Times each prompt is answered."""
    max_minutes: float | None = None
    """Stop measuring about then, each setting having had its share; none measures everything."""
    plot: Path = Path("runs/plots/benchmark.png")
    """Where the picture goes."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "repeats")
        check_above(self, 0, "max_minutes")
        check_names(self.contenders or ())


def benchmark(options: BenchmarkOptions) -> list[str]:
    """Measure all contenders in all settings, print tables, draw, and report."""
    model = load_model(options.model, with_heads=needs_heads(options.contenders))
    settings = list(make_settings(model, options))
    contenders, skipped = chosen_contenders(model, options)
    rates = measured_rates(model.device, model.base.dtype)
    reports = []
    counts: RankCounts | None = None
    for setting in settings:
        found, counts, missing = measured_setting(model, setting, contenders, rates, counts, options)
        reports.append(found)
        skipped |= {name: reason for name, reason in missing.items() if name not in skipped}
    report = make_report(model, reports, skipped, rates, options)
    print_tables(report, table_console())
    machine = f"{report['device']}, {report['dtype']}, {report['engine']}"
    title = f"{short_name(report['base'])} with {short_name(options.model.heads)} on {machine}"
    plot_benchmark(report, options.plot, title)
    log_picture(options)
    report_json(report, options.report)
    milliseconds = {name: report["milliseconds_per_token"][name] for name in report["step_milliseconds"]}
    return [chat_with(min(milliseconds, key=milliseconds.__getitem__), options.model, options.drafters)]


def make_settings(model: MedusaModel, options: BenchmarkOptions) -> Iterator[Setting]:
    """Every batch size after every context length, with the prompts that these make."""
    prompts, lengths = load_prompts(options.prompts), options.context_lengths or (None,)
    longest = max((length for length in lengths if length is not None), default=0)
    exchanges = []
    if longest:
        everything = load_prompts(options.prompts, take_all=True)
        exchanges = earlier_exchanges(model, everything, longest)
    for length, batch_size in product(lengths, options.batch_sizes):
        filled = prompts
        if length is not None:
            filled = [lengthened(model, prompt, exchanges, length) for prompt in prompts]
        encoded = encode_prompts(model, filled, options.answers.max_new_tokens)
        yield Setting(batch_size, length, encoded, [prompt.category for prompt in prompts])


def chosen_contenders(
    model: MedusaModel, options: BenchmarkOptions
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Who takes part, plain decoding among them, and why others do not."""
    settings = drafter_settings(options.drafters)
    names = options.contenders or default_names(model)
    names = names if PLAIN in names else [PLAIN, *names]
    return make_contenders(names, model, settings, options.answers.seed, options.llama_cpp)


def measured_setting(
    model: MedusaModel,
    setting: Setting,
    contenders: Mapping[str, Contender],
    rates: DeviceRates,
    counts: RankCounts | None,
    options: BenchmarkOptions,
) -> tuple[dict[str, Any], RankCounts | None, dict[str, str]]:
    """One setting's report, the heads' calibration (that of the first setting), and who could not answer."""
    is_greedy, is_exact = options.answers.temperature == 0, model.base.dtype == torch.float32
    asking = Asking.for_base(model.base, generation_arguments(options.answers), options.repeats)
    log_console().print(f"warming up, {setting.label}", style="dim")
    working, reasons = able(contenders, setting, asking)
    num_settings = len(options.batch_sizes) * len(options.context_lengths or (None,))
    seconds = None if options.max_minutes is None else 60 * options.max_minutes / num_settings
    answers = measure(working, setting, asking, seconds, f"measuring, {setting.label}")
    report = setting_report(
        answers, is_greedy, is_exact, is_same_model=model.runtime.engine not in QUANTISED_BYTES
    )
    if counts is None and is_greedy and HEADS in working:
        counts = calibrated_counts(model, answers, setting)
    return (
        {
            "batch_size": setting.batch_size,
            "context_length": setting.context_length,
            "num_prompt_tokens": setting.num_prompt_tokens,
            **report,
            **bounds(model, setting, answers, report, rates, counts),
            "divergence": {} if is_exact or not is_greedy else divergences(model, answers, setting),
        },
        counts,
        reasons,
    )


def make_report(
    model: MedusaModel,
    reports: Sequence[dict[str, Any]],
    skipped: Mapping[str, str],
    rates: DeviceRates,
    options: BenchmarkOptions,
) -> dict[str, Any]:
    """The JSON object of this program: the first setting's numbers, then all settings."""
    return {
        **reports[0],
        "by_setting": list(reports),
        "skipped": dict(skipped),
        "device_rates": asdict(rates),
        **asdict(model.runtime),
        "num_threads": torch.get_num_threads(),
        "base": model.base.name_or_path,
        "medusa": medusa.__version__,
        "temperature": options.answers.temperature,
        "max_new_tokens": options.answers.max_new_tokens,
        "repeats": options.repeats,
        "seed": options.answers.seed,
    }
