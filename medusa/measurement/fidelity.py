"""How far the next-token distributions of a quantised model are from the float32 model's, on the same tokens.

The float32 model's own greedy answers are read again (teacher forcing), so that all are asked about the same
positions. At each one KL(float32 || other) = sum over tokens of p (log p - log q), in nats, and whether both
find the same token likeliest. Reading is split into passes of so many tokens: one pass is how prompts are
read, passes of one token are how plain decoding goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from medusa.base.causal_lm import CausalLM
from medusa.heads.calibration import AnsweredTokens
from medusa.measurement.llama_cpp import MOST_LOGITS
from medusa.measurement.report import Report
from medusa.measurement.timing import with_interval
from medusa.tables import PERCENT, Column

CLEAR_LEAD = 0.5
"""Nats by which float32's likeliest token leads where its choice is called clear."""

Reader = Callable[[Sequence[int]], Iterator[Tensor]]
"""Maps tokens to the logits (T', V) after each of them, part by part."""


def reader_of(model: CausalLM, tokens_per_pass: int | None = None) -> Reader:
    """``model``'s logits, ``tokens_per_pass`` tokens in a pass, by default as many as are held at once."""
    step = min(tokens_per_pass or MOST_LOGITS, MOST_LOGITS)

    @torch.no_grad()
    def read(tokens: Sequence[int]) -> Iterator[Tensor]:
        cache = DynamicCache(config=model.config)
        for part in torch.tensor([list(tokens)], device=model.device).split(step, dim=1):
            yield model(input_ids=part, past_key_values=cache, use_cache=True).logits[0]

    return read


def distances(reference: Tensor, other: Tensor) -> Tensor:
    """(T, 3) of logits (T, V): KL(reference || other) in nats, whether both find one token likeliest, and by
    how many nats the reference's likeliest leads."""
    expected, found = (logits.double().log_softmax(dim=-1) for logits in (reference, other))
    divergence = torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True).sum(dim=-1)
    best = expected.topk(2, dim=-1)
    same = best.indices[:, 0] == found.argmax(dim=-1)
    return torch.stack([divergence, same, best.values[:, 0] - best.values[:, 1]], dim=-1)


def compared(
    reference: Reader, others: Mapping[str, Reader], rows: Iterable[AnsweredTokens]
) -> dict[str, list[Tensor]]:
    """[name] = :func:`distances` at the answered tokens of each row, (T, 3)."""
    found: dict[str, list[Tensor]] = {name: [] for name in others}
    for row in rows:
        read = row.token_ids[:-1]  # after the last one there is no answered token
        is_wanted = torch.tensor(row.is_label[1:])
        expected = torch.cat(list(reference(read)))[is_wanted]
        for name, reader in others.items():
            given = torch.cat(list(reader(read)))[is_wanted]
            parts = zip(expected.split(MOST_LOGITS), given.split(MOST_LOGITS), strict=True)
            found[name].append(torch.cat([distances(*pair) for pair in parts]))
    return found


def fidelity(rows: Sequence[Tensor]) -> dict[str, Any]:
    """What :func:`distances` of each row (T, 3) add up to; intervals are 95 % bootstraps over rows."""
    sums = np.array([[float(row[:, 0].sum()), float(row[:, 1].sum()), len(row)] for row in rows])
    kl = with_interval(sums, lambda samples: samples[..., 0].sum(-1) / samples[..., 2].sum(-1))
    same = with_interval(sums, lambda samples: samples[..., 1].sum(-1) / samples[..., 2].sum(-1))
    divergence, is_same, lead = torch.cat(list(rows)).unbind(dim=-1)
    is_clear = lead > CLEAR_LEAD
    return {
        "num_tokens": len(divergence),
        "kl": kl["ratio"],
        "kl_interval": [kl["low"], kl["high"]],
        "median_kl": float(divergence.median()),
        "kl_99th_percentile": float(divergence.quantile(0.99)),
        "same_choice": same["ratio"],
        "same_choice_interval": [same["low"], same["high"]],
        "same_clear_choice": float(is_same[is_clear].mean()) if is_clear.any() else None,
    }


def add_table(report: Report) -> None:
    """One line an engine; the report's values are the JSON object of ``medusa evaluate --fidelity``."""
    values = report.values
    columns: dict[str, Column] = {
        "engine": ("name", "{}"),
        "KL, nats": ("kl", "{:.5f}"),
        "95 %": ("kl_interval", "{:.5f} to {:.5f}"),
        "median": ("median_kl", "{:.5f}"),
        "99th percentile": ("kl_99th_percentile", "{:.4f}"),
        "same choice": ("same_choice", PERCENT),
        "clear": ("same_clear_choice", PERCENT),
    }
    report.add_table(
        f"Distance to float32 on {values['num_answers']} answers, {values['num_tokens']} tokens",
        columns,
        [{"name": name, **found} for name, found in values["engines"].items()],
        note="KL from float32, mean over tokens. same choice: the likeliest token is float32's; clear: where "
        f"that leads by more than {CLEAR_LEAD} nats.",
    )
