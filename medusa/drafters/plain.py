"""No drafting: a tree of the root token alone, which makes the decode loop plain decoding."""

from __future__ import annotations

from medusa.drafters import Draft, DraftContext, StatelessDrafter
from medusa.tree import TreeTopology


class PlainDrafter(StatelessDrafter):
    """Proposes nothing."""

    max_depth = 0

    def draft(self, context: DraftContext) -> Draft:
        return Draft(context.root[:, None], TreeTopology.chain(1, context.root.device))
