"""``medusa generate``: one prompt, one answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from medusa.cli.chat_session import use_compiled_if_there
from medusa.cli.chat_terminal import cost_line
from medusa.cli.commands import GenerateOptions
from medusa.cli.program import chosen_drafter, compile_or, load_for_replies, reply_sampling
from medusa.cli.reporting import checked_utf8, utf8_lines
from medusa.decoding.loop import StepResult
from medusa.decoding.statistics import DecodingStatistics
from medusa.model import MedusaModel
from medusa.progress import log_console
from medusa.prompts import Message, encode_messages, encode_text
from medusa.text_stream import TextStream


def generate(options: GenerateOptions) -> list[str]:
    """Print the answer as it comes, then what it cost."""
    prompt = "".join(utf8_lines()) if options.prompt == "-" else checked_utf8(options.prompt, "the prompt")
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text, or - and text on standard input")
    model = load_for_replies(options)
    use_compiled_if_there(model)
    statistics = DecodingStatistics()
    arguments: dict[str, Any] = {
        **_encoded_prompt(model, prompt, options),
        **reply_sampling(options),
        "max_new_tokens": options.answers.max_new_tokens,
        "seed": options.answers.seed,
        "drafter": chosen_drafter(model, options),
    }
    _print_answer(model.tokenizer, model.stream(**arguments, statistics=statistics))
    seconds = statistics.prefill_seconds + statistics.decode_seconds
    log_console().print(cost_line(statistics, seconds), style="dim")
    return compile_or("chat", model, options.model)


def _encoded_prompt(model: MedusaModel, prompt: str, options: GenerateOptions) -> dict[str, Tensor]:
    if options.raw:
        return encode_text(model.tokenizer, prompt, model.device)
    text = options.replies.system
    system: list[Message] = [] if text is None else [{"role": "system", "content": text}]
    return encode_messages(model.tokenizer, [*system, {"role": "user", "content": prompt}], model.device)


def _print_answer(tokenizer: Any, steps: Iterator[StepResult]) -> None:
    text = TextStream(tokenizer)
    for step in steps:
        sys.stdout.write("".join(text.feed(token) for token in step.tokens[0]))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")
