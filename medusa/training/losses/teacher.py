"""The base model's own logits for given hidden states: what soft targets are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.base.causal_lm import CausalLM, embedding_weight, hidden_size, logits_of_states, output_embedding

Teacher = Callable[[Tensor], Tensor]
"""Hidden states (C, D) -> the base's own logits (C, V') in the heads' columns."""


@dataclass(frozen=True)
class TeacherRows:
    """The base model's own distribution p for C targets."""

    probabilities: Tensor
    """(C, V')."""
    log_probabilities: Tensor
    """(C, V')."""
    entropy: Tensor
    """(C,): -sum p log p."""

    @classmethod
    def of_logits(cls, logits: Tensor) -> TeacherRows:
        log_p = logits.log_softmax(-1, dtype=torch.float32)
        p = log_p.exp()
        return cls(p, log_p, -expected(p, log_p))

    def part(self, rows: slice) -> TeacherRows:
        """Of some of the targets."""
        return TeacherRows(self.probabilities[rows], self.log_probabilities[rows], self.entropy[rows])


def expected(probabilities: Tensor, values: Tensor) -> Tensor:
    """(C,): the mean of values (C, V) under each row of probabilities (C, V); autocast does not round it."""
    with torch.autocast(probabilities.device.type, enabled=False):
        return torch.einsum("cv,cv->c", probabilities, values)


def teacher_of(base: CausalLM, token_map: Tensor | None = None) -> Teacher:
    """Hidden states (C, D) -> the base's logits (C, V'), in the columns of ``token_map`` (V',) if given.

    Some architectures scale or cap what their output embedding gives. Whether this one does is found out by
    a trial; if so, the states are sent through the model's own forward pass.
    """
    embedding = output_embedding(base)
    probe = torch.randn(3, hidden_size(base), generator=torch.Generator().manual_seed(0))
    probe = 100 * probe.to(base.device, embedding_weight(embedding).dtype)  # large enough to meet a cap
    with torch.no_grad():
        is_plain = torch.allclose(logits_of_states(base, probe), embedding(probe), rtol=1e-3)
    if not is_plain and token_map is None:
        return lambda states: logits_of_states(base, states)
    if not is_plain:
        return lambda states: logits_of_states(base, states)[:, token_map]
    if token_map is None:
        return lambda states: embedding(states.to(embedding_weight(embedding).dtype))
    rows, bias = embedding_weight(embedding).detach()[token_map], getattr(embedding, "bias", None)
    bias = None if bias is None else bias.detach()[token_map]
    return lambda states: F.linear(states.to(rows.dtype), rows, bias)
