"""A decode step over tensors that stay where they are and keep their shapes.

The four verbs of ``loop.py`` as one function that asks the device for nothing: no length, no token and
no verdict reaches the host, so the step can run on, be compiled, or be captured in a CUDA graph. What the
loop does with lists there is done with tensors here: a path is committed at its full length, depth + 1
entries, and what lies past a row's end is overwritten by the next step; a row that has ended stands still.
The host learns what happened when it looks, every few steps (``static_loop.py``).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance
from medusa.acceptance.sampling import PATH_FREE_PROCESSORS
from medusa.base.cache import FixedTreeCache
from medusa.base.causal_lm import CausalLM, SeenHidden, tree_inputs, vocab_size
from medusa.decoding.loop import acceptance_of, draft_context
from medusa.decoding.state import DecodeRequest, DecodeState
from medusa.drafters.protocol import Draft, DraftContext, Drafter
from medusa.drafters.validation import (
    TOKEN_RULES,
    TOPOLOGY_RULES,
    check_shapes,
    is_medusas_own,
    token_violations,
    topology_violations,
)

STATIC_DRAFT_RULES = (*TOKEN_RULES, *TOPOLOGY_RULES)
"""What drafters that are not medusa's own are held to; the host learns of it when it looks."""


@runtime_checkable
class StaticDrafter(Drafter, Protocol):
    """A drafter whose drafts are the same tensor operations at every step."""

    @property
    def static_key(self) -> Hashable:
        """All that a draft depends on besides its context."""

    @property
    def num_nodes(self) -> int:
        """N of every draft."""

    def tensors(self) -> list[Tensor]:
        """What drafts read and others may replace: weights."""


@dataclass
class StaticState:
    """B rows that decode in place; W steps may pass between two looks of the host."""

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
    """(W, B) long: tokens that each step since the last look added to each row; 0 once it has ended."""
    num_accepted: Tensor
    """(W, B) long: drafts that each step accepted, those past the row's end included."""
    turn: Tensor
    """(1,) long: steps since the last look."""
    violations: Tensor
    """(R,) bool: which of :data:`STATIC_DRAFT_RULES` drafts have broken."""

    @classmethod
    def like(cls, given: DecodeState, num_steps: int) -> StaticState:
        """Room for rows like ``given`` and W = ``num_steps``; :meth:`reserve` and :meth:`load` fill it."""
        num_rows, device = len(given.rows), given.lengths.device
        cache = FixedTreeCache(num_rows, len(given.cache.tree_layers), device)
        seeds = given.request.seeds
        request = replace(given.request, seeds=None if seeds is None else seeds.clone(), padding=())
        rows = DecodeState(
            rows=list(range(num_rows)),
            tokens=given.tokens.new_zeros(num_rows, 0),
            lengths=given.lengths.clone(),
            hidden=given.hidden.clone(),
            cache=cache,
            request=request,
        )
        per_step = given.lengths.new_zeros(num_steps, num_rows)
        return cls(
            rows,
            cache,
            ends=given.lengths.clone(),
            eos=torch.tensor(sorted(request.eos_ids), dtype=torch.long, device=device),
            finished=torch.zeros(num_rows, dtype=torch.bool, device=device),
            num_kept=per_step,
            num_accepted=per_step.clone(),
            turn=given.lengths.new_zeros(1),
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
        rows, seeds = self.rows, given.request.seeds
        self.cache.load(given.cache)
        width = min(rows.tokens.shape[1], given.tokens.shape[1])
        rows.tokens[:, :width] = given.tokens[:, :width]
        rows.lengths.copy_(given.lengths)
        rows.hidden.copy_(given.hidden)
        if seeds is not None and rows.request.seeds is not None:
            rows.request.seeds.copy_(seeds)
        self.ends.copy_(given.lengths + num_left)
        self.finished.fill_(False)
        self.turn.zero_()
        self.violations.fill_(False)


def checked_drafter(step: str, drafter: Drafter, request: DecodeRequest) -> StaticDrafter:
    """``drafter``, if :func:`static_step` can decode ``request`` with it.

    Raises:
        ValueError: it cannot; the message names ``step`` and says what is in the way.
    """
    if (lacks := missing_for_static(drafter, request)) is not None:
        raise ValueError(f"step={step!r} cannot work with {lacks}; use step='general'")
    assert isinstance(drafter, StaticDrafter)
    return drafter


def missing_for_static(drafter: Drafter, request: DecodeRequest) -> str | None:
    """What, in words, keeps :func:`static_step` from decoding ``request``; None when nothing."""
    if not isinstance(drafter, StaticDrafter):
        return f"{type(drafter).__name__}, which may ask the host; Medusa heads and plain decoding do not"
    if request.acceptance == "typical" or request.rule is not None:
        return f"acceptance={request.acceptance!r}; only 'exact' is made of tensors alone"
    reading = [type(each).__name__ for each in request.processors if type(each) not in PATH_FREE_PROCESSORS]
    if reading:
        return f"logits processors that read the tokens before each node on the host: {', '.join(reading)}"
    if request.criteria:
        return "stopping criteria (stop_strings are one), which the host is asked after every token"
    return None


def static_step(base: CausalLM, drafter: Drafter, state: StaticState, seen: SeenHidden) -> None:
    """Draft, verify, accept and commit once, in every row of ``state``.

    ``seen`` is that of :func:`medusa.base.causal_lm.seen_hidden`, which must be open on ``base``.
    """
    context = draft_context(state.rows, drafter, base)
    draft = _checked(drafter.draft(context), context, drafter, state, vocab_size(base))
    logits = base(**tree_inputs(base, draft.tokens, draft.topology, state.cache)).logits
    acceptance = acceptance_of(state.rows, draft, logits, context.noise)
    _commit(state, draft, acceptance, seen.last)


def _checked(
    draft: Draft, context: DraftContext, drafter: Drafter, state: StaticState, num_tokens: int
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
    new = acceptance.tokens(draft.tokens)  # (B, L)
    num_kept, is_last = _until_end(state, new, acceptance.num_accepted + 1)
    ahead = torch.arange(new.shape[1], device=new.device)
    rows.tokens.scatter_(1, rows.lengths[:, None] + ahead, new)
    deepest = acceptance.path[:, -1:, None].expand(-1, -1, hidden.shape[2])
    rows.hidden.copy_(hidden.gather(1, deepest).squeeze(1))
    state.cache.commit(acceptance.path, num_kept, draft.topology.is_chain)
    rows.lengths.add_(num_kept)
    state.finished.logical_or_(is_last)
    state.num_kept.index_copy_(0, state.turn, num_kept[None])
    state.num_accepted.index_copy_(0, state.turn, acceptance.num_accepted[None])
    state.turn.add_(1)


def _until_end(state: StaticState, new: Tensor, num_new: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the first ``num_new`` (B,) of ``new`` (B, L) each row keeps, and whether they end it."""
    ahead = torch.arange(new.shape[1], device=new.device)
    is_full = state.rows.lengths[:, None] + ahead + 1 >= state.ends[:, None]
    ends_row = is_full | (new[..., None] == state.eos).any(dim=-1)  # (B, L)
    first_end = torch.where(ends_row, ahead, new.shape[1]).amin(dim=1)
    num_kept = torch.minimum(num_new, first_end + 1)
    return num_kept.masked_fill(state.finished, 0), first_end < num_new
