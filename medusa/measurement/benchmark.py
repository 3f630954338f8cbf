"""Benchmark of systems: the requests, and the summary of the answers.

A setting is a batch size and a context length. All systems answer each batch of a setting, in turns
(:mod:`medusa.measurement.timing`), with the same seeds. The earlier turns of such a conversation are other
prompts with the model's own answers, so the text before a question is realistic.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from medusa.base.causal_lm import CausalLM, end_ids
from medusa.console import counted
from medusa.conversations import Message
from medusa.hardware import DeviceRates, wait_for
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.measurement.bounds import best_expected_tokens, divergence, f_hw
from medusa.measurement.systems import (
    EXACT,
    HEADS,
    PLAIN,
    TRANSFORMERS,
    TYPICAL,
    System,
    drafter_and_rule,
    is_ours,
    pair_name,
)
from medusa.measurement.timing import (
    NUM_WARM_UPS,
    WARM_UP_TOKENS,
    Answer,
    Tokens,
    by_system,
    median_of,
    new_tokens,
    seconds_per_token,
    speedup,
    step_seconds,
    step_split,
    take_turns,
    tokens_by_prompt,
    tokens_per_step_ratio,
    total_statistics,
)
from medusa.model import MedusaModel
from medusa.prompts import Prompt, encode_messages, encode_prompt, padded_batch
from medusa.trees.rank_counts import RankCounts

MOST_CALIBRATED = 24
"""Answers that the heads are calibrated on."""

Encoded = Mapping[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """The prompts of a setting and their batch size."""

    batch_size: int
    context_length: int | None
    """Tokens that earlier turns fill prompts up to; None leaves them as they are."""
    prompts: Sequence[Encoded] = field(repr=False)
    """``input_ids`` and ``attention_mask``, (1, T) long, one by one."""
    categories: Sequence[str] = field(repr=False)
    """Category of each prompt."""
    num_seeds: int = 1
    """Rows that answer each prompt of a batch, each with a seed of its own."""

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
        """[row] = which prompt it answers; the last batch goes around to the first prompts."""
        start = batch * self.batch_size
        rows = range(self.batch_size)
        return [(start + row) % len(self.prompts) for row in rows for _ in range(self.num_seeds)]

    def batches(self, pad_id: int) -> list[dict[str, Tensor]]:
        """The prompts in batches of ``batch_size``, left-padded."""
        num_batches = -(-len(self.prompts) // self.batch_size)
        return [
            padded_batch([self.prompts[number] for number in self.prompt_numbers(batch)], pad_id)
            for batch in range(num_batches)
        ]

    def category(self, batch: int) -> str:
        """The category of the batch's only prompt; "" for batches of several."""
        return self.categories[batch] if self.batch_size == 1 else ""


@dataclass(frozen=True)
class Request:
    """The generation options of every system."""

    arguments: Mapping[str, Any]
    """For ``generate``: ``max_new_tokens``, ``do_sample``, ``temperature``."""
    eos_ids: frozenset[int]
    pad_id: int = 0
    repeats: int = 1
    seed: int = 0
    """Seed of the first row; others count on from it, and so do repeats when tokens are sampled."""

    @classmethod
    def for_base(cls, base: CausalLM, arguments: Mapping[str, Any], repeats: int, seed: int) -> Request:
        """With the tokens that end an answer of ``base``."""
        eos_ids = end_ids(base)
        pad_id = base.generation_config.pad_token_id
        pad_id = pad_id if pad_id is not None else min(eos_ids, default=0)
        return cls(arguments, eos_ids, pad_id, repeats, seed)


def runnable(
    systems: Mapping[str, System], setting: Setting, request: Request
) -> tuple[dict[str, System], dict[str, str]]:
    """The systems that can answer in this setting, warmed up, and the reasons of the others.

    Only foreign systems may fail; an error of ours is raised.
    """
    longest = max(setting.batches(request.pad_id), key=lambda batch: batch["input_ids"].shape[1])
    working = {}
    reasons = {}
    for name, system in systems.items():
        reason = system.refusal(setting.batch_size * setting.num_seeds)
        try:
            if reason is None:
                _warm_up(system, longest, request)
        # A foreign system that fails must not cost the others their figures; the report has the reason.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if system.is_ours:
                raise
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if reason is None:
            working[name] = system
        else:
            reasons[name] = f"{reason} (at {setting.label})"
    return working, reasons


