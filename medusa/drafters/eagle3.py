"""An EAGLE-3 head as a drafter: its one layer runs down the tree on features it makes itself."""

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
from medusa.heads.eagle3 import Drafted, Eagle3Head
from medusa.heads.fingerprint import warn_of_another_base
from medusa.heads.medusa_heads import check_heads_fit
from medusa.trees.candidate_tree import CandidateTree, TreeTopology

FULL_ATTENTION: dict[str, int | None] = {"full_attention": None}


class Eagle3Drafter(LevelDrafter):
    """Fills ``tree`` with an EAGLE-3 head over ``base``'s layers and embeddings.

    Entry t of its cache joins feature t with token t + 1. Committed entries stand on states of the base;
    below the root, a node's entry joins what its parent's entry gave with its own token.
    """

    context_only = False  # a guess made from the head's own features is another than one made from the base's
    needs_features = True

    def __init__(self, head: Eagle3Head, base: CausalLM, tree: CandidateTree, beta: float = 1.0):
        super().__init__(tree, base.device, beta)
        self.head, self.base = head, base
        self.reads_layers = head.reads_layers
        self.cache = TreeCache(0, 1, base.device)
        self._features = torch.empty(0)
        """(B, M, D): what the entries run in this step gave, the root's first."""

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.base)

    def begin(self, num_rows: int) -> None:
        self.cache = TreeCache(num_rows, 1, self.base.device)

    def keep_rows(self, rows: Tensor) -> None:
        self.cache.keep_rows(rows)

    def logits_after(self, context: DraftContext, tokens: Tensor, nodes: slice) -> Tensor:
        if nodes.start == 0:
            return self.logits_after_root(context)
        return self.logits_after_nodes(tokens[:, nodes], self.topology, nodes.start)

    @property
    def token_map(self) -> Tensor | None:
        return self.head.token_map

    def logits_after_root(self, context: DraftContext) -> Tensor:
        """Commit the entries of all accepted tokens; the logits after the root, (B, 1, V')."""
        assert context.features is not None
        # The last entry joins the newest feature and the root.
        missing = context.lengths - 1 - self.cache.lengths
        width = int(missing.max())
        columns = self.cache.lengths[:, None] + torch.arange(width, device=missing.device)
        columns = columns.clamp(max=context.features.shape[1] - 1)
        hidden = context.features.gather(1, columns[..., None].expand(-1, -1, context.features.shape[2]))
        following = context.tokens.gather(1, (columns + 1).clamp(max=context.tokens.shape[1] - 1))
        chain = TreeTopology.chain(width, columns.device)
        drafted = self._run(self.head.fuse(hidden), following, chain, 0)
        self.cache.commit_prefix(missing)
        self.cache.forget_last()  # the root's entry is node 0 of this tree
        last = (missing - 1)[:, None, None].expand(-1, 1, drafted.states.shape[2])
        self._features = drafted.features.gather(1, last)
        return self._logits(drafted.states.gather(1, last))

    def logits_after_nodes(self, tokens: Tensor, topology: TreeTopology, first_node: int) -> Tensor:
        """The logits (B, M, V') after ``tokens`` (B, M) long, nodes of ``topology`` from ``first_node`` on.

        All nodes before them have been run in this step.
        """
        parents = topology.parents[:, first_node : first_node + tokens.shape[1]].expand(len(tokens), -1)
        features = self._features.gather(1, parents[..., None].expand(-1, -1, self._features.shape[2]))
        drafted = self._run(features, tokens, topology, first_node)
        self._features = torch.cat([self._features, drafted.features], dim=1)
        return self._logits(drafted.states)

    def _logits(self, states: Tensor) -> Tensor:
        return self.head.unembedded(states, output_embedding(self.base))

    def _run(self, features: Tensor, tokens: Tensor, topology: TreeTopology, first_node: int) -> Drafted:
        """What entries that join ``features`` (B, M, D) with ``tokens`` (B, M) give."""
        nodes = slice(first_node, first_node + tokens.shape[1])
        self.cache.begin(tokens.shape[1], first_node)
        lengths, num_slots = self.cache.lengths, self.cache.num_slots
        mask = tree_attention_masks(lengths, num_slots, topology, FULL_ATTENTION, nodes=nodes)
        assert isinstance(mask, Tensor)  # one layer type, one mask
        return self.head(
            features,
            self.base.get_input_embeddings()(tokens),
            mask,
            node_positions(lengths, topology, nodes=nodes),
            self.cache,
        )


def eagle3_source(host: DraftHost, settings: DrafterSettings) -> DraftSource:
    """The EAGLE-3 head of ``settings.eagle3``, in the tree that its directory holds."""
    assert settings.eagle3 is not None, "missing_eagle3 refuses this model before"
    given = settings.eagle3
    checkpoint = given if isinstance(given, HeadsCheckpoint) else load_heads(given)
    head, base = checkpoint.heads, host.runner
    if not isinstance(head, Eagle3Head):
        raise ValueError(
            f"eagle3 must be an EAGLE-3 head, got Medusa heads for {checkpoint.base_model!r}; use --heads"
        )
    check_heads_fit(head.config, hidden_size(base), vocab_size(base), base.name_or_path)
    warn_of_another_base(checkpoint.fingerprint, host.base, checkpoint.base_model)
    head.to(base.device).eval()
    return DraftSource(
        "eagle3",
        lambda tree: Eagle3Drafter(head, base, tree),
        own_tree=checkpoint.tree if checkpoint.tree is not None and checkpoint.tree.depth else None,
        draft_length=settings.draft_length or head.num_heads,
        draft_width=settings.draft_width,
    )


def missing_eagle3(host: DraftHost, settings: DrafterSettings) -> str | None:
    """What is missing: the head, unless the settings name one."""
    return "an EAGLE-3 head; give --eagle3" if settings.eagle3 is None else None


EAGLE3 = NamedDrafter("eagle3", eagle3_source, "an EAGLE-3 head beside the heads", missing_eagle3)
