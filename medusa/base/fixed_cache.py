"""The cache of static steps, and the memory that it lives in, which keeps its place."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from medusa.base.cache import TreeCache, new_zeros


class FixedTreeCache(TreeCache):
    """A cache for static steps: every pass reads all of its slots, so no shape depends on the rows' lengths.

    Its memory is that of a :class:`CacheMemory`, and keeps its address. A pass and its commit read no tensor
    on the host, so they may be compiled or captured in a CUDA graph.

    If all layers have the same shape, their keys and values are parts of a few tensors, so that moving an
    accepted path takes two operators for each, in place of four per layer.

    Args:
        buffers: keys and values of each layer, whose first B rows this is; none for a layer without.
        joints: the tensors of a few layers that they are parts of, (2 * layers, B or more, heads, S, width)
            each; none where layers differ.
        lengths: (B,) long: committed tokens of each row; changed in place.
    """

    def __init__(self, buffers: Sequence[list[Tensor]], joints: Sequence[Tensor], lengths: Tensor):
        num_rows = len(lengths)
        super().__init__(num_rows, len(buffers), lengths.device)
        self.lengths = lengths
        self._joints = [joint[:, :num_rows] for joint in joints]
        for layer, of_layer in zip(self.tree_layers, buffers, strict=True):
            if of_layer:
                layer.is_initialized = True
                layer.set_buffers(of_layer, num_rows)

    def use_slots(self, num_slots: int) -> None:
        """Have every pass read ``num_slots`` slots of each row."""
        self.under_way.num_slots = num_slots

    @property
    def known_lengths(self) -> list[int]:
        """Waits for the device each time: passes change ``lengths`` in place."""
        return self.lengths.tolist()

    def _move_entries(self, source: Tensor, target: Tensor) -> None:
        if not self._joints:
            super()._move_entries(source, target)
        for joint in self._joints:
            if len(source) == 1:
                joint.index_copy_(3, target[0], joint.index_select(3, source[0]))
                continue
            parts, _, heads, _, width = joint.shape
            of_parts = source[None, :, None, :, None].expand(parts, -1, heads, -1, width)
            into_parts = target[None, :, None, :, None].expand(parts, -1, heads, -1, width)
            joint.scatter_(3, into_parts, joint.gather(3, of_parts))

    def plan_pass(self, num_nodes: int, first_node: int = 0) -> None:
        slots = self.lengths[:, None]
        if num_nodes > 1 or first_node:
            slots = slots + torch.arange(first_node, first_node + num_nodes, device=slots.device)
        self.under_way.slots = slots

    def commit(
        self, path: Tensor, num_kept: Tensor, is_chain: bool = False, known: list[list[int]] | None = None
    ) -> None:
        """As :meth:`TreeCache.commit`, of a pass over all nodes, but ``known`` is not read: unless the pass
        was a chain, all L entries move."""
        if not is_chain:
            path = path[:, : self.slots.shape[1]]  # L comes from a bound, as in `_move`
            self._move_entries(self.lengths[:, None] + path, self.slots[:, : path.shape[1]])
        self.lengths.add_(num_kept)


LAYERS_TOGETHER = 16
"""Layers whose keys and values are one tensor in a :class:`CacheMemory`: while it grows, so many exist
twice."""


class CacheMemory:
    """Memory for a cache whose rows come and go, that keeps its place: R rows of S slots.

    A cache that lives in it (:meth:`hold`) goes on as any other: rows join and leave, and general passes run.
    :meth:`first` gives passes of fixed shape over its first rows, with room for rows that are not there.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        """R."""
        self.num_slots = 0
        """S."""
        self._buffers: list[list[Tensor]] = []  # keys and values of each layer; none for a layer without
        self._joints: list[Tensor] = []  # of a few layers each, where all have the same shape

    @property
    def tensors(self) -> list[Tensor]:
        """The keys and values of all layers."""
        return [buffer for of_layer in self._buffers for buffer in of_layer]

    def holds(self, cache: TreeCache) -> bool:
        """Whether the rows of ``cache`` are here."""
        theirs = [buffer for layer in cache.tree_layers for buffer in layer.buffers]
        ours = self.tensors
        return len(ours) == len(theirs) > 0 and all(map(operator.is_, ours, theirs))

    def hold(self, cache: TreeCache, num_rows: int, num_slots: int, most: int) -> None:
        """Have the rows of ``cache`` live here, with room for ``num_rows`` rows of ``num_slots`` slots.

        Memory that was larger stays so where that takes no more than ``most`` slots in all. Slots without a
        committed token hold zeros, or what finite passes have left.
        """
        is_enough = num_rows <= self.num_rows and num_slots <= self.num_slots
        if not is_enough or num_rows * self.num_slots > most:
            rows = max(num_rows, self.num_rows)
            slots = max(num_slots, self.num_slots)
            if rows * slots > most:
                rows = num_rows
                slots = num_slots
            if (rows, slots) != (self.num_rows, self.num_slots):
                self.release()
                self._make(cache, rows, slots)
                return
        if not self.holds(cache):
            self._fill(cache)

    def release(self) -> None:
        """Let go of all memory; a cache that lives in it keeps what it needs."""
        self._buffers = []
        self._joints = []
        self.num_rows = 0
        self.num_slots = 0

    def first(self, lengths: Tensor) -> FixedTreeCache:
        """Passes of fixed shape over the first B rows, which have ``lengths`` (B,) long committed tokens."""
        return FixedTreeCache(self._buffers, self._joints, lengths)

    def _fill(self, cache: TreeCache) -> None:
        """Move the rows of ``cache`` into what is there, in place of others."""
        for layer, buffers in zip(cache.tree_layers, self._buffers, strict=True):
            if layer.buffers and layer.buffers[0] is not buffers[0]:
                for buffer in buffers:
                    buffer.zero_()
                layer.move_to(buffers, cache.longest)

    def _make(self, cache: TreeCache, num_rows: int, num_slots: int) -> None:
        """Make the memory, a few layers at a time, and move the rows of ``cache`` there."""
        filled = [layer for layer in cache.tree_layers if layer.entries]
        kinds = {
            (entries.shape[1], entries.shape[3], entries.dtype, entries.device)
            for layer in filled
            for entries in layer.entries
        }
        for start in range(0, len(filled), LAYERS_TOGETHER):
            layers = filled[start : start + LAYERS_TOGETHER]
            every = [entries for layer in layers for entries in layer.entries]
            shapes = [(num_rows, entries.shape[1], num_slots, entries.shape[3]) for entries in every]
            parts: Iterator[Tensor]
            if len(kinds) == 1:
                self._joints.append(new_zeros(every[0], (len(every), *shapes[0])))
                parts = iter(self._joints[-1])
            else:
                parts = (new_zeros(entries, shape) for entries, shape in zip(every, shapes, strict=True))
            for layer in layers:
                layer.move_to([next(parts), next(parts)], cache.longest)
        self._buffers = [layer.buffers for layer in cache.tree_layers]
        self.num_rows = num_rows
        self.num_slots = num_slots
