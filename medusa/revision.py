"""The git commit that medusa was made from."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parent
RECORD = "commit.txt"
"""The file in the package in which a build writes the commit down; a checkout has none."""


@functools.cache
def commit() -> str | None:
    """The commit, with "-dirty" where files differ from it: as the build wrote it down, or as git says it of
    a checkout; None where neither does."""
    record = PACKAGE / RECORD
    if record.exists():
        return record.read_text(encoding="utf-8").strip() or None
    return commit_of(PACKAGE.parent) if (PACKAGE.parent / ".git").exists() else None


def commit_of(checkout: Path) -> str | None:
    """The commit of a checkout, as :func:`commit`; None outside of one."""
    try:
        described = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
