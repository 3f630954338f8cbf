"""Self-distillation: the base model answers the prompts that its heads are then trained on.

Heads learn to predict the base model, so its own answers are the data that works. The text of an answer
depends on the prompt's index, its temperature and the seed, never on batch size or order. This module
schedules prompts and stores answers; ``answering`` gets them.

The answers are append-only JSON lines, safe to kill at any moment:

    {"index": 3, "category": "qa", "messages": [...], "temperature": 0.8, "finish_reason": "stop"}

``index`` counts the prompts from 0, so a later run knows which are done. Beside ``data.jsonl``,
``data.config.json`` has the configuration of the answers: a file never mixes two configurations.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa.conversations import template_columns
from medusa.files import read_json, write_json
from medusa.options import differences
from medusa.prompts import Prompt
from medusa.training.distillation.answering import Answerer, Conversation, CountTokens, Reply
from medusa.training.endpoints import Refusal

_REFUSALS_BEFORE_GIVING_UP = 3


@dataclass
class DistillationReport:
    """The report of one run."""

    num_ended: int = 0
    """Conversations; those without an answer are not written."""
    num_written: int = 0
    num_answers: int = 0
    num_cut: int = 0
    """Answers that ran into the length limit or a loop."""
    num_tokens: int = 0
    """Number of answer tokens."""
    num_reasoned: int = 0
    """Answers with reasoning, which is stored separately."""
    num_characters: int = 0
    """Characters of the answers, their reasoning included."""
    num_reasoning: int = 0
    """Characters of reasoning."""
    num_refused: int = 0
    first_refusal: str = ""
    num_empty: int = 0
    """Conversations that are not written because their answer holds no text."""
    num_cut_questions: int = 0
    """Conversations that are not written because the model's own question ran into the length limit."""
    num_unasked: int = 0
    """Prompts left when the time limit came."""

    @property
    def reasoning_share(self) -> float:
        """The part of the answers' characters that is reasoning."""
        return self.num_reasoning / max(1, self.num_characters)

    def count_left_out(self, reply: Reply, is_time_up: bool) -> None:
        """Count a conversation that is not written, by what its last message was."""
        if reply.says_something:
            self.num_cut_questions += 1
        elif reply.was_cut and is_time_up:
            self.num_unasked += 1
        else:
            self.num_empty += 1

    def count(self, outcome: Reply | Refusal) -> None:
        if isinstance(outcome, Refusal):
            self.num_refused += 1
            self.first_refusal = self.first_refusal or str(outcome)
            return
        self.num_answers += 1
        self.num_cut += outcome.was_cut
        self.num_tokens += outcome.num_tokens
        reasoning = len(outcome.message.get("reasoning_content") or "")
        self.num_reasoned += bool(reasoning)
        self.num_reasoning += reasoning
        self.num_characters += reasoning + len(outcome.message["content"])


class TimeLimit:
    """A stretch of time that begins now; ``minutes`` None never ends."""

    def __init__(self, minutes: float | None):
        self.seconds = None if minutes is None else 60 * minutes
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def is_up(self) -> bool:
        return self.seconds is not None and self.elapsed >= self.seconds


def unanswered(
    prompts: Sequence[Prompt], answers: AnswerFile, temperatures: Sequence[float], seed: int
) -> list[Conversation]:
    """A conversation for each prompt that ``answers`` holds no row of.

    Prompt i gets temperature i modulo their number and the noise stream seed + i.

    Raises:
        ValueError: a row in ``answers`` answers other prompts than these.
    """
    done = set()
    for row in answers.rows():
        index = row["index"]
        opening = list(prompts[index].messages) if index < len(prompts) else []
        if row["messages"][: len(opening)] != opening:
            raise ValueError(
                f"output {str(answers.path)!r} answers other prompts: its row for index {index} does not "
                f"begin as {prompts[index].origin} does; choose another output (adding prompts at the end "
                "is fine)"
            )
        done.add(index)
    return [
        Conversation(
            index=index,
            messages=list(prompt.messages),
            later_turns=deque(prompt.later_turns),
            temperature=temperatures[index % len(temperatures)],
            seed=seed + index,
            category=prompt.category,
            origin=prompt.origin,
            template_options=prompt.template_options,
        )
        for index, prompt in enumerate(prompts)
        if index not in done
    ]


