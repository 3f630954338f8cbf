"""How often each head is right, counted on text.

The base model reads finished answers once (teacher forcing). At the position t of an answer the base emits
token t+1 by itself, and head d guesses token t+1+d from the hidden state at t; the *rank* of the true token
among the head's guesses is recorded, from which everything else follows (:mod:`medusa.trees.rank_counts`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from medusa.base.causal_lm import lm_head, lm_head_device
from medusa.base.passes import hidden_states, layers_of
from medusa.base.profile import longrope_threshold
from medusa.heads.protocol import Heads
from medusa.trees.rank_counts import MISS, UNKNOWN, RankCounts

LOGITS_PER_CHUNK = 2**25
"""Head logits held at a time: 128 MB in float32."""


class AnsweredTokens(NamedTuple):
    """One row to calibrate on."""

    token_ids: Sequence[int]
    is_label: Sequence[bool]
    """Which tokens the model wrote, hence decoding would have emitted."""

    @classmethod
    def after_prompt(cls, token_ids: Sequence[int], prompt_length: int) -> AnsweredTokens:
        """A row whose answer is everything after the first ``prompt_length`` tokens."""
        return cls(token_ids, [place >= prompt_length for place in range(len(token_ids))])


def calibrate(
    base: PreTrainedModel, heads: Heads, rows: Iterable[AnsweredTokens], **options: Any
) -> RankCounts:
    """:func:`calibrate_each` for one set of heads."""
    return calibrate_each(base, [heads], rows, **options)[0]


@torch.no_grad()
def calibrate_each(
    base: PreTrainedModel,
    sets: Sequence[Heads],
    rows: Iterable[AnsweredTokens],
    *,
    max_rank: int = 16,
    batch_size: int = 4,
    states: Sequence[Tensor] | None = None,
) -> list[RankCounts]:
    """Ranks of the true tokens of ``rows`` among each head's ``max_rank`` best guesses, for several sets of
    heads on the same rows, which the base reads once.

    Rows of similar length share a forward pass; logits exist for a few positions at a time. ``states`` are
    the known hidden states of each row, (T, (1 + L) * D), with the layers of all sets: the base is then not
    run.

    Raises:
        ValueError: no row has a labelled token after its first.
    """
    ordered = sorted(enumerate(rows), key=lambda item: len(item[1].token_ids))
    layers = sorted({layer for heads in sets for layer in heads.fused_layers})
    ranks: list[list[list[Tensor]]] = [[[] for _ in ordered] for _ in sets]  # by heads, row and answer
    switch = longrope_threshold(base) or 0  # past it LongRoPE reads a whole batch otherwise
    short = bisect_right(ordered, switch, key=lambda item: len(item[1].token_ids))
    starts = [*range(0, short, batch_size), *range(short, len(ordered), batch_size)]
    for start, end in pairwise([*starts, len(ordered)]):
        indices, batch = zip(*ordered[start:end], strict=True)
        ids = pad_sequence([torch.tensor(row.token_ids) for row in batch], batch_first=True)
        if states is None:  # right padding, which no token of a row sees
            hidden = hidden_states(base, ids.to(lm_head_device(base)), layers=layers)
        else:
            hidden = pad_sequence([states[index] for index in indices], batch_first=True)
            hidden = hidden.to(lm_head_device(base), base.dtype)
        for heads, ranks_of_rows in zip(sets, ranks, strict=True):
            heads_hidden = layers_of(hidden, layers, heads.fused_layers)
            batch_ranks = _batch_ranks(base, heads, batch, ids, heads_hidden, max_rank)
            for index, row_ranks in zip(indices, batch_ranks, strict=True):
                ranks_of_rows[index] = row_ranks
    counts = [
        RankCounts(tuple(answer for row_ranks in ranks_of_rows for answer in row_ranks), max_rank)
        for ranks_of_rows in ranks
    ]
    if not all(heads_counts.ranks for heads_counts in counts):
        raise ValueError("rows hold no labelled token after their first: there is nothing to calibrate on")
    return counts


def _batch_ranks(
    base: PreTrainedModel,
    heads: Heads,
    rows: Sequence[AnsweredTokens],
    ids: Tensor,
    states: Tensor,
    max_rank: int,
) -> Iterator[list[Tensor]]:
    """For each row, the ranks (P, K) of its answers, given its tokens and states."""
    states = heads.guessing_states(states, ids.to(lm_head_device(base)), base.get_input_embeddings())
    for row, row_ids, row_states in zip(rows, ids, states, strict=True):
        answers = []
        for start, end in _answer_spans(row.is_label):
            ahead = torch.arange(start, end)[:, None] + torch.arange(1, heads.num_heads + 1)  # (P, K)
            truth = row_ids[ahead.clamp(max=end - 1)].masked_fill(ahead >= end, UNKNOWN)
            path = row_ids[(ahead - 1).clamp(max=end - 1)]  # whatever follows an unknown token is unknown too
            answers.append(_true_ranks(base, heads, row_states[start - 1 : end - 1], path, truth, max_rank))
        yield answers


def _answer_spans(is_label: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of labelled tokens; token 0 is left out, since no state comes before it."""
    end = 0
    for is_answer, run in groupby(is_label):
        start = max(end, 1)
        end += len(list(run))
        if is_answer and start < end:
            yield start, end


def _true_ranks(
    base: PreTrainedModel, heads: Heads, states: Tensor, path: Tensor, truth: Tensor, max_rank: int
) -> Tensor:
    """Ranks (P, K) int16 of truth (P, K) long, given the states (P, ...) and path (P, K) long."""
    unembedding = lm_head(base)
    chunk = max(1, LOGITS_PER_CHUNK // (heads.num_heads * heads.config.vocab_size))
    ranks = []
    chunks = zip(states.split(chunk), path.to(states.device).split(chunk), truth.split(chunk), strict=True)
    for chunk_states, chunk_path, tokens in chunks:
        logits = heads.guesses_after(chunk_states, chunk_path, unembedding)  # (chunk, K, V')
        guesses = heads.token_ids(logits.topk(min(max_rank, logits.shape[-1]), dim=-1).indices)
        is_right = guesses.cpu() == tokens[..., None]
        chunk_ranks = torch.where(is_right.any(dim=-1), is_right.int().argmax(dim=-1), MISS)
        ranks.append(chunk_ranks.masked_fill(tokens == UNKNOWN, UNKNOWN).to(torch.int16))
    return torch.cat(ranks)
