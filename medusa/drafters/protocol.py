"""Sources of candidates: each fills a tree with tokens for one verification pass.

A drafter proposes, the base model decides, so a drafter can make decoding slow but never wrong. All implement
:class:`Drafter`. Drafters that ask a model for the next token at every node subclass
:class:`medusa.drafters.levels.LevelDrafter` and write one method.

:class:`DraftValidator` checks every draft: shapes, tokens, and a valid tree. Shapes are known on the host.
Values are checked on the device, which gives one flag for each rule. The general loop reads the flags before
the base sees the draft; static steps collect them until the host next reads the results.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

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
    """The input of a drafter at the start of a step. B rows; positions count from 0, without padding."""

    root: Tensor
    """(B,) long: the base's own next token, not yet in its cache."""
    hidden: Tensor
    """(B, (1 + A) * D): the base's hidden state that chose ``root``, then those of the A ``fused_layers``."""
    tokens: Tensor
    """(B, S) long: each row's tokens from column 0, root included."""
    lengths: Tensor
    """(B,) long: tokens of each row, root included; the root is at position ``lengths - 1``."""
    cache: TreeCache
    """The base's own cache. A drafter may run tree nodes on it; uncommitted entries are overwritten."""
    noise: UpcomingNoise | None
    """The noise that will choose the tokens after the root; None when greedy."""
    temperature: float | Tensor = 1.0
    """Temperature of the sampling distribution; 1.0 when greedy. (B, 1, 1) where rows differ, 0 in greedy
    ones."""
    features: Tensor | None = None
    """(B, S, D), or as ``hidden``: the same at every committed position, if ``reads_features``."""
    sampled: DraftKind | None = None
    """Draw the candidates from the drafter's distribution, in this way; None: take the best ones."""
    seeds: Tensor | None = None
    """(B,) long: noise streams of the rows, for drawing candidates."""
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    """The logits processors of the base's logits, ``temperature`` included."""
    references: Sequence[References] = ()
    """Reference texts of each row; () for none."""
    min_accept_prob: float = 0.0
    """Nodes whose mean acceptance probability is below this are not verified, so the drafter need not produce
    them."""
    vocab_size: int = sys.maxsize
    """V: tokens that the base can write. It may read others, as where embeddings are padded, and these are no
    guess."""
    fixed_shape: bool = False
    """Static steps: the draft must have all of the drafter's nodes, and the host may read no tensor."""

    def sharpness(self, beta: float) -> float | Tensor:
        """The factor of logits (B, M, V) before they are ranked together with :attr:`noise`.

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
    """(B, N) long; node 0 is the root token, parents come before their children."""
    topology: TreeTopology
    proposal: Tensor | None = None
    """(B, N, V): the distribution each node's children were drawn from; None for best candidates."""
    path_logprob: Tensor | None = None
    """(B, N), non-increasing: estimated log-probability that the path to the node is accepted. Any prefix of
    the nodes is then a valid draft. None where the drafter has no estimate."""
    num_optional_nodes: int = 0
    """Nodes at the end that are to be verified only where they are likely."""

    def first(self, num_nodes: int) -> Draft:
        """The first ``num_nodes`` nodes, of a draft that says what its nodes are worth."""
        if num_nodes == self.tokens.shape[1]:
            return self
        return Draft(self.tokens[:, :num_nodes], self.topology.first(num_nodes))

    def root_only(self) -> Draft:
        """The draft without its guesses."""
        nothing = None if self.proposal is None else torch.zeros_like(self.proposal[:, :1])
        return Draft(self.tokens[:, :1], TreeTopology.chain(1, self.tokens.device), nothing)


class Drafter(Protocol):
    """Proposes candidate tokens for a step."""

    context_only: bool
    """Whether the proposal after a text depends only on that text, not on the step it was drafted in."""
    reads_features: bool
    """Whether :class:`DraftContext` must carry ``features``."""
    fused_layers: tuple[int, ...]
    """The decoder layers whose states it reads beside the last one
    (:func:`medusa.base.passes.capture_hidden_states`)."""

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node that :meth:`draft` ever returns; 0 proposes nothing."""

    def with_tree(self, tree: CandidateTree | None = None) -> Drafter:
        """A new drafter of this kind for ``tree``, by default its own. Models and other slow parts are
        shared.

        Raises:
            ValueError: it cannot fill such a tree.
        """

    def reset(self, num_rows: int, after: Drafter | None = None) -> None:
        """``num_rows`` rows follow, and whatever was kept of earlier ones is dropped.

        ``after`` is the previous drafter of the first rows; its cache may be taken over.
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
        """The weights that drafts read and others may replace."""


