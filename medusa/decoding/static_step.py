"""A decode step over tensors that stay where they are and keep their shapes.

Draft, verify, accept and commit as one function that reads nothing back from the device: no length, no token
and no verdict reaches the host. So steps can follow each other without waiting, be compiled, or be captured
in a CUDA graph. What ``loop.py`` does with lists is done with tensors here. A path is committed at its full
length, depth + 1 entries, and the next step overwrites what lies past a row's end. A row that has ended
stands still. The host reads the results every few steps (``static_loop.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance
from medusa.base.cache import FixedTreeCache
from medusa.base.causal_lm import CausalLM, SeenHidden, tree_inputs, vocab_size
from medusa.decoding.loop import acceptance_of, draft_context
from medusa.decoding.state import DecodeState
from medusa.drafters.protocol import Draft, DraftContext, StaticDrafter
from medusa.drafters.validation import (
    TOKEN_RULES,
    TOPOLOGY_RULES,
    check_shapes,
    is_medusas_own,
    token_violations,
    topology_violations,
)

STATIC_DRAFT_RULES = (*TOKEN_RULES, *TOPOLOGY_RULES)
"""What drafters that are not medusa's own are held to; checked when the host reads the results."""


@dataclass
class StaticState:
    """B rows that decode in place; the host reads the results of up to W steps at once."""

    rows: DecodeState
    """Its tensors are written in place; ``tokens`` has a column more than the cache has slots."""
    cache: FixedTreeCache
    """That of ``rows``."""
    ends: Tensor
    """(B,) long: the length at which a row's answer is full."""
    eos: Tensor
    """(E,) long: the tokens that end a row."""
    finished: Tensor
    """(B,) bool: the row has ended and stands still."""
    num_kept: Tensor
    """(W, B) long: tokens that each unread step added to each row; 0 once it has ended."""
    num_accepted: Tensor
    """(W, B) long: drafts that each step accepted, those past the row's end included."""
    num_unread: Tensor
    """(1,) long: steps since the host last read the results."""
    is_broken: Tensor
    """(1,) bool: a tree had a node on which the base is not finite; its rows have stood still since."""
    violations: Tensor
    """(R,) bool: which of :data:`STATIC_DRAFT_RULES` drafts have broken."""

    @classmethod
    def like(cls, given: DecodeState, num_steps: int) -> StaticState:
        """Room for rows like ``given`` and W = ``num_steps``; :meth:`reserve` and :meth:`load` fill it."""
        num_rows, device = len(given.rows), given.lengths.device
        cache = FixedTreeCache(num_rows, len(given.cache.tree_layers), device)
        rows = DecodeState(
            rows=list(range(num_rows)),
            tokens=given.tokens.new_zeros(num_rows, 0),
            lengths=given.lengths.clone(),
            hidden=given.hidden.clone(),
            cache=cache,
            requests=given.requests,
            seeds=None if given.seeds is None else given.seeds.clone(),
        )
        per_step = given.lengths.new_zeros(num_steps, num_rows)
        return cls(
            rows,
            cache,
            ends=given.lengths.clone(),
            eos=torch.tensor(sorted(given.request.eos_ids), dtype=torch.long, device=device),
            finished=torch.zeros(num_rows, dtype=torch.bool, device=device),
            num_kept=per_step,
            num_accepted=per_step.clone(),
            num_unread=given.lengths.new_zeros(1),
            is_broken=torch.zeros(1, dtype=torch.bool, device=device),
            violations=torch.zeros(len(STATIC_DRAFT_RULES), dtype=torch.bool, device=device),
        )

    def reserve(self, num_slots: int) -> None:
        """Have every pass read ``num_slots`` slots of the cache; shorter tensors grow, and so move."""
        self.cache.reserve(num_slots)
        missing = num_slots + 1 - self.rows.tokens.shape[1]
        if missing > 0:
            self.rows.tokens = torch.nn.functional.pad(self.rows.tokens, (0, missing))

    def load(self, given: DecodeState, num_left: int) -> None:
        """Go on from ``given``, whose rows may get ``num_left`` tokens more; it must fit what is reserved."""
        rows = self.rows
        self.cache.load(given.cache)
        width = min(rows.tokens.shape[1], given.tokens.shape[1])
        rows.tokens[:, :width] = given.tokens[:, :width]
        rows.lengths.copy_(given.lengths)
        rows.hidden.copy_(given.hidden)
        if given.seeds is not None and rows.seeds is not None:
            rows.seeds.copy_(given.seeds)
        self.ends.copy_(given.lengths + num_left)
        self.finished.fill_(False)
        self.num_unread.zero_()
        self.is_broken.fill_(False)
        self.violations.fill_(False)


