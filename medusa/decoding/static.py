"""Decode steps over tensors that stay where they are and keep their shapes.

Draft, verify, accept and commit are one function here that reads nothing back from the device: no length, no
token and no verdict reaches the host. So steps can follow each other without waiting, be compiled, or be
captured in a CUDA graph (:mod:`medusa.decoding.cuda_graphs`). Tensors take the place of the lists in
``step.py``. A path is committed at its full length, depth + 1 entries, and the next step overwrites entries
past a row's end. A row that has ended stays in the batch unchanged, until all have. The host reads the
results of several steps at once (:mod:`medusa.decoding.static_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance
from medusa.base.cache import FixedTreeCache
from medusa.base.causal_lm import (
    CapturedHiddenStates,
    CausalLM,
    tree_inputs,
    vocab_size,
)
from medusa.decoding.accept import accept
from medusa.decoding.state import DecodeState
from medusa.decoding.step import draft_context
from medusa.drafters.protocol import (
    TOKEN_RULES,
    TOPOLOGY_RULES,
    Draft,
    DraftContext,
    StaticDrafter,
    check_shapes,
    is_builtin,
    token_violations,
    topology_violations,
)

STATIC_DRAFT_RULES = (*TOKEN_RULES, *TOPOLOGY_RULES)
"""The rules for foreign drafters; checked when the host reads the results."""


@dataclass
class StaticState:
    """B rows that decode in place; the host reads the results of up to W steps at once."""

    rows: DecodeState
    """Its tensors are written in place; ``tokens`` has a column more than the cache has slots."""
    cache: FixedTreeCache
    """The cache of ``rows``."""
    ends: Tensor
    """(B,) long: the length at which a row's answer is full."""
    eos: Tensor
    """(E,) long: the tokens that end a row."""
    finished: Tensor
    """(B,) bool: the row has ended and no longer changes."""
    num_kept: Tensor
    """(W, B) long: tokens that each unread step added to each row; 0 once it has ended."""
    num_accepted: Tensor
    """(W, B) long: drafts that each step accepted, those past the row's end included."""
    num_unread: Tensor
    """(1,) long: steps since the host last read the results."""
    not_finite: Tensor
    """(1,) bool: a tree had a node on which the base is not finite; its rows have not changed since."""
    violations: Tensor
    """(R,) bool: which of :data:`STATIC_DRAFT_RULES` drafts have broken."""

    @classmethod
    def like(cls, source: DecodeState, num_steps: int) -> StaticState:
        """Room for rows like ``source`` and W = ``num_steps``; :meth:`reserve` and :meth:`load` fill it."""
        num_rows = len(source.rows)
        device = source.lengths.device
        cache = FixedTreeCache(num_rows, len(source.cache.tree_layers), device)
        rows = DecodeState(
            rows=source.rows,
            tokens=source.tokens.new_zeros(num_rows, 0),
            lengths=source.lengths.clone(),
            hidden=source.hidden.clone(),
            cache=cache,
            seeds=None if source.seeds is None else source.seeds.clone(),
        )
        per_step = source.lengths.new_zeros(num_steps, num_rows)
        return cls(
            rows,
            cache,
            ends=source.lengths.clone(),
            eos=torch.tensor(sorted(source.request.eos_ids), dtype=torch.long, device=device),
            finished=torch.zeros(num_rows, dtype=torch.bool, device=device),
            num_kept=per_step,
            num_accepted=per_step.clone(),
            num_unread=source.lengths.new_zeros(1),
            not_finite=torch.zeros(1, dtype=torch.bool, device=device),
            violations=torch.zeros(len(STATIC_DRAFT_RULES), dtype=torch.bool, device=device),
        )

    def reserve(self, num_slots: int) -> None:
        """Have every pass read ``num_slots`` slots of the cache; shorter tensors grow, and so move."""
        self.cache.reserve(num_slots)
        missing = num_slots + 1 - self.rows.tokens.shape[1]
        if missing > 0:
            self.rows.tokens = torch.nn.functional.pad(self.rows.tokens, (0, missing))

    def load(self, source: DecodeState, num_left: int) -> None:
        """Go on from ``source``, whose rows may get ``num_left`` tokens more; it must fit the reserved
        memory."""
        rows = self.rows
        rows.rows = source.rows
        self.cache.load(source.cache)
        width = min(rows.tokens.shape[1], source.tokens.shape[1])
        rows.tokens[:, :width] = source.tokens[:, :width]
        rows.lengths.copy_(source.lengths)
        rows.hidden.copy_(source.hidden)
        if source.seeds is not None and rows.seeds is not None:
            rows.seeds.copy_(source.seeds)
        self.ends.copy_(source.lengths + num_left)
        self.finished.fill_(False)
        self.num_unread.zero_()
        self.not_finite.fill_(False)
        self.violations.fill_(False)


