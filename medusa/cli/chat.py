"""``medusa chat`` and ``medusa generate``: answers on a terminal, as they come.

A :class:`ChatSession` is the conversation, and never prints; the screen around it is a :class:`ChatTerminal`.
Questions come from a terminal, from a pipe (one a line) or from a prompts file.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from medusa.base.causal_lm import end_ids
from medusa.base.profile import context_length, longrope_threshold
from medusa.cli.loading import load_for_replies
from medusa.cli.option_types import ChatOptions, GenerateOptions
from medusa.cli.options import command, to_argv
from medusa.cli.terminal import (
    WrappedText,
    piped_lines,
    stop_button,
    typed_questions,
    utf8_lines,
)
from medusa.console import counted, log_console, output_console
from medusa.conversations import Message
from medusa.decoding.batch import StepResult
from medusa.decoding.statistics import DecodingStatistics
from medusa.drafters.protocol import Drafter
from medusa.learning.learned_heads import LearnedVersion
from medusa.measurement.report import end_with_json
from medusa.model import MedusaModel
from medusa.options import checked_utf8
from medusa.prompts import Prompt, check_chat_template, encode_messages, encode_text, read_prompts
from medusa.text_stream import AnswerText
from medusa.trees.candidate_tree import CandidateTree

SLASH_COMMANDS = {
    "/reset": "forget the conversation and start afresh",
    "/stats": "statistics of this session's answers, and acceptance by depth",
    "/help": "this list",
    "/exit": "leave; so does Ctrl-D",
}
DEPTH_STYLES = ("default", "green", "cyan", "magenta", "yellow", "red", "blue")
"""Depth 0, the base model's own tokens, then depth 1, 2, ...; deeper ones take the last."""
ENDINGS = {
    "end": "",
    "max_new_tokens": "cut at --max-new-tokens",
    "context": "cut: the model's context is full, /reset starts afresh",
    "interrupt": "stopped; the text so far stays in the conversation",
}
# A model may write escape sequences; they are shown, not obeyed.
VISIBLE_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


EndedBy = Literal["end", "max_new_tokens", "context", "interrupt"]


class ContextFullError(ValueError):
    """The conversation has outgrown the model's context."""


