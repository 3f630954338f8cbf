"""How decode steps are run, chosen by one argument, ``step=``.

    step      what runs                                            needs
    general   the base's modules; the tokens of every step are     nothing
              read on the host
    static    one function over tensors that keep their place      a drafter of heads, suffix match or both,
              and shape, which never waits for the device          or plain decoding; acceptance "exact", no
              (``static.py``)                                      stopping criteria, no logits processor that
                                                                   reads the text
    compiled  as general, with passes (``engine/compiled.py``)     engine "packed" or "int8" on a CPU
              and heads (``engine/optimized_heads.py``) compiled
              ahead and kept on disk
    captured  static, replayed as a CUDA graph                     as static, on one CUDA device
    auto      captured where a call and its drafter can be, else   nothing
              general; where capturing fails, this once static

The tokens are the same. Models sharded over devices (``device_map``) run ``general`` and ``static``.

A batch that requests join (``MedusaModel.continuous_batch``, ``medusa serve``) chooses for all of its rows at
once, and anew whenever rows have come or gone (``shared_rows.py``): static or captured steps while every row
can be in them, general ones while one cannot. There a repetition penalty can be in them too, and
log-probabilities, predictions and a corpus cannot. Its drafters are the model's own; heads that guess one
token after the other have general steps.

Capturing takes as long as a few steps, once for each number of rows, tree, sampling setting and number of
slots, with drafts and without where guessing may pause (``adaptive.py``);
``DecodingStatistics.setup_seconds`` reports the time. In a shared batch the number of rows is 1, 2, 4, 8, ...
and the settings are numbers in tensors, so that a setting is captured once, whatever its numbers are. A model
keeps the graphs of its last few settings with their caches, since a graph writes to the tensors it was
captured with, and a batch those of all its rows. Where a step cannot be captured, because the base or a
logits processor reads a number on the host, or somebody has hung a hook on the base, static steps run, with
a warning; a shared batch that nobody has asked for captured steps then runs general ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import get_args

from torch import Tensor

from medusa.base.causal_lm import CausalLM, lm_head, verify
from medusa.base.profile import BaseProfile
from medusa.decoding.cuda_graphs import KeptRunners, warn_not_captured
from medusa.decoding.runners import Runner
from medusa.decoding.shared_rows import SharedRows
from medusa.decoding.state import DecodeRequest
from medusa.decoding.static_rows import StaticRows, static_drafter, static_obstacle
from medusa.decoding.step import GeneralStepper, Stepper
from medusa.drafters.protocol import Drafter
from medusa.engine.compiled import CompiledPass, layers_unsupported_reason, library_paths
from medusa.engine.libraries import library_errors
from medusa.engine.optimized_heads import compile_heads, parts_of_heads
from medusa.engine.snapshot import alteration_of
from medusa.engine.views import packed_as
from medusa.heads.protocol import Heads
from medusa.options import ANY_SHAPE_STEPS, StepKind

KEEPS_STATE = "a base whose layers are all attention, and this one keeps a state"


@dataclass(frozen=True)
class StepPlan:
    """How the steps of one request, or of a batch, are run."""

    runner: Runner
    """Reads prompts."""
    stepper: Stepper
    setup_seconds: float = 0.0


class Steps:
    """Runs the steps of one base and its heads; compiled libraries and captured graphs are kept."""

    def __init__(self, base: CausalLM, heads: Heads | None = None):
        self.base = base
        self.heads = heads
        self.profile = BaseProfile.of(base)
        self.captured = KeptRunners()
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self._pass: CompiledPass | None = None
        self._has_compiled_heads = False

    def with_heads(self, heads: Heads | None) -> Steps:
        """Steps of the same base with other heads: passes that were compiled are kept, and the heads are
        compiled now."""
        steps = Steps(self.base, heads)
        steps._pass = self._pass
        if self._pass is not None:
            steps.compiled_pass()
        return steps

    def check(self, step: str) -> None:
        """Raise ValueError, with the reason, unless steps of this kind run on the base."""
        if step not in get_args(StepKind):
            raise ValueError(f"step must be one of {get_args(StepKind)}, got {step!r}")
        if step in ("auto", "general"):
            return
        lacks = KEEPS_STATE if self.profile.keeps_state else None
        if step == "compiled":
            lacks = self.compiled_unsupported_reason()
        elif step == "captured":
            lacks = self.captured_unsupported_reason()
        if lacks is not None:
            advice = "step='general'" if self.profile.keeps_state else "step='static', which any model runs"
            raise ValueError(f"step={step!r} needs {lacks}; use {advice}")

    def compiled_unsupported_reason(self) -> str | None:
        """The requirement of a compiled step that the base does not meet; None without any."""
        if self.profile.is_sharded:
            return "a model in one place, and this one is sharded (device_map)"
        if packed_as(self.base) is None:
            return "engine='packed' or 'int8', whose layers are compiled ahead on a CPU"
        return layers_unsupported_reason(self.base)

    def captured_unsupported_reason(self) -> str | None:
        """The requirement of a captured step that the base does not meet; None without any."""
        devices = self.profile.devices
        if self.profile.keeps_state:
            return KEEPS_STATE
        if self.profile.is_sharded or len(devices) > 1:
            return (
                f"a model on one CUDA device, and this one is sharded over {', '.join(devices)} (device_map)"
            )
        if not devices[0].startswith("cuda"):
            return f"a model on a CUDA device, got one on {devices[0]}"
        return None

    def compiled_pass(self) -> tuple[CompiledPass, float]:
        """The base's passes, and the seconds that getting them took; the heads are compiled with them.

        Raises:
            ValueError: they cannot be compiled, kept or loaded here, or compute something else.
        """
        with self._lock:
            began = time.perf_counter()
            with library_errors("compiled steps"):
                if not self._has_compiled_heads:
                    compile_heads(self.heads, lm_head(self.base))
                    self._has_compiled_heads = True
                if self._pass is None:
                    self._pass = CompiledPass(self.base)
            return self._pass, time.perf_counter() - began

    def library_paths(self) -> list[Path]:
        """Where the compiled libraries are, or will be."""
        heads = parts_of_heads(self.heads, lm_head(self.base))
        return [*library_paths(self.base), *(part.path for part in heads)]

    @cached_property
    def fastest(self) -> StepKind:
        """The kind that "auto" stands for: captured on one CUDA device, else general. Heads that guess one
        token after the other read their guesses on the host."""
        is_bound = self.heads is not None and self.heads.reads_text
        return "general" if is_bound or self.captured_unsupported_reason() else "captured"

    def takes(self, step: StepKind, drafter: Drafter, request: DecodeRequest) -> bool:
        """Whether steps of a kind that "auto" may stand for can decode ``request`` with ``drafter``: not
        where capturing has failed before, with no other processors."""
        if step == "general":
            return True
        if self.captured.has_failed_with(frozenset(map(type, request.processors))):
            return False
        return static_obstacle(drafter, request) is None and alteration_of(self.base) is None

    def plan(self, step: StepKind, drafter: Drafter, request: DecodeRequest) -> StepPlan:
        """How to decode ``request`` with ``drafter``; ``step`` is not "auto".

        Raises:
            ValueError: such steps do not run on this base, or cannot decode this request.
        """
        if step not in self._checked:
            self.check(step)
            self._checked.add(step)
        if step == "compiled":
            compiled, seconds = self.compiled_pass()
            runner = self._runner_for(drafter, compiled.verify)
            return StepPlan(runner, GeneralStepper(runner, step), setup_seconds=seconds)
        runner = self._runner_for(drafter)
        if step in ANY_SHAPE_STEPS:
            return StepPlan(runner, GeneralStepper(runner, step))
        checked = static_drafter(step, drafter, request)
        captured = self.captured if step == "captured" else None
        alteration = None if captured is None else alteration_of(self.base)
        if alteration is not None:
            warn_not_captured(f"the base has got {alteration}, which a replay leaves out")
            captured = None
        return StepPlan(runner, StaticRows(self.base, checked, step, captured))

    def _runner_for(self, drafter: Drafter, run: Callable[..., tuple[Tensor, Tensor]] = verify) -> Runner:
        return Runner(self.base, self.profile, drafter.aux_layers, drafter.needs_features, run)

    def plan_of_many(
        self, step: StepKind, max_rows: int, layers: tuple[int, ...] = (), keeps_features: bool = False
    ) -> StepPlan:
        """How the steps of a batch that requests join are run; ``step`` may be "auto".

        ``layers`` and ``keeps_features`` are fields of :class:`medusa.decoding.runners.Runner`.

        Raises:
            ValueError: such steps do not run on this base, or cannot be drafted by its heads.
        """
        self.check(step)
        kind = self.fastest if step == "auto" else step
        run = self.compiled_pass()[0].verify if kind == "compiled" else verify
        runner = Runner(self.base, self.profile, layers, keeps_features, run)
        if kind in ANY_SHAPE_STEPS:
            return StepPlan(runner, GeneralStepper(runner, kind))
        if keeps_features:
            raise ValueError(
                f"step={step!r} cannot work with heads that guess one token after the other, which "
                "read their guesses on the host; use step='general'"
            )
        general = GeneralStepper(runner, ANY_SHAPE_STEPS[0])
        return StepPlan(runner, SharedRows(general, kind, kind == "captured", step == "auto", max_rows))

    def runner_of_texts(self, step: StepKind) -> Runner:
        """The runner of passes that only read, for steps of this kind."""
        return self.plan_of_many(step, max_rows=1).runner
