"""What a causal layer has read of each row's text, kept between steps by the drafters whose heads have one.

Entry t joins the base's state at position t with token t + 1, so the newest joins the newest state with the
root. A draft reads the entries that its rows lack: of a prompt all of them, later those of the tokens that
the last step accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa.base.attention import node_positions, tree_attention_masks
from medusa.base.cache import TreeCache
from medusa.drafters.protocol import DraftContext
from medusa.trees.candidate_tree import TreeTopology

FULL_ATTENTION: dict[str, int | None] = {"full_attention": None}
MOST_ENTRIES = 512
"""Entries of each row that are read at once: what a long prompt may take of memory."""

RunLayer = Callable[[Tensor, Tensor, Tensor, Tensor], Sequence[Tensor]]
"""(states (B, E, (1 + L) * D), the token after each (B, E) long, mask (B, 1, E, S) bool, positions (B, E)
long) -> what the layer gives at these entries, one or more of (B, E, X). It runs over
:attr:`LayerCache.cache`."""


class LayerCache:
    """The entries of one layer on ``device``, or of ``num_layers`` that are run together."""

    def __init__(self, device: torch.device | str, num_layers: int = 1):
        self._device, self._num_layers = device, num_layers
        self.begin(0)

    def begin(self, num_rows: int, after: LayerCache | None = None) -> None:
        """``num_rows`` rows follow: those that ``after`` has read, and behind them others, which are read one
        by one. Without ``after`` all are new, and are read together."""
        self.cache = TreeCache(num_rows, self._num_layers, self._device)
        if after is not None and after.cache.longest:
            self.cache = after.cache

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but ``rows`` (B',) long, in that order."""
        is_read = rows < self.cache.num_rows
        num_read = int(is_read.sum())
        if bool(is_read[:num_read].all()):
            self.cache.keep_rows(rows[:num_read])
        else:  # a row that nothing was read of has moved between the others
            self.begin(0)

    def read(self, context: DraftContext, run: RunLayer) -> list[Tensor]:
        """What ``run`` gives at each row's newest entry, (B, 1, D) each; it is run on the entries that are
        missing.

        The newest entry is read again by the next draft: it is node 0 of whatever is run below the root, and
        a draft from the same text is the same draft.
        """
        known = self.cache
        for row in range(known.num_rows, len(context.lengths)):
            self.cache = TreeCache(1, self._num_layers, self._device)
            self._read(_of_row(context, row), run)
            if known.num_rows:
                known.join(self.cache)
            else:
                known = self.cache
        self.cache = known
        return self._read(context, run)

    def _read(self, context: DraftContext, run: RunLayer) -> list[Tensor]:
        assert context.features is not None, "a drafter with LayerCache needs_features"
        missing = context.lengths - 1 - self.cache.lengths
        newest: list[Tensor] = []
        while (longest := int(missing.max())) > 0:
            width = min(longest, MOST_ENTRIES)
            columns = self.cache.lengths[:, None] + torch.arange(width, device=missing.device)
            columns = columns.clamp(max=context.features.shape[1] - 1)
            states = context.features.gather(1, columns[..., None].expand(-1, -1, context.features.shape[2]))
            following = context.tokens.gather(1, (columns + 1).clamp(max=context.tokens.shape[1] - 1))
            chain = TreeTopology.chain(width, columns.device)
            given = run(states, following, *self.announce(chain, slice(0, width)))
            num_new = missing.clamp(max=width)
            last = (num_new - 1).clamp(min=0)[:, None, None]
            found = [each.gather(1, last.expand(-1, -1, each.shape[2])) for each in given]
            if newest:
                has_new = (num_new > 0)[:, None, None]
                found = [torch.where(has_new, *both) for both in zip(found, newest, strict=True)]
            newest = found
            self.cache.commit_prefix(num_new)
            missing = missing - num_new
        self.cache.uncommit_last()
        return newest

    def announce(self, topology: TreeTopology, nodes: slice) -> tuple[Tensor, Tensor]:
        """Mask and positions for running ``nodes`` of a tree whose node 0 is each row's next entry."""
        self.cache.begin(nodes.stop - nodes.start, nodes.start)
        lengths, num_slots = self.cache.lengths, self.cache.num_slots
        mask = tree_attention_masks(lengths, num_slots, topology, FULL_ATTENTION, nodes=nodes)
        assert isinstance(mask, Tensor)  # one layer type, one mask
        return mask, node_positions(lengths, topology, nodes=nodes)


def _of_row(context: DraftContext, row: int) -> DraftContext:
    """The text of one row."""
    assert context.features is not None, "a drafter with LayerCache needs_features"
    tokens, lengths, features = (
        each[row : row + 1] for each in (context.tokens, context.lengths, context.features)
    )
    return replace(context, tokens=tokens, lengths=lengths, features=features)
