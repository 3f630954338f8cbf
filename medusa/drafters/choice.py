"""Drafters by name: what a user types becomes a source of candidates.

A name is one of :func:`all_drafters`, or several joined by ``+`` (``heads+suffix``), which share one tree.

**Adding a drafter is adding one file to this folder** that ends in

    DRAFTERS = (NamedDrafter("name", source, summary="..."),)

where ``source(model, settings)`` does what is expensive once, such as loading a model, and says how to fill
a tree: ``DraftSource("name", lambda tree: MyDrafter(tree))``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import medusa.drafters
from medusa.base import CausalLM
from medusa.drafters import Drafter
from medusa.drafters.union import UnionDrafter
from medusa.tree import CandidateTree
from medusa.verification import independent_chains

if TYPE_CHECKING:
    from medusa.checkpoint import HeadsCheckpoint
    from medusa.model import MedusaModel

DEFAULT_DRAFT_LENGTH = 4


@dataclass(frozen=True)
class DrafterSettings:
    """What drafters may want to know beyond the model. Each reads its own fields."""

    draft_length: int | None = None
    """Draft tokens of a chain; None: each drafter's default. Heads use the model's own tree."""
    draft_width: int = 1
    """Chains side by side, for rules that take a tree; 1 is one chain."""
    draft_model: str | Path | CausalLM | None = None
    """The smaller model of "draft-model": a directory, a hub id, or a loaded model."""
    exit_layer: int | None = None
    """How many layers of the base "early-exit" runs."""
    eagle: str | Path | HeadsCheckpoint | None = None
    """The head of "eagle": a heads directory, a hub id, or a loaded checkpoint."""

    def __post_init__(self) -> None:
        for name in ("draft_length", "draft_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class DraftSource:
    """A drafter that lacks only the shape of its drafts: making this may be slow, :meth:`drafter` is not."""

    name: str
    fill: Callable[[CandidateTree], Drafter]
    """A new drafter for a tree."""
    own_tree: CandidateTree | None = None
    """The tree it is made for; None: a chain of ``draft_length``."""
    tree_of_rows: Callable[[int], CandidateTree] | None = None
    """The tree for a batch of so many rows, where it depends on that; it then goes before ``own_tree``."""
    draft_length: int = DEFAULT_DRAFT_LENGTH
    draft_width: int = 1
    max_length: int | None = None
    """The longest chain it can draft; None: any."""

    def __post_init__(self) -> None:
        if self.max_length is not None:
            object.__setattr__(self, "draft_length", min(self.draft_length, self.max_length))

    def drafter(self, only_chain: bool = False, num_rows: int = 1) -> Drafter:
        """A new drafter for ``num_rows`` rows; ``only_chain`` is for rules that walk one path."""
        own_tree = self.own_tree if self.tree_of_rows is None else self.tree_of_rows(num_rows)
        if own_tree is not None and own_tree.depth and not only_chain:
            return self.fill(own_tree)
        if self.draft_width == 1 or only_chain:
            return self.fill(CandidateTree.chain(self.draft_length))
        return self.fill(independent_chains(self.draft_width, self.draft_length))

    def is_idle(self, num_rows: int) -> bool:
        """Whether its tree for ``num_rows`` rows is the root alone: nothing to draft."""
        return self.tree_of_rows is not None and self.tree_of_rows(num_rows).depth == 0

    def with_length(self, draft_length: int) -> DraftSource:
        """The same source, drafting chains of ``draft_length`` where it drafts chains."""
        return replace(self, draft_length=draft_length)


@dataclass(frozen=True)
class UnionSource:
    """Several sources whose trees hang below one root."""

    name: str
    parts: tuple[DraftSource, ...]

    def is_idle(self, num_rows: int) -> bool:
        """Whether no part has anything to draft for ``num_rows`` rows."""
        return all(part.is_idle(num_rows) for part in self.parts)

    def drafter(self, only_chain: bool = False, num_rows: int = 1) -> Drafter:
        """A new drafter for ``num_rows`` rows. It is never a chain: rules that want one refuse it.

        A part whose tuned tree for so many rows is the root alone does not pay there and takes no part,
        unless none would be left.
        """
        paying = [part for part in self.parts if not part.is_idle(num_rows)] or self.parts
        drafters = [part.drafter(only_chain, num_rows) for part in paying]
        return UnionDrafter(drafters) if len(drafters) > 1 else drafters[0]


def nothing_missing(model: MedusaModel, settings: DrafterSettings) -> str | None:
    """For drafters that work on any model without settings."""
    return None


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that a user can ask for."""

    name: str
    source: Callable[[MedusaModel, DrafterSettings], DraftSource]
    summary: str
    missing: Callable[[MedusaModel, DrafterSettings], str | None] = nothing_missing
    """What it needs and has not got, and the flag that gives it; None when it can work."""
    needs_heads: bool = False
    """Whether it drafts with the heads of the model, which must then be loaded."""


