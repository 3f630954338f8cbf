"""Sets of heads against each other, on the very same answers.

The base decides the answer, whatever heads guess, so all are judged on the same tokens, their trees are
chosen on other answers, and differences are taken answer by answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from medusa.console import PERCENT, Column, track
from medusa.heads.calibration import AnsweredTokens, calibrate_each
from medusa.heads.checkpoint import HeadsCheckpoint
from medusa.heads.protocol import Heads
from medusa.measurement.report import Report
from medusa.measurement.systems import heads_drafter, heads_without_adapter
from medusa.measurement.timing import (
    Answer,
    by_system,
    step_seconds,
    step_split,
    take_turns,
    tokens_per_step_ratio,
)
from medusa.model import MedusaModel
from medusa.plots import INK, beside, figure_of, heat_map, name_rows, shade, short_name
from medusa.trees.candidate_tree import CandidateTree
from medusa.trees.rank_counts import RankCounts

COMPARED_SIZES = (8, 16, 64)
"""Nodes of trees, root included."""
TIMED_TOKENS = 24
"""Length of the answers whose steps are timed."""


@dataclass(frozen=True)
class NamedHeads:
    """One set of heads, and its label."""

    label: str
    source: str
    checkpoint: HeadsCheckpoint


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
        named[label] = NamedHeads(label, source, heads_without_adapter(source))
    return list(named.values())


def split_label(text: str) -> tuple[str, str]:
    """(label, heads) of ``LABEL=HEADS``; without a label the name of the directory, or of the run."""
    label, equals, source = text.rpartition("=")
    if equals:
        return label, source
    return short_name(source), source


def ranked(
    model: MedusaModel,
    sets: Sequence[Heads],
    rows: Sequence[AnsweredTokens],
    max_rank: int,
    rows_per_pass: int = 1,
) -> list[RankCounts]:
    """The ranks of the tokens of ``rows`` for each set of heads, counted with a progress bar.

    The base reads the rows once, ``rows_per_pass`` together.
    """
    batches = [rows[start : start + rows_per_pass] for start in range(0, len(rows), rows_per_pass)]
    counts_by_batch = [
        calibrate_each(model.base, sets, batch, max_rank=max_rank) for batch in track(batches, "ranking")
    ]
    return [reduce(add, each) for each in zip(*counts_by_batch, strict=True)]


def measured_steps(
    model: MedusaModel,
    compared: Sequence[NamedHeads],
    counts: Sequence[RankCounts],
    num_nodes: int,
    prompts: Sequence[Mapping[str, Any]],
    label: str | None = None,
) -> dict[str, list[Answer]]:
    """Answers of each set of heads with its best tree of ``num_nodes``, by label: how long do steps take?

    Each of ``prompts`` (``input_ids`` and ``attention_mask`` (1, T)) is a round; the first only warms up.
    ``label`` shows progress under it.

    Raises:
        ValueError: no answer after the first lasted a step.
    """
    drafters = {
        each.label: heads_drafter(model, each.checkpoint.heads, count.best_tree(num_nodes))
        for each, count in zip(compared, counts, strict=True)
    }

    def run(name: str, question: int, repeat: int) -> Answer:
        output: Any = model.generate(
            **prompts[question],
            drafter=drafters[name],
            max_new_tokens=TIMED_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
        )
        return Answer(name, question, (), 0.0, output.statistics)

    answers = by_system(take_turns(list(drafters), len(prompts), run, num_warm_ups=1, label=label))
    if not answers or any(step_seconds(each) is None for each in answers.values()):
        raise ValueError("no answer after the first lasted a step; give more prompts, with longer answers")
    return answers


def comparison_report(
    compared: Sequence[NamedHeads],
    counts: Sequence[RankCounts],
    sizes: Sequence[int],
    timed: Mapping[str, Sequence[Answer]],
) -> list[dict[str, Any]]:
    """One JSON object a set of heads; the first set is the baseline.

    ``timed`` is what :func:`measured_steps` found, or empty.
    """
    replayed = [{size: each.held_out_replay(size) for size in sizes} for each in counts]
    return [
        {
            "label": each.label,
            "heads": each.source,
            "num_heads": each.checkpoint.heads.num_heads,
            "num_parameters": sum(part.numel() for part in each.checkpoint.heads.parameters()),
            "top1": known_rates(count, 1),
            "top5": known_rates(count, min(5, count.max_rank)),
            "chain_tokens_per_step": in_a_chain(count),
            "tokens_per_step": {str(size): tokens_per_step(own[size]) for size in sizes},
            "against_first": {str(size): against(own[size], replayed[0][size]) for size in sizes},
            **step_milliseconds(timed.get(each.label)),
            **training_cost(each.checkpoint.provenance),
        }
        for each, count, own in zip(compared, counts, replayed, strict=True)
    ]


def known_rates(counts: RankCounts, k: int) -> list[float | None]:
    """Top-k accuracy by head; None, for JSON, where a head never had a token to guess."""
    return [None if math.isnan(rate) else rate for rate in counts.top_k_accuracy(k)]


def step_milliseconds(answers: Sequence[Answer] | None) -> dict[str, float | None]:
    """Medians of drafting and of whole steps; None where nothing was timed."""
    seconds = step_seconds(answers) if answers else None
    if not answers or seconds is None:
        return {"draft_milliseconds": None, "step_milliseconds": None}
    return {"draft_milliseconds": step_split(answers)["draft"], "step_milliseconds": 1000 * seconds}


def tokens_per_step(replayed: np.ndarray) -> dict[str, Any]:
    """Tokens per step of steps and tokens (A, 2), with a 95 % interval: a bootstrap over answers."""
    return against(replayed, replayed[:, [1, 1]])  # plain decoding takes a step for each of these tokens


def in_a_chain(counts: RankCounts) -> dict[str, Any]:
    """Tokens per step of each head's best guess and nothing else, as most other engines verify them."""
    return tokens_per_step(np.array(counts.replay(CandidateTree.chain(counts.num_heads))))


