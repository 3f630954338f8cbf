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


DEFAULT_HEADS = "default"
"""Stands for the heads that ship for a base, wherever heads are named beside it."""


def heads_for(base_name: str | None) -> str:
    """The name of the heads that ship for the base called so.

    Raises:
        ValueError: none do.
    """
    shipped = shipped_heads()
    if base_name is None or base_name not in shipped:
        raise ValueError(
            f"heads={DEFAULT_HEADS!r} stands for those that ship with the base, which are there for "
            f"{', '.join(shipped)}, got base {base_name!r}; name a heads directory or a hub id"
        )
    return base_name
