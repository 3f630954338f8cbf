"""The ``medusa`` command: one table of its subcommands.

A command's imports happen when it runs: help, the version and mistakes are answered at once.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import medusa
from medusa.cli.options import parse, print_next
from medusa.console import log_console
from medusa.revision import commit

LOST_PIPE = 141
"""Exit status after writing to a closed pipe, as in a shell: 128 + SIGPIPE."""


@dataclass(frozen=True)
class Command:
    """A subcommand of ``medusa``; modules are named relative to ``medusa.cli``."""

    run: str
    """``module:function`` that does it, given the options, and returns what to do next: commands, each a line
    for the shell, which :func:`main` prints last."""
    options: str
    """``module:class`` of its options. The docstring of the class is the command's --help."""
    summary: str


COMMANDS = {
    "chat": Command("chat:chat", "option_types:ChatOptions", "talk with a model"),
    "generate": Command("chat:generate", "option_types:GenerateOptions", "answer one prompt"),
    "serve": Command("serve:serve", "serve:ServeOptions", "answer over HTTP, as OpenAI's servers do"),
    "fetch": Command("fetch:fetch", "option_types:FetchOptions", "get a model, or list those that there are"),
    "compile": Command(
        "loading:compile_model", "option_types:CompileOptions", "make answers faster on this CPU"
    ),
    "learn": Command("learn:learn", "option_types:LearnOptions", "make a base faster: heads in one command"),
    "heads": Command("heads:heads", "option_types:HeadsOptions", "list heads that were learned here"),
    "configs": Command("configs:configs", "configs:ConfigsOptions", "list configurations that ship"),
    "distill": Command("distill:run", "distill:DistillOptions", "let a model answer prompts"),
    "train": Command("train:train", "train:TrainOptions", "train heads, on such answers"),
    "tune": Command("tune:tune", "tune:TuneOptions", "choose the tree that is fastest here"),
    "evaluate": Command("evaluate:evaluate", "evaluate:EvaluationOptions", "how good are heads?"),
    "benchmark": Command("benchmark:benchmark", "benchmark:BenchmarkOptions", "how fast are they?"),
    "info": Command("info:info", "option_types:InfoOptions", "look into a base, or into heads"),
    "export": Command("interop:export", "option_types:ExportOptions", "write heads for vLLM and others"),
    "check": Command("interop:check", "option_types:CheckOptions", "hold an export to its server's rules"),
    "import": Command(
        "interop:import_foreign", "option_types:ImportOptions", "read heads that others trained"
    ),
    "push": Command("interop:push", "option_types:PushOptions", "publish heads on the Hugging Face hub"),
}
"""Each is imported on demand; the options of ``option_types`` and ``serve`` are read without torch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``medusa`` with ``arguments`` (the command line's by default); the exit status.

    A reader of standard output that goes away (``| head``) ends the command quietly, with status 141.
    """
    _open_standard_streams()
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return LOST_PIPE


def _open_standard_streams() -> None:
    """Open the standard streams that were closed (``>&-``), so that no file gets their numbers."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _run(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if name == "--version":
        revision = commit()
        sys.stdout.write(f"medusa {medusa.__version__}{f', commit {revision}' if revision else ''}\n")
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(COMMANDS)}"
        sys.stderr.write(f"error: the first word must be a command, got {name!r}; {advice}\n")
        return 2
    kind = _named(COMMANDS[name].options)
    words = [word for word in rest if word != "--traceback"]
    options: Any = parse(kind, words, prog=f"medusa {name}", **getattr(kind, "PARSING", {}))
    return exit_status(lambda: print_next(_named(COMMANDS[name].run)(options)), words != rest)


def exit_status(program: Callable[[], object], show_traceback: bool) -> int:
    """Run a program: 0, or 1 with the error as one sentence on standard error, or 130 when it was stopped.

    Raises:
        BrokenPipeError: nobody reads standard output any more, which is no error: see :mod:`medusa.cli.main`.
    """
    try:
        program()
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, FloatingPointError, MemoryError) as error:
        if show_traceback:
            traceback.print_exc()
        text = str(error)
        if isinstance(error, ModuleNotFoundError) and text == f"No module named {error.name!r}":
            text = f"this needs the package {error.name}, which is not installed: pip install {error.name}"
        log_console().print(f"error: {text}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console = log_console()
        console.print("\nstopped" if console.is_terminal else "stopped", style="bold red")
        return 130
    return 0


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"medusa.cli.{module}"), name)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = "".join(f"    medusa {name:<{width}}  {each.summary}\n" for name, each in COMMANDS.items())
    return (
        "usage: medusa [-h] [--version] COMMAND ...\n\n"
        "Medusa heads: several tokens per forward pass, the same text.\n\n"
        f"{lines}\nmedusa COMMAND --help lists the flags of a command; --traceback shows where an "
        "error arose.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
