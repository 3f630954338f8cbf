"""Watching a drafter at work, and how long its chains should be on this machine.

A step with draft length g gives E[tokens] = (1 - a^(g+1)) / (1 - a) and costs g times the drafting of a token
plus the verification of g + 1 nodes (arXiv 2211.17192, sections 3.1 and 3.4). A short trial measures all of
it: the acceptance a, the drafting of a token, and the verification of every number of nodes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa.acceptance.expectation import expected_tokens
from medusa.acceptance.protocol import DraftKind
from medusa.base.causal_lm import new_cache, prefill, verify
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.protocol import Draft, DraftContext, Drafter
from medusa.drafters.registry import DraftSource
from medusa.hardware import wait_for
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import TreeTopology

MAX_DRAFT_LENGTH = 16
NODE_COUNTS = (1, 2, 3, 5, 9, 13, 17)
"""Sizes that are timed; others are interpolated."""


@dataclass(frozen=True)
class ChainRecord:
    """How the draft tokens of chains fared; ``a + b`` is the record of both."""

    num_steps: int = 0
    num_drafted_steps: int = 0
    """Steps that had a draft at all; a suffix match often has none."""
    num_accepted: int = 0
    """Draft tokens accepted."""
    num_rejected: int = 0
    """Drafted steps that ended at a rejected token, not at the end of the chain or of the answer."""

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

    def __add__(self, other: ChainRecord) -> ChainRecord:
        return ChainRecord(
            self.num_steps + other.num_steps,
            self.num_drafted_steps + other.num_drafted_steps,
            self.num_accepted + other.num_accepted,
            self.num_rejected + other.num_rejected,
        )


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
    record: ChainRecord, costs: StepCosts, max_length: int = MAX_DRAFT_LENGTH
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


class WatchedDrafter:
    """``drafter``, with the depth, size and time of each draft written down."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.context_only, self.needs_features = drafter.context_only, drafter.needs_features
        self.reads_layers = drafter.reads_layers
        self.depths: list[int] = []
        self.node_counts: list[int] = []
        self.seconds: list[float] = []

    @property
    def max_depth(self) -> int:
        return self.drafter.max_depth

    def begin(self, num_rows: int) -> None:
        self.drafter.begin(num_rows)

    def keep_rows(self, rows: Tensor) -> None:
        self.drafter.keep_rows(rows)

    def sampled_kind(self, wanted: DraftKind) -> DraftKind:
        return self.drafter.sampled_kind(wanted)

    def draft(self, context: DraftContext) -> Draft:
        wait_for(context.root.device)
        began = time.perf_counter()
        draft = self.drafter.draft(context)
        wait_for(context.root.device)
        self.seconds.append(time.perf_counter() - began)
        self.depths.append(draft.topology.max_depth)
        self.node_counts.append(draft.topology.num_nodes)
        return draft

    @property
    def token_seconds(self) -> list[float]:
        """Seconds per depth of each draft but the first, which has the prompt to catch up with."""
        drafts = zip(self.seconds[1:], self.depths[1:], strict=True)
        return [seconds / depth for seconds, depth in drafts if depth]


@dataclass(frozen=True)
class WatchedAnswer:
    """One answer to one prompt."""

    tokens: tuple[int, ...]
    """The new tokens."""
    seconds: float
    """Prefill included."""
    statistics: DecodingStatistics
    record: ChainRecord
    """Means what it says where the drafts were chains."""
    num_nodes: int
    """Nodes verified in all steps together, roots included."""
    all_chains: bool
    """Every draft was one path."""
    draft_token_seconds: list[float]


def watched_answer(
    model: MedusaModel, inputs: Mapping[str, Tensor], drafter: Drafter, **arguments: Any
) -> WatchedAnswer:
    """The answer to one prompt, ``inputs`` of shape (1, T); ``arguments`` as for ``model.stream``."""
    watched, counted, record = WatchedDrafter(drafter), DecodingStatistics(), ChainRecord()
    tokens: list[int] = []
    arguments = {**inputs, **arguments}
    wait_for(model.device)
    began = time.perf_counter()
    for step in model.stream(drafter=watched, statistics=counted, **arguments):
        tokens += step.tokens[0]
        if not step.is_first:
            record += step_record(step.depths[0], watched.depths[-1])
    seconds = time.perf_counter() - began
    return WatchedAnswer(
        tokens=tuple(tokens),
        seconds=seconds,
        statistics=counted,
        record=record,
        num_nodes=sum(watched.node_counts),
        all_chains=all(n == depth + 1 for n, depth in zip(watched.node_counts, watched.depths, strict=True)),
        draft_token_seconds=watched.token_seconds,
    )


