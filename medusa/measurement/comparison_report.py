"""A comparison of drafters as JSON values and as tables to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from medusa.measurement.comparison import PLAIN, UNCONDITIONAL_RULES, Pairing, Trial, paired_ratio, summary
from medusa.measurement.draft_length import Probe


def pairing_report(pair: Pairing, by_key: Mapping[tuple[str, str], Sequence[Trial]]) -> dict[str, Any]:
    """One pairing: the reason why it was refused, or what it did, on all prompts and by category."""
    named = {"drafter": pair.drafter, "rule": pair.rule, "refused": pair.refusal}
    if pair.refusal is not None:
        return named
    trials, depth = by_key[pair.key], pair.make().max_depth
    by_category = {}
    for category in sorted({trial.category for trial in trials}):
        part, plain = ([t for t in by_key[key] if t.category == category] for key in (pair.key, PLAIN))
        numbers = summary(part, plain, depth)
        by_category[category] = {name: numbers[name] for name in ("tokens_per_step", "speedup_vs_plain")}
    return {**named, **summary(trials, by_key[PLAIN], depth), "by_category": by_category}


def length_report(name: str, probe: Probe) -> dict[str, Any]:
    """What a draft length was chosen from, and what is expected of it."""
    choice, verify = probe.choice, probe.costs.verify_seconds
    return {
        "drafter": name,
        "draft_length": choice.draft_length if choice else None,
        "acceptance_rate": probe.record.acceptance_rate,
        "drafted_share": probe.record.drafted_share,
        "draft_milliseconds_per_token": 1000 * probe.costs.draft_seconds,
        "verify_milliseconds": [1000 * seconds for seconds in verify],
        "other_milliseconds": 1000 * probe.costs.other_seconds,
        "predicted_tokens_per_step": choice.tokens_per_step if choice else None,
        "predicted_speedup": choice.speedup if choice else None,
    }


def ratio_reports(by_key: Mapping[tuple[str, str], Sequence[Trial]]) -> list[dict[str, Any]]:
    """Tokens per step of every rule for sampled drafts over token verification, drafter by drafter."""
    reports = []
    for (drafter, rule), trials in by_key.items():
        baseline = by_key.get((drafter, "token"))
        if trials and baseline and rule not in (*UNCONDITIONAL_RULES, "token"):
            ratio = paired_ratio(trials, baseline)
            reports.append({"drafter": drafter, "rule": rule, "against": "token", **ratio})
    return reports


def print_tables(report: Mapping[str, Any], console: Console) -> None:
    """Everything of a comparison that a person wants to read; ``report`` is the program's JSON object."""
    rows = [row for row in report["pairings"] if not row["refused"]]
    console.print(_main_table(report, rows))
    console.print(_depth_table(rows))
    if len(rows[0]["by_category"]) > 1:
        console.print(_category_table(rows))
    if report["draft_lengths"]:
        console.print(_length_table(report["draft_lengths"], rows))
    if report["ratios"]:
        console.print(_ratio_table(report["ratios"]))
    by_reason: dict[str, list[str]] = {}
    for row in report["pairings"]:
        if row["refused"]:
            by_reason.setdefault(row["refused"], []).append(f"{row['drafter']} x {row['rule']}")
    for reason, pairs in by_reason.items():
        console.print(f"refused: {', '.join(pairs)}: {reason}", markup=False)


def shape_in_words(row: Mapping[str, Any]) -> str:
    """What a pairing verifies: a chain of so many drafts, or so many nodes a step."""
    if row["draft_depth"] == 0:
        return "-"
    return f"chain {row['draft_depth']}" if row["is_chain"] else f"tree {row['nodes_per_step']:.0f}"


