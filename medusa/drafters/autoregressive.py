"""Autoregressive heads as drafters: their layers run down the tree on their own features.

:class:`LayerCache` is the key-value cache of a causal layer over each row's text, kept between steps. Entry t
joins the base's state at position t with token t + 1, so the newest joins the newest state with the root. A
draft adds the missing entries: all of them for a prompt, later one for each token that the last step
accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa.base.attention import node_positions, tree_attention_masks
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import CausalLM, lm_head, lm_head_device, vocab_size
from medusa.base.passes import tokens_missing
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.protocol import DraftContext, Drafter
from medusa.heads.autoregressive_head import AutoregressiveHead, Drafted
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

FULL_ATTENTION: dict[str, int | None] = {"full_attention": None}
MOST_ENTRIES = 512
"""Entries of each row that are computed at once, which bounds the memory for a long prompt."""

RunLayer = Callable[[Tensor, Tensor, Tensor, Tensor], Sequence[Tensor]]
"""(states (B, E, (1 + L) * D), the token after each (B, E) long, mask (B, 1, E, S) bool, positions (B, E)
long) -> the layer's outputs at these entries, one or more tensors (B, E, X). It runs over
:attr:`LayerCache.cache`."""


class LayerCache:
    """The cached entries of one layer on ``device``, or of ``num_layers`` layers that run together."""

    def __init__(self, device: torch.device | str, num_layers: int = 1):
        self._device = device
        self._num_layers = num_layers
        self.reset(0)

    def reset(self, num_rows: int, after: LayerCache | None = None) -> None:
        """Start with ``num_rows`` rows: first the cached rows of ``after``, then new ones, which are read one
        by one. Without ``after`` all rows are new, and are read together."""
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
            self.reset(0)

    def read(self, context: DraftContext, run: RunLayer) -> list[Tensor]:
        """The outputs of ``run`` at each row's newest entry, (B, 1, D) each; it runs on the missing entries.

        The newest entry is read again by the next draft: it is node 0 of whatever is run below the root, and
        a draft from the same text is the same draft.
        """
        all_rows = self.cache
        for row in range(all_rows.num_rows, len(context.lengths)):
            self.cache = TreeCache(1, self._num_layers, self._device)
            self._read(_of_row(context, row), run)
            if all_rows.num_rows:
                all_rows.join(self.cache)
            else:
                all_rows = self.cache
        self.cache = all_rows
        return self._read(context, run)

    def _read(self, context: DraftContext, run: RunLayer) -> list[Tensor]:
        assert context.features is not None, "a drafter with LayerCache reads_features"
        missing = context.lengths - 1 - self.cache.lengths
        newest: list[Tensor] = []
        num_entries = [length - 1 for length in context.lengths.tolist()]
        while left := tokens_missing(num_entries, self.cache):
            width = min(max(left), MOST_ENTRIES)
            columns = self.cache.lengths[:, None] + torch.arange(width, device=missing.device)
            columns = columns.clamp(max=context.features.shape[1] - 1)
            states = context.features.gather(1, columns[..., None].expand(-1, -1, context.features.shape[2]))
            following = context.tokens.gather(1, (columns + 1).clamp(max=context.tokens.shape[1] - 1))
            chain = TreeTopology.chain(width, columns.device)
            mask, positions = self.begin_pass(chain, slice(0, width))
            outputs = run(states, following, mask, positions)
            num_new = missing.clamp(max=width)
            last = (num_new - 1).clamp(min=0)[:, None, None]
            last_outputs = [output.gather(1, last.expand(-1, -1, output.shape[2])) for output in outputs]
            if newest:  # rows that had nothing left to read keep their output of an earlier pass
                has_new = (num_new > 0)[:, None, None]
                last_outputs = [
                    torch.where(has_new, output, earlier)
                    for output, earlier in zip(last_outputs, newest, strict=True)
                ]
            newest = last_outputs
            self.cache.commit_prefix(num_new, [min(num_left, width) for num_left in left])
            missing = missing - num_new
        self.cache.uncommit_last()
        return newest

    def begin_pass(self, topology: TreeTopology, nodes: slice) -> tuple[Tensor, Tensor]:
        """Mask and positions for running ``nodes`` of a tree whose node 0 is each row's next entry."""
        self.cache.plan_pass(nodes.stop - nodes.start, nodes.start)
        lengths = self.cache.lengths
        mask = tree_attention_masks(lengths, self.cache.num_slots, topology, FULL_ATTENTION, nodes=nodes)
        assert isinstance(mask, Tensor)  # one layer type, one mask
        return mask, node_positions(lengths, topology, nodes=nodes)


def _of_row(context: DraftContext, row: int) -> DraftContext:
    """The text of one row."""
    assert context.features is not None, "a drafter with LayerCache reads_features"
    only = slice(row, row + 1)
    return replace(
        context, tokens=context.tokens[only], lengths=context.lengths[only], features=context.features[only]
    )


