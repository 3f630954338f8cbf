"""The ``medusa`` command: chat with a model, answer one prompt, look into a heads directory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

import medusa
from medusa.cli.chat_session import TextStream
from medusa.cli.chat_terminal import chat, chat_settings, cost_line
from medusa.cli.flags import (
    ChatOptions,
    add_answer_flags,
    add_chat_flags,
    add_model_flags,
    add_prompt_flags,
    add_reply_flags,
)
from medusa.cli.program import (
    chosen_drafter,
    drafts_with_heads,
    exit_status,
    load_model,
    log_console,
    write_report,
)
from medusa.decoding.loop import StepResult
from medusa.decoding.statistics import DecodingStatistics
from medusa.heads.checkpoint import HeadsCheckpoint, kind_of, load_heads
from medusa.model import MedusaModel
from medusa.prompts import Message, encode_messages, encode_text

LONGEST_CELL = 300
"""Characters of a provenance entry that `medusa info` shows."""
CHAT_HELP = """Chat with a base model and its heads: the text the base alone would write, sooner.

Standard input may be a pipe, one question a line. Examples:

    medusa chat
    medusa chat --drafter heads --color-depth
    medusa chat --base meta-llama/Llama-3.1-8B-Instruct --heads runs/llama/heads --color-depth
    printf 'Hello!\\n/stats\\n' | medusa chat --temperature 0.7 --seed 3
"""
GENERATE_HELP = """Answer one prompt; the answer goes to standard output, what it cost to standard error.

Examples:

    medusa generate 'Write a haiku about rain.'
    medusa generate --raw --max-new-tokens 40 'Once upon a time'
    medusa generate - < question.txt
"""
INFO_HELP = """Say what a heads directory holds: the heads, their tree, and how they were made.

Examples:

    medusa info runs/demo/heads
    medusa info --json owner/heads-on-the-hub
"""


class GenerateOptions(ChatOptions):
    """The flags of ``medusa generate``, parsed."""

    prompt: str
    raw: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``medusa`` with ``arguments`` (the command line's by default); the exit status."""
    options = parser().parse_args(arguments)
    return exit_status(lambda: options.run(options), options.traceback)


def parser() -> argparse.ArgumentParser:
    """All subcommands and their flags."""
    root = argparse.ArgumentParser(
        prog="medusa", description="Medusa heads: several tokens per forward pass, the same text."
    )
    root.add_argument("--version", action="version", version=f"medusa {medusa.__version__}")
    commands = root.add_subparsers(metavar="COMMAND", required=True)

    chat_parser = _subparser(commands, "chat", "talk with a model", CHAT_HELP)
    add_model_flags(chat_parser)
    add_prompt_flags(chat_parser)
    add_answer_flags(chat_parser, max_new_tokens=512)
    add_reply_flags(chat_parser)
    add_chat_flags(chat_parser)
    chat_parser.set_defaults(run=_chat)

    generate = _subparser(commands, "generate", "answer one prompt", GENERATE_HELP)
    generate.add_argument("prompt", metavar="PROMPT", help="the prompt, or - to read it from standard input")
    generate.add_argument("--raw", action="store_true", help="continue the text; no chat template")
    add_model_flags(generate)
    add_answer_flags(generate, max_new_tokens=512)
    add_reply_flags(generate)
    generate.set_defaults(run=_generate)

    info = _subparser(commands, "info", "look into a heads directory", INFO_HELP)
    info.add_argument("heads", metavar="HEADS", help="a heads directory or a hub id")
    info.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    info.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    info.set_defaults(run=_info)
    return root


