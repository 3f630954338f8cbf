"""Decode steps over tensors that stay where they are and keep their shapes.

Draft, verify, accept and commit are one function here that reads nothing back from the device: no length, no
token and no verdict reaches the host. So steps can follow each other without waiting, be compiled, or be
captured in a CUDA graph. Tensors take the place of the lists in ``step.py``. A path is committed at its full
length, depth + 1 entries, and the next step overwrites entries past a row's end. A row that has ended stays
in the batch unchanged, until all have. The host reads the results of several steps at once.
"""

from __future__ import annotations

import gc
import pickle
import threading
import time
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance
from medusa.acceptance.sampling import PATH_FREE_PROCESSORS
from medusa.base.cache import FixedTreeCache
from medusa.base.causal_lm import (
    CapturedHiddenStates,
    CausalLM,
    capture_hidden_states,
    lm_head_device,
    tree_inputs,
    vocab_size,
)
from medusa.decoding.accept import accept
from medusa.decoding.state import DecodeRequest, DecodeState
from medusa.decoding.step import RowOutput, StepOutput, depths_of, draft_context
from medusa.drafters.protocol import (
    TOKEN_RULES,
    TOPOLOGY_RULES,
    Draft,
    DraftContext,
    Drafter,
    PlainDrafter,
    StaticDrafter,
    check_shapes,
    is_builtin,
    not_capturable,
    raise_violated,
    token_violations,
    topology_violations,
)
from medusa.hardware import available_memory

STATIC_DRAFT_RULES = (*TOKEN_RULES, *TOPOLOGY_RULES)
"""The rules for foreign drafters; checked when the host reads the results."""
HOST_SYNC_INTERVALS = {"cpu": 1}
"""Steps after which the host reads the results, by kind of device: on a CPU reading costs nothing."""
DEFAULT_HOST_SYNC_INTERVAL = 8
"""On other devices. When the last row ends, half of these steps have run in vain, on average."""
SLOTS, MANY_SLOTS = 256, 1024
"""A cache is read in whole multiples of the first; beyond the second, in multiples of that."""
WARM_UP_STEPS = 3
"""Steps that run before a capture: libraries set themselves up in their first calls."""
MAX_KEPT = 16
"""Settings whose graphs a model keeps at most."""
KEPT_SHARE = 4
"""Divisor: caches of kept graphs, the newest one's excluded, take at most free memory divided by this."""


def keep_newest(kept: dict[Hashable, StepRunner], key: Hashable, runner: StepRunner) -> None:
    """Add ``runner`` as the newest; the oldest go, as in :func:`make_room`."""
    make_room(kept, runner.base.device)
    kept[key] = runner