@dataclass(frozen=True)
class Reply:
    """The text and the statistics of one reply."""

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

    def __init__(
        self,
        model: MedusaModel,
        drafter: Drafter | None,
        options: ChatOptions,
    ):
        check_chat_template(model.tokenizer, model.base.name_or_path)
        self.model = model
        self.options = options
        self.drafter = drafter
        self.answers: list[Reply] = []
        """Statistics of the whole session, resets included."""
        self.messages: list[Message] = []
        self.template_options: dict[str, Any] = {}
        """The chat template options of this conversation."""
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        system = self.options.replies.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.template_options = dict(self.options.prompts.template_kwargs)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest guess of a step."""
        return (self.drafter or self.model.drafter_for(1)).max_depth

    @property
    def statistics(self) -> DecodingStatistics:
        """Statistics of all answers of the session."""
        return sum((answer.statistics for answer in self.answers), DecodingStatistics())

    def reply(self, question: str | Message) -> Generator[tuple[str, int], None, None]:
        """The answer in pieces, as soon as they are certain, each with the depth of its last token, 0 for the
        base model's own; afterwards it is in ``answers`` and in the history.

        Closing the iterator early stops the answer: the text so far stays in the history, or, without any
        text yet, neither question nor answer does.

        Raises:
            ContextFullError: no room for an answer is left; the history is as it was.
        """
        conversation = [
            *self.messages,
            {"role": "user", "content": question} if isinstance(question, str) else question,
        ]
        encoded, room = self._encoded(conversation)
        limit = min(room, self.options.answers.max_new_tokens)
        statistics = DecodingStatistics()
        began = time.perf_counter()
        steps = self._steps(encoded, limit, statistics)
        answer = AnswerText(self.model.tokenizer, self.options.replies.stop)
        tokens: list[int] = []
        pieces: list[str] = []
        ended_by: EndedBy = "interrupt"
        try:
            with closing(steps):
                for step in steps:
                    tokens += step.tokens[0]
                    for piece in answer.feed(step.tokens[0], step.depths[0])[1]:
                        pieces.append(piece.text)
                        yield piece.text, piece.depth
                    if answer.is_stopped:
                        break
            for piece in answer.finish():
                pieces.append(piece.text)
                yield piece.text, piece.depth
            ended_by = "end" if answer.is_stopped else self._reason(tokens, limit)
        finally:
            text = "".join(pieces)
            seconds = time.perf_counter() - began
            if text or ended_by != "interrupt":
                self.answers.append(Reply(text, ended_by, seconds, statistics))
                self.messages = [*conversation, {"role": "assistant", "content": text}]

    def _steps(
        self, encoded: dict[str, Any], limit: int, statistics: DecodingStatistics
    ) -> Generator[StepResult, None, None]:
        """The steps of an answer. A base that changes its rotary frequencies at some length (LongRoPE) reads
        the text anew there: keys of the other side would be wrong."""
        ends = end_ids(self.model.base, self.model.tokenizer)
        switch = longrope_threshold(self.model.base)
        tokens: list[int] = []
        while len(tokens) < limit:
            written = torch.tensor([tokens], dtype=torch.long, device=encoded["input_ids"].device)
            ids = torch.cat([encoded["input_ids"], written], dim=1)
            num_left = limit - len(tokens)
            length = ids.shape[1]
            room = num_left if switch is None or length > switch else min(num_left, switch - length + 1)
            reached = len(tokens) + room
            steps = self.model.stream(
                **{**encoded, "input_ids": ids, "attention_mask": torch.ones_like(ids)},
                **self.options.sampling,
                max_new_tokens=room,
                eos_token_id=sorted(ends) or None,
                seed=self.options.answers.seed + len(self.answers),
                tree=CandidateTree.chain(0) if self.options.replies.plain else None,
                drafter=self.drafter,
                statistics=statistics,
            )
            with closing(steps):
                for step in steps:
                    tokens += step.tokens[0]
                    yield step
            if len(tokens) < reached or tokens[-1] in ends:
                return

    def _encoded(self, messages: list[Message]) -> tuple[dict[str, Any], int]:
        """The conversation as tensors, and how many tokens its answer may have."""
        encoded = encode_messages(self.model.tokenizer, messages, self.model.device, self.template_options)
        length = encoded["input_ids"].shape[1]
        context = context_length(self.model.base)
        room = self.options.answers.max_new_tokens if context is None else context - length
        if room < 1:
            raise ContextFullError(
                f"the conversation takes {length} tokens with this question, and the model's context is "
                f"{context}: there is no room for an answer; start afresh, or ask something shorter"
            )
        return encoded, room

    def _reason(self, tokens: list[int], limit: int) -> EndedBy:
        """Why a finished answer ended."""
        if len(tokens) < limit or tokens[-1] in end_ids(self.model.base, self.model.tokenizer):
            return "end"
        return "max_new_tokens" if limit == self.options.answers.max_new_tokens else "context"


def chat(options: ChatOptions) -> list[str]:
    """Run the conversation that the flags describe; report its statistics at the end."""
    prompts = (
        None
        if options.prompts.prompts is None
        else read_prompts(options.prompts.prompts, options.prompts.limit)
    )
    model, drafter = load_for_replies(options, options.prompts, for_chat=True)
    session = ChatSession(model, drafter, options)
    console = output_console()
    messages = console if console.is_terminal else log_console()
    terminal = ChatTerminal(session, console, options.color_depth, messages)
    if prompts is not None:
        terminal.answer_prompts(prompts)
    elif sys.stdin.isatty():
        terminal.say("Type a question. Ctrl-C stops an answer, /help lists commands, /exit or Ctrl-D leaves.")
        terminal.converse(typed_questions(terminal.console))
    else:
        terminal.converse(piped_lines(terminal.console))
    if options.report.json is not None:
        end_with_json(_session_report(session), options.report.json)
    return [command("serve", *to_argv(options.model))]


def _session_report(session: ChatSession) -> dict[str, Any]:
    """The statistics of a session, for JSON."""
    statistics = session.statistics
    seconds = sum(answer.seconds for answer in session.answers)
    return {
        "num_answers": len(session.answers),
        "num_tokens": statistics.num_tokens,
        "seconds": seconds,
        "tokens_per_second": statistics.num_tokens / seconds if seconds else None,
        "tokens_per_step": statistics.tokens_per_step,
        "acceptance_rate": statistics.acceptance_rate,
        "conditional_acceptance_rate": statistics.conditional_acceptance_rate,
    }


class ChatTerminal:
    """A session and the screen it is shown on: ``console`` has questions and answers, and ``messages``,
    by default the same, what is not the model's."""

    def __init__(
        self,
        session: ChatSession,
        console: Console,
        color_depth: bool = False,
        messages: Console | None = None,
    ):
        self.session = session
        self.console = console
        self.messages = messages or console
        self.color_depth = color_depth
        self._learned = self._learned_version()
        if color_depth:
            self._explain_colors()

    def converse(self, questions: Iterator[str]) -> None:
        """Answer every question, until one says /exit or there are no more.

        A slash and a word, such as /reset, is a command; with a space before it, it is a question.
        """
        for question in questions:
            text = question.strip()
            if text == "/exit":
                return
            if re.match(r"/\w+(\s|$)", question):
                self.obey(text)
            elif text:
                self.ask(text)

    def answer_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Answer every row of a prompts file, each in a conversation of its own."""
        for prompt in prompts:
            self.session.reset()
            self.session.messages += prompt.messages[:-1]
            self.session.template_options |= prompt.template_options
            later: list[Message] = [{"role": "user", "content": turn} for turn in prompt.later_turns]
            for message in (prompt.messages[-1], *later):
                self.console.out(f"> {message['content']}", highlight=False)
                self.ask(message)

    def obey(self, slash_command: str) -> None:
        """Carry out a command; unknown ones are answered with the list."""
        if slash_command == "/reset":
            self.session.reset()
            self.say("The conversation starts afresh.")
        elif slash_command == "/stats":
            self._show_statistics()
        else:
            if slash_command != "/help":
                self.say(f"There is no command {slash_command}. A space before it asks the model.")
            for name, meaning in SLASH_COMMANDS.items():
                self.say(f"  {name:<7} {meaning}")

    def ask(self, question: str | Message) -> None:
        """Print the answer as it comes, then its statistics."""
        version = self._learned_version()
        if version is not None and version != self._learned:
            self._learned = version
            self.say(
                f"from here on it drafts with heads that it has learned, version {version.number}: "
                f"{version.tokens_per_step:.2f} tokens a step on the newest answers (`medusa heads`)"
            )
        num_answers = len(self.session.answers)
        try:
            self._print_answer(question)
        except ContextFullError as error:
            self.say(f"{error} (/reset)")
            return
        except KeyboardInterrupt:  # a second Ctrl-C, which did not wait for the step to end
            pass
        if len(self.session.answers) == num_answers:
            self.say("stopped before the first word; the question is forgotten")
        else:
            answer = self.session.answers[-1]
            plain = self.session.model.plain_step_seconds
            self.say(_cost_line(answer.statistics, answer.seconds, ENDINGS[answer.ended_by], plain))

    def _learned_version(self) -> LearnedVersion | None:
        """The heads that learning by use has put into use here."""
        learning = self.session.model.learning
        return learning.version if learning is not None and learning.follows else None

    def _print_answer(self, question: str | Message) -> None:
        with stop_button() as stopped, closing(self.session.reply(question)) as pieces:
            text = WrappedText(self.console)
            try:
                for piece, depth in pieces:
                    text.write(piece.translate(VISIBLE_CONTROLS), self._style(depth))
                    if stopped.is_set():
                        break
            finally:
                text.finish()

    def _style(self, depth: int) -> str | None:
        return DEPTH_STYLES[min(depth, len(DEPTH_STYLES) - 1)] if self.color_depth else None

    def _show_statistics(self) -> None:
        learning = self.session.model.learning
        if learning is not None:
            kilobytes = learning.report()["new_bytes"] / 1000
            self.say(f"learning by use: {learning.state}, {kilobytes:.0f} kB of text that is new")
        report = _session_report(self.session)
        if not report["num_answers"]:
            self.say("No answers yet.")
            return
        cost = _cost_line(self.session.statistics, report["seconds"])
        self.say(f"{counted(report['num_answers'], 'answer')} · {cost}")
        table = Table("depth", "accepted", "accepted once reached", style="dim", header_style="dim")
        rates = zip(report["acceptance_rate"], report["conditional_acceptance_rate"], strict=True)
        for depth, (rate, conditional) in enumerate(rates, start=1):
            table.add_row(str(depth), f"{rate:.0%}", f"{conditional:.0%}", style="dim")
        self.messages.print(table)
        heads = self.session.model.heads
        if heads is not None and heads.num_heads < len(report["acceptance_rate"]):
            self.say(f"Heads guess depths 1 to {heads.num_heads}; other drafters guess the deeper ones.")

    def _explain_colors(self) -> None:
        if self.console.color_system is None:
            self.say("--color-depth has no effect here: this output shows no colours")
        names = ["the base model's own"] + [f"depth {d}" for d in range(1, self.session.max_depth + 1)]
        for depth, name in enumerate(names):
            style = DEPTH_STYLES[min(depth, len(DEPTH_STYLES) - 1)]
            self.console.out(
                name, style=style, end=" · " if depth < len(names) - 1 else "\n", highlight=False
            )

    def say(self, text: str) -> None:
        """Print a message that is not the model's."""
        messages = self.messages
        messages.print(text, style="dim", markup=False, soft_wrap=not messages.is_terminal)


