"""``medusa side-by-side``: answers plain and with heads, the text once and all times."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import tyro
from rich.console import Console
from rich.text import Text
from torch import Tensor

from medusa.cli.options import AnswerOptions, ProgramOptions, words_of
from medusa.cli.program import (
    encode_prompts,
    generation_arguments,
    heads_of,
    load_model,
    load_prompts,
)
from medusa.cli.reporting import command, report_json
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.heads import drafter_of_heads
from medusa.heads.checkpoint import load_heads
from medusa.model import MedusaModel
from medusa.progress import log_console
from medusa.tables import print_table, times
from medusa.text_stream import TextStream
from medusa.trees.candidate_tree import CandidateTree

DEFAULT_LIMIT = 4
WARM_UP_TOKENS = 8
PLAIN, HEADS = "plain", "with heads"

Way = dict[str, Any]
"""How a contender decodes: ``tree`` or ``drafter`` of ``generate``."""


@dataclass(frozen=True, kw_only=True)
class SideBySideOptions(ProgramOptions):
    """Side by side: answers plain and with heads. The text once, all times, and whether it is the same.

    Each prompt is answered by the base model alone and with the heads, in turns who goes first; the first
    answer is shown as it comes, the others are compared with it token by token. --beside adds other heads of
    the same base. For careful timing, see benchmark.py. Ends with one line of JSON.

        medusa side-by-side
        medusa side-by-side --heads HEADS --prompts FILE --limit 5 --max-new-tokens 200
        medusa side-by-side --heads runs/demo/heads --beside shipped=smollm2-135m-instruct
        medusa side-by-side --temperature 0.7 --seed 3
    """

    beside: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=HEADS: other heads of the same base to answer with too, and what to call them; may be repeated."""

    def __post_init__(self) -> None:
        for text in self.beside:
            name, _, heads = text.partition("=")
            if not name or not heads or name in (PLAIN, HEADS):
                raise ValueError(f"beside must be NAME=HEADS with a name of its own, got {text!r}")


@dataclass(frozen=True)
class Answer:
    """One answer and its price."""

    tokens: list[int]
    seconds: float
    """Prefill included."""
    statistics: DecodingStatistics


Answers = dict[str, Answer]
"""Every contender's answer to one prompt."""


def compare(options: SideBySideOptions) -> list[str]:
    """Answer, show and sum up."""
    asked = options.prompts
    if asked.limit is None and asked.prompts is None:
        asked = replace(asked, limit=DEFAULT_LIMIT)
    model = load_model(options.model)
    heads_of(model)
    ways = contenders(model, options.beside)
    prompts = load_prompts(asked)
    encoded = encode_prompts(model, prompts, options.answers.max_new_tokens)
    warm_up(model, encoded[0], options.answers, ways)
    console = Console(highlight=False)
    answered = []
    for number, (prompt, inputs) in enumerate(zip(prompts, encoded, strict=True)):
        console.rule(style="dim")
        console.print(prompt.messages[-1]["content"], style="bold", markup=False)
        console.print()
        answered.append(answer_with_all(model, inputs, options.answers, ways, number))
    console.rule(style="dim")
    print_summary(console, answered)
    console.print(verdict(answered, model.tree))
    report_json(make_report(answered), options.report)
    return [command("chat", *words_of(options.model))]


def contenders(model: MedusaModel, beside: Sequence[str]) -> dict[str, Way]:
    """Plain decoding, the model's heads, and the heads of ``--beside``, on one copy of the base.

    Raises:
        ValueError: heads that do not fit the base.
    """
    ways: dict[str, Way] = {PLAIN: {"tree": CandidateTree.chain(0)}, HEADS: {"tree": model.tree}}
    for text in beside:
        name, _, source = text.partition("=")
        checkpoint = load_heads(source)
        if checkpoint.adapter is not None:
            raise ValueError(
                f"--beside {name}={source} holds a LoRA adapter, and with it the base says other things; "
                "compare heads of one and the same base"
            )
        other = MedusaModel(model.runner, checkpoint.heads, checkpoint.tree)
        assert other.drafting_heads is not None, "it was made with heads"
        ways[name] = {"drafter": drafter_of_heads(other.drafting_heads, model.runner, other.tree)}
    return ways


def warm_up(
    model: MedusaModel, inputs: Mapping[str, Tensor], options: AnswerOptions, ways: Mapping[str, Way]
) -> None:
    """Let every way run once, so that none pays for what the first run sets up."""
    arguments: dict[str, Any] = {**inputs, **generation_arguments(options), "max_new_tokens": WARM_UP_TOKENS}
    for way in ways.values():
        model.generate(**arguments, seed=options.seed, **way)


