"""Drafters and acceptance rules against each other: who can be paired, and what their answers add up to.

Every answer was decoded after the same prompt with the same seed by each pair, plain decoding among them, so
pairs are compared answer by answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from medusa.acceptance.rules import rule_named
from medusa.decoding.statistics import PHASES, DecodingStatistics
from medusa.drafters.protocol import Drafter
from medusa.drafters.registry import DraftSource, UnionSource
from medusa.measurement.draft_length import DraftRecord
from medusa.measurement.timing import (
    Answer,
    rows_said,
    seconds_per_token,
    speedup,
    step_split,
    tokens_per_step_ratio,
    total_statistics,
)
from medusa.measurement.watching import Probe
from medusa.plots import BLUE, FAINT, GREEN, INK, ORANGE, SHADES, beside, figure_of, heat_map, name_rows
from medusa.tables import number, print_table, times

PLAIN = ("plain", "exact")
UNCONDITIONAL_RULES = ("exact", "typical")
"""These compare a candidate with the base alone, so any drafter will do."""
NOTHING_LEFT_OUT = {"top_k": 0, "top_p": 1.0}
"""For ``generate``: sample from all tokens, whatever the base's own configuration leaves out."""

Given = Mapping[str, Sequence[Answer]]
"""The answers of each pair, by its name."""


@dataclass(frozen=True)
class Pairing:
    """A drafter and a rule, or the reason why they do not go together."""

    drafter: str
    rule: str
    make: Callable[[], Drafter]
    """A new drafter, in the shape that the rule takes."""
    refusal: str | None = None

    @property
    def name(self) -> str:
        return pair_name(self.drafter, self.rule)


def pair_name(drafter: str, rule: str) -> str:
    """What the answers of a pair are filed under."""
    return f"{drafter} x {rule}"


def pairing(source: DraftSource | UnionSource, rule: str, is_greedy: bool) -> Pairing:
    """``source`` under ``rule``; refused when the rule would be biased, or is another one in disguise."""
    if rule in UNCONDITIONAL_RULES:
        return Pairing(source.name, rule, source.drafter)
    required = rule_named(rule)
    make = partial(source.drafter, only_chain=required.only_chains)
    if is_greedy:
        return Pairing(source.name, rule, make, "at temperature 0 it is the exact rule")
    drafter = make()
    try:
        required.require(drafter.sampled_kind(required.draft_kinds[0]), drafter.context_only)
    except ValueError as reason:
        return Pairing(source.name, rule, make, str(reason))
    return Pairing(source.name, rule, make)


# ------------------------------------------------------------------ what the answers add up to


def pairing_report(pair: Pairing, given: Given) -> dict[str, Any]:
    """One pairing: the reason why it was refused, or what it did, on all prompts and by category."""
    named = {"drafter": pair.drafter, "rule": pair.rule, "refused": pair.refusal}
    if pair.refusal is not None:
        return named
    answers, plain, depth = given[pair.name], given[pair_name(*PLAIN)], pair.make().max_depth
    by_category = {}
    for category in sorted({answer.category for answer in answers}):
        part, baseline = ([a for a in each if a.category == category] for each in (answers, plain))
        by_category[category] = {
            "tokens_per_step": total_statistics(part).tokens_per_step,
            "speedup_vs_plain": speedup(part, baseline)["ratio"],
        }
    return {**named, **summary(answers, plain, depth, pair.rule), "by_category": by_category}


def summary(
    answers: Sequence[Answer], plain: Sequence[Answer], draft_depth: int, rule: str
) -> dict[str, Any]:
    """One pairing's numbers; ``plain`` holds the plain answers to the same prompts."""
    total = total_statistics(answers)
    record = sum((answer.drafts for answer in answers if answer.drafts), DraftRecord())
    is_chain = draft_depth > 0 and not record.num_branching
    said, expected = rows_said(answers), rows_said(plain)
    num_identical = sum(expected[row] == tokens for row, tokens in said.items())
    faster = speedup(answers, plain)
    return {
        "tokens_per_step": total.tokens_per_step,
        "predicted_tokens_per_step": record.expected_tokens(draft_depth) if is_chain else None,
        "token_acceptance_rate": record.acceptance_rate if is_chain else None,
        "drafted_share": record.drafted_share,
        "draft_depth": draft_depth,
        "is_chain": is_chain,
        "nodes_per_step": record.num_nodes / max(1, record.num_steps),
        "acceptance_rate": total.acceptance_rate,
        "conditional_acceptance_rate": total.conditional_acceptance_rate,
        "milliseconds_per_step": {phase: value or 0.0 for phase, value in step_split(answers).items()},
        "milliseconds_per_token": 1000 * seconds_per_token(answers),
        "speedup_vs_plain": faster["ratio"],
        "speedup_interval": [faster["low"], faster["high"]],
        "decode_speedup_vs_plain": _decode_speedup(total, total_statistics(plain)),
        "exactness": exactness(rule, num_identical, len(said)),
        "num_identical": num_identical,
        "num_answers": len(said),
        "num_steps": total.num_steps,
        "num_tokens": total.num_tokens,
    }


