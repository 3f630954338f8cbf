"""One set of heads: how live decoding went, and how often each head was right."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import medusa
from medusa.decoding.statistics import DecodingStatistics
from medusa.heads.checkpoint import OWN_HEADS, weights_digest
from medusa.measurement.comparison import known_rates
from medusa.measurement.report import Report
from medusa.model import MedusaModel
from medusa.plots import BLUE, INK, ORANGE, SHADES, beside, figure_of, percent_axis, shade
from medusa.tables import PERCENT, Column
from medusa.trees.rank_counts import RankCounts

TOP_KS = (1, 2, 3, 5, 10)


class Evaluated(NamedTuple):
    """What one prompt showed."""

    category: str
    statistics: DecodingStatistics
    counts: RankCounts


def evaluation_report(
    evaluated: Sequence[Evaluated], others: Mapping[float, Sequence[DecodingStatistics]]
) -> dict[str, Any]:
    """The JSON object of ``medusa evaluate``.

    ``others`` are the same prompts at other temperatures; their ``share`` is in the tokens per step of the
    first.
    """
    counts = reduce(add, (item.counts for item in evaluated))
    here = summary([item.statistics for item in evaluated])
    also_at = [{"temperature": temperature, **summary(each)} for temperature, each in others.items()]
    for entry in also_at:
        entry["share"] = entry["tokens_per_step"] / here["tokens_per_step"]
    return {
        **here,
        **({"also_at": also_at} if also_at else {}),
        "head_accuracy": {f"top{k}": known_rates(counts, k) for k in TOP_KS},
        "by_category": {
            category: summary([item.statistics for item in evaluated if item.category == category])
            for category in sorted({item.category for item in evaluated})
        },
    }


def made_by(model: MedusaModel, source: str, answers: Mapping[str, Any]) -> dict[str, Any]:
    """How an evaluation was made, and of which heads, for its report: ``made``.

    Args:
        source: what the heads were called; their files are read again.
        answers: ``temperature``, ``max_new_tokens``, ``seed`` and ``drafter``.
    """
    program, *words = sys.orig_argv
    runtime = model.runtime
    return {
        "command": shlex.join([Path(program).name, *words]),
        "date": datetime.now(UTC).date().isoformat(),
        "medusa_version": medusa.__version__,
        "heads": source,
        "heads_sha256": None if source == OWN_HEADS else weights_digest(source),  # the base's own files
        "base": model.base.name_or_path,
        "device": runtime.device,
        "dtype": runtime.dtype,
        "engine": runtime.engine,
        "tree_nodes": model.tree.num_nodes,
        **answers,
    }


def summary(statistics: Sequence[DecodingStatistics]) -> dict[str, Any]:
    """Live decoding of some prompts, summed up."""
    total = sum(statistics, DecodingStatistics())
    return {
        "tokens_per_step": total.tokens_per_step,
        "acceptance_rate": total.acceptance_rate,
        "conditional_acceptance_rate": total.conditional_acceptance_rate,
        "num_prompts": len(statistics),
        "num_tokens": total.num_tokens,
    }


def add_tables(report: Report, temperature: float) -> None:
    """Acceptance and accuracy by depth, live decoding by category, and by temperature where asked for."""
    values = report.values
    accepted, reached = values["acceptance_rate"], values["conditional_acceptance_rate"]
    accuracies = values["head_accuracy"]
    columns: dict[str, Column] = {
        "depth": (lambda head: head + 1, "{}"),
        "accepted": (lambda head: accepted[head] if head < len(accepted) else None, PERCENT),
        "reached": (lambda head: reached[head] if head < len(accepted) else None, PERCENT),
    }
    for k in TOP_KS:
        columns[f"top {k}"] = (lambda head, k=k: accuracies[f"top{k}"][head], PERCENT)
    note = (
        "accepted: in live decoding, of all steps; reached: of the steps that accepted the depth before. "
        "top k: the true token is among the head's k best guesses (teacher-forced)."
    )
    report.add_table("Heads", columns, range(len(accuracies["top1"])), note=note)

    columns = {
        "category": (0, "{}"),
        "prompts": (lambda row: row[1]["num_prompts"], "{}"),
        "tokens": (lambda row: row[1]["num_tokens"], "{}"),
        "tok/step": (lambda row: row[1]["tokens_per_step"], "{:.2f}"),
    }
    for depth in range(len(accepted)):
        columns[f"depth {depth + 1}"] = (
            lambda row, depth=depth: [*row[1]["acceptance_rate"], *[0.0] * len(accepted)][depth],
            PERCENT,
        )
    rows = [*values["by_category"].items(), ("all", values)]
    report.add_table("Live decoding", columns, rows, styles={len(rows) - 1: "bold"})

    if "also_at" in values:
        columns = {
            "temperature": ("temperature", "{:g}"),
            "tokens": ("num_tokens", "{}"),
            "tok/step": ("tokens_per_step", "{:.2f}"),
            "share": ("share", PERCENT),
        }
        first = {**values, "temperature": temperature, "share": 1.0}
        report.add_table("Live decoding by temperature", columns, [first, *values["also_at"]])


def plot_evaluation(report: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw an evaluation: acceptance by depth, accuracy by head and k, and tokens per step by category."""
    categories = report["by_category"]
    has_categories = len(categories) > 1
    widths = [1.0, 1.25, 1.0] if has_categories else [1.0, 1.25]
    with figure_of(path, title, widths) as axes:
        _plot_acceptance(axes[0], report)
        _plot_accuracy(axes[1], report["head_accuracy"])
        if has_categories:
            _plot_categories(axes[2], report["tokens_per_step"], categories)


