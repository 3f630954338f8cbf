"""Measuring contenders against each other: settings, warm-ups, and answers in an order that rotates.

A setting is so many rows decoded together after conversations of so many tokens. All contenders answer each
batch of a setting one after the other, so a machine that slows down does so for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.hardware import wait_for
from medusa.measurement.benchmark_report import Timing, new_tokens
from medusa.measurement.contenders import Contender
from medusa.prompts import padded_batch

NUM_WARM_UPS = 3
WARM_UP_TOKENS = 8

Encoded = Mapping[str, Tensor]
Tracker = Callable[[Sequence[Any], str], Iterator[Any]]
"""Yields the items of a sequence and shows how far it has come, under a label."""


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
        rows = "1 row" if self.batch_size == 1 else f"{self.batch_size} rows"
        return rows if self.context_length is None else f"{rows}, {self.context_length} tokens"

    @property
    def num_prompt_tokens(self) -> float:
        """Mean length of a prompt."""
        return sum(prompt["input_ids"].shape[1] for prompt in self.prompts) / len(self.prompts)

    def places(self, batch: int) -> list[int]:
        """Which prompts make up a batch; the last batch goes around to the first prompts."""
        start = batch * self.batch_size
        return [(start + row) % len(self.prompts) for row in range(self.batch_size)]

    def batches(self, pad_id: int) -> list[dict[str, Tensor]]:
        """The prompts in batches of ``batch_size`` rows, left-padded."""
        num_batches = -(-len(self.prompts) // self.batch_size)
        return [
            padded_batch([self.prompts[place] for place in self.places(batch)], pad_id)
            for batch in range(num_batches)
        ]

    def category(self, batch: int) -> str:
        """That of the batch's only prompt; "" for batches of several."""
        return self.categories[batch] if self.batch_size == 1 else ""


@dataclass(frozen=True)
class AnswerOptions:
    """How every contender answers."""

    arguments: Mapping[str, Any]
    """For ``generate``: ``max_new_tokens``, ``do_sample``, ``temperature``."""
    eos_ids: frozenset[int]
    pad_id: int = 0
    repeats: int = 1

    @classmethod
    def for_base(cls, base: CausalLM, arguments: Mapping[str, Any], repeats: int) -> AnswerOptions:
        """With the tokens that end an answer of ``base``."""
        config = base.generation_config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        eos_ids = frozenset(token for token in ends if token is not None)
        pad_id = config.pad_token_id if config.pad_token_id is not None else min(eos_ids, default=0)
        return cls(arguments, eos_ids, pad_id, repeats)


def able(
    contenders: Mapping[str, Contender], setting: Setting, options: AnswerOptions
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that can answer in this setting, warmed up, and why the others cannot.

    Only those of ``transformers`` may fail; an error of ours is raised.
    """
    batches = setting.batches(options.pad_id)
    longest = max(batches, key=lambda batch: batch["input_ids"].shape[1])
    working, reasons = {}, {}
    for name, contender in contenders.items():
        reason = contender.refusal(setting.batch_size) or failure(contender, longest, options)
        if reason is None:
            working[name] = contender
        else:
            reasons[name] = f"{reason} (at {setting.label})"
    return working, reasons


def failure(contender: Contender, inputs: Encoded, options: AnswerOptions) -> str | None:
    """Warm up; what went wrong with a contender of ``transformers``, in one line, None when nothing did."""
    short = {**options.arguments, "max_new_tokens": min(WARM_UP_TOKENS, options.arguments["max_new_tokens"])}
    rounds = [options.arguments] if contender.is_compiled else [short] * NUM_WARM_UPS
    for arguments in rounds:
        if contender.is_ours:
            contender.answer(**inputs, **arguments)
            continue
        try:
            contender.answer(**inputs, **arguments)
        # What transformers cannot do here must not cost the others their figures; the report says why.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    return None


def measure(
    contenders: Mapping[str, Contender],
    setting: Setting,
    options: AnswerOptions,
    track: Tracker,
    seconds: float | None = None,
) -> list[Timing]:
    """Every contender's answers to every batch, ``options.repeats`` times.

    After ``seconds`` no new round begins; a round is one batch for all contenders, and there is at least one.
    """
    batches, names = setting.batches(options.pad_id), list(contenders)
    rounds = list(product(range(options.repeats), range(len(batches))))
    timings: list[Timing] = []
    began = time.monotonic()
    for repeat, batch in track(rounds, f"measuring, {setting.label}"):
        if timings and seconds is not None and time.monotonic() - began > seconds:
            break
        for turn in range(len(names)):
            name = names[(repeat + batch + turn) % len(names)]
            timings.append(timed(contenders[name], batches[batch], batch, setting.category(batch), options))
    return timings


def timed(contender: Contender, inputs: Encoded, batch: int, category: str, options: AnswerOptions) -> Timing:
    """Let a contender answer, and take the time."""
    prompt = inputs["input_ids"]
    wait_for(prompt.device)
    began = time.perf_counter()
    output = contender.answer(**inputs, **options.arguments, return_dict_in_generate=True)
    wait_for(prompt.device)
    seconds = time.perf_counter() - began
    tokens = new_tokens(output.sequences.tolist(), prompt.shape[1], options.eos_ids)
    return Timing(contender.name, batch, category, tokens, seconds, getattr(output, "statistics", None))
