"""Runs static steps as they are, or as CUDA graphs, which write to the tensors that they were captured with.
Whose tensors these are is decided in :mod:`medusa.decoding.static_stepper`, and for how long in
:mod:`medusa.decoding.kept_steppers`.
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM

WARM_UP_STEPS = 3
"""Steps that run before a capture: libraries set themselves up in their first calls."""
MAX_GRAPHS = 64
"""Graphs over one memory that are kept at most; a batch has one for each number of rows, of slots, and so
on."""

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