def against(replayed: np.ndarray, baseline: np.ndarray) -> dict[str, Any]:
    """Ratio of the tokens per step of two replays (A, 2) of the same answers, with a 95 % interval."""
    counts = np.concatenate([replayed, baseline], axis=1)
    ratio = tokens_per_step_ratio(counts[counts[:, 0] > 0])
    return {"value": ratio["ratio"], "low": ratio["low"], "high": ratio["high"]}


def training_cost(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The training record of a heads directory; None without one."""
    training = provenance.get("training", {})
    seconds = training.get("minutes")
    steps = training.get("steps")
    per_step = training.get("seconds_per_step")
    if per_step is None and seconds is not None and steps:
        per_step = 60 * seconds / steps
    return {
        "training_tokens": training.get("tokens"),
        "training_milliseconds_per_step": None if per_step is None else 1000 * per_step,
    }


# ------------------------------------------------------------------ table and picture


def add_table(report: Report) -> None:
    """One row a set of heads; the report's values are the JSON object of the comparison."""
    values = report.values
    sizes = list(values["heads"][0]["tokens_per_step"])
    columns: dict[str, Column] = {
        "heads": ("label", "{}"),
        "size": (lambda row: row["num_parameters"] / 1e6, "{:.1f} M"),
    }
    for head in range(max(len(row["top1"]) for row in values["heads"])):
        columns[f"head {head + 1}"] = (
            lambda row, head=head: row["top1"][head] if head < len(row["top1"]) else None,
            PERCENT,
        )
    columns["chain"] = (lambda row: row["chain_tokens_per_step"]["value"], "{:.3f}")
    for size in sizes:
        columns[f"N={size}"] = (lambda row, size=size: row["tokens_per_step"][size]["value"], "{:.3f}")

    def ratio(*keys: str) -> Callable[[Any], list[float | None]]:
        return lambda row: [row["against_first"][sizes[-1]][key] for key in keys]

    columns |= {
        "ratio": (ratio("value"), "{:.3f}"),
        "95 %": (ratio("low", "high"), "{:.3f} to {:.3f}"),
        "draft": ("draft_milliseconds", "{:.4g}"),
        "step": ("step_milliseconds", "{:.4g}"),
        "training": ("training_milliseconds_per_step", "{:.4g}"),
    }
    report.add_table(
        f"Heads on {values['num_answers']} answers, {values['num_tokens']} tokens",
        columns,
        values["heads"],
        note="size: parameters. head d: its first guess is right. chain: tokens per step of first guesses "
        f"alone, N: number of nodes; ratio: N={sizes[-1]} over that of {values['against']}. draft, step: "
        f"ms of decoding with {values['step_nodes']} nodes; training: ms of an optimisation step, as "
        "recorded.",
    )


def plot_heads(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw sets of heads, one row each: tokens per step by tree size, then how often each head is right.

    ``rows`` are the ``heads`` of the report.
    """
    height = 1.6 + 0.36 * max(4, len(rows))
    with figure_of(path, title, [1.6, 1.0], height, grid_axis="x") as (left, right):
        _plot_tokens_per_step(left, rows)
        heat_map(right, [row["top1"] for row in rows], "First guess right, % by head", ".1f")
        right.set_xlabel("head")
        name_rows((left, right), [row["label"] for row in rows])


def _plot_tokens_per_step(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    sizes = list(rows[0]["tokens_per_step"])
    highest = 1.0
    for i, size in enumerate(reversed(sizes)):
        estimates = [row["tokens_per_step"][size] for row in rows]
        color = shade(i + 1)
        ax.plot(
            [estimate["value"] for estimate in estimates],
            range(len(rows)),
            "o",
            color=color,
            label=f"{size} nodes",
        )
        for place, estimate in enumerate(estimates):
            low = estimate["low"] or estimate["value"]
            high = estimate["high"] or estimate["value"]
            ax.plot([low, high], [place, place], color=color, linewidth=1.2)
            highest = max(highest, high)
            if i == 0:
                ax.annotate(
                    f"{estimate['value']:.2f}", (high, place), (5, 0), **beside(INK, ha="left", va="center")
                )
    ax.set_xlim(1, 1 + (highest - 1) * 1.15 + 0.02)
    ax.set_title("Tokens per step")
    ax.set_xlabel("1 is plain decoding; trees chosen on other answers; lines: 95 % intervals")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(sizes), borderaxespad=0.2)
