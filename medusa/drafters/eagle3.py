"""An EAGLE-3 head as a drafter: its one layer runs down the tree on features it makes itself."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, output_embedding, vocab_size
from medusa.drafters.layer_cache import LayerCache
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.protocol import DraftContext, Drafter
from medusa.heads.eagle3 import Drafted, Eagle3Head
from medusa.trees.candidate_tree import CandidateTree, TreeTopology


class Eagle3Drafter(LevelDrafter):
    """Fills ``tree`` with an EAGLE-3 head over ``base``'s layers and embeddings.

    Entries of the text stand on states of the base (:mod:`medusa.drafters.layer_cache`); below the root, a
    node's entry joins what its parent's entry gave with its own token.
    """

    context_only = False  # a guess made from the head's own features is another than one made from the base's
    needs_features = True

    def __init__(self, head: Eagle3Head, base: CausalLM, tree: CandidateTree, beta: float = 1.0):
        self.head, self.base = head, base
        self.reads_layers = head.reads_layers
        super().__init__(tree, base.device, beta)

    def _shape(self, tree: CandidateTree) -> None:
        super()._shape(tree)
        self._entries = LayerCache(self._device)
        self._features = torch.empty(0)
        """(B, M, D): what the entries run in this step gave, the root's first."""

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.base)

    def begin(self, num_rows: int, after: Drafter | None = None) -> None:
        self._entries.begin(num_rows, after._entries if isinstance(after, Eagle3Drafter) else None)

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

        states, self._features = self._entries.read(context, run)
        return self._logits(states)

    def logits_after_nodes(self, tokens: Tensor, topology: TreeTopology, first_node: int) -> Tensor:
        """The logits (B, M, V') after ``tokens`` (B, M) long, nodes of ``topology`` from ``first_node`` on.

        All nodes before them have been run in this step.
        """
        parents = topology.parents[:, first_node : first_node + tokens.shape[1]].expand(len(tokens), -1)
        features = self._features.gather(1, parents[..., None].expand(-1, -1, self._features.shape[2]))
        nodes = slice(first_node, first_node + tokens.shape[1])
        drafted = self._run(features, tokens, *self._entries.announce(topology, nodes))
        self._features = torch.cat([self._features, drafted.features], dim=1)
        return self._logits(drafted.states)

    def _logits(self, states: Tensor) -> Tensor:
        return self.head.unembedded(states, output_embedding(self.base))

    def _run(self, features: Tensor, tokens: Tensor, mask: Tensor, positions: Tensor) -> Drafted:
        """What entries that join ``features`` (B, M, D) with ``tokens`` (B, M) give."""
        embedded = self.base.get_input_embeddings()(tokens)
        return self.head(features, embedded, mask, positions, self._entries.cache)
