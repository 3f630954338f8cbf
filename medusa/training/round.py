"""A round of learning: the directory, the record and the training run of ``medusa learn``.

    plan.json                questions and texts were made with these options; how far the round is
    questions.jsonl          what the base is asked, to learn from its answers, and answers.jsonl
    held_out.jsonl           what it is asked to measure on, and held_out_answers.jsonl; texts that it
                             wrote, where nothing is asked
    texts.jsonl              what it reads as it is
    run/                     the training run

Each part goes on where it was stopped: answers are appended, and the run has its checkpoints.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa.conversations import template_columns
from medusa.files import has_keys, read_json, replaced_file, write_json
from medusa.heads.checkpoint import load_heads
from medusa.heads.medusa_heads import HeadsConfig
from medusa.options import TemplateOptions, differences
from medusa.prompts import read_prompts
from medusa.training.config import (
    BaseOptions,
    DataOptions,
    HeadOptions,
    LossOptions,
    MedusaOptions,
    OptimisationOptions,
    RunOptions,
    TrainingConfiguration,
)
from medusa.training.data.material import (
    LEAST_HELD_OUT,
    MOST_HELD_OUT,
    Material,
    Row,
    num_held_out,
)

QUESTIONS = ("demo_prompts", "demo_heldout")
"""The prompts that ship: to learn from, and to measure on."""
ANSWERING, READING, MEASURING = 0.35, 0.1, 0.2
"""Parts of the time: for answers, for texts that are read as they are, and for choosing the tree and
measuring; training has the rest."""
LEAST_TRAINING = 0.2
"""The part that training has in any case."""
BYTES = 4
"""Bytes of a token, in most texts."""
MAX_NODES = 16
"""Nodes of the largest tree."""
NEW_RATE, LATER_RATE = 2e-3, 5e-4
"""Learning rates of new heads, and of those that go on, which forget at the rate of new ones."""


class Round:
    """A round of learning in a directory. What is known of it is in ``plan.json`` at any time."""

    def __init__(self, directory: Path, record: dict[str, Any]):
        self.directory = directory
        self.record = record
        self._opened = time.monotonic() - 60 * record["minutes_taken"]
        self.questions = directory / "questions.jsonl"
        self.answers = directory / "answers.jsonl"
        self.held_out = directory / "held_out.jsonl"
        self.held_out_answers = directory / "held_out_answers.jsonl"
        self.texts = directory / "texts.jsonl"
        self.heads = directory / "run" / "heads"

    @classmethod
    def stopped_in(cls, directory: Path, options: Mapping[str, Any]) -> Round | None:
        """The round that was stopped there; None where none was.

        Raises:
            ValueError: it had other ``options``.
        """
        path = directory / "plan.json"
        if not has_keys(path, "asked", "number", "minutes_taken"):
            return None
        record = read_json(path)
        changed = differences(record["asked"], options)
        if changed:
            raise ValueError(
                f"a round of learning was stopped that had other options: {'; '.join(changed)}; give those "
                "again to go on with it, or --fresh to begin anew"
            )
        # it went on until it was killed
        last_written = max(each.stat().st_mtime for each in directory.rglob("*") if each.is_file())
        record["minutes_taken"] += (last_written - path.stat().st_mtime) / 60
        return cls(directory, record)

    @classmethod
    def begun_in(
        cls,
        directory: Path,
        options: Mapping[str, Any],
        number: int,
        material: Material,
        earlier: Sequence[Path] = (),
    ) -> Round:
        """A new round, in place of whatever is there; it learns from the ``earlier`` files of answers too."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        new = cls(directory, {"asked": dict(options), "number": number, "minutes_taken": 0.0})
        new.record["earlier"] = [str(path) for path in earlier]
        write_rows(new.questions, material.questions)
        write_rows(new.held_out, material.held_out)
        write_rows(new.texts, material.texts)
        new.save()  # last: without it the rest is nothing
        return new

    def save(self, **values: Any) -> None:
        """Keep ``values``, in plain JSON."""
        self.record |= values | {"minutes_taken": self.minutes_taken}
        write_json(self.directory / "plan.json", self.record)

    @property
    def number(self) -> int:
        """Rounds of a base are counted from 1."""
        return int(self.record["number"])

    @property
    def minutes(self) -> float | None:
        """All that it may take; None until it is known."""
        return self.record.get("minutes") or self.record["asked"]["minutes"]

    @property
    def minutes_taken(self) -> float:
        """What it took until now, with the commands before that were stopped."""
        return (time.monotonic() - self._opened) / 60

    @property
    def is_answered(self) -> bool:
        return bool(self.record.get("is_answered"))

    def end_answers(self, tokens_a_second: float, **facts: Any) -> None:
        """Keep what is known of the base once it has answered, and how long training takes: what is left when
        everything is read once, so many ``tokens_a_second``."""
        minutes = self.minutes or 0.0
        num_tokens = sum(path.stat().st_size for path in (self.answers, self.texts)) / BYTES
        left = (1 - MEASURING) * minutes - self.minutes_taken - num_tokens / tokens_a_second / 60
        self.save(is_answered=True, training_minutes=max(LEAST_TRAINING * minutes, left), **facts)

    def keep_texts(self, num_characters: float) -> None:
        """Leave out texts beyond so many characters; they are shuffled."""
        kept = []
        with self.texts.open(encoding="utf-8") as lines:
            for line in lines:
                num_characters -= len(line)
                if num_characters < 0:
                    break
                kept.append(line)
        with replaced_file(self.texts) as partial:
            partial.write_text("".join(kept), encoding="utf-8")

    def configuration(self, base: BaseOptions, template: TemplateOptions) -> TrainingConfiguration:
        """The training run, once it is known how long it takes, how wide the base is and where heads
        begin."""
        record = self.record
        start_from = record["start_from"]
        if start_from is None:
            fused = sorted({max(1, record["layers"] * quarter // 4) for quarter in (1, 2, 3)})
            config = HeadsConfig(
                record["width"],
                record["vocabulary"],
                num_heads=4,
                unembedding="token_map",
                reads_path=True,
                token_map_size=min(2**13, record["vocabulary"]),
                path_rank=min(256, record["width"]),
                fused_layers=tuple(fused),
            )
        else:
            config = load_heads(start_from).heads.config
        own = [path for path in (self.answers, self.texts) if path.exists() and path.stat().st_size]
        return TrainingConfiguration(
            base=base,
            heads=HeadOptions(
                num_heads=config.num_heads,
                token_map_size=config.token_map_size,
                fused_layers=[*config.fused_layers] or None,
                start_from=start_from,
            ),
            medusa=MedusaOptions(config.num_layers, config.unembedding, config.reads_path, config.path_rank),
            data=DataOptions(
                enable_thinking=template.enable_thinking,
                chat_template_kwargs=template.chat_template_kwargs,
                data=[*record["earlier"], *map(str, own)],
                train_on="everything",
                tokens_per_batch=1024,
                max_repeated_fraction=0.5,
                drop_duplicates=True,
            ),
            loss=LossOptions("kl"),
            optimisation=OptimisationOptions(
                learning_rate=NEW_RATE if start_from is None else LATER_RATE,
                weight_decay=0.1,
                num_epochs=record.get("epochs"),
                max_minutes=record.get("training_minutes"),
                precision="bf16" if multiplies_bfloat16() else "fp32",
                cache_hidden_states=True,
                cache_dtype="bfloat16",
            ),
            run=RunOptions(
                str(self.heads.parent), resume="auto", checkpoint_minutes=2.0, tree_nodes=MAX_NODES
            ),
        )


def multiplies_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 in hardware; others emulate it, a hundred times slower."""
    return torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()


def material_of_prompts(prompts: Path | None) -> Material:
    """The material in a file of prompts, by default in those that ship; of one's own a tenth is kept apart.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row cannot be read, or there are too few.
    """
    if prompts is None:
        learned, apart = (_prompt_rows(Path(name)) for name in QUESTIONS)
        return Material(learned, apart[:MOST_HELD_OUT])
    rows = _prompt_rows(prompts)
    count = min(MOST_HELD_OUT, num_held_out(len(rows)))
    if len(rows) <= count:
        raise ValueError(
            f"prompts must hold at least {LEAST_HELD_OUT + 1}, one to learn from and others to measure on, "
            f"got {len(rows)} in {prompts}"
        )
    # of all parts of the file
    places = {(2 * number + 1) * len(rows) // (2 * count) for number in range(count)}
    learned = [row for place, row in enumerate(rows) if place not in places]
    return Material(learned, [rows[place] for place in sorted(places)])


def _prompt_rows(path: Path) -> list[Row]:
    """The rows of a file of prompts, without the answers that it may hold."""
    rows = []
    for prompt in read_prompts(path):
        messages = list(prompt.messages)
        turns: Row = {"messages": messages}
        if prompt.later_turns:
            turns = {"turns": [messages[-1]["content"], *prompt.later_turns]}
        rows.append({**turns, "category": prompt.category, **template_columns(prompt.template_options)})
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` as JSON lines, whole or not at all."""
    with replaced_file(path) as partial:
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