def step_record(depths: Sequence[int], draft_depth: int) -> ChainRecord:
    """One step of a chain of ``draft_depth`` tokens that emitted tokens of these ``depths``.

    A step whose last token is a guess was cut by the end of the answer: what followed was never judged.
    """
    num_accepted = sum(depth > 0 for depth in depths)
    was_judged = depths[-1] == 0 and num_accepted < draft_depth
    return ChainRecord(1, int(draft_depth > 0), num_accepted, int(was_judged))


def verification_seconds(
    model: MedusaModel, inputs: Mapping[str, Tensor], max_nodes: int = MAX_DRAFT_LENGTH + 1, rounds: int = 5
) -> list[float]:
    """[n - 1]: seconds to verify a chain of n nodes after the prompt ``inputs`` (1, T), n = 1 .. max_nodes.

    Medians of ``rounds``, after one that warms up; all sizes take turns, so a machine that slows down does so
    for all.
    """
    sizes = sorted({1, *(size for size in NODE_COUNTS if size < max_nodes), max_nodes})
    prompt = inputs["input_ids"]
    cache = new_cache(model.runner, 1)
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    with torch.no_grad():
        prefill(model.runner, prompt, torch.tensor([prompt.shape[1]], device=prompt.device), cache)
        for number in range(rounds + 1):
            for size in sizes:
                tokens = prompt[:, -1:].repeat(1, size)
                chain = TreeTopology.chain(size, prompt.device)
                wait_for(prompt.device)
                began = time.perf_counter()
                verify(model.runner, tokens, chain, cache)
                wait_for(prompt.device)
                taken[size] += [time.perf_counter() - began] if number else []
    return interpolated({size: statistics.median(times) for size, times in taken.items()})


def interpolated(seconds: Mapping[int, float]) -> list[float]:
    """[n - 1] for n = 1 to the largest key, straight lines between the keys, of which 1 is one."""
    sizes = sorted(seconds)
    every_size = range(1, sizes[-1] + 1)
    return np.interp(every_size, sizes, [seconds[size] for size in sizes]).tolist()


@dataclass(frozen=True)
class Probe:
    """What a short trial of a drafter showed."""

    record: ChainRecord
    costs: StepCosts
    choice: DraftLength | None
    """None when nothing was drafted."""


def probe_draft_length(
    model: MedusaModel,
    source: DraftSource,
    prompts: Sequence[Mapping[str, Tensor]],
    verify_seconds: Sequence[float],
    **arguments: Any,
) -> Probe:
    """The draft length that should be fastest for chains of ``source``, from answers to ``prompts`` (1, T).

    ``verify_seconds`` comes from :func:`verification_seconds`, which warms up the base; ``arguments`` go to
    ``model.stream``.

    Raises:
        ValueError: every answer ended with its first token.
    """
    answers = [
        watched_answer(model, inputs, source.drafter(only_chain=True), **arguments) for inputs in prompts
    ]
    record = sum((answer.record for answer in answers), ChainRecord())
    if record.num_steps == 0:
        raise ValueError(
            "every answer ended with its first token, so no draft length can be chosen; give one"
        )
    drafts = [seconds for answer in answers for seconds in answer.draft_token_seconds]
    phases = [answer.statistics.phase_seconds for answer in answers]
    costs = StepCosts(
        draft_seconds=statistics.median(drafts) if drafts else 0.0,
        verify_seconds=verify_seconds,
        other_seconds=sum(phase["accept"] + phase["commit"] for phase in phases) / record.num_steps,
    )
    longest = min(MAX_DRAFT_LENGTH, source.max_length or MAX_DRAFT_LENGTH)
    return Probe(
        record, costs, best_draft_length(record, costs, longest) if record.num_drafted_steps else None
    )