def static_step(
    base: CausalLM, drafter: StaticDrafter, state: StaticState, seen: CapturedHiddenStates
) -> None:
    """Draft, verify, accept and commit once, in every row of ``state``.

    ``seen`` is the value of :func:`medusa.base.causal_lm.capture_hidden_states`, which must be open on
    ``base``.
    """
    num_tokens = vocab_size(base)
    context = replace(draft_context(state.rows, num_tokens), fixed_shape=True)
    if context.noise is not None:
        context.noise.until(drafter.max_depth + 1)  # in one draw: drafting would ask for one depth at a time
    draft = _checked(drafter.draft(context), context, drafter, state, num_tokens)
    logits = base(**tree_inputs(base, draft.tokens, draft.topology, state.cache)).logits
    acceptance = accept(state.rows, draft, logits, context.noise, may_wait=False)
    _commit(state, draft, acceptance, seen.last)


def _checked(
    draft: Draft, context: DraftContext, drafter: StaticDrafter, state: StaticState, num_tokens: int
) -> Draft:
    """``draft``, with its tokens clamped to valid ids; rule violations are added to ``state``."""
    if is_builtin(drafter):
        return draft
    check_shapes(drafter, draft, context, num_tokens)
    of_tokens = token_violations(draft.tokens, context.root, num_tokens)
    state.violations.logical_or_(torch.cat([of_tokens, topology_violations(draft.topology)]))
    return replace(draft, tokens=draft.tokens.clamp(0, num_tokens - 1))


def _commit(state: StaticState, draft: Draft, acceptance: Acceptance, hidden: Tensor) -> None:
    """Keep the accepted path as far as its row goes; ``hidden`` (B, N, D) holds the states of all nodes."""
    rows = state.rows
    is_plain = draft.topology.num_nodes == 1
    new = acceptance.tokens(draft.tokens)[:, : draft.topology.num_nodes]  # (B, L), L at most N
    counts = torch.arange(new.shape[1] + 1, device=new.device)
    stands = state.finished  # (B,): rows that no longer change
    if not is_plain:  # the host takes one step without guesses then
        not_finite = (hidden * 0).flatten(1).any(dim=1)  # (B,)
        state.not_finite.logical_or_(not_finite.any())
        stands = stands | not_finite
    end = _first_end(state, new, counts[1:])
    num_new = end.clamp(max=1) if is_plain else torch.minimum(acceptance.num_accepted + 1, end)
    num_kept = num_new.masked_fill_(stands, 0)
    rows.tokens.scatter_(1, rows.lengths[:, None] + counts[:-1], new)
    deepest = acceptance.path[:, -1:, None].expand(-1, -1, hidden.shape[2])
    newest = hidden[:, 0] if is_plain else hidden.gather(1, deepest).squeeze(1)
    rows.hidden.copy_(torch.where((num_kept == 0)[:, None], rows.hidden, newest))
    state.cache.commit(acceptance.path, num_kept, draft.topology.is_chain)
    rows.lengths.add_(num_kept)
    state.finished.logical_or_(end <= num_kept)
    state.num_kept.index_copy_(0, state.num_unread, num_kept[None])
    state.num_accepted.index_copy_(0, state.num_unread, acceptance.num_accepted[None])
    state.num_unread.add_(1)


def _first_end(state: StaticState, new: Tensor, counts: Tensor) -> Tensor:
    """How many of ``new`` (B, L) there are up to the first that ends its row, (B,): more than L where none
    does, none in rows that are full. ``counts`` are 1 .. L."""
    num_left = state.ends - state.rows.lengths
    if not len(state.eos):
        return num_left
    is_eos = (new[..., None] == state.eos).any(dim=-1)  # (B, L)
    return torch.minimum(torch.where(is_eos, counts, new.shape[1] + 1).amin(dim=1), num_left)
