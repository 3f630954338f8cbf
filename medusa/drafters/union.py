"""Several drafters in one tree: whichever was right is kept, by one verification pass.

Their trees are joined at the root. Dynamic heads can do better with a suffix match: they know the probability
of each guess, and share the nodes of one tree with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa.base.passes import layers_of
from medusa.drafters.protocol import Draft, DraftContext, Drafter, StatelessDrafter, StaticDrafter
from medusa.trees.candidate_tree import CandidateTree, TreeTopology


class UnionDrafter(StatelessDrafter):
    """The trees of ``drafters`` below one root; static where each of them is."""

    def __init__(self, drafters: Sequence[Drafter]):
        if len(drafters) < 2:
            raise ValueError(f"a union takes at least two drafters, got {len(drafters)}")
        self.drafters = list(drafters)
        self.reads_features = any(drafter.reads_features for drafter in drafters)
        self.fused_layers = tuple(sorted({layer for drafter in drafters for layer in drafter.fused_layers}))

    def with_tree(self, tree: CandidateTree | None = None) -> UnionDrafter:
        """Each part in ``tree``."""
        return UnionDrafter([drafter.with_tree(tree) for drafter in self.drafters])

    @property
    def max_depth(self) -> int:
        return max(drafter.max_depth for drafter in self.drafters)

    @property
    def static_key(self) -> Hashable:
        """See :class:`medusa.drafters.protocol.StaticDrafter`."""
        return ("union", *(part.static_key for part in self._static_parts))

    @property
    def num_nodes(self) -> int:
        return 1 + sum(part.num_nodes - 1 for part in self._static_parts)

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self._static_parts for tensor in part.tensors()]

    @property
    def _static_parts(self) -> list[StaticDrafter]:
        return [part for part in self.drafters if isinstance(part, StaticDrafter)]

    def reset(self, num_rows: int, after: Drafter | None = None) -> None:
        earlier = after.drafters if isinstance(after, UnionDrafter) else [after]
        for drafter in self.drafters:
            previous = next((other for other in earlier if type(other) is type(drafter)), None)
            drafter.reset(num_rows, previous)

    def keep_rows(self, rows: Tensor) -> None:
        for drafter in self.drafters:
            drafter.keep_rows(rows)

    def draft(self, context: DraftContext) -> Draft:
        drafts = [drafter.draft(self._as_read_by(drafter, context)) for drafter in self.drafters]
        tokens = torch.cat([drafts[0].tokens, *(draft.tokens[:, 1:] for draft in drafts[1:])], dim=1)
        return Draft(tokens, joined_topology([draft.topology for draft in drafts]))

    def _as_read_by(self, drafter: Drafter, context: DraftContext) -> DraftContext:
        """The context with the layers that ``drafter`` reads, and no others."""
        if drafter.fused_layers == self.fused_layers:
            return context
        features = context.features
        if features is not None:
            features = layers_of(features, self.fused_layers, drafter.fused_layers)
        hidden = layers_of(context.hidden, self.fused_layers, drafter.fused_layers)
        return replace(context, hidden=hidden, features=features)


def joined_topology(topologies: Sequence[TreeTopology]) -> TreeTopology:
    """The trees side by side below one root: the first one's nodes, then the others' without their roots."""
    num_trees = max(topology.parents.shape[0] for topology in topologies)
    parents = []
    depths = []
    offset = 0
    for index, topology in enumerate(topologies):
        first = min(index, 1)
        shifted = torch.where(topology.parents == 0, 0, topology.parents + offset)
        parents.append(shifted[:, first:].expand(num_trees, -1))
        depths.append(topology.depths[:, first:].expand(num_trees, -1))
        offset += topology.num_nodes - 1
    max_depth = max(topology.max_depth for topology in topologies)
    return TreeTopology.from_parents(torch.cat(parents, 1), torch.cat(depths, 1), max_depth)
