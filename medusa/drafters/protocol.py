"""Sources of candidates: each fills a tree with tokens for one verification pass.

A drafter proposes, the base model decides, so a drafter can make decoding slow but never wrong.
One file per source, all behind :class:`Drafter`. Those that ask a model for the next token at every node
share :class:`medusa.drafters.levels.LevelDrafter` and write one method.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa.acceptance.protocol import DraftKind
from medusa.acceptance.sampling import UpcomingNoise
from medusa.base.cache import TreeCache
from medusa.drafters.references import References
from medusa.trees.candidate_tree import CandidateTree, TreeTopology


@dataclass(frozen=True)
class DraftContext:
    """What is known when a step begins. B rows; position counts from 0, without padding."""

    root: Tensor
    """(B,) long: the base's own next token, not yet in its cache."""
    hidden: Tensor
    """(B, D): the base's hidden state that chose ``root``; (B, (1 + L) * D) with L of ``reads_layers``."""
    tokens: Tensor
    """(B, S) long: each row's tokens from column 0, root included."""
    lengths: Tensor
    """(B,) long: tokens of each row, root included; the root stands at position ``lengths - 1``."""
    cache: TreeCache
    """The base's own. A drafter may run tree nodes on it; what it leaves there uncommitted is overwritten."""
    noise: UpcomingNoise | None
    """What will choose the tokens after the root; None when greedy."""
    temperature: float | Tensor = 1.0
    """Of the sampling distribution; 1.0 when greedy. (B, 1, 1) where rows differ, 0 in greedy ones."""
    features: Tensor | None = None
    """(B, S, D), or as ``hidden``: the same at every committed position, if ``needs_features``."""
    sampled: DraftKind | None = None
    """Draw the candidates from the drafter's distribution, in this way; None: take the best ones."""
    seeds: Tensor | None = None
    """(B,) long: noise streams of the rows, for drawing candidates."""
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    """What the base's logits go through before its tokens are chosen, ``temperature`` included."""
    references: Sequence[References] = ()
    """What each row may copy from beside its own text; () for nothing."""
    fixed_shape: bool = False
    """Static steps: the draft must have all of the drafter's nodes, and the host may read no tensor."""

    def sharpness(self, beta: float) -> float | Tensor:
        """What logits (B, M, V) are multiplied by before they are ranked together with :attr:`noise`.

        ``beta / temperature``, where ``beta`` is the drafter's weight against the noise; 1 in greedy rows.
        """
        if self.noise is None:
            return 1.0
        if isinstance(self.temperature, Tensor):
            return torch.where(self.temperature > 0, beta / self.temperature, 1.0)
        return beta / self.temperature


@dataclass(frozen=True)
class Draft:
    """A filled tree."""

    tokens: Tensor
    """(B, N) long; node 0 is the root token, parents stand before their children."""
    topology: TreeTopology
    proposal: Tensor | None = None
    """(B, N, V): the distribution each node's children were drawn from; None for best candidates."""
    worth: Tensor | None = None
    """(B, N), falling: the log-probability, by the drafter's account, that the base takes each node's path.
    The first nodes then are a draft as well. None where it does not say."""
    num_spare: int = 0
    """Nodes at the end that are to be verified only where they are likely."""

    def first(self, num_nodes: int) -> Draft:
        """The first ``num_nodes`` nodes, of a draft that says what its nodes are worth."""
        if num_nodes == self.tokens.shape[1]:
            return self
        return Draft(self.tokens[:, :num_nodes], self.topology.first(num_nodes))

    def root_alone(self) -> Draft:
        """The draft without its guesses."""
        nothing = None if self.proposal is None else torch.zeros_like(self.proposal[:, :1])
        return Draft(self.tokens[:, :1], TreeTopology.chain(1, self.tokens.device), nothing)


class Drafter(Protocol):
    """Proposes candidate tokens for a step."""

    context_only: bool
    """Whether the proposal after a text depends on that text alone, not on the step it was drafted in."""
    needs_features: bool
    """Whether :class:`DraftContext` must carry ``features``."""
    reads_layers: tuple[int, ...]
    """The decoder layers whose states it reads beside the last one
    (:func:`medusa.base.causal_lm.seen_hidden`)."""

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node that :meth:`draft` ever returns; 0 proposes nothing."""

    def fill(self, tree: CandidateTree | None = None) -> Drafter:
        """A new drafter of this kind for ``tree``, by default its own. What is slow to make is shared.

        Raises:
            ValueError: it cannot fill such a tree.
        """

    def begin(self, num_rows: int, after: Drafter | None = None) -> None:
        """``num_rows`` rows follow, and whatever was kept of earlier ones is dropped.

        ``after`` has drafted for the first of them so far and will not go on: what it has read of their
        texts may be taken over.
        """

    def draft(self, context: DraftContext) -> Draft:
        """A tree below each row's root token."""

    def keep_rows(self, rows: Tensor) -> None:
        """The batch shrinks to ``rows`` (B',) long, in that order."""

    def sampled_kind(self, wanted: DraftKind) -> DraftKind:
        """How candidates come about when a rule would like ``wanted``; RANKED if they cannot be drawn."""


@runtime_checkable
class StaticDrafter(Drafter, Protocol):
    """A drafter whose drafts are the same tensor operations at every step, and never wait for the device.

    Steps of fixed shape need one (``step="static"`` and those built on it).
    """

    @property
    def static_key(self) -> Hashable:
        """All that a draft depends on besides its context."""

    @property
    def num_nodes(self) -> int:
        """N of every draft."""

    def tensors(self) -> list[Tensor]:
        """What drafts read and others may replace: weights."""


def host_bound_parts(drafter: Drafter) -> list[Drafter]:
    """``drafter``, or the drafters that a union joins, as far as they are not static: drafters that keep
    something of the text are not."""
    parts = getattr(drafter, "drafters", None)
    if parts is not None:
        return [found for part in parts for found in host_bound_parts(part)]
    return [] if isinstance(drafter, StaticDrafter) and not drafter.needs_features else [drafter]


class StatelessDrafter:
    """What a drafter that keeps nothing between steps, and only ranks, shares with the others of its kind."""

    context_only = True
    needs_features = False
    reads_layers: tuple[int, ...] = ()

    def fill(self, tree: CandidateTree | None = None) -> Drafter:
        if tree is None:
            return copy.copy(self)  # type: ignore[return-value]  # subclasses have the protocol's methods
        raise ValueError(f"{type(self).__name__} fills no tree but its own; leave tree out")

    def begin(self, num_rows: int, after: Drafter | None = None) -> None:
        """Nothing is kept."""

    def keep_rows(self, rows: Tensor) -> None:
        """Nothing is kept."""

    def sampled_kind(self, wanted: DraftKind) -> DraftKind:
        return DraftKind.RANKED


class PlainDrafter(StatelessDrafter):
    """Proposes nothing. ``reads_layers`` are those of the drafter in whose place it stands for some steps."""

    max_depth = 0
    num_nodes = 1

    def __init__(self, reads_layers: tuple[int, ...] = ()):
        self.reads_layers = reads_layers

    @property
    def static_key(self) -> Hashable:
        """See :class:`medusa.drafters.protocol.StaticDrafter`."""
        return self.reads_layers

    def fill(self, tree: CandidateTree | None = None) -> PlainDrafter:
        return PlainDrafter(self.reads_layers)

    def tensors(self) -> list[Tensor]:
        return []

    def draft(self, context: DraftContext) -> Draft:
        return Draft(context.root[:, None], TreeTopology.chain(1, context.root.device))
