"""Drafters by name: what a user types becomes a drafter.

A name is a key of :data:`DRAFTERS`, or several joined by ``+`` (``heads+suffix``), which share one tree.

**Adding a drafter**: a file in this folder with a :class:`medusa.drafters.settings.NamedDrafter`, and a
line in :data:`DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Iterable

from medusa.choices import StepKind
from medusa.drafters.draft_model import DRAFT_MODEL
from medusa.drafters.dynamic import DYNAMIC_HEADS, DynamicDrafter
from medusa.drafters.eagle3 import EAGLE3
from medusa.drafters.heads import HEADS
from medusa.drafters.plain import PLAIN, PlainDrafter
from medusa.drafters.protocol import Drafter, host_bound_parts
from medusa.drafters.self_draft import EARLY_EXIT, LOW_PRECISION
from medusa.drafters.settings import DrafterSettings, DraftHost, NamedDrafter
from medusa.drafters.suffix import SUFFIX, SuffixDrafter
from medusa.drafters.union import UnionDrafter
from medusa.trees.candidate_tree import CandidateTree

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


def draft_with_heads(name: str) -> bool:
    """Whether the drafter called ``name``, or a part of the union, needs the heads of the model.

    Raises:
        ValueError: a part is unknown, named twice, or "plain".
    """
    return any(DRAFTERS[part].needs_heads for part in part_names(name))


class Drafters:
    """The drafters of one model, by name; what is slow to make, such as loading a model, is done once."""

    def __init__(self, host: DraftHost, settings: DrafterSettings | None = None):
        self._host, self._settings = host, settings or DrafterSettings()
        self._made: dict[str, Drafter] = {}

    def available(self) -> list[str]:
        """The names that work with this model and these settings, plain decoding left out."""
        found = (named for named in DRAFTERS.values() if named.name != "plain")
        return [named.name for named in found if not named.missing(self._host, self._settings)]

    def make(
        self,
        name: str,
        tree: CandidateTree | None = None,
        *,
        num_rows: int = 1,
        step: StepKind | None = None,
        only_chain: bool = False,
    ) -> Drafter:
        """A new drafter called ``name``, whose parts all fill ``tree``.

        Without a tree the heads draft in the model's own for ``num_rows`` rows in such steps, and the others
        in theirs. A part of a union for which the model's tree is the root alone does not pay there, and
        takes no part. ``only_chain`` is for rules that walk one path ("token", "block").

        Raises:
            ValueError: no such drafter (the message lists those there are), or it lacks something, or it
                cannot fill ``tree``.
        """
        parts = part_names(name)
        for part in parts:
            if missing := DRAFTERS[part].missing(self._host, self._settings):
                raise ValueError(f"drafter {part!r} needs {missing}")
        if tree is not None and tree.depth == 0:
            return PlainDrafter()
        models = self._host.tree_for(num_rows, step)
        of_heads = tree or (models if models.depth and not only_chain else None)
        paying = [part for part in parts if of_heads or only_chain or not DRAFTERS[part].needs_heads] or parts
        return united(
            [
                self._filled(part, of_heads if DRAFTERS[part].needs_heads else tree, only_chain)
                for part in paying
            ]
        )

    def is_idle(self, name: str, num_rows: int, step: StepKind | None = None) -> bool:
        """Whether nothing in ``name`` pays: only heads, whose tree for so many rows is the root alone."""
        only_heads = all(DRAFTERS[part].needs_heads for part in part_names(name))
        return only_heads and not self._host.tree_for(num_rows, step).depth

    def default(self, num_rows: int, step: StepKind | None = None) -> Drafter:
        """The one measured fastest for the model's heads, :data:`DEFAULT_DRAFTER`; where steps of fixed shape
        cannot run it, the heads alone. Nothing is drafted without heads, and where the model's tree is the
        root alone."""
        host = self._host
        if host.heads is None or not host.tree_for(num_rows, step).depth:
            return PlainDrafter()
        fastest = self.make(DEFAULT_DRAFTER, num_rows=num_rows, step=step)
        is_static = (step or host.step) != "general"
        if is_static and host_bound_parts(fastest):
            return self.make("heads", num_rows=num_rows, step=step)
        return fastest

    def _filled(self, part: str, tree: CandidateTree | None, only_chain: bool) -> Drafter:
        """A drafter that is no union; without ``tree`` in its own, or in a chain as deep."""
        if part not in self._made:
            self._made[part] = DRAFTERS[part].make(self._host, self._settings)
        made = self._made[part]
        if only_chain and tree is None and made.max_depth:
            tree = CandidateTree.chain(made.max_depth)
        return made.fill(tree)


def united(drafters: list[Drafter]) -> Drafter:
    """One drafter of one or more: dynamic heads take in a suffix match, the others stand side by side."""
    heads = next((each for each in drafters if isinstance(each, DynamicDrafter)), None)
    suffix = next((each for each in drafters if isinstance(each, SuffixDrafter)), None)
    if heads is not None and suffix is not None:
        rest = [each for each in drafters if each not in (heads, suffix)]
        drafters = [heads.with_suffix(suffix.length), *rest]
    return UnionDrafter(drafters) if len(drafters) > 1 else drafters[0]
