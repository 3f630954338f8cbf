"""Side by side: answers plain and with heads. The text once, both times, and whether it is the same.

Each prompt is answered by the base model alone and with the heads, in turns who goes first; the first
answer is shown as it comes, the second is compared with it token by token. For careful timing, see
benchmark.py. Ends with one line of JSON.

    python inference/side_by_side.py
    python inference/side_by_side.py --heads HEADS --prompts FILE --limit 5 --max-new-tokens 200
    python inference/side_by_side.py --temperature 0.7 --seed 3
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from medusa.chat import TextStream
from medusa.flags import ProgramOptions, program_parser
from medusa.model import MedusaModel
from medusa.programs import (
    encode_prompts,
    exit_status,
    generation_arguments,
    heads_of,
    load_model,
    load_prompts,
    log_console,
    report_json,
)
from medusa.statistics import DecodingStatistics
from medusa.tree import CandidateTree

DEFAULT_LIMIT = 4
WARM_UP_TOKENS = 8
PLAIN, HEADS = "plain", "with heads"


@dataclass(frozen=True)
class Answer:
    """One answer and its price."""

    tokens: list[int]
    seconds: float
    """Prefill included."""
    statistics: DecodingStatistics


@dataclass(frozen=True)
class Pair:
    """Both answers to one prompt."""

    plain: Answer
    heads: Answer

    @property
    def is_identical(self) -> bool:
        return self.plain.tokens == self.heads.tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = program_parser(__doc__ or "").parse_args(arguments, namespace=ProgramOptions())
    return exit_status(lambda: compare(options), options.traceback)


def compare(options: ProgramOptions) -> None:
    """Answer, show and sum up."""
    if options.limit is None and options.prompts is None:
        options.limit = DEFAULT_LIMIT
    model = load_model(options)
    heads_of(model)
    prompts = load_prompts(options)
    encoded = encode_prompts(model, prompts, options.max_new_tokens)
    warm_up(model, encoded[0], options)
    console = Console(highlight=False)
    pairs = []
    for number, (prompt, inputs) in enumerate(zip(prompts, encoded, strict=True)):
        console.rule(style="dim")
        console.print(prompt.messages[-1]["content"], style="bold", markup=False)
        console.print()
        pairs.append(answer_twice(model, inputs, options, plain_first=number % 2 == 0))
    console.rule(style="dim")
    console.print(summary_table(pairs))
    console.print(verdict(pairs, model.tree))
    report_json(make_report(pairs), options)


def warm_up(model: MedusaModel, inputs: Mapping[str, Tensor], options: ProgramOptions) -> None:
    """Let both ways run once, so that neither pays for what the first run sets up."""
    arguments: dict[str, Any] = {**inputs, **generation_arguments(options), "max_new_tokens": WARM_UP_TOKENS}
    for tree in (model.tree, CandidateTree.chain(0)):
        model.generate(**arguments, seed=options.seed, tree=tree)


def answer_twice(
    model: MedusaModel, inputs: Mapping[str, Tensor], options: ProgramOptions, plain_first: bool
) -> Pair:
    """Both answers, the first on the terminal as it comes, both prices below it."""
    trees = {PLAIN: CandidateTree.chain(0), HEADS: model.tree}
    first, second = (PLAIN, HEADS) if plain_first else (HEADS, PLAIN)
    log = log_console()
    answers = {first: timed_answer(model, inputs, options, trees[first], is_shown=True)}
    log.print(f"again, {second} ...", style="dim")
    answers[second] = timed_answer(model, inputs, options, trees[second], is_shown=False)
    for name in trees:
        num_tokens, per_step = len(answers[name].tokens), answers[name].statistics.tokens_per_step
        price = f"{num_tokens} tokens in {answers[name].seconds:.1f} s, {per_step:.2f} per step"
        log.print(f"{name:>10}: {price}", style="dim")
    return Pair(answers[PLAIN], answers[HEADS])


def timed_answer(
    model: MedusaModel,
    inputs: Mapping[str, Tensor],
    options: ProgramOptions,
    tree: CandidateTree,
    is_shown: bool,
) -> Answer:
    """One answer; printing it is not on the clock."""
    statistics, text = DecodingStatistics(), TextStream(model.tokenizer)
    tokens: list[int] = []
    seconds, began = 0.0, time.perf_counter()
    arguments: dict[str, Any] = {**inputs, **generation_arguments(options)}
    for step in model.stream(**arguments, seed=options.seed, tree=tree, statistics=statistics):
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


def summary_table(pairs: Sequence[Pair]) -> Table:
    """A row a prompt, and one for all."""
    table = Table(title="Plain and with heads", title_justify="left")
    names = ("prompt", "tokens", "plain", "with heads", "faster", "tokens per step", "same tokens")
    for name in names:
        table.add_column(name, justify="right")
    for number, pair in enumerate(pairs, start=1):
        table.add_row(str(number), *_cells([pair]))
    table.add_section()
    table.add_row("all", *_cells(pairs), style="bold")
    return table


def verdict(pairs: Sequence[Pair], tree: CandidateTree) -> Text:
    """The outcome in a sentence."""
    report = make_report(pairs)
    if not report["identical"]:
        number = next(number for number, pair in enumerate(pairs, start=1) if not pair.is_identical)
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


def make_report(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The JSON object of this program."""
    plain = sum(pair.plain.seconds for pair in pairs)
    heads = sum(pair.heads.seconds for pair in pairs)
    counted = reduce(add, (pair.heads.statistics for pair in pairs))
    return {
        "identical": all(pair.is_identical for pair in pairs),
        "num_prompts": len(pairs),
        "num_tokens": sum(len(pair.heads.tokens) for pair in pairs),
        "plain_seconds": plain,
        "heads_seconds": heads,
        "speedup": plain / heads,
        "tokens_per_step": counted.tokens_per_step,
    }


def _cells(pairs: Sequence[Pair]) -> list[str]:
    report = make_report(pairs)
    return [
        str(report["num_tokens"]),
        f"{report['plain_seconds']:.1f} s",
        f"{report['heads_seconds']:.1f} s",
        f"{report['speedup']:.2f}x",
        f"{report['tokens_per_step']:.2f}",
        "yes" if report["identical"] else "NO",
    ]


if __name__ == "__main__":
    sys.exit(main())
