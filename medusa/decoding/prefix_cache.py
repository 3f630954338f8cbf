"""Prefixes that were read before: a conversation's next turn does not read its history again.

Keys and values of a text depend on its tokens alone, so whoever begins with the same tokens can start from a
copy of them. Kept is what rows leave behind when they end, until a limit of memory is reached; the least
recently used goes first. What one owner leaves is for that owner alone: how much of a guess is known, and how
fast it is read, would tell others the text token by token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from medusa.decoding.state import Prefix


@dataclass(frozen=True)
class _Kept:
    owner: Hashable
    ids: tuple[int, ...]
    prefix: Prefix


class PrefixCache:
    """Prefixes of one base, ``max_bytes`` of keys, values and features at most, of all owners together; 0
    keeps none. Owners are whatever the caller tells them by."""

    def __init__(self, max_bytes: int):
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be at least 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self._kept: list[_Kept] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(each.prefix.num_bytes for each in self._kept)

    def longest(self, ids: Sequence[int], owner: Hashable = None) -> tuple[Prefix | None, int]:
        """What of this owner shares most first tokens with ``ids``, and how many; counts as a use of it."""
        ids = tuple(ids)
        shared = [num_shared(each.ids, ids) if each.owner == owner else 0 for each in self._kept]
        if not any(shared):
            return None, 0
        best = shared.index(max(shared))
        used = self._kept.pop(best)
        self._kept.append(used)
        return used.prefix, shared[best]

    def is_known(self, ids: Sequence[int], owner: Hashable = None) -> bool:
        """Whether something that is kept for this owner begins with ``ids``."""
        return any(each.owner == owner and num_shared(each.ids, ids) == len(ids) for each in self._kept)

    def keep(self, ids: Sequence[int], prefix: Prefix, owner: Hashable = None) -> None:
        """Keep ``prefix``, which has read exactly ``ids``; what it continues is not kept beside it."""
        ids = tuple(ids)
        if not ids or prefix.num_bytes > self.max_bytes or self.is_known(ids, owner):
            return
        self._kept = [
            each for each in self._kept if each.owner != owner or num_shared(each.ids, ids) < len(each.ids)
        ]
        self._kept.append(_Kept(owner, ids, prefix))
        while self.num_bytes > self.max_bytes:
            del self._kept[0]


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common from the start."""
    low, high = 0, min(len(first), len(second))
    first, second = tuple(first), tuple(second)
    while low < high:  # the first ``low`` agree, and some of the first ``high + 1`` do not
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
