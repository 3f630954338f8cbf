"""``medusa write-prompts``: templates and words become different prompts."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa.cli.options import check_at_least
from medusa.cli.reporting import command
from medusa.files import read_yaml, replaced_file
from medusa.progress import log_console

PARTS = Path(__file__).with_name("prompt_parts.yaml")
BLANK = re.compile(r"{(\w+)}")
MAX_REPEATS_IN_A_ROW = 1000
"""Draws that only gave known prompts before the parts count as used up."""


@dataclass(frozen=True)
class PromptWritingOptions:
    """Write prompts for self-distillation, when there are none: kinds of requests with their blanks filled.

        medusa write-prompts --number 2000 --output runs/prompts.jsonl
        medusa distill --prompts runs/prompts.jsonl --output runs/answers.jsonl

    Heads learn what they have seen: prompts should ask for what users will ask for. The parts file holds
    request templates by kind and the words for their blanks; add your own. Kinds take turns, no prompt comes
    twice, and the same seed gives the same prompts. `medusa distill --prompt-free` is the other way: the
    model asks itself.
    """

    output: Path
    """JSON lines to write."""
    number: int = 2000
    """Prompts to write."""
    parts: Path = PARTS
    """Templates by kind, and the words for their blanks."""
    seed: int = 0
    """The same seed gives the same prompts."""
    traceback: bool = False
    """Show where in the code an error arose."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "number")


def read_parts(path: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The templates by kind and the words by blank.

    Raises:
        ValueError: the file has another shape, or a template a blank without words.
    """
    parts: Any = read_yaml(path)
    if not isinstance(parts, dict) or set(parts) != {"kinds", "words"}:
        raise ValueError(f"{path}: a parts file holds `kinds` and `words` and nothing else")
    kinds, words = parts["kinds"], parts["words"]
    for kind, templates in kinds.items():
        for template in templates:
            if missing := sorted(set(BLANK.findall(template)) - set(words)):
                raise ValueError(f"{path}: no words for {missing} of the {kind} template {template!r}")
    return kinds, {blank: [str(word) for word in choices] for blank, choices in words.items()}


def filled(template: str, words: dict[str, list[str]], random_source: random.Random) -> str:
    """``template`` with every blank filled; blanks of one name get different words while these last."""
    used: dict[str, set[str]] = {}

    def word(match: re.Match[str]) -> str:
        blank = match[1]
        unused = [choice for choice in words[blank] if choice not in used.get(blank, ())] or words[blank]
        used.setdefault(blank, set()).add(choice := random_source.choice(unused))
        return choice

    text = BLANK.sub(word, template)
    return text[0].upper() + text[1:]


def prompts_of(
    kinds: dict[str, list[str]], words: dict[str, list[str]], number: int, seed: int
) -> list[dict[str, str]]:
    """``number`` different prompts with their kinds, which take turns.

    Raises:
        ValueError: the parts do not give that many.
    """
    random_source, texts, repeats = random.Random(seed), dict[str, str](), 0
    order = sorted(kinds)
    while len(texts) < number:
        kind = order[len(texts) % len(order)]
        text = filled(random_source.choice(kinds[kind]), words, random_source)
        repeats = repeats + 1 if text in texts else 0
        if repeats == MAX_REPEATS_IN_A_ROW:
            raise ValueError(
                f"--number {number}: the parts give no more than about {len(texts)} different prompts of the "
                f"kind {kind}; add templates or words, or ask for fewer"
            )
        texts.setdefault(text, kind)
    return [{"prompt": text, "category": kind} for text, kind in texts.items()]


def write(options: PromptWritingOptions) -> list[str]:
    """Write the prompts."""
    kinds, words = read_parts(options.parts)
    rows = prompts_of(kinds, words, options.number, options.seed)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(options.output) as partial:
        partial.write_text("".join(lines), encoding="utf-8")
    log_console().print(
        f"{len(rows)} prompts of {len(kinds)} kinds written to {options.output}", soft_wrap=True
    )
    answers = options.output.with_name("answers.jsonl")
    return [command("distill", "--prompts", options.output, "--output", answers)]
