"""Heads that run ahead as drafters: their layers run down the tree on features they make themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, output_embedding, vocab_size
from medusa.drafters.layer_cache import LayerCache
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.protocol import DraftContext, Drafter
from medusa.heads.ahead import AheadHead, Drafted
from medusa.trees.candidate_tree import CandidateTree, TreeTopology


class AheadDrafter(LevelDrafter):
    """Fills ``tree`` with a head that runs ahead, over ``base``'s layers and embeddings.

    Entries of the text stand on states of the base (:mod:`medusa.drafters.layer_cache`); below the root, a
    node's entry joins what its parent's entry gave with its own token. Of a head with several layers, the
    d-th guesses what follows a node of depth d - 1; those above it run there too, for nodes further down.
    """

    context_only = False  # a guess made from the head's own features is another than one made from the base's
    needs_features = True

    def __init__(self, head: AheadHead, base: CausalLM, tree: CandidateTree, beta: float = 1.0):
        self.head, self.base = head, base
        self.reads_layers = head.reads_layers
        super().__init__(tree, base.device, beta)

    def _shape(self, tree: CandidateTree) -> None:
        super()._shape(tree)
        self._entries = LayerCache(self._device, 2 * self.head.num_layers - 1)
        self._depth = 0
        """Of the nodes that are run."""
        self._features = torch.empty(0)
        """(B, M, D): what the entries run in this step gave, the root's first."""

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.base)

    def begin(self, num_rows: int, after: Drafter | None = None) -> None:
        self._entries.begin(num_rows, after._entries if isinstance(after, AheadDrafter) else None)

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
        drafted = self._run(features, tokens, *self._entries.announce(topology, nodes), parents)
        self._features = torch.cat([self._features, drafted.features], dim=1)
        return self._logits(drafted.states)

    def _logits(self, states: Tensor) -> Tensor:
        return self.head.unembedded(states, output_embedding(self.base))

    def _run(
        self, features: Tensor, tokens: Tensor, mask: Tensor, positions: Tensor, parents: Tensor | None = None
    ) -> Drafted:
        """What entries that join ``features`` (B, M, D) with ``tokens`` (B, M) give.

        Each entry stands behind its node of ``parents`` (B, M) long; a text's, behind the entry before it.
        """
        cache, num_layers = self._entries.cache, self.head.num_layers
        embedded = self.base.get_input_embeddings()(tokens)
        first = min(self._depth, num_layers - 1)
        drafted = given = self._run_layer(first, features, embedded, mask, positions)
        for layer in range(first + 1, num_layers):  # what one gives is kept beside the keys and values of all
            kept, _ = cache.update(given.features[:, None], features[:, None, :, :0], num_layers + layer - 1)
            before = cache.slots - 1 if parents is None else cache.lengths[:, None] + parents
            below = kept[:, 0].gather(1, before.clamp(min=0)[..., None].expand_as(features))
            given = self._run_layer(layer, below, embedded, mask, positions)
        return drafted

    def _run_layer(
        self, layer: int, features: Tensor, embedded: Tensor, mask: Tensor, positions: Tensor
    ) -> Drafted:
        cache = self._entries.cache
        if layer:  # so near to the start, entries have nothing below them
            slots = torch.arange(mask.shape[-1], device=mask.device)
            mask = mask & ((slots >= layer) | (slots == cache.slots[..., None]))[:, None]
        return self.head(features, embedded, mask, positions, cache, layer)
