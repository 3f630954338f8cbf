"""How long a chain of draft tokens should be: what they are worth against what they cost.

A step with draft length g gives E[tokens] = (1 - a^(g+1)) / (1 - a) and costs g times the drafting of a token
plus the verification of g + 1 nodes (arXiv 2211.17192, sections 3.1 and 3.4). Numbers in, numbers out:
:mod:`medusa.measurement.watching` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

MAX_DRAFT_LENGTH = 16


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


@dataclass(frozen=True)
class DraftRecord:
    """How drafts fared; ``a + b`` is the record of both.

    Where a draft was not one path, the properties and :meth:`expected_tokens` mean nothing.
    """

    num_steps: int = 0
    num_drafted_steps: int = 0
    """Steps that had a draft at all; a suffix match often has none."""
    num_accepted: int = 0
    """Draft tokens accepted."""
    num_rejected: int = 0
    """Drafted steps that ended at a rejected token, not at the end of the draft or of the answer."""
    num_nodes: int = 0
    """Nodes verified, roots included."""
    num_branching: int = 0
    """Steps whose draft was not one path."""
    token_seconds: tuple[float, ...] = ()
    """Seconds per depth of each draft but the first of an answer, which has the prompt to catch up with."""

    @property
    def acceptance_rate(self) -> float:
        """a: how often a draft token is accepted once all before it are; 0.0 before any draft.

        The estimate of highest likelihood when every token is accepted independently with this probability.
        """
        tested = self.num_accepted + self.num_rejected
        return self.num_accepted / tested if tested else 0.0

    @property
    def drafted_share(self) -> float:
        """The share of steps that had a draft; 0.0 before any step."""
        return self.num_drafted_steps / self.num_steps if self.num_steps else 0.0

    def expected_tokens(self, draft_length: int) -> float:
        """Tokens a step that chains of ``draft_length`` should give."""
        return 1 + self.drafted_share * (expected_tokens(self.acceptance_rate, draft_length) - 1)

    def __add__(self, other: DraftRecord) -> DraftRecord:
        names = [field.name for field in fields(self)]
        return DraftRecord(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class StepCosts:
    """What the parts of a step cost on one machine."""

    draft_seconds: float
    """Drafting one token."""
    verify_seconds: Sequence[float]
    """[n - 1]: verifying n nodes."""
    other_seconds: float = 0.0
    """Accepting and committing."""

    def step_seconds(self, draft_length: int, drafted_share: float = 1.0) -> float:
        """A step on average; ``drafted_share`` of them have a draft, the others verify the root alone."""
        drafted = draft_length * self.draft_seconds + self.verify_seconds[draft_length]
        return self.other_seconds + drafted_share * drafted + (1 - drafted_share) * self.verify_seconds[0]


@dataclass(frozen=True)
class DraftLength:
    """A draft length and what is expected of it."""

    draft_length: int
    tokens_per_step: float
    step_seconds: float
    plain_step_seconds: float

    @property
    def speedup(self) -> float:
        """Over plain decoding; below 1 drafting does not pay at any length."""
        return self.tokens_per_step * self.plain_step_seconds / self.step_seconds


def best_draft_length(
    record: DraftRecord, costs: StepCosts, max_length: int = MAX_DRAFT_LENGTH
) -> DraftLength:
    """The draft length in 1 .. ``max_length`` with the most tokens a second; the shortest of equals.

    Raises:
        ValueError: ``max_length`` is below 1, or the costs do not reach ``max_length`` + 1 nodes.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if len(costs.verify_seconds) <= max_length:
        raise ValueError(
            f"verify_seconds must reach {max_length + 1} nodes, got {len(costs.verify_seconds)}: "
            "measure more, or lower max_length"
        )
    plain = costs.step_seconds(0, drafted_share=0.0)
    lengths = [
        DraftLength(
            length, record.expected_tokens(length), costs.step_seconds(length, record.drafted_share), plain
        )
        for length in range(1, max_length + 1)
    ]
    return max(lengths, key=lambda candidate: candidate.speedup)
