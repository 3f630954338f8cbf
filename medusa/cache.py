"""The key-value cache that takes N tree tokens and keeps the accepted path.

It sits on ``transformers``' cache interface, so every architecture's own attention code fills and
reads it. Each row stores its committed tokens without padding: slot s holds position s. A forward
pass over a tree writes its N tokens to the N slots after the row's last committed one;
:meth:`TreeCache.commit` then moves the accepted path to the front of those and forgets the rest.
Keys are stored after their rotary embedding, so an entry that moves needs no correction.

Buffers grow in steps as tokens come, never to the model's maximum context.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH_STEP = 256
"""Slots that are added at a time."""


class TreeCache(Cache):
    """Committed tokens of B rows of different lengths; the only place where cache contents change.

    Per forward pass: :meth:`begin`, the model's forward, then :meth:`commit`.
    """

    def __init__(self, num_rows: int, num_layers: int, device: torch.device | str):
        self.tree_layers = [TreeCacheLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.tree_layers))
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        """(B,) long: committed tokens of each row."""
        self.longest = 0
        """The largest of ``lengths``, known on the host."""
        self.slots = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
        """(B, N) long: where the tokens of the pass under way go."""
        self._shared_start: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(layer.entries.nbytes for layer in self.tree_layers if layer.is_initialized)

    @property
    def num_slots(self) -> int:
        """How many slots of each row the pass under way reads."""
        return self.longest + self.slots.shape[1]

    def begin(self, num_nodes: int) -> None:
        """Announce a pass over ``num_nodes`` tokens per row."""
        nodes = torch.arange(num_nodes, device=self.lengths.device)
        self.slots = self.lengths[:, None] + nodes
        same_length = self.num_rows == 1 or bool((self.lengths == self.longest).all())
        self._shared_start = self.longest if same_length else None

    def commit(self, path: Tensor, num_kept: Tensor) -> None:
        """Keep the first ``num_kept`` (B,) long nodes of ``path`` (B, L) long; forget the pass's other nodes.

        All L entries are moved, whatever ``num_kept`` says: the surplus lies past the row's end, where
        the next pass overwrites it.
        """
        in_order = torch.arange(path.shape[1], device=path.device)
        if not bool((path == in_order).all()):
            source, target = self.lengths[:, None] + path, self.lengths[:, None] + in_order
            for layer in self.tree_layers:
                layer.move(source, target)
        self.lengths = self.lengths + num_kept
        self.longest = int(self.lengths.max())

    def commit_prefix(self, num_kept: Tensor) -> None:
        """Keep the first ``num_kept`` (B,) long tokens of the pass, as a prompt is kept."""
        self.lengths = self.lengths + num_kept
        self.longest = int(self.lengths.max())

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but ``rows`` (B',) long, in that order."""
        self.lengths = self.lengths[rows]
        self.longest = int(self.lengths.max()) if len(rows) else 0
        for layer in self.tree_layers:
            if layer.is_initialized:
                layer.entries = layer.entries[:, rows.to(layer.entries.device)]

    def replace_row(self, row: int, source: TreeCache) -> None:
        """Put the single row of ``source`` in the place of ``row``."""
        length = source.longest
        for layer, theirs in zip(self.tree_layers, source.tree_layers, strict=True):
            layer.reserve(length)
            layer.entries[:, row, :, :length] = theirs.entries[:, 0, :, :length]
        self.lengths[row] = length
        self.longest = int(self.lengths.max())


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one attention layer, in one buffer (2, B, heads, capacity, head dimension)."""

    is_sliding = False

    def __init__(self, cache: TreeCache):
        super().__init__()
        self.cache = cache
        self.entries: Tensor = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape != value_states.shape:
            raise ValueError(
                f"keys and values must have one shape, got {tuple(key_states.shape)} and "
                f"{tuple(value_states.shape)}: this attention layout is not supported"
            )
        batch, heads, _, width = key_states.shape
        self.entries = key_states.new_zeros(2, batch, heads, 0, width)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values (B, heads, N, width); return all that the pass may read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_slots = self.cache.num_slots
        self.reserve(num_slots)
        start = self.cache._shared_start
        if start is not None:
            self.entries[0, :, :, start:num_slots] = key_states
            self.entries[1, :, :, start:num_slots] = value_states
        else:
            slots = _along_entries(self.cache.slots, self.entries[0])
            self.entries[0].scatter_(2, slots, key_states)
            self.entries[1].scatter_(2, slots, value_states)
        return self.entries[0, :, :, :num_slots], self.entries[1, :, :, :num_slots]

    def reserve(self, num_slots: int) -> None:
        """Make room for ``num_slots`` slots, keeping what is stored."""
        capacity = self.entries.shape[3]
        if num_slots > capacity:
            missing = -(-(num_slots - capacity) // GROWTH_STEP) * GROWTH_STEP
            two, batch, heads, _, width = self.entries.shape
            room = self.entries.new_zeros(two, batch, heads, missing, width)
            self.entries = torch.cat([self.entries, room], dim=3)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` (B, L) long to ``target`` (B, L) long of each row."""
        if self.is_initialized:
            taken = self.entries.gather(3, _along_entries(source, self.entries))
            self.entries.scatter_(3, _along_entries(target, self.entries), taken)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return -1


def _along_entries(slots: Tensor, entries: Tensor) -> Tensor:
    """Slots (B, L) expanded to index the slot dimension of ``entries`` (..., B, heads, capacity, width)."""
    *leading, heads, _, width = entries.shape
    slots = slots.to(entries.device)[:, None, :, None]
    return slots.expand(*leading, heads, slots.shape[2], width)
