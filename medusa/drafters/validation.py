"""What every draft must be, so that no drafter can change the text: shapes, tokens, and a tree that is one.

Shapes are known on the host. What the tensors hold is looked at on the device, which gives one flag for each
rule. The general loop reads the flags before the base sees the draft; static steps collect them until the
host next reads the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.drafters.protocol import Draft, DraftContext, Drafter
from medusa.trees.candidate_tree import TreeTopology

TOKEN_RULES = ("token ids of the base's vocabulary", "the root token in node 0 of every row")
TOPOLOGY_RULES = (
    "a topology whose parents stand before their children, the root its own parent",
    "a topology whose depths are those of the parents plus one, and at most max_depth",
    "a topology whose ancestors, lineage and is_chain follow from its parents, "
    "as TreeTopology.from_parents makes them",
)
PROPOSAL_RULES = ("a proposal that is a distribution after every node, or zeros where nothing was drafted",)


class DraftValidator:
    """Checks drafts for a base of ``vocab_size`` tokens.

    The drafts of medusa's own drafters are valid by construction and cost nothing here. A topology is looked
    at once for as long as drafters return the same object.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._topology: TreeTopology | None = None

    def check(self, drafter: Drafter, draft: Draft, context: DraftContext) -> None:
        """Raise ValueError, naming the drafter and the rule, unless the base can verify ``draft``."""
        if is_medusas_own(drafter):
            return
        check_shapes(drafter, draft, context, self.vocab_size)
        rules, flags = list(TOKEN_RULES), [token_violations(draft.tokens, context.root, self.vocab_size)]
        if draft.topology is not self._topology:
            rules += TOPOLOGY_RULES
            flags.append(topology_violations(draft.topology))
        if draft.proposal is not None:
            rules += PROPOSAL_RULES
            flags.append(proposal_violations(draft.proposal))
        raise_violated(drafter, rules, torch.cat(flags))
        self._topology = draft.topology


def is_medusas_own(drafter: Drafter) -> bool:
    """Whether ``drafter``, and each drafter that a union joins, is a class of this package."""
    parts = getattr(drafter, "drafters", [])
    return all(type(part).__module__.partition(".")[0] == "medusa" for part in (drafter, *parts))


def raise_violated(drafter: Drafter, rules: Sequence[str], are_violated: Tensor) -> None:
    """Raise ValueError for the first of ``rules`` that ``are_violated`` (R,) bool marks; reads the device."""
    for rule, is_violated in zip(rules, are_violated.tolist(), strict=True):
        if is_violated:
            raise ValueError(
                f"{type(drafter).__name__}.draft must return {rule}; it returned a draft without"
            )


def check_shapes(drafter: Drafter, draft: Draft, context: DraftContext, vocab_size: int) -> None:
    """Raise ValueError unless the tensors of ``draft`` fit together and to ``context``. Reads shapes only."""
    tokens, tree, num_rows = draft.tokens, draft.topology, len(context.root)
    name, num_nodes, most = type(drafter).__name__, tree.num_nodes, drafter.max_depth
    if tokens.dtype != torch.long or tuple(tokens.shape) != (num_rows, num_nodes):
        raise ValueError(
            f"{name}.draft must return tokens of dtype long and shape {(num_rows, num_nodes)}, for "
            f"{num_rows} rows and {num_nodes} nodes, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    num_trees, size = tree.parents.shape[0], tree.max_depth + 1
    shapes = {
        "parents": (num_trees, num_nodes),
        "depths": (num_trees, num_nodes),
        "ancestors": (num_trees, num_nodes, num_nodes),
        "lineage": (num_trees, num_nodes, size),
    }
    for part, shape in shapes.items():
        if num_trees not in (1, num_rows) or tuple(getattr(tree, part).shape) != shape:
            raise ValueError(
                f"{name}.draft must return a topology of 1 or {num_rows} trees in one shape: topology.{part} "
                f"must be {shape}, got {tuple(getattr(tree, part).shape)}"
            )
    if tree.max_depth > most:
        raise ValueError(
            f"{name}.draft must return trees no deeper than its max_depth, {most}, got {size - 1}"
        )
    if context.sampled is None:
        return
    shape = (num_rows, num_nodes, vocab_size)
    if draft.proposal is None or tuple(draft.proposal.shape) != shape:
        got = None if draft.proposal is None else tuple(draft.proposal.shape)
        raise ValueError(
            f"{name}.draft must return the proposal that it drew from, of shape {shape}, because "
            f"context.sampled is {context.sampled.name}; got {got}"
        )


def token_violations(tokens: Tensor, root: Tensor, vocab_size: int) -> Tensor:
    """Which of :data:`TOKEN_RULES` ``tokens`` (B, N) long below ``root`` (B,) long break, (2,) bool."""
    return torch.stack([((tokens < 0) | (tokens >= vocab_size)).any(), (tokens[:, 0] != root).any()])


def topology_violations(tree: TreeTopology) -> Tensor:
    """Which of :data:`TOPOLOGY_RULES` ``tree`` breaks, (3,) bool."""
    nodes = torch.arange(tree.num_nodes, device=tree.parents.device)
    before = (nodes - 1).clamp(min=0)
    in_order = (tree.parents >= 0) & (tree.parents <= before)
    parents, depths = tree.parents.clamp(0, tree.num_nodes - 1), tree.depths.clamp(0, tree.max_depth)
    counted = tree.depths == torch.where(nodes == 0, 0, depths.gather(1, parents) + 1)
    counted &= tree.depths <= tree.max_depth
    rebuilt = TreeTopology.from_parents(parents, depths, tree.max_depth)
    follows = (tree.ancestors == rebuilt.ancestors).all() & (tree.lineage == rebuilt.lineage).all()
    if tree.is_chain:
        follows &= (tree.parents == before).all()
    return ~torch.stack([in_order.all(), counted.all(), follows])


def proposal_violations(proposal: Tensor) -> Tensor:
    """Which of :data:`PROPOSAL_RULES` ``proposal`` (B, N, V) breaks, (1,) bool."""
    total = proposal.sum(-1)
    is_whole = (total == 0) | ((total - 1).abs() < 1e-3)  # a total of NaN is neither
    return ~((proposal >= 0).all() & is_whole.all())[None]
