"""The decode loop: continuous batching of the rows of one base model.

A request waits, is prefilled in chunks that alternate with the decode steps of the others, joins them, and
leaves when it ends or is cancelled. ``generate`` and ``stream`` are a batch with one request of B rows, which
no other joins (:meth:`Batch.start`, :func:`decode`). Each row has its own length, settings, seed and
processors, and gets the same tokens as in a batch of its own: a row's noise depends only on its seed and its
positions, and no row attends to another.

Memory is bounded by ``max_slots``. When the rows outgrow it, the one that joined last is preempted: it goes
back into the queue, and its text so far is prefilled again later. This does not change its tokens either.

One thread at a time may use a batch.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from medusa.base.attention import pinned_attention
from medusa.base.cache import GROWTH_STEP, TreeCache
from medusa.base.causal_lm import (
    CausalLM,
    cache_bytes_per_token,
    lm_head_device,
)
from medusa.decoding.accept import RowsFailed
from medusa.decoding.adaptive import AdaptiveDrafting
from medusa.decoding.prefix_cache import PrefixCache, num_shared
from medusa.decoding.runners import Runner
from medusa.decoding.state import DecodeRequest, DecodeState, Row
from medusa.decoding.static_rows import StaticRows
from medusa.decoding.statistics import DecodingStatistics, PhaseClock
from medusa.decoding.step import (
    RowOutput,
    StepOutput,
    decode_step,
    prefill_request,
    sampled_kind,
)
from medusa.drafters.protocol import Drafter, DraftValidator
from medusa.drafters.references import References
from medusa.hardware import available_memory, release_threads, sent
from medusa.options import check_at_least

PREFIX_TOKENS = 32768
"""Tokens that the prefix cache holds at most, unless its size is given."""
UNKNOWN_MEMORY = 4 * 2**30
"""Bytes of free memory that are assumed where the system does not report them."""
MAX_OVERTAKES = 16
"""How often shorter rows may start before a waiting row that does not fit yet."""


LEAST_CHUNK = 16
"""Tokens of a prompt that are read at once at least: fewer take hardly less time."""


class QueueFull(RuntimeError):
    """The queue is full."""


@dataclass(frozen=True)
class BatchLimits:
    """The limits of a batch."""

    max_rows: int = 16
    """Requests that decode together."""
    max_slots: int = 32768
    """Cache slots of all rows together. Each row takes as many as the longest one, rounded up to a multiple
    of 256. :meth:`in_memory` converts from bytes."""
    max_waiting: int = 64
    """Requests that wait."""
    chunk: int = 256
    """Prompt tokens that are prefilled between two decode steps, over all rows."""
    by_time: bool = False
    """Whether a token of a prompt counts by the time that it takes: behind thousands of others it takes
    several times as long, and all others wait for it. At least :data:`LEAST_CHUNK` tokens are read."""
    prefix_bytes: int = 256 * 2**20
    """Size of the prefix cache: keys and values of ended texts, for requests with the same beginning."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_rows", "max_slots", "chunk")
        check_at_least(self, 0, "max_waiting", "prefix_bytes")

    def in_memory(
        self, base: CausalLM, cache_bytes: int | None = None, prefix_bytes: int | None = None
    ) -> BatchLimits:
        """These limits with ``max_slots`` and ``prefix_bytes`` set from memory sizes: by default half of the
        free memory on the device of ``base``, and an eighth of it or :data:`PREFIX_TOKENS`."""
        free = available_memory(lm_head_device(base)) or UNKNOWN_MEMORY
        per_token = max(1, cache_bytes_per_token(base))
        slots = max(GROWTH_STEP, (free // 2 if cache_bytes is None else cache_bytes) // per_token)
        kept = min(free // 8, PREFIX_TOKENS * per_token) if prefix_bytes is None else prefix_bytes
        return replace(self, max_slots=slots, prefix_bytes=kept)


SINGLE_REQUEST = BatchLimits(1, sys.maxsize, max_waiting=0, chunk=sys.maxsize, prefix_bytes=0)
"""The limits of a batch for one request: none."""


@dataclass(frozen=True)
class StepResult:
    """The new tokens of one forward pass, as ``stream`` yields them: a list for each row of the request,
    empty if the row has ended."""

    tokens: list[list[int]]
    depths: list[list[int]]
    """The depth at which each token was drafted; 0 for the base model's own."""


@dataclass
class _Prefill:
    """The rows of one request during prefill."""

    rows: list[Row]
    request: DecodeRequest
    """The request, with the answer so far appended to the prompt."""
    prefix: TreeCache
    """The cache of these rows: the part of their prompts that is prefilled."""
    seconds: float = 0.0
    """The time of a token in the last chunk."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.request.prompts))

    @property
    def num_remaining(self) -> int:
        """How many of them are not prefilled yet."""
        return self.longest - self.prefix.longest


class Batch:
    """A continuous batch of rows on one base model.

    Call :meth:`add` at any time, and :meth:`step` for as long as :attr:`is_busy`.

    Args:
        runner: runs forward passes, with the hidden states of the layers that drafters read.
        make_drafter: called with a number of rows, rounded up to a power of two, and whether rows have
            reference texts; returns (drafter, adaptive policy or None). Its results are kept.
        staleness_check: raises ValueError if base or heads have changed since the batch was made. Called with
            True for each new request, and with False before each step.
        static: runs steps of fixed shape in place of the general ones, for a single request.
        max_nodes: the largest number of nodes of a draft, root included.
    """

    def __init__(
        self,
        runner: Runner,
        make_drafter: Callable[[int, bool], tuple[Drafter, AdaptiveDrafting | None]],
        staleness_check: Callable[[bool], None] = lambda is_new_request: None,
        limits: BatchLimits = SINGLE_REQUEST,
        statistics: DecodingStatistics | None = None,
        static: StaticRows | None = None,
        max_nodes: int = 1,
    ):
        self.limits = limits
        self.statistics = DecodingStatistics() if statistics is None else statistics
        self.num_drafted = 0
        """Draft tokens that were verified."""
        self.prefixes = PrefixCache(limits.prefix_bytes)
        self.waiting: deque[Row] = deque()
        self._runner, self._static = runner, static
        self._make_drafter, self.staleness_check = make_drafter, staleness_check
        self._max_nodes = max_nodes
        self._clock, self._validator = PhaseClock(self.statistics), DraftValidator(runner.profile.vocab_size)
        self._prefills: list[_Prefill] = []  # oldest first; see `_begin_prefill` for their lengths
        self._least_seconds = float("inf")  # of a token of a prompt
        self._has_read = False  # whether the last call of `step` was prefill
        self._state: DecodeState | None = None  # the rows that decode; None without any
        self._num_joined = 0
        self._drafters: dict[tuple[int, bool], tuple[Drafter, AdaptiveDrafting | None]] = {}
        self._last_drafter: Drafter | None = None  # of the last step; what it keeps covers all but new rows
        self._has_joined = False  # whether rows have joined since the last step
        self._context, self._device = runner.profile.context, runner.profile.device

    @property
    def num_rows(self) -> int:
        """Rows that decode."""
        state = self._state  # read once: other threads ask too
        return 0 if state is None else len(state.rows)

    @property
    def num_prefilling(self) -> int:
        """Rows in prefill."""
        return sum(len(prefill.rows) for prefill in self._prefills)

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to do in a step."""
        return bool(self._state or self.waiting or self._prefills)

    @property
    def num_slots(self) -> int:
        """Cache slots that are allocated for rows in prefill and rows that decode; at most ``max_slots``."""
        in_prefill = sum(prefill.prefix.capacity for prefill in self._prefills)
        state = self._state
        return in_prefill + (0 if state is None else len(state.rows) * state.cache.capacity)

    def add(self, row: Row) -> None:
        """Put ``row`` into the queue.

        Raises:
            QueueFull: too many wait already.
            ValueError: it cannot share forward passes with others, or can never fit; or base or heads have
                changed since the batch was made.
        """
        self.staleness_check(True)
        self.check(row.request)
        if self.free_capacity < 1:
            raise QueueFull(f"{len(self.waiting)} requests wait already")
        self.waiting.append(row)

    def start(self, request: DecodeRequest) -> list[Row]:
        """Start the rows of ``request`` together, in an empty batch that no other request will join."""
        rows = [Row(request, index=index) for index in range(len(request.lengths))]
        self._prefills = [_Prefill(rows, request, self._runner.new_cache(len(rows)))]
        return rows

    @property
    def free_capacity(self) -> int:
        """How many more requests can be added now: free rows plus free places in the queue."""
        free_rows = max(0, self.limits.max_rows - self.num_rows - len(self._prefills))
        return self.limits.max_waiting + free_rows - len(self.waiting)

    def check(self, request: DecodeRequest) -> None:
        """Raise ValueError unless a batch like this can ever answer ``request``."""
        if len(request.lengths) != 1:
            raise ValueError(f"a row of a batch is one request, got one of {len(request.lengths)} rows")
        if request.in_lockstep or not request.is_exact:
            raise ValueError(
                "requests share passes only with acceptance='exact' and the logits processors and stopping "
                "criteria of generate itself; call generate for this one"
            )
        length, new = len(request.prompts[0]), request.max_new_tokens
        given = f"prompt of {length} tokens + max_new_tokens={new}"
        if self._context is not None and length + new > self._context:
            raise ValueError(f"{given} must fit the {self._context} positions that rows of a batch may have")
        if (taken := self._slots(1, length + new)) > self.limits.max_slots:
            raise ValueError(f"{given} must fit max_slots={self.limits.max_slots}, and may take {taken}")

    @property
    def max_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together at most."""
        most = self.limits.max_slots // GROWTH_STEP * GROWTH_STEP - self._max_nodes
        return most if self._context is None else min(most, self._context)

    def cancel(self, row: Row) -> None:
        """Drop ``row`` wherever it is; nothing happens if it has ended."""
        if row in self.waiting:
            self.waiting.remove(row)
        self._prefills = [prefill for prefill in self._prefills if row not in prefill.rows]
        row.finish_reason = row.finish_reason or "cancelled"
        self._drop_ended()

    def clear(self) -> None:
        """Drop all rows, and read nothing of their state: for use after any failure."""
        self.waiting.clear()
        self._state, self._last_drafter, self._prefills = None, None, []
        if self._static is not None:
            self._static.close()

    def step(self) -> list[RowOutput]:
        """Prefill up to ``chunk`` tokens, or run one decode step of all rows; where both are due, they
        alternate. Returns the output of each row.

        Raises:
            ValueError: the weights have changed since the batch was made; the rows are unchanged.
        """
        self.staleness_check(False)
        return [output for each in self.step_outputs() for output in each]

    @torch.inference_mode(False)  # a generator may be resumed outside of the inference_mode it began in
    @torch.no_grad()
    def step_outputs(self) -> list[list[RowOutput]]:
        """As :meth:`step`, with one list for each forward pass, since static steps run several per call. The
        caller calls ``staleness_check``."""
        with pinned_attention(self._device):
            self._has_read = bool(self.waiting or self._prefills) and not (self._state and self._has_read)
            if self._has_read:
                return [self._prefill_chunk()]
            return self._decode() if self._state else []

    def _prefill_chunk(self) -> list[RowOutput]:
        """Prefill up to ``chunk`` tokens: half of the budget, by time a quarter, is reserved for the oldest
        prompt, the rest goes to shorter prompts first."""
        outputs: list[RowOutput] = []
        self._clock.start()
        budget = self.limits.chunk
        reserved = budget // 4 if self.limits.by_time else budget - budget // 2
        while budget > 0 and self._begin_prefill():
            overtakes = len(self._prefills) > 1 and budget > reserved
            prefill = self._prefills[-1 if overtakes else 0]
            share, cost = budget - reserved if overtakes else budget, self._cost(prefill)
            max_tokens = share if cost == 1 else max(min(share, LEAST_CHUNK), int(share / cost))
            try:
                if prefill.num_remaining > max_tokens:
                    self._read_chunk(prefill, max_tokens)
                    budget -= math.ceil(max_tokens * cost)
                elif self._state and not self._fits(prefill.longest, len(self._prefills)):
                    self._postpone(prefill)  # the others have grown meanwhile
                    break
                else:
                    budget -= math.ceil(prefill.num_remaining * cost)
                    self._prefills.remove(prefill)
                    outputs += self._finish_prefill(prefill)
            except Exception as error:  # a request that breaks the pass fails alone
                self._prefills = [each for each in self._prefills if each is not prefill]
                outputs += [self._failed(row, _cause(error)) for row in prefill.rows]
        self._clock.lap("prefill")
        return outputs

    def _cost(self, prefill: _Prefill) -> float:
        """How many of the cheapest tokens of a prompt one of ``prefill`` takes the time of; 1 where nobody
        waits for it, or the budget counts tokens."""
        is_alone = self._state is None and len(self._prefills) == 1
        if is_alone or not self.limits.by_time or not prefill.seconds:
            return 1.0
        return max(1.0, prefill.seconds / self._least_seconds)

    def _begin_prefill(self) -> bool:
        """Start one more prefill if a waiting request may; whether any prefill is running then.

        A request may overtake a running prefill if it is at most half as long as what that one still lacks.
        It may overtake a waiting request that does not fit yet, MAX_OVERTAKES times.
        """
        max_length = self._prefills[-1].num_remaining / 2 if self._prefills else float("inf")
        overtaken = []
        for row in self.waiting:
            length = len(row.prompt) + len(row.tokens)
            if not self._has_room_for(length):
                if row.num_overtaken >= MAX_OVERTAKES:
                    break
                overtaken.append(row)
            elif length <= max_length:
                for each in overtaken:
                    each.num_overtaken += 1
                self.waiting.remove(row)
                self._prefills.append(self._prefill_of(row))
                break
        return bool(self._prefills)

    def _prefill_of(self, row: Row) -> _Prefill:
        """The prefill of ``row``, from its longest cached prefix on."""
        ids = row.prompt + row.tokens
        tokens = sent([ids], row.request.tokens.device)
        lengths = row.request.lengths + len(row.tokens)
        request = replace(row.request, tokens=tokens, lengths=lengths, known_prompts=(ids,))
        prefix, row.num_reused = self._known_prefix(ids, row.owner)
        row.num_read = row.num_reused
        return _Prefill([row], request, prefix)

    def _has_room_for(self, length: int) -> bool:
        """Whether one more row of ``length`` tokens fits, with room for each row to grow by GROWTH_STEP."""
        num_others = self.num_rows + len(self._prefills)
        if not num_others:
            return True
        return num_others < self.limits.max_rows and self._fits(length, len(self._prefills) + 1, GROWTH_STEP)

    def _fits(self, length: int, num_joining: int, growth: int = 0) -> bool:
        """Whether ``num_joining`` more rows, of at most ``length`` tokens, fit even if every row grows by
        ``growth`` tokens."""
        in_prefill = [prefill.longest for prefill in self._prefills]
        longest = max(length, 0 if self._state is None else self._state.cache.longest, *in_prefill, 0)
        return self._slots(self.num_rows + num_joining, longest + growth) <= self.limits.max_slots

    def _postpone(self, prefill: _Prefill) -> None:
        """Drop ``prefill``; its rows are the next in the queue."""
        self._prefills.remove(prefill)
        self.waiting.extendleft(prefill.rows)

    def _slots(self, num_rows: int, longest: int) -> int:
        """Cache slots of ``num_rows`` rows with ``longest`` tokens and a tree."""
        return num_rows * -(-(longest + self._max_nodes) // GROWTH_STEP) * GROWTH_STEP

    def _known_prefix(self, ids: list[int], owner: Hashable) -> tuple[TreeCache, int]:
        """A copy of the longest cached prefix of ``ids`` that this owner has, from a running row or the
        prefix cache, and its length. The last token is always left out: its pass gives the logits of the
        first new token."""
        prefix, length = self.prefixes.longest(ids[:-1], owner)
        state, source = self._state, -1
        for index, row in enumerate(() if state is None else state.rows):
            if row.owner != owner:
                continue
            committed = (row.prompt + row.tokens)[:-1]
            shared = num_shared(committed, ids[:-1])
            if shared > length:
                length, source = shared, index
        if source >= 0 and state is not None:
            cache = state.cache.copy_of_row(source, length)
        elif prefix is not None:
            cache = prefix.copy_of_row(0, length)
        else:
            cache = self._runner.new_cache(1)
        return cache, cache.longest  # 0 rather than `length` where a recurrent state is past the prefix

    def _read_chunk(self, prefill: _Prefill, num_tokens: int) -> None:
        """Prefill the next ``num_tokens`` tokens."""
        prefix = prefill.prefix
        known = [length + num_tokens for length in prefix.known_lengths]
        began = time.perf_counter()
        self._runner.prefill(prefill.request.tokens, prefix.lengths + num_tokens, prefix, known=known)
        if num_tokens >= LEAST_CHUNK:
            prefill.seconds = (time.perf_counter() - began) / num_tokens
            self._least_seconds = min(prefill.seconds, 1.02 * self._least_seconds)  # forgets an odd one
        for row in prefill.rows:
            row.num_read = prefix.longest

    def _finish_prefill(self, prefill: _Prefill) -> list[RowOutput]:
        """Run the last chunk, choose each row's next token, and have the rows join the others unless this
        token ends them."""
        rows, request = prefill.rows, prefill.request
        rule = request.rule  # `sampled_kind` raises, before the pass, if the drafter cannot draw for it
        drafter = None if rule is None else self._drafter_for(len(rows), request.references)[0]
        sampled = None if drafter is None else sampled_kind(drafter, request, self._runner)
        state, output = prefill_request(
            self._runner,
            request,
            prefill.prefix,
            rows,
            refuses_nan=self.limits is not SINGLE_REQUEST,  # a row with NaN logits fails alone
        )
        state.sampled = sampled
        self.statistics.num_rows += sum(not row.tokens for row in rows)
        for row in rows:
            row.order, self._num_joined = self._num_joined, self._num_joined + 1
        self._has_joined = True
        try:
            if self._state is None:
                self._state = state
            else:
                longest = max(self._state.cache.longest, state.cache.longest)
                room = self.limits.max_slots // self._slots(1, longest)
                self._state.join(state, min(self.limits.max_rows, room))
        except Exception as error:  # the new rows may be in the caches of some layers and not of others
            return self._all_failed(error, rows)
        row_outputs = self._emit(output)
        self._drop_ended()
        return row_outputs

    def _decode(self) -> list[list[RowOutput]]:
        self._make_room()
        state = self._state
        assert state is not None
        drafter, adaptive = self._drafter_for(len(state.rows), state.references)
        has_changed = self._has_joined or drafter is not self._last_drafter
        if has_changed:
            drafter.reset(len(state.rows), self._last_drafter)
            self._last_drafter, self._has_joined = drafter, False
        self._clock.start()
        selected = drafter if adaptive is None else adaptive.select_drafter(drafter)
        num_run, setup_seconds = 1, 0.0
        try:
            if self._static is None:
                outputs = [decode_step(self._runner, selected, state, self._clock, self._validator, adaptive)]
            else:
                outputs, num_run, setup_seconds = self._static.advance(state, selected is drafter)
                self._clock.lap_whole(setup_seconds)
        except RowsFailed as failed:
            row_outputs = [self._failed(row, _cause(failed)) for row in failed.rows]
            self._drop_ended()
            state.cache.clear_uncommitted()  # NaN in a masked slot would reach all tokens of later passes
            return [row_outputs]
        except Exception as error:
            return [self._all_failed(error)]
        # Steps that also set something up say nothing about the time of a step.
        seconds = None if has_changed or setup_seconds else self._clock.step_seconds
        self._record(outputs, selected is drafter, adaptive, num_run, seconds)
        emitted = [self._emit(output) for output in outputs]
        self._drop_ended()
        return emitted

    def _drafter_for(
        self, num_rows: int, references: Sequence[References]
    ) -> tuple[Drafter, AdaptiveDrafting | None]:
        key = 1 << (num_rows - 1).bit_length(), bool(references)  # 9 to 16 rows share a drafter
        if key not in self._drafters:
            self._drafters[key] = self._make_drafter(*key)
        return self._drafters[key]

    def _record(
        self,
        outputs: list[StepOutput],
        drafts: bool,
        adaptive: AdaptiveDrafting | None,
        num_run: int,
        seconds: float | None,
    ) -> None:
        """Count steps and report them to ``adaptive``; ``drafts`` is False if ``adaptive`` had a fallback
        draft, or nobody.

        ``seconds`` is the time of ``num_run`` steps, steps after the end of the text included, which emit no
        token; see :meth:`medusa.decoding.adaptive.AdaptiveDrafting.record`.
        """
        tokens_per_row, first = 0.0, outputs[0]
        for output in outputs:
            kept = [len(each.tokens) - 1 for each in output.rows if each.tokens]
            self.statistics.record_step(kept, output.max_depth, not drafts and output.max_depth == 0)
            self.num_drafted += output.num_drafted * len(kept)
            tokens_per_row += 1 + sum(kept) / len(kept)
        if adaptive is not None:
            used_fallback = not drafts and first.max_depth > 0
            num_nodes = 1 + first.num_drafted + first.num_replayed
            times = tokens_per_row, seconds, num_run
            adaptive.record(*times, used_fallback=used_fallback, num_nodes=num_nodes)

    def _emit(self, output: StepOutput) -> list[RowOutput]:
        """Add the tokens of a step to the answers of its rows. Rows that ended earlier, which static steps
        keep in the batch, are left out."""
        row_outputs = [each for each in output.rows if each.row.finish_reason is None]
        for each in row_outputs:
            row = each.row
            row.tokens.extend(each.tokens)
            if each.has_ended:
                is_full = len(row.tokens) >= row.request.max_new_tokens
                is_end = each.tokens[-1] in row.request.eos_ids
                row.finish_reason = "length" if is_full and not is_end else "stop"
        return row_outputs

    def _make_room(self) -> None:
        """While the rows need more than ``max_slots``: postpone the youngest prefill, else preempt the
        youngest row."""
        assert self._state is not None
        while True:
            taken = self._slots(self.num_rows, self._state.cache.longest)
            taken += sum(prefill.prefix.capacity for prefill in self._prefills)
            if taken <= self.limits.max_slots:
                break
            if self._prefills:
                self._postpone(self._prefills[-1])
                continue
            youngest = max(self._state.rows, key=lambda row: row.order)
            self._drop([youngest])
            self.waiting.appendleft(youngest)
        if self.num_rows * self._state.cache.capacity > self.limits.max_slots:
            self._state.cache.trim()

    def _all_failed(self, error: Exception, joining: Iterable[Row] = ()) -> list[RowOutput]:
        """End all rows that decode, and those ``joining``, with ``error``; the batch can go on without."""
        rows = dict.fromkeys([*([] if self._state is None else self._state.rows), *joining])
        self._state = self._last_drafter = None
        return [self._failed(row, error) for row in rows]

    def _failed(self, row: Row, error: Exception) -> RowOutput:
        row.error, row.finish_reason = error, "error"
        return RowOutput(row)

    def _drop_ended(self) -> None:
        rows = [] if self._state is None else self._state.rows
        ended = [row for row in rows if row.finish_reason is not None]
        # Static steps cannot shrink the batch: ended rows stay until all have ended.
        keeps_all = self._static is not None and self._static.has_begun and len(ended) < len(rows)
        self._drop([] if keeps_all else ended)

    def _drop(self, dropped: list[Row]) -> None:
        """Remove rows from the batch; their keys and values go into the prefix cache."""
        state = self._state
        if not dropped or state is None:
            return
        gone = set()
        for row in dropped:
            index = state.rows.index(row)
            gone.add(index)
            if row.error is None:
                ids = (row.prompt + row.tokens)[:-1]
                self.prefixes.keep_row(ids, state.cache, index, row.owner)
        num_kept = len(state.rows) - len(gone)
        # The last rows take the places of dropped ones, so that few rows are copied.
        last = [index for index in range(num_kept, len(state.rows)) if index not in gone]
        kept = [last.pop() if index in gone else index for index in range(num_kept)]
        if not kept:
            self._state = self._last_drafter = None
            return
        state.keep_rows(kept)
        if self._last_drafter is not None:
            self._last_drafter.keep_rows(torch.tensor(kept, device=state.lengths.device))


def _cause(error: Exception) -> Exception:
    """The exception that made a row fail."""
    is_wrapped = isinstance(error, RowsFailed) and isinstance(error.__cause__, Exception)
    return error.__cause__ if is_wrapped else error  # type: ignore[return-value]


def decode(
    batch: Batch, request: DecodeRequest, is_streamed: bool = True
) -> Generator[StepResult, None, None]:
    """Decode ``request`` in ``batch``, which must be empty; yields one :class:`StepResult` per forward pass.

    Before results are yielded, the weights are checked for changes; unless ``is_streamed``, only before the
    last ones.
    """
    rows = batch.start(request)
    try:
        while batch.is_busy:
            outputs = batch.step_outputs()
            if is_streamed or not batch.is_busy:
                batch.staleness_check(False)
            for row_outputs in outputs:
                result = StepResult([[] for _ in rows], [[] for _ in rows])
                for each in row_outputs:
                    if each.row.error is not None:
                        raise each.row.take_error()
                    result.tokens[each.row.index], result.depths[each.row.index] = each.tokens, each.depths
                yield result
    finally:
        batch.clear()
        release_threads()  # the next call may come from another thread
