"""What the subcommands of ``medusa`` can be told; the docstring of each class is its --help."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from medusa.cli.options import (
    AnswerOptions,
    DrafterOptions,
    ModelOptions,
    PromptOptions,
    ReportOptions,
    check_above,
)


@dataclass(frozen=True)
class ReplyOptions:
    """How to reply."""

    system: str | None = None
    """System message; none leaves it to the chat template."""
    plain: bool = False
    """Decode without heads: the same text, slower."""
    drafter: str | None = None
    """Who guesses ahead: heads, suffix, draft-model, ..., or a union such as heads+suffix; the text is the
    same. None is dynamic-heads+suffix, the heads and what followed the same words before; and heads where
    --step is not general, since they run in every kind of step."""
    repetition_penalty: float | None = None
    """Above 1 discourages repetition."""

    def __post_init__(self) -> None:
        check_above(self, 0, "repetition_penalty")
        if self.plain and self.drafter is not None:
            raise ValueError(f"plain guesses nothing, and drafter {self.drafter} does; give one of them")


@dataclass(frozen=True, kw_only=True)
class AnsweringOptions:
    """The options of both subcommands that answer."""

    model: ModelOptions = ModelOptions()
    answers: AnswerOptions = AnswerOptions(max_new_tokens=512)
    replies: ReplyOptions = ReplyOptions()
    drafters: DrafterOptions = DrafterOptions()

    def __post_init__(self) -> None:
        self.drafters.check_read_by(self.replies.drafter or "")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AnsweringOptions):
    """Chat with a base model and its heads: the text the base alone would write, sooner.

    Questions come from the keyboard, from a pipe (one a line) or from a prompts file.

        medusa chat
        medusa chat --drafter heads --color-depth
        medusa chat --base meta-llama/Llama-3.1-8B-Instruct --heads runs/llama/heads
        medusa chat --prompts FILE --limit 3 --json session.json
        printf 'Hello!\\n/stats\\n' | medusa chat --temperature 0.7 --seed 3
    """

    color_depth: bool = False
    """Colour each token by the depth of the guess behind it; the base model's own stay plain."""
    prompts: PromptOptions = PromptOptions()
    report: ReportOptions = ReportOptions()


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnsweringOptions):
    """Answer one prompt; the answer goes to standard output, what it cost to standard error.

    Examples:

        medusa generate 'Write a haiku about rain.'
        medusa generate --raw --max-new-tokens 40 'Once upon a time'
        medusa generate - < question.txt
    """

    prompt: tyro.conf.Positional[str]
    """The prompt, or - to read it from standard input."""
    raw: bool = False
    """Continue the text; no chat template."""
    traceback: bool = False
    """Show where in the code an error arose."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raw and self.replies.system is not None:
            raise ValueError("system goes with the chat template, which raw leaves out; give one of them")


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Say what a heads directory holds: the heads, their tree, and how they were made.

    Examples:

        medusa info runs/demo/heads
        medusa info --json owner/heads-on-the-hub
    """

    heads: tyro.conf.Positional[str]
    """A heads directory, a hub id, or the name of heads that ship."""
    json: bool = False
    """One line of JSON instead of a table."""
    traceback: bool = False
    """Show where in the code an error arose."""
