"""Acceptance rules for *sampled* drafts: speculative sampling and its relatives, one file a rule.

These rules compare two distributions, so they need to know the one the draft was drawn from. A rule
is a pure tensor function over a batch of rows; it knows nothing of models, caches or seeds:

    verdict = rule.verify(draft, noise, state)

    draft.tokens    (B, N) long   node 0 is the root token, parents stand before their children,
                                  siblings in the order they were drawn
    draft.topology                medusa.tree.TreeTopology, one tree for all rows or one a row
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
    verdict.acceptance    (B, N)      the probability each coin was held against; NaN for a coin not looked at
    verdict.state                     pass it to the next step

Draft noise, coins and residual noise must be independent of each other, and of the steps before: a ratio
test on a draft that was chosen with the verifier's own noise is biased. ``medusa.verification.noise`` makes
all three from a seed and the position of the root. Nothing here reads a tensor back to the host.

The work is done in the dtype of the distributions, float32 or float64. Conventions for 0/0: a token with
q = 0 was not drafted and is never accepted; a residual without mass falls back to the target.

A rule says which drafts it is exact for (``draft_kinds``, the kind to draw first) and refuses the
others with the reason (``rule.require``). **Adding a rule is adding one file to this folder** that ends in

    RULES = (VerificationRule("name", verify, draft_kinds=(DraftKind.CHAIN,), summary="..."),)
"""

from __future__ import annotations

import importlib
import pkgutil

from medusa.verification.drawing import (
    draw_tree,
    draw_with_replacement,
    draw_without_replacement,
    independent_chains,
    kind_drawn,
)
from medusa.verification.expectation import expected_tokens
from medusa.verification.protocol import (
    DraftKind,
    SampledDraft,
    Verdict,
    VerificationNoise,
    VerificationRule,
)


def all_rules() -> dict[str, VerificationRule]:
    """Every rule of this folder by name, in the order of file names.

    Raises:
        ValueError: two files give the same name to a rule.
    """
    rules: dict[str, VerificationRule] = {}
    for found in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        for rule in getattr(importlib.import_module(found.name), "RULES", ()):
            if rule.name in rules:
                raise ValueError(f"rule names must differ, got {rule.name!r} again in {found.name}")
            rules[rule.name] = rule
    return rules


def rule_named(name: str) -> VerificationRule:
    """The rule called ``name``.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    rules = all_rules()
    if name not in rules:
        raise ValueError(
            f"acceptance={name!r} is not a rule for sampled drafts; there are {', '.join(rules)}"
        )
    return rules[name]


__all__ = [
    "DraftKind",
    "SampledDraft",
    "Verdict",
    "VerificationNoise",
    "VerificationRule",
    "all_rules",
    "draw_tree",
    "draw_with_replacement",
    "draw_without_replacement",
    "expected_tokens",
    "independent_chains",
    "kind_drawn",
    "rule_named",
]
