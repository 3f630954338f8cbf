"""``medusa learn --collected``: a round of learning from what a base wrote while it was used.

Nothing in it is timed, so it may stand still for as long as the base is asked something: heads are judged by
the tokens that a step would have given on the newest answers, from which they have not learned.
"""

from __future__ import annotations

import gc
import json
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from transformers.utils.logging import disable_progress_bar

from medusa.base.known_models import learning_place
from medusa.base.loading import find_base
from medusa.cli.loading import load_model
from medusa.cli.option_types import LearnOptions
from medusa.cli.options import NO_HEADS, answer_command, command
from medusa.cli.rounds import MIN_GAIN, best_start, ended_version, heads_in_use, mark_learned, widths
from medusa.console import counted, log_console
from medusa.engine.weights.own_head import load_own_heads
from medusa.hardware import use_threads
from medusa.heads.calibration import AnsweredTokens
from medusa.heads.checkpoint import OWN_HEADS, load_heads
from medusa.heads.protocol import Heads
from medusa.learning.collected_texts import CollectedTexts, Row
from medusa.learning.learned_heads import LearnedHeads
from medusa.measurement.comparison import against, ranked, tokens_per_step
from medusa.measurement.report import end_with_json
from medusa.model import MedusaModel
from medusa.training.config import BaseOptions
from medusa.training.data.material import Material
from medusa.training.round import Round
from medusa.training.run import job

NEWEST = 0.1
"""The part that is measured on, the newest, in texts; from :data:`FEWEST` to :data:`MOST`."""
FEWEST, MOST = 6, 32
MOST_NEW = 400_000
"""Characters that one round learns from, the newest: some 100,000 tokens."""
LEAST_REPLAYED = 160_000
"""Characters of earlier texts that it reads again, so that nothing is unlearned; as many as are new where
these are more."""
EPOCHS, LATER_EPOCHS = 6, 3
"""Of new heads, and of those that go on."""
JUDGED_NODES = 8
"""Nodes of the trees in which heads are compared."""
LEAST_USEFUL = 1.1
"""Tokens per step from which heads are worth drafting with at all."""


def learn_collected(options: LearnOptions) -> list[str]:
    """Train on the texts of use, count what the heads are worth on the newest, and take them into use where
    they are better.

    Raises:
        ValueError: there is too little to learn from.
    """
    logging.basicConfig(level=logging.WARNING)
    disable_progress_bar()
    use_threads(options.threads)
    learned = learning_place(options.base)
    load = partial(load_model, options.model, with_heads=False)
    with learned.locked():
        learned.begin(options.base)
        lesson = _round(options, learned)
        if not lesson.is_answered:
            model = load()
            start = None if options.fresh else best_start(model, partial(_answered, lesson, model))
            epochs = EPOCHS if start is None else LATER_EPOCHS
            lesson.save(is_answered=True, start_from=start, epochs=epochs, **widths(model))
            del model  # training needs no layers of the base but for states
            gc.collect()
        base = BaseOptions(options.base, options.tokenizer, options.trust_remote_code)
        if not job.train(lesson.configuration(base, options.template)):
            return []
        lesson.save()
        model = load()
        in_use = _heads_in_use(options.base, model)
        worth, ratio = _judged(model, load_heads(lesson.heads).heads, in_use, _answered(lesson, model))
        version = ended_version(lesson, worth["value"], ratio["value"])
        is_better = _is_better(ratio, is_first=in_use is None)
        if is_better:
            mark_learned(lesson.heads, version)
        learned.end_round(version, lesson.heads if is_better else None, lesson.answers)
        if is_better and model.can_compile:  # here, with nobody waiting for it
            model.use_heads(load_heads(learned.heads_of(version)))
            model.compile()
    say = partial(log_console().print, soft_wrap=True)
    before = "nothing" if in_use is None else "what was in use"
    what = "in use from now on" if is_better else "no better, so nothing changes"
    say(
        f"{worth['value']:.2f} tokens a step on the newest answers, {ratio['value']:.2f} times those of "
        f"{before}: {what}"
    )
    end_with_json(asdict(version) | {"is_in_use": is_better, "ratio": ratio}, options.report.json)
    if is_better:
        return [answer_command(model.tokenizer, "--base", options.base), command("heads")]
    return [command("heads")]