def static_step(base: CausalLM, drafter: StaticDrafter, state: StaticState, seen: SeenHidden) -> None:
    """Draft, verify, accept and commit once, in every row of ``state``.

    ``seen`` is that of :func:`medusa.base.causal_lm.seen_hidden`, which must be open on ``base``.
    """
    context = replace(draft_context(state.rows, drafter, base), fixed_shape=True)
    draft = _checked(drafter.draft(context), context, drafter, state, vocab_size(base))
    logits = base(**tree_inputs(base, draft.tokens, draft.topology, state.cache)).logits
    acceptance = acceptance_of(state.rows, draft, logits, context.noise)
    _commit(state, draft, acceptance, seen.last)


def _checked(
    draft: Draft, context: DraftContext, drafter: StaticDrafter, state: StaticState, num_tokens: int
) -> Draft:
    """``draft``, with tokens that the base can read; what it violates is added to ``state``."""
    if is_medusas_own(drafter):
        return draft
    check_shapes(drafter, draft, context, num_tokens)
    of_tokens = token_violations(draft.tokens, context.root, num_tokens)
    state.violations.logical_or_(torch.cat([of_tokens, topology_violations(draft.topology)]))
    return replace(draft, tokens=draft.tokens.clamp(0, num_tokens - 1))


def _commit(state: StaticState, draft: Draft, acceptance: Acceptance, hidden: Tensor) -> None:
    """Keep the accepted path as far as its row goes; ``hidden`` (B, N, D) holds the states of all nodes."""
    rows = state.rows
    new = acceptance.tokens(draft.tokens)[:, : draft.topology.num_nodes]  # (B, L), L at most N
    num_kept, is_last = _until_end(state, new, acceptance.num_accepted + 1)
    if draft.topology.num_nodes > 1:  # the host takes one step without guesses then
        is_broken = ~hidden.isfinite().flatten(1).all(dim=1)  # (B,)
        num_kept, is_last = num_kept.masked_fill(is_broken, 0), is_last & ~is_broken
        state.is_broken.logical_or_(is_broken.any())
    ahead = torch.arange(new.shape[1], device=new.device)
    rows.tokens.scatter_(1, rows.lengths[:, None] + ahead, new)
    deepest = acceptance.path[:, -1:, None].expand(-1, -1, hidden.shape[2])
    stands = (num_kept == 0)[:, None]
    rows.hidden.copy_(torch.where(stands, rows.hidden, hidden.gather(1, deepest).squeeze(1)))
    state.cache.commit(acceptance.path, num_kept, draft.topology.is_chain)
    rows.lengths.add_(num_kept)
    state.finished.logical_or_(is_last)
    state.num_kept.index_copy_(0, state.num_unread, num_kept[None])
    state.num_accepted.index_copy_(0, state.num_unread, acceptance.num_accepted[None])
    state.num_unread.add_(1)


def _until_end(state: StaticState, new: Tensor, num_new: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the first ``num_new`` (B,) of ``new`` (B, L) each row keeps, and whether they end it."""
    ahead = torch.arange(new.shape[1], device=new.device)
    is_full = state.rows.lengths[:, None] + ahead + 1 >= state.ends[:, None]
    ends_row = is_full | (new[..., None] == state.eos).any(dim=-1)  # (B, L)
    first_end = torch.where(ends_row, ahead, new.shape[1]).amin(dim=1)
    num_kept = torch.minimum(num_new, first_end + 1)
    return num_kept.masked_fill(state.finished, 0), first_end < num_new
