"""How far an answer strays from the base's own choices: for precisions that promise no identical tokens.

In bfloat16 and float16 a pass over N rows rounds other than one over a single row, and near-ties flip. So an
answer is read back in one pass, and every token compared with what the base finds likeliest there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from medusa.base.causal_lm import CausalLM, hidden_states, output_embedding


@dataclass(frozen=True)
class Divergence:
    """Tokens of greedy answers that are not the base's likeliest one; ``a + b`` is both answers together."""

    num_tokens: int = 0
    num_diverging: int = 0
    largest_gap: float = 0.0
    """The most that a token's logit lies below the largest one."""

    @property
    def rate(self) -> float:
        """Share of diverging tokens; 0.0 without tokens."""
        return self.num_diverging / self.num_tokens if self.num_tokens else 0.0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(
            self.num_tokens + other.num_tokens,
            self.num_diverging + other.num_diverging,
            max(self.largest_gap, other.largest_gap),
        )


@torch.no_grad()
def divergence(base: CausalLM, prompt: Sequence[int], answer: Sequence[int]) -> Divergence:
    """How a greedy ``answer`` to ``prompt`` compares with the base's likeliest tokens, given all before."""
    if not answer:
        return Divergence()
    ids = torch.tensor([[*prompt, *answer]], device=base.device)
    states = hidden_states(base, ids)[0, len(prompt) - 1 : -1]
    embedding = output_embedding(base)
    gaps = []
    for part, tokens in zip(states.split(256), ids[0, len(prompt) :].split(256), strict=True):
        logits = embedding(part).float()  # (T', V)
        gaps.append(logits.max(dim=-1).values - logits.gather(1, tokens[:, None]).squeeze(1))
    gap = torch.cat(gaps)
    return Divergence(len(answer), int((gap > 0).sum()), float(gap.max()))


def total_divergence(
    base: CausalLM, answers: Iterable[tuple[Sequence[int], Sequence[int]]], most: int = 16
) -> Divergence:
    """That of the first ``most`` of ``answers``, pairs of prompt and answer."""
    total = Divergence()
    for number, (prompt, answer) in enumerate(answers):
        if number == most:
            break
        total += divergence(base, prompt, answer)
    return total
