"""Sets of heads against each other, on the very same answers.

The base decides what an answer is, whatever heads guess, so all are asked about the same tokens, the trees of
each are chosen on answers they are not judged on, and a difference is taken answer by answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.heads import drafter_of_heads
from medusa.heads.checkpoint import HeadsCheckpoint, load_heads
from medusa.measurement.comparison import bootstrapped_ratio
from medusa.model import MedusaModel
from medusa.trees.rank_counts import RankCounts

NUM_NODES = (8, 16, 64)


@dataclass(frozen=True)
class NamedHeads:
    """One set of heads, and what a table calls it."""

    label: str
    source: str
    checkpoint: HeadsCheckpoint


@dataclass(frozen=True)
class StepTimes:
    """Medians over answers, in seconds."""

    draft: float
    whole: float


def read_named(texts: Iterable[str]) -> list[NamedHeads]:
    """The heads that texts of the form ``HEADS`` or ``LABEL=HEADS`` name, in that order.

    Raises:
        ValueError: two have one label, or heads came with an adapter: their base gives other answers.
    """
    named: dict[str, NamedHeads] = {}
    for text in texts:
        label, source = split_label(text)
        if label in named:
            raise ValueError(
                f"two sets of heads are called {label!r}: {named[label].source} and {source}; give them "
                "other labels, as in LABEL=HEADS"
            )
        checkpoint = load_heads(source)
        if checkpoint.adapter is not None:
            raise ValueError(
                f"{source} was trained with an adapter, whose base gives other answers, so it cannot be "
                "compared on these; use inference/evaluate_heads.py for each"
            )
        named[label] = NamedHeads(label, source, checkpoint)
    return list(named.values())


def split_label(text: str) -> tuple[str, str]:
    """(label, heads) of ``LABEL=HEADS``; heads alone are called after their directory, or their run's."""
    label, equals, source = text.rpartition("=")
    if equals:
        return label, source
    path = Path(source)
    return (path.parent.name if path.name == "heads" and path.parent.name else path.name), source


def measured_steps(
    model: MedusaModel,
    compared: Sequence[NamedHeads],
    counts: Sequence[RankCounts],
    num_nodes: int,
    prompts: Iterable[Mapping[str, Any]],
    max_new_tokens: int = 24,
) -> dict[str, StepTimes]:
    """How long a decode step takes with the best tree of ``num_nodes`` of each set of heads, by label.

    Each of ``prompts`` (``input_ids`` and ``attention_mask`` (1, T)) is a round in which every set answers,
    in an order that rotates, so that a machine that slows down does so for all. The first round warms up.

    Raises:
        ValueError: no answer after the first lasted a step.
    """
    drafters = [
        drafter_of_heads(each.checkpoint.heads, model.runner, count.best_tree(num_nodes))
        for each, count in zip(compared, counts, strict=True)
    ]
    taken: dict[str, list[DecodingStatistics]] = {each.label: [] for each in compared}
    for number, inputs in enumerate(prompts):
        for turn in range(len(compared)):
            which = (number + turn) % len(compared)
            output: Any = model.generate(
                **inputs,
                drafter=drafters[which],
                max_new_tokens=max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
            )
            if number and output.statistics.num_passes:
                taken[compared[which].label].append(output.statistics)
    if not all(taken.values()):
        raise ValueError("no answer after the first lasted a step; give more prompts, with longer answers")
    return {label: _medians(each) for label, each in taken.items()}


def comparison_report(
    compared: Sequence[NamedHeads],
    counts: Sequence[RankCounts],
    sizes: Sequence[int],
    step_times: Mapping[str, StepTimes],
) -> list[dict[str, Any]]:
    """One JSON object a set of heads; the first set is what the others are held against."""
    replayed = [{size: each.held_out_replay(size) for size in sizes} for each in counts]
    return [
        {
            "label": each.label,
            "heads": each.source,
            "num_heads": each.checkpoint.heads.num_heads,
            "num_parameters": sum(part.numel() for part in each.checkpoint.heads.parameters()),
            "top1": [_known(rate) for rate in count.top_k_accuracy(1)],
            "top5": [_known(rate) for rate in count.top_k_accuracy(min(5, count.max_rank))],
            "tokens_per_step": {str(size): tokens_per_step(own[size]) for size in sizes},
            "against_first": {str(size): against(own[size], replayed[0][size]) for size in sizes},
            "draft_milliseconds": _milliseconds(step_times, each.label, "draft"),
            "step_milliseconds": _milliseconds(step_times, each.label, "whole"),
            **training_cost(each.checkpoint.provenance),
        }
        for each, count, own in zip(compared, counts, replayed, strict=True)
    ]


def tokens_per_step(replayed: np.ndarray) -> dict[str, Any]:
    """Tokens per step of steps and tokens (A, 2), with a 95 % interval: a bootstrap over answers."""
    return against(replayed, replayed[:, [1, 1]])  # plain decoding takes a step for each of these tokens


def against(replayed: np.ndarray, baseline: np.ndarray) -> dict[str, Any]:
    """Ratio of the tokens per step of two replays (A, 2) of the same answers, with a 95 % interval."""
    counts = np.concatenate([replayed, baseline], axis=1).astype(float)
    ratio = bootstrapped_ratio(counts[counts[:, 0] > 0])
    return {"value": ratio["ratio"], "low": ratio["low"], "high": ratio["high"]}


def training_cost(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a heads directory says about how it was trained; None where it does not."""
    training = provenance.get("training", {})
    seconds, steps = training.get("minutes"), training.get("steps")
    per_step = training.get("seconds_per_step")
    if per_step is None and seconds is not None and steps:
        per_step = 60 * seconds / steps
    return {
        "training_tokens": training.get("tokens"),
        "training_milliseconds_per_step": None if per_step is None else 1000 * per_step,
    }


def _medians(measured: Sequence[DecodingStatistics]) -> StepTimes:
    return StepTimes(
        statistics.median(each.phase_seconds["draft"] / each.num_passes for each in measured),
        statistics.median(each.decode_seconds / each.num_passes for each in measured),
    )


def _milliseconds(step_times: Mapping[str, StepTimes], label: str, part: str) -> float | None:
    return 1000 * getattr(step_times[label], part) if label in step_times else None


def _known(rate: float) -> float | None:
    """JSON has no NaN: a head that never had a token to guess has no accuracy."""
    return None if math.isnan(rate) else rate
