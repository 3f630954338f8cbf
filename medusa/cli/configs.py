"""``medusa configs``: the configurations and prompts that ship."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from medusa.assets import named_file, shipped_files
from medusa.cli.options import command

COMMAND = re.compile(r"^# (?:\w+:)? *((?:medusa|accelerate) .*)", re.MULTILINE)
"""In the comment at the head of a configuration."""


@dataclass(frozen=True, kw_only=True)
class ConfigsOptions:
    """List the configurations and prompts that ship, or say where one of them is.

    Their names can be used like paths: `medusa train --config smollm2`, `--prompts demo_prompts`.

        medusa configs
        cp "$(medusa configs smollm2)" mine.yaml
        accelerate launch --config_file "$(medusa configs accelerate_ddp)" -m medusa train --config smollm2
    """

    name: tyro.conf.Positional[str | None] = None
    """Print the path of this one."""


def configs(options: ConfigsOptions) -> list[str]:
    """Print the list of configurations, or the path of the named one."""
    if options.name is None:
        files = sorted(shipped_files().iterdir(), key=lambda path: (path.suffix, path.stem))
        width = max(len(path.stem) for path in files)
        sys.stdout.write("".join(f"{path.stem:<{width}}  {_about(path)}\n" for path in files))
        return [command("configs", "smollm2_demo")]
    suffix = Path(options.name).suffix or next(
        (path.suffix for path in shipped_files().iterdir() if path.stem == options.name), ".yaml"
    )
    path = named_file(options.name, suffix, "configuration file")
    sys.stdout.write(f"{path}\n")
    if path.suffix == ".jsonl":
        return [command("distill", "--prompts", path.stem, "--output", f"runs/{path.stem}/answers.jsonl")]
    text = re.sub(r"\\\n# +", "", path.read_text(encoding="utf-8"))  # a command of several lines
    return COMMAND.findall(text) or [command("train", "--config", path.stem)]


def _about(path: Path) -> str:
    """The purpose of a file: the first sentence of its comment, or its number of prompts."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return f"{len(text.splitlines())} prompts"
    return re.sub(r"\n# *", " ", text.lstrip("# ")).split(". ")[0]
