"""Watching a drafter at work: one answer with all that can be counted, and what a machine asks for a step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa.acceptance.protocol import DraftKind
from medusa.base.causal_lm import new_cache, prefill, verify
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.protocol import Draft, DraftContext, Drafter
from medusa.drafters.registry import DraftSource
from medusa.hardware import wait_for
from medusa.measurement.draft_length import (
    MAX_DRAFT_LENGTH,
    DraftLength,
    DraftRecord,
    StepCosts,
    best_draft_length,
)
from medusa.measurement.timing import Answer, take_turns
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import TreeTopology

NODE_COUNTS = (1, 2, 3, 5, 9, 13, 17)
"""Sizes that are timed; those between are interpolated."""


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

    def begin(self, num_rows: int, after: Drafter | None = None) -> None:
        self.drafter.begin(num_rows, after)

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

    def step_record(self, depths: Sequence[int]) -> DraftRecord:
        """One row's step with the latest draft, which emitted tokens of these ``depths``."""
        return step_record(depths, self.depths[-1], self.node_counts[-1])

    @property
    def token_seconds(self) -> tuple[float, ...]:
        """Seconds per depth of each draft but the first, which has the prompt to catch up with."""
        drafts = zip(self.seconds[1:], self.depths[1:], strict=True)
        return tuple(seconds / depth for seconds, depth in drafts if depth)


def watched_answer(
    model: MedusaModel,
    inputs: Mapping[str, Tensor],
    drafter: Drafter,
    *,
    contender: str = "",
    question: int = 0,
    category: str = "",
    **arguments: Any,
) -> Answer:
    """The answer to ``inputs`` (B, T) with its drafts counted; ``arguments`` as for ``model.stream``."""
    watched, counted, record = WatchedDrafter(drafter), DecodingStatistics(), DraftRecord()
    tokens: list[list[int]] = [[] for _ in range(len(inputs["input_ids"]))]
    wait_for(model.device)
    began = time.perf_counter()
    for step in model.stream(drafter=watched, statistics=counted, **{**inputs, **arguments}):
        for row, emitted in enumerate(step.tokens):
            tokens[row] += emitted
            if emitted and not step.is_first:
                record += watched.step_record(step.depths[row])
    seconds = time.perf_counter() - began
    return Answer(
        contender=contender,
        question=question,
        tokens=tuple(map(tuple, tokens)),
        seconds=seconds,
        statistics=counted,
        category=category,
        seed=arguments.get("seed", 0),
        drafts=record + DraftRecord(token_seconds=watched.token_seconds),
    )


def step_record(depths: Sequence[int], draft_depth: int, num_nodes: int | None = None) -> DraftRecord:
    """One step of a draft of ``draft_depth`` (a chain without ``num_nodes``) that emitted these ``depths``.

    A step whose last token is a guess was cut by the end of the answer: what followed was never judged.
    """
    num_nodes = draft_depth + 1 if num_nodes is None else num_nodes
    num_accepted = sum(depth > 0 for depth in depths)
    was_judged = depths[-1] == 0 and num_accepted < draft_depth
    branches = num_nodes != draft_depth + 1
    return DraftRecord(1, int(draft_depth > 0), num_accepted, int(was_judged), num_nodes, int(branches))


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
    return interpolated({size: median(each for of, each in taken if of == size) for size in sizes})


def interpolated(seconds: Mapping[int, float]) -> list[float]:
    """[n - 1] for n = 1 to the largest key, straight lines between the keys, of which 1 is one."""
    sizes = sorted(seconds)
    every_size = range(1, sizes[-1] + 1)
    return np.interp(every_size, sizes, [seconds[size] for size in sizes]).tolist()


@dataclass(frozen=True)
class Probe:
    """What a short trial of a drafter showed."""

    record: DraftRecord
    costs: StepCosts
    choice: DraftLength | None
    """None when nothing was drafted, so that one length is as good as another."""


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
    record = sum((answer.drafts for answer in answers if answer.drafts), DraftRecord())
    if record.num_steps == 0:
        raise ValueError(
            "every answer ended with its first token, so no draft length can be chosen; give one"
        )
    phases = [answer.statistics.phase_seconds for answer in answers if answer.statistics]
    costs = StepCosts(
        draft_seconds=median(record.token_seconds) if record.token_seconds else 0.0,
        verify_seconds=verify_seconds,
        other_seconds=sum(phase["accept"] + phase["commit"] for phase in phases) / record.num_steps,
    )
    longest = min(MAX_DRAFT_LENGTH, source.max_length or MAX_DRAFT_LENGTH)
    choice = best_draft_length(record, costs, longest) if record.num_drafted_steps else None
    return Probe(record, costs, choice)
