"""How fast are these heads? Against plain decoding on the same engine, and every way transformers generates.

All contenders answer each batch of prompts one after the other, in an order that rotates, so that a
machine that slows down does so for all; each warms up first. Times are medians over batches of seconds
per new token, prefill included; tokens are counted alike for all. Each batch size and each context
length is a setting of its own; a context length puts earlier turns (other prompts with the model's own
answers) before each question. f_hw is the least time the device needs for a step over the step's time;
bandwidth and arithmetic are measured first, by a sum over a large buffer and a large matrix product.
f_tree is tokens per step over what the heads' best tree of as many nodes should give on these answers.
Prints tables, draws a PNG, and ends with one line of JSON. Run it with nothing else running.

    python inference/benchmark.py
    python inference/benchmark.py --heads HEADS --prompts FILE --limit 20 --max-new-tokens 128 --repeats 3
    python inference/benchmark.py --batch-sizes 1,2,4,8,16 --max-minutes 30
    python inference/benchmark.py --context-lengths 128,1024,4096 --contenders transformers heads
    python inference/benchmark.py --contenders heads heads+suffix suffix --temperature 0.7 --seed 3
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

import medusa
from medusa.cli.flags import (
    DrafterOptions,
    PlotOptions,
    add_drafter_flags,
    add_plot_flag,
    positive_float,
    positive_int,
    positive_ints,
    program_parser,
)
from medusa.cli.program import (
    drafter_settings,
    encode_prompts,
    exit_status,
    generation_arguments,
    load_model,
    load_prompts,
    log_console,
    log_picture,
    report_json,
    table_console,
)
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
    contender_names,
    default_names,
    make_contenders,
    needs_heads,
)
from medusa.measurement.prompts import earlier_exchanges, lengthened
from medusa.model import MedusaModel
from medusa.plots import check_matplotlib, short_name
from medusa.trees.rank_counts import RankCounts


class BenchmarkOptions(DrafterOptions, PlotOptions):
    """The flags, parsed."""

    repeats: int
    batch_sizes: tuple[int, ...]
    context_lengths: tuple[int, ...] | None
    contenders: list[str] | None
    max_minutes: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = program_parser(__doc__ or "")
    add_drafter_flags(parser)
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--contenders",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(contender_names())}, or a union such as heads+suffix; plain always takes part "
        "(default: transformers' own, plain, heads, chat's drafter; transformers-static, which compiles, "
        "not on a CPU)",
    )
    group.add_argument(
        "--batch-sizes",
        type=positive_ints,
        default=(1,),
        metavar="B,B,...",
        help="rows decoded together (default: 1)",
    )
    group.add_argument(
        "--context-lengths",
        type=positive_ints,
        metavar="T,T,...",
        help="fill prompts with earlier turns up to so many tokens (default: prompts as they are)",
    )
    group.add_argument(
        "--repeats",
        type=positive_int,
        default=1,
        metavar="N",
        help="times each prompt is answered (default: 1)",
    )
    group.add_argument(
        "--max-minutes",
        type=positive_float,
        metavar="M",
        help="stop measuring about then, each setting having had its share (default: measure everything)",
    )
    add_plot_flag(parser, "benchmark")
    options = parser.parse_args(arguments, namespace=BenchmarkOptions())
    return exit_status(lambda: benchmark(options), options.traceback)


def benchmark(options: BenchmarkOptions) -> None:
    """Measure all contenders in all settings, print tables, draw, and report."""
    check_matplotlib()
    check_names(options.contenders or [])
    model = load_model(options, with_heads=needs_heads(options.contenders))
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
    title = f"{short_name(options.base)} with {short_name(options.heads)} on {machine}"
    plot_benchmark(report, options.plot, title)
    log_picture(options)
    report_json(report, options)


def make_settings(model: MedusaModel, options: BenchmarkOptions) -> Iterator[Setting]:
    """Every batch size after every context length, with the prompts that these make."""
    prompts, lengths = load_prompts(options), options.context_lengths or (None,)
    longest = max((length for length in lengths if length is not None), default=0)
    exchanges = []
    if longest:
        everything = load_prompts(options, take_all=True)
        exchanges = earlier_exchanges(model, everything, longest)
    for length, batch_size in product(lengths, options.batch_sizes):
        filled = prompts
        if length is not None:
            filled = [lengthened(model, prompt, exchanges, length) for prompt in prompts]
        encoded = encode_prompts(model, filled, options.max_new_tokens)
        yield Setting(batch_size, length, encoded, [prompt.category for prompt in prompts])


def chosen_contenders(
    model: MedusaModel, options: BenchmarkOptions
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Who takes part, plain decoding among them, and why others do not."""
    settings = drafter_settings(options)
    names = options.contenders or default_names(model)
    names = names if PLAIN in names else [PLAIN, *names]
    return make_contenders(names, model, settings, options.seed)


def measured_setting(
    model: MedusaModel,
    setting: Setting,
    contenders: Mapping[str, Contender],
    rates: DeviceRates,
    counts: RankCounts | None,
    options: BenchmarkOptions,
) -> tuple[dict[str, Any], RankCounts | None, dict[str, str]]:
    """One setting's report, the heads' calibration (that of the first setting), and who could not answer."""
    is_greedy, is_exact = options.temperature == 0, model.base.dtype == torch.float32
    asking = Asking.for_base(model.base, generation_arguments(options), options.repeats)
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
        "base": options.base,
        "medusa": medusa.__version__,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "seed": options.seed,
    }


if __name__ == "__main__":
    sys.exit(main())
