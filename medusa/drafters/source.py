"""A source of candidates: what makes a drafter for a tree, and under which name a user asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from medusa.acceptance.drawing import independent_chains
from medusa.base.causal_lm import CausalLM
from medusa.choices import StepKind
from medusa.drafters.protocol import Drafter
from medusa.engine import Engine
from medusa.heads.checkpoint import HeadsCheckpoint
from medusa.heads.eagle3 import Heads
from medusa.trees.candidate_tree import CandidateTree

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
    eagle3: str | Path | HeadsCheckpoint | None = None
    """The head of "eagle3": a heads directory, a hub id, or a loaded checkpoint."""
    step: StepKind | None = None
    """The kind of steps whose tuned trees count; None: the model's own."""

    def __post_init__(self) -> None:
        for name in ("draft_length", "draft_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class DraftHost(Protocol):
    """What a source reads of the model that it drafts for; :class:`medusa.MedusaModel` is one."""

    @property
    def base(self) -> CausalLM:
        """The base model as it was given."""

    @property
    def runner(self) -> CausalLM:
        """The base model as the engine runs it."""

    @property
    def engine(self) -> Engine:
        """How the base's layers are executed."""

    @property
    def heads(self) -> Heads | None:
        """The heads that the model was loaded with."""

    @property
    def drafting_heads(self) -> Heads | None:
        """The heads as the engine computes them."""

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer; None where it has none."""

    def tree_for(self, batch_size: int, step: StepKind | None = None) -> CandidateTree:
        """The model's tree for so many rows, in steps of kind ``step`` or its own."""


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


def nothing_missing(host: DraftHost, settings: DrafterSettings) -> str | None:
    """For drafters that work on any model without settings."""
    return None


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that a user can ask for."""

    name: str
    source: Callable[[DraftHost, DrafterSettings], DraftSource]
    summary: str
    missing: Callable[[DraftHost, DrafterSettings], str | None] = nothing_missing
    """What it needs and has not got, and the flag that gives it; None when it can work."""
    needs_heads: bool = False
    """Whether it drafts with the heads of the model, which must then be loaded."""
