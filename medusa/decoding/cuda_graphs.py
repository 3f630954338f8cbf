"""Runs static steps as they are, or as CUDA graphs.

A graph writes to the tensors it was captured with (:class:`StepGraphs`). So the runner of a call owns the
state of its rows, and a model keeps the runners of its last settings for the calls to come
(:class:`KeptRunners`); a batch that rows join has the graphs of all its rows over one memory
(:mod:`medusa.decoding.shared_rows`).
"""

from __future__ import annotations

import gc
import pickle
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.decoding.state import DecodeState
from medusa.decoding.static import StaticState, static_steps
from medusa.drafters.protocol import PlainDrafter, StaticDrafter
from medusa.hardware import available_memory

WARM_UP_STEPS = 3
"""Steps that run before a capture: libraries set themselves up in their first calls."""
MAX_GRAPHS = 64
"""Graphs over one memory that are kept at most; a batch has one for each number of rows, of slots, and so
on."""
MAX_KEPT = 16
"""Settings whose graphs a model keeps at most."""
KEPT_SHARE = 4
"""Divisor: caches of kept graphs, the newest one's excluded, take at most free memory divided by this."""

_CAPTURE_LOCK = threading.Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}


class StepGraphs:
    """Runs static steps of one base: as they are, or, where it ``captures``, as CUDA graphs, one for each
    key.

    Where a step cannot be captured, as where the base reads a number on the host, it runs as it is, with a
    warning.
    """

    def __init__(self, base: CausalLM, captures: bool):
        self.base = base
        self.captures = captures
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}  # the least recently used first
        self._addresses: dict[Hashable, list[int]] = {}  # what each graph reads and writes
        self._num_warm: Counter[Hashable] = Counter()  # steps of each key that have run before a capture

    def run(
        self, key: Hashable, steps: Callable[[int], None], num_steps: int, tensors: Sequence[Tensor]
    ) -> float:
        """Run the given number of steps; returns the seconds of setup.

        Args:
            key: all that a step depends on besides numbers in tensors.
            steps: starts the given number of steps from the host.
            tensors: those beside the base's own that may move between two runs.
        """
        if not self.captures:
            steps(num_steps)
            return 0.0
        addresses = self._addresses_of(tensors)
        setup_seconds = 0.0
        graph = self._graphs.pop(key, None)
        if addresses != self._addresses.get(key):  # it would go where things were when it was captured
            graph = None
        if graph is None:
            began = time.perf_counter()
            num_steps -= self._warm_up(key, steps, num_steps)
            graph = self._captured(steps) if num_steps else None
            torch.cuda.synchronize(self.base.device)
            setup_seconds = time.perf_counter() - began
        if graph is None:
            steps(num_steps)
            return setup_seconds
        self._graphs[key] = graph
        self._addresses[key] = addresses
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        for _ in range(num_steps):
            graph.replay()
        return setup_seconds

    def _warm_up(self, key: Hashable, steps: Callable[[int], None], num_steps: int) -> int:
        """Run the first of ``num_steps`` as torch asks for before a capture, unless enough have run before;
        how many they were."""
        num_warm = min(num_steps, WARM_UP_STEPS - self._num_warm[key])
        if num_warm:
            self._num_warm[key] += num_warm
            with _alone_on_a_stream(self.base.device):
                steps(num_warm)
        return num_warm

    def _captured(self, steps: Callable[[int], None]) -> torch.cuda.CUDAGraph | None:
        """The graph of one step, and capturing runs nothing; None where it cannot be captured, and neither
        will be what follows.

        Graphs share one pool of memory: nothing in it outlives a replay, what does is in the rows' state.
        """
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self._graphs.values()), None)
        try:
            with (
                _alone_on_a_stream(self.base.device) as side,
                _no_collection(),
                torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"),
            ):
                steps(1)
        except RuntimeError as error:
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            warn_not_captured(f"a step cannot be captured: {str(cause).splitlines()[0]}")
            self.captures = False
            self._graphs = {}
            return None
        return graph

    def _addresses_of(self, tensors: Sequence[Tensor]) -> list[int]:
        """The addresses of ``tensors``, and of those of the base."""
        of_base = (*self.base.parameters(), *self.base.buffers())
        return [tensor.data_ptr() for tensor in (*tensors, *of_base)]


