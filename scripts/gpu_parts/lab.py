"""What the parts share: the options, how large things are, and the lab.

In: the command line, parsed into :class:`GpuOptions`. Out: a :class:`Lab` for each part, which gives its
cases the device, models, answers of SmolLM2, a folder for files, and the minutes that are left. It keeps no
results: cases return theirs, and :mod:`medusa.measurement.parts` writes them.
"""

from __future__ import annotations

import functools
import gc
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from medusa import MedusaModel
from medusa.base.causal_lm import CausalLM
from medusa.choices import Dtype, Engine, StepKind
from medusa.cli.main import main as medusa_command
from medusa.cli.options import (
    EMBEDDED_HEADS,
    GrowingInts,
    ModelOptions,
    ReportOptions,
    check_above,
    check_at_least,
)
from medusa.cli.program import chosen_device, load_model
from medusa.hardware import DeviceRates, measured_rates
from medusa.measurement.parts import Part
from medusa.places import EMBEDDED_BASE
from medusa.progress import log_console

# ------------------------------------------------------------------ options


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
"""Those of a dry run."""


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


# ------------------------------------------------------------------ sizes that no option sets


@dataclass(frozen=True)
class Scale:
    """How large the parts are that no option sizes."""

    # Exactness
    num_prompts: int = 4
    """Answered alone and as one batch."""
    new_tokens: int = 48
    """Of each of these answers."""
    growing_tokens: int = 600
    """Of an answer that outgrows its cache."""
    num_plain: int = 24
    """Prompts whose answers in bfloat16 are compared."""
    # Speed
    num_speed: int = 40
    """Prompts."""
    speed_tokens: int = 128
    """Of each answer."""
    tree_sizes: tuple[int, ...] = (1, 4, 8, 16, 32, 64)
    speed_minutes: tuple[float, float] = (3.6, 1.2)
    """Of measuring in bfloat16, and in each other setting."""
    # Training
    trained_shape: str = "llama-8b"
    trained_tokens: int = 16384
    """Of a micro-batch."""
    trained_steps: int = 12
    compared_steps: int = 120
    """Of runs whose losses are compared."""
    compared_batch: int = 4096
    """Tokens of their micro-batches."""
    # Longer
    written_prompts: int = 12000
    longer_batch: int = 8192
    """Tokens of a micro-batch."""
    most_longer_minutes: float = 30.0
    evaluation_steps: int = 200
    num_evaluated: int = 17
    """Prompts."""
    # Answers of SmolLM2, which trees are chosen, and heads are trained and tried on
    num_answers: int = 240
    longest_answer: int = 192
    answers_at_once: int = 384


FULL = Scale()
TINY = Scale(
    num_prompts=2,
    new_tokens=6,
    growing_tokens=12,
    num_plain=2,
    num_speed=2,
    speed_tokens=6,
    tree_sizes=(1, 4),
    speed_minutes=(0.05, 0.05),
    trained_shape="tiny",
    trained_tokens=256,
    trained_steps=4,
    compared_steps=3,
    compared_batch=256,
    written_prompts=8,
    longer_batch=512,
    most_longer_minutes=0.05,
    evaluation_steps=5,
    num_evaluated=2,
    num_answers=6,
    longest_answer=12,
    answers_at_once=8,
)


# ------------------------------------------------------------------ the lab


class Lab:
    """What the cases of a part share: options, device, folder, time, models."""

    def __init__(self, options: GpuOptions, part: Part):
        self.options, self.scale = options, TINY if options.dry_run else FULL
        self.device = chosen_device(options.device)
        self.folder = options.output / part.file
        self.ends = time.monotonic() + 60 * options.minutes
        self.log = log_console()
        self._held: dict[str, CausalLM] = {}

    @property
    def minutes_left(self) -> float:
        return (self.ends - time.monotonic()) / 60

    @property
    def graphs(self) -> StepKind:
        """The fastest kind of step that runs here: captured, but for a dry run."""
        return "captured" if self.device.type == "cuda" else "static"

    @functools.cache  # noqa: B019  # one lab lives as long as its process
    def rates(self, dtype: torch.dtype) -> DeviceRates:
        """How fast the device reads and multiplies, measured once."""
        return measured_rates(self.device, dtype)

    def model(self, dtype: Dtype) -> MedusaModel:
        """SmolLM2 with its heads, on the device, as loaded."""
        return load_model(
            ModelOptions(
                self.options.base, self.options.heads, device=str(self.device), dtype=dtype, engine="eager"
            )
        )

    def only_base(self, name: str, make: Callable[[], CausalLM]) -> CausalLM:
        """What ``make`` gives, kept until another name is asked for: two large ones may not fit."""
        if name not in self._held:
            self._held.clear()
            gc.collect()
            self._held[name] = make()
        return self._held[name]

    @functools.cached_property
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