def exactness(rule: str, num_identical: int, num_answers: int) -> str:
    """What may be said of the text: the very tokens of plain decoding, its law, or neither."""
    if rule == "typical":
        return "LOSSY"
    if rule != "exact":
        return "in law"
    return "identical" if num_identical == num_answers else f"{num_identical} of {num_answers}"


def _decode_speedup(total: DecodingStatistics, plain: DecodingStatistics) -> float | None:
    """Tokens a second without prefills, all answers together; None when no answer lasted a step."""
    seconds = [
        part.decode_seconds / (part.num_tokens - part.num_rows) if part.num_steps else 0.0
        for part in (total, plain)
    ]
    return seconds[1] / seconds[0] if all(seconds) else None


def paired_ratio(
    answers: Sequence[Answer], baseline: Sequence[Answer], resamples: int = 4000
) -> dict[str, Any]:
    """Tokens per step of ``answers`` over those of ``baseline``, with a 95 % confidence interval.

    Both answered the same prompts with the same seeds. The interval is a percentile bootstrap over prompts: a
    prompt is drawn with all its answers on both sides. With one prompt there is none.

    Raises:
        ValueError: the two did not answer the same prompts with the same seeds, or no answer has a step.
    """
    if rows_said(answers).keys() != rows_said(baseline).keys():
        raise ValueError("a paired ratio needs the same prompts and seeds on both sides")
    sums: dict[int, np.ndarray] = {}
    for column, side in ((0, answers), (2, baseline)):
        for answer in side:
            totals = sums.setdefault(answer.question, np.zeros(4))
            totals[column : column + 2] += answer.steps_and_tokens
    counts = np.array([totals for totals in sums.values() if totals[0] and totals[2]])
    if not len(counts):
        raise ValueError(
            "every answer ended with its first token, so no step can be compared; give other prompts"
        )
    ratio = tokens_per_step_ratio(counts, resamples)
    return {"num_prompts": len(counts), **ratio, "num_answers": len(rows_said(answers))}


def ratio_reports(pairings: Sequence[Pairing], given: Given) -> list[dict[str, Any]]:
    """Tokens per step of every rule for sampled drafts over a first one, drafter by drafter.

    That is token verification where it takes part, else the rule that was named first.
    """
    reports = []
    for drafter in dict.fromkeys(pair.drafter for pair in pairings):
        rules = [
            pair.rule
            for pair in pairings
            if pair.drafter == drafter and given.get(pair.name) and pair.rule not in UNCONDITIONAL_RULES
        ]
        against = "token" if "token" in rules else next(iter(rules), "")
        for rule in rules:
            if rule != against:
                ratio = paired_ratio(given[pair_name(drafter, rule)], given[pair_name(drafter, against)])
                reports.append({"drafter": drafter, "rule": rule, "against": against, **ratio})
    return reports


def length_report(name: str, probe: Probe) -> dict[str, Any]:
    """What a draft length was chosen from, and what is expected of it."""
    choice = probe.choice
    return {
        "drafter": name,
        "draft_length": choice.draft_length if choice else None,
        "acceptance_rate": probe.record.acceptance_rate,
        "drafted_share": probe.record.drafted_share,
        "draft_milliseconds_per_token": 1000 * probe.costs.draft_seconds,
        "verify_milliseconds": [1000 * seconds for seconds in probe.costs.verify_seconds],
        "other_milliseconds": 1000 * probe.costs.other_seconds,
        "predicted_tokens_per_step": choice.tokens_per_step if choice else None,
        "predicted_speedup": choice.speedup if choice else None,
    }


# ------------------------------------------------------------------ tables