def not_capturable(drafter: Drafter) -> list[Drafter]:
    """``drafter``, or the drafters that a union joins, as far as they are not static: drafters that keep
    something of the text are not."""
    parts = getattr(drafter, "drafters", None)
    if parts is not None:
        return [drafter for part in parts for drafter in not_capturable(part)]
    return [] if isinstance(drafter, StaticDrafter) and not drafter.reads_features else [drafter]


class StatelessDrafter:
    """Base class of drafters that keep nothing between steps, and only rank.

    A subclass has ``max_depth`` and ``draft``; for steps of fixed shape also what :class:`StaticDrafter` has.
    """

    context_only = True
    reads_features = False
    fused_layers: tuple[int, ...] = ()

    def with_tree(self, tree: CandidateTree | None = None) -> Drafter:
        drafter = cast(Drafter, copy.copy(self))  # subclasses have the protocol's methods
        # Rules that walk one path, and recurrent bases, ask for the chain that a drafter of one node a depth
        # fills anyway.
        if tree is None or tree.paths == CandidateTree.chain(drafter.max_depth).paths:
            return drafter
        raise ValueError(
            f"{type(self).__name__} fills no tree but its own: leave tree out, or write its with_tree"
        )

    def reset(self, num_rows: int, after: Drafter | None = None) -> None:
        """Nothing is kept."""

    def keep_rows(self, rows: Tensor) -> None:
        """Nothing is kept."""

    def sampled_kind(self, wanted: DraftKind) -> DraftKind:
        return DraftKind.RANKED


class PlainDrafter(StatelessDrafter):
    """Proposes nothing. ``fused_layers`` are taken from the drafter that it replaces for some steps."""

    max_depth = 0
    num_nodes = 1

    def __init__(self, fused_layers: tuple[int, ...] = ()):
        self.fused_layers = fused_layers
        self._topology: TreeTopology | None = None

    @property
    def static_key(self) -> Hashable:
        """See :class:`medusa.drafters.protocol.StaticDrafter`."""
        return self.fused_layers

    def with_tree(self, tree: CandidateTree | None = None) -> PlainDrafter:
        return PlainDrafter(self.fused_layers)

    def tensors(self) -> list[Tensor]:
        return []

    def draft(self, context: DraftContext) -> Draft:
        if self._topology is None or self._topology.parents.device != context.root.device:
            self._topology = TreeTopology.chain(1, context.root.device)
        return Draft(context.root[:, None], self._topology)


# ------------------------------------------------------------------ what every draft must be


TOKEN_RULES = ("token ids of the base's vocabulary", "the root token in node 0 of every row")
TOPOLOGY_RULES = (
    "a topology whose parents come before their children, the root its own parent",
    "a topology whose depths are the parents' plus one, and at most max_depth",
    "a topology whose ancestors, lineage and is_chain follow from its parents, "
    "as TreeTopology.from_parents makes them",
)
PROPOSAL_RULES = ("a proposal that is a distribution after every node, or zeros where nothing was drafted",)