def _cost_line(
    statistics: DecodingStatistics, seconds: float, note: str = "", plain_seconds: float | None = None
) -> str:
    """The statistics of an answer, in one line; ``plain_seconds`` is the time of a step without drafts."""
    parts = [
        f"{counted(statistics.num_tokens, 'token')} in {seconds:.1f} s",
        f"{statistics.num_tokens / seconds:.1f} tokens/s",
        f"{statistics.tokens_per_step:.2f} tokens per step",
        f"plainly about {1 / plain_seconds:.1f} tokens/s" if plain_seconds else "",
        f"drafting paused in {statistics.num_paused} of {statistics.num_steps} steps, where it does not pay"
        if statistics.num_paused
        else "",
        note,
    ]
    return " · ".join(part for part in parts if part)


def generate(options: GenerateOptions) -> list[str]:
    """Print the answer as it comes, then its statistics."""
    prompt = "".join(utf8_lines()) if options.prompt == "-" else checked_utf8(options.prompt, "the prompt")
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text, or - and text on standard input")
    model, drafter = load_for_replies(options, options.template)
    prediction = None
    path = options.prediction
    if path is not None:
        content = path.read_text(encoding="utf-8", errors="surrogateescape")
        prediction = checked_utf8(content, f"prediction, which is in {path},")
    if options.raw:
        encoded = encode_text(model.tokenizer, prompt, model.device)
    else:
        text = options.replies.system
        system: list[Message] = [] if text is None else [{"role": "system", "content": text}]
        messages: list[Message] = [*system, {"role": "user", "content": prompt}]
        encoded = encode_messages(model.tokenizer, messages, model.device, options.template.template_kwargs)
    statistics = DecodingStatistics()
    arguments: dict[str, Any] = {
        **encoded,
        **options.sampling,
        "max_new_tokens": options.answers.max_new_tokens,
        "seed": options.answers.seed,
        "drafter": drafter,
        "prediction": prediction,
    }
    answer = AnswerText(model.tokenizer, options.replies.stop)
    with closing(model.stream(**arguments, statistics=statistics)) as steps:
        for step in steps:
            sys.stdout.write("".join(piece.text for piece in answer.feed(step.tokens[0], step.depths[0])[1]))
            sys.stdout.flush()
            if answer.is_stopped:
                break
    sys.stdout.write("".join(piece.text for piece in answer.finish()) + "\n")
    seconds = statistics.prefill_seconds + statistics.decode_seconds
    line = _cost_line(statistics, seconds, plain_seconds=model.plain_step_seconds)
    sys.stdout.flush()  # the answer ends its line before the statistics begin theirs
    log = log_console()
    log.print(line, style="dim", soft_wrap=not log.is_terminal)
    return [command("chat", *to_argv(options.model))] if model.tokenizer.chat_template else []