def print_tables(report: Mapping[str, Any], console: Console) -> None:
    """Everything of a comparison that a person wants to read; ``report`` is the program's JSON object."""
    rows = [row for row in report["pairings"] if not row["refused"]]
    drafted = [row for row in rows if row["draft_depth"]]
    _print_speeds(report, rows, console)
    if drafted:
        _print_depths(drafted, console)
        if len(drafted[0]["by_category"]) > 1:
            _print_categories(drafted, console)
    if report["draft_lengths"]:
        _print_lengths(report["draft_lengths"], rows, console)
    if report["ratios"]:
        _print_ratios(report["ratios"], console)
    by_reason: dict[str, list[str]] = {}
    for row in report["pairings"]:
        if row["refused"]:
            by_reason.setdefault(row["refused"], []).append(pair_name(row["drafter"], row["rule"]))
    for reason, pairs in by_reason.items():
        console.print(f"refused: {', '.join(pairs)}: {reason}", markup=False)


def shape_in_words(row: Mapping[str, Any]) -> str:
    """What a pairing verifies: a chain of so many drafts, or so many nodes a step."""
    if row["draft_depth"] == 0:
        return "-"
    return f"chain {row['draft_depth']}" if row["is_chain"] else f"tree {row['nodes_per_step']:.0f}"


