"""``medusa chat`` and ``medusa generate``: answers on a terminal, as they come.

Questions come from a terminal, from a pipe (one a line) or from a prompts file; the conversation itself is in
:mod:`medusa.cli.chat_session`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from medusa.cli.chat_session import ChatSession, ContextFullError
from medusa.cli.commands import ChatOptions, GenerateOptions
from medusa.cli.loading import chosen_drafter, load_for_replies
from medusa.cli.next_steps import command
from medusa.cli.options import words_of
from medusa.cli.terminal import (
    WrappedText,
    checked_utf8,
    piped_lines,
    stop_button,
    typed_questions,
    utf8_lines,
)
from medusa.decoding.statistics import DecodingStatistics
from medusa.measurement.report import end_with_json
from medusa.model import MedusaModel
from medusa.progress import log_console
from medusa.prompts import Message, Prompt, encode_messages, encode_text, read_prompts
from medusa.tables import counted
from medusa.text_stream import TextStream

SLASH_COMMANDS = {
    "/reset": "forget the conversation and start afresh",
    "/stats": "what this session's answers cost, and how often guesses were right, by depth",
    "/help": "this list",
    "/exit": "leave; so does Ctrl-D",
}
DEPTH_STYLES = ("default", "green", "cyan", "magenta", "yellow", "red", "blue")
"""Depth 0, the base model's own tokens, then depth 1, 2, ...; deeper ones take the last."""
ENDINGS = {
    "end": "",
    "max_new_tokens": "cut at --max-new-tokens",
    "context": "cut: the model's context is full, /reset starts afresh",
    "interrupt": "stopped; what was said so far stays in the conversation",
}
# A model may write escape sequences; they are shown, not obeyed.
VISIBLE_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


def chat(options: ChatOptions) -> list[str]:
    """Hold the conversation that the flags ask for; report what it cost when it is over."""
    prompts = (
        None
        if options.prompts.prompts is None
        else read_prompts(options.prompts.prompts, options.prompts.limit)
    )
    model = load_for_replies(options, options.prompts)
    session = ChatSession(model, options, chosen_drafter(model, options))
    terminal = ChatTerminal(session, Console(highlight=False), options.color_depth)
    if prompts is not None:
        terminal.answer_prompts(prompts)
    elif sys.stdin.isatty():
        terminal.greet()
        terminal.converse(typed_questions(terminal.console))
    else:
        terminal.converse(piped_lines(terminal.console))
    end_with_json(session_report(session), options.report.json)
    return [command("serve", *words_of(options.model))]


def session_report(session: ChatSession) -> dict[str, Any]:
    """What a session's answers cost, for JSON."""
    statistics, seconds = session.statistics, sum(answer.seconds for answer in session.answers)
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
    """A session and the screen it is shown on."""

    def __init__(self, session: ChatSession, console: Console, color_depth: bool = False):
        self.session = session
        self.console = console
        self.color_depth = color_depth
        if color_depth:
            self._explain_colors()

    def greet(self) -> None:
        """Say what can be typed."""
        self._note("Type a question. Ctrl-C stops an answer, /help lists commands, /exit or Ctrl-D leaves.")

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

    def obey(self, command: str) -> None:
        """Carry out a command; unknown ones are answered with the list."""
        if command == "/reset":
            self.session.reset()
            self._note("The conversation starts afresh.")
        elif command == "/stats":
            self._show_statistics()
        else:
            if command != "/help":
                self._note(f"There is no command {command}. A space before it asks the model.")
            for name, meaning in SLASH_COMMANDS.items():
                self._note(f"  {name:<7} {meaning}")

    def ask(self, question: str | Message) -> None:
        """Print the answer as it comes, then what it cost."""
        num_answers = len(self.session.answers)
        try:
            self._print_answer(question)
        except ContextFullError as error:
            self._note(f"{error} (/reset)")
            return
        except KeyboardInterrupt:  # a second Ctrl-C, which did not wait for the step to end
            pass
        if len(self.session.answers) == num_answers:
            self._note("stopped before the first word; the question is forgotten")
        else:
            answer = self.session.answers[-1]
            self._note(cost_line(answer.statistics, answer.seconds, ENDINGS[answer.ended_by]))

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
        report = session_report(self.session)
        if not report["num_answers"]:
            self._note("No answers yet.")
            return
        cost = cost_line(self.session.statistics, report["seconds"])
        self._note(f"{counted(report['num_answers'], 'answer')} · {cost}")
        table = Table("depth", "accepted", "accepted once reached", style="dim", header_style="dim")
        rates = zip(report["acceptance_rate"], report["conditional_acceptance_rate"], strict=True)
        for depth, (rate, conditional) in enumerate(rates, start=1):
            table.add_row(str(depth), f"{rate:.0%}", f"{conditional:.0%}", style="dim")
        self.console.print(table)
        heads = self.session.model.heads
        if heads is not None and heads.num_heads < len(report["acceptance_rate"]):
            self._note(f"Heads guess depths 1 to {heads.num_heads}; other drafters guess the deeper ones.")

    def _explain_colors(self) -> None:
        if self.console.color_system is None:
            self._note("--color-depth has no effect here: this output shows no colours")
        names = ["the base model's own"] + [f"depth {d}" for d in range(1, self.session.max_depth + 1)]
        for depth, name in enumerate(names):
            style = DEPTH_STYLES[min(depth, len(DEPTH_STYLES) - 1)]
            self.console.out(
                name, style=style, end=" · " if depth < len(names) - 1 else "\n", highlight=False
            )

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False, soft_wrap=not self.console.is_terminal)


def cost_line(statistics: DecodingStatistics, seconds: float, note: str = "") -> str:
    """What an answer cost, in one line."""
    parts = [
        f"{counted(statistics.num_tokens, 'token')} in {seconds:.1f} s",
        f"{statistics.num_tokens / seconds:.1f} tokens/s",
        f"{statistics.tokens_per_step:.2f} tokens per step",
        note,
    ]
    return " · ".join(part for part in parts if part)


def generate(options: GenerateOptions) -> list[str]:
    """Print the answer as it comes, then what it cost."""
    prompt = "".join(utf8_lines()) if options.prompt == "-" else checked_utf8(options.prompt, "the prompt")
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text, or - and text on standard input")
    model = load_for_replies(options, options.template)
    statistics = DecodingStatistics()
    arguments: dict[str, Any] = {
        **_encoded_prompt(model, prompt, options),
        **options.sampling,
        "max_new_tokens": options.answers.max_new_tokens,
        "seed": options.answers.seed,
        "drafter": chosen_drafter(model, options),
        "prediction": None if options.prediction is None else _text_of(options.prediction),
    }
    text = TextStream(model.tokenizer)
    for step in model.stream(**arguments, statistics=statistics):
        sys.stdout.write("".join(text.feed(token) for token in step.tokens[0]))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")
    seconds = statistics.prefill_seconds + statistics.decode_seconds
    log_console().print(cost_line(statistics, seconds), style="dim")
    return [command("chat", *words_of(options.model))]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prediction must be UTF-8 text, and {path} is not; convert it first") from error


def _encoded_prompt(model: MedusaModel, prompt: str, options: GenerateOptions) -> dict[str, Tensor]:
    if options.raw:
        return encode_text(model.tokenizer, prompt, model.device)
    text = options.replies.system
    system: list[Message] = [] if text is None else [{"role": "system", "content": text}]
    asked, told = [*system, {"role": "user", "content": prompt}], options.template.told
    return encode_messages(model.tokenizer, asked, model.device, told)
