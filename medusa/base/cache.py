"""The key-value cache that takes N tree tokens and keeps the accepted path.

It implements ``transformers``' cache interface, so every architecture's own attention code fills and reads
it. Each row stores its committed tokens without padding: slot s holds position s. A forward pass over a tree
writes its N tokens to the N slots after the row's last committed one; :meth:`TreeCache.commit` then moves the
accepted path to the front of those and drops the rest. Keys are stored after their rotary embedding, for the
position of their token, so an entry may move to another slot as it is.

Some drafters (EAGLE-3, multi-token prediction) read the base's hidden states of the whole text, its
*features*. They are stored beside the keys and values, and move, grow and are copied with them
(:meth:`TreeCache.keep_features`).

Arguments called ``known`` repeat a tensor's numbers as Python ints, where the caller has them: reading the
tensor would wait for the GPU.

Buffers grow in steps as tokens come, never to the model's maximum context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH_STEP = 256
"""Buffers grow by multiples of this number of slots."""
READ_STEP = {"cuda": 64}
"""The number of slots that a pass reads is rounded up to a multiple of this, by type of device: a GPU chooses
its attention kernel by length, and is fastest on whole blocks. It divides :data:`GROWTH_STEP`."""


@dataclass
class PassSlots:
    """The slots of the current forward pass; one object, shared by a cache and its layers.

    If layers had a reference to their cache instead, this cycle would keep its memory until the next full
    garbage collection.
    """

    slots: Tensor
    """(B, N) long: where the tokens of the pass go."""
    num_slots: int = 0
    """How many slots of each row the pass reads."""
    shared_start: int | None = None
    """The first of ``slots``, if it is the same in every row, else None."""
    longest: int = 0
    """Committed tokens of the longest row."""
    expected: int = 0
    """Slots of a row that will be needed soon; a buffer that grows gets room for this number."""


class TreeCache(Cache):
    """Committed tokens of B rows of different lengths; one object for all layers changes what they hold.

    Per forward pass: :meth:`plan_pass`, the model's forward, then :meth:`commit`.
    """

    def __init__(self, num_rows: int, num_layers: int, device: torch.device | str):
        self.under_way = PassSlots(torch.zeros(num_rows, 0, dtype=torch.long, device=device))
        self.tree_layers = [TreeCacheLayer(self.under_way) for _ in range(num_layers)]
        super().__init__(layers=list(self.tree_layers))
        self._features = TreeCacheLayer(self.under_way)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        """(B,) long: committed tokens of each row."""
        self.num_positions: int | None = None
        """Position ids are clamped below this value; None: the model's context."""
        self._known = self.lengths, [0] * num_rows

    @property
    def known_lengths(self) -> list[int]:
        """``lengths`` on the host; waits for the device only if a caller has set ``lengths``."""
        if self._known[0] is not self.lengths:
            self._known = self.lengths, self.lengths.tolist()
        return self._known[1]

    def set_lengths(self, lengths: Tensor, known: list[int]) -> None:
        """Set the committed tokens of each row, (B,) long, which the host knows too."""
        self.lengths = lengths
        self._known = lengths, known
        self.longest = max(known, default=0)

    @property
    def longest(self) -> int:
        """The largest of ``lengths``, known on the host."""
        return self.under_way.longest

    @longest.setter
    def longest(self, longest: int) -> None:
        self.under_way.longest = longest

    @property
    def slots(self) -> Tensor:
        """(B, N) long: where the tokens of the current pass go."""
        return self.under_way.slots

    @property
    def num_slots(self) -> int:
        """How many slots of each row the current pass reads."""
        return self.under_way.num_slots

    @property
    def parts(self) -> list[list[Any]]:
        """What each layer of the base keeps: keys and values, and states."""
        return [[layer] for layer in self.tree_layers]

    def program_inputs(self, window_sizes: Sequence[int]) -> list[Tensor]:
        """The tensors of the current pass that compiled layers read: its slots, and where a base keeps states
        the parents of its nodes, (B, N) long, and what each node reads of convolutions with windows of these
        sizes, (B, N, size) long."""
        return [self.slots]

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def _kept_layers(self) -> list[TreeCacheLayer]:
        """The layers, and the features as one more layer."""
        return [*self.tree_layers, self._features]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers of keys, values and features, unused slots and rows included."""
        return sum(buffer.nbytes for layer in self._kept_layers for buffer in layer.buffers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys, values and features of one token of one row."""
        return sum(
            entries.shape[1] * entries.shape[3] * entries.element_size()
            for layer in self._kept_layers
            for entries in layer.entries
        )

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row beside those of its tokens: of states, where the base keeps any."""
        return 0

    def expect(self, num_slots: int) -> None:
        """Have the next growth of a buffer make room for ``num_slots`` tokens of a row at once, for a long
        prompt."""
        self.under_way.expected = num_slots

    @property
    def features(self) -> Tensor | None:
        """(B, S, D): the hidden states of all committed tokens, if :meth:`keep_features` stored them."""
        entries = self._features.entries
        return entries[0][:, 0, : self.longest] if entries else None

    def keep_features(self, states: Tensor, lengths: Tensor, longest: int) -> None:
        """Store hidden states ``states`` (B, N, D), in each row from slot ``lengths`` (B,) long on, at most
        ``longest``. They belong to the current pass, or to committed tokens."""
        layer = self._features
        states = states[:, None]  # as keys of one head
        if not layer.is_initialized:
            layer.lazy_initialization(states, states[..., :0])
        layer.reserve(longest + states.shape[2])
        slots = lengths[:, None] + torch.arange(states.shape[2], device=lengths.device)
        layer.entries[0].scatter_(2, _along_entries(slots, states), states)

    @property
    def capacity(self) -> int:
        """Slots of each row that are allocated."""
        return max((layer.capacity for layer in self.tree_layers), default=0)

    def plan_pass(self, num_nodes: int, first_node: int = 0) -> None:
        """Set the slots of a pass over ``num_nodes`` tokens per row, the nodes of a tree from ``first_node``
        on.

        Nodes before ``first_node`` must have been run since the last commit.
        """
        nodes = torch.arange(first_node, first_node + num_nodes, device=self.lengths.device)
        self.under_way.slots = self.lengths[:, None] + nodes
        multiple = READ_STEP.get(self.lengths.device.type, 1)
        self.under_way.num_slots = -(-(self.longest + first_node + num_nodes) // multiple) * multiple
        same_length = self.num_rows == 1 or all(length == self.longest for length in self.known_lengths)
        self.under_way.shared_start = self.longest + first_node if same_length else None

    def commit(
        self, path: Tensor, num_kept: Tensor, is_chain: bool = False, known: list[list[int]] | None = None
    ) -> None:
        """Keep the first ``num_kept`` (B,) long nodes of ``path`` (B, L) long; drop the pass's other nodes.
        ``known`` are the kept nodes of each row.

        If any kept node must move, all L entries are moved, whatever ``num_kept`` is: the surplus is past the
        row's end, where the next pass overwrites it. ``is_chain`` says that the pass was a chain
        (:attr:`medusa.trees.candidate_tree.TreeTopology.is_chain`), in which nothing has to move.
        """
        if known is None:
            rows = zip(path.tolist(), num_kept.tolist(), strict=True)
            known = [row[:count] for row, count in rows]
        if not is_chain and any(row != list(range(len(row))) for row in known):
            self._move(path)
        self.commit_prefix(num_kept, [*map(len, known)], path)

    def _move(self, path: Tensor) -> None:
        """Put the nodes of ``path`` (B, L) long in order, after each row's last committed token."""
        path = path[:, : self.slots.shape[1]]  # L comes from a bound on the depth, which may exceed the nodes
        in_order = torch.arange(path.shape[1], device=path.device)
        self._move_entries(self.lengths[:, None] + path, self.lengths[:, None] + in_order)

    def _move_entries(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` (B, L) long to ``target`` (B, L) long in every layer."""
        for layer in self._kept_layers:
            layer.move(source, target)

    def commit_prefix(
        self, num_kept: Tensor, known: list[int] | None = None, path: Tensor | None = None
    ) -> None:
        """Keep the first ``num_kept`` (B,) long tokens of the pass, as for a prompt; ``known`` are the same
        numbers. With a ``path`` (B, L) long, keep its nodes, whose keys and values are in order already."""
        known = num_kept.tolist() if known is None else known
        lengths = [length + count for length, count in zip(self.known_lengths, known, strict=True)]
        self.set_lengths(self.lengths + num_kept, lengths)

    def uncommit_last(self) -> None:
        """Take each row's last committed token back: it is to be node 0 of the next tree."""
        self.set_lengths(self.lengths - 1, [length - 1 for length in self.known_lengths])

    def keep_rows(self, rows: Tensor, known: list[int] | None = None) -> None:
        """Drop all rows but ``rows`` (B',) long, in that order; ``known`` are the same numbers."""
        sources = rows.tolist() if known is None else known
        # If so, moving row after row overwrites no row that is still to be moved.
        in_place = all(source >= row for row, source in enumerate(sources))
        for layer in self._kept_layers:
            if in_place:
                layer.move_rows(sources, self.longest)
            else:
                layer.set_buffers([entries[rows.to(entries.device)] for entries in layer.entries])
        lengths = self.known_lengths
        self.set_lengths(self.lengths[rows], [lengths[source] for source in sources])

    def join(self, other: TreeCache, most_rows: int = 0) -> None:
        """Append the rows of ``other``, a cache of the same base.

        Buffers that must grow get room for twice the number of rows, but not for more than ``most_rows``
        unless that many join.
        """
        longest = max(self.longest, other.longest)
        for layer, other_layer in zip(self._kept_layers, other._kept_layers, strict=True):
            layer.join(other_layer, other.longest, longest, most_rows)
        known = self.known_lengths + other.known_lengths
        self.set_lengths(torch.cat([self.lengths, other.lengths]), known)

    keeps_states = False
    """Whether layers keep states, which belong to one length of a text."""
    is_prompt_next = False
    """Whether each row commits the next pass, over a chain, whole: a state then keeps none of its nodes."""

    def states_of_row(self, row: int) -> TreeCache:
        """A new cache of one row, with the states of ``row`` and no keys and values."""
        raise NotImplementedError("layers keep no state")

    def copy_of_row(self, row: int, length: int, states: TreeCache | None = None) -> TreeCache:
        """A new cache of one row, with the first ``length`` committed tokens of ``row``. ``states`` are those
        after them (:meth:`states_of_row`), where the row's own have read more."""
        copied = self._empty_row()
        copied.num_positions = self.num_positions
        copied.set_lengths(copied.lengths + length, [length])
        for layer, source in zip(copied._kept_layers, self._kept_layers, strict=True):
            if source.is_initialized:
                layer.is_initialized = True
                layer.set_buffers([entries[row : row + 1, :, :length].clone() for entries in source.entries])
        return copied

    def row_tensors(self, block: slice) -> dict[str, Tensor]:
        """Copies of the keys, values and features of the first row in the slots ``block``, (1, heads, slots,
        width) each, by layer and place."""
        return {
            f"{index}.{place}": entries[:1, :, block].clone(memory_format=torch.contiguous_format)
            for index, layer in enumerate(self._kept_layers)
            for place, entries in enumerate(layer.entries)
        }

    def load_row(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill this empty cache of one row with what :meth:`row_tensors` gave for all of its slots."""
        for index, layer in enumerate(self._kept_layers):
            names = [f"{index}.{place}" for place in (0, 1)]
            if names[0] in tensors:
                layer.is_initialized = True
                layer.set_buffers([tensors[name].to(self.lengths.device) for name in names])
        length = self.capacity
        self.set_lengths(self.lengths + length, [length])

    def _empty_row(self) -> TreeCache:
        """A new, empty cache of this kind for one row."""
        return TreeCache(1, len(self.tree_layers), self.lengths.device)

    def clear_uncommitted(self) -> None:
        """Set all slots without a committed token to zero. Attention multiplies masked slots by 0, which
        gives NaN for entries that are not finite."""
        for layer in self._kept_layers:
            for entries, buffer in zip(layer.entries, layer.buffers, strict=True):
                slots = torch.arange(entries.shape[2], device=entries.device)
                is_free = slots >= self.lengths.to(entries.device)[:, None]  # (B, S)
                entries.masked_fill_(is_free[:, None, :, None], 0)
                buffer[len(entries) :] = 0

    def trim(self) -> None:
        """Free the slots that no committed token needs, and the room for further rows."""
        for layer in self._kept_layers:
            layer.set_buffers([entries[:, :, : self.longest].clone() for entries in layer.entries])


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one attention layer. Methods without a docstring are ``transformers``' interface."""

    is_sliding = False

    def __init__(self, under_way: PassSlots):
        super().__init__()
        self.under_way = under_way
        self.buffers: list[Tensor] = []
        """Keys and values, (B or more, heads, capacity, width) each, where width is the head dimension; empty
        before the first pass."""
        self.entries: list[Tensor] = []
        """Their first B rows, which are in use; views of ``buffers``."""

    @property
    def capacity(self) -> int:
        """Slots of each row that are allocated."""
        return self.entries[0].shape[2] if self.entries else 0

    def set_buffers(self, buffers: list[Tensor], num_rows: int | None = None) -> None:
        """Store keys and values in ``buffers``, with ``num_rows`` rows in use; all by default."""
        self.buffers = buffers
        self.entries = [buffer[:num_rows] if num_rows is not None else buffer for buffer in buffers]

    def move_to(self, buffers: list[Tensor], num_slots: int) -> None:
        """Copy the first ``num_slots`` slots of all rows to ``buffers``, which have room for them, and go on
        there."""
        num_rows = len(self.entries[0])
        for buffer, entries in zip(buffers, self.entries, strict=True):
            buffer[:num_rows, :, :num_slots] = entries[:, :, :num_slots]
        self.set_buffers(buffers, num_rows)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.set_buffers([states[:, :, :0].contiguous() for states in (key_states, value_states)])
        self.is_initialized = True

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heads and width of keys, and of values; none before the first pass."""
        return [(entries.shape[1], entries.shape[3]) for entries in self.entries]

    def fill(self, sizes: Sequence[tuple[int, int]], like: Tensor) -> None:
        """Make room for the current pass of the rows of ``like`` (B, N, D), in entries of these
        :attr:`sizes`."""
        if not self.is_initialized:
            self.lazy_initialization(*(like.new_empty(len(like), heads, 0, width) for heads, width in sizes))
        self.reserve(self.under_way.num_slots)

    def program_inputs(self) -> list[Tensor]:
        """The tensors that a compiled pass takes, and writes to."""
        return self.entries

    def results(self) -> list[Tensor]:
        """The tensors that a pass makes beside: none."""
        return []

    def take_results(self, tensors: Sequence[Tensor]) -> None:
        """Take over the :meth:`results` of a compiled pass."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values (B, heads, N, width); return those that the pass reads, its own
        included, (B, heads, num_slots, width) each."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_slots = self.under_way.num_slots
        self.reserve(num_slots)
        start = self.under_way.shared_start
        for entries, states in zip(self.entries, (key_states, value_states), strict=True):
            if start is not None:
                entries[:, :, start : start + states.shape[2]] = states
            else:
                entries.scatter_(2, _along_entries(self.under_way.slots, entries), states)
        keys, values = self.entries
        return keys[:, :, :num_slots], values[:, :, :num_slots]

    def reserve(self, num_slots: int) -> None:
        """Make room for ``num_slots`` slots; the stored entries are kept. A buffer that grows loses its room
        for further rows."""
        if self.entries and num_slots > self.capacity:
            new_capacity = _rounded_up(max(num_slots, self.under_way.expected))
            used = min(self.capacity, max(self.under_way.num_slots, self.under_way.longest))
            buffers = []
            for entries in self.entries:
                rows, heads, _, width = entries.shape
                buffer = new_zeros(entries, (rows, heads, new_capacity, width))
                buffer[:, :, :used] = entries[:, :, :used]
                buffers.append(buffer)
            self.set_buffers(buffers)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` (B, L) long to ``target`` (B, L) long of each row."""
        for entries in self.entries:
            if len(entries) == 1:  # takes half the time of gather and scatter
                moved = entries.index_select(2, source[0].to(entries.device))
                entries.index_copy_(2, target[0].to(entries.device), moved)
            else:
                moved = entries.gather(2, _along_entries(source, entries))
                entries.scatter_(2, _along_entries(target, entries), moved)

    def move_rows(self, sources: list[int], num_slots: int) -> None:
        """Copy the first ``num_slots`` slots of row ``sources[r]`` to row r, for each r in turn; drop all
        further rows."""
        for row, source in enumerate(sources):
            if source != row:
                for buffer in self.buffers:
                    buffer[row, :, :num_slots] = buffer[source, :, :num_slots]
        self.set_buffers(self.buffers, len(sources))

    def join(self, other: TreeCacheLayer, other_slots: int, num_slots: int, most_rows: int) -> None:
        """Append the rows of ``other``, ``other_slots`` slots each, with room for ``num_slots`` slots."""
        if not other.is_initialized:
            return
        self.reserve(num_slots)
        num_rows = len(self.entries[0])
        num_joined = num_rows + len(other.entries[0])
        if len(self.buffers[0]) < num_joined:
            room = max(min(most_rows, 2 * num_rows), num_joined)
            self.buffers = [_with_rows(entries, room) for entries in self.entries]
        for buffer, entries in zip(self.buffers, other.entries, strict=True):
            buffer[num_rows:num_joined, :, :other_slots] = entries[:, :, :other_slots]
        self.set_buffers(self.buffers, num_joined)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.under_way.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.under_way.longest

    def get_max_length(self) -> int:
        return -1


def _along_entries(slots: Tensor, entries: Tensor) -> Tensor:
    """Slots (B, L) expanded to index the slot dimension of ``entries`` (B, heads, capacity, width)."""
    _, heads, _, width = entries.shape
    return slots.to(entries.device)[:, None, :, None].expand(-1, heads, -1, width)


def _with_rows(entries: Tensor, num_rows: int) -> Tensor:
    """A buffer of ``num_rows`` rows that begins with ``entries`` (B, heads, capacity, width)."""
    buffer = new_zeros(entries, (num_rows, *entries.shape[1:]))
    buffer[: len(entries)] = entries
    return buffer


def _rounded_up(num_slots: int) -> int:
    return -(-num_slots // GROWTH_STEP) * GROWTH_STEP


def new_zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of ``shape``, with the dtype and device of ``like``. On a CPU they take physical memory only once
    they are written to."""
    if like.device.type != "cpu" or not shape[-1]:
        return like.new_zeros(shape)
    # numpy allocates zeros with calloc, which does not touch the memory.
    bits = np.zeros((*shape[:-1], shape[-1] * like.element_size()), dtype=np.uint8)
    return torch.from_numpy(bits).view(like.dtype)