def _print_speeds(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    sampling = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    machine = f"{report['dtype']} on {report['device']}, {report['num_threads']} threads"
    headers = ["drafter", "rule", "shape", "tok/step", "expected", "draft", "verify", "rest", "x plain"]
    cells = []
    for row in rows:
        phases = row["milliseconds_per_step"]
        low, high = row["speedup_interval"]
        cells.append(
            [
                row["drafter"],
                row["rule"],
                shape_in_words(row),
                f"{row['tokens_per_step']:.2f}",
                number(row["predicted_tokens_per_step"]),
                f"{phases['draft']:.1f}",
                f"{phases['verify']:.1f}",
                f"{phases['accept'] + phases['commit']:.1f}",
                f"{row['speedup_vs_plain']:.2f}x",
                "-" if low is None or not row["draft_depth"] else f"{low:.2f} to {high:.2f}",
                row["exactness"] if row["draft_depth"] else "-",
            ]
        )
    note = (
        "draft, verify, rest: ms of a step. expected: (1 - a^(g+1)) / (1 - a), for chains of g tokens with "
        "the acceptance a of the same run."
    )
    title = f"Drafters, {sampling}, {machine}"
    print_table(console, title, [*headers, "95 %", "text"], cells, num_labels=2, note=note)


def _print_depths(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    deepest = max(len(row["acceptance_rate"]) for row in rows)
    cells = [
        [row["drafter"], row["rule"], *(f"{100 * rate:.0f}" for rate in row["acceptance_rate"])]
        for row in rows
    ]
    cells = [[*row, *[""] * deepest][: deepest + 2] for row in cells]
    headers = ["drafter", "rule", *map(str, range(1, deepest + 1))]
    print_table(console, "Accepted by depth, % of steps", headers, cells, num_labels=2)


def _print_categories(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    cells = [
        [
            row["drafter"],
            row["rule"],
            *(
                f"{c['tokens_per_step']:.2f} {c['speedup_vs_plain']:.2f}x"
                for c in row["by_category"].values()
            ),
        ]
        for row in rows
    ]
    title = "Tokens per step, and speed against plain, by category"
    print_table(console, title, ["drafter", "rule", *rows[0]["by_category"]], cells, num_labels=2)


def _print_lengths(
    lengths: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], console: Console
) -> None:
    measured = {row["drafter"]: row for row in rows if row["rule"] == "exact"}
    cells = []
    for entry in lengths:
        length, row = entry["draft_length"], measured.get(entry["drafter"], {})
        verify = entry["verify_milliseconds"]
        cells.append(
            [
                entry["drafter"],
                f"{entry['acceptance_rate']:.2f}",
                f"{entry['drafted_share']:.0%}",
                f"{entry['draft_milliseconds_per_token']:.1f}",
                f"{verify[0]:.1f}",
                "default" if length is None else str(length),
                "-" if length is None else f"{verify[length]:.1f}",
                f"{number(entry['predicted_tokens_per_step'])} / {number(row.get('tokens_per_step'))}",
                f"{times(entry['predicted_speedup'])} / {times(row.get('decode_speedup_vs_plain'))}",
            ]
        )
    headers = ["drafter", "a", "drafted", "draft", "verify 1", "g", "verify g+1", "tok/step", "speed"]
    note = (
        "From a short trial under the exact rule. a: acceptance of a draft token; drafted: steps with a "
        "draft; draft: ms per token; verify: ms of 1 and of g + 1 nodes; g: the length chosen; tok/step, "
        "speed: forecast / measured afterwards, prefill left out."
    )
    print_table(console, "Draft lengths, chosen from measured costs, ms", headers, cells, note=note)


def _print_ratios(ratios: Sequence[Mapping[str, Any]], console: Console) -> None:
    cells = [
        [
            row["drafter"],
            row["rule"],
            row["against"],
            f"{row['ratio']:.3f}",
            "one prompt" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}",
            str(row["num_prompts"]),
            str(row["num_answers"]),
        ]
        for row in ratios
    ]
    headers = ["drafter", "rule", "against", "ratio", "95 %", "prompts", "answers"]
    title = "Tokens per step of one rule over another's, paired by prompt and seed"
    note = "95 %: interval from a bootstrap over prompts."
    print_table(console, title, headers, cells, num_labels=3, note=note)


# ------------------------------------------------------------------ the picture


def plot_drafters(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw a comparison of drafters, one row each: tokens per step, step time, speed, acceptance by depth.

    ``rows`` are the measured entries of ``pairings`` of ``medusa compare-drafters``, plain first.
    """
    plain, drafted = rows[0], list(rows[1:])
    height = 1.9 + 0.42 * max(4, len(drafted))
    with figure_of(path, title, [1.0, 1.0, 0.8, 1.0], height, grid_axis="x") as axes:
        _plot_tokens_per_step(axes[0], drafted)
        _plot_step_times(axes[1], drafted, plain)
        _plot_speedups(axes[2], drafted)
        heat_map(
            axes[3], [row["acceptance_rate"] for row in drafted], "Accepted by depth, % of steps", ".0f", 1.0
        )
        axes[3].set_xlabel("depth of the guess")
        many_rules = len({row["rule"] for row in drafted}) > 1
        names = [f"{row['drafter']}\n{row['rule']}" if many_rules else row["drafter"] for row in drafted]
        name_rows(axes, names)


def _plot_tokens_per_step(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    places, values = range(len(rows)), [row["tokens_per_step"] for row in rows]
    ax.barh(places, [value - 1 for value in values], left=1, height=0.62, color=SHADES[2])
    predicted = [(row["predicted_tokens_per_step"], place) for place, row in enumerate(rows)]
    marks = [(value, place) for value, place in predicted if value is not None]
    if marks:
        ax.plot(*zip(*marks, strict=True), "|", color=ORANGE, markersize=15, markeredgewidth=2.2)
        ax.set_xlabel("1 is plain decoding; orange: predicted for a chain")
    else:
        ax.set_xlabel("1 is plain decoding")
    furthest = [max(value, mark or 0) for value, (mark, _) in zip(values, predicted, strict=True)]
    for place, value in enumerate(values):
        ax.annotate(f"{value:.2f}", (furthest[place], place), (6, 0), **beside(INK, ha="left", va="center"))
    ax.set_xlim(1, 1 + (max(furthest, default=1) - 1) * 1.25 + 0.05)
    ax.set_title("Tokens per step")


def _plot_step_times(ax: Any, rows: Sequence[Mapping[str, Any]], plain: Mapping[str, Any]) -> None:
    parts = (
        ("draft", ("draft",), ORANGE),
        ("verify", ("verify",), BLUE),
        ("rest", ("accept", "commit"), FAINT),
    )
    left = [0.0] * len(rows)
    for label, phases, color in parts:
        widths = [sum(row["milliseconds_per_step"][phase] for phase in phases) for row in rows]
        ax.barh(range(len(rows)), widths, left=left, height=0.62, color=color, label=label)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        ax.annotate(f"{total:.0f}", (total, place), (4, 0), **beside(INK, ha="left", va="center"))
    whole = sum(plain["milliseconds_per_step"][phase] for phase in PHASES)
    ax.axvline(whole, color=INK, linewidth=1, linestyle=":")
    ax.set_xlim(0, max(whole, *left) * 1.2)
    ax.set_title("Milliseconds of a step")
    ax.set_xlabel(f"dotted: plain decoding, {whole:.0f} ms")
    ax.legend(
        loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, ncols=3, columnspacing=1, handlelength=1
    )


def _plot_speedups(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    values = [row["speedup_vs_plain"] for row in rows]
    colors = [GREEN if value >= 1 else FAINT for value in values]
    ax.barh(range(len(rows)), values, height=0.62, color=colors)
    ax.axvline(1, color=INK, linewidth=1, linestyle=":", zorder=0.5)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        note = f"{value:.2f}x" + (" LOSSY" if row["rule"] == "typical" else "")
        text = ax.annotate(note, (value, place), (4, 0), **beside(INK, ha="left", va="center"))
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
    ax.set_xlim(0, max(1.0, *values) * 1.5)
    ax.set_title("Speed against plain")
    ax.set_xlabel("tokens a second; plain is 1")