class DraftValidator:
    """Checks drafts for a base of ``vocab_size`` tokens.

    The drafts of medusa's own drafters are valid by construction and cost nothing here. A topology is looked
    at once for as long as drafters return the same object.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._topology: TreeTopology | None = None

    def check(self, drafter: Drafter, draft: Draft, context: DraftContext) -> None:
        """Raise ValueError, naming the drafter and the rule, unless the base can verify ``draft``."""
        if is_builtin(drafter):
            return
        check_shapes(drafter, draft, context, self.vocab_size)
        rules = list(TOKEN_RULES)
        flags = [token_violations(draft.tokens, context.root, self.vocab_size)]
        if draft.topology is not self._topology:  # the one of the last draft has passed already
            rules += TOPOLOGY_RULES
            flags.append(topology_violations(draft.topology))
        if draft.proposal is not None:
            rules += PROPOSAL_RULES
            flags.append(proposal_violations(draft.proposal))
        raise_violated(drafter, rules, torch.cat(flags))
        self._topology = draft.topology


def is_builtin(drafter: Drafter) -> bool:
    """Whether ``drafter``, and each drafter that a union joins, is a class of this package."""
    parts = getattr(drafter, "drafters", [])
    return all(type(part).__module__.partition(".")[0] == "medusa" for part in (drafter, *parts))


def raise_violated(drafter: Drafter, rules: Sequence[str], are_violated: Tensor) -> None:
    """Raise ValueError for the first of ``rules`` that ``are_violated`` (R,) bool marks; reads the device."""
    for rule, is_violated in zip(rules, are_violated.tolist(), strict=True):
        if is_violated:
            raise ValueError(
                f"{type(drafter).__name__}.draft must return {rule}; this draft has something else"
            )


def check_shapes(drafter: Drafter, draft: Draft, context: DraftContext, vocab_size: int) -> None:
    """Raise ValueError unless the tensors of ``draft`` fit together and to ``context``. Reads shapes only."""
    name = type(drafter).__name__
    tokens = draft.tokens
    tree = draft.topology
    num_rows = len(context.root)
    num_nodes = tree.num_nodes
    if tokens.dtype != torch.long or tuple(tokens.shape) != (num_rows, num_nodes):
        raise ValueError(
            f"{name}.draft must return tokens of dtype long and shape {(num_rows, num_nodes)}, for "
            f"{num_rows} rows and {num_nodes} nodes, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    num_trees = tree.parents.shape[0]
    shapes = {
        "parents": (num_trees, num_nodes),
        "depths": (num_trees, num_nodes),
        "ancestors": (num_trees, num_nodes, num_nodes),
        "lineage": (num_trees, num_nodes, tree.max_depth + 1),
    }
    for part, shape in shapes.items():
        if num_trees not in (1, num_rows) or tuple(getattr(tree, part).shape) != shape:
            raise ValueError(
                f"{name}.draft must return a topology of 1 or {num_rows} trees in one shape: topology.{part} "
                f"must be {shape}, got {tuple(getattr(tree, part).shape)}"
            )
    max_depth = drafter.max_depth
    if tree.max_depth > max_depth:
        raise ValueError(
            f"{name}.draft must return trees no deeper than its max_depth, {max_depth}, got {tree.max_depth}"
        )
    if context.sampled is None:  # nothing was to be drawn, and so no proposal is read
        return
    shape = (num_rows, num_nodes, vocab_size)
    if draft.proposal is None or tuple(draft.proposal.shape) != shape:
        got = None if draft.proposal is None else tuple(draft.proposal.shape)
        raise ValueError(
            f"{name}.draft must return the proposal that it drew from, of shape {shape}, because "
            f"context.sampled is {context.sampled.name}; got {got}"
        )


def token_violations(tokens: Tensor, root: Tensor, vocab_size: int) -> Tensor:
    """Which of :data:`TOKEN_RULES` ``tokens`` (B, N) long below ``root`` (B,) long break, (2,) bool."""
    return torch.stack([((tokens < 0) | (tokens >= vocab_size)).any(), (tokens[:, 0] != root).any()])


def topology_violations(tree: TreeTopology) -> Tensor:
    """Which of :data:`TOPOLOGY_RULES` ``tree`` breaks, (3,) bool."""
    nodes = torch.arange(tree.num_nodes, device=tree.parents.device)
    before = (nodes - 1).clamp(min=0)
    in_order = (tree.parents >= 0) & (tree.parents <= before)
    # Whatever the draft holds, the next lines must run: values out of range are marked, and clamped here.
    parents = tree.parents.clamp(0, tree.num_nodes - 1)
    depths = tree.depths.clamp(0, tree.max_depth)
    counted = tree.depths == torch.where(nodes == 0, 0, depths.gather(1, parents) + 1)
    counted &= tree.depths <= tree.max_depth
    rebuilt = TreeTopology.from_parents(parents, depths, tree.max_depth)
    follows = (tree.ancestors == rebuilt.ancestors).all() & (tree.lineage == rebuilt.lineage).all()
    if tree.is_chain:
        follows &= (tree.parents == before).all()
    return ~torch.stack([in_order.all(), counted.all(), follows])


def proposal_violations(proposal: Tensor) -> Tensor:
    """Which of :data:`PROPOSAL_RULES` ``proposal`` (B, N, V) breaks, (1,) bool."""
    total = proposal.sum(-1)
    is_whole = (total == 0) | ((total - 1).abs() < 1e-3)  # a total of NaN is neither
    return ~((proposal >= 0).all() & is_whole.all())[None]
