"""``medusa configs``: the configurations and prompts that ship, and where they are."""

from __future__ import annotations

import sys
from pathlib import Path

from medusa.cli.commands import ConfigsOptions
from medusa.places import named_file, shipped_files


def configs(options: ConfigsOptions) -> None:
    """Print what there is, or the path of what is named.

    Raises:
        FileNotFoundError: nothing that ships has this name.
    """
    if options.name is None:
        files = sorted(shipped_files().iterdir(), key=lambda path: (path.suffix, path.stem))
        width = max(len(path.stem) for path in files)
        sys.stdout.write("".join(f"{path.stem:<{width}}  {_about(path)}\n" for path in files))
        return
    suffix = Path(options.name).suffix or next(
        (path.suffix for path in shipped_files().iterdir() if path.stem == options.name), ".yaml"
    )
    sys.stdout.write(f"{named_file(options.name, suffix, 'configuration file')}\n")


def _about(path: Path) -> str:
    """What a file is for: its first comment, or how many prompts it holds."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return f"{len(lines)} prompts" if path.suffix == ".jsonl" else lines[0].lstrip("# ")
