"""Drafters by name: what a user types becomes a source of candidates.

A name is a key of :data:`DRAFTERS`, or several joined by ``+`` (``heads+suffix``), which share one tree.

**Adding a drafter**: a file in this folder with a :class:`medusa.drafters.source.NamedDrafter`, and a line in
:data:`DRAFTERS`. Its ``source(host, settings)`` does what is expensive once, such as loading a model, and
says how to fill a tree: ``DraftSource("name", lambda tree: MyDrafter(tree))``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from medusa.choices import StepKind
from medusa.drafters.draft_model import DRAFT_MODEL
from medusa.drafters.dynamic import DYNAMIC_HEADS
from medusa.drafters.eagle3 import EAGLE3
from medusa.drafters.heads import HEADS
from medusa.drafters.plain import PLAIN
from medusa.drafters.protocol import Drafter
from medusa.drafters.self_draft import EARLY_EXIT, LOW_PRECISION
from medusa.drafters.source import DrafterSettings, DraftHost, DraftSource, NamedDrafter
from medusa.drafters.suffix import SUFFIX
from medusa.drafters.union import UnionSource

DRAFTERS: dict[str, NamedDrafter] = {
    named.name: named
    for named in (
        HEADS,
        DYNAMIC_HEADS,
        SUFFIX,
        EAGLE3,
        DRAFT_MODEL,
        EARLY_EXIT,
        LOW_PRECISION,
        PLAIN,
    )
}
"""Every drafter that a user can ask for by name."""
DEFAULT_DRAFTER = "dynamic-heads+suffix"
"""Who guesses in a chat: measured faster than heads alone, on text that repeats itself and on other text."""


def draft_with_heads(name: str) -> bool:
    """Whether the drafter called ``name``, or a part of the union, needs the heads of the model.

    Raises:
        ValueError: a part is unknown, named twice, or "plain".
    """
    known = DRAFTERS
    return any(known[part].needs_heads for part in part_names(name, known))


def available_drafters(host: DraftHost, settings: DrafterSettings) -> list[str]:
    """The names that work with this model and these settings, plain decoding left out."""
    found = DRAFTERS.values()
    return [named.name for named in found if named.name != "plain" and not named.missing(host, settings)]


def drafter_named(
    name: str, host: DraftHost, settings: DrafterSettings | None = None, *, only_chain: bool = False
) -> Drafter:
    """The drafter called ``name``, for ``MedusaModel.generate(..., drafter=)``.

    ``only_chain`` is for rules that walk one path ("token", "block"): heads then draft a chain too.

    Raises:
        ValueError: no such drafter (the message lists those there are), or it lacks something.
    """
    return _source_of(name, host, settings or DrafterSettings()).drafter(only_chain)


def draft_sources(names: Iterable[str], host: DraftHost, settings: DrafterSettings) -> dict[str, DraftSource]:
    """The sources that ``names`` are made of, each prepared once, by their own names.

    Raises:
        ValueError: a name is unknown, or a source lacks something.
    """
    known = DRAFTERS
    parts = dict.fromkeys(part for name in names for part in part_names(name, known))
    for part in parts:
        if missing := known[part].missing(host, settings):
            raise ValueError(f"drafter {part!r} needs {missing}")
    return {part: known[part].source(host, settings) for part in parts}


def source_named(name: str, parts: Mapping[str, DraftSource]) -> DraftSource | UnionSource:
    """The source called ``name``, made of :func:`draft_sources`."""
    chosen = tuple(parts[part] for part in name.split("+"))
    return chosen[0] if len(chosen) == 1 else UnionSource(name, chosen)


def _source_of(name: str, host: DraftHost, settings: DrafterSettings) -> DraftSource | UnionSource:
    return source_named(name, draft_sources([name], host, settings))


class DraftersByName:
    """The drafters of one model that are asked for by name: what is expensive is done once for each name."""

    def __init__(self, host: DraftHost):
        self._host = host
        self._sources: dict[tuple[str, StepKind], DraftSource | UnionSource] = {}

    def drafter(self, name: str, num_rows: int, step: StepKind) -> Drafter | None:
        """A new drafter called ``name`` for ``num_rows`` rows in such steps; None where trees tuned for so
        many say that guessing does not pay.

        Raises:
            ValueError: as :func:`drafter_named`.
        """
        if (name, step) not in self._sources:
            self._sources[name, step] = _source_of(name, self._host, DrafterSettings(step=step))
        source = self._sources[name, step]
        return None if source.is_idle(num_rows) else source.drafter(num_rows=num_rows)


def part_names(name: str, known: Iterable[str] | None = None) -> list[str]:
    """What ``name`` is made of: itself, or the parts of a union.

    Raises:
        ValueError: a part is unknown, named twice, or "plain".
    """
    known = list(DRAFTERS if known is None else known)
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
