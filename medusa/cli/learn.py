"""``medusa learn``: from a base to heads in use, in one command.

A round of learning is what ``distill``, ``train``, ``tune`` and ``benchmark`` do, one after the other and
within a budget of time, beside the heads that the base has learned before.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from medusa.assets import shipped_names
from medusa.base.causal_lm import vocab_size
from medusa.base.known_models import learning_place
from medusa.base.loading import find_base, load_tokenizer
from medusa.cli.benchmark import BenchmarkOptions, benchmark
from medusa.cli.distill import answer, summarise
from medusa.cli.learn_collected import learn_collected
from medusa.cli.loading import answered_prompts, load_model
from medusa.cli.option_types import LearnOptions
from medusa.cli.options import (
    NO_HEADS,
    AnswerOptions,
    PromptOptions,
    ReportOptions,
    answer_command,
    command,
)
from medusa.cli.rounds import MIN_GAIN, best_start, ended_version, heads_in_use, mark_learned, widths
from medusa.cli.tune import TuneOptions, tune
from medusa.console import counted, log_console
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.protocol import PlainDrafter
from medusa.files import read_json
from medusa.hardware import use_threads
from medusa.heads.calibration import AnsweredTokens
from medusa.learning.collected_texts import CollectedTexts
from medusa.learning.learned_heads import LearnedHeads, LearnedVersion
from medusa.measurement.report import end_with_json
from medusa.model import MedusaModel
from medusa.prompts import read_prompts, with_template_kwargs
from medusa.training.config import BaseOptions
from medusa.training.data.material import material_of
from medusa.training.distillation.answering import LocalAnswerer
from medusa.training.distillation.distill import AnswerFile
from medusa.training.round import ANSWERING, BYTES, MAX_NODES, MEASURING, READING, Round, material_of_prompts
from medusa.training.run import job

ENOUGH_TOKENS = 30_000
"""Tokens of answers that gave heads which answer 1.3 times as fast: what --minutes is by default."""
LEAST_MINUTES = 6.0
LONGEST_ANSWER = 192
"""Tokens."""
ROWS = 32
"""Answers under way at once."""
MEASURED_QUESTIONS, MEASURED_TOKENS = 8, 96
"""Questions that the closing measurement asks, and the longest answer to each."""
LEAST_MEASURED = 1.0
"""Minutes of a closing measurement that asks less than these."""
PROBED_TOKENS = 256
"""Tokens of a text on which reading is timed."""


def learn(options: LearnOptions) -> list[str]:
    """Answer, train, choose the tree, measure, and take the heads into use where they are better."""
    if options.collected:
        return learn_collected(options)
    logging.basicConfig(level=logging.WARNING)
    disable_progress_bar()
    use_threads(options.threads)
    source = find_base(options.base, trust_remote_code=options.trust_remote_code)
    tokenizer = load_tokenizer(options.tokenizer or source)
    model = load_model(options.model, with_heads=False)  # fetched now, if it is the hub's and new
    learned = learning_place(options.base)
    with learned.locked():
        has_template = tokenizer.chat_template is not None
        learned.begin(options.base, has_template)
        lesson = _round(options, learned, has_template)
        if not lesson.is_answered:
            _answer(lesson, model, options)
        del model  # training needs no layers of the base
        gc.collect()
        _say_part(lesson, "3 of 6: training")
        base = BaseOptions(options.base, options.tokenizer, options.trust_remote_code)
        if not job.train(lesson.configuration(base, options.template)):
            return []
        lesson.save()
        ways = _measured(lesson, options, heads_in_use(options.base, source))
        report = ways["learned"]
        speedup = _speedup(report)
        gain = speedup / _speedup(ways["in use"])
        version = ended_version(lesson, report["tokens_per_step_of"]["default"], gain, speedup)
        is_better = _is_better(ways)
        if is_better:
            mark_learned(lesson.heads, version)
        learned.end_round(version, lesson.heads if is_better else None, lesson.answers)
    _summarise(version, ways, is_better, learned)
    values = asdict(version) | {"is_in_use": is_better, "speedup_before": _speedup(ways["in use"])}
    end_with_json(values, options.report.json)
    if is_better:
        return [answer_command(tokenizer, "--base", options.base), command("heads")]
    more = f"{max(2 * version.minutes, LEAST_MINUTES):.0f}"
    return [command("learn", options.base, "--minutes", more)]


def _round(options: LearnOptions, learned: LearnedHeads, has_template: bool) -> Round:
    """The round that was stopped, or a new one."""
    stopped = None if options.fresh else Round.stopped_in(learned.round, options.asked)
    if stopped is not None:
        log_console().print("going on with the round that was stopped", style="dim")
        return stopped
    number = learned.last_number + 1
    if options.data:
        material = material_of(options.data, has_template, seed=number)
    else:
        material = material_of_prompts(options.prompts)
    texts = CollectedTexts(learned.directory)
    texts.end_new()
    collected = list(texts.newest_first())
    material.texts = collected + material.texts
    earlier = [] if options.fresh else learned.answers
    lesson = Round.begun_in(learned.round, options.asked, number, material, earlier)
    own_prompts = options.prompts is not None and str(options.prompts) not in shipped_names(".jsonl")
    sources = [*options.data] or [str(options.prompts or "the prompts that ship")]
    lesson.save(
        learned_from=[*sources, *([f"{len(collected)} texts that it wrote"] if collected else [])],
        is_private=bool(options.data or own_prompts or collected or (earlier and learned.is_private)),
    )
    return lesson


def _say_part(lesson: Round, title: str) -> None:
    """The heading of a part, with the minutes that those before it have taken."""
    of_all = "" if lesson.minutes is None else f" of about {lesson.minutes:.0f}"
    log_console().rule(f"{title}, after {lesson.minutes_taken:.0f}{of_all} minutes")


# ------------------------------------------------------------------ answers


def _answer(lesson: Round, model: MedusaModel, options: LearnOptions) -> None:
    """Let the base answer, first what is measured on; then choose the heads to begin with."""
    log = log_console()
    reads, answers_a_second = _rates(model)
    minutes = lesson.minutes
    if minutes is None:
        minutes = max(LEAST_MINUTES, ENOUGH_TOKENS / answers_a_second / 60 / ANSWERING)
    lesson.save(minutes=minutes)
    log.print(
        f"this takes about {minutes:.0f} minutes: the base reads some {reads:.0f} tokens a second and writes "
        f"{answers_a_second:.0f} in {ROWS} answers at once; --minutes says otherwise",
        soft_wrap=True,
    )
    lesson.keep_texts(BYTES * reads * READING * minutes * 60)
    kwargs = options.template.template_kwargs
    parts = (
        ("1 of 6: answers to measure on", lesson.held_out, lesson.held_out_answers, [0.0], None),
        ("2 of 6: answers", lesson.questions, lesson.answers, [0.0, 0.7], ANSWERING * minutes),
    )
    for title, questions, output, temperatures, limit in parts:
        _say_part(lesson, title)
        settings = {"base": options.base, "temperatures": temperatures, "template": kwargs}
        with AnswerFile(output, settings) as answers:
            report, seconds = answer(
                with_template_kwargs(read_prompts(questions), kwargs),
                answers,
                partial(LocalAnswerer, model, ROWS, LONGEST_ANSWER),
                temperatures,
                seed=10**6 * lesson.number,
                max_minutes=limit,
            )
            if seconds:
                summarise(report, seconds, output, log)

    def rows() -> list[AnsweredTokens]:
        prompts = read_prompts(lesson.held_out_answers)
        return answered_prompts(model, prompts, AnswerOptions(max_new_tokens=LONGEST_ANSWER))

    start_from = None if options.fresh else best_start(model, rows)
    lesson.end_answers(reads, start_from=start_from, **widths(model))


def _rates(model: MedusaModel) -> tuple[float, float]:
    """Tokens a second that the base reads, and that it writes in :data:`ROWS` answers."""
    ids = torch.arange(PROBED_TOKENS, device=model.device)[None] % vocab_size(model.base)

    def measured(inputs: torch.Tensor, count: int) -> DecodingStatistics:
        output: Any = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=count,
            do_sample=False,
            drafter=PlainDrafter(),
            return_dict_in_generate=True,
        )
        return output.statistics

    measured(ids, 1)  # what is made once
    reading = measured(ids, 1).prefill_seconds
    writing = measured(ids[:, :16].expand(ROWS, -1).contiguous(), 8)
    written = max(1, writing.num_tokens - ROWS)  # the first tokens are the prefill's
    return PROBED_TOKENS / reading, written / max(writing.decode_seconds, 1e-6)


# ------------------------------------------------------------------ the result


def _measured(lesson: Round, options: LearnOptions, in_use: str) -> dict[str, dict[str, Any]]:
    """Choose the tree of the new heads, and measure what they give, and what is in use, each beside plain
    decoding: the reports of ``medusa benchmark`` by what was measured."""
    learned = replace(options.model, heads=str(lesson.heads))
    _say_part(lesson, "4 of 6: the tree for this machine")
    tune(
        TuneOptions(
            model=learned,
            prompts=PromptOptions(prompts=lesson.held_out_answers),
            answers=AnswerOptions(max_new_tokens=LONGEST_ANSWER),
            report=ReportOptions(lesson.directory / "tree.json"),
            sizes=(2, 3, 4, 6, 8, 12, MAX_NODES),
            rounds=4,
            plot=lesson.directory / "tree.png",
        )
    )
    compared = {"learned": learned, "in use": replace(options.model, heads=in_use)}
    measured = {}
    for name, model in compared.items():
        part = "5 of 6: the speed" if name == "learned" else "6 of 6: the speed of what was in use"
        _say_part(lesson, part)
        report = lesson.directory / f"{name.replace(' ', '-')}.json"
        benchmark(
            BenchmarkOptions(
                model=model,
                prompts=PromptOptions(
                    prompts=lesson.held_out,
                    limit=MEASURED_QUESTIONS,
                    enable_thinking=options.template.enable_thinking,
                    chat_template_kwargs=options.template.chat_template_kwargs,
                ),
                answers=AnswerOptions(max_new_tokens=MEASURED_TOKENS),
                report=ReportOptions(report),
                systems=("default",) if model.heads == NO_HEADS else ("heads", "default"),
                max_minutes=max(LEAST_MEASURED, MEASURING / 3 * (lesson.minutes or LEAST_MINUTES)),
                plot=report.with_suffix(".png"),
            )
        )
        measured[name] = read_json(report)
    return measured


def _speedup(report: dict[str, Any]) -> float:
    """Tokens a second as ``generate`` decodes, with nothing named, against plain decoding."""
    return float(report["speedup_over_plain"]["default"])


def _is_better(ways: dict[str, dict[str, Any]]) -> bool:
    """Whether the new heads give the same text faster than plain decoding and than what was in use."""
    learned = ways["learned"]
    low, _ = learned["speedup_interval"]["default"]
    is_sure = low is not None and low > 1  # None with one question
    guesses = learned["tokens_per_step_of"]["default"] >= MIN_GAIN  # else it is the machine that was faster
    is_exact = learned["identical"] is not False
    is_faster = _speedup(learned) >= MIN_GAIN * max(1.0, _speedup(ways["in use"]))
    return is_sure and guesses and is_exact and is_faster


def _summarise(
    version: LearnedVersion, ways: dict[str, dict[str, Any]], is_better: bool, learned: LearnedHeads
) -> None:
    say = partial(log_console().print, soft_wrap=True)
    say()
    say(
        f"{version.speedup:.2f} times plain decoding on {counted(ways['learned']['num_prompts'], 'question')}"
        f" kept apart, {version.tokens_per_step:.2f} tokens a step, after {version.minutes:.0f} minutes and "
        f"{version.num_tokens:,} tokens",
        style="bold",
    )
    alone = ways["learned"]["speedup_over_plain"]["heads"]
    say(f"by the heads alone {alone:.2f} times: the default also copies guesses from the text")
    say(f"what was in use before: {_speedup(ways['in use']):.2f} times")
    if is_better:
        say(f"in use from now on, in {learned.in_use}")
    else:
        say("no better than what was in use, so that stays; more time or other data may help")
