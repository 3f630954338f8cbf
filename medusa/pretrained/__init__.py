"""Heads that ship with the package: a name here stands wherever a heads directory does.

One directory each, in the format of :mod:`medusa.heads.checkpoint`, with a README.md that is its card:
recipe, data, licence, measurements.
"""

from __future__ import annotations

from pathlib import Path


def shipped_heads() -> dict[str, Path]:
    """The directory of each set of shipped heads, by name."""
    folder = Path(__file__).parent
    return {path.name: path for path in sorted(folder.iterdir()) if (path / "config.json").exists()}
