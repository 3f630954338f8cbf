"""Penalties on what the answer has said already, which ``transformers`` does not have."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class OccurrencePenalty(LogitsProcessor):
    """OpenAI's ``frequency_penalty`` and ``presence_penalty``.

    A token's score loses ``frequency`` for each time that it stands in the answer, and ``presence`` once if
    it does. The first ``prompt_length`` tokens of a text do not count.
    """

    def __init__(self, prompt_length: int, frequency: float = 0.0, presence: float = 0.0):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids (B, T) long, scores (B, V) -> (B, V)."""
        said = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add(1, said, torch.ones_like(said, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
