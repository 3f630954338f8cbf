"""Which token each hidden state predicts, and with which probabilities the base itself predicts it.

The token at position j of a document is the target of depth d when it is a label token; the hidden
state that predicts it then stands at j - 1 - d of the same document. Depth 0 is the base model's own
head. So all heads and the base share their targets, and a teacher row serves every head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.base.causal_lm import CausalLM, embedding_weight, hidden_size, logits_of_states, output_embedding


@dataclass(frozen=True)
class Alignment:
    """Targets of one micro-batch and where each is predicted from. S targets, P hidden states."""

    columns: Tensor
    """(S,) long: the logits column of each target."""
    sources: Tensor
    """(K + 1, S) long: index in [0, P) of the state from which depth d predicts it; -1 where that position
    lies before the document. Row 0 belongs to the base's own head."""
    preceding: Tensor
    """(K, S) long: the token d places before each target, in row d - 1; any token before the document. The
    path that depth d continues is its first d rows, the nearest first."""
    unmapped: Tensor
    """(K, U) long: the sources, by depth, of the U label tokens that have no column; -1 as above."""

    @property
    def num_heads(self) -> int:
        return self.sources.shape[0] - 1

    @property
    def num_unmapped(self) -> Tensor:
        """(K,) long: label tokens without a column that some state could have predicted, by depth."""
        return (self.unmapped >= 0).sum(1)

    def to(self, device: torch.device) -> Alignment:
        parts = (self.columns, self.sources, self.preceding, self.unmapped)
        return Alignment(*(each.to(device, non_blocking=True) for each in parts))

    def path(self, depth: int, targets: slice) -> Tensor:
        """(C, depth) long: the tokens between the state that ``depth`` predicts from and each target."""
        return self.preceding[:depth, targets].flip(0).T


def align(
    tokens: Tensor,
    is_label: Tensor,
    positions: Tensor,
    num_heads: int,
    column_of: Tensor | None = None,
) -> Alignment:
    """Alignment of documents laid out one after the other.

    Args:
        tokens: (P,) long.
        is_label: (P,) bool; padding is never a label.
        positions: (P,) long, counted from 0 at the start of each document.
        num_heads: K.
        column_of: (V,) long, the logits column of each token and -1 for tokens without one. None: the
            token id is the column.
    """
    # A document's first token is predicted by nothing.
    targets = (is_label & (positions > 0)).nonzero().flatten()
    columns = tokens[targets] if column_of is None else column_of[tokens[targets]]
    depths = torch.arange(num_heads + 1)[:, None]
    sources = targets - 1 - depths  # (K + 1, S)
    preceding = tokens[sources[:-1].clamp(min=0)]  # (K, S)
    inside = positions[targets] - 1 >= depths
    sources, mapped = sources.masked_fill(~inside, -1), columns >= 0
    return Alignment(columns[mapped], sources[:, mapped], preceding[:, mapped], sources[1:, ~mapped])


def needed_states(is_label: Tensor, positions: Tensor, num_heads: int) -> Tensor:
    """(P,) bool: the positions whose hidden state some depth, 0 included, predicts a label from."""
    needed = torch.zeros_like(is_label)
    targets = (is_label & (positions > 0)).nonzero().flatten()
    for depth in range(num_heads + 1):
        needed[targets[positions[targets] - 1 >= depth] - 1 - depth] = True
    return needed


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
