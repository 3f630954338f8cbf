"""How fast are these heads? Against plain decoding on the same engine, and transformers' own generate.

All contenders answer each prompt one after the other, in an order that rotates, so that a machine
that slows down does so for all. Times are medians over prompts of seconds per new token, prefill
included; tokens are counted alike for all. Prints tables and ends with one line of JSON. Run it with
nothing else running.

    python inference/benchmark.py
    python inference/benchmark.py --heads HEADS --prompts FILE --limit 20 --max-new-tokens 128 --repeats 3
    python inference/benchmark.py --temperature 0.7 --seed 3
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from medusa.flags import ProgramOptions, positive_int, program_parser
from medusa.model import MedusaModel, MedusaOutput
from medusa.programs import (
    encode_prompts,
    exit_status,
    generation_arguments,
    load_model,
    load_prompts,
    report_json,
    track,
)
from medusa.statistics import DecodingStatistics
from medusa.tree import CandidateTree

NUM_WARM_UPS = 3
TRANSFORMERS, PLAIN, HEADS = "transformers", "plain", "heads"


class BenchmarkOptions(ProgramOptions):
    """The flags, parsed."""

    repeats: int


@dataclass(frozen=True)
class Timing:
    """One answer of one contender."""

    contender: str
    prompt: int
    category: str
    tokens: tuple[int, ...]
    """The new tokens."""
    seconds: float
    """Of the whole call."""
    statistics: DecodingStatistics | None

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / len(self.tokens)


Contender = Callable[[Mapping[str, Tensor]], MedusaOutput | Any]
"""Answers one encoded prompt; the result has ``sequences``, and ``statistics`` where it is ours."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    parser = program_parser(__doc__ or "")
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=1,
        metavar="N",
        help="times each prompt is answered (default: 1)",
    )
    options = parser.parse_args(arguments, namespace=BenchmarkOptions())
    return exit_status(lambda: benchmark(options), options.traceback)


def benchmark(options: BenchmarkOptions) -> None:
    """Measure all contenders, print tables and the report."""
    model = load_model(options)
    prompts = load_prompts(options)
    encoded = encode_prompts(model, prompts, options.max_new_tokens)
    contenders = make_contenders(model, options)
    for number, contender in track(list(product(range(NUM_WARM_UPS), contenders.values())), "warming up"):
        contender(encoded[number % len(encoded)])

    rounds = list(product(range(options.repeats), range(len(prompts)), range(len(contenders))))
    names, timings = list(contenders), []
    for repeat, number, turn in track(rounds, "measuring"):
        name = names[(repeat + number + turn) % len(names)]
        category = prompts[number].category
        timings.append(timed(contenders[name], encoded[number], name, number, category))
    report = make_report(timings, is_greedy=options.temperature == 0)
    print_tables(report, Console(highlight=False))
    report_json(report, options)


def make_contenders(model: MedusaModel, options: ProgramOptions) -> dict[str, Contender]:
    """Everyone who answers, by name. Another baseline is another line here."""
    arguments = {**generation_arguments(options), "return_dict_in_generate": True}
    ours = partial(model.generate, seed=options.seed, **arguments)
    return {
        TRANSFORMERS: lambda inputs: model.base.generate(**inputs, **arguments),
        PLAIN: lambda inputs: ours(**inputs, tree=CandidateTree.chain(0)),
        HEADS: lambda inputs: ours(**inputs),
    }


def timed(
    contender: Contender, inputs: Mapping[str, Tensor], name: str, prompt: int, category: str
) -> Timing:
    """Let a contender answer, and take the time."""
    _wait_for_device(inputs["input_ids"].device)
    began = time.perf_counter()
    output = contender(inputs)
    _wait_for_device(output.sequences.device)
    seconds = time.perf_counter() - began
    tokens = tuple(output.sequences[0, inputs["input_ids"].shape[1] :].tolist())
    return Timing(name, prompt, category, tokens, seconds, getattr(output, "statistics", None))