def _subparser(
    commands: argparse._SubParsersAction, name: str, summary: str, description: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _chat(options: ChatOptions) -> None:
    write_report(chat(options), options)


def _generate(options: GenerateOptions) -> None:
    settings = chat_settings(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text, or - and text on standard input")
    if options.raw and options.system is not None:
        raise ValueError("--system goes with the chat template, which --raw leaves out; give one of them")
    model = load_model(options, with_heads=drafts_with_heads(options))
    statistics = DecodingStatistics()
    arguments: dict[str, Any] = {
        **_encoded_prompt(model, prompt, options),
        **settings.sampling,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "drafter": chosen_drafter(model, options),
    }
    steps = model.stream(**arguments, statistics=statistics)
    _print_answer(model.tokenizer, steps)
    seconds = statistics.prefill_seconds + statistics.decode_seconds
    log_console().print(cost_line(statistics, seconds), style="dim")


def _encoded_prompt(model: MedusaModel, prompt: str, options: GenerateOptions) -> dict[str, Tensor]:
    if options.raw:
        return encode_text(model.tokenizer, prompt, model.device)
    system: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = [*system, {"role": "user", "content": prompt}]
    return encode_messages(model.tokenizer, messages, model.device)


def _print_answer(tokenizer: Any, steps: Iterator[StepResult]) -> None:
    text = TextStream(tokenizer)
    for step in steps:
        sys.stdout.write("".join(text.feed(token) for token in step.tokens[0]))
        sys.stdout.flush()
    sys.stdout.write(text.finish() + "\n")


def _info(options: argparse.Namespace) -> None:
    description = describe_heads(load_heads(options.heads))
    if options.json:
        sys.stdout.write(json.dumps(description) + "\n")
        return
    table = Table(title=f"Heads in {options.heads}", show_header=False, title_justify="left")
    for name, value in description.items():
        if name != "provenance":
            table.add_row(name, _in_words(name, value))
    for name, value in description["provenance"].items():
        text = value if isinstance(value, str) else json.dumps(value)
        table.add_row(f"made: {name}", text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + " ...")
    Console(highlight=False).print(table)


def describe_heads(checkpoint: HeadsCheckpoint) -> dict[str, Any]:
    """What a checkpoint holds, in plain values."""
    heads, tree = checkpoint.heads, checkpoint.tree
    return {
        "kind": kind_of(heads),
        "base_model": checkpoint.base_model,
        **asdict(heads.config),
        "num_parameters": sum(parameter.numel() for parameter in heads.parameters()),
        "adapter": None if checkpoint.adapter is None else checkpoint.adapter.summary(),
        "tree": None
        if tree is None
        else {"num_nodes": tree.num_nodes, "width_by_depth": tree.width_by_depth},
        "tuned_trees": [
            {
                **asdict(entry.runtime),
                "step": entry.step,
                "batch_size": entry.batch_size,
                "num_nodes": entry.tree.num_nodes,
            }
            for entry in checkpoint.tuned
        ],
        "provenance": checkpoint.provenance,
    }


def _in_words(name: str, value: Any) -> str:
    if name == "num_parameters":
        return f"{value:,}"
    if name == "tree":
        if value is None:
            return "none: a chain of the best guesses is used"
        widths = ", ".join(
            f"{width} at depth {d}" for d, width in enumerate(value["width_by_depth"], start=1)
        )
        return (
            f"{value['num_nodes']} nodes, guesses looked at: {widths}" if widths else "the root token alone"
        )
    if name == "tuned_trees":
        return _tuned_in_words(value)
    if name == "adapter":
        return _adapter_in_words(value)
    return str(value)


def _tuned_in_words(entries: list[dict[str, Any]]) -> str:
    lines = [
        f"{entry['num_nodes']} nodes at batch size {entry['batch_size']} on {entry['device']}, "
        f"{entry['dtype']}, {entry['engine']}, {entry['step']} steps"
        for entry in entries
    ]
    return "\n".join(lines) or "none: the tree above serves everywhere; inference/tune_tree.py finds others"


def _adapter_in_words(value: dict[str, Any] | None) -> str:
    if value is None:
        return "none: the text is the base model's own"
    return (
        f"LoRA of rank {value['rank']}, alpha {value['alpha']}, on {value['num_layers']} layers "
        f"({', '.join(value['targets'])}), {value['num_parameters']:,} parameters, trained with the heads: "
        "the text is the adapted model's"
    )
