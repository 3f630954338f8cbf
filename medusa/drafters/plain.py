"""No drafting: a tree of the root token alone, which makes the decode loop plain decoding."""

from __future__ import annotations

from torch import Tensor

from medusa.drafters.protocol import Draft, DraftContext, StatelessDrafter
from medusa.drafters.source import DrafterSettings, DraftHost, DraftSource, NamedDrafter
from medusa.trees.candidate_tree import TreeTopology


class PlainDrafter(StatelessDrafter):
    """Proposes nothing."""

    max_depth = 0
    static_key = ()
    num_nodes = 1

    def tensors(self) -> list[Tensor]:
        return []

    def draft(self, context: DraftContext) -> Draft:
        return Draft(context.root[:, None], TreeTopology.chain(1, context.root.device))


def plain_source(host: DraftHost, settings: DrafterSettings) -> DraftSource:
    """Nothing to prepare."""
    return DraftSource("plain", lambda tree: PlainDrafter(), max_length=0)


PLAIN = NamedDrafter("plain", plain_source, summary="nothing: one token a pass")
