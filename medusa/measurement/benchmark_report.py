"""The tables and the picture of a benchmark, made of its JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa.console import PERCENT, TIMES, Column, cell, counted
from medusa.decoding.statistics import PHASES
from medusa.measurement.benchmark import Setting, conversations
from medusa.measurement.report import Report
from medusa.measurement.systems import EXACT, HEADS, PLAIN, TYPICAL, drafter_and_rule, is_ours
from medusa.measurement.timing import Answer, by_system
from medusa.plots import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    SHADES,
    beside,
    figure_of,
    heat_map,
    name_rows,
)
from medusa.prompts import Prompt


def add_texts(
    report: Report, tokenizer: Any, prompts: Sequence[Prompt], setting: Setting, answers: Sequence[Answer]
) -> None:
    """Each prompt with plain decoding's text; of all the price, and the text where it is another."""
    answers_by_system = by_system(answers)
    texts = {name: conversations(setting, each) for name, each in answers_by_system.items()}
    for number, (_, expected) in texts[PLAIN].items():
        report.add_line(f"─── {prompts[number].messages[-1]['content']}", "bold")
        report.add_line(tokenizer.decode(expected, skip_special_tokens=True) + "\n", soft_wrap=True)
        for name, answered in texts.items():
            tokens = answered[number][1]
            first = next(
                each for each in answers_by_system[name] if number in setting.prompt_numbers(each.question)
            )
            price = f"{name}: {sum(map(len, first.tokens))} tokens in {first.seconds:.1f} s"
            if first.statistics is not None:
                price += f", {first.statistics.tokens_per_step:.2f} per step"
            report.add_line(price + ("" if tokens == expected else ", ANOTHER TEXT:"), "dim")
            if tokens != expected:
                report.add_line(tokenizer.decode(tokens, skip_special_tokens=True) + "\n", soft_wrap=True)
        report.add_line("")


def add_tables(report: Report) -> None:
    """Every setting: the speed of each system and whether texts are equal; then the phases of a step."""
    values = report.values
    for setting in values["by_setting"]:
        _add_speeds(report, setting)
    _add_splits(report, values["by_setting"])
    _add_depths(report, values["by_setting"][0]["acceptance_rate"])
    _add_categories(report, values["by_setting"][0])
    ratios = [ratio for setting in values["by_setting"] for ratio in setting["ratios"]]
    if ratios:
        _add_ratios(report, ratios)
    by_reason: dict[str, list[str]] = {}
    for name, reason in values["skipped"].items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        report.add_line(f"{', '.join(names)} did not take part: {reason}", "yellow")
    rates = values["device_rates"]
    report.add_line(
        f"measured on {values['device']} in {values['dtype']}: {rates['bytes_per_second'] / 1e9:.1f} GB/s "
        f"read, {rates['operations_per_second'] / 1e9:.0f} GFLOP/s multiplied",
        "dim",
    )


def _add_speeds(report: Report, setting: Mapping[str, Any]) -> None:
    """The speed of each system, and whether its text equals plain decoding's."""

    def of(key: str) -> Any:
        return lambda name: setting[key].get(name)

    def text(name: str) -> str:
        rule = drafter_and_rule(name)[1] if is_ours(name) else EXACT
        if rule != EXACT:
            return "LOSSY" if rule == TYPICAL else "in law"
        same = setting["same_as_plain"].get(name)
        return cell(same and same["num_tokens"] / max(1, same["of_tokens"]), PERCENT)

    report.add_table(
        f"Speed, {counted(setting['batch_size'], 'row')}, prompts of {setting['num_prompt_tokens']:.0f} "
        "tokens",
        {
            "system": (str, "{}"),
            "ms/token": (of("milliseconds_per_token"), "{:.1f}"),
            "tokens/s": (lambda name: 1000 / setting["milliseconds_per_token"][name], "{:.1f}"),
            "first": (of("milliseconds_to_first_token"), "{:.0f}"),
            "x plain": (of("speedup_over_plain"), TIMES),
            "ms/step": (of("milliseconds_per_step"), "{:.1f}"),
            "tok/step": (of("tokens_per_step_of"), "{:.2f}"),
            "same": (text, "{}"),
            "x plain, 95 %": (
                lambda name: None if name == PLAIN else setting["speedup_interval"][name],
                "{:.2f} to {:.2f}",
            ),
        },
        list(setting["milliseconds_per_token"]),
        note="Medians over batches. first: ms until the first token is there. same: tokens before the first "
        "that plain decoding did not say; in law: sampled by a rule that keeps the distribution.",
    )
    report.add_line(_agreement(setting), "bold red" if setting["identical"] is False else "green")
    report.add_line("")


