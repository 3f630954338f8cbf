"""Part 5: what do the shipped heads gain by training on, as long as minutes are left?

In: answers of the base (--data), or else its answers to prompts that are written first. Out: the curve of a
run that every later call goes on with, and ``medusa evaluate`` of its heads beside the shipped ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from gpu_parts.lab import Lab
from medusa.files import read_json
from medusa.heads.checkpoint import load_heads
from medusa.measurement.parts import Case, Part, Results
from medusa.tables import number, percent, print_table
from medusa.training.config.options import HeadOptions, MedusaOptions
from medusa.training.run.run_directory import RunDirectory


def cases(lab: Lab) -> Iterator[Case]:
    data = list(lab.options.data)
    if not data:
        data = [lab.folder / "answers.jsonl"]
        yield Case("answers", lambda: more_answers(lab, data[0]), 1.0)
    yield Case("heads", lambda: longer_run(lab, data), 1.5)
    yield Case("evaluation", lambda: evaluated(lab), 1.0)


def run_of(lab: Lab) -> RunDirectory:
    """The one run of this part."""
    return RunDirectory(lab.folder / "run")


def more_answers(lab: Lab, path: Path) -> Results:
    """Answers of the base to prompts that are written first, for a third of what is left."""
    prompts, minutes = lab.folder / "prompts.jsonl", max(0.2, lab.minutes_left / 3)
    lab.folder.mkdir(parents=True, exist_ok=True)
    if not prompts.exists():
        lab.command("write-prompts", number=lab.scale.written_prompts, seed=11, output=prompts)
    began = time.monotonic()
    if not run_of(lab).config.exists():  # a run that has begun keeps its data
        lab.command(
            "distill",
            prompts=prompts,
            output=path,
            temperatures=[0, 0, 0.8],
            max_new_tokens=lab.scale.longest_answer,
            batch_size=lab.scale.answers_at_once,
            max_minutes=minutes,
            base=lab.options.base,
            device=lab.device,
        )
    with path.open(encoding="utf-8") as lines:
        count = sum(1 for _ in lines)
    return {"answers": {"conversations": count, "minutes": (time.monotonic() - began) / 60}}


def longer_run(lab: Lab, data: Sequence[Path]) -> Results:
    """Train the shipped heads on, as ``configs/smollm2_shipped.yaml`` does; another run goes on with it."""
    run = run_of(lab)
    before = max((entry.get("minutes", 0.0) for entry in run.logged_metrics()), default=0.0)
    minutes = before + min(lab.scale.most_longer_minutes, max(0.1, lab.minutes_left - 3.0))
    heads = load_heads(lab.options.heads).heads.config
    lab.command(
        "train",
        config="smollm2_shipped",
        base=lab.options.base,
        data=data,
        start_from=lab.options.heads,
        **head_flags(heads),
        output_dir=run.path,
        max_minutes=f"{minutes:.2f}",
        tokens_per_batch=lab.scale.longer_batch,
        max_length=min(1024, lab.scale.longer_batch),
        evaluation_steps=lab.scale.evaluation_steps,
        resume="auto",
    )
    entries = run.logged_metrics()
    curve = [entry for entry in entries if "held_out/loss" in entry]
    return {"curve": curve, "log": entries[-3:], "heads": str(run.heads), "picture": str(run.picture)}


def head_flags(config: Any) -> dict[str, object]:
    """The training options that new heads of the same kind as ``config`` want, as flags."""
    options = {each.name for kind in (HeadOptions, MedusaOptions) for each in fields(kind)}
    given = {name: getattr(config, name) for name in sorted(options) if hasattr(config, name)}
    return {
        name: str(value).lower() if value is None or isinstance(value, bool) else value or "none"
        for name, value in given.items()
    }


def evaluated(lab: Lab) -> Results:
    """The shipped heads and those of the run, on the prompts that ship, in trees of one size."""
    found, calibration = {}, calibration_file(lab)
    for name, heads in (("shipped", lab.options.heads), ("longer", run_of(lab).heads)):
        report = lab.folder / f"{name}.json"
        lab.command(
            "evaluate",
            base=lab.options.base,
            heads=heads,
            device=lab.device,
            limit=lab.scale.num_evaluated,
            max_new_tokens=lab.scale.speed_tokens,
            tree_nodes=max(lab.scale.tree_sizes),
            calibrate_on=calibration,
            json=report,
            plot=lab.folder / f"{name}.png",
        )
        found[name] = read_json(report)
    return {"evaluations": found}


def calibration_file(lab: Lab) -> Path:
    """Some of the answers that all parts share."""
    path = lab.folder / "calibration.jsonl"
    lines = lab.answers.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:100]) + "\n", encoding="utf-8")
    return path


def tables(measured: Mapping[str, Results], console: Console) -> None:
    for each in measured.values():
        if "curve" in each:
            rows = [
                [str(entry["step"]), f"{entry.get('num_tokens', 0):,}", f"{entry['held_out/loss']:.3f}",
                 percent(entry["held_out/top1_1"]), number(entry.get("held_out/tokens_per_step"))]
                for entry in each["curve"]
            ]  # fmt: skip
            headers = ["step", "tokens seen", "held-out loss", "head 1, top-1", "tokens per step"]
            print_table(console, "Trained on", headers, rows)
        if "evaluations" in each:
            print_evaluations(each["evaluations"], console)


def print_evaluations(reports: Mapping[str, Results], console: Console) -> None:
    """Tokens per step, and acceptance at the first depths; the deepest may be missing for some heads."""
    rows = [
        [name, number(report["tokens_per_step"]), *map(percent, report["acceptance_rate"][:4])]
        for name, report in reports.items()
    ]
    width = max(map(len, rows))
    rows = [[*row, *["-"] * (width - len(row))] for row in rows]
    headers = ["heads", "tokens per step", *(f"depth {depth}" for depth in range(1, width - 1))]
    print_table(console, "Decoding in trees of equal size", headers, rows)


PART = Part(5, "longer", 9.5, cases, tables, is_open_ended=True)
