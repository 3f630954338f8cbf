"""The conversations that training runs held out, found again from what the heads say of themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from medusa.heads.calibration import AnsweredTokens
from medusa.training.config.options import DataOptions
from medusa.training.data.loading import load_data
from medusa.training.data.tokenised import ONLY_IN_TRAINING


def held_out_answers(provenances: Mapping[str, Mapping[str, Any]], tokenizer: Any) -> list[AnsweredTokens]:
    """The held-out conversations that all runs of ``provenances`` (by label) share.

    Raises:
        ValueError: some heads do not say what they were trained on, two runs held out other conversations, or
            the data are no longer what they were.
        FileNotFoundError: the data are not there.
    """
    (first, provenance), *others = provenances.items()
    options = DataOptions(**_data_options(first, provenance))
    for label, other in others:
        _check_same(first, options, label, DataOptions(**_data_options(label, other)))
    data = load_data(options, tokenizer)
    found, recorded = data.counts["held-out labels"], provenance.get("data", {}).get("held-out labels")
    if found != recorded:
        raise ValueError(
            f"the run of {first!r} held out {recorded} answer tokens, {options.data} now gives {found}: the "
            "data have changed since; give --prompts instead of --held-out"
        )
    return data.held_out.answers()


def _data_options(label: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    configuration = provenance.get("configuration", {})
    if "data" not in configuration:
        raise ValueError(
            f"the heads {label!r} do not say what they were trained on (provenance.json), so what they held "
            "out is not known; give --prompts instead of --held-out"
        )
    names = [field.name for field in dataclasses.fields(DataOptions)]
    return {name: configuration[name] for name in names if name in configuration}


def _check_same(first: str, options: DataOptions, label: str, others: DataOptions) -> None:
    mine, theirs = dataclasses.asdict(options), dataclasses.asdict(others)
    for name in sorted(set(mine) - set(ONLY_IN_TRAINING)):
        if mine[name] != theirs[name]:
            raise ValueError(
                f"{first!r} and {label!r} held out other conversations: {name} was {mine[name]!r} and "
                f"{theirs[name]!r}; give --prompts that neither was trained on"
            )
