"""Who fills the candidate tree: ``drafter=``.

A drafter proposes tokens for the nodes of a tree; the base model then verifies them. Whatever it proposes,
the text stays the same under the exact rule. ``registry`` lists the drafters that have a name.
"""

from medusa.drafters.protocol import Draft, DraftContext, Drafter, StatelessDrafter

__all__ = ["Draft", "DraftContext", "Drafter", "StatelessDrafter"]
