"""What to do after a command: commands, as a shell reads them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from medusa.cli.options import DrafterOptions, ModelOptions, words_of
from medusa.progress import log_console, print_list


def command(name: str, *words: object) -> str:
    """``medusa NAME WORD ...`` as a shell reads it."""
    return shlex.join(["medusa", name, *map(str, words)])


def print_next(commands: Sequence[str]) -> None:
    """End with ``commands``: what to do next, to be pasted as it stands."""
    own = _own_name()
    print_list(log_console(), "next:", [re.sub("^medusa ", f"{own} ", line) for line in commands])


def _own_name() -> str:
    """What a shell calls this installation's ``medusa``: its path, where the name finds none or another."""
    script, found = Path(sys.executable).with_name("medusa"), shutil.which("medusa")
    if not script.is_file() or (found is not None and script.samefile(found)):
        return "medusa"
    return shlex.quote(os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script))


def chat_with(drafter: str, model: ModelOptions, drafters: DrafterOptions) -> str:
    """The command that chats with this drafter, as measurements call it."""
    which = {"plain": ["--plain"], "default": []}.get(drafter, ["--drafter", drafter])
    return command("chat", *which, *words_of(model), *words_of(drafters.read_by(drafter)))
