"""Plans how calls decode on one base with its heads: who drafts, how steps are run, when drafting pauses.

An executor is made when a base or its heads are renewed, and only its trees can be changed afterwards. So a
call that has planned goes on with the heads that it began with. It keeps what is compiled and captured for
this base, and what drafting has been found to cost. ``generate``, ``stream``, a shared batch and the
benchmarks all decode by a :class:`Plan` of it.

How steps are run is chosen by one argument, ``step=``.

    step      what runs                                            needs
    general   the base's modules; the tokens of every step are     nothing
              read on the host
    static    one function over tensors that keep their place      a drafter of heads, suffix match or both,
              and shape, which never waits for the device          or plain decoding; acceptance "exact", no
              (``static.py``)                                      stopping criteria, no logits processor that
                                                                   reads the text but a repetition penalty
    compiled  as general, with passes (``engine/compiled.py``)     engine "packed" or "int8" on a CPU
              and heads (``engine/optimized_heads.py``) compiled
              ahead and kept on disk
    captured  static, replayed as a CUDA graph                     as static, on one CUDA device
    auto      captured where a call and its drafter can be, else   nothing
              general; where capturing fails, this once static

The tokens are the same. Models sharded over devices (``device_map``) run ``general`` and ``static``.

A shared batch, which requests join (``MedusaModel.continuous_batch``, ``medusa serve``), chooses for all of
its rows at once, and anew whenever rows have come or gone (``static_stepper.py``): static or captured steps
while every row can be in them, general ones while one cannot: settings are numbers in tensors there, and
processors that are no such numbers, log-probabilities, predictions and a corpus cannot be in them. Its
drafters are the model's own; heads that guess one token after the other have general steps.

Capturing takes as long as a few steps, once for each number of rows, tree, sampling setting and number of
slots, with drafts and without where guessing may pause (``adaptive.py``);
``DecodingStatistics.setup_seconds`` reports the time. In a shared batch the number of rows is 1, 2, 4, 8, ...
and a setting is captured once, whatever its numbers are. A model keeps the graphs of its last few settings
with their caches (``kept_steppers.py``), since a graph writes to the tensors it was captured with, and a
batch those of all its rows. Where a step cannot be captured, because the base or a logits processor reads a
number on the host, or somebody has hung a hook on the base, static steps run, with a warning; a shared batch
that nobody has asked for captured steps then runs general ones.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa.base.causal_lm import CausalLM, lm_head
from medusa.base.passes import verify
from medusa.base.profile import BaseProfile
from medusa.decoding.adaptive import AdaptiveDrafting, DraftCosts
from medusa.decoding.kept_steppers import KeptSteppers
from medusa.decoding.runners import Runner
from medusa.decoding.state import DecodeRequest
from medusa.decoding.static_stepper import StaticStepper, capture_key_of, check_static, static_obstacle
from medusa.decoding.step import GeneralStepper, Stepper
from medusa.drafters.protocol import Drafter
from medusa.drafters.registry import MAX_OPTIONAL_NODES, DraftCall, DrafterFactory
from medusa.drafters.suffix import SuffixDrafter
from medusa.engine.compiled import CompiledPass, layers_unsupported_reason, library_paths
from medusa.engine.engine_state import EngineState
from medusa.engine.libraries import library_errors
from medusa.engine.optimized_heads import compile_heads, parts_of_heads
from medusa.engine.snapshot import alteration_of
from medusa.engine.views import packed_as
from medusa.hardware import multiplies_in_float32
from medusa.heads.protocol import Heads, check_tree_fits
from medusa.options import FALLBACK_STEP, STEPS, Engine, StepKind
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.tuned_trees import Trees, TunedTree

KEEPS_STATE = "a base whose layers are all attention, and this one keeps a state"


@dataclass(frozen=True)
class Call:
    """The part of a call of ``generate`` on which its plan depends; the fields are named as there."""

    request: DecodeRequest
    step: StepKind
    drafter: Drafter | str | None = None
    tree: CandidateTree | None = None


@dataclass(frozen=True)
class Plan:
    """How a call, or a shared batch, decodes."""

    step: StepKind
    """The kind of its steps; of a batch, of those whose rows can all be in them."""
    runner: Runner
    """Reads prompts, with the hidden states that drafters read."""
    stepper: Stepper
    """Runs the steps."""
    make_drafter: Callable[[int, bool, StepKind], tuple[Drafter, AdaptiveDrafting | None]]
    """The drafter, and the adaptive policy or None, for a number of rows, rounded up to a power of two;
    whether rows have reference texts; and the kind of their steps. Its results are kept."""
    staleness_check: Callable[[bool], None] = lambda is_new_request: None
    """Raises ValueError if base or heads have changed since. Called with True where a request joins a shared
    batch, and with False before or after passes."""
    max_nodes: int = 1
    """Slots that a row needs beyond its text: the largest number of nodes of a draft, root included, after
    all that the steps of one burst before the last may add."""
    setup_seconds: float = 0.0
    """The time that compiling, or loading what was compiled, has taken."""


class Executor:
    """Plans the calls of one base and its heads as they are now.

    Args:
        trees: the candidate trees that the heads draft in, of all runtimes.
        tokenizer: the base's, asked for where a draft model must share its tokens.

    Raises:
        ValueError: the heads were made for other sizes, or the engine cannot run the base.
    """

    def __init__(
        self,
        base: CausalLM,
        heads: Heads | None = None,
        engine: Engine = "eager",
        trees: Trees | None = None,
        tokenizer: Callable[[], Any] = lambda: None,
        *,
        state: EngineState | None = None,
    ):
        self.state = EngineState(base, heads, engine) if state is None else state
        """Base and heads as the engine runs them."""
        self.base = base
        self.heads = heads
        self.engine: Engine = engine
        self.engine_base = self.state.engine_base
        """The base model as the engine runs it."""
        self.optimized_heads = self.state.optimized_heads
        """The heads as the engine computes them."""
        self.profile = BaseProfile.of(self.engine_base)
        self.trees = (trees or trees_of(heads)).on(self.state.runtime)
        self.costs = DraftCosts()
        self.captured = KeptSteppers()
        # By a proxy: two that own each other keep their heads until the next full garbage collection, when
        # others have long taken their place.
        self.drafters = DrafterFactory(weakref.proxy(self))
        self._tokenizer = tokenizer
        self._checked: set[str] = set()
        is_bound = reads_features(heads) or self._lacks_of_captured()
        self.fastest: StepKind = FALLBACK_STEP if is_bound else "captured"
        """The kind that "auto" stands for: captured on one CUDA device, else general. Heads that guess one
        token after the other read their guesses on the host."""
        self._lock = threading.Lock()
        self._pass: CompiledPass | None = None
        self._has_compiled_heads = False

    def with_heads(self, heads: Heads, trees: Trees) -> Executor:
        """An executor of the same base with other heads: passes that were compiled are kept, and the heads
        are compiled now."""
        executor = Executor(
            self.base, heads, self.engine, trees, self._tokenizer, state=self.state.with_heads(heads)
        )
        executor._pass = self._pass
        if self._pass is not None:
            executor.compiled_pass()
        return executor

    def use_trees(self, trees: Trees) -> None:
        """Have calls from here on draft in ``trees``; what drafts have cost is forgotten."""
        self.trees = trees.on(self.state.runtime)
        self.costs = DraftCosts()

    # ------------------------------------------------------------------ what drafters are made from

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer; None where it has none."""
        return self._tokenizer()

    def tree_for(self, batch_size: int, step: StepKind | None = None) -> CandidateTree:
        """The tree for ``batch_size`` rows, in steps of kind ``step``."""
        return self.trees.tree_for(batch_size, self.step_for(step))

    # ------------------------------------------------------------------ plans

    def plan(self, call: Call) -> Plan:
        """How to decode ``call``, whose rows are all that there are.

        Raises:
            ValueError: such steps do not run on this base, or cannot decode this request; or the drafter
                lacks something or cannot fill the tree.
        """
        request = call.request
        if call.step not in self._checked:
            self.check(call.step)
            self._checked.add(call.step)
        if call.drafter is None and call.tree is not None:
            check_tree_fits(call.tree, self.heads)
        step = self.step_for(call.step)
        drafter = self._drafter_of(call, step)
        is_sure = call.step != "auto" or STEPS[step].has_any_shape
        if not is_sure and not self._can_run_static(drafter, request):
            step = FALLBACK_STEP
            drafter = self._drafter_of(call, step)
        adaptive = None
        is_own = call.tree is None and call.drafter is None  # what a caller names is drafted always
        if is_own and request.is_exact:
            adaptive = self._adaptive(drafter, step, len(request.tokens))
        runner, seconds = self._runner(step, drafter.fused_layers, drafter.reads_features)
        return Plan(
            step,
            runner,
            self._stepper(step, runner, drafter, request),
            lambda *_: (drafter, adaptive),
            self.state.staleness_check(),
            setup_seconds=seconds,
        )

    def plan_of_many(self, step: StepKind, max_rows: int = 1, plain: bool = False) -> Plan:
        """How a batch decodes that requests join, at most ``max_rows`` at a time; ``plain`` drafts nothing.

        Raises:
            ValueError: such steps do not run on this base, or cannot be drafted by its heads.
        """
        self.check(step)
        kind = self.step_for(step)
        heads = None if plain else self.heads
        keeps_features = reads_features(heads)
        runner, seconds = self._runner(kind, () if heads is None else heads.fused_layers, keeps_features)
        stepper: Stepper
        if STEPS[kind].has_any_shape:
            stepper = GeneralStepper(runner, kind)
        elif keeps_features:
            raise ValueError(
                f"step={step!r} cannot work with heads that guess one token after the other, which read "
                f"their guesses on the host; use step={FALLBACK_STEP!r}"
            )
        else:
            stepper = StaticStepper(GeneralStepper(runner, FALLBACK_STEP), kind, max_rows, step == "auto")
        depth = 0
        num_nodes = 1
        if not plain:
            depth = max(SuffixDrafter().max_depth, *(tree.depth for tree in self.trees.all))
            num_nodes = max(tree.num_nodes for tree in self.trees.all) + MAX_OPTIONAL_NODES

        def make_drafter(
            num_rows: int, has_references: bool, kind: StepKind
        ) -> tuple[Drafter, AdaptiveDrafting | None]:
            if plain:
                drafter = self.drafters.make("plain")
            else:
                drafter = self.drafters.default(num_rows, kind, has_references)
            return drafter, self._adaptive(drafter, kind, num_rows)

        return Plan(
            kind,
            runner,
            stepper,
            make_drafter,
            self.state.staleness_check(),
            max_nodes=(stepper.interval - 1) * (depth + 1) + num_nodes,
            setup_seconds=seconds,
        )

    def _drafter_of(self, call: Call, step: StepKind) -> Drafter:
        """The drafter of a call: see :meth:`medusa.drafters.registry.DrafterFactory.choose`."""
        request = call.request
        return self.drafters.choose(
            DraftCall(
                len(request.tokens),
                step,
                call.drafter,
                call.tree,
                is_exact=request.is_exact,
                only_chains=request.rule is not None and request.rule.only_chains,
                has_references=bool(request.references),
            )
        )

    def _adaptive(self, drafter: Drafter, step: StepKind, num_rows: int) -> AdaptiveDrafting | None:
        """The policy that pauses ``drafter`` while it does not pay."""
        in_float32 = multiplies_in_float32(self.profile.dtype, self.profile.device)
        return self.costs.adaptive(drafter, in_float32, step, num_rows)

    def _runner(self, step: StepKind, layers: tuple[int, ...], keeps_features: bool) -> tuple[Runner, float]:
        """The runner of the passes of such steps, and the seconds that compiling them took; the other
        arguments are its fields."""
        run: Callable[..., tuple[Tensor, Tensor]] = verify
        seconds = 0.0
        if STEPS[step].is_compiled:
            compiled, seconds = self.compiled_pass()
            run = compiled.verify
        return Runner(self.engine_base, self.profile, layers, keeps_features, run), seconds

    def _stepper(self, step: StepKind, runner: Runner, drafter: Drafter, request: DecodeRequest) -> Stepper:
        if STEPS[step].has_any_shape:
            return GeneralStepper(runner, step)
        check_static(step, drafter, request)
        if not STEPS[step].is_captured:
            return self._static_stepper(step, runner, request)
        key = len(request.tokens), runner.layers, capture_key_of(request)
        stepper = self.captured.take(key)
        if stepper is None:
            stepper = self._static_stepper(step, runner, request)
            stepper.when_closed = partial(self.captured.keep, key, stepper)
        self.captured.make_room(self.profile.device)  # before this one grows
        return stepper

    def _static_stepper(self, step: StepKind, runner: Runner, call: DecodeRequest) -> StaticStepper:
        return StaticStepper(GeneralStepper(runner, FALLBACK_STEP), step, len(call.tokens), call=call)

    # ------------------------------------------------------------------ which steps run here

    def step_for(self, step: StepKind | None = None) -> StepKind:
        """``step``; for "auto", and for None, :attr:`fastest`."""
        return self.fastest if step is None or step == "auto" else step

    def _can_run_static(self, drafter: Drafter, request: DecodeRequest) -> bool:
        """Whether captured steps, which nobody has asked for, can decode ``request`` with ``drafter``: not
        where capturing has failed before, with no other processors."""
        if self.captured.has_failed_with(frozenset(map(type, request.processors))):
            return False
        return static_obstacle(drafter, request) is None and alteration_of(self.engine_base) is None

    def check(self, step: str) -> None:
        """Raise ValueError, with the reason, unless steps of this kind run on the base."""
        if step == "auto":
            return
        if step not in STEPS:
            raise ValueError(f"step must be one of {('auto', *STEPS)}, got {step!r}")
        traits = STEPS[step]
        lacks = None
        if traits.is_compiled:
            lacks = self.compiled_unsupported_reason()
        elif traits.is_captured:
            lacks = self._lacks_of_captured()
        elif not traits.has_any_shape and self.profile.keeps_state:
            lacks = KEEPS_STATE
        if lacks is not None:
            advice = "step='general'" if self.profile.keeps_state else "step='static', which any model runs"
            raise ValueError(f"step={step!r} needs {lacks}; use {advice}")

    def compiled_unsupported_reason(self) -> str | None:
        """The requirement of a compiled step that the base does not meet; None without any."""
        if self.profile.is_sharded:
            return "a model in one place, and this one is sharded (device_map)"
        if packed_as(self.engine_base) is None:
            return "engine='packed' or 'int8', whose layers are compiled ahead on a CPU"
        return layers_unsupported_reason(self.engine_base)

    def _lacks_of_captured(self) -> str | None:
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

    # ------------------------------------------------------------------ what is compiled

    def compile(self) -> float:
        """Compile or load the libraries of compiled steps for base and heads; the seconds that it took.

        Raises:
            ValueError: this engine compiles no pass; or as :meth:`compiled_pass`.
        """
        self.check("compiled")
        return self.compiled_pass()[1]

    def compiled_pass(self) -> tuple[CompiledPass, float]:
        """The base's passes, and the seconds that getting them took; the heads are compiled with them.

        Raises:
            ValueError: they cannot be compiled, kept or loaded here, or compute something else.
        """
        with self._lock:
            began = time.perf_counter()
            with library_errors("compiled steps"):
                if not self._has_compiled_heads:
                    compile_heads(self.optimized_heads, lm_head(self.engine_base))
                    self._has_compiled_heads = True
                if self._pass is None:
                    self._pass = CompiledPass(self.engine_base)
            return self._pass, time.perf_counter() - began

    def library_paths(self) -> list[Path]:
        """Where the compiled libraries are, or will be."""
        heads = parts_of_heads(self.optimized_heads, lm_head(self.engine_base))
        return [*library_paths(self.engine_base), *(part.path for part in heads)]


def reads_features(heads: Heads | None) -> bool:
    """Whether ``heads`` read the base's hidden states of the whole text."""
    return heads is not None and heads.reads_features


def trees_of(
    heads: Heads | None, default: CandidateTree | None = None, tuned: Sequence[TunedTree] = ()
) -> Trees:
    """The trees of ``heads``; without a default a chain over all of them.

    Raises:
        ValueError: the heads cannot fill one of them.
    """
    if default is None:
        default = CandidateTree.chain(0 if heads is None else heads.num_heads)
    trees = Trees(default, tuple(tuned))
    for tree in trees.all:
        check_tree_fits(tree, heads)
    return trees
