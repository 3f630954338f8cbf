"""A conversation with a model, without a terminal: history, streaming text, what each answer cost.

The terminal around it is :mod:`medusa.cli.chat`; this module never prints.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from medusa.base.causal_lm import context_length, end_ids
from medusa.cli.commands import ChatOptions
from medusa.decoding.batch import StepResult
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.protocol import Drafter
from medusa.model import MedusaModel
from medusa.prompts import Message, encode_messages
from medusa.text_stream import TextStream
from medusa.trees.candidate_tree import CandidateTree

EndedBy = Literal["end", "max_new_tokens", "context", "interrupt"]


class ContextFullError(ValueError):
    """The conversation has outgrown the model's context."""


@dataclass(frozen=True)
class Reply:
    """What one reply said and cost."""

    text: str
    ended_by: EndedBy
    seconds: float
    """From the call to the last token, prefill included."""
    statistics: DecodingStatistics


class ChatSession:
    """Question and answer, with everything said so far as context.

    The n-th answer, counted from 0, is sampled with the seed of ``options`` + n. ``drafter`` guesses ahead
    in place of the one that the model chooses.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, model: MedusaModel, options: ChatOptions, drafter: Drafter | None = None):
        if model.tokenizer is None or model.tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {model.base.name_or_path!r} has no chat template, so there is no way to "
                "render a conversation; use a chat (instruct) model, or `medusa generate --raw`"
            )
        self.model = model
        self.options = options
        self.drafter = drafter
        self.answers: list[Reply] = []
        """Of the whole session, resets included."""
        self.messages: list[Message] = []
        self.template_options: dict[str, Any] = {}
        """What the chat template gets beside the messages of this conversation."""
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        system = self.options.replies.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.template_options = dict(self.options.prompts.told)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest guess of a step."""
        return (self.drafter or self.model.drafter_for(1)).max_depth

    @property
    def statistics(self) -> DecodingStatistics:
        """Of all answers of the session."""
        return sum((answer.statistics for answer in self.answers), DecodingStatistics())

    def reply(self, question: str | Message) -> Generator[tuple[str, int], None, None]:
        """The answer in pieces, as soon as they are certain, each with the depth of the guess behind its last
        token, 0 for the base model's own; afterwards it stands in ``answers`` and in the history.

        Closing the iterator early stops the answer: what was said so far stays in the history, or,
        when nothing was said yet, neither question nor answer does.

        Raises:
            ContextFullError: no room for an answer is left; the history is as it was.
        """
        asked = [
            *self.messages,
            {"role": "user", "content": question} if isinstance(question, str) else question,
        ]
        encoded, room = self._encoded(asked)
        limit = min(room, self.options.answers.max_new_tokens)
        statistics, began = DecodingStatistics(), time.perf_counter()
        steps = self.model.stream(
            **encoded,
            **self.options.sampling,
            max_new_tokens=limit,
            eos_token_id=sorted(end_ids(self.model.base, self.model.tokenizer)) or None,
            seed=self.options.answers.seed + len(self.answers),
            tree=CandidateTree.chain(0) if self.options.replies.plain else None,
            drafter=self.drafter,
            statistics=statistics,
        )
        tokens: list[int] = []
        said: list[str] = []
        ended_by: EndedBy = "interrupt"
        try:
            for text, depth in self._pieces(steps, tokens):
                said.append(text)
                yield text, depth
            ended_by = self._reason(tokens, limit)
        finally:
            text, seconds = "".join(said), time.perf_counter() - began
            if text or ended_by != "interrupt":
                self.answers.append(Reply(text, ended_by, seconds, statistics))
                self.messages = [*asked, {"role": "assistant", "content": text}]

    def _encoded(self, messages: list[Message]) -> tuple[dict[str, Any], int]:
        """The conversation as tensors, and how many tokens its answer may have."""
        encoded = encode_messages(self.model.tokenizer, messages, self.model.device, self.template_options)
        length, context = encoded["input_ids"].shape[1], context_length(self.model.base)
        room = self.options.answers.max_new_tokens if context is None else context - length
        if room < 1:
            raise ContextFullError(
                f"the conversation takes {length} tokens with this question, and the model's context is "
                f"{context}: there is no room for an answer; start afresh, or ask something shorter"
            )
        return encoded, room

    def _pieces(
        self, steps: Iterator[StepResult], tokens: list[int]
    ) -> Generator[tuple[str, int], None, None]:
        """The text of ``steps``; their tokens are added to ``tokens``."""
        stream = TextStream(self.model.tokenizer)
        for step in steps:
            for token, depth in zip(step.tokens[0], step.depths[0], strict=True):
                tokens.append(token)
                yield stream.feed(token), depth
        yield stream.finish(), 0

    def _reason(self, tokens: list[int], limit: int) -> EndedBy:
        """Why a finished answer ended."""
        if len(tokens) < limit or tokens[-1] in end_ids(self.model.base, self.model.tokenizer):
            return "end"
        return "max_new_tokens" if limit == self.options.answers.max_new_tokens else "context"
