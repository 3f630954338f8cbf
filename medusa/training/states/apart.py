"""Hidden states of packed documents, on bases that keep a state too: there each document is read by itself.

``transformers`` begins no state anew inside of a row: 5.17 and 5.24 hand ``seq_idx`` or ``cu_seq_lens`` to
kernels of other packages, and their own functions do not look at them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM
from medusa.base.passes import hidden_states
from medusa.base.recurrent import is_recurrent

MOST_PADDED = 1.25
"""Tokens with padding of documents that are read together, at most so many times their own."""


def hidden_states_apart(
    base: CausalLM, input_ids: Tensor, positions: Tensor, layers: tuple[int, ...] = ()
) -> Tensor:
    """States (B, T, (1 + L) * D) of rows (B, T) long, of documents that do not see each other: they begin
    where ``positions`` (B, T) long are 0. The other arguments are those of
    :func:`medusa.base.passes.hidden_states`."""
    if not is_recurrent(base) or not bool((positions[:, 1:] == 0).any()):
        return hidden_states(base, input_ids, position_ids=positions, layers=layers)
    tokens = input_ids.flatten()
    starts = (positions.flatten() == 0).nonzero().flatten()
    lengths = torch.cat([starts[1:], starts.new_tensor([len(tokens)])]) - starts
    states = []
    places = []
    for group in _alike_in_length(lengths.tolist()):
        columns = torch.arange(int(lengths[group].max()), device=tokens.device)
        is_text = columns < lengths[group, None]  # (documents, T')
        of_group = starts[group, None] + columns
        inputs = torch.where(is_text, tokens[of_group.clamp(max=len(tokens) - 1)], 0)
        of_documents = hidden_states(base, inputs, position_ids=columns.expand_as(inputs), layers=layers)
        states.append(of_documents[is_text])
        places.append(of_group[is_text])
    return torch.cat(states)[torch.cat(places).argsort()].unflatten(0, input_ids.shape)


def _alike_in_length(lengths: list[int]) -> Iterator[list[int]]:
    """Documents of these ``lengths``, by their numbers, in groups that are padded little."""
    group: list[int] = []
    num_tokens = 0
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        padded = lengths[number] * (len(group) + 1)
        if group and padded > MOST_PADDED * (num_tokens + lengths[number]):
            yield group
            group = []
            num_tokens = 0
        group.append(number)
        num_tokens += lengths[number]
    yield group