def all_drafters() -> dict[str, NamedDrafter]:
    """Every drafter of this folder by name, in the order of file names.

    Raises:
        ValueError: two files give the same name to a drafter.
    """
    drafters: dict[str, NamedDrafter] = {}
    for found in pkgutil.iter_modules(medusa.drafters.__path__, prefix="medusa.drafters."):
        for named in getattr(importlib.import_module(found.name), "DRAFTERS", ()):
            if named.name in drafters:
                raise ValueError(f"drafter names must differ, got {named.name!r} again in {found.name}")
            drafters[named.name] = named
    return drafters


def draft_with_heads(name: str) -> bool:
    """Whether the drafter called ``name``, or a part of the union, needs the heads of the model.

    Raises:
        ValueError: a part is unknown, named twice, or "plain".
    """
    known = all_drafters()
    return any(known[part].needs_heads for part in part_names(name, known))


def available_drafters(model: MedusaModel, settings: DrafterSettings) -> list[str]:
    """The names that work with this model and these settings, plain decoding left out."""
    found = all_drafters().values()
    return [named.name for named in found if named.name != "plain" and not named.missing(model, settings)]


def drafter_named(
    name: str, model: MedusaModel, settings: DrafterSettings | None = None, *, only_chain: bool = False
) -> Drafter:
    """The drafter called ``name``, for ``model.generate(..., drafter=)``.

    ``only_chain`` is for rules that walk one path ("token", "block"): heads then draft a chain too.

    Raises:
        ValueError: no such drafter (the message lists those there are), or it lacks something.
    """
    return _source_of(name, model, settings or DrafterSettings()).drafter(only_chain)


def draft_sources(
    names: Iterable[str], model: MedusaModel, settings: DrafterSettings
) -> dict[str, DraftSource]:
    """The sources that ``names`` are made of, each prepared once, by their own names.

    Raises:
        ValueError: a name is unknown, or a source lacks something.
    """
    known = all_drafters()
    parts = dict.fromkeys(part for name in names for part in part_names(name, known))
    for part in parts:
        if missing := known[part].missing(model, settings):
            raise ValueError(f"drafter {part!r} needs {missing}")
    return {part: known[part].source(model, settings) for part in parts}


def source_named(name: str, parts: Mapping[str, DraftSource]) -> DraftSource | UnionSource:
    """The source called ``name``, made of :func:`draft_sources`."""
    chosen = tuple(parts[part] for part in name.split("+"))
    return chosen[0] if len(chosen) == 1 else UnionSource(name, chosen)


def _source_of(name: str, model: MedusaModel, settings: DrafterSettings) -> DraftSource | UnionSource:
    return source_named(name, draft_sources([name], model, settings))


class DraftersByName:
    """The drafters of one model that are asked for by name: what is expensive is done once for each name."""

    def __init__(self, model: MedusaModel):
        self._model = model
        self._sources: dict[str, DraftSource | UnionSource] = {}

    def drafter(self, name: str, num_rows: int) -> Drafter | None:
        """A new drafter called ``name`` for ``num_rows`` rows; None where trees tuned for so many say that
        guessing does not pay.

        Raises:
            ValueError: as :func:`drafter_named`.
        """
        if name not in self._sources:
            self._sources[name] = _source_of(name, self._model, DrafterSettings())
        source = self._sources[name]
        return None if source.is_idle(num_rows) else source.drafter(num_rows=num_rows)


def part_names(name: str, known: Iterable[str] | None = None) -> list[str]:
    """What ``name`` is made of: itself, or the parts of a union.

    Raises:
        ValueError: a part is unknown, named twice, or "plain".
    """
    known = list(all_drafters() if known is None else known)
    parts = name.split("+")
    for part in parts:
        if part not in known:
            raise ValueError(
                f"drafter {part!r} is unknown; there are {', '.join(known)}, and unions such as heads+suffix"
            )
    if len(set(parts)) < len(parts) or ("plain" in parts and len(parts) > 1):
        raise ValueError(
            f"a union names each drafter once, and not 'plain', which proposes nothing; got {name!r}"
        )
    return parts
