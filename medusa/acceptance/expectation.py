"""What token verification should yield, to hold a measurement against."""

from __future__ import annotations


def expected_tokens(acceptance_rate: float, draft_length: int) -> float:
    """Tokens a step, the next token included: (1 - a^(g+1)) / (1 - a).

    a is the ``acceptance_rate``, g the ``draft_length``. It holds for token
    verification of a chain whose tokens are accepted independently, each with probability a (arXiv
    2211.17192, equation 1). Summed as 1 + a + ... + a^g, which is g + 1 at a = 1.

    Raises:
        ValueError: a is outside [0, 1] or g is negative.
    """
    if not 0 <= acceptance_rate <= 1:
        raise ValueError(f"acceptance_rate must be in [0, 1], got {acceptance_rate}")
    if draft_length < 0:
        raise ValueError(f"draft_length must be at least 0, got {draft_length}")
    return sum(acceptance_rate**i for i in range(draft_length + 1))
