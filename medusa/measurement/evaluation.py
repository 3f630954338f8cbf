"""One set of heads: how live decoding went, and how often each head was right; and how far the next-token
distributions of quantised models are from the float32 model's, on the same tokens.

For the latter the float32 model's own greedy answers are read again (teacher forcing), so that all are judged
at the same positions. At each position KL(float32 || other) = sum over tokens of p (log p - log q), in nats,
and whether both find the same token likeliest. Reading is split into passes of ``tokens_per_pass`` tokens:
one pass corresponds to prefill, passes of one token to plain decoding.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

import medusa
from medusa.assets import name_in_reports
from medusa.base.causal_lm import CausalLM
from medusa.base.passes import cache_argument
from medusa.console import PERCENT, Column
from medusa.decoding.statistics import DecodingStatistics
from medusa.heads.calibration import AnsweredTokens
from medusa.heads.checkpoint import OWN_HEADS, weights_digest
from medusa.measurement.comparison import known_rates
from medusa.measurement.llama_cpp import MOST_LOGITS
from medusa.measurement.report import Report
from medusa.measurement.timing import with_interval
from medusa.model import MedusaModel
from medusa.plots import BLUE, INK, ORANGE, SHADES, beside, figure_of, percent_axis, shade
from medusa.trees.rank_counts import RankCounts

TOP_KS = (1, 2, 3, 5, 10)


class Evaluated(NamedTuple):
    """The results of one prompt."""

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
    first_summary = summary([item.statistics for item in evaluated])
    also_at = [{"temperature": temperature, **summary(each)} for temperature, each in others.items()]
    for entry in also_at:
        entry["share"] = entry["tokens_per_step"] / first_summary["tokens_per_step"]
    return {
        **first_summary,
        **({"also_at": also_at} if also_at else {}),
        "head_accuracy": {f"top{k}": known_rates(counts, k) for k in TOP_KS},
        "by_category": {
            category: summary([item.statistics for item in evaluated if item.category == category])
            for category in sorted({item.category for item in evaluated})
        },
    }


def made_by(model: MedusaModel, source: str, answers: Mapping[str, Any]) -> dict[str, Any]:
    """The settings and heads of an evaluation, for its report: ``made``.

    Args:
        source: the name of the heads; their files are read again.
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
        "base": name_in_reports(model.base.name_or_path),
        "device": runtime.device,
        "dtype": runtime.dtype,
        "engine": runtime.engine,
        "tree_nodes": model.tree.num_nodes,
        "tree_depth": model.tree.depth,
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
    accepted = values["acceptance_rate"]
    reached = values["conditional_acceptance_rate"]
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
    deepest = values["made"]["tree_depth"]
    if deepest < len(accuracies["top1"]):
        note += f" The tree is {deepest} deep, so deeper heads drafted nothing; --tree-nodes chooses another."
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
    in_any_step = report["acceptance_rate"]
    once_reached = report["conditional_acceptance_rate"]
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


# ------------------------------------------------------------------ an engine against float32


CLEAR_LEAD = 0.5
"""Nats by which float32's likeliest token leads where its choice is called clear."""

Reader = Callable[[Sequence[int]], Iterator[Tensor]]
"""Maps tokens to the logits (T', V) after each of them, part by part."""


def reader_of(model: CausalLM, tokens_per_pass: int | None = None) -> Reader:
    """``model``'s logits, ``tokens_per_pass`` tokens in a pass, by default a full chunk."""
    step = min(tokens_per_pass or MOST_LOGITS, MOST_LOGITS)

    @torch.no_grad()
    def read(tokens: Sequence[int]) -> Iterator[Tensor]:
        cache = DynamicCache(config=model.config)
        for part in torch.tensor([list(tokens)], device=model.device).split(step, dim=1):
            yield model(input_ids=part, use_cache=True, **{cache_argument(model): cache}).logits[0]

    return read


def distances(reference: Tensor, other: Tensor) -> Tensor:
    """(T, 3) of logits (T, V): KL(reference || other) in nats, whether both find one token likeliest, and by
    how many nats the reference's likeliest leads."""
    log_p, log_q = (logits.double().log_softmax(dim=-1) for logits in (reference, other))
    divergence = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
    best = log_p.topk(2, dim=-1)
    same = best.indices[:, 0] == log_q.argmax(dim=-1)
    return torch.stack([divergence, same, best.values[:, 0] - best.values[:, 1]], dim=-1)


def compared(
    reference: Reader, others: Mapping[str, Reader], rows: Iterable[AnsweredTokens]
) -> dict[str, list[Tensor]]:
    """[name] = :func:`distances` at the answered tokens of each row, (T, 3)."""
    distances_by_name: dict[str, list[Tensor]] = {name: [] for name in others}
    for row in rows:
        input_ids = row.token_ids[:-1]  # after the last one there is no answered token
        is_wanted = torch.tensor(row.is_label[1:])
        expected = torch.cat(list(reference(input_ids)))[is_wanted]
        for name, reader in others.items():
            logits = torch.cat(list(reader(input_ids)))[is_wanted]
            parts = zip(expected.split(MOST_LOGITS), logits.split(MOST_LOGITS), strict=True)
            distances_by_name[name].append(torch.cat([distances(*pair) for pair in parts]))
    return distances_by_name


def fidelity(rows: Sequence[Tensor]) -> dict[str, Any]:
    """The summary of the :func:`distances` of each row (T, 3); intervals are 95 % bootstraps over rows."""
    sums = np.array([[float(row[:, 0].sum()), float(row[:, 1].sum()), len(row)] for row in rows])
    kl = with_interval(sums, lambda samples: samples[..., 0].sum(-1) / samples[..., 2].sum(-1))
    same = with_interval(sums, lambda samples: samples[..., 1].sum(-1) / samples[..., 2].sum(-1))
    divergence, is_same, lead = torch.cat(list(rows)).unbind(dim=-1)
    is_clear = lead > CLEAR_LEAD
    return {
        "num_tokens": len(divergence),
        "kl": kl["ratio"],
        "kl_interval": [kl["low"], kl["high"]],
        "median_kl": float(divergence.median()),
        "kl_99th_percentile": float(divergence.quantile(0.99)),
        "same_choice": same["ratio"],
        "same_choice_interval": [same["low"], same["high"]],
        "same_clear_choice": float(is_same[is_clear].mean()) if is_clear.any() else None,
    }


def add_fidelity_table(report: Report) -> None:
    """One line an engine; the report's values are the JSON object of ``medusa evaluate --fidelity``."""
    values = report.values
    columns: dict[str, Column] = {
        "engine": ("name", "{}"),
        "KL, nats": ("kl", "{:.5f}"),
        "95 %": ("kl_interval", "{:.5f} to {:.5f}"),
        "median": ("median_kl", "{:.5f}"),
        "99th percentile": ("kl_99th_percentile", "{:.4f}"),
        "same choice": ("same_choice", PERCENT),
        "clear": ("same_clear_choice", PERCENT),
    }
    report.add_table(
        f"Distance to float32 on {values['num_answers']} answers, {values['num_tokens']} tokens",
        columns,
        [{"name": name, **found} for name, found in values["engines"].items()],
        note="KL from float32, mean over tokens. same choice: the likeliest token is float32's; clear: where "
        f"that leads by more than {CLEAR_LEAD} nats.",
    )
