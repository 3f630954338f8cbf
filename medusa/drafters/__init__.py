"""Sources of candidates, one file each: a drafter fills the tree that the base model then verifies."""

from medusa.drafters.protocol import Draft, DraftContext, Drafter, StatelessDrafter

__all__ = ["Draft", "DraftContext", "Drafter", "StatelessDrafter"]
