"""Tuned trees: which candidate tree was measured to be fastest, by runtime, kind of step and batch size.

A tree that pays at batch size 1 can cost at batch size 16, and one that pays on a graphics card can cost on a
processor. So a heads directory may hold entries beside its default tree. An entry counts only for the runtime
on which it was timed: same device, precision and engine; but a card that none was timed on takes those of
another card. Another kind of step takes other times too (a captured graph makes nodes nearly free), so an
entry is for one kind of step.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from medusa.options import FALLBACK_STEP
from medusa.trees.candidate_tree import CandidateTree

RUNTIME_KEYS = ("device", "dtype", "engine")


@dataclass(frozen=True)
class Runtime:
    """The environment in which decode steps run."""

    device: str
    """The device, as :func:`medusa.hardware.device_name` names it."""
    dtype: str
    """Type of the base's weights, such as "float32"."""
    engine: str
    """How the base was executed; never "auto"."""

    @property
    def is_card(self) -> bool:
        """Whether the device is a graphics card; other devices say their kind before their name."""
        return ": " not in self.device

    def in_words(self) -> str:
        """The three, with commas."""
        return f"{self.device}, {self.dtype}, {self.engine}"


@dataclass(frozen=True)
class TunedTree:
    """The tree that was fastest on a runtime, for one kind of step and one batch size."""

    runtime: Runtime
    batch_size: int
    tree: CandidateTree
    origin: Mapping[str, Any] = field(default_factory=dict)
    """The measurements, in plain JSON values."""
    step: str = FALLBACK_STEP
    """How the steps were run that were timed (see :mod:`medusa.decoding.executor`); files of version 0.1.0 do
    not say it."""

    @property
    def key(self) -> tuple[Runtime, str, int]:
        """The key of the tree; a file holds one of each."""
        return self.runtime, self.step, self.batch_size

    def in_words(self) -> str:
        """The runtime and batch size in words."""
        return f"batch size {self.batch_size} on {self.runtime.in_words()}, {self.step} steps"

    def as_json(self) -> dict[str, Any]:
        """The entry in the form of the file."""
        return {
            **asdict(self.runtime),
            "step": self.step,
            "batch_size": self.batch_size,
            "paths": [list(path) for path in self.tree.paths],
            **self.origin,
        }

    @classmethod
    def from_json(cls, entry: Any, origin: str) -> TunedTree:
        """Read what :meth:`as_json` wrote; ``origin`` names file and entry in messages.

        Raises:
            ValueError: a key is missing or holds something else than it should.
        """
        if not isinstance(entry, Mapping):
            raise ValueError(f"{origin} must be a JSON object, got {type(entry).__name__}")
        for key in (*RUNTIME_KEYS, "batch_size", "paths"):
            if key not in entry:
                raise ValueError(f"{origin} must hold {key!r}, got {sorted(entry)}; tune the tree again")
        step = entry.get("step", FALLBACK_STEP)
        for key, value in (*((key, entry[key]) for key in RUNTIME_KEYS), ("step", step)):
            if not isinstance(value, str) or not value:
                raise ValueError(f"{origin}: {key} must be text that is not empty, got {value!r}")
        rows = entry["batch_size"]
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise ValueError(f"{origin}: batch_size must be an int of at least 1, got {rows!r}")
        known = {*RUNTIME_KEYS, "step", "batch_size", "paths"}
        rest = {key: value for key, value in entry.items() if key not in known}
        runtime = Runtime(*(entry[key] for key in RUNTIME_KEYS))
        return cls(runtime, rows, tree_from_json(entry["paths"], origin), rest, step)