def prompt_free(num_prompts: int) -> list[Prompt]:
    """Prompts that the model asks itself."""
    return [
        Prompt(messages=(), category="prompt-free", origin=f"question {number}")
        for number in range(1, num_prompts + 1)
    ]


def distill(
    conversations: Sequence[Conversation],
    answerer: Answerer,
    answers: AnswerFile,
    limit: TimeLimit,
    count_tokens: CountTokens = lambda num_tokens: None,
    when_ended: Callable[[DistillationReport], None] = lambda report: None,
) -> DistillationReport:
    """Answer ``conversations`` into ``answers``, in the order they end, and report the counts.

    ``count_tokens`` is called as tokens come, ``when_ended`` after each conversation.

    Raises:
        ValueError: the first prompts were all refused; the message is the first reason.
    """
    report = DistillationReport()
    unasked = deque(conversations)
    going_on = deque[Conversation]()

    def next_conversation() -> Conversation | None:
        if limit.is_up():
            return None
        queue = going_on or unasked
        return queue.popleft() if queue else None

    for conversation, outcome in answerer.replies(next_conversation, count_tokens, limit.is_up):
        report.count(outcome)
        if conversation.receive(outcome):
            going_on.append(conversation)
            continue
        if conversation.num_answers:
            answers.append(_row(conversation))
            report.num_written += 1
        elif answers.is_empty and report.num_refused >= _REFUSALS_BEFORE_GIVING_UP:
            raise ValueError(
                f"the first {report.num_refused} prompts were all refused: {report.first_refusal}"
            )
        elif isinstance(outcome, Reply):
            report.count_left_out(outcome, limit.is_up())
        report.num_ended += 1
        when_ended(report)
    report.num_unasked += len(unasked)
    return report


def _row(conversation: Conversation) -> dict[str, Any]:
    category = {} if conversation.category is None else {"category": conversation.category}
    return {
        "index": conversation.index,
        **category,
        "messages": conversation.messages,
        **template_columns(conversation.template_options),
        "temperature": conversation.temperature,
        "finish_reason": "length" if conversation.was_cut else "stop",
    }


class AnswerFile:
    """Appends rows to ``path``; a context manager.

    A last line that a killed run left half-written is cut off on opening.

    Raises:
        BlockingIOError: another run fills it.
        ValueError: the file was made with another configuration, or with none on record.
    """

    def __init__(self, path: str | Path, configuration: Mapping[str, Any]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
            _check_configuration(self.path, configuration)
        except BlockingIOError as error:
            self._file.close()
            raise BlockingIOError(
                f"output {str(path)!r} is being filled by another run, and two would write every answer "
                "twice; wait until that has ended, or choose another output"
            ) from error
        except BaseException:
            self._file.close()
            raise
        with self.path.open("rb+") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and hand it to the operating system."""
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    @property
    def is_empty(self) -> bool:
        """Whether no row was ever written, by an earlier run either."""
        return self.path.stat().st_size == 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that are there.

        Raises:
            ValueError: a row is not ours; the message names file and row.
        """
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                origin = f"{self.path} row {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{origin} is not valid JSON ({error}); remove that line") from error
                is_row = isinstance(row, dict) and {"index", "messages", "finish_reason"} <= set(row)
                if not is_row or not isinstance(row["index"], int) or not isinstance(row["messages"], list):
                    raise ValueError(
                        f"{origin} must hold index, a number, messages, a list, and finish_reason, got "
                        f"{line[:80]!r}; remove that line"
                    )
                yield row


def configuration_path(path: Path) -> Path:
    """Where the configuration of ``path`` is recorded."""
    return path.with_suffix(".config.json")


def _check_configuration(path: Path, configuration: Mapping[str, Any]) -> None:
    """Record the configuration of a new file; compare it with the record of one that has rows."""
    record = configuration_path(path)
    if not path.exists() or path.stat().st_size == 0:
        write_json(record, configuration)
        return
    if not record.exists():
        raise ValueError(
            f"output {str(path)!r} holds rows, but {record} is missing, so they may come from another "
            "configuration; choose another output"
        )
    current = json.loads(json.dumps(_what_matters(configuration)))
    different = differences(_what_matters(read_json(record)), current)
    if different:
        raise ValueError(
            f"output {str(path)!r} was made with another configuration: {'; '.join(different)}; use the same "
            "options to go on with it, or choose another output"
        )


def _what_matters(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """All but the addresses of the servers that answer: they may change, the model may not."""
    return {**configuration, "endpoint": bool(configuration.get("endpoint"))}
