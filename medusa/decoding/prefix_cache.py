"""Keys and values of ended texts, for requests that begin with the same tokens.

Keys and values of a text depend only on its tokens, so a request with the same first tokens can start from a
copy of them: the next turn of a conversation does not prefill its history again. :class:`PrefixCache` keeps
them when rows end, up to a limit of memory; the least recently used go first. It is never shared between
owners: the length of the cached prefix, and the time to answer, would tell others the text token by token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from medusa.base.cache import TreeCache
from medusa.decoding.prefix_store import BLOCK, PrefixStore


@dataclass(frozen=True)
class _Kept:
    owner: Hashable
    ids: tuple[int, ...]
    prefix: TreeCache


class PrefixCache:
    """Prefixes of one base, ``max_bytes`` of keys, values and features at most, of all owners together; 0
    keeps none. Owners are whatever the caller tells them by. What is kept goes into ``store`` too. Calls may
    come from any thread."""

    def __init__(self, max_bytes: int, store: PrefixStore | None = None):
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be at least 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self.store = store
        self._lock = threading.RLock()
        self.num_cut = 0
        """Texts that were cut to their leading part, or dropped, because they exceed the bound."""
        self._kept: list[_Kept] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(each.prefix.num_bytes for each in self._kept)

    def longest(self, ids: Sequence[int], owner: Hashable = None) -> tuple[TreeCache | None, int]:
        """The entry of this owner with the longest common prefix with ``ids``, and its length; counts as a
        use."""
        ids = tuple(ids)
        with self._lock:
            shared = [num_shared(each.ids, ids) if each.owner == owner else 0 for each in self._kept]
            if not any(shared):
                return None, 0
            best = shared.index(max(shared))
            used = self._kept.pop(best)
            self._kept.append(used)
            return used.prefix, shared[best]

    def stored(
        self, ids: Sequence[int], owner: Hashable, known: int, new_cache: Callable[[], TreeCache]
    ) -> TreeCache | None:
        """The longest prefix of ``ids`` in the store, where that is longer by a block than the ``known``
        tokens that are in memory."""
        return None if self.store is None else self.store.longest(ids, owner, known + BLOCK, new_cache)

    def is_known(self, ids: Sequence[int], owner: Hashable = None) -> bool:
        """Whether something that is kept for this owner begins with ``ids``."""
        return any(each.owner == owner and num_shared(each.ids, ids) == len(ids) for each in self._kept)

    def keep_row(self, ids: list[int], cache: TreeCache, index: int, owner: Hashable = None) -> None:
        """Keep a copy of row ``index`` of ``cache``, whose tokens are ``ids``, as far as there is room; rows
        that are cut are counted."""
        if not self.max_bytes:
            return
        room = max(0, self.max_bytes - cache.bytes_per_row)
        length = min(len(ids), room // max(1, cache.bytes_per_token))
        self.num_cut += length < len(ids)
        if length and not self.is_known(ids[:length], owner):
            prefix = cache.copy_of_row(index, length)
            self.keep(ids[: prefix.longest], prefix, owner)

    def keep(self, ids: Sequence[int], prefix: TreeCache, owner: Hashable = None) -> None:
        """Keep ``prefix``, the cache of exactly ``ids``; entries that it continues are dropped."""
        ids = tuple(ids)
        with self._lock:
            if not ids or prefix.num_bytes > self.max_bytes or self.is_known(ids, owner):
                return
            self._kept = [
                each
                for each in self._kept
                if each.owner != owner or num_shared(each.ids, ids) < len(each.ids)
            ]
            self._kept.append(_Kept(owner, ids, prefix))
            while self.num_bytes > self.max_bytes:
                del self._kept[0]
        if self.store is not None:
            self.store.keep(ids, prefix, owner)


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common from the start."""
    first = tuple(first)
    second = tuple(second)
    low = 0
    high = min(len(first), len(second))
    while low < high:  # the first ``low`` agree, and some of the first ``high + 1`` do not
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