@dataclass(frozen=True)
class Trees:
    """The candidate trees of some heads."""

    default: CandidateTree
    """The tree where none was tuned."""
    tuned: tuple[TunedTree, ...] = ()

    def on(self, runtime: Runtime) -> Trees:
        """Those that ``runtime`` takes: see :func:`for_runtime`."""
        return replace(self, tuned=for_runtime(self.tuned, runtime))

    def tree_for(self, batch_size: int, step: str) -> CandidateTree:
        """The tree of ``batch_size`` rows in steps of kind ``step``, among those of one runtime: that of the
        nearest batch size at or above.

        Rows that finish leave a batch, and a tree chosen for more rows than there are errs on the small side.
        Above the largest measured size its tree is used. If no such steps were timed, trees of general steps
        are used; on a graphics card, where nodes are cheap in steps of any kind, of any other; the default
        without any.
        """
        by_step: dict[str, list[TunedTree]] = {}
        for entry in self.tuned:
            by_step.setdefault(entry.step, []).append(entry)
        fitting = by_step.get(step) or by_step.get(FALLBACK_STEP)
        if not fitting:
            fitting = [entry for entry in self.tuned if entry.runtime.is_card]
        if not fitting:
            return self.default
        above = [tuned for tuned in fitting if tuned.batch_size >= batch_size]
        if above:
            return min(above, key=lambda tuned: tuned.batch_size).tree
        return max(fitting, key=lambda tuned: tuned.batch_size).tree

    @property
    def all(self) -> tuple[CandidateTree, ...]:
        """The default, and the tuned ones."""
        return (self.default, *(entry.tree for entry in self.tuned))


def tree_from_json(paths: Any, origin: str) -> CandidateTree:
    """The tree of ``paths``, lists of ranks; ``origin`` names file and entry in messages.

    Raises:
        ValueError: ``paths`` is something else, or the paths make no tree.
    """
    is_listed = isinstance(paths, list) and all(isinstance(path, list) for path in paths)
    if not is_listed or not all(type(rank) is int for path in paths for rank in path):
        raise ValueError(
            f"{origin}: paths must be lists of ranks, such as [[], [0], [0, 0]], got {reprlib.repr(paths)}"
        )
    try:
        return CandidateTree.from_paths(paths)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def tuned_from_json(entries: Any, origin: str) -> tuple[TunedTree, ...]:
    """All entries of a file.

    Raises:
        ValueError: they are no list, one of them is malformed, or two are for the same runtime, kind of
            step and batch size.
    """
    if not isinstance(entries, list):
        raise ValueError(f"{origin}: tuned must be a list of entries, got {type(entries).__name__}")
    trees = tuple(
        TunedTree.from_json(entry, f"{origin} tuned[{index}]") for index, entry in enumerate(entries)
    )
    seen: set[tuple[Runtime, str, int]] = set()
    for index, tuned in enumerate(trees):
        if tuned.key in seen:
            raise ValueError(
                f"{origin} tuned[{index}] is a second entry for {tuned.in_words()}; keep one of them"
            )
        seen.add(tuned.key)
    return trees


def for_runtime(trees: Iterable[TunedTree], runtime: Runtime) -> tuple[TunedTree, ...]:
    """The entries that ``runtime`` takes, the smallest batch size first: its own. For a kind of step without
    any a graphics card takes those of the first other card with the same precision and engine."""
    by_step: dict[str, dict[Runtime, list[TunedTree]]] = {}
    for tuned in trees:
        by_step.setdefault(tuned.step, {}).setdefault(tuned.runtime, []).append(tuned)
    entries: list[TunedTree] = []
    for by_runtime in by_step.values():
        other_cards = [
            other
            for other in by_runtime
            if other.is_card and replace(other, device=runtime.device) == runtime
        ]
        source = runtime
        if runtime.is_card and runtime not in by_runtime and other_cards:
            source = other_cards[0]
        entries += by_runtime.get(source, ())
    return tuple(sorted(entries, key=lambda tuned: tuned.batch_size))


def merged(old: Iterable[TunedTree], new: Sequence[TunedTree]) -> tuple[TunedTree, ...]:
    """``old`` and ``new``, without the old entries that a new one of equal key replaces."""
    replaced = {tuned.key for tuned in new}
    remaining = tuple(tuned for tuned in old if tuned.key not in replaced)
    return remaining + tuple(new)