class AutoregressiveDrafter(LevelDrafter):
    """Fills ``tree`` with an autoregressive head, over ``base``'s embeddings and LM head.

    Entries of the text are made from states of the base (:class:`LayerCache`); below the root, the entry of a
    node joins the output of its parent's entry with its own token. In a head with several layers, layer d
    predicts the tokens after nodes of depth d - 1; later layers run there too, for deeper nodes.
    """

    context_only = False  # a guess made from the head's own features is another than one made from the base's
    reads_features = True

    def __init__(self, head: AutoregressiveHead, base: CausalLM, tree: CandidateTree):
        self.head = head
        self.base = base
        self.fused_layers = head.fused_layers
        super().__init__(tree, lm_head_device(base))

    def _shape(self, tree: CandidateTree) -> None:
        super()._shape(tree)
        self._entries = LayerCache(self._device, 2 * self.head.num_layers - 1)
        self._depth = 0
        """The depth of the running nodes."""
        self._features = torch.empty(0)
        """(B, M, D): the outputs of this step's entries, the root's first."""

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.base)

    def reset(self, num_rows: int, after: Drafter | None = None) -> None:
        self._entries.reset(num_rows, after._entries if isinstance(after, AutoregressiveDrafter) else None)

    def keep_rows(self, rows: Tensor) -> None:
        self._entries.keep_rows(rows)

    def logits_after(self, context: DraftContext, tokens: Tensor, nodes: slice) -> Tensor:
        if nodes.start == 0:
            return self.logits_after_root(context)
        return self.logits_after_nodes(tokens[:, nodes], self.topology, nodes.start)

    @property
    def token_map(self) -> Tensor | None:
        return self.head.token_map

    def logits_after_root(self, context: DraftContext) -> Tensor:
        """Read the entries of all accepted tokens; the logits after the root, (B, 1, V')."""

        def run(hidden: Tensor, following: Tensor, mask: Tensor, positions: Tensor) -> Drafted:
            return self._run(self.head.fuse(hidden), following, mask, positions)

        self._depth = 0
        states, self._features = self._entries.read(context, run)
        return self._logits(states)

    def logits_after_nodes(self, tokens: Tensor, topology: TreeTopology, first_node: int) -> Tensor:
        """The logits (B, M, V') after ``tokens`` (B, M) long, nodes of ``topology`` from ``first_node`` on.

        All nodes before them have been run in this step.
        """
        parents = topology.parents[:, first_node : first_node + tokens.shape[1]].expand(len(tokens), -1)
        features = self._features.gather(1, parents[..., None].expand(-1, -1, self._features.shape[2]))
        nodes = slice(first_node, first_node + tokens.shape[1])
        self._depth += 1
        mask, positions = self._entries.begin_pass(topology, nodes)
        drafted = self._run(features, tokens, mask, positions, parents)
        self._features = torch.cat([self._features, drafted.features], dim=1)
        return self._logits(drafted.states)

    def _logits(self, states: Tensor) -> Tensor:
        return self.head.unembedded(states, lm_head(self.base))

    def _run(
        self, features: Tensor, tokens: Tensor, mask: Tensor, positions: Tensor, parents: Tensor | None = None
    ) -> Drafted:
        """The outputs of entries that join ``features`` (B, M, D) with ``tokens`` (B, M).

        Each entry follows its node of ``parents`` (B, M) long; entries of the text follow the entry before
        them.
        """
        cache = self._entries.cache
        num_layers = self.head.num_layers
        embedded = self.base.get_input_embeddings()(tokens).to(features.device)
        first = min(self._depth, num_layers - 1)
        drafted = output = self._run_layer(first, features, embedded, mask, positions)
        for layer in range(first + 1, num_layers):
            # A later layer reads the output of the layer below at the entry before, so that output is kept
            # like a key, in a layer of the cache of its own.
            outputs, _ = cache.update(
                output.features[:, None], features[:, None, :, :0], num_layers + layer - 1
            )
            before = cache.slots - 1 if parents is None else cache.lengths[:, None] + parents
            below = outputs[:, 0].gather(1, before.clamp(min=0)[..., None].expand_as(features))
            output = self._run_layer(layer, below, embedded, mask, positions)
        return drafted

    def _run_layer(
        self, layer: int, features: Tensor, embedded: Tensor, mask: Tensor, positions: Tensor
    ) -> Drafted:
        cache = self._entries.cache
        if layer:  # so near to the start, entries have nothing below them
            slots = torch.arange(mask.shape[-1], device=mask.device)
            mask = mask & ((slots >= layer) | (slots == cache.slots[..., None]))[:, None]
        return self.head(features, embedded, mask, positions, cache, layer)