class _FirstTokenClock(BaseStreamer):
    """Gets the prompt and then the tokens as they are written, and notes when the first one came."""

    def __init__(self) -> None:
        self.num_puts = 0
        self.began = time.perf_counter()
        self.first_token_seconds: float | None = None

    def put(self, value: Tensor) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.first_token_seconds = time.perf_counter() - self.began

    def end(self) -> None:
        pass


def _warm_up(system: System, inputs: Encoded, request: Request) -> None:
    short = {**request.arguments, "max_new_tokens": min(WARM_UP_TOKENS, request.arguments["max_new_tokens"])}
    for arguments in [request.arguments] if system.is_compiled else [short] * NUM_WARM_UPS:
        system.answer(**inputs, **arguments)


def measure(
    systems: Mapping[str, System],
    setting: Setting,
    request: Request,
    seconds: float | None = None,
    label: str | None = None,
) -> list[Answer]:
    """The answers of every system to every batch, ``request.repeats`` times, for about ``seconds``."""
    batches = setting.batches(request.pad_id)
    takes_streamer = setting.batch_size * setting.num_seeds == 1

    def run(name: str, batch: int, repeat: int) -> Answer:
        inputs = batches[batch]
        prompt = inputs["input_ids"]
        seed = request.seed + (repeat * len(prompt) if request.arguments["do_sample"] else 0)
        extra: dict[str, Any] = {"seed": seed} if systems[name].is_ours else {}
        wait_for(prompt.device)
        clock = _FirstTokenClock()
        extra |= {"streamer": clock} if takes_streamer else {}
        output = systems[name].answer(**inputs, **request.arguments, **extra, return_dict_in_generate=True)
        wait_for(prompt.device)
        taken = time.perf_counter() - clock.began
        tokens = new_tokens(output.sequences.tolist(), prompt.shape[1], request.eos_ids)
        statistics = getattr(output, "statistics", None)
        first = clock.first_token_seconds
        return Answer(name, batch, tokens, taken, statistics, setting.category(batch), seed, first)

    return take_turns(list(systems), len(batches), run, repeats=request.repeats, seconds=seconds, label=label)


# ------------------------------------------------------------------ summary of the answers


def setting_report(
    answers: Sequence[Answer],
    is_greedy: bool,
    is_exact: bool = True,
    is_same_model: bool = True,
    num_seeds: int = 1,
) -> dict[str, Any]:
    """The numbers of one setting; None for missing systems.

    Compared are our own under the exact rule, and ``transformers`` but where it has another text: it draws
    from another generator when sampling, and knows nothing of an engine that changes the model
    (``is_same_model`` is then false). ``is_exact`` says whether the precision promises identical tokens;
    without, ``identical`` is not claimed.
    """
    answers_by_system = by_system(answers)
    has_their_text = is_greedy and is_same_model
    compared = sorted(
        name
        for name in answers_by_system
        if (is_ours(name) and drafter_and_rule(name)[1] == EXACT) or (name == TRANSFORMERS and has_their_text)
    )
    plain = tokens_by_prompt(answers_by_system[PLAIN])
    differing = {
        (answer.question, answer.seed, row)
        for name in compared
        for answer in answers_by_system[name]
        for row, tokens in enumerate(answer.tokens)
        if plain.get((answer.question, answer.seed, row), tokens) != tokens
    }
    num_identical = len(plain) - len(differing)
    heads_or_plain = tokens_by_prompt(answers_by_system.get(HEADS, answers_by_system[PLAIN]))
    checked = [name for name in answers_by_system if name != PLAIN and (is_greedy or is_ours(name))]
    return {
        **speeds(answers),
        "identical": not differing if is_exact else None,
        "num_identical": num_identical,
        "compared": compared,
        "same_as_plain": {
            name: _same_as(plain, tokens_by_prompt(answers_by_system[name])) for name in checked
        },
        "num_prompts": len({(question, row) for question, _, row in plain}) // num_seeds,
        "num_answers": len(plain),
        "num_tokens": sum(map(len, heads_or_plain.values())),
        "acceptance_rate": {
            name: total_statistics(each).acceptance_rate
            for name, each in answers_by_system.items()
            if is_ours(name)
        },
        "ratios": _ratio_reports(answers_by_system),
        "by_category": {
            category: speeds([answer for answer in answers if answer.category == category])
            for category in sorted({answer.category for answer in answers if answer.category})
        },
    }


