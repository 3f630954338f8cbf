"""Self-distillation: the base model answers the prompts that its heads are then trained on.

Heads learn to foresee the base model, so its own answers are the data that works. What an answer
says depends on the prompt's index, its temperature and the seed, never on batch size or order.
This module knows who is asked what and what is kept; ``answering`` does the asking, ``answer_file``
the keeping.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from medusa.prompts import Message, Prompt
from medusa.training.distillation.answer_file import AnswerFile
from medusa.training.distillation.answering import Answerer, Conversation, CountTokens, Refusal, Reply

REFUSALS_BEFORE_GIVING_UP = 3


@dataclass
class DistillationReport:
    """What one run did."""

    num_ended: int = 0
    """Conversations; those without an answer are not written."""
    num_written: int = 0
    num_answers: int = 0
    num_cut: int = 0
    """Answers that ran into the length limit or a loop."""
    num_tokens: int = 0
    """Of the answers."""
    num_refused: int = 0
    first_refusal: str = ""
    num_unasked: int = 0
    """Prompts left when the time limit came."""

    def count(self, outcome: Reply | Refusal) -> None:
        if isinstance(outcome, Refusal):
            self.num_refused += 1
            self.first_refusal = self.first_refusal or outcome.reason
            return
        self.num_answers += 1
        self.num_cut += outcome.was_cut
        self.num_tokens += outcome.num_tokens


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
        if index < len(prompts) and not _begins_with(row["messages"], prompts[index].messages):
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
    """Answer ``conversations`` into ``answers``, in the order they end, and say what was done.

    ``count_tokens`` is called as tokens come, ``when_ended`` after each conversation.

    Raises:
        ValueError: the first prompts were all refused; the message is the first reason.
    """
    report = DistillationReport()
    unasked, going_on = deque(conversations), deque[Conversation]()

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
        elif answers.is_empty and report.num_refused >= REFUSALS_BEFORE_GIVING_UP:
            raise ValueError(
                f"the first {report.num_refused} prompts were all refused: {report.first_refusal}"
            )
        report.num_ended += 1
        when_ended(report)
    report.num_unasked = len(unasked)
    return report


def _row(conversation: Conversation) -> dict[str, Any]:
    category = {} if conversation.category is None else {"category": conversation.category}
    options = dict(conversation.template_options)
    tools = options.pop("tools", None)
    return {
        "index": conversation.index,
        **category,
        "messages": conversation.messages,
        **({"tools": tools} if tools else {}),
        **({"chat_template_kwargs": options} if options else {}),
        "temperature": conversation.temperature,
        "finish_reason": "length" if conversation.was_cut else "stop",
    }


def _begins_with(messages: Sequence[Message], opening: Sequence[Message]) -> bool:
    return list(messages[: len(opening)]) == list(opening)
