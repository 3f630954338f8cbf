"""Decode steps over tensors that stay where they are and keep their shapes.

Draft, verify, accept and commit are one function here that reads nothing back from the device: no length, no
token and no verdict reaches the host. So steps can follow each other without waiting, be compiled, or be
captured in a CUDA graph (:mod:`medusa.decoding.cuda_graphs`). Tensors take the place of the lists in
``step.py``. A path is committed at its full length, depth + 1 entries, and the next step overwrites entries
past a row's end. A row that has ended stays unchanged until the host has seen it. The host reads the results
of several steps at once (:mod:`medusa.decoding.static_stepper`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance
from medusa.acceptance.row_settings import RowSettings, row_numbers
from medusa.base.causal_lm import CausalLM, vocab_size
from medusa.base.fixed_cache import FixedTreeCache
from medusa.base.passes import CapturedHiddenStates, capture_hidden_states, tree_inputs
from medusa.decoding.accept import accept
from medusa.decoding.state import DecodeState, Row
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
from medusa.hardware import sent

LEAST_EOS = 4
"""The number of end tokens of a row that there is room for from the start; then the next power of two."""
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
    """(B, E) long: the tokens that end each row; -1 fills rows with fewer."""
    finished: Tensor
    """(B,) bool: the row has ended, or is not there, and no longer changes."""
    failed: Tensor
    """(B,) bool: its next token would have been chosen by a NaN score; only where
    :attr:`medusa.decoding.state.DecodeState.refuses_nan`."""
    num_kept: Tensor
    """(W, B) long: tokens that each unread step added to each row; 0 once it has ended."""
    num_accepted: Tensor
    """(W, B) long: drafts that each step accepted, those past the row's end included."""
    num_unread: Tensor
    """(1,) long: steps since the host last read the results."""
    not_finite: Tensor
    """(B,) bool: a tree of the row had a node on which the base is not finite; it has not changed since."""
    violations: Tensor
    """(R,) bool: which of :data:`STATIC_DRAFT_RULES` drafts have broken."""

    @classmethod
    def with_room(
        cls, source: DecodeState, num_rows: int, num_steps: int, settings: RowSettings | None
    ) -> StaticState:
        """Room for B = ``num_rows`` rows that come and go, of the base of ``source``, and W = ``num_steps``.
        None of them is there yet. Their keys and values are elsewhere: see :meth:`first`.

        ``settings`` are those of as many rows; None where rows have the settings of their requests, which
        are all sampled or all greedy, as those of ``source``.
        """
        lengths = source.lengths.new_zeros(num_rows)
        are_greedy = settings is None and source.seeds is None
        cache = FixedTreeCache([], [], lengths.clone())
        none = torch.zeros(num_rows, dtype=torch.bool, device=lengths.device)
        per_step = lengths.new_zeros(num_steps, num_rows)
        rows = DecodeState(
            rows=[],
            tokens=source.tokens.new_zeros(num_rows, 0),
            lengths=lengths + 1,
            hidden=source.hidden.new_zeros(num_rows, source.hidden.shape[1]),
            cache=cache,
            seeds=None if are_greedy else lengths.clone(),
            refuses_nan=source.refuses_nan,
            settings=settings,
        )
        return cls(
            rows,
            cache,
            ends=lengths,
            eos=lengths[:, None][:, :0],
            finished=none,
            failed=none.clone(),
            num_kept=per_step,
            num_accepted=per_step.clone(),
            num_unread=lengths.new_zeros(1),
            not_finite=none.clone(),
            violations=torch.zeros(len(STATIC_DRAFT_RULES), dtype=torch.bool, device=lengths.device),
        )

    def first(self, count: int, rows: list[Row], cache: FixedTreeCache) -> StaticState:
        """The first ``count`` rows, of which ``rows`` are there, with their ``cache``: views."""
        whole = self.rows
        settings = None if whole.settings is None else whole.settings.first(count)
        samples = settings is None or settings.program.samples
        state = replace(
            whole,
            rows=rows,
            tokens=whole.tokens[:count],
            lengths=whole.lengths[:count],
            hidden=whole.hidden[:count],
            cache=cache,
            seeds=None if whole.seeds is None or not samples else whole.seeds[:count],
            settings=settings,
        )
        return replace(
            self,
            rows=state,
            cache=cache,
            ends=self.ends[:count],
            eos=self.eos[:count],
            finished=self.finished[:count],
            failed=self.failed[:count],
            not_finite=self.not_finite[:count],
            num_kept=self.num_kept[:, :count],
            num_accepted=self.num_accepted[:, :count],
        )

    def reserve_tokens(self, width: int) -> None:
        """Have room for texts of ``width`` tokens."""
        missing = width - self.rows.tokens.shape[1]
        if missing > 0:
            self.rows.tokens = torch.nn.functional.pad(self.rows.tokens, (0, missing))

    def load(self, source: DecodeState, num_rows: int) -> None:
        """Go on from the N rows of ``source``; the rows after them, up to ``num_rows``, are not there. The
        host sends what it knows, and does not wait."""
        count = len(source.rows)
        rows = self.rows
        requests = [row.request for row in source.rows]
        left = [
            request.max_new_tokens - len(row.tokens)
            for request, row in zip(requests, source.rows, strict=True)
        ]
        device = rows.lengths.device
        width = min(rows.tokens.shape[1], source.tokens.shape[1])
        rows.tokens[:count, :width] = source.tokens[:, :width]
        rows.lengths[:count] = source.lengths
        rows.lengths[count:num_rows] = 1
        self.cache.lengths[:num_rows] = rows.lengths[:num_rows] - 1
        rows.hidden[:count] = source.hidden
        if source.seeds is not None and rows.seeds is not None:
            rows.seeds[:count] = source.seeds
        if rows.settings is not None:
            numbers = [row_numbers(request.processors) for request in requests]
            are_sampled = [request.seeds is not None for request in requests]
            temperatures = [
                request.temperature * is_sampled
                for request, is_sampled in zip(requests, are_sampled, strict=True)
            ]
            rows.settings.load([each for each in numbers if each is not None], are_sampled, temperatures)
        self.ends[:count] = source.lengths + sent(left, device)
        self._load_eos([request.eos_ids for request in requests])
        self.finished[:count] = False
        self.finished[count:num_rows] = True
        self.clear_results()

    def _load_eos(self, eos_ids: list[frozenset[int]]) -> None:
        """Set the tokens that end the first rows; the tensor of all moves where it must be wider."""
        most = max(map(len, eos_ids), default=0)
        wanted = max(LEAST_EOS, 1 << (most - 1).bit_length()) if most else 0
        missing = wanted - self.eos.shape[1]
        if missing > 0:
            self.eos = torch.nn.functional.pad(self.eos, (0, missing), value=-1)
        width = self.eos.shape[1]
        filled = [[*sorted(ids)] + [-1] * (width - len(ids)) for ids in eos_ids]
        self.eos[: len(filled)] = sent(filled, self.eos.device)

    def clear_results(self) -> None:
        """Forget what steps have left for the host to read."""
        self.failed.fill_(False)
        self.num_unread.zero_()
        self.not_finite.fill_(False)
        self.violations.fill_(False)


def static_steps(
    base: CausalLM, drafter: StaticDrafter, state: StaticState, layers: tuple[int, ...], num_steps: int
) -> None:
    """So many of :func:`static_step`; the hidden states have the outputs of ``layers``, which the drafter and
    those after it read."""
    with capture_hidden_states(base, layers=layers) as seen:
        for _ in range(num_steps):
            static_step(base, drafter, state, seen)


def static_step(
    base: CausalLM, drafter: StaticDrafter, state: StaticState, seen: CapturedHiddenStates
) -> None:
    """Draft, verify, accept and commit once, in every row of ``state``.

    ``seen`` is the value of :func:`medusa.base.passes.capture_hidden_states`, which must be open on
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
        state.not_finite.logical_or_(not_finite)
        stands = stands | not_finite
    if acceptance.chose_nan is not None:
        failed = acceptance.chose_nan & ~stands
        state.failed.logical_or_(failed)
        state.finished.logical_or_(failed)
        stands = stands | failed
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
    if not state.eos.shape[1]:
        return num_left
    is_eos = (new[..., None] == state.eos[:, None]).any(dim=-1)  # (B, L)
    return torch.minimum(torch.where(is_eos, counts, new.shape[1] + 1).amin(dim=1), num_left)