def make_report(timings: Sequence[Timing], is_greedy: bool) -> dict[str, Any]:
    """The JSON object of this program.

    When sampling, ``transformers`` draws from another generator, so only our own two are compared
    token by token.
    """
    compared = {TRANSFORMERS, PLAIN, HEADS} if is_greedy else {PLAIN, HEADS}
    prompts = sorted({timing.prompt for timing in timings})
    num_identical = sum(
        len({t.tokens for t in timings if t.prompt == prompt and t.contender in compared}) == 1
        for prompt in prompts
    )
    categories = sorted({timing.category for timing in timings})
    return {
        **speeds(timings),
        "identical": num_identical == len(prompts),
        "num_identical": num_identical,
        "compared": sorted(compared),
        "num_prompts": len(prompts),
        "num_tokens": sum(len(t.tokens) for t in _first_of_each(timings, HEADS)),
        "by_category": {
            category: speeds([timing for timing in timings if timing.category == category])
            for category in categories
        },
    }


def speeds(timings: Sequence[Timing]) -> dict[str, Any]:
    """Speeds over some prompts: medians over prompts, each prompt the median of its repeats."""
    per_token = {
        name: _median_over_prompts(timings, name, lambda timing: timing.seconds_per_token)
        for name in (TRANSFORMERS, PLAIN, HEADS)
    }
    step = {name: _median_over_prompts(timings, name, _step_seconds) for name in (PLAIN, HEADS)}
    counted = [t.statistics for t in _first_of_each(timings, HEADS) if t.statistics is not None]
    total = sum(counted, DecodingStatistics())
    return {
        "tokens_per_step": total.tokens_per_step,
        "overhead": step[HEADS] / step[PLAIN],
        "speedup_vs_plain": per_token[PLAIN] / per_token[HEADS],
        "speedup_vs_transformers": per_token[TRANSFORMERS] / per_token[HEADS],
        "milliseconds_per_token": {name: 1000 * seconds for name, seconds in per_token.items()},
        "milliseconds_per_step": {name: 1000 * seconds for name, seconds in step.items()},
    }


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Speed of each contender, then the gain by category."""
    per_token = report["milliseconds_per_token"]
    table = Table(title="Speed, medians over prompts", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for name in ("ms/token", "tokens/s", "against plain", "ms/step", "tokens/step"):
        table.add_column(name, justify="right")
    for name, milliseconds in per_token.items():
        step = report["milliseconds_per_step"].get(name)
        table.add_row(
            name,
            f"{milliseconds:.1f}",
            f"{1000 / milliseconds:.1f}",
            f"{per_token[PLAIN] / milliseconds:.2f}x",
            "-" if step is None else f"{step:.1f}",
            f"{report['tokens_per_step'] if name == HEADS else 1:.2f}",
        )
    console.print(table)

    gains = Table(title="Heads, by category", title_justify="left")
    gains.add_column("category")
    for name in ("tokens per step", "overhead", "against plain", "against transformers"):
        gains.add_column(name, justify="right")
    for category, entry in report["by_category"].items():
        gains.add_row(category, *_gains(entry))
    gains.add_section()
    gains.add_row("all", *_gains(report), style="bold")
    console.print(gains)
    console.print(
        f"{report['num_identical']} of {report['num_prompts']} answers token-identical among "
        f"{', '.join(report['compared'])}",
        style="green" if report["identical"] else "bold red",
    )


def _gains(entry: dict[str, Any]) -> list[str]:
    return [
        f"{entry['tokens_per_step']:.2f}",
        f"{entry['overhead']:.2f}",
        f"{entry['speedup_vs_plain']:.2f}x",
        f"{entry['speedup_vs_transformers']:.2f}x",
    ]


def _median_over_prompts(
    timings: Sequence[Timing], contender: str, value: Callable[[Timing], float | None]
) -> float:
    by_prompt: dict[int, list[float]] = {}
    for timing in timings:
        if timing.contender == contender and (measured := value(timing)) is not None:
            by_prompt.setdefault(timing.prompt, []).append(measured)
    if not by_prompt:
        raise ValueError("every answer ended with its first token, so no step was timed; give other prompts")
    return median(median(repeats) for repeats in by_prompt.values())


def _step_seconds(timing: Timing) -> float | None:
    """Seconds of a decode step; None when the answer ended with the prefill."""
    counted = timing.statistics
    return counted.decode_seconds / counted.num_steps if counted and counted.num_steps else None


def _first_of_each(timings: Sequence[Timing], contender: str) -> list[Timing]:
    """One timing for each prompt, whatever the number of repeats."""
    return list({t.prompt: t for t in reversed(timings) if t.contender == contender}.values())


def _wait_for_device(device: torch.device) -> None:
    """Let a graphics card finish what it has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
