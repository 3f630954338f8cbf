"""Contenders against each other: what is asked, what their answers add up to, the tables and the picture.

A setting is so many rows decoded together after conversations of so many tokens. All contenders answer each
batch of a setting, in turns (:mod:`medusa.measurement.timing`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from medusa.base.causal_lm import CausalLM, end_ids
from medusa.decoding.statistics import PHASES
from medusa.hardware import DeviceRates, wait_for
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.measurement.bounds import best_expected_tokens, f_hw, total_divergence
from medusa.measurement.contenders import HEADS, PLAIN, TRANSFORMERS, Contender, is_ours
from medusa.measurement.timing import (
    NUM_WARM_UPS,
    WARM_UP_TOKENS,
    Answer,
    Tokens,
    by_contender,
    median_of,
    new_tokens,
    rows_said,
    seconds_per_token,
    speedup,
    step_seconds,
    step_split,
    take_turns,
    total_statistics,
)
from medusa.model import MedusaModel
from medusa.plots import BLUE, FAINT, GREEN, INK, ORANGE, SHADES, beside, figure_of
from medusa.prompts import padded_batch
from medusa.tables import counted, number, print_table, times
from medusa.trees.rank_counts import RankCounts

MOST_CALIBRATED = 24
"""Answers that the heads are calibrated on."""

Encoded = Mapping[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What is asked, and of how many rows at once."""

    batch_size: int
    context_length: int | None
    """Tokens that earlier turns fill prompts up to; None leaves them as they are."""
    prompts: Sequence[Encoded] = field(repr=False)
    """``input_ids`` and ``attention_mask``, (1, T) long, one by one."""
    categories: Sequence[str] = field(repr=False)
    """Of each prompt."""

    @property
    def label(self) -> str:
        """The setting in words."""
        rows = counted(self.batch_size, "row")
        return rows if self.context_length is None else f"{rows}, {self.context_length} tokens"

    @property
    def num_prompt_tokens(self) -> float:
        """Mean length of a prompt."""
        return sum(prompt["input_ids"].shape[1] for prompt in self.prompts) / len(self.prompts)

    def prompt_numbers(self, batch: int) -> list[int]:
        """Which prompts make up a batch; the last batch goes around to the first prompts."""
        start = batch * self.batch_size
        return [(start + row) % len(self.prompts) for row in range(self.batch_size)]

    def batches(self, pad_id: int) -> list[dict[str, Tensor]]:
        """The prompts in batches of ``batch_size`` rows, left-padded."""
        num_batches = -(-len(self.prompts) // self.batch_size)
        return [
            padded_batch([self.prompts[number] for number in self.prompt_numbers(batch)], pad_id)
            for batch in range(num_batches)
        ]

    def category(self, batch: int) -> str:
        """That of the batch's only prompt; "" for batches of several."""
        return self.categories[batch] if self.batch_size == 1 else ""


@dataclass(frozen=True)
class Asking:
    """How every contender is asked."""

    arguments: Mapping[str, Any]
    """For ``generate``: ``max_new_tokens``, ``do_sample``, ``temperature``."""
    eos_ids: frozenset[int]
    pad_id: int = 0
    repeats: int = 1

    @classmethod
    def for_base(cls, base: CausalLM, arguments: Mapping[str, Any], repeats: int) -> Asking:
        """With the tokens that end an answer of ``base``."""
        eos_ids, pad_id = end_ids(base), base.generation_config.pad_token_id
        pad_id = pad_id if pad_id is not None else min(eos_ids, default=0)
        return cls(arguments, eos_ids, pad_id, repeats)


def able(
    contenders: Mapping[str, Contender], setting: Setting, asking: Asking
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that can answer in this setting, warmed up, and why the others cannot.

    Only those of others may fail; an error of ours is raised.
    """
    longest = max(setting.batches(asking.pad_id), key=lambda batch: batch["input_ids"].shape[1])
    working, reasons = {}, {}
    for name, contender in contenders.items():
        reason = contender.refusal(setting.batch_size)
        try:
            if reason is None:
                _warm_up(contender, longest, asking)
        # What others cannot do here must not cost the others their figures; the report says why.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if contender.is_ours:
                raise
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if reason is None:
            working[name] = contender
        else:
            reasons[name] = f"{reason} (at {setting.label})"
    return working, reasons


class FirstTokenClock(BaseStreamer):
    """Gets the prompt and then the tokens as they are written, and notes when the first one came."""

    def __init__(self) -> None:
        self.num_puts, self.began = 0, time.perf_counter()
        self.first_token_seconds: float | None = None

    def put(self, value: Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.first_token_seconds = time.perf_counter() - self.began

    def end(self) -> None:
        pass


def _warm_up(contender: Contender, inputs: Encoded, asking: Asking) -> None:
    short = {**asking.arguments, "max_new_tokens": min(WARM_UP_TOKENS, asking.arguments["max_new_tokens"])}
    for arguments in [asking.arguments] if contender.is_compiled else [short] * NUM_WARM_UPS:
        contender.answer(**inputs, **arguments)


def measure(
    contenders: Mapping[str, Contender],
    setting: Setting,
    asking: Asking,
    seconds: float | None = None,
    label: str | None = None,
) -> list[Answer]:
    """Every contender's answers to every batch, ``asking.repeats`` times, for about ``seconds``."""
    batches = setting.batches(asking.pad_id)
    takes_streamer = setting.batch_size == 1

    def run(name: str, batch: int, repeat: int) -> Answer:
        inputs = batches[batch]
        prompt = inputs["input_ids"]
        wait_for(prompt.device)
        clock = FirstTokenClock()
        streamer = {"streamer": clock} if takes_streamer else {}
        output = contenders[name].answer(
            **inputs, **asking.arguments, **streamer, return_dict_in_generate=True
        )
        wait_for(prompt.device)
        taken = time.perf_counter() - clock.began
        tokens = new_tokens(output.sequences.tolist(), prompt.shape[1], asking.eos_ids)
        counted = getattr(output, "statistics", None)
        first = clock.first_token_seconds
        return Answer(name, batch, tokens, taken, counted, setting.category(batch), first_token_seconds=first)

    return take_turns(
        list(contenders), len(batches), run, repeats=asking.repeats, seconds=seconds, label=label
    )


# ------------------------------------------------------------------ what the answers add up to


def setting_report(
    answers: Sequence[Answer], is_greedy: bool, is_exact: bool = True, is_same_model: bool = True
) -> dict[str, Any]:
    """The numbers of one setting; what a missing contender would have told is None.

    When sampling, ``transformers`` draws from another generator, and an engine that changes the model
    (``is_same_model`` is then false) has a text of its own: ``compared`` are our own two only.
    ``is_exact`` says whether the precision promises identical tokens; without, ``identical`` is not claimed.
    """
    given = by_contender(answers)
    wanted = (TRANSFORMERS, PLAIN, HEADS) if is_greedy and is_same_model else (PLAIN, HEADS)
    compared = sorted(name for name in wanted if name in given)
    plain = rows_said(given[PLAIN])
    num_identical = sum(
        all(
            answer.tokens[row] == tokens
            for name in compared
            for answer in given[name]
            if answer.question == question
        )
        for (question, _, row), tokens in plain.items()
    )
    checked = [name for name in given if name != PLAIN and (is_greedy or is_ours(name))]
    return {
        **speeds(answers),
        "identical": num_identical == len(plain) if is_exact else None,
        "num_identical": num_identical,
        "compared": compared,
        "same_as_plain": {name: same_as(plain, rows_said(given[name])) for name in checked},
        "num_prompts": len(plain),
        "num_tokens": sum(map(len, rows_said(given[HEADS if HEADS in given else PLAIN]).values())),
        "by_category": {
            category: speeds([answer for answer in answers if answer.category == category])
            for category in sorted({answer.category for answer in answers if answer.category})
        },
    }


def speeds(answers: Sequence[Answer]) -> dict[str, Any]:
    """Speeds over some batches."""
    given = by_contender(answers)
    per_token = {name: seconds_per_token(each) for name, each in given.items()}
    ours = {name: each for name, each in given.items() if is_ours(name)}
    step = {name: step_seconds(each) for name, each in ours.items()}
    tokens_per_step = {name: total_statistics(each).tokens_per_step for name, each in ours.items()}
    against_plain = {name: speedup(each, given[PLAIN]) for name, each in given.items()}
    return {
        "tokens_per_step": tokens_per_step.get(HEADS),
        "tokens_per_step_of": tokens_per_step,
        "overhead": _ratio(step.get(HEADS), step.get(PLAIN)),
        "speedup_vs_plain": _ratio(per_token.get(PLAIN), per_token.get(HEADS)),
        "speedup_vs_transformers": _ratio(per_token.get(TRANSFORMERS), per_token.get(HEADS)),
        "speedup_of_heads_over": {name: _ratio(per_token[name], per_token.get(HEADS)) for name in given},
        "speedup_over_plain": {name: ratio["ratio"] for name, ratio in against_plain.items()},
        "speedup_interval": {name: [ratio["low"], ratio["high"]] for name, ratio in against_plain.items()},
        "milliseconds_per_token": {name: 1000 * seconds for name, seconds in per_token.items()},
        "milliseconds_to_first_token": {name: first_token_milliseconds(each) for name, each in given.items()},
        "milliseconds_per_step": {
            name: None if seconds is None else 1000 * seconds for name, seconds in step.items()
        },
        "step_milliseconds": {name: step_split(each) for name, each in ours.items()},
    }


def first_token_milliseconds(answers: Iterable[Answer]) -> float | None:
    """Of one contender, the median over batches; None where nobody looked."""
    seconds = median_of(answers, lambda answer: answer.first_token_seconds)
    return None if seconds is None else 1000 * seconds


def same_as(expected: Mapping[Any, Tokens], given: Mapping[Any, Tokens]) -> dict[str, int]:
    """How many answers are the expected ones, and how many tokens before the first that is not."""
    return {
        "num_answers": sum(given[row] == tokens for row, tokens in expected.items()),
        "num_tokens": sum(_common_prefix(tokens, given[row]) for row, tokens in expected.items()),
        "of_answers": len(expected),
        "of_tokens": sum(map(len, expected.values())),
    }


def _common_prefix(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


# ------------------------------------------------------------------ what they are held against


def said_to(setting: Setting, answers: Sequence[Answer]) -> dict[int, tuple[list[int], list[int]]]:
    """[prompt] = its tokens, and one contender's answer."""
    pairs = {}
    for (batch, _, row), tokens in rows_said(answers).items():
        prompt = setting.prompt_numbers(batch)[row]
        pairs[prompt] = (setting.prompts[prompt]["input_ids"][0].tolist(), list(tokens))
    return pairs


def calibrated_counts(model: MedusaModel, answers: Sequence[Answer], setting: Setting) -> RankCounts | None:
    """Which guesses of the heads would have been right on the plain answers; None when they are too short."""
    assert model.heads is not None, "asked only with heads"
    pairs = list(said_to(setting, by_contender(answers)[PLAIN]).values())[:MOST_CALIBRATED]
    rows = [AnsweredTokens.after_prompt(prompt + answer, len(prompt)) for prompt, answer in pairs]
    counts = calibrate(model.base, model.heads, rows, batch_size=1)
    return counts if counts.num_positions else None


def bounds(
    model: MedusaModel,
    setting: Setting,
    answers: Sequence[Answer],
    report: Mapping[str, Any],
    rates: DeviceRates,
    counts: RankCounts | None,
) -> dict[str, Any]:
    """``num_nodes`` and ``f_hw`` of plain decoding and the heads, and ``f_tree``; None where not known."""
    given, tree = by_contender(answers), model.tree_for(setting.batch_size)
    nodes = {name: tree.num_nodes if name == HEADS else 1 for name in (PLAIN, HEADS) if name in given}
    shares: dict[str, float | None] = dict.fromkeys(nodes)
    for name, num_nodes in nodes.items():
        if (seconds := step_seconds(given[name])) is not None:
            counted = total_statistics(given[name])
            shares[name] = f_hw(model, rates, num_nodes, counted, setting.num_prompt_tokens, seconds)
    known = counts is not None and HEADS in nodes
    f_tree = report["tokens_per_step"] / best_expected_tokens(counts, nodes[HEADS]) if known else None  # type: ignore[arg-type]
    return {"num_nodes": nodes, "f_hw": shares, "f_tree": f_tree}


def divergences(model: MedusaModel, answers: Sequence[Answer], setting: Setting) -> dict[str, dict[str, Any]]:
    """How far each contender's greedy answers stray from the base's likeliest tokens."""
    return {
        name: total_divergence(model.base, said_to(setting, each).values()).as_dict()
        for name, each in by_contender(answers).items()
    }


# ------------------------------------------------------------------ tables


def print_tables(report: Mapping[str, Any], console: Console) -> None:
    """Every setting: speed of each contender, where a step's time goes, and who said the same."""
    for setting in report["by_setting"]:
        print_speeds(setting, console)
    print_splits(report["by_setting"], console)
    first = report["by_setting"][0]
    if len(first["by_category"]) > 1:
        print_categories(first, console)
    for name, reason in report["skipped"].items():
        console.print(f"{name} did not take part: {reason}", style="yellow", markup=False)
    rates = report["device_rates"]
    console.print(
        f"measured on {report['device']} in {report['dtype']}: {rates['bytes_per_second'] / 1e9:.1f} GB/s "
        f"read, {rates['operations_per_second'] / 1e9:.0f} GFLOP/s multiplied",
        style="dim",
    )


def print_categories(setting: Mapping[str, Any], console: Console) -> None:
    """By category of prompts: the heads' steps, and how fast each contender was against plain decoding."""
    entries = {**setting["by_category"], "all": setting}
    if HEADS in setting["milliseconds_per_token"]:
        rows = [
            [name, number(entry["tokens_per_step"]), number(entry["overhead"])]
            + [times(entry[gain]) for gain in ("speedup_vs_plain", "speedup_vs_transformers")]
            for name, entry in entries.items()
        ]
        headers = ["category", "tokens/step", "overhead", "x plain", "x transformers"]
        print_table(console, "Heads, by category", headers, rows, styles={len(rows) - 1: "bold"})
    names = [name for name in setting["speedup_over_plain"] if name != PLAIN]
    rows = [
        [category, *(times(entry["speedup_over_plain"].get(name)) for name in names)]
        for category, entry in entries.items()
    ]
    title = "Times as fast as plain, by category"
    print_table(console, title, ["category", *names], rows, styles={len(rows) - 1: "bold"})


def in_words(setting: Mapping[str, Any]) -> str:
    """Which setting it is."""
    rows = counted(setting["batch_size"], "row")
    return f"{rows}, prompts of {setting['num_prompt_tokens']:.0f} tokens"


def print_speeds(setting: Mapping[str, Any], console: Console) -> None:
    """How fast each contender was, and who said the same."""
    rows = []
    for name, milliseconds in setting["milliseconds_per_token"].items():
        same = setting["same_as_plain"].get(name)
        low, high = setting["speedup_interval"][name]
        rows.append(
            [
                name,
                f"{milliseconds:.1f}",
                f"{1000 / milliseconds:.1f}",
                number(setting["milliseconds_to_first_token"].get(name), ".0f"),
                times(setting["speedup_over_plain"][name]),
                number(setting["milliseconds_per_step"].get(name), ".1f"),
                number(setting["tokens_per_step_of"].get(name)),
                "-" if same is None else f"{same['num_tokens'] / max(1, same['of_tokens']):.1%}",
                "-" if low is None or name == PLAIN else f"{low:.2f} to {high:.2f}",
            ]
        )
    headers = [
        "contender",
        "ms/token",
        "tokens/s",
        "first",
        "x plain",
        "ms/step",
        "tok/step",
        "same",
        "x plain, 95 %",
    ]
    note = (
        "Medians over batches. first: ms until the first token is there. same: tokens before the first that "
        "plain decoding did not say."
    )
    print_table(console, f"Speed, {in_words(setting)}", headers, rows, note=note)
    style = "bold red" if setting["identical"] is False else "green"
    console.print(agreement(setting), style=style, markup=False)
    console.print()


def print_splits(settings: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Milliseconds of a step by phase, and how close the step is to what the device allows."""
    rows = [
        [
            name,
            f"{setting['batch_size']} x {setting['num_prompt_tokens']:.0f}",
            number(setting["num_nodes"].get(name), "d"),
            *(number(split[phase], ".1f") for phase in PHASES),
            share_around_verify(split),
            number(setting["f_hw"].get(name)),
            number(setting["f_tree"] if name == HEADS else None),
        ]
        for setting in settings
        for name, split in setting["step_milliseconds"].items()
    ]
    headers = ["contender", "rows x tokens", "nodes", *PHASES, "around", "f_hw", "f_tree"]
    note = (
        "around: share of a step that is not the base's forward pass. f_hw, f_tree: what the device and the "
        "heads allow, 1 is all of it."
    )
    print_table(console, "Where a step's time goes, ms", headers, rows, num_labels=2, note=note)


def agreement(setting: Mapping[str, Any]) -> str:
    """Who said the same, or how far they strayed where the precision promises nothing."""
    names, count = ", ".join(setting["compared"]), setting["num_prompts"]
    same = f"{setting['num_identical']} of {count} answers token-identical among {names}"
    if setting["identical"] is not None:
        return same
    rates = ", ".join(
        f"{name} {100 * entry['rate']:.2f} % (largest gap {entry['largest_gap']:.3f})"
        for name, entry in setting["divergence"].items()
    )
    promise = "which this precision does not promise; tokens that are not the base's likeliest"
    return f"{same}, {promise}: {rates or 'not measured'}"


def share_around_verify(split: Mapping[str, float | None]) -> str:
    """The share of a step that is not the base's forward pass."""
    total = sum(value for value in split.values() if value is not None)
    return f"{1 - (split['verify'] or 0.0) / total:.0%}" if total else "-"


# ------------------------------------------------------------------ the picture

PHASE_COLORS = {"draft": ORANGE, "verify": SHADES[2], "accept": GREEN, "commit": INK}
COLORS = {PLAIN: "#93a1ad", HEADS: BLUE}
OTHERS = (GREEN, ORANGE, "#8a63b8", "#b8637f", "#5e97cf", "#7a8b2f")


def plot_benchmark(report: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw the speed-up over plain decoding of every contender, and the parts of a step of our own.

    ``report`` is the JSON object of ``medusa benchmark``.
    """
    settings = report["by_setting"]
    num_bars = sum(len(setting["step_milliseconds"]) for setting in settings)
    height = max(4.2, 0.34 * num_bars + 1.6)
    num_groups = len(settings) * len(settings[0]["speedup_over_plain"])
    with figure_of(path, title, [max(1.15, 0.09 * num_groups), 1.0], height=height) as (left, right):
        _plot_speed_ups(left, settings)
        _plot_splits(right, settings)


def _plot_speed_ups(ax: Any, settings: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for setting in settings for name in setting["speedup_over_plain"]))
    colors = dict(zip([n for n in names if n not in COLORS], OTHERS, strict=False)) | COLORS
    width = 0.8 / len(names)
    highest = 1.0
    for i, name in enumerate(names):
        label: str | None = name
        for place, setting in enumerate(settings):
            if (value := setting["speedup_over_plain"].get(name)) is None:
                continue
            x = place + (i - (len(names) - 1) / 2) * width
            ax.bar([x], [value], width * 0.92, color=colors.get(name, FAINT), label=label)
            text = f"{value:.2f}x\n{1000 / setting['milliseconds_per_token'][name]:.1f}"
            ax.annotate(text, (x, value), (0, 2), **beside(INK, ha="center", fontsize=7.5))
            highest, label = max(highest, value), None
    ax.axhline(1.0, color=INK, linewidth=1, linestyle=":")
    ax.set_xticks(range(len(settings)), [_label(setting).replace(", ", "\n") for setting in settings])
    ax.set_ylim(0, highest * (1.25 + 0.09 * -(-len(names) // 3)))
    ax.set_title("Speed: times plain decoding, and tokens per second")
    ax.set_ylabel("tokens per second over those of plain decoding")
    ax.legend(ncols=min(3, len(names)), loc="upper left", columnspacing=1.0, handlelength=1.0)


def _plot_splits(ax: Any, settings: Sequence[Mapping[str, Any]]) -> None:
    bars = [
        (name if len(settings) == 1 else f"{name}, {_label(setting)}", split)
        for setting in settings
        for name, split in setting["step_milliseconds"].items()
        if split["verify"] is not None
    ]
    starts = [0.0] * len(bars)
    for phase in PHASES:
        widths = [split[phase] for _, split in bars]
        ax.barh(range(len(bars)), widths, left=starts, height=0.6, color=PHASE_COLORS[phase], label=phase)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, total in enumerate(starts):
        ax.annotate(f"{total:.1f} ms", (total, place), (4, 0), **beside(INK, ha="left", va="center"))
    ax.set_yticks(range(len(bars)), [name for name, _ in bars])
    ax.set_ylim(len(bars) + 0.2, -0.6)  # the last row is the legend's
    ax.set_xlim(0, max(starts, default=1.0) * 1.2)
    ax.grid(False)
    ax.set_xlabel("milliseconds of a decode step")
    ax.set_title("Where a step's time goes")
    ax.legend(ncols=len(PHASES), loc="lower right", columnspacing=1.0, handlelength=1.0)


def _label(setting: Mapping[str, Any]) -> str:
    rows = counted(setting["batch_size"], "row")
    return rows if setting["context_length"] is None else f"{rows}, {setting['context_length']} tokens"