def _round(options: LearnOptions, learned: LearnedHeads) -> Round:
    """The round that was stopped, or a new one."""
    stopped = None if options.fresh else Round.stopped_in(learned.round, options.asked)
    if stopped is not None:
        return stopped
    collected = CollectedTexts(learned.directory)
    new = list(collected.new_rows())
    everything = list(collected.newest_first())
    count = min(MOST, max(FEWEST, round(NEWEST * len(new))))
    apart = everything[:count]
    if len(everything) < 2 * FEWEST:
        raise ValueError(
            f"collected needs {2 * FEWEST} answers or more, to learn from some and to measure on the newest, "
            f"and {len(everything)} are kept; use the base with --learn for longer, or let it answer the "
            f"prompts that ship: `medusa learn {options.base}`"
        )
    known = {row["text"] for row in apart}
    learned_from = list(_within(MOST_NEW, (row for row in everything[count:] if row["text"] not in known)))
    texts = learned_from[: max(FEWEST, len(new) - count)]
    number = learned.last_number + 1
    earlier: list[Row] = [*learned_from[len(texts) :], *_earlier_answers(learned)]
    random.Random(number).shuffle(earlier)
    size = max(LEAST_REPLAYED, sum(_size(row) for row in texts))
    material = Material(held_out=apart, texts=[*texts, *_within(size, earlier)])
    collected.end_new()
    lesson = Round.begun_in(learned.round, options.asked, number, material)
    lesson.save(learned_from=[f"{counted(len(texts), 'text')} that it wrote"], is_private=True)
    return lesson


def _earlier_answers(learned: LearnedHeads) -> Iterator[dict[str, Any]]:
    """Conversations of rounds that asked questions."""
    for path in learned.answers:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):
                yield json.loads(line)


def _within(num_characters: float, rows: Iterable[Row]) -> Iterator[Row]:
    """The first of ``rows``, as many as have room."""
    for row in rows:
        num_characters -= _size(row)
        if num_characters < 0:
            return
        yield row


def _size(row: Row) -> int:
    return len(json.dumps(row, ensure_ascii=False))


def _answered(lesson: Round, model: MedusaModel) -> list[AnsweredTokens]:
    """The newest answers, as tokens."""
    tokenizer = model.tokenizer
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows = []
    for line in lesson.held_out.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        cut = row["answer_from"]
        parts = row["text"][:cut], row["text"][cut:]
        before, answer = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
        prompt = [*start, *before]
        rows.append(AnsweredTokens.after_prompt([*prompt, *answer], max(1, len(prompt))))
    return rows


def _heads_in_use(base: str, model: MedusaModel) -> Heads | None:
    name = heads_in_use(base, find_base(base))
    if name == NO_HEADS:
        return None
    return load_own_heads(model.base).heads if name == OWN_HEADS else load_heads(name).heads


def _judged(
    model: MedusaModel, heads: Heads, in_use: Heads | None, rows: Sequence[AnsweredTokens]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens per step of ``heads``, and their ratio to those of the heads in use, or of none, each with its
    95 % interval."""
    sets = [heads] if in_use is None else [heads, in_use]
    counts = ranked(model, [each.to(model.device).eval() for each in sets], rows, max_rank=JUDGED_NODES)
    replayed = [each.held_out_replay(JUDGED_NODES) for each in counts]
    worth = tokens_per_step(replayed[0])
    return worth, worth if in_use is None else against(replayed[0], replayed[1])


def _is_better(ratio: dict[str, Any], is_first: bool) -> bool:
    return (ratio["low"] or 0) > 1 and ratio["value"] >= (LEAST_USEFUL if is_first else MIN_GAIN)
