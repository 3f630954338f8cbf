"""Continuous batching: rows decoded together, each replaced by the next prompt as soon as it ends.

No row waits for the longest one, so a batch stays full until prompts run out. What a row says does
not depend on its neighbours: its noise is keyed by its own seed and positions. This module decodes
plainly, one token per row and pass, and knows nothing of text, files or heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa.acceptance.sampling import choose, gumbel_noise
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import new_cache, prefill, verify
from medusa.trees.candidate_tree import TreeTopology

FinishReason = Literal["stop", "length", "loop"]
Tag = TypeVar("Tag")


@dataclass(eq=False)
class Row(Generic[Tag]):
    """One prompt and the tokens that follow it."""

    tag: Tag
    """Whatever the caller knows the row by."""
    prompt: list[int]
    stop_ids: frozenset[int]
    """The tokens that end the row; the one that does is not kept."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """stop: a stop token came; length: cut at the limit; loop: cut where it began to repeat itself."""

    @property
    def position(self) -> int:
        """The position of the next token."""
        return len(self.prompt) + len(self.tokens)


class ContinuousBatch(Generic[Tag]):
    """Up to ``batch_size`` rows under way on one base model.

    Call :meth:`add` while there are ``num_vacant`` places, :meth:`step` for one token more per row, and
    :meth:`take_finished` after either.
    """

    def __init__(self, base: PreTrainedModel, batch_size: int, max_new_tokens: int, stop_loops: bool = True):
        for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.base, self.max_new_tokens, self.stop_loops = base, max_new_tokens, stop_loops
        self.places: list[Row[Tag] | None] = [None] * batch_size
        self._cache: TreeCache | None = None
        self._one_token = TreeTopology.chain(1, base.device)

    @property
    def num_vacant(self) -> int:
        return self.places.count(None)

    @property
    def num_rows(self) -> int:
        """Rows under way."""
        return len(self.places) - self.num_vacant

    @property
    def has_finished(self) -> bool:
        """There is a row for :meth:`take_finished`."""
        return any(row is not None and row.finish_reason is not None for row in self.places)

    @torch.no_grad()
    def add(self, row: Row[Tag]) -> None:
        """Read ``row``'s prompt into a vacant place and choose its first token."""
        prompt = torch.tensor([row.prompt], device=self.base.device)
        lengths = torch.tensor([len(row.prompt)], device=self.base.device)
        cache = new_cache(self.base, 1)
        _, logits = prefill(self.base, prompt, lengths, cache)
        place = self.places.index(None)
        if self._cache is None:  # every place starts as a copy of the first prompt
            cache.keep_rows(torch.zeros(len(self.places), dtype=torch.long, device=self.base.device))
            self._cache = cache
        else:
            self._cache.replace_row(place, cache)
        self.places[place] = row
        self._append([row], logits)

    @torch.no_grad()
    def step(self) -> None:
        """One forward pass: a token more for every row. Vacant places are given up."""
        if self._cache is None or not self.num_rows:
            raise ValueError("step needs a row under way, got an empty batch; add one first")
        self._drop_vacant_places(self._cache)
        rows = [row for row in self.places if row is not None]
        last = torch.tensor([[row.tokens[-1]] for row in rows], device=self.base.device)
        _, logits = verify(self.base, last, self._one_token, self._cache)
        self._cache.commit_prefix(torch.ones_like(last[:, 0]))
        self._append(rows, logits[:, 0])

    def cut(self) -> None:
        """End every row where it is, as at the length limit."""
        for row in self.places:
            if row is not None:
                row.finish_reason = row.finish_reason or "length"

    def take_finished(self) -> list[Row[Tag]]:
        """The rows that have ended since the last call; their places are vacant now."""
        finished = [row for row in self.places if row is not None and row.finish_reason is not None]
        self.places = [None if row in finished else row for row in self.places]
        return finished

    def _drop_vacant_places(self, cache: TreeCache) -> None:
        if self.num_vacant:
            kept = [place for place, row in enumerate(self.places) if row is not None]
            cache.keep_rows(torch.tensor(kept, device=self.base.device))
            self.places = [self.places[place] for place in kept]

    def _append(self, rows: Sequence[Row[Tag]], logits: Tensor) -> None:
        """Choose the next token of ``rows`` from logits (B, V)."""
        for row, token in zip(rows, choose_tokens(rows, logits).tolist(), strict=True):
            if token in row.stop_ids:
                row.finish_reason = "stop"
                continue
            row.tokens.append(token)
            if self.stop_loops and (repeated := repeated_tail(row.tokens)):
                del row.tokens[-repeated:]
                row.finish_reason = "loop"
            elif len(row.tokens) >= self.max_new_tokens:
                row.finish_reason = "length"


def choose_tokens(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """The next token of every row, (B,) long, from logits (B, V)."""
    scores = logits.float()
    sampled = [place for place, row in enumerate(rows) if row.temperature > 0]
    if sampled:  # noise over the whole vocabulary is dear: greedy rows go without
        at = torch.tensor(sampled, device=logits.device)
        temperatures = scores.new_tensor([rows[place].temperature for place in sampled])
        seeds = torch.tensor([rows[place].seed for place in sampled], device=logits.device)
        positions = torch.tensor([[rows[place].position] for place in sampled], device=logits.device)
        noise = gumbel_noise(seeds, positions, scores.shape[1])[:, 0]
        scores = scores.index_copy(0, at, scores[at] / temperatures[:, None] + noise)
    return choose(scores, None)


def repeated_tail(tokens: Sequence[int], max_period: int = 64, min_repeated: int = 48) -> int:
    """How many tokens at the end only repeat what stands before them; 0 when it is no loop.

    A loop is a stretch of at most ``max_period`` tokens said at least three times, with at least
    ``min_repeated`` tokens of repetition. Taking that many tokens off leaves the stretch said once.
    """
    for period in range(1, min(max_period, len(tokens) // 3) + 1):
        repeated = 0
        while repeated + period < len(tokens) and tokens[-1 - repeated] == tokens[-1 - repeated - period]:
            repeated += 1
        if repeated >= max(min_repeated, 2 * period):
            return repeated
    return 0
