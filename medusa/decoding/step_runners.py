"""What runs static steps: as they are, compiled, or captured as a CUDA graph; and what is kept of that.

``steps.py`` says what each kind needs.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, SeenHidden, seen_hidden
from medusa.choices import StepKind
from medusa.decoding.state import DecodeState
from medusa.decoding.static_step import StaticState, static_step
from medusa.drafters.compiled import CompiledDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.plain import PlainDrafter
from medusa.drafters.protocol import Drafter, StaticDrafter
from medusa.engine.compiled import CompiledPass, compiled_pass, library_path
from medusa.engine.views import copy_sharing_parameters, holds_packed_weights

MAX_KEPT = 16
"""Settings whose graphs a model keeps, and as many whose compiled steps."""
WARM_UP_STEPS = 3
"""Steps that run before a capture: libraries set themselves up in their first calls."""


Step = Callable[[CausalLM, StaticDrafter, StaticState, SeenHidden], None]
"""What is run again and again: :func:`static_step`, or something that reads and writes as it does."""


class StepRunner:
    """Runs static steps of one base, one drafter and one set of rows, as they are."""

    def __init__(
        self,
        base: CausalLM,
        drafter: StaticDrafter,
        rows: DecodeState,
        host_sync_interval: int,
        step: Step = static_step,
    ):
        self.base, self.drafter, self.step = base, drafter, step
        self.plain = PlainDrafter(drafter.reads_layers)
        self.state = StaticState.like(rows, host_sync_interval)

    def run(self, num_steps: int, drafts: bool = True) -> float:
        """That many steps, which draft or do not; the seconds that were spent on setting up."""
        self._run(self.step, num_steps, drafts)
        return 0.0

    def _run(self, step: Step, num_steps: int, drafts: bool) -> None:
        drafter = self.drafter if drafts else self.plain
        with seen_hidden(self.base, layers=drafter.reads_layers) as seen:
            for _ in range(num_steps):
                step(self.base, drafter, self.state, seen)


class CompiledStepRunner(StepRunner):
    """Runs them as :func:`compiled_step` makes them, one thread at a time.

    ``base`` must be a model whose hooks are set by these runners alone: torch compiles a step anew whenever
    the number of hooks changes, and other threads may run the model that the user holds.
    """

    def __init__(
        self,
        base: CausalLM,
        drafter: StaticDrafter,
        rows: DecodeState,
        host_sync_interval: int,
        compiled: Callable[[StaticDrafter], Callable[..., None]],
        lock: threading.Lock,
    ):
        super().__init__(base, drafter, rows, host_sync_interval)
        self._compiled, self._lock = compiled, lock

    def run(self, num_steps: int, drafts: bool = True) -> float:
        with self._lock:
            return self._run_compiled(num_steps, drafts)

    def _run_compiled(self, num_steps: int, drafts: bool) -> float:
        step = self._compiled(self.drafter if drafts else self.plain)
        num_compiled, began = _num_compiled(), time.perf_counter()
        self._run(step, 1, drafts)
        elapsed = time.perf_counter() - began
        setup_seconds = elapsed if _num_compiled() > num_compiled else 0.0
        self._run(step, num_steps - 1, drafts)
        return setup_seconds


def compiled_step(backend: str = "inductor") -> Callable[..., None]:
    """:func:`static_step` as ``backend`` of torch.compile makes it, in one piece, at its first calls.

    Each is compiled from a code object of its own. torch counts compilations by code object and refuses the
    ninth (``torch._dynamo.config.recompile_limit``): enough for the shapes of one tree and sampling setting,
    where the sizes that change twice become symbols, but not for all the trees of a process.
    """
    own = FunctionType(static_step.__code__.replace(), static_step.__globals__, static_step.__name__)
    return torch.compile(own, fullgraph=True, backend=backend)


def _num_compiled() -> int:
    """Graphs that this process has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class CapturedStepRunner(StepRunner):
    """Replays them as CUDA graphs, one for each number of slots that a pass reads, with drafts or without."""

    def __init__(
        self,
        base: CausalLM,
        drafter: StaticDrafter,
        rows: DecodeState,
        host_sync_interval: int,
        step: Step = static_step,
    ):
        super().__init__(base, drafter, rows, host_sync_interval, step)
        self._graphs: dict[tuple[bool, int], torch.cuda.CUDAGraph] = {}
        self._addresses: list[int] = []

    def run(self, num_steps: int, drafts: bool = True) -> float:
        addresses = self._tensor_addresses()
        if addresses != self._addresses:  # a graph reads and writes where things were when it was captured
            self._graphs, self._addresses = {}, addresses
        setup_seconds, graph = 0.0, (drafts, self.state.cache.num_slots)
        if graph not in self._graphs:
            began = time.perf_counter()
            num_warm = min(num_steps, WARM_UP_STEPS)
            self._warm_up(num_warm, drafts)
            num_steps -= num_warm
            if num_steps:
                self._graphs[graph] = self._captured(drafts)
            torch.cuda.synchronize(self.base.device)
            setup_seconds = time.perf_counter() - began
        for _ in range(num_steps):
            self._graphs[graph].replay()
        return setup_seconds

    def _warm_up(self, num_steps: int, drafts: bool) -> None:
        """Steps like any other, on a stream of their own, as torch asks for before a capture."""
        with torch.cuda.device(self.base.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run(self.step, num_steps, drafts)
            torch.cuda.current_stream().wait_stream(side)

    def _captured(self, drafts: bool) -> torch.cuda.CUDAGraph:
        """The graph of one step; capturing runs nothing.

        Graphs share one pool of memory: nothing in it outlives a replay, what does is in ``state``.
        """
        graph, pool = torch.cuda.CUDAGraph(), next((g.pool() for g in self._graphs.values()), None)
        with (
            torch.cuda.device(self.base.device),
            torch.cuda.graph(graph, pool, torch.cuda.Stream(), capture_error_mode="thread_local"),
        ):
            self._run(self.step, 1, drafts)
        return graph

    def _tensor_addresses(self) -> list[int]:
        """Where everything lies that may move between two runs."""
        entries = [each for layer in self.state.cache.tree_layers for each in layer.entries]
        tensors = (self.state.rows.tokens, *entries, *self.base.parameters(), *self.drafter.tensors())
        return [tensor.data_ptr() for tensor in tensors]


class StepRunners:
    """The runners of one base; what they compiled or captured is kept for the calls to come."""

    def __init__(self, base: CausalLM, backend: str = "inductor", layers: Sequence[int] = ()):
        self.base = base
        self.layers = frozenset(layers)
        """Decoder layers that a compiled pass gives the states of, whatever else a drafter reads."""
        self.backend = backend
        """That of torch.compile."""
        self._captured: dict[Hashable, CapturedStepRunner] = {}
        self._compiled: dict[Hashable, Callable[..., None]] = {}
        self._compiled_base: CausalLM | None = None
        self._compile_lock = threading.Lock()
        self._pass: CompiledPass | None = None
        self._drafters: dict[Hashable, CompiledDrafter] = {}
        self._paths: dict[tuple[int, ...], Path] = {}
        self._checked: set[StepKind] = set()

    def check(self, step: StepKind, check: Callable[[StepKind, CausalLM], None]) -> None:
        """Have ``check`` raise unless the base runs such steps; it is asked once."""
        if step not in self._checked:
            check(step, self.base)
            self._checked.add(step)

    @cached_property
    def compile_passes(self) -> bool:
        """Whether ``step="compiled"`` compiles the base's pass alone; else whole steps."""
        return holds_packed_weights(self.base)

    def compiled_pass(self, layers: Sequence[int] = ()) -> tuple[CompiledPass, float]:
        """The base's pass with the states of ``layers``, and the seconds that getting it took."""
        with self._compile_lock:
            if self._pass is not None and self._pass.gives(layers):
                return self._pass, 0.0
            given = tuple(sorted(self.layers.union(layers)))
            self._pass = compiled_pass(self.base, given, self._library_path(given))
            return self._pass, self._pass.setup_seconds

    def compiled_drafter(self, drafter: Drafter, *are_sampled: bool) -> tuple[Drafter, float]:
        """``drafter``, and the seconds that this took: one of Medusa heads with compiled drafts for rows that
        are sampled, or not."""
        if not isinstance(drafter, HeadsDrafter):
            return drafter, 0.0
        with self._compile_lock:
            made = self._drafter_to_compile(drafter)
            return made.over(drafter), sum(map(made.prepare, are_sampled))

    def compiled_draft_paths(self, drafter: Drafter) -> list[Path]:
        """Where the libraries of :meth:`compiled_drafter` are, or will be."""
        if not isinstance(drafter, HeadsDrafter):
            return []
        return [self._drafter_to_compile(drafter).path(is_sampled) for is_sampled in (False, True)]

    def _drafter_to_compile(self, drafter: HeadsDrafter) -> CompiledDrafter:
        key = drafter.static_key
        made = self._drafters.pop(key, None) or CompiledDrafter(drafter, self.compiled_path.stem)
        _keep(self._drafters, key, made)
        return made

    @property
    def compiled_path(self) -> Path:
        """Where the library of :meth:`compiled_pass` is, or will be."""
        return self._library_path(tuple(sorted(self.layers)))

    def _library_path(self, layers: tuple[int, ...]) -> Path:
        """See :func:`medusa.engine.compiled.library_path`, which reads all weights for it."""
        if layers not in self._paths:
            self._paths[layers] = library_path(self.base, layers)
        return self._paths[layers]

    @contextmanager
    def acquire(
        self, step: StepKind, drafter: StaticDrafter, rows: DecodeState, host_sync_interval: int
    ) -> Iterator[StepRunner]:
        """A runner for rows like these, for the caller alone until the context ends."""
        given = (self.base, drafter, rows, host_sync_interval)
        asked = (host_sync_interval, _settings(rows))
        if step == "static":
            yield StepRunner(*given)
        elif step == "compiled":
            compiled = partial(self._compiled_for, asked)
            yield CompiledStepRunner(self._base_to_compile(), *given[1:], compiled, self._compile_lock)
        else:
            key = (len(rows.rows), drafter.static_key, asked)
            runner = self._captured.pop(key, None) or CapturedStepRunner(*given)
            try:
                yield runner
            finally:
                _keep(self._captured, key, runner)

    def _compiled_for(self, asked: Hashable, drafter: StaticDrafter) -> Callable[..., None]:
        """The compiled step of such rows with ``drafter``."""
        settings = (drafter.static_key, asked)
        compiled = self._compiled.pop(settings, None) or compiled_step(self.backend)
        _keep(self._compiled, settings, compiled)
        return compiled

    def _base_to_compile(self) -> CausalLM:
        """The base's own parameters and buffers under modules that nobody else runs."""
        copied = self._compiled_base
        if copied is None or [*map(id, _tensors(copied))] != [*map(id, _tensors(self.base))]:
            copied = self._compiled_base = copy_sharing_parameters(self.base)
        return copied


def _tensors(base: CausalLM) -> Iterator[Tensor]:
    yield from base.parameters()
    yield from base.buffers()


def _keep(kept: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Add ``value`` as the newest; the oldest beyond :data:`MAX_KEPT` go."""
    kept[key] = value
    for oldest in list(kept)[:-MAX_KEPT]:
        kept.pop(oldest, None)  # another thread may have dropped it


def _settings(rows: DecodeState) -> Hashable:
    """What a graph depends on in the rows it was made for, besides their number."""
    request = rows.request
    processors = pickle.dumps(list(request.processors))
    is_greedy, last_position = request.seeds is None, rows.cache.num_positions
    return is_greedy, last_position, request.temperature, request.eos_ids, processors