def make_room(kept: dict[Hashable, StepRunner], device: torch.device) -> None:
    """Let the oldest runners go, beyond :data:`MAX_KEPT` with one more, and beyond the memory that they may
    take."""
    left, others = available_memory(device), list(kept.items())
    while others:
        num_bytes = sum(each.state.cache.num_bytes for _, each in others)
        if len(others) < MAX_KEPT and (left is None or num_bytes <= left // KEPT_SHARE):
            break
        kept.pop(others.pop(0)[0], None)  # another thread may have dropped it


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
    is_broken: Tensor
    """(1,) bool: a tree had a node on which the base is not finite; its rows have not changed since."""
    violations: Tensor
    """(R,) bool: which of :data:`STATIC_DRAFT_RULES` drafts have broken."""

    @classmethod
    def like(cls, given: DecodeState, num_steps: int) -> StaticState:
        """Room for rows like ``given`` and W = ``num_steps``; :meth:`reserve` and :meth:`load` fill it."""
        num_rows, device = len(given.rows), given.lengths.device
        cache = FixedTreeCache(num_rows, len(given.cache.tree_layers), device)
        rows = DecodeState(
            rows=given.rows,
            tokens=given.tokens.new_zeros(num_rows, 0),
            lengths=given.lengths.clone(),
            hidden=given.hidden.clone(),
            cache=cache,
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
        """Go on from ``given``, whose rows may get ``num_left`` tokens more; it must fit the reserved
        memory."""
        rows = self.rows
        rows.rows = given.rows
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
    rows, is_plain = state.rows, draft.topology.num_nodes == 1
    new = acceptance.tokens(draft.tokens)[:, : draft.topology.num_nodes]  # (B, L), L at most N
    counts, stands = torch.arange(new.shape[1] + 1, device=new.device), state.finished
    if not is_plain:  # the host takes one step without guesses then
        is_broken = (hidden * 0).flatten(1).any(dim=1)  # (B,)
        state.is_broken.logical_or_(is_broken.any())
        stands = stands | is_broken
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


_CAPTURE_LOCK = threading.Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def _alone_on_a_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The stream of all warm-ups and captures on ``device``: what graphs that share a pool leave can be taken
    by the next on one stream only, and every stream has buffers of cuBLAS of its own.

    One thread at a time: torch allows one capture in a process."""
    with _CAPTURE_LOCK, torch.cuda.device(device):
        if device not in _streams:
            _streams[device] = torch.cuda.Stream()
        side = _streams[device]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield side
        torch.cuda.current_stream().wait_stream(side)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: to give back memory of a card is not allowed in a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepRunner:
    """Runs static steps of one base, one drafter and one set of rows: as they are, or, where it ``captures``,
    as CUDA graphs, one for each number of slots that a pass reads, with drafts and without.

    Where a step cannot be captured, as where the base reads a number on the host, it runs as it is, with a
    warning."""

    def __init__(
        self, base: CausalLM, drafter: StaticDrafter, rows: DecodeState, interval: int, captures: bool = False
    ):
        self.base, self.drafter, self.captures = base, drafter, captures
        self.processors = frozenset(type(each) for each in rows.request.processors)
        self.plain = PlainDrafter(drafter.aux_layers)
        self.state = StaticState.like(rows, interval)
        self._graphs: dict[tuple[bool, int], torch.cuda.CUDAGraph] = {}
        self._addresses: list[int] = []

    def run(self, num_steps: int, drafts: bool = True) -> float:
        """Runs the given number of steps, with or without drafts; returns the seconds of setup."""
        if not self.captures:
            self._run(num_steps, drafts)
            return 0.0
        addresses = self._tensor_addresses()
        if addresses != self._addresses:  # a graph reads and writes where things were when it was captured
            self._graphs, self._addresses = {}, addresses
        setup_seconds, key = 0.0, (drafts, self.state.cache.num_slots)
        if key not in self._graphs:
            began = time.perf_counter()
            num_warm = min(num_steps, WARM_UP_STEPS)
            with _alone_on_a_stream(self.base.device):  # as torch asks for before a capture
                self._run(num_warm, drafts)
            num_steps -= num_warm
            if num_steps and (graph := self._captured(drafts)) is not None:
                self._graphs[key] = graph
            torch.cuda.synchronize(self.base.device)
            setup_seconds = time.perf_counter() - began
        if not self.captures:
            self._run(num_steps, drafts)
            return setup_seconds
        for _ in range(num_steps):
            self._graphs[key].replay()
        return setup_seconds

    def _run(self, num_steps: int, drafts: bool) -> None:
        drafter = self.drafter if drafts else self.plain
        with capture_hidden_states(self.base, layers=drafter.aux_layers) as seen:
            for _ in range(num_steps):
                static_step(self.base, drafter, self.state, seen)

    def _captured(self, drafts: bool) -> torch.cuda.CUDAGraph | None:
        """The graph of one step, and capturing runs nothing; None where it cannot be captured, and neither
        will be what follows.

        Graphs share one pool of memory: nothing in it outlives a replay, what does is in ``state``.
        """
        graph, pool = torch.cuda.CUDAGraph(), next((g.pool() for g in self._graphs.values()), None)
        try:
            with (
                _alone_on_a_stream(self.base.device) as side,
                _no_collection(),
                torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"),
            ):
                self._run(1, drafts)
        except RuntimeError as error:
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            warn_of_static_steps(f"a step cannot be captured: {str(cause).splitlines()[0]}")
            self.captures, self._graphs = False, {}
            return None
        return graph

    def _tensor_addresses(self) -> list[int]:
        """The addresses of all tensors that may move between two runs."""
        entries = [each for layer in self.state.cache.tree_layers for each in layer.entries]
        kept = (self.state.rows.tokens, *entries, *self.base.parameters(), *self.base.buffers())
        return [tensor.data_ptr() for tensor in (*kept, *self.drafter.tensors())]


def warn_of_static_steps(reason: str) -> None:
    """Say that steps of one answer and those to come are not captured, and why, in one line."""
    warnings.warn(f"step='captured' runs as step='static' here: {reason}", stacklevel=2)


def _settings(base: CausalLM, rows: DecodeState) -> Hashable:
    """The properties of rows on which a graph depends, besides their number, and the attention of
    ``base``."""
    request, attention = rows.request, base.config.get_text_config(decoder=True)._attn_implementation
    processors = pickle.dumps(list(request.processors))
    is_greedy, last_position = request.seeds is None, rows.cache.num_positions
    return is_greedy, last_position, request.temperature, request.eos_ids, processors, attention


class StaticRows:
    """The rows of one request, in steps of fixed shape.

    The host reads the results every :attr:`interval` steps. With ``captured``, the steps are CUDA graphs,
    whose runners are kept there for the calls to come.
    """

    def __init__(
        self,
        base: CausalLM,
        drafter: StaticDrafter,
        captured: dict[Hashable, StepRunner] | None = None,
    ):
        self.interval = HOST_SYNC_INTERVALS.get(lm_head_device(base).type, DEFAULT_HOST_SYNC_INTERVAL)
        self.base, self.drafter, self._captured = base, drafter, captured
        self._runner: StepRunner | None = None
        self._key: Hashable = None
        self._lengths: list[int] = []  # of the rows, when the host last read them
        self._ends: list[int] = []  # the largest length of each row; its own length once it has ended

    def advance(self, rows: DecodeState, drafts: bool) -> tuple[list[StepOutput], int, float]:
        """The outputs of the next steps without empty ones; the number of steps, a repeated step after a
        broken draft not counted; and the seconds of their setup.

        ``rows`` is read only at the first call, which takes over its keys and values.
        """
        runner = self._runner or self._begin(rows)
        state, drafter = runner.state, self.drafter
        num_steps = min(self.interval, self._most_left)
        state.reserve(self._slots_needed(num_steps))
        seconds = runner.run(num_steps, drafts)
        if not is_builtin(drafter):
            raise_violated(drafter, STATIC_DRAFT_RULES, state.violations)
        outputs, is_broken = self._read(state, num_steps, drafts)
        if is_broken:
            state.cache.clear_uncommitted()
            state.is_broken.fill_(False)
            seconds += runner.run(1, False)
            outputs += self._read(state, 1, False)[0]
        return outputs, num_steps, seconds

    @property
    def has_begun(self) -> bool:
        """Whether rows decode: from here on all of them stay, though some have ended."""
        return self._runner is not None

    def close(self) -> None:
        """Give the runner back."""
        if self._captured is not None and self._runner is not None:
            keep_newest(self._captured, self._key, self._runner)

    def _begin(self, rows: DecodeState) -> StepRunner:
        kept = {} if self._captured is None else self._captured
        self._key = len(rows.rows), self.drafter.static_key, self.interval, _settings(self.base, rows)
        runner = kept.pop(self._key, None) or StepRunner(
            self.base, self.drafter, rows, self.interval, captures=self._captured is not None
        )
        make_room(kept, self.base.device)  # before this one grows
        self._runner, num_left = runner, rows.request.max_new_tokens - 1
        self._lengths = rows.lengths.tolist()
        self._ends = [length + num_left for length in self._lengths]
        runner.state.reserve(self._slots_needed(1))
        runner.state.load(rows, num_left)
        rows.cache = runner.state.cache  # the prompt's own cache is freed: long texts would be held twice
        return runner

    @property
    def _most_left(self) -> int:
        """Tokens that some row may still get."""
        return max(end - length for end, length in zip(self._ends, self._lengths, strict=True))

    def _slots_needed(self, num_steps: int) -> int:
        """Cache slots for the given number of steps, rounded up so that few sizes occur and little is
        compiled or captured again."""
        before_last = (num_steps - 1) * (self.drafter.max_depth + 1)
        longest = max(
            min(length + before_last, end) for end, length in zip(self._ends, self._lengths, strict=True)
        )
        return rounded_slots(longest - 1 + self.drafter.num_nodes)

    def _read(self, state: StaticState, num_steps: int, drafts: bool) -> tuple[list[StepOutput], bool]:
        """The outputs of the last ``num_steps`` steps without empty ones, and whether the base was not finite
        on one of their nodes: all in one read."""
        depth, num_drafted = (self.drafter.max_depth, self.drafter.num_nodes - 1) if drafts else (0, 0)
        rows = torch.cat(
            [
                state.num_kept[:num_steps].T,
                state.num_accepted[:num_steps].T,
                state.finished[:, None].long(),
                state.is_broken.long().expand(len(state.finished), 1),
                _newest_tokens(state, num_steps, depth + 1),
            ],
            dim=1,
        ).tolist()
        num_kept, num_accepted = (
            list(zip(*(row[first : first + num_steps] for row in rows), strict=True))
            for first in (0, num_steps)
        )
        has_ended, is_broken = [bool(row[2 * num_steps]) for row in rows], bool(rows[0][2 * num_steps + 1])
        new = [row[2 * num_steps + 2 :] for row in rows]
        totals = list(map(sum, zip(*num_kept, strict=True)))
        self._lengths = [length + total for length, total in zip(self._lengths, totals, strict=True)]
        for row in range(len(totals)):
            self._ends[row] = self._lengths[row] if has_ended[row] else self._ends[row]
        state.num_unread.zero_()
        outputs, given = [], [0] * len(totals)
        for kept, accepted in zip(num_kept, num_accepted, strict=True):
            ends = [start + count for start, count in zip(given, kept, strict=True)]
            row_outputs = [
                RowOutput(
                    row,
                    new[index][given[index] : ends[index]],
                    depths_of(accepted[index])[: kept[index]],
                    has_ended[index] and ends[index] == totals[index],
                    num_drafted=num_drafted if kept[index] else 0,
                )
                for index, row in enumerate(state.rows.rows)
            ]
            if any(kept):
                outputs.append(StepOutput(row_outputs, depth, num_drafted))
            given = ends
        return outputs, is_broken


def rounded_slots(num_slots: int) -> int:
    """The least multiple of :data:`SLOTS` that is enough, of :data:`MANY_SLOTS` beyond that."""
    multiple = SLOTS if num_slots <= MANY_SLOTS else MANY_SLOTS
    return -(-num_slots // multiple) * multiple


def _newest_tokens(state: StaticState, num_steps: int, most: int) -> Tensor:
    """The tokens that the last ``num_steps`` steps added to each row, at most ``most`` each: (B, num_steps *
    most) long; entries after the newest are undefined."""
    tokens, first = state.rows.tokens, state.rows.lengths - state.num_kept[:num_steps].sum(0)
    columns = first[:, None] + torch.arange(num_steps * most, device=tokens.device)
    return tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))


def static_drafter(step: str, drafter: Drafter, request: DecodeRequest) -> StaticDrafter:
    """``drafter``, if steps of fixed shape can decode ``request`` with it.

    Raises:
        ValueError: they cannot; the message names ``step``, the obstacle, and the alternative.
    """
    if (obstacle := static_obstacle(drafter, request)) is not None:
        raise ValueError(f"step={step!r} cannot work with {obstacle}step='general'")
    return cast(StaticDrafter, drafter)


def static_obstacle(drafter: Drafter, request: DecodeRequest) -> str | None:
    """The reason why steps of fixed shape cannot decode ``request`` with ``drafter``, and what to use, up to
    a step; None if they can."""
    problem, instead = "", ""
    reading = [type(each).__name__ for each in request.processors if type(each) not in PATH_FREE_PROCESSORS]
    if host_bound := not_capturable(drafter):
        problem = f"{type(host_bound[0]).__name__}, which reads its drafts on the host"
        instead = "drafter='heads', 'dynamic-heads', 'suffix', unions of these or 'plain', or "
    elif request.acceptance == "typical" or request.rule is not None:
        problem, instead = f"acceptance={request.acceptance!r}", "acceptance='exact', or "
    elif reading:
        problem = f"logits processors that read the tokens before each node on the host: {', '.join(reading)}"
    elif request.references:
        problem = "prediction or corpus, which are read on the host"
    elif request.criteria:
        problem = "stopping criteria (stop_strings are one), which are asked on the host after every token"
    return f"{problem}; use {instead}" if problem or not isinstance(drafter, StaticDrafter) else None
