"""Acceptance rules for *sampled* drafts: speculative sampling and its relatives, one file a rule.

These rules compare two distributions, so they need to know the one the draft was drawn from. A rule
is a pure tensor function over a batch of rows; it knows nothing of models, caches or seeds:

    verdict = rule.verify(draft, noise, state)

    draft.tokens    (B, N) long   node 0 is the root token, parents stand before their children,
                                  siblings in the order they were drawn
    draft.topology                medusa.trees.candidate_tree.TreeTopology, one tree for all rows or one a row
    draft.target    (B, N, V)     p: what the base model says after each node, with temperature, top-k,
                                  top-p and every logits processor applied
    draft.proposal  (B, N, V)     q: what the children of each node were drawn from; a leaf's row is not read.
                                  A row of zeros says "nothing was drafted here": short drafts need no mask
                                  (``greedy_block`` needs drafts of full length). Nodes of equal text, as
                                  independent chains have, must have equal p and equal q
    noise.uniform   (B, N)        one number of [0, 1) a node, the coin of that node
    noise.gumbel    (B, V)        draws the next token from what is left of p
    state                         what the previous step returned; None at the start, and None for ever
                                  with every rule but ``greedy_block``

    verdict.best          (B,) long   the deepest accepted node
    verdict.num_accepted  (B,) long   its depth: accepted draft tokens, the root not counted
    verdict.next_token    (B,) long   already drawn from p or from what is left of it. Never sample again
    verdict.residual      (B, V)      the distribution it was drawn from
    verdict.acceptance    (B, N)      the probability each coin was compared with; NaN for an unused coin
    verdict.state                     pass it to the next step

Draft noise, coins and residual noise must be independent of each other, and of the steps before: a ratio test
on a draft that was chosen with the verifier's own noise is biased. ``medusa.acceptance.distributions`` makes
all three from a seed and the position of the root. Nothing here reads a tensor back to the host.

The work is done in the dtype of the distributions, float32 or float64. Conventions for 0/0: a token with
q = 0 was not drafted and is never accepted; a residual without mass falls back to the target.

A rule says which drafts it is exact for (``draft_kinds``, the kind to draw first) and refuses the
others with the reason (``rule.require``). **Adding a rule**: a file in this folder with a
``VerificationRule("name", verify, draft_kinds=(DraftKind.CHAIN,), summary="...")``, and a line in
:data:`RULES`.
"""

from __future__ import annotations

from medusa.acceptance.chain_rules import BLOCK, GREEDY_BLOCK, TOKEN
from medusa.acceptance.distributions import (
    draw_tree,
    draw_without_replacement,
    independent_chains,
    kind_drawn,
)
from medusa.acceptance.protocol import (
    DraftKind,
    SampledDraft,
    Verdict,
    VerificationNoise,
    VerificationRule,
)
from medusa.acceptance.tree_rules import MULTI_DRAFT, MULTI_DRAFT_WITHOUT_REPLACEMENT, SPECTR, TRAVERSAL

RULES: dict[str, VerificationRule] = {
    rule.name: rule
    for rule in (
        TOKEN,
        BLOCK,
        GREEDY_BLOCK,
        MULTI_DRAFT,
        MULTI_DRAFT_WITHOUT_REPLACEMENT,
        SPECTR,
        TRAVERSAL,
    )
}
"""Every rule for sampled drafts, by name."""


def rule_named(name: str) -> VerificationRule:
    """The rule called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in RULES:
        raise ValueError(
            f"acceptance={name!r} is not a rule for sampled drafts; there are {', '.join(RULES)}"
        )
    return RULES[name]


__all__ = [
    "RULES",
    "DraftKind",
    "SampledDraft",
    "Verdict",
    "VerificationNoise",
    "VerificationRule",
    "draw_tree",
    "draw_without_replacement",
    "independent_chains",
    "kind_drawn",
    "rule_named",
]