def speeds(answers: Sequence[Answer]) -> dict[str, Any]:
    """Speeds over some batches."""
    answers_by_system = by_system(answers)
    per_token = {name: seconds_per_token(each) for name, each in answers_by_system.items()}
    ours = {name: each for name, each in answers_by_system.items() if is_ours(name)}
    step = {name: step_seconds(each) for name, each in ours.items()}
    first = {
        name: median_of(each, lambda answer: answer.first_token_seconds)
        for name, each in answers_by_system.items()
    }
    tokens_per_step = {name: total_statistics(each).tokens_per_step for name, each in ours.items()}
    against_plain = {
        name: speedup(each, answers_by_system[PLAIN]) for name, each in answers_by_system.items()
    }
    return {
        "tokens_per_step": tokens_per_step.get(HEADS),
        "tokens_per_step_of": tokens_per_step,
        "overhead": _ratio(step.get(HEADS), step.get(PLAIN)),
        "speedup_vs_plain": _ratio(per_token.get(PLAIN), per_token.get(HEADS)),
        "speedup_vs_transformers": _ratio(per_token.get(TRANSFORMERS), per_token.get(HEADS)),
        "speedup_of_heads_over": {
            name: _ratio(per_token[name], per_token.get(HEADS)) for name in answers_by_system
        },
        "speedup_over_plain": {name: ratio["ratio"] for name, ratio in against_plain.items()},
        "speedup_interval": {name: [ratio["low"], ratio["high"]] for name, ratio in against_plain.items()},
        "milliseconds_per_token": {name: 1000 * seconds for name, seconds in per_token.items()},
        "milliseconds_to_first_token": {name: _milliseconds(seconds) for name, seconds in first.items()},
        "milliseconds_per_step": {name: _milliseconds(seconds) for name, seconds in step.items()},
        "step_milliseconds": {name: step_split(each) for name, each in ours.items()},
    }


def _same_as(expected: Mapping[Any, Tokens], actual: Mapping[Any, Tokens]) -> dict[str, int]:
    """How many ``actual`` answers are the expected ones, and how many tokens before the first that is not."""
    return {
        "num_answers": sum(actual[row] == tokens for row, tokens in expected.items()),
        "num_tokens": sum(_common_prefix(tokens, actual[row]) for row, tokens in expected.items()),
        "of_answers": len(expected),
        "of_tokens": sum(map(len, expected.values())),
    }


def paired_ratio(answers: Sequence[Answer], baseline: Sequence[Answer]) -> dict[str, Any]:
    """The ratio of tokens per step of ``answers`` and ``baseline``, with a 95 % confidence interval.

    Both answered the same prompts with the same seeds. The interval is a percentile bootstrap over prompts: a
    prompt is drawn with all its answers on both sides. With one prompt there is none.

    Raises:
        ValueError: the two did not answer the same prompts with the same seeds, or no answer has a step.
    """
    if tokens_by_prompt(answers).keys() != tokens_by_prompt(baseline).keys():
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
    ratio = tokens_per_step_ratio(counts)
    return {"num_prompts": len(counts), **ratio, "num_answers": len(tokens_by_prompt(answers))}


