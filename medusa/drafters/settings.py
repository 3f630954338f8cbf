"""What a drafter with a name is made from: the model that it drafts for, and settings of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from medusa.acceptance.distributions import independent_chains
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

    def __post_init__(self) -> None:
        for name in ("draft_length", "draft_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def tree(self, default_length: int = DEFAULT_DRAFT_LENGTH) -> CandidateTree:
        """The tree of a drafter that has none of its own: a chain, or as many chains as it is wide."""
        length = self.draft_length or default_length
        chains = self.draft_width > 1
        return independent_chains(self.draft_width, length) if chains else CandidateTree.chain(length)


class DraftHost(Protocol):
    """What a drafter reads of the model that it drafts for; :class:`medusa.MedusaModel` is one."""

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

    @property
    def step(self) -> StepKind:
        """How decode steps are run, unless a call says otherwise."""

    def tree_for(self, batch_size: int, step: StepKind | None = None) -> CandidateTree:
        """The model's tree for so many rows, in steps of kind ``step`` or its own."""


def nothing_missing(host: DraftHost, settings: DrafterSettings) -> str | None:
    """For drafters that work on any model without settings."""
    return None


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter that a user can ask for."""

    name: str
    make: Callable[[DraftHost, DrafterSettings], Drafter]
    """Makes it, in a tree of its own; what is slow is done here, once. Others are made of it by ``fill``."""
    summary: str
    missing: Callable[[DraftHost, DrafterSettings], str | None] = nothing_missing
    """What it needs and has not got, and the flag that gives it; None when it can work."""
    needs_heads: bool = False
    """Whether it drafts with the heads of the model, which must then be loaded, and in the model's trees."""
