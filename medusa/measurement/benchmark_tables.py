"""The tables that a benchmark prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from medusa.decoding.statistics import PHASES
from medusa.measurement.contenders import HEADS


def print_tables(report: Mapping[str, Any], console: Console) -> None:
    """Every setting: speed of each contender, where a step's time goes, and who said the same."""
    for setting in report["by_setting"]:
        console.print(speed_table(setting))
        console.print(agreement(setting), style="bold red" if setting["identical"] is False else "green")
        console.print()
    first = report["by_setting"][0]
    console.print(split_table(report["by_setting"]))
    if len(first["by_category"]) > 1 and HEADS in first["milliseconds_per_token"]:
        console.print(category_table(first))
    for name, reason in report["skipped"].items():
        console.print(f"{name} did not take part: {reason}", style="yellow", markup=False)
    rates = report["device_rates"]
    console.print(
        f"measured on {report['device']} in {report['dtype']}: {rates['bytes_per_second'] / 1e9:.1f} GB/s "
        f"read, {rates['operations_per_second'] / 1e9:.0f} GFLOP/s multiplied",
        style="dim",
    )


def in_words(setting: Mapping[str, Any]) -> str:
    """Which setting it is."""
    rows = "1 row" if setting["batch_size"] == 1 else f"{setting['batch_size']} rows"
    return f"{rows}, prompts of {setting['num_prompt_tokens']:.0f} tokens"


def speed_table(setting: Mapping[str, Any]) -> Table:
    """How fast each contender was."""
    table = Table(title=f"Speed, {in_words(setting)}, medians", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for name in ("ms/token", "tokens/s", "against plain", "ms/step", "tokens/step", "same tokens"):
        table.add_column(name, justify="right")
    for name, milliseconds in setting["milliseconds_per_token"].items():
        same = setting["same_as_plain"].get(name)
        table.add_row(
            name,
            f"{milliseconds:.1f}",
            f"{1000 / milliseconds:.1f}",
            times(setting["speedup_over_plain"][name]),
            number(setting["milliseconds_per_step"].get(name), ".1f"),
            number(setting["tokens_per_step_of"].get(name), ".2f"),
            "-" if same is None else f"{same['num_tokens']} of {same['of_tokens']}",
        )
    return table


def split_table(settings: list[Mapping[str, Any]]) -> Table:
    """Milliseconds of a step by phase, and how close the step is to what the device allows."""
    table = Table(title="Where a step's time goes, ms", title_justify="left")
    for name in ("setting", "contender"):
        table.add_column(name, no_wrap=True)
    for name in ("nodes", *PHASES, "around verify", "f_hw", "f_tree"):
        table.add_column(name, justify="right")
    for setting in settings:
        for name, split in setting["step_milliseconds"].items():
            table.add_row(
                in_words(setting),
                name,
                number(setting["num_nodes"].get(name), "d"),
                *(number(split[phase], ".1f") for phase in PHASES),
                share_around_verify(split),
                number(setting["f_hw"].get(name), ".2f"),
                number(setting["f_tree"] if name == HEADS else None, ".2f"),
            )
    return table


def category_table(setting: Mapping[str, Any]) -> Table:
    """What the heads gain, category by category."""
    table = Table(title="Heads, by category", title_justify="left")
    table.add_column("category")
    for name in ("tokens per step", "overhead", "against plain", "against transformers"):
        table.add_column(name, justify="right")
    for category, entry in setting["by_category"].items():
        table.add_row(category, *_gains(entry))
    table.add_section()
    table.add_row("all", *_gains(setting), style="bold")
    return table


def agreement(setting: Mapping[str, Any]) -> str:
    """Who said the same, or how far they strayed where the precision promises nothing."""
    names, count = ", ".join(setting["compared"]), setting["num_prompts"]
    counted = f"{setting['num_identical']} of {count} answers token-identical among {names}"
    if setting["identical"] is not None:
        return counted
    rates = ", ".join(
        f"{name} {100 * entry['rate']:.2f} % (largest gap {entry['largest_gap']:.3f})"
        for name, entry in setting["divergence"].items()
    )
    promise = "which this precision does not promise; tokens that are not the base's likeliest"
    return f"{counted}, {promise}: {rates or 'not measured'}"


def share_around_verify(split: Mapping[str, float | None]) -> str:
    """The share of a step that is not the base's forward pass."""
    known = {phase: value for phase, value in split.items() if value is not None}
    total = sum(known.values())
    return f"{100 * (1 - known['verify'] / total):.0f} %" if total else "-"


def number(value: float | None, form: str) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def times(value: float | None) -> str:
    """A speed-up, or a dash where there is none."""
    return "-" if value is None else f"{value:.2f}x"


def _gains(entry: Mapping[str, Any]) -> list[str]:
    return [
        number(entry["tokens_per_step"], ".2f"),
        number(entry["overhead"], ".2f"),
        times(entry["speedup_vs_plain"]),
        times(entry["speedup_vs_transformers"]),
    ]
