"""The embedding of a text: its hidden states as one vector, read part by part between the steps of others.

A text has a cache of its own and shares no pass, so its vector does not depend on what else is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa.base.attention import pinned_attention
from medusa.base.pooling import Pooling
from medusa.decoding.runners import Runner
from medusa.hardware import sent


class PooledStates:
    """The states of one text, pooled as they are read.

    Args:
        ids: the tokens of the text, at least one.
    """

    def __init__(self, runner: Runner, ids: Sequence[int], pooling: Pooling):
        self.num_read = 0
        """Tokens that have been read."""
        self._runner = runner
        self._num_tokens = len(ids)
        self._pooling = pooling
        self._tokens = sent([list(ids)], runner.profile.device)  # (1, T)
        self._cache = runner.new_cache(1)
        self._sum: Tensor | None = None
        self._last: Tensor | None = None

    @property
    def num_left(self) -> int:
        """Tokens that have not been read."""
        return self._num_tokens - self.num_read

    @torch.inference_mode(False)
    @torch.no_grad()
    def read(self, num_tokens: int) -> None:
        """Read up to ``num_tokens`` more."""
        known = min(self._num_tokens, self.num_read + num_tokens)
        lengths = sent([known], self._tokens.device)

        def run(*arguments: object, **named: object) -> tuple[Tensor, Tensor]:
            states, logits = self._runner.run_pass(*arguments, **named)
            total = states[0].float().sum(dim=0)  # (D,)
            self._sum = total if self._sum is None else self._sum + total
            return states, logits

        with pinned_attention(self._runner.profile.device):
            summing = replace(self._runner, run_pass=run)
            hidden, _ = summing.prefill(self._tokens, lengths, self._cache, known=[known])
        self._last = hidden[0].float()
        self.num_read = self._cache.longest

    def vector(self) -> Tensor:
        """The embedding, (D,) float32 on the CPU, once nothing is left to read."""
        assert not self.num_left and self._sum is not None and self._last is not None
        pooled = self._sum / self._num_tokens if self._pooling.kind == "mean" else self._last
        vector = pooled.cpu()
        return torch.nn.functional.normalize(vector, dim=0) if self._pooling.is_normalised else vector
