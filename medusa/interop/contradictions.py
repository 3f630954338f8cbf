"""Where a config.json, or the base, says otherwise than the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa.base.causal_lm import CausalLM, hidden_size, vocab_size


def checked_against_config(
    config: Mapping[str, Any],
    held: Mapping[str, Any],
    config_path: Path,
    where: Path,
    trust: bool,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Notes of what config.json says otherwise than the tensors, which hold ``held``, by key.

    A key of which the tensors say nothing (None) is no contradiction, nor one that is absent, unless
    ``defaults`` has what it is then taken for.

    Raises:
        ValueError: there is one, and the tensors are not trusted.
    """
    notes = []
    for key, value in held.items():
        said = {**(defaults or {}), **config}.get(key)
        if value is None or said is None or said == value:
            continue
        says = (
            f"says {key}={said!r}" if key in config else f"leaves out {key}, which is then taken for {said!r}"
        )
        text = f"{config_path} {says}, and {where.name} holds {value!r}"
        if not trust:
            raise ValueError(
                f"{text}; mend the file that is wrong, or import by the tensors: --trust-tensors"
            )
        notes.append(f"{text}: the tensors are right")
    return tuple(notes)


def check_fits(where: Path | str, size: int, vocabulary: int | None, base: CausalLM) -> None:
    """Raise ValueError unless heads of these sizes can sit on ``base``; None are heads without rows."""
    for name, theirs, ours in (
        ("hidden_size", size, hidden_size(base)),
        ("vocab_size", vocabulary, vocab_size(base)),
    ):
        if theirs is not None and theirs != ours:
            raise ValueError(
                f"{where} holds heads for {name}={theirs}, the base model {base.name_or_path!r} has {ours}; "
                "give the base that they were trained on: --base"
            )


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first names of many."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
