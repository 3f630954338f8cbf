"""Part 3: how fast does SmolLM2 answer with the shipped heads, beside plain decoding and transformers?

In: prompts, and answers of SmolLM2 on which the tree is chosen that is fastest on this device. Out, for each
precision and batch size, that choice and the report of ``medusa benchmark``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from gpu_parts.lab import Lab
from medusa import MedusaModel
from medusa.choices import Dtype
from medusa.cli.jobs import benchmark as benchmark_job
from medusa.cli.options import AnswerOptions, PromptOptions
from medusa.cli.program import answered_tokens, encode_prompts, heads_of
from medusa.drafters.protocol import host_bound_parts
from medusa.drafters.registry import drafter_named
from medusa.heads.calibration import calibrate
from medusa.measurement.benchmark import print_tables
from medusa.measurement.parts import Case, Part, Results
from medusa.measurement.tuning import fastest, measured_sizes, trees_by_size
from medusa.places import shipped_files
from medusa.prompts import read_prompts
from medusa.tables import number, print_table, times

COMPILED = "transformers-static"
"""Compiling takes a minute or more: it takes part once, and only on a card."""
CONTENDERS = ("transformers", COMPILED, "plain", "heads", "dynamic-heads+suffix", "default")


def cases(lab: Lab) -> Iterator[Case]:
    fitted = functools.cache(lambda dtype: fitted_model(lab, dtype))
    uncompiled = [name for name in CONTENDERS if name != COMPILED]
    names = list(CONTENDERS) if lab.device.type == "cuda" else uncompiled
    first, other = lab.scale.speed_minutes

    def measured(dtype: Dtype, rows: int, names: Sequence[str], minutes: float) -> Results:
        model, chosen = fitted(dtype)
        return {**chosen, "benchmark": speed(lab, model, rows, names, minutes)}

    yield Case("bfloat16, 1 row", lambda: measured("bfloat16", 1, names, first), 5.0)
    yield Case("float32, 1 row", lambda: measured("float32", 1, uncompiled, other), 2.0)
    yield Case("bfloat16, 8 rows", lambda: measured("bfloat16", 8, uncompiled, other), 1.8)


def fitted_model(lab: Lab, dtype: Dtype) -> tuple[MedusaModel, Results]:
    """SmolLM2 with the shipped heads in the tree that is fastest here, and how that was found."""
    model, scale = lab.model(dtype), lab.scale
    if not host_bound_parts(drafter_named("heads", model)):
        model.step = lab.graphs
    prompts = read_prompts(lab.answers, scale.num_answers)
    encoded = encode_prompts(model, prompts, scale.longest_answer)
    answers = AnswerOptions(max_new_tokens=scale.longest_answer)
    rows = [answered_tokens(model, *pair, answers) for pair in zip(prompts, encoded, strict=True)]
    counts = calibrate(model.base, heads_of(model), rows, batch_size=8)
    trees = trees_by_size(counts, scale.tree_sizes)
    gains = {size: counts.held_out_tokens_per_step(size) for size in trees}
    longest = sorted(range(len(rows)), key=lambda index: -sum(rows[index].is_label))[:5]
    table = measured_sizes(model, trees, gains, [encoded[index] for index in longest])
    best = fastest(table)
    model.use_tree(trees[best.num_nodes])
    sizes = [asdict(each) | {"tokens_per_second": each.tokens_per_second} for each in table]
    return model, {
        "chosen": best.num_nodes,
        "tree": [list(path) for path in model.tree.paths],
        "sizes": sizes,
    }


def speed(lab: Lab, model: MedusaModel, rows: int, names: Sequence[str], minutes: float) -> Results:
    """The report of ``medusa benchmark`` on this model."""
    options = benchmark_job.BenchmarkOptions(
        prompts=PromptOptions(speed_prompts(lab), lab.scale.num_speed),
        answers=AnswerOptions(max_new_tokens=lab.scale.speed_tokens),
        contenders=tuple(names),
        llama_cpp=(),
        batch_sizes=(rows,),
        max_minutes=max(0.05, min(minutes, lab.minutes_left)),
    )
    contenders, skipped = benchmark_job.chosen_contenders(model, options)
    rates = lab.rates(model.base.dtype)
    (setting,) = benchmark_job.make_settings(model, options)
    found, _, missing = benchmark_job.measured_setting(model, setting, contenders, rates, None, options)
    return benchmark_job.make_report(model, [found], skipped | missing, rates, options)


def speed_prompts(lab: Lab) -> Path:
    """The prompts asked for, or the last of the demo's, which no tree is chosen on."""
    if lab.options.prompts is not None:
        return lab.options.prompts
    path = lab.options.output / "speed_prompts.jsonl"
    lines = (shipped_files() / "demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[-lab.scale.num_speed :]) + "\n", encoding="utf-8")
    return path


def tables(measured: Mapping[str, Results], console: Console) -> None:
    rows = []
    for name, each in measured.items():
        report = each["benchmark"]
        per_token = report["milliseconds_per_token"]
        theirs = per_token.get("transformers")
        rows += [
            [
                name,
                contender,
                f"{1000 / milliseconds:.1f}",
                times(report["speedup_over_plain"][contender]),
                times(None if theirs is None else theirs / milliseconds),
                number(report["tokens_per_step_of"].get(contender)),
            ]
            for contender, milliseconds in per_token.items()
        ]
    if rows:
        headers = ["setting", "contender", "tokens/s", "x plain", "x transformers", "tokens per step"]
        print_table(console, "Speed of SmolLM2", headers, rows, num_labels=2)
    for name, each in measured.items():
        console.rule(f"{name}: a tree of {each['chosen']} nodes was fastest")
        print_tables(each["benchmark"], console)


PART = Part(3, "speed", 9.5, cases, tables)