def _ratio_reports(answers_by_system: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    """Tokens per step of every rule for sampled drafts over a first one, drafter by drafter.

    The baseline is token verification if it takes part, else the rule that was named first.
    """
    rules_by_drafter: dict[str, list[str]] = {}
    for drafter, rule in map(drafter_and_rule, filter(is_ours, answers_by_system)):
        if rule not in (EXACT, TYPICAL):
            rules_by_drafter.setdefault(drafter, []).append(rule)
    reports = []
    for drafter, rules in rules_by_drafter.items():
        against = "token" if "token" in rules else rules[0]
        for rule in rules:
            if rule != against:
                ratio = paired_ratio(
                    answers_by_system[pair_name(drafter, rule)],
                    answers_by_system[pair_name(drafter, against)],
                )
                reports.append({"drafter": drafter, "rule": rule, "against": against, **ratio})
    return reports


def _common_prefix(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


# ------------------------------------------------------------------ comparison with the base


def conversations(setting: Setting, answers: Sequence[Answer]) -> dict[int, tuple[list[int], list[int]]]:
    """[prompt] = its tokens, then the answer."""
    pairs = {}
    for (batch, _, row), tokens in tokens_by_prompt(answers).items():
        prompt = setting.prompt_numbers(batch)[row]
        pairs[prompt] = (setting.prompts[prompt]["input_ids"][0].tolist(), list(tokens))
    return pairs


def calibrated_counts(model: MedusaModel, answers: Sequence[Answer], setting: Setting) -> RankCounts | None:
    """Which guesses of the heads would have been right on the plain answers; None when they are too short."""
    assert model.heads is not None, "asked only with heads"
    pairs = list(conversations(setting, by_system(answers)[PLAIN]).values())[:MOST_CALIBRATED]
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
    answers_by_system = by_system(answers)
    tree = model.tree_for(setting.batch_size)
    nodes = {
        name: tree.num_nodes if name == HEADS else 1 for name in (PLAIN, HEADS) if name in answers_by_system
    }
    shares: dict[str, float | None] = dict.fromkeys(nodes)
    for name, num_nodes in nodes.items():
        seconds = step_seconds(answers_by_system[name])
        if seconds is not None:
            statistics = total_statistics(answers_by_system[name])
            shares[name] = f_hw(model, rates, num_nodes, statistics, setting.num_prompt_tokens, seconds)
    known = counts is not None and HEADS in nodes
    f_tree = report["tokens_per_step"] / best_expected_tokens(counts, nodes[HEADS]) if known else None  # type: ignore[arg-type]
    return {"num_nodes": nodes, "f_hw": shares, "f_tree": f_tree}


def divergences(model: MedusaModel, answers: Sequence[Answer], setting: Setting) -> dict[str, dict[str, Any]]:
    """The distance of each system's greedy answers from the base's likeliest tokens."""
    return {
        name: divergence(model.base, conversations(setting, each).values())
        for name, each in by_system(answers).items()
    }


# ------------------------------------------------------------------ earlier turns


ANSWER_TOKENS = 128
"""Longest answer in the earlier turns."""
Exchange = tuple[Message, Message]
"""A question and its answer."""


def build_history(model: MedusaModel, prompts: Sequence[Prompt], num_tokens: int) -> list[Exchange]:
    """Questions of ``prompts`` with answers, until they make ``num_tokens`` tokens; each question once.

    The answer is the one in the file where there is one, else the model's own, greedy.

    Raises:
        ValueError: the tokenizer has no chat template, so there is no conversation to lengthen.
    """
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise ValueError(
            "a context length pads prompts with earlier turns, and this tokenizer has no chat template to "
            "render them; use a chat model, or leave the context lengths out"
        )
    exchanges: list[Exchange] = []
    length = 0
    for prompt in prompts:
        if length >= num_tokens:
            break
        question = prompt.messages[-1]
        answer: Message = {"role": "assistant", "content": prompt.answer or answered(model, question)}
        exchanges.append((question, answer))
        length += num_tokens_of(model, Prompt((question, answer)))
    return exchanges


def answered(model: MedusaModel, question: Message) -> str:
    """The model's own answer to a question, greedy and short."""
    inputs: dict[str, Any] = encode_messages(model.tokenizer, [question], model.device)
    out: Any = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return model.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def pad_with_history(
    model: MedusaModel, prompt: Prompt, exchanges: Sequence[Exchange], num_tokens: int
) -> Prompt:
    """``prompt`` after earlier exchanges, up to ``num_tokens`` tokens in total; without any where it is
    longer by itself. Exchanges repeat when there are too few."""
    system = [message for message in prompt.messages[:1] if message["role"] == "system"]
    rest = list(prompt.messages[len(system) :])
    earlier: list[Message] = []
    for exchange in _others(exchanges, rest[-1]):
        longer = [*exchange, *earlier]
        if num_tokens_of(model, replace(prompt, messages=(*system, *longer, *rest))) > num_tokens:
            break
        earlier = longer
    return replace(prompt, messages=(*system, *earlier, *rest))


def num_tokens_of(model: MedusaModel, prompt: Prompt) -> int:
    """Length of a conversation that waits for an answer."""
    return encode_prompt(model.tokenizer, prompt)["input_ids"].shape[1]


def _others(exchanges: Sequence[Exchange], question: Message) -> Iterator[Exchange]:
    """The exchanges about other questions, again and again; nothing where there are none."""
    others = [exchange for exchange in exchanges if exchange[0] != question]
    return (others[number % len(others)] for number in count()) if others else iter(())
