"""The decode loop: continuous batching of the rows of one base model.

A request waits, is prefilled in chunks that alternate with the decode steps of the others, joins them, and
leaves when it ends or is cancelled. ``generate`` and ``stream`` are a batch with one request of B rows, which
no other joins (:meth:`Batch.start`, :func:`decode`). Each row has its own length, settings, seed and
processors, and gets the same tokens as in a batch of its own: a row's noise depends only on its seed and its
positions, and no row attends to another.

Memory is bounded by ``max_slots``. When the rows outgrow it, the one that joined last is preempted: it goes
back into the queue, and its text so far is prefilled again later. This does not change its tokens either.

Who is prefilled, decodes or steps back is decided in :mod:`medusa.decoding.scheduler`, by lengths alone. Here
the decisions are carried out with tensors.

One thread at a time may use a batch.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from medusa.base.attention import pinned_attention
from medusa.base.cache import GROWTH_STEP, TreeCache
from medusa.base.causal_lm import CausalLM, lm_head_device
from medusa.base.passes import cache_bytes
from medusa.decoding.accept import RowsFailed
from medusa.decoding.adaptive import AdaptiveDrafting
from medusa.decoding.executor import Plan
from medusa.decoding.prefix_cache import PrefixCache
from medusa.decoding.scheduler import Chunk, Phase, Prefill, Scheduler, SchedulerLimits
from medusa.decoding.state import DecodeRequest, DecodeState, Row
from medusa.decoding.statistics import DecodingStatistics, PhaseClock
from medusa.decoding.step import (
    RowOutput,
    StepBurst,
    StepOutput,
    nan_logits,
    prefill_request,
    sampled_kind,
)
from medusa.drafters.protocol import Drafter
from medusa.drafters.references import References
from medusa.hardware import available_memory, release_threads, sent
from medusa.options import StepKind, check_at_least

PREFIX_TOKENS = 32768
"""Tokens that the prefix cache holds at most, unless its size is given."""
UNKNOWN_MEMORY = 4 * 2**30
"""Bytes of free memory that are assumed where the system does not report them."""


@dataclass(frozen=True)
class BatchLimits(SchedulerLimits):
    """The limits of a batch. :meth:`in_memory` sets those of memory from bytes."""

    prefix_bytes: int = 256 * 2**20
    """Size of the prefix cache: keys and values of ended texts, for requests with the same beginning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "prefix_bytes")

    def in_memory(
        self, base: CausalLM, budget: int | None = None, prefix_bytes: int | None = None
    ) -> BatchLimits:
        """These limits with ``max_slots`` and ``prefix_bytes`` set from memory sizes: ``budget`` is for the
        rows under way, by default half of the free memory on the device of ``base``; ``prefix_bytes`` is by
        default an eighth of it, or what :data:`PREFIX_TOKENS` take."""
        free = available_memory(lm_head_device(base)) or UNKNOWN_MEMORY
        per_token, per_row = cache_bytes(base)
        of_tokens = (free // 2 if budget is None else budget) - self.max_rows * per_row
        slots = max(GROWTH_STEP, of_tokens // max(1, per_token))
        wanted = PREFIX_TOKENS * per_token + self.max_rows * per_row
        kept = min(free // 8, wanted) if prefix_bytes is None else prefix_bytes
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


@dataclass(eq=False)
class _Prefill(Prefill[Row]):
    """The rows of one request during prefill."""

    request: DecodeRequest
    """The request, with the answer so far appended to the prompt."""
    prefix: TreeCache
    """The cache of these rows: the part of their prompts that is prefilled."""

    @classmethod
    def after(cls, prefix: TreeCache, rows: list[Row], request: DecodeRequest) -> _Prefill:
        """The prefill of what ``prefix`` lacks of ``request``."""
        longest = max(map(len, request.prompts))
        return cls(rows, longest, prefix.longest, prefix.capacity, request, prefix)


class Batch:
    """A continuous batch of rows on one base model.

    Call :meth:`add` at any time, and :meth:`step` for as long as :attr:`is_busy`.

    Args:
        plan: how it decodes.
        limits: by default those of one request.
        statistics: counts what is done, from the plan's set-up on.
    """

    def __init__(
        self,
        plan: Plan,
        limits: BatchLimits = SINGLE_REQUEST,
        statistics: DecodingStatistics | None = None,
    ):
        self.limits = limits
        self.statistics = DecodingStatistics() if statistics is None else statistics
        self.statistics.setup_seconds += plan.setup_seconds
        self.num_drafted = 0
        """Draft tokens that were verified."""
        self.prefixes = PrefixCache(limits.prefix_bytes)
        self.staleness_check = plan.staleness_check
        self._runner = plan.runner
        self._stepper = plan.stepper
        self._make_drafter = plan.make_drafter
        self._clock = PhaseClock(self.statistics)
        self._state: DecodeState | None = None  # the rows that decode; None without any
        self._drafters: dict[tuple[int, bool, StepKind], tuple[Drafter, AdaptiveDrafting | None]] = {}
        self._last_drafter: Drafter | None = None  # of the last step; what it keeps covers all but new rows
        self._has_joined = False  # whether rows have joined since the last step
        self._scheduler: Scheduler[Row, _Prefill] = Scheduler(
            limits, GROWTH_STEP, plan.max_nodes, plan.runner.profile.context
        )

    @property
    def waiting(self) -> deque[Row]:
        """The queue, first come first."""
        return self._scheduler.waiting

    @property
    def num_rows(self) -> int:
        """Rows that decode."""
        state = self._state  # read once: other threads ask too
        return 0 if state is None else len(state.rows)

    @property
    def num_prefilling(self) -> int:
        """Rows in prefill."""
        return self._scheduler.num_prefilling

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to do in a step."""
        return self._scheduler.is_busy

    @property
    def num_slots(self) -> int:
        """Cache slots that are allocated for rows in prefill and rows that decode; at most ``max_slots``."""
        in_prefill = sum(prefill.prefix.capacity for prefill in self._scheduler.prefills)
        state = self._state
        return in_prefill + (0 if state is None else len(state.rows) * state.cache.capacity)

    def add(self, row: Row) -> None:
        """Put ``row`` into the queue.

        Raises:
            medusa.decoding.scheduler.QueueFull: too many wait already.
            ValueError: it cannot share forward passes with others, or can never fit; or base or heads have
                changed since the batch was made.
        """
        self.staleness_check(True)
        self.check(row.request)
        self._scheduler.add(row)

    def start(self, request: DecodeRequest) -> list[Row]:
        """Start the rows of ``request`` together, in an empty batch that no other request will join."""
        owner = self._runner.keeps_features or None  # else a prefix may lack what its drafter reads
        rows = [Row(request, index=index, owner=owner) for index in range(len(request.lengths))]
        if len(rows) == 1 and self.prefixes.max_bytes:
            prefix, rows[0].num_reused = self._known_prefix(rows[0].prompt, owner)
        else:
            prefix = self._runner.new_cache(len(rows))
        self._scheduler.start(_Prefill.after(prefix, rows, request))
        return rows

    @property
    def free_capacity(self) -> int:
        """How many more requests can be added now: free rows plus free places in the queue."""
        return self._scheduler.free_capacity

    def check(self, request: DecodeRequest) -> None:
        """Raise ValueError unless a batch like this can ever answer ``request``."""
        if len(request.lengths) != 1:
            raise ValueError(f"a row of a batch is one request, got one of {len(request.lengths)} rows")
        if request.in_lockstep or not request.is_exact:
            raise ValueError(
                "requests share passes only with acceptance='exact' and the logits processors and stopping "
                "criteria of generate itself; call generate for this one"
            )
        self._scheduler.check(len(request.prompts[0]), request.max_new_tokens)

    @property
    def max_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together at most."""
        return self._scheduler.max_tokens

    def cancel(self, row: Row) -> None:
        """Drop ``row`` wherever it is; nothing happens if it has ended. What was read of its prompt is kept
        for the next request that begins in the same way, such as the next try."""
        prefill = self._scheduler.cancel(row)
        if prefill is not None:
            beginning = prefill.request.prompts[0][: prefill.prefix.longest]
            self.prefixes.keep_row(beginning, prefill.prefix, 0, row.owner)
        row.finish_reason = row.finish_reason or "cancelled"
        self._drop_ended()

    def go_on_from(self, before: Batch) -> None:
        """Keep the prefixes of ``before``, an idle batch on the same base with other heads."""
        if before._runner.keeps_features == self._runner.keeps_features:
            self.prefixes = before.prefixes

    def clear(self) -> None:
        """Drop all rows, and read nothing of their state: for use after any failure."""
        self._scheduler.clear()
        self._state = self._last_drafter = None
        self._stepper.close()

    def step(self) -> list[RowOutput]:
        """Prefill up to ``chunk`` tokens, or run one decode step of all rows; where both are due, they
        alternate. Returns the output of each row.

        Raises:
            ValueError: the weights have changed since the batch was made; the rows are unchanged.
        """
        self.staleness_check(False)
        return [row_output for row_outputs in self.step_outputs() for row_output in row_outputs]

    @torch.inference_mode(False)  # a generator may be resumed outside of the inference_mode it began in
    @torch.no_grad()
    def step_outputs(self) -> list[list[RowOutput]]:
        """As :meth:`step`, with one list for each forward pass, since static steps run several per call. The
        caller calls ``staleness_check``."""
        with pinned_attention(self._runner.profile.device):
            phase = self._scheduler.begin_call()
            if phase is Phase.PREFILL:
                return [self._prefill_chunks()]
            return self._decode() if phase is Phase.DECODE else []

    def _prefill_chunks(self) -> list[RowOutput]:
        """Prefill the chunks of this call."""
        outputs: list[RowOutput] = []
        self._clock.start()
        while (chunk := self._next_chunk()) is not None:
            prefill = chunk.prefill
            try:
                if chunk.is_last:
                    outputs += self._finish_prefill(prefill)
                else:
                    self._read_chunk(chunk)
            except Exception as error:  # a request that breaks the pass fails alone
                self._scheduler.drop_prefill(prefill)
                outputs += [self._failed(row, _cause(error)) for row in prefill.rows]
        self._clock.lap("prefill")
        return outputs

    def _next_chunk(self) -> Chunk[_Prefill] | None:
        """The tokens to read next; before that, one more prefill starts if one may."""
        row = self._scheduler.next_to_start()
        if row is not None:
            self._scheduler.start(self._prefill_of(row))
        return self._scheduler.next_chunk()

    def _prefill_of(self, row: Row) -> _Prefill:
        """The prefill of ``row``, from its longest cached prefix on."""
        ids = row.prompt + row.tokens
        tokens = sent([ids], row.request.tokens.device)
        lengths = row.request.lengths + len(row.tokens)
        request = replace(row.request, tokens=tokens, lengths=lengths, known_prompts=(ids,))
        prefix, num_reused = self._known_prefix(ids, row.owner)
        if not row.num_read and not row.tokens:  # else it was preempted, and finds what it has read itself
            row.num_reused = num_reused
        row.num_read = num_reused
        return _Prefill.after(prefix, [row], request)

    def _known_prefix(self, ids: list[int], owner: Hashable) -> tuple[TreeCache, int]:
        """A copy of the longest cached prefix of ``ids`` that this owner has, from a running row or the
        prefix cache, and its length. The last token is always left out: its pass gives the logits of the
        first new token."""
        known = self.prefixes.longest(ids[:-1], owner)
        index = 0  # of the row, where a running one shares more
        for number, row in enumerate([] if self._state is None else self._state.rows):
            if row.owner != owner or self._state is None:
                continue
            committed = (row.prompt + row.tokens)[:-1]
            of_row = self.prefixes.shared(self._state.cache, committed, ids[:-1], owner)
            if of_row.length > known.length:
                known = of_row
                index = number
        stored = self.prefixes.stored(ids[:-1], owner, known.length, partial(self._runner.new_cache, 1))
        if stored is not None:
            cache = stored
        elif known.source is not None:
            cache = known.source.copy_of_row(index, known.length, known.states)
        else:
            cache = self._runner.new_cache(1)
        return cache, cache.longest

    def _read_chunk(self, chunk: Chunk[_Prefill]) -> None:
        """Prefill a chunk that is not the last one."""
        prefill = chunk.prefill
        num_tokens = chunk.num_tokens
        prefix = prefill.prefix
        known = [length + num_tokens for length in prefix.known_lengths]
        began = time.perf_counter()
        self._runner.prefill(prefill.request.tokens, prefix.lengths + num_tokens, prefix, known=known)
        self._scheduler.chunk_read(chunk, prefix.capacity, time.perf_counter() - began)
        if self.prefixes.max_bytes:
            self._keep_states(prefill)
        for row in prefill.rows:
            row.num_read = prefix.longest

    def _keep_states(self, prefill: _Prefill, is_end: bool = False) -> None:
        """Keep the states after what is read of a prompt, for others that begin with it."""
        if len(prefill.rows) == 1:
            prompt = prefill.request.prompts[0][: prefill.prefix.longest]
            self.prefixes.keep_states(prompt, prefill.prefix, prefill.rows[0].owner, is_end)

    def _finish_prefill(self, prefill: _Prefill) -> list[RowOutput]:
        """Run the last chunk, choose each row's next token, and have the rows join the others unless this
        token ends them."""
        rows = prefill.rows
        request = prefill.request
        rule = request.rule  # `sampled_kind` raises, before the pass, if the drafter cannot draw for it
        drafter = None if rule is None else self._drafter_for(rows, request.references)[0]
        sampled = None if drafter is None else sampled_kind(drafter, request, self._runner)
        state, output = prefill_request(
            self._runner,
            request,
            prefill.prefix,
            rows,
            refuses_nan=self.limits is not SINGLE_REQUEST,  # a row with NaN logits fails alone
        )
        state.sampled = sampled
        if self.prefixes.max_bytes:
            self._keep_states(prefill, is_end=True)
        self.statistics.num_rows += sum(not row.tokens for row in rows)
        self._scheduler.join(rows)
        self._has_joined = True
        try:
            if self._state is None:
                self._state = state
            else:
                # A long row that has left may have left its slots, which every row that joins would get too.
                self._free_surplus(len(rows))
                longest = max(self._state.cache.longest, state.cache.longest)
                self._state.join(state, self._scheduler.most_rows(longest))
        except Exception as error:  # the new rows may be in the caches of some layers and not of others
            return self._all_failed(error, rows)
        row_outputs = self._emit(output)
        self._drop_ended()
        return row_outputs

    def _decode(self) -> list[list[RowOutput]]:
        self._make_room()
        state = self._state
        assert state is not None
        drafter, adaptive = self._drafter_for(state.rows, state.references)
        has_changed = self._has_joined or drafter is not self._last_drafter
        if has_changed:
            drafter.reset(len(state.rows), self._last_drafter)
            self._last_drafter = drafter
            self._has_joined = False
        self._clock.start()
        selected = drafter if adaptive is None else adaptive.select_drafter(drafter)
        try:
            burst = self._stepper.advance(state, selected, self._clock, adaptive, self._scheduler)
        except RowsFailed as failed:
            return [self._drop_failed(state, failed.rows, _cause(failed))]
        except Exception as error:
            return [self._all_failed(error)]
        # Steps that also set something up say nothing about the time of a step.
        seconds = None if has_changed or burst.setup_seconds else self._clock.step_seconds
        self._record(burst, selected is drafter, adaptive, seconds)
        emitted = [self._emit(output) for output in burst.outputs]
        if burst.failed:
            emitted.append(self._drop_failed(state, burst.failed, nan_logits()))
        self._drop_ended()
        return emitted

    def _drop_failed(self, state: DecodeState, rows: list[Row], error: Exception) -> list[RowOutput]:
        """End ``rows`` with ``error``, which their own numbers have made."""
        row_outputs = [self._failed(row, error) for row in rows]
        self._drop_ended()
        state.cache.clear_uncommitted()  # NaN in a masked slot would reach all tokens of later passes
        return row_outputs

    def _drafter_for(
        self, rows: list[Row], references: Sequence[References]
    ) -> tuple[Drafter, AdaptiveDrafting | None]:
        most_rows = 1 << (len(rows) - 1).bit_length()  # 9 to 16 rows share a drafter
        has_references = bool(references)
        step = self._stepper.kind_for(rows)
        key = most_rows, has_references, step
        if key not in self._drafters:
            self._drafters[key] = self._make_drafter(most_rows, has_references, step)
        return self._drafters[key]

    def _record(
        self,
        burst: StepBurst,
        drafts: bool,
        adaptive: AdaptiveDrafting | None,
        seconds: float | None,
    ) -> None:
        """Count steps and report them to ``adaptive``; ``drafts`` is False if ``adaptive`` had a fallback
        draft, or nobody.

        ``seconds`` is the time of all steps, those after the end of the text included, which emit no token;
        see :meth:`medusa.decoding.adaptive.AdaptiveDrafting.record`.
        """
        tokens_per_row = 0.0
        for output in burst.outputs:
            kept = [len(row_output.tokens) - 1 for row_output in output.rows if row_output.tokens]
            self.statistics.record_step(kept, output.max_depth, not drafts and output.max_depth == 0)
            self.num_drafted += output.num_drafted * len(kept)
            tokens_per_row += 1 + sum(kept) / len(kept)
        if adaptive is not None and burst.outputs:
            first = burst.outputs[0]
            adaptive.record(
                tokens_per_row,
                seconds,
                burst.num_steps,
                used_fallback=not drafts and first.max_depth > 0,
                num_nodes=first.num_nodes,
            )

    def _emit(self, output: StepOutput) -> list[RowOutput]:
        """Add the tokens of a step to the answers of its rows. Rows that ended earlier, which static steps
        keep in the batch, are left out."""
        row_outputs = [row_output for row_output in output.rows if row_output.row.finish_reason is None]
        for row_output in row_outputs:
            row = row_output.row
            row.tokens.extend(row_output.tokens)
            if row_output.has_ended:
                is_full = len(row.tokens) >= row.request.max_new_tokens
                is_end = row_output.tokens[-1] in row.request.eos_ids
                row.finish_reason = "length" if is_full and not is_end else "stop"
        return row_outputs

    def _make_room(self) -> None:
        """Take preempted rows out of the batch, and free the slots that the others do not need."""
        for row in self._scheduler.make_room():
            self._drop([row])
        self._free_surplus()

    def _free_surplus(self, num_joining: int = 0) -> None:
        """Free the slots that no token needs, where ``num_joining`` more rows make them too many."""
        assert self._state is not None
        if (self.num_rows + num_joining) * self._state.cache.capacity > self.limits.max_slots:
            self._state.cache.trim()

    def _all_failed(self, error: Exception, joining: Iterable[Row] = ()) -> list[RowOutput]:
        """End all rows that decode, and those ``joining``, with ``error``; the batch can go on without."""
        rows = dict.fromkeys([*([] if self._state is None else self._state.rows), *joining])
        self._state = self._last_drafter = None
        self._scheduler.leave(rows)
        return [self._failed(row, error) for row in rows]

    def _failed(self, row: Row, error: Exception) -> RowOutput:
        row.error = error
        row.finish_reason = "error"
        return RowOutput(row)

    def _drop_ended(self) -> None:
        rows = [] if self._state is None else self._state.rows
        ended = [row for row in rows if row.finish_reason is not None]
        if self._stepper.keeps_ended_rows and len(ended) < len(rows):
            return  # the batch cannot shrink: ended rows stay until all have ended
        self._drop(ended)

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
        self._scheduler.leave(dropped)
        num_kept = len(state.rows) - len(gone)
        # The last rows take the places of dropped ones, so that few rows are copied.
        last = [index for index in range(num_kept, len(state.rows)) if index not in gone]
        kept = [last.pop() if index in gone else index for index in range(num_kept)]
        if not kept:
            self._state = self._last_drafter = None
            return
        state.keep_rows(kept)
        if self._last_drafter is not None:
            self._last_drafter.keep_rows(sent(kept, state.lengths.device))


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
                for row_output in row_outputs:
                    row = row_output.row
                    if row.error is not None:
                        raise row.take_error()
                    result.tokens[row.index] = row_output.tokens
                    result.depths[row.index] = row_output.depths
                yield result
    except GeneratorExit:  # stopped from outside: what was read serves the next call
        for row in rows:
            batch.cancel(row)
        raise
    finally:
        batch.clear()
        release_threads()  # the next call may come from another thread
