"""The ``medusa`` command: chat with a model, answer one prompt, serve many users, look into heads, carry them
to others and back.

What needs torch is imported when a subcommand runs: help, the version and mistakes are answered at once.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import medusa
from medusa.cli.commands import (
    ChatOptions,
    CheckOptions,
    CompileOptions,
    ExportOptions,
    GenerateOptions,
    ImportOptions,
    InfoOptions,
    PushOptions,
    ServeOptions,
)
from medusa.cli.options import parse
from medusa.cli.reporting import exit_status

HELP = """usage: medusa [-h] [--version] COMMAND ...

Medusa heads: several tokens per forward pass, the same text.

    medusa chat          talk with a model
    medusa generate      answer one prompt
    medusa serve         answer over HTTP, as OpenAI's servers do
    medusa compile       make answers faster on this CPU, once
    medusa info          look into a heads directory
    medusa export        write heads for vLLM or Text Generation Inference
    medusa check         hold an export to the rules of who will serve it
    medusa import        read heads that others trained
    medusa push          publish heads on the Hugging Face hub

medusa COMMAND --help lists the flags of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``medusa`` with ``arguments`` (the command line's by default); the exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("-h", "--help"):
        sys.stdout.write(HELP)
        return 0
    if name == "--version":
        sys.stdout.write(f"medusa {medusa.__version__}\n")
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(COMMANDS)}"
        sys.stderr.write(f"error: the first word must be a command, got {name!r}; {advice}\n")
        return 2
    kind, run = COMMANDS[name]
    options: Any = parse(kind, rest, prog=f"medusa {name}")
    return exit_status(lambda: run(options), getattr(options, "report", options).traceback)


def _chat(options: ChatOptions) -> None:
    from medusa.cli.chat_terminal import chat

    chat(options)


def _generate(options: GenerateOptions) -> None:
    from medusa.cli.generate import generate

    generate(options)


def _serve(options: ServeOptions) -> None:
    from medusa.cli.serve import serve

    serve(options)


def _compile(options: CompileOptions) -> None:
    from medusa.cli.program import compile_model

    compile_model(options)


def _info(options: InfoOptions) -> None:
    from medusa.cli.info import info

    info(options)


def _export(options: ExportOptions) -> None:
    from medusa.cli.interop import export

    export(options)


def _import(options: ImportOptions) -> None:
    from medusa.cli.interop import import_foreign

    import_foreign(options)


def _check(options: CheckOptions) -> None:
    from medusa.cli.interop import check

    check(options)


def _push(options: PushOptions) -> None:
    from medusa.cli.push import push

    push(options)


COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "chat": (ChatOptions, _chat),
    "generate": (GenerateOptions, _generate),
    "serve": (ServeOptions, _serve),
    "compile": (CompileOptions, _compile),
    "info": (InfoOptions, _info),
    "export": (ExportOptions, _export),
    "check": (CheckOptions, _check),
    "import": (ImportOptions, _import),
    "push": (PushOptions, _push),
}
"""Subcommand -> its options and what it does with them."""


if __name__ == "__main__":
    sys.exit(main())
