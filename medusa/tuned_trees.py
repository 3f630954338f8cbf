"""Trees by place: which candidate tree was measured to be fastest on a device, for a batch of a size.

A tree that pays at batch size 1 can cost at batch size 16, and one that pays on a graphics card can cost on
a processor. So a heads directory may hold, beside its one default tree, entries for the places where it was
tuned. An entry counts only at its own place: same device, precision and engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa.tree import CandidateTree

PLACE_KEYS = ("device", "dtype", "engine")


@dataclass(frozen=True)
class Place:
    """Where decode steps were timed."""

    device: str
    """In words, as :func:`medusa.hardware.device_name` says it."""
    dtype: str
    """Of the base's weights, such as "float32"."""
    engine: str
    """How the base was executed; never "auto"."""


@dataclass(frozen=True)
class TunedTree:
    """The fastest tree of a place for one batch size."""

    place: Place
    batch_size: int
    tree: CandidateTree
    origin: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, in plain JSON values."""

    def as_json(self) -> dict[str, Any]:
        """The entry as it stands in a file."""
        place = {key: getattr(self.place, key) for key in PLACE_KEYS}
        paths = [list(path) for path in self.tree.paths]
        return {**place, "batch_size": self.batch_size, "paths": paths, **self.origin}

    @classmethod
    def from_json(cls, entry: Any, origin: str) -> TunedTree:
        """Read what :meth:`as_json` wrote; ``origin`` names file and entry in messages.

        Raises:
            ValueError: a key is missing or holds something else than it should.
        """
        if not isinstance(entry, Mapping):
            raise ValueError(f"{origin} must be a JSON object, got {type(entry).__name__}")
        for key in (*PLACE_KEYS, "batch_size", "paths"):
            if key not in entry:
                raise ValueError(f"{origin} must hold {key!r}, got {sorted(entry)}; tune the tree again")
        for key in PLACE_KEYS:
            if not isinstance(entry[key], str) or not entry[key]:
                raise ValueError(f"{origin}: {key} must be text that is not empty, got {entry[key]!r}")
        rows = entry["batch_size"]
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise ValueError(f"{origin}: batch_size must be an int of at least 1, got {rows!r}")
        known = {*PLACE_KEYS, "batch_size", "paths"}
        rest = {key: value for key, value in entry.items() if key not in known}
        place = Place(*(entry[key] for key in PLACE_KEYS))
        return cls(place, rows, tree_from_json(entry["paths"], origin), rest)


def tree_from_json(paths: Any, origin: str) -> CandidateTree:
    """The tree of ``paths``, lists of ranks; ``origin`` names file and entry in messages.

    Raises:
        ValueError: ``paths`` is something else, or the paths make no tree.
    """
    is_listed = isinstance(paths, list) and all(isinstance(path, list) for path in paths)
    if not is_listed or not all(type(rank) is int for path in paths for rank in path):
        raise ValueError(f"{origin}: paths must be lists of ranks, such as [[], [0], [0, 0]], got {paths!r}")
    try:
        return CandidateTree.from_paths(paths)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def tuned_from_json(entries: Any, origin: str) -> tuple[TunedTree, ...]:
    """All entries of a file.

    Raises:
        ValueError: they are no list, one of them is malformed, or two are for the same place and batch size.
    """
    if not isinstance(entries, list):
        raise ValueError(f"{origin}: tuned must be a list of entries, got {type(entries).__name__}")
    trees = tuple(TunedTree.from_json(entry, f"{origin} tuned[{i}]") for i, entry in enumerate(entries))
    seen: set[tuple[Place, int]] = set()
    for i, tuned in enumerate(trees):
        if (tuned.place, tuned.batch_size) in seen:
            raise ValueError(
                f"{origin} tuned[{i}] is a second entry for batch size {tuned.batch_size} on "
                f"{tuned.place.device}, {tuned.place.dtype}, {tuned.place.engine}; keep one of them"
            )
        seen.add((tuned.place, tuned.batch_size))
    return trees


def at_place(trees: Iterable[TunedTree], place: Place) -> tuple[TunedTree, ...]:
    """The entries of ``place``, by growing batch size."""
    return tuple(sorted((t for t in trees if t.place == place), key=lambda tuned: tuned.batch_size))


def chosen_for(trees: Sequence[TunedTree], batch_size: int) -> CandidateTree | None:
    """The tree of the nearest batch size at or above ``batch_size`` among the entries of one place.

    Rows that finish leave a batch, and a tree chosen for more rows than there are errs on the small side.
    Above the largest size measured, the tree of that one; None when there are no entries.
    """
    if not trees:
        return None
    above = [tuned for tuned in trees if tuned.batch_size >= batch_size]
    nearest = min(above, key=lambda t: t.batch_size) if above else max(trees, key=lambda t: t.batch_size)
    return nearest.tree


def merged(old: Iterable[TunedTree], new: Sequence[TunedTree]) -> tuple[TunedTree, ...]:
    """``old`` with ``new`` in the place of those for the same place and batch size."""
    replaced = {(tuned.place, tuned.batch_size) for tuned in new}
    kept = tuple(tuned for tuned in old if (tuned.place, tuned.batch_size) not in replaced)
    return kept + tuple(new)