def _agreement(setting: Mapping[str, Any]) -> str:
    """Who said the same, or how far they strayed where the precision promises nothing."""
    names = ", ".join(setting["compared"])
    count = setting["num_answers"]
    same = f"{setting['num_identical']} of {count} answers token-identical among {names}"
    if setting["identical"] is not None:
        return same
    rates = ", ".join(
        f"{name} {100 * entry['rate']:.2f} % (largest gap {entry['largest_gap']:.3f})"
        for name, entry in setting["divergence"].items()
    )
    promise = "which this precision does not promise; tokens that are not the base's likeliest"
    return f"{same}, {promise}: {rates or 'not measured'}"


def _add_splits(report: Report, settings: Sequence[Mapping[str, Any]]) -> None:
    """Milliseconds of a step by phase, and the ratio to the device's limit."""

    def around_verify(row: Any) -> float | None:
        setting, name = row
        split = setting["step_milliseconds"][name]
        total = sum(value for value in split.values() if value is not None)
        return 1 - (split["verify"] or 0.0) / total if total else None

    columns: dict[str, Column] = {
        "system": (1, "{}"),
        "rows x tokens": (lambda row: [row[0]["batch_size"], row[0]["num_prompt_tokens"]], "{} x {:.0f}"),
        "nodes": (lambda row: row[0]["num_nodes"].get(row[1]), "{}"),
    }
    for phase in PHASES:
        columns[phase] = (lambda row, phase=phase: row[0]["step_milliseconds"][row[1]][phase], "{:.1f}")
    columns["around"] = (around_verify, "{:.0%}")
    columns["f_hw"] = (lambda row: row[0]["f_hw"].get(row[1]), "{:.2f}")
    columns["f_tree"] = (lambda row: row[0]["f_tree"] if row[1] == HEADS else None, "{:.2f}")
    rows = [(setting, name) for setting in settings for name in setting["step_milliseconds"]]
    note = (
        "around: share of a step that is not the base's forward pass. f_hw, f_tree: what the device and the "
        "heads allow, 1 is all of it."
    )
    report.add_table("Where a step's time goes, ms", columns, rows, num_labels=2, note=note)


def _add_depths(report: Report, rates: Mapping[str, Sequence[float]]) -> None:
    """The acceptance rate of each system by depth."""
    drafted = {name: each for name, each in rates.items() if each}
    deepest = max(map(len, drafted.values()), default=0)
    columns: dict[str, Column] = {"system": (0, "{}")}
    for depth in range(deepest):
        columns[str(depth + 1)] = (
            lambda row, depth=depth: f"{100 * row[1][depth]:.0f}" if depth < len(row[1]) else "",
            "{}",
        )
    if drafted:
        report.add_table("Accepted by depth, % of steps", columns, list(drafted.items()))


def _add_categories(report: Report, setting: Mapping[str, Any]) -> None:
    """By category of prompts: tokens per step of our own, and how fast each was against plain decoding."""
    entries = {**setting["by_category"], "all": setting}
    if len(entries) < 3:
        return
    columns: dict[str, Column] = {"system": (str, "{}")}
    for category, entry in entries.items():
        columns[category] = (
            lambda name, entry=entry: (
                f"{cell(entry['tokens_per_step_of'].get(name), '{:.2f}')} "
                f"{cell(entry['speedup_over_plain'].get(name), TIMES)}"
            ),
            "{}",
        )
    names = [name for name in setting["speedup_over_plain"] if name != PLAIN]
    report.add_table("Tokens per step, and speed against plain, by category", columns, names)


def _add_ratios(report: Report, ratios: Sequence[Mapping[str, Any]]) -> None:
    """Rules for sampled drafts against each other."""
    columns: dict[str, Column] = {name: (name, "{}") for name in ("drafter", "rule", "against")}
    columns["ratio"] = ("ratio", "{:.3f}")
    columns["95 %"] = (lambda row: [row["low"], row["high"]], "{:.3f} to {:.3f}")
    columns |= {"prompts": ("num_prompts", "{}"), "answers": ("num_answers", "{}")}
    title = "Tokens per step of one rule over another's, paired by prompt and seed"
    note = "95 %: interval from a bootstrap over prompts; one prompt has none."
    report.add_table(title, columns, ratios, num_labels=3, note=note)


