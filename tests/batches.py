"""Requests that come and go in a batch: what each of them says is held against what it says alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from hypothesis import note

from medusa import CandidateTree, MedusaModel
from medusa.decoding.batch import Batch, BatchLimits, Row


def row_of(model: MedusaModel, prompt: list[int], **options) -> Row:
    return Row(model.request(torch.tensor([prompt]), **options))


def alone(model: MedusaModel, prompt: list[int], options: dict) -> list[int]:
    """The answer of plain decoding in general steps."""
    call = {name: value for name, value in options.items() if name != "num_logprobs"}
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, **call, tree=CandidateTree.chain(0), step="general")
    return tokens[0, len(prompt) :].tolist()


def answer_all(batch: Batch, rows: list[Row]) -> None:
    for row in rows:
        batch.add(row)
    while batch.is_busy:
        batch.step()


def assert_each_says_what_it_says_alone(
    model: MedusaModel,
    batch: Batch,
    arrivals: Sequence[tuple[tuple[list[int], dict], int]],
    cancelled: Collection[int],
    limits: BatchLimits,
) -> None:
    """Requests ((prompt, options), calls of ``step`` before the next) arrive in ``batch``; after the arrivals
    with the numbers ``cancelled`` the request of half that number is cancelled."""
    rows = [row_of(model, prompt, **options) for (prompt, options), _ in arrivals]
    for index, (row, (_, num_calls)) in enumerate(zip(rows, arrivals, strict=True)):
        batch.add(row)
        for _ in range(num_calls):
            batch.step()
        if index in cancelled:
            batch.cancel(rows[index // 2])
    while batch.is_busy:
        batch.step()
        assert batch.num_slots <= max(limits.max_slots, 256)
        assert batch.prefixes.num_bytes <= limits.prefix_bytes
    for row, ((prompt, options), _) in zip(rows, arrivals, strict=True):
        note(f"{prompt} {options} {row.finish_reason} {row.error}")
        expected = alone(model, prompt, options)
        if row.finish_reason == "cancelled":
            assert row.tokens == expected[: len(row.tokens)]
        else:
            assert row.tokens == expected
            has_ended = "eos_token_id" in options and expected[-1] in options["eos_token_id"]
            assert row.finish_reason == ("stop" if has_ended else "length")
