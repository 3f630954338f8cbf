"""Sources of candidates: each fills a tree with tokens for one verification pass.

A drafter proposes, the base model decides, so a drafter can make decoding slow but never wrong.
One file per source; anything with ``draft`` and ``keep_rows`` will do (see :class:`Drafter`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from medusa.tree import TreeTopology


@dataclass(frozen=True)
class DraftContext:
    """What is known when a step begins. B rows; position counts from 0, without padding."""

    root: Tensor
    """(B,) long: the base's own next token, not yet in its cache."""
    hidden: Tensor
    """(B, D): the base's hidden state that chose ``root``."""
    tokens: Tensor
    """(B, S) long: each row's tokens from column 0, root included."""
    lengths: Tensor
    """(B,) long: tokens of each row, root included; the root stands at position ``lengths - 1``."""
    noise: Tensor | None
    """(B, L, V): the noise that will choose the tokens 1 .. L positions after the root; None when greedy."""
    temperature: float
    """Of the sampling distribution; 1.0 when greedy."""


@dataclass(frozen=True)
class Draft:
    """A filled tree."""

    tokens: Tensor
    """(B, N) long; column 0 is the root token."""
    topology: TreeTopology


class Drafter(Protocol):
    """Proposes candidate tokens for a step."""

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node that :meth:`draft` ever returns; 0 proposes nothing."""

    def draft(self, context: DraftContext) -> Draft:
        """A tree below each row's root token."""

    def keep_rows(self, rows: Tensor) -> None:
        """The batch shrinks to ``rows`` (B',) long, in that order."""