# ------------------------------------------------------------------ the picture

PHASE_COLORS = {"draft": ORANGE, "verify": SHADES[2], "accept": GREEN, "commit": INK}
COLORS = {PLAIN: "#93a1ad", HEADS: BLUE}
OTHERS = (GREEN, ORANGE, "#8a63b8", "#b8637f", "#5e97cf", "#7a8b2f")


def plot_benchmark(values: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw the speed-up over plain decoding of each, the phases of our own steps, and, in the first setting,
    acceptance by depth.

    ``values`` is the JSON object of ``medusa benchmark``.
    """
    settings = values["by_setting"]
    num_bars = sum(len(setting["step_milliseconds"]) for setting in settings)
    num_groups = len(settings) * len(settings[0]["speedup_over_plain"])
    depths = {name: rates for name, rates in settings[0]["acceptance_rate"].items() if rates}
    height = max(4.2, 0.34 * num_bars + 1.6)
    widths = [max(1.15, 0.09 * num_groups), 1.0, *([0.9] if depths else [])]
    with figure_of(path, title, widths, height=height) as axes:
        _plot_speed_ups(axes[0], settings)
        _plot_splits(axes[1], settings)
        if depths:
            heat_map(axes[2], list(depths.values()), "Accepted by depth, % of steps", ".0f", 1.0)
            axes[2].set_xlabel("depth of the guess")
            name_rows([axes[2]], list(depths))


def _plot_speed_ups(ax: Any, settings: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for setting in settings for name in setting["speedup_over_plain"]))
    colors = dict(zip([n for n in names if n not in COLORS], OTHERS, strict=False)) | COLORS
    width = 0.8 / len(names)
    highest = 1.0
    for i, name in enumerate(names):
        label: str | None = name
        for place, setting in enumerate(settings):
            value = setting["speedup_over_plain"].get(name)
            if value is None:
                continue
            x = place + (i - (len(names) - 1) / 2) * width
            ax.bar([x], [value], width * 0.92, color=colors.get(name, FAINT), label=label)
            text = f"{value:.2f}x\n{1000 / setting['milliseconds_per_token'][name]:.1f}"
            ax.annotate(text, (x, value), (0, 2), **beside(INK, ha="center", fontsize=7.5))
            highest = max(highest, value)
            label = None
    ax.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    ax.set_xticks(range(len(settings)), [setting["label"].replace(", ", "\n") for setting in settings])
    ax.set_ylim(0, highest * (1.25 + 0.09 * -(-len(names) // 3)))
    ax.set_title("Speed: times plain decoding, and tokens per second")
    ax.set_ylabel("tokens per second relative to plain decoding")
    ax.legend(ncols=min(3, len(names)), loc="upper left", columnspacing=1.0, handlelength=1.0)


def _plot_splits(ax: Any, settings: Sequence[Mapping[str, Any]]) -> None:
    bars = [
        (name if len(settings) == 1 else f"{name}, {setting['label']}", split)
        for setting in settings
        for name, split in setting["step_milliseconds"].items()
        if split["verify"] is not None
    ]
    ax.set_title("Where a step's time goes")
    if not bars:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "These steps run as one, without phases.", transform=ax.transAxes, ha="center")
        return
    starts = [0.0] * len(bars)
    for phase in PHASES:
        widths = [split[phase] for _, split in bars]
        ax.barh(range(len(bars)), widths, left=starts, height=0.6, color=PHASE_COLORS[phase], label=phase)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, total in enumerate(starts):
        ax.annotate(f"{total:.1f} ms", (total, place), (4, 0), **beside(INK, ha="left", va="center"))
    ax.set_yticks(range(len(bars)), [name for name, _ in bars])
    ax.set_ylim(len(bars) + 0.2, -0.6)  # the last row is the legend's
    ax.set_xlim(0, max(starts) * 1.2)
    ax.grid(False)
    ax.set_xlabel("milliseconds of a decode step")
    ax.legend(ncols=len(PHASES), loc="lower right", columnspacing=1.0, handlelength=1.0)
