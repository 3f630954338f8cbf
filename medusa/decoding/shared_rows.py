"""The rows of a batch that requests join and leave, in bursts of static steps.

Between bursts the rows are those of any batch: they join, end, are cancelled or preempted, and their keys and
values are copied into the prefix cache. For this the cache of the rows lives in memory that keeps its place
(:class:`medusa.base.cache.CacheMemory`). What else a step reads is copied to tensors of fixed place whenever
rows have come or gone. A burst reads the first 1, 2, 4, 8, ... rows of both; one that is not there counts as
ended. So there is one graph for each of these numbers, however rows come and go, and the settings of a
request are numbers in tensors (:mod:`medusa.acceptance.row_settings`).

A request that static steps cannot decode has the whole batch run general steps while it is there, over the
same memory. The tokens are the same.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import Tensor

from medusa.acceptance.row_settings import row_numbers
from medusa.base.cache import CacheMemory
from medusa.decoding.adaptive import AdaptiveDrafting
from medusa.decoding.cuda_graphs import StepGraphs, warn_not_captured
from medusa.decoding.state import DecodeRequest, DecodeState, Row
from medusa.decoding.static import StaticState, static_steps
from medusa.decoding.static_rows import MANY_SLOTS, SLOTS, read_results, rounded_slots, sync_interval
from medusa.decoding.statistics import PhaseClock
from medusa.decoding.step import BurstRoom, GeneralStepper, RowOutput, StepBurst, StepOutput
from medusa.drafters.protocol import Drafter, PlainDrafter, StaticDrafter
from medusa.engine.snapshot import alteration_of
from medusa.options import StepKind

AWAITED_INTERVAL = 2
"""Steps after which the host reads the results at most, while a prompt waits to be read."""


SPARE_SHARE = 4
"""Divisor: memory for rows that are not there takes at most all slots divided by this."""


class SharedRows:
    """The rows of one batch, in static steps wherever all of them can be.

    Args:
        general: runs the other steps.
        step: the kind of the static ones: as they are, or captured.
        is_free: whether nobody has asked for ``step``: where its steps cannot be captured, general ones run.
        max_rows: rows that decode together at most.
    """

    keeps_ended_rows = False

    def __init__(self, general: GeneralStepper, step: StepKind, captures: bool, is_free: bool, max_rows: int):
        runner = general.runner
        self.interval = sync_interval(runner.base)
        self._general = general
        self._step = step
        self._is_free = is_free
        self._max_rows = max_rows
        self._base = runner.base
        self._layers = runner.layers
        self._plain = PlainDrafter(runner.layers)
        self._graphs = StepGraphs(runner.base, captures)
        self._uncaptured = StepGraphs(runner.base, captures=False)
        self._memory = CacheMemory()
        self._state: StaticState | None = None  # as many rows as there may ever be
        self._loaded: tuple[Tensor | None, int] = (None, 0)  # lengths of the rows in it, and rows of a burst
        self._judged: list[Row] = []  # the rows of the last verdict
        self._verdict: StepKind = general.step
        self._is_altered = False

    def kind_for(self, rows: list[Row]) -> StepKind:
        """The kind of the next steps of ``rows``."""
        if rows is not self._judged:
            self._judged = rows
            self._is_altered = self._graphs.captures and self._look_for_alteration()
            gives_up = self._is_free and (self._is_altered or not self._graphs.captures)
            is_static = not gives_up and all(can_be_static(row.request) for row in rows)
            self._verdict = self._step if is_static else self._general.step
        return self._verdict

    def _look_for_alteration(self) -> bool:
        """Whether the base has got something that a replay would leave out; who has asked for captured steps
        is told."""
        alteration = alteration_of(self._base)
        if alteration is not None and not self._is_free:
            warn_not_captured(f"the base has got {alteration}, which a replay leaves out")
        return alteration is not None

    def advance(
        self,
        state: DecodeState,
        drafter: Drafter,
        clock: PhaseClock,
        adaptive: AdaptiveDrafting | None,
        room: BurstRoom,
    ) -> StepBurst:
        """The next steps of the kind that :meth:`kind_for` has told for the rows of ``state``."""
        if self.kind_for(state.rows) == self._general.step:
            self._make_way(state, room)
            return self._general.advance(state, drafter, clock, adaptive, room)
        burst = self._burst(state, cast(StaticDrafter, drafter), room)
        clock.lap_whole(burst.setup_seconds)
        return burst

    def close(self) -> None:
        """The memory and the graphs stay for the next rows."""

    def _make_way(self, state: DecodeState, room: BurstRoom) -> None:
        """Let the memory go where general steps have taken their own and both are too much."""
        taken = len(state.rows) * state.cache.capacity
        held = self._memory.num_rows * self._memory.num_slots
        if not self._memory.holds(state.cache) and held + taken > room.slots_of_running:
            self._memory.release()

    def _burst(self, rows: DecodeState, drafter: StaticDrafter, room: BurstRoom) -> StepBurst:
        left = [row.request.max_new_tokens - len(row.tokens) for row in rows.rows]
        num_steps = min(self.interval, max(left), AWAITED_INTERVAL if room.is_awaited else self.interval)
        before_last = (num_steps - 1) * (drafter.max_depth + 1)
        lengths = rows.known_lengths
        longest = max(length + min(before_last, most) for length, most in zip(lengths, left, strict=True))
        num_rows, num_slots = self._size(len(lengths), longest - 1 + drafter.num_nodes, room.slots_of_running)
        state = self._loaded_state(rows, num_rows, num_slots, room.slots_of_running)
        seconds = self._run(state, drafter, num_steps)
        results = read_results(state, num_steps, drafter)
        outputs = results.outputs
        num_new = results.num_new
        has_failed = results.has_failed
        if results.not_finite:
            state.cache.clear_uncommitted()
            state.not_finite.fill_(False)
            seconds += self._run(state, self._plain, 1)
            again = read_results(state, 1, self._plain)
            outputs = outputs + again.outputs
            num_new = [first + second for first, second in zip(num_new, again.num_new, strict=True)]
            has_failed = again.has_failed
        self._hand_back(rows, state, num_new)
        failed = [row for row, is_lost in zip(rows.rows, has_failed, strict=True) if is_lost]
        return StepBurst([_of_rows(output) for output in outputs], num_steps, seconds, failed)

    def _size(self, num_there: int, needed: int, most: int) -> tuple[int, int]:
        """How many rows and slots a burst reads: the next power of two and :func:`rounded_slots`, so that few
        sizes are captured, as far as ``most`` slots in all allow."""
        least = -(-needed // SLOTS) * SLOTS
        num_rows = min(1 << (num_there - 1).bit_length(), self._max_rows, most // least)
        num_rows = max(num_rows, num_there)
        return num_rows, max(least, min(rounded_slots(needed), most // num_rows // SLOTS * SLOTS))

    def _loaded_state(self, rows: DecodeState, num_rows: int, num_slots: int, most: int) -> StaticState:
        """The state of a burst of ``num_rows`` rows, of which ``rows`` are there; copied only if they have
        changed since the last one."""
        if self._state is None:
            self._state = StaticState.with_room(rows, self._max_rows, self.interval)
        whole = self._state
        self._memory.hold(rows.cache, *self._memory_size(num_rows, num_slots, most), most)
        whole.reserve_tokens(self._memory.num_slots + 1)
        if self._loaded[0] is not rows.lengths or self._loaded[1] != num_rows:
            whole.load_first(rows, num_rows)
            self._loaded = rows.lengths, num_rows
        cache = self._memory.first(whole.cache.lengths[:num_rows])
        cache.reserve(num_slots)
        cache.longest = rows.cache.longest
        cache.num_positions = rows.cache.num_positions
        return whole.first(num_rows, rows.rows, cache)

    def _memory_size(self, num_rows: int, num_slots: int, most: int) -> tuple[int, int]:
        """How many rows and slots there is memory for in a burst that reads so many: more, where a part of
        ``most`` slots is enough, because all is captured again once it grows."""
        slots = max(num_slots, MANY_SLOTS)
        if self._max_rows * slots <= most // SPARE_SHARE:
            return self._max_rows, slots
        return num_rows, num_slots

    def _run(self, state: StaticState, drafter: StaticDrafter, num_steps: int) -> float:
        settings = state.rows.settings
        assert settings is not None
        graphs = self._uncaptured if self._is_altered else self._graphs
        cache = state.cache
        key = drafter.static_key, cache.num_rows, cache.num_slots, cache.num_positions, settings.program
        steps = partial(static_steps, self._base, drafter, state, self._layers)
        assert self._state is not None
        of_rows = self._state.rows.tokens, self._state.eos
        seconds = graphs.run(key, steps, num_steps, [*of_rows, *self._memory.tensors, *drafter.tensors()])
        if self._is_free and not graphs.captures:
            self._judged = []  # capturing has failed
        return seconds

    def _hand_back(self, rows: DecodeState, state: StaticState, num_new: list[int]) -> None:
        """Have ``rows`` be as the steps have left them."""
        count = len(num_new)
        known = [length + added for length, added in zip(rows.known_lengths, num_new, strict=True)]
        rows.tokens = state.rows.tokens[:count]
        rows.lengths = state.rows.lengths[:count]
        rows.hidden = state.rows.hidden[:count]
        rows.known = rows.lengths, known
        rows.cache.set_lengths(state.cache.lengths[:count], [length - 1 for length in known])
        self._loaded = rows.lengths, self._loaded[1]


def can_be_static(request: DecodeRequest) -> bool:
    """Whether a row of ``request`` can be in static steps beside others: what it asks for is in tensors, and
    nothing has to be looked at after each token."""
    has_rule = request.acceptance == "typical" or request.rule is not None
    asks_host = bool(request.references or request.criteria) or request.num_logprobs is not None
    return not (has_rule or asks_host) and row_numbers(request.processors) is not None


def _of_rows(output: StepOutput) -> StepOutput:
    """``output`` of the rows that got a token."""
    rows: list[RowOutput] = [row_output for row_output in output.rows if row_output.tokens]
    return StepOutput(rows, output.max_depth, output.num_drafted)
