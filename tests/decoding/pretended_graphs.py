"""CUDA graphs pretended on a CPU: what is captured is recorded, not run, and replayed on the tensors it was
recorded with, wherever the state has moved since. What would be frozen in a graph is frozen here too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import medusa.decoding.steps


class Recording(TorchDispatchMode):
    """Every operation with its arguments and what it gave; :meth:`undo` takes back what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(args[index] if index < len(args) else kwargs[argument.name])
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._before.setdefault(storage.data_ptr(), (whole, whole.clone()))

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)


class PretendedGraph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.num_replays = 0

    def pool(self) -> tuple[int, int]:
        return 0, id(self)

    @torch.no_grad()
    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, recorded in self.calls:
            given = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(given), strict=True):
                if isinstance(old, Tensor) and not _share(old, new):
                    old.copy_(new)


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@contextmanager
def recorded_in(graph: PretendedGraph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
    """In the place of ``torch.cuda.graph``."""
    assert capture_error_mode == "thread_local", "other threads may go on meanwhile"
    recording = Recording()
    with recording:
        yield
    recording.undo()
    graph.calls = recording.calls


def pretend_graphs(monkeypatch: pytest.MonkeyPatch) -> list[PretendedGraph]:
    """Have captured steps run on a CPU; every graph that is made is added to what comes back."""
    made: list[PretendedGraph] = []

    def new_graph() -> PretendedGraph:
        made.append(PretendedGraph())
        return made[-1]

    def stream() -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    pretended = {
        "CUDAGraph": new_graph,
        "graph": recorded_in,
        "Stream": stream,
        "current_stream": stream,
        "stream": lambda side: nullcontext(),
        "device": lambda where: nullcontext(),
        "synchronize": lambda where: None,
    }
    for name, instead in pretended.items():
        monkeypatch.setattr(torch.cuda, name, instead)
    monkeypatch.setitem(medusa.decoding.steps._MISSING, "captured", lambda base: None)
    return made