def _main_table(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    sampling = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    machine = f"{report['dtype']} on {report['device']}, {report['num_threads']} threads"
    table = Table(
        title=f"Drafters, {sampling}, {machine}",
        title_justify="left",
        caption="predicted: (1 - a^(g+1)) / (1 - a), with the acceptance a of the same run",
        caption_justify="left",
    )
    for name in ("drafter", "rule", "draft"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens per step", "predicted", "draft ms", "verify ms", "rest ms", "speed", "text"):
        table.add_column(name, justify="right")
    for row in rows:
        phases = row["milliseconds_per_step"]
        table.add_row(
            row["drafter"],
            row["rule"],
            shape_in_words(row),
            f"{row['tokens_per_step']:.2f}",
            _number(row["predicted_tokens_per_step"]),
            f"{phases['draft']:.1f}",
            f"{phases['verify']:.1f}",
            f"{phases['accept'] + phases['commit']:.1f}",
            f"{row['speedup_vs_plain']:.2f}x",
            row["exactness"] if row["draft_depth"] else "-",
        )
    return table


def _depth_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    deepest = max(len(row["acceptance_rate"]) for row in rows)
    table = Table(title="Accepted by depth, % of steps", title_justify="left")
    for name in ("drafter", "rule"):
        table.add_column(name)
    for depth in range(1, deepest + 1):
        table.add_column(str(depth), justify="right")
    for row in rows:
        if row["draft_depth"]:
            rates = (f"{100 * rate:.0f}" for rate in row["acceptance_rate"])
            table.add_row(row["drafter"], row["rule"], *rates)
    return table


def _category_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Tokens per step, and speed against plain, by category", title_justify="left")
    for name in ("drafter", "rule"):
        table.add_column(name)
    for category in rows[0]["by_category"]:
        table.add_column(category, justify="right")
    for row in rows:
        if row["draft_depth"]:
            cells = row["by_category"].values()
            texts = (f"{c['tokens_per_step']:.2f} {c['speedup_vs_plain']:.2f}x" for c in cells)
            table.add_row(row["drafter"], row["rule"], *texts)
    return table


def _length_table(lengths: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title="Draft lengths, chosen from measured costs",
        title_justify="left",
        caption="a: acceptance of a draft token in a short trial under the exact rule; g: the length chosen; "
        "forecast from the trial, measured afterwards under that rule; speed of decoding, prefill left out",
        caption_justify="left",
    )
    table.add_column("drafter", no_wrap=True)
    names = ("a", "steps drafted", "draft ms/token", "verify 1 ms", "g", "verify g+1 ms")
    for name in (*names, "tokens forecast", "measured", "speed forecast", "measured"):
        table.add_column(name, justify="right")
    measured = {row["drafter"]: row for row in rows if row["rule"] == "exact"}
    for entry in lengths:
        length, row = entry["draft_length"], measured.get(entry["drafter"])
        verify = entry["verify_milliseconds"]
        table.add_row(
            entry["drafter"],
            f"{entry['acceptance_rate']:.2f}",
            f"{entry['drafted_share']:.0%}",
            f"{entry['draft_milliseconds_per_token']:.1f}",
            f"{verify[0]:.1f}",
            "default" if length is None else str(length),
            "-" if length is None else f"{verify[length]:.1f}",
            _number(entry["predicted_tokens_per_step"]),
            _number(row["tokens_per_step"] if row else None),
            _number(entry["predicted_speedup"], "x"),
            _number(row["decode_speedup_vs_plain"] if row else None, "x"),
        )
    return table


def _ratio_table(ratios: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title="Tokens per step against token verification, paired by prompt and seed",
        title_justify="left",
        caption="95 % interval: bootstrap over prompts",
        caption_justify="left",
    )
    for name in ("drafter", "rule"):
        table.add_column(name)
    for name in ("ratio", "95 % interval", "prompts", "answers"):
        table.add_column(name, justify="right")
    for row in ratios:
        interval = "one prompt" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        counts = (str(row["num_prompts"]), str(row["num_answers"]))
        table.add_row(row["drafter"], row["rule"], f"{row['ratio']:.3f}", interval, *counts)
    return table


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
