"""Keys and values of ended texts, for requests that begin with the same tokens.

Keys and values of a text depend only on its tokens, so a request with the same first tokens can start from a
copy of them: the next turn of a conversation does not prefill its history again. :class:`PrefixCache` keeps
them when rows end, up to a limit of memory; the least recently used go first. It is never shared between
owners: the length of the cached prefix, and the time to answer, would tell others the text token by token.

Keys and values can be cut anywhere, and states of recurrent layers nowhere: they belong to one length of a
text. So of a base that keeps states some are kept from within its texts: after prompts, where a conversation
goes on whose template leaves out what the model thought, and in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from medusa.base.cache import TreeCache
from medusa.decoding.prefix_store import BLOCK, PrefixStore

MOST_STATES = 4
"""States that are kept from within one text, more of its end than of its beginning."""
LEAST_BETWEEN = 256
"""Tokens from one of them to the next in a prompt."""
STATES_SHARE = 2
"""Divisor: all of them take at most the memory of the prefixes divided by this."""


@dataclass(frozen=True, eq=False)
class _Kept:
    owner: Hashable
    ids: tuple[int, ...]
    prefix: TreeCache


class KnownPrefix(NamedTuple):
    """The beginning of a text that need not be read again."""

    source: TreeCache | None
    """A cache whose first row begins with it."""
    length: int
    states: TreeCache | None
    """The states after it, where those of ``source`` have read more."""


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
        self._states: list[_Kept] = []  # states alone, likewise

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return _num_bytes(self._kept) + _num_bytes(self._states)

    def longest(self, ids: Sequence[int], owner: Hashable = None) -> KnownPrefix:
        """The longest beginning of ``ids`` that an entry of this owner has; counts as a use."""
        ids = tuple(ids)
        with self._lock:
            known = [
                self.shared(each.prefix, each.ids, ids, owner)
                if each.owner == owner
                else KnownPrefix(None, 0, None)
                for each in self._kept
            ]
            best = max(range(len(known)), key=lambda place: known[place].length, default=None)
            if best is None or not known[best].length:
                return KnownPrefix(None, 0, None)
            self._kept.append(self._kept.pop(best))
            return known[best]

    def shared(
        self, source: TreeCache, text: Sequence[int], ids: Sequence[int], owner: Hashable = None
    ) -> KnownPrefix:
        """The beginning of ``ids`` that ``source``, which has read ``text``, need not read again."""
        length = num_shared(text, ids)
        if length == len(text) or not source.keeps_states:
            return KnownPrefix(source, length, None)
        with self._lock:
            within = self._states_within(tuple(ids[:length]), owner)
            if not within:
                return KnownPrefix(source, 0, None)
            used = within[-1]
            self._states.remove(used)
            self._states.append(used)
        return KnownPrefix(source, len(used.ids), used.prefix)

    def keep_states(
        self, ids: Sequence[int], cache: TreeCache, owner: Hashable = None, is_end: bool = False
    ) -> None:
        """Keep the states that the first row of ``cache`` is in, which has read ``ids``: within a prompt some
        tokens apart, and at its end (``is_end``)."""
        if not (self.max_bytes and cache.keeps_states):
            return
        ids = tuple(ids)
        with self._lock:
            within = self._states_within(ids, owner)
            is_far = not within or len(ids) - len(within[-1].ids) >= LEAST_BETWEEN
            if is_far or (is_end and within[-1].ids != ids):
                self._add_states(_Kept(owner, ids, cache.states_of_row(0)), within)

    def _states_within(self, ids: tuple[int, ...], owner: Hashable) -> list[_Kept]:
        """The states of beginnings of ``ids``, the shortest first."""
        within = [each for each in self._states if each.owner == owner and each.ids == ids[: len(each.ids)]]
        return sorted(within, key=lambda kept: len(kept.ids))

    def _add_states(self, states: _Kept, within: list[_Kept]) -> None:
        """Keep ``states``, behind those ``within`` its text."""
        of_text = [*within, states]
        self._states.append(states)
        while len(of_text) > MOST_STATES:
            ends = [0, *(len(each.ids) for each in of_text)]
            left = [ends[-1] - end + LEAST_BETWEEN for end in ends]
            # distances from the end grow by one factor: the one goes whose neighbours are nearest in it
            worth = [left[at - 1] / left[at + 1] for at in range(1, len(of_text))]
            self._states.remove(of_text.pop(worth.index(min(worth))))
        while _num_bytes(self._states) > self.max_bytes // STATES_SHARE:
            del self._states[0]

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
            continued = [
                each
                for each in self._kept
                if each.owner == owner and num_shared(each.ids, ids) == len(each.ids)
            ]
            for entry in continued:
                self._kept.remove(entry)
                self.keep_states(entry.ids, entry.prefix, owner, is_end=True)
            self._kept.append(_Kept(owner, ids, prefix))
            while self._kept and self.num_bytes > self.max_bytes:
                del self._kept[0]
        if self.store is not None:
            self.store.keep(ids, prefix, owner)


def _num_bytes(kept: Sequence[_Kept]) -> int:
    return sum(each.prefix.num_bytes for each in kept)


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