def _plot_acceptance(ax: Any, report: Mapping[str, Any]) -> None:
    """Both rates as bars, which leave room for their numbers above."""
    in_any_step, once_reached = report["acceptance_rate"], report["conditional_acceptance_rate"]
    depths = range(1, len(in_any_step) + 1)
    _plot_bars(ax, {"once its parent is accepted": once_reached, "in any step": in_any_step}, (ORANGE, BLUE))
    ax.set_title(f"Accepted by depth: {report['tokens_per_step']:.2f} tokens per step")
    ax.set_xlabel("depth of the guess")
    percent_axis(ax, depths, max([*in_any_step, *once_reached], default=1.0))


def _plot_accuracy(ax: Any, accuracy: Mapping[str, Sequence[float | None]]) -> None:
    series = {
        name.replace("top", "top "): [rate or 0.0 for rate in rates] for name, rates in accuracy.items()
    }
    _plot_bars(ax, series, [shade(i) for i in range(len(series))])
    ax.set_title("The true token is among a head's k best")
    ax.set_xlabel("head")
    rates = list(series.values())
    percent_axis(ax, range(1, len(rates[0]) + 1), max(map(max, rates)))


def _plot_bars(ax: Any, series: Mapping[str, Sequence[float]], colors: Sequence[str]) -> None:
    """Groups of bars at 1, 2, ...: one bar of each series, with its percent above."""
    width = 0.8 / len(series)
    for i, ((name, rates), color) in enumerate(zip(series.items(), colors, strict=True)):
        places = [at + (i - (len(series) - 1) / 2) * width for at in range(1, len(rates) + 1)]
        ax.bar(places, rates, width * 0.92, color=color, label=name)
        for place, rate in zip(places, rates, strict=True):
            note = beside(INK, ha="center", fontsize=7.5)
            ax.annotate(f"{100 * rate:.0f}", (place, rate), (0, 2), **note)
    ax.legend(ncols=len(series), loc="upper center", columnspacing=0.9, handlelength=0.9)


def _plot_categories(ax: Any, overall: float, categories: Mapping[str, Mapping[str, Any]]) -> None:
    ordered = sorted(categories.items(), key=lambda item: item[1]["tokens_per_step"])
    values = [entry["tokens_per_step"] for _, entry in ordered]
    names = [name for name, _ in ordered]
    ax.barh(names, [value - 1 for value in values], left=1, height=0.65, color=SHADES[2])
    ax.axvline(overall, color=INK, linewidth=1, linestyle=":", zorder=0.5)
    for place, value in enumerate(values):
        text = ax.annotate(f"{value:.2f}", (value, place), (4, 0), **beside(INK, ha="left", va="center"))
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    ax.grid(False)
    ax.set_xlim(1, 1 + (max(values) - 1) * 1.2 + 0.05)
    ax.set_title("Tokens per step by category")
    ax.set_xlabel("1 is plain decoding; dotted: all prompts")