class StaticRunner(StepGraphs):
    """The static steps of one drafter and of the rows of one call; there is a graph for each number of slots
    that a pass reads, with drafts and without."""

    def __init__(
        self, base: CausalLM, drafter: StaticDrafter, rows: DecodeState, interval: int, captures: bool = False
    ):
        super().__init__(base, captures)
        self.drafter = drafter
        self.processors = frozenset(type(processor) for processor in rows.request.processors)
        self.plain = PlainDrafter(drafter.aux_layers)
        self.state = StaticState.like(rows, interval)

    def run_steps(self, num_steps: int, drafts: bool = True) -> float:
        """Run the given number of steps, with or without drafts; returns the seconds of setup."""
        drafter = self.drafter if drafts else self.plain
        steps = partial(static_steps, self.base, drafter, self.state, drafter.aux_layers)
        entries = [entry for layer in self.state.cache.tree_layers for entry in layer.entries]
        tensors = [self.state.rows.tokens, *entries, *self.drafter.tensors()]
        return self.run((drafts, self.state.cache.num_slots), steps, num_steps, tensors)


def warn_not_captured(reason: str) -> None:
    """Say that steps of one answer and those to come are not captured, and why, in one line."""
    warnings.warn(f"step='captured' runs as step='static' here: {reason}", stacklevel=2)


@contextmanager
def _alone_on_a_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The stream of all warm-ups and captures on ``device``: what graphs that share a pool leave can be taken
    by the next on one stream only, and every stream has buffers of cuBLAS of its own.

    One thread at a time: torch allows one capture in a process."""
    with _CAPTURE_LOCK, torch.cuda.device(device):
        if device not in _streams:
            _streams[device] = torch.cuda.Stream()
        side = _streams[device]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield side
        torch.cuda.current_stream().wait_stream(side)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: to give back memory of a card is not allowed in a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ------------------------------------------------------------------ kept for the next call


class KeptRunners:
    """Runners of earlier calls by their settings, the least recently used first."""

    def __init__(self) -> None:
        self._runners: dict[Hashable, StaticRunner] = {}

    def __len__(self) -> int:
        return len(self._runners)

    def __iter__(self) -> Iterator[StaticRunner]:
        return iter(list(self._runners.values()))

    def take(self, key: Hashable) -> StaticRunner | None:
        """The runner of these settings, which is then the caller's alone; None where there is none."""
        return self._runners.pop(key, None)

    def keep(self, key: Hashable, runner: StaticRunner) -> None:
        """Keep ``runner`` as the newest."""
        self.make_room(runner.base.device)
        self._runners[key] = runner

    def make_room(self, device: torch.device) -> None:
        """Let the oldest go, so that with one more there are at most :data:`MAX_KEPT`, and they take no more
        memory than they may."""
        free = available_memory(device)
        others = list(self._runners.items())
        while others:
            num_bytes = sum(runner.state.cache.num_bytes for _, runner in others)
            if len(others) < MAX_KEPT and (free is None or num_bytes <= free // KEPT_SHARE):
                break
            oldest, _ = others.pop(0)
            self._runners.pop(oldest, None)  # another thread may have dropped it

    def has_failed_with(self, processors: frozenset[type]) -> bool:
        """Whether capturing has failed before, with no other logits processors than these."""
        return any(not runner.captures and runner.processors <= processors for runner in self)


def settings_of(base: CausalLM, rows: DecodeState) -> Hashable:
    """The properties of rows on which a graph depends, besides their number, and the attention of
    ``base``."""
    request = rows.request
    return (
        request.seeds is None,
        rows.cache.num_positions,
        request.temperature,
        request.eos_ids,
        pickle.dumps(list(request.processors)),
        base.config.get_text_config(decoder=True)._attn_implementation,
    )
