"""No drafting: a tree of the root token alone, which makes the decode loop plain decoding."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from medusa.drafters.protocol import Draft, DraftContext, StatelessDrafter
from medusa.drafters.settings import NamedDrafter
from medusa.trees.candidate_tree import CandidateTree, TreeTopology


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


PLAIN = NamedDrafter("plain", lambda host, settings: PlainDrafter(), "nothing: one token a pass")
