"""An EAGLE-style head as a drafter: its one layer runs down the tree on features it predicts itself."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.base.attention import node_positions, tree_attention_masks
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import CausalLM, hidden_size, output_embedding, vocab_size
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.protocol import DraftContext
from medusa.drafters.source import DrafterSettings, DraftHost, DraftSource, NamedDrafter
from medusa.heads.checkpoint import HeadsCheckpoint, load_heads
from medusa.heads.eagle import EagleHead
from medusa.heads.fingerprint import warn_of_another_base
from medusa.heads.medusa_heads import check_heads_fit
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

FULL_ATTENTION: dict[str, int | None] = {"full_attention": None}


class EagleDrafter(LevelDrafter):
    """Fills ``tree`` with an EAGLE-style head over ``base``'s features and embeddings.

    Entry t of its cache joins feature t with token t + 1. Committed entries hold features of the base;
    below the root, a node's entry joins its parent's predicted feature with its own token.
    """

    context_only = False  # a prediction made from predicted features is another than one made from true ones
    needs_features = True

    def __init__(self, head: EagleHead, base: CausalLM, tree: CandidateTree, beta: float = 1.0):
        super().__init__(tree, base.device, beta)
        self.head, self.base = head, base
        self.cache = TreeCache(0, 1, base.device)
        self._predicted = torch.empty(0)

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.base)

    def begin(self, num_rows: int) -> None:
        self.cache = TreeCache(num_rows, 1, self.base.device)

    def keep_rows(self, rows: Tensor) -> None:
        self.cache.keep_rows(rows)

    def logits_after(self, context: DraftContext, tokens: Tensor, nodes: slice) -> Tensor:
        if nodes.start == 0:
            predicted = self._catch_up(context)
            self._predicted = predicted.repeat(1, self.tree.num_nodes, 1)  # (B, N, D)
        else:
            parents = self.topology.parents[0, nodes]
            predicted = self._run(self._predicted[:, parents], tokens[:, nodes], self.topology, nodes.start)
            self._predicted[:, nodes] = predicted
        return self.head.unembedded(predicted, output_embedding(self.base))

    @property
    def token_map(self) -> Tensor | None:
        return self.head.token_map

    def _catch_up(self, context: DraftContext) -> Tensor:
        """Commit the entries of all accepted tokens; the prediction after the root, (B, 1, D)."""
        assert context.features is not None
        missing = (
            context.lengths - 1 - self.cache.lengths
        )  # the last entry joins the newest feature and the root
        width = int(missing.max())
        columns = self.cache.lengths[:, None] + torch.arange(width, device=missing.device)
        columns = columns.clamp(max=context.features.shape[1] - 1)
        features = context.features.gather(1, columns[..., None].expand(-1, -1, context.features.shape[2]))
        following = context.tokens.gather(1, (columns + 1).clamp(max=context.tokens.shape[1] - 1))
        predicted = self._run(features, following, TreeTopology.chain(width, columns.device))
        self.cache.commit_prefix(missing)
        self.cache.forget_last()  # the root's entry is node 0 of this tree
        last = (missing - 1)[:, None, None].expand(-1, 1, predicted.shape[2])
        return predicted.gather(1, last)

    def _run(self, features: Tensor, tokens: Tensor, topology: TreeTopology, first_node: int = 0) -> Tensor:
        """Predicted features (B, M, D) of entries that join ``features`` (B, M, D) with ``tokens`` (B, M)."""
        nodes = slice(first_node, first_node + tokens.shape[1])
        self.cache.begin(tokens.shape[1], first_node)
        lengths, num_slots = self.cache.lengths, self.cache.num_slots
        return self.head(
            features,
            self.base.get_input_embeddings()(tokens),
            tree_attention_masks(lengths, num_slots, topology, FULL_ATTENTION, nodes=nodes),
            node_positions(lengths, topology, nodes=nodes),
            self.cache,
        )


def eagle_source(host: DraftHost, settings: DrafterSettings) -> DraftSource:
    """The EAGLE-style head of ``settings.eagle``, in the tree that its directory holds."""
    assert settings.eagle is not None, "missing_eagle refuses this model before"
    given = settings.eagle
    checkpoint = given if isinstance(given, HeadsCheckpoint) else load_heads(given)
    head, base = checkpoint.heads, host.runner
    if not isinstance(head, EagleHead):
        raise ValueError(
            f"eagle must be an EAGLE-style head, got Medusa heads for {checkpoint.base_model!r}; use --heads"
        )
    check_heads_fit(head.config, hidden_size(base), vocab_size(base), base.name_or_path)
    warn_of_another_base(checkpoint.fingerprint, host.base, checkpoint.base_model)
    head.to(base.device).eval()
    return DraftSource(
        "eagle",
        lambda tree: EagleDrafter(head, base, tree),
        own_tree=checkpoint.tree if checkpoint.tree is not None and checkpoint.tree.depth else None,
        draft_length=settings.draft_length or head.num_heads,
        draft_width=settings.draft_width,
    )


def missing_eagle(host: DraftHost, settings: DrafterSettings) -> str | None:
    """What is missing: the head, unless the settings name one."""
    return "an EAGLE-style head; give --eagle" if settings.eagle is None else None


EAGLE = NamedDrafter("eagle", eagle_source, "an EAGLE-style head beside the heads", missing_eagle)
