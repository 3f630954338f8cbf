"""How long a chain of draft tokens should be: what they are worth against what they cost here.

A step with draft length g gives E[tokens] = (1 - a^(g+1)) / (1 - a) and costs g times the drafting of a token
plus the verification of g + 1 nodes (arXiv 2211.17192, sections 3.1 and 3.4). A short trial measures the
acceptance a and both costs, and the length with the most tokens a second is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa.base.causal_lm import new_cache, prefill, verify
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.protocol import Draft, DraftContext, Drafter
from medusa.hardware import wait_for
from medusa.measurement.timing import take_turns
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import TreeTopology

MAX_DRAFT_LENGTH = 16
NODE_COUNTS = (1, 2, 3, 5, 9, 13, 17)
"""Sizes whose verification is timed; those between are interpolated."""


def expected_tokens(acceptance_rate: float, draft_length: int) -> float:
    """Tokens a step, the next token included: (1 - a^(g+1)) / (1 - a).

    a is the ``acceptance_rate``, g the ``draft_length``. It holds for token verification of a chain whose
    tokens are accepted independently, each with probability a (arXiv 2211.17192, equation 1). Summed as
    1 + a + ... + a^g, which is g + 1 at a = 1.

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
    """How chains fared; ``a + b`` is the record of both."""

    num_steps: int = 0
    num_drafted_steps: int = 0
    """Steps that had a draft at all; a suffix match often has none."""
    num_accepted: int = 0
    """Draft tokens accepted."""
    num_rejected: int = 0
    """Drafted steps that ended at a rejected token, not at the end of the draft or of the answer."""
    token_seconds: tuple[float, ...] = ()
    """Seconds per depth of each draft but the first of an answer, which has the prompt to catch up with."""

    @classmethod
    def of_step(cls, depths: Sequence[int], draft_depth: int) -> DraftRecord:
        """One step of a chain of ``draft_depth`` that emitted tokens of these ``depths``.

        A step whose last token is a guess was cut by the end of the answer: what followed was never judged.
        """
        num_accepted = sum(depth > 0 for depth in depths)
        was_judged = depths[-1] == 0 and num_accepted < draft_depth
        return cls(1, int(draft_depth > 0), num_accepted, int(was_judged))

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


# ------------------------------------------------------------------ the trial


def watched_answer(
    model: MedusaModel, inputs: Mapping[str, Tensor], drafter: Drafter, **arguments: Any
) -> tuple[DraftRecord, DecodingStatistics]:
    """What became of the chains of ``drafter`` in the answer to ``inputs`` (B, T), each of them timed.

    ``arguments`` are those of ``model.stream``.
    """
    depths: list[int] = []
    seconds: list[float] = []
    draft_untimed = drafter.draft

    def draft(context: DraftContext) -> Draft:
        wait_for(context.root.device)
        began = time.perf_counter()
        found = draft_untimed(context)
        wait_for(context.root.device)
        seconds.append(time.perf_counter() - began)
        depths.append(found.topology.max_depth)
        return found

    drafter.draft = draft  # type: ignore[method-assign]
    statistics, record = DecodingStatistics(), DraftRecord()
    for step in model.stream(drafter=drafter, statistics=statistics, **{**inputs, **arguments}):
        for row, emitted in enumerate(step.tokens):
            if emitted and not step.is_first:
                record += DraftRecord.of_step(step.depths[row], depths[-1])
    later = zip(seconds[1:], depths[1:], strict=True)
    return record + DraftRecord(
        token_seconds=tuple(taken / depth for taken, depth in later if depth)
    ), statistics


def verification_seconds(
    model: MedusaModel, inputs: Mapping[str, Tensor], max_nodes: int = MAX_DRAFT_LENGTH + 1, rounds: int = 5
) -> list[float]:
    """[n - 1]: seconds to verify a chain of n nodes after the prompt ``inputs`` (1, T), n = 1 .. max_nodes.

    Medians of ``rounds``, after one that warms up.
    """
    sizes = sorted({1, *(size for size in NODE_COUNTS if size < max_nodes), max_nodes})
    prompt = inputs["input_ids"]
    cache = new_cache(model.runner, 1)

    def timed(size: int, question: int, repeat: int) -> tuple[int, float]:
        tokens = prompt[:, -1:].repeat(1, size)
        chain = TreeTopology.chain(size, prompt.device)
        wait_for(prompt.device)
        began = time.perf_counter()
        verify(model.runner, tokens, chain, cache)
        wait_for(prompt.device)
        return size, time.perf_counter() - began

    with torch.no_grad():
        prefill(model.runner, prompt, torch.tensor([prompt.shape[1]], device=prompt.device), cache)
        taken = take_turns(sizes, rounds + 1, timed, num_warm_ups=1)
    medians = [median(each for of, each in taken if of == size) for size in sizes]
    return np.interp(range(1, max_nodes + 1), sizes, medians).tolist()


@dataclass(frozen=True)
class Probe:
    """What a short trial of a drafter showed."""

    record: DraftRecord
    costs: StepCosts
    choice: DraftLength | None
    """None when nothing was drafted, so that one length is as good as another."""

    def as_dict(self) -> dict[str, Any]:
        """What the length was chosen from, and what is expected of it, in plain values."""
        choice = self.choice
        return {
            "draft_length": choice.draft_length if choice else None,
            "acceptance_rate": self.record.acceptance_rate,
            "drafted_share": self.record.drafted_share,
            "draft_milliseconds_per_token": 1000 * self.costs.draft_seconds,
            "verify_milliseconds": [1000 * seconds for seconds in self.costs.verify_seconds],
            "other_milliseconds": 1000 * self.costs.other_seconds,
            "predicted_tokens_per_step": choice.tokens_per_step if choice else None,
            "predicted_speedup": choice.speedup if choice else None,
        }


def probe_draft_length(
    model: MedusaModel,
    new_drafter: Callable[[], Drafter],
    prompts: Sequence[Mapping[str, Tensor]],
    verify_seconds: Sequence[float],
    max_length: int | None = None,
    **arguments: Any,
) -> Probe:
    """The length that should be fastest for chains of ``new_drafter``, from answers to ``prompts`` (1, T).

    ``verify_seconds`` comes from :func:`verification_seconds`, which warms up the base; ``max_length`` is the
    longest chain that can be drafted; ``arguments`` go to ``model.stream``.

    Raises:
        ValueError: every answer ended with its first token.
    """
    found = [watched_answer(model, inputs, new_drafter(), **arguments) for inputs in prompts]
    record = sum((each for each, _ in found), DraftRecord())
    if record.num_steps == 0:
        raise ValueError(
            "every answer ended with its first token, so no draft length can be chosen; give one"
        )
    phases = sum((each for _, each in found), DecodingStatistics()).phase_seconds
    costs = StepCosts(
        draft_seconds=median(record.token_seconds) if record.token_seconds else 0.0,
        verify_seconds=verify_seconds,
        other_seconds=(phases["accept"] + phases["commit"]) / record.num_steps,
    )
    longest = min(MAX_DRAFT_LENGTH, max_length or MAX_DRAFT_LENGTH)
    choice = best_draft_length(record, costs, longest) if record.num_drafted_steps else None
    return Probe(record, costs, choice)
