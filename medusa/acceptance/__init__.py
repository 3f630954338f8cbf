"""Which nodes of a verified tree stay: ``acceptance=``.

``sampling``  logits to tokens as a function of seed and position: processors, noise, and what plain decoding
              would have written after each node
``grammar``   one of the processors: answers in a form that was asked for
``exact``     "exact", the default, for any candidates: a node stays if its token equals that one. The text is
              equal to plain decoding, token for token. Beside it "typical", LOSSY: a node stays if the base
              finds it plausible
``rules``     "token", "block", "multi_draft", ...: rules for drafts *drawn* from a distribution

"exact" and "typical" answer with an :class:`~medusa.acceptance.exact.Acceptance`: the path that stays and the
token after it. A rule for drawn drafts is a function of two distributions,

    verdict = rule.verify(draft, noise, state)

    draft      the tree's tokens, and after each node p (the base's distribution) and q (the drafter's)
    verdict    the deepest node that stays, the next token, and the state for the next step

and keeps the base's distribution, if not the text of one seed. ``protocol`` has its types and
its randomness, and draws the drafts.
"""