def answer_with_all(
    model: MedusaModel,
    inputs: Mapping[str, Tensor],
    options: AnswerOptions,
    ways: Mapping[str, Way],
    number: int,
) -> Answers:
    """All answers, the first on the terminal as it comes, all prices below it; who is first goes round."""
    names = list(ways)
    order = names[number % len(names) :] + names[: number % len(names)]
    log, answers = log_console(), dict[str, Answer]()
    for name in order:
        if name != order[0]:
            log.print(f"again, {name} ...", style="dim")
        answers[name] = timed_answer(model, inputs, options, ways[name], is_shown=name == order[0])
    for name in names:
        num_tokens, per_step = len(answers[name].tokens), answers[name].statistics.tokens_per_step
        price = f"{num_tokens} tokens in {answers[name].seconds:.1f} s, {per_step:.2f} per step"
        log.print(f"{name:>12}: {price}", style="dim")
    return {name: answers[name] for name in names}  # the columns of every table are in this order


def timed_answer(
    model: MedusaModel,
    inputs: Mapping[str, Tensor],
    options: AnswerOptions,
    way: Way,
    is_shown: bool,
) -> Answer:
    """One answer; printing it is not on the clock."""
    statistics, text = DecodingStatistics(), TextStream(model.tokenizer)
    tokens: list[int] = []
    seconds, began = 0.0, time.perf_counter()
    arguments: dict[str, Any] = {**inputs, **generation_arguments(options)}
    for step in model.stream(**arguments, seed=options.seed, statistics=statistics, **way):
        seconds += time.perf_counter() - began
        tokens += step.tokens[0]
        if is_shown:
            sys.stdout.write("".join(text.feed(token) for token in step.tokens[0]))
            sys.stdout.flush()
        began = time.perf_counter()
    if is_shown:
        sys.stdout.write(text.finish() + "\n\n")
        sys.stdout.flush()
    return Answer(tokens, seconds, statistics)


def print_summary(console: Console, answered: Sequence[Answers]) -> None:
    """A row a prompt, and one for all."""
    headers = ["prompt", "tokens", "plain, s"]
    for name in answered[0]:
        if name != PLAIN:
            headers += [f"{name}, s", "x plain", "tok/step"]
    rows = [[str(number), *_cells([answers])] for number, answers in enumerate(answered, start=1)]
    rows.append(["all", *_cells(answered)])
    print_table(console, "Plain and with heads", [*headers, "same"], rows, styles={len(rows) - 1: "bold"})


def verdict(answered: Sequence[Answers], tree: CandidateTree) -> Text:
    """The outcome in a sentence."""
    report = make_report(answered)
    if not report["identical"]:
        number = next(n for n, answers in enumerate(answered, start=1) if not is_identical(answers))
        return Text(
            f"The answers to prompt {number} differ. In float32 they must not; in lower precision near-ties "
            "can flip.",
            style="bold red",
        )
    return Text(
        f"All {report['num_tokens']} tokens are the same, at {report['tokens_per_step']:.2f} tokens per step "
        f"and {report['speedup']:.2f} times the speed, with a tree of {tree.num_nodes} nodes.",
        style="green",
    )


def is_identical(answers: Answers) -> bool:
    """Whether every contender said the same."""
    return all(answer.tokens == answers[PLAIN].tokens for answer in answers.values())


def make_report(answered: Sequence[Answers]) -> dict[str, Any]:
    """The JSON object of this program."""
    plain = _seconds(answered, PLAIN)
    return {
        "identical": all(is_identical(answers) for answers in answered),
        "num_prompts": len(answered),
        "num_tokens": sum(len(answers[HEADS].tokens) for answers in answered),
        "plain_seconds": plain,
        "heads_seconds": _seconds(answered, HEADS),
        "speedup": plain / _seconds(answered, HEADS),
        "tokens_per_step": _tokens_per_step(answered, HEADS),
        "beside": {
            name: {
                "seconds": _seconds(answered, name),
                "speedup": plain / _seconds(answered, name),
                "tokens_per_step": _tokens_per_step(answered, name),
            }
            for name in answered[0]
            if name not in (PLAIN, HEADS)
        },
    }


def _seconds(answered: Sequence[Answers], name: str) -> float:
    return sum(answers[name].seconds for answers in answered)


def _tokens_per_step(answered: Sequence[Answers], name: str) -> float:
    return reduce(add, (answers[name].statistics for answers in answered)).tokens_per_step


def _cells(answered: Sequence[Answers]) -> list[str]:
    plain = _seconds(answered, PLAIN)
    cells = [str(sum(len(answers[PLAIN].tokens) for answers in answered)), f"{plain:.1f}"]
    for name in answered[0]:
        if name != PLAIN:
            seconds = _seconds(answered, name)
            per_step = _tokens_per_step(answered, name)
            cells += [f"{seconds:.1f}", times(plain / seconds), f"{per_step:.2f}"]
    return [*cells, "yes" if all(is_identical(answers) for answers in answered) else "NO"]
