"""Which nodes of a verified tree stay: ``acceptance=``.

Sampling is a function of logits, seed and position (``sampling``), so a node can be compared with the token
that the base model writes there. That is the exact rule (``exact``), which every drafter works with.
Typical acceptance, in the same module, is lossy. Drafts that were drawn from a distribution can also be
judged by the classical rules of speculative sampling, one file each, listed in ``rules``.
"""
