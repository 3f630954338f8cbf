"""Runs the rows of a batch in bursts of static steps, as they are or captured.

The host starts the steps of a burst, and reads their results in one copy. The steps are in
:mod:`medusa.decoding.static`, their capture as CUDA graphs in :mod:`medusa.decoding.cuda_graphs`.

Between bursts the rows are those of any batch: they join, end, are cancelled or preempted, and their keys and
values are copied into the prefix cache. For this the cache of the rows lives in memory that keeps its place
(:class:`medusa.base.fixed_cache.CacheMemory`). What else a step reads is copied to tensors of fixed place
whenever rows have come or gone. A burst reads the first 1, 2, 4, 8, ... rows of both; one that is not there
counts as ended. So there is one graph for each of these numbers, however rows come and go, and the settings
of a request are numbers in tensors (:mod:`medusa.acceptance.row_settings`).

The rows of one call stay together until all have ended, and run the call's own logits processors, where these
read no text: a graph then holds for these settings alone, and has fewer operators.

A request that static steps cannot decode has the whole batch run general steps while it is there, over the
same memory. The tokens are the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from medusa.acceptance.row_settings import RowSettings, row_numbers
from medusa.acceptance.sampling import PATH_FREE_PROCESSORS
from medusa.base.causal_lm import CausalLM, lm_head_device
from medusa.base.fixed_cache import CacheMemory
from medusa.decoding.adaptive import AdaptiveDrafting
from medusa.decoding.cuda_graphs import StepGraphs, warn_not_captured
from medusa.decoding.state import DecodeRequest, DecodeState, Row
from medusa.decoding.static import STATIC_DRAFT_RULES, StaticState, static_steps
from medusa.decoding.statistics import PhaseClock
from medusa.decoding.step import BurstRoom, GeneralStepper, RowOutput, StepBurst, StepOutput, depths_of
from medusa.drafters.protocol import (
    Drafter,
    PlainDrafter,
    StaticDrafter,
    is_builtin,
    not_capturable,
    raise_violated,
)
from medusa.engine.snapshot import alteration_of
from medusa.hardware import read_columns
from medusa.options import STEPS, StepKind

HOST_SYNC_INTERVALS = {"cpu": 1}
"""Steps after which the host reads the results, by kind of device: on a CPU reading costs nothing."""
DEFAULT_HOST_SYNC_INTERVAL = 8
"""On other devices. When the last row ends, half of these steps have run in vain, on average."""
AWAITED_INTERVAL = 2
"""Steps after which the host reads the results at most, while a prompt waits to be read."""
SLOTS, MANY_SLOTS = 256, 1024
"""A cache is read in whole multiples of the first; beyond the second, in multiples of that."""
SPARE_SHARE = 4
"""Divisor: memory for rows that are not there takes at most all slots divided by this."""


class StaticStepper:
    """Runs the rows of a batch in static steps, wherever all of them can be. That of a call is kept for the
    next such call, where its steps are captured (:mod:`medusa.decoding.kept_steppers`).

    Args:
        general: runs the other steps.
        step: the kind of the static ones.
        max_rows: rows that decode together at most.
        is_free: whether nobody has asked for ``step``: where its steps cannot be captured, general ones run.
        call: the request whose rows are all that there are; None where requests join.
    """

    def __init__(
        self,
        general: GeneralStepper,
        step: StepKind,
        max_rows: int,
        is_free: bool = False,
        call: DecodeRequest | None = None,
    ):
        runner = general.runner
        self.base = runner.base
        self.interval = sync_interval(runner.base)
        """Steps of a burst at most."""
        self.uses_numbers = call is None or not is_path_free(call)
        """Whether steps read the settings of rows from tensors; else they run the processors of the call."""
        self.when_closed: Callable[[], None] = lambda: None
        """Called when no step follows."""
        self._captured_with: list[LogitsProcessorList] = []  # graphs may read tensors of theirs
        own = () if call is None or self.uses_numbers else call.processors
        self.processor_types = frozenset(map(type, own))
        """The types of the logits processors that steps run."""
        self._is_shared = call is None
        self._general = general
        self._step = step
        self._is_free = is_free
        self._max_rows = max_rows
        self._layers = runner.layers
        self._plain = PlainDrafter(runner.layers)
        self._graphs = StepGraphs(runner.base, captures=STEPS[step].is_captured)
        self._uncaptured = StepGraphs(runner.base, captures=False)
        self._drafters: dict[Hashable, StaticDrafter] = {}  # what was captured reads the tensors of the first
        self._memory = CacheMemory()
        self._state: StaticState | None = None  # as many rows as there may ever be
        self._loaded: tuple[Tensor | None, int] = (None, 0)  # lengths of the rows in it, and rows of a burst
        self._judged: list[Row] = []  # the rows of the last verdict
        self._verdict: StepKind = general.step
        self._is_altered = False

    @property
    def captures(self) -> bool:
        """Whether steps are captured; not where that has failed."""
        return self._graphs.captures

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(tensor.nbytes for tensor in self._memory.tensors)

    @property
    def keeps_ended_rows(self) -> bool:
        """Whether rows that have ended stay until all have: those of one call, once a burst has run."""
        return not self._is_shared and self._loaded[0] is not None

    def kind_for(self, rows: list[Row]) -> StepKind:
        """The kind of the next steps of ``rows``."""
        if rows is not self._judged:
            self._judged = rows
            self._is_altered = self._graphs.captures and self._look_for_alteration()
            gives_up = self._is_free and (self._is_altered or not self._graphs.captures)
            is_together = not self._is_shared or all(can_be_shared(row.request) for row in rows)
            is_static = is_together and not gives_up
            self._verdict = self._step if is_static else self._general.step
        return self._verdict

    def _look_for_alteration(self) -> bool:
        """Whether the base has got something that a replay would leave out; who has asked for captured steps
        is told."""
        alteration = alteration_of(self.base)
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
        self._loaded = None, 0
        self._judged = []
        self.when_closed()

    def _make_way(self, state: DecodeState, room: BurstRoom) -> None:
        """Let the memory go where general steps have taken their own and both are too much."""
        taken = len(state.rows) * state.cache.capacity
        held = self._memory.num_rows * self._memory.num_slots
        if not self._memory.holds(state.cache) and held + taken > room.slots_of_running:
            self._memory.release()

    def _burst(self, rows: DecodeState, drafter: StaticDrafter, room: BurstRoom) -> StepBurst:
        drafter = self._drafters.setdefault(drafter.static_key, drafter)
        left = [0 if row.finish_reason else row.request.max_new_tokens - len(row.tokens) for row in rows.rows]
        num_steps = min(self.interval, max(left), AWAITED_INTERVAL if room.is_awaited else self.interval)
        before_last = (num_steps - 1) * (drafter.max_depth + 1)
        lengths = rows.known_lengths
        longest = max(length + min(before_last, most) for length, most in zip(lengths, left, strict=True))
        num_rows, num_slots = self._size(len(lengths), longest - 1 + drafter.num_nodes, room.slots_of_running)
        state = self._loaded_state(rows, num_rows, num_slots, room.slots_of_running)
        seconds = self._run(state, drafter, num_steps)
        if not is_builtin(drafter):
            raise_violated(drafter, STATIC_DRAFT_RULES, state.violations)
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
        return StepBurst(outputs, num_steps, seconds, failed)

    def _size(self, num_there: int, needed: int, most: int) -> tuple[int, int]:
        """How many rows and slots a burst reads: the next power of two and :func:`rounded_slots`, so that few
        sizes are captured, as far as ``most`` slots in all allow."""
        least = -(-needed // SLOTS) * SLOTS
        num_rows = min(1 << (num_there - 1).bit_length(), self._max_rows, most // least)
        num_rows = max(num_rows, num_there) if self._is_shared else num_there
        return num_rows, max(least, min(rounded_slots(needed), most // num_rows // SLOTS * SLOTS))

    def _loaded_state(self, rows: DecodeState, num_rows: int, num_slots: int, most: int) -> StaticState:
        """The state of a burst of ``num_rows`` rows, of which ``rows`` are there; copied only if they have
        changed since the last one."""
        if self._state is None:
            settings = RowSettings.neutral(self._max_rows, rows.lengths.device) if self.uses_numbers else None
            self._state = StaticState.with_room(rows, self._max_rows, self.interval, settings)
        whole = self._state
        self._memory.hold(rows.cache, *self._memory_size(num_rows, num_slots, most), most)
        whole.reserve_tokens(self._memory.num_slots + 1)
        if self._loaded[0] is not rows.lengths or self._loaded[1] != num_rows:
            whole.load(rows, num_rows)
            self._loaded = rows.lengths, num_rows
        cache = self._memory.first(whole.cache.lengths[:num_rows])
        cache.use_slots(num_slots)
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
        graphs = self._uncaptured if self._is_altered else self._graphs
        cache = state.cache
        settings = state.rows.settings
        program = None if settings is None else settings.program
        attention = self.base.config.get_text_config(decoder=True)._attn_implementation
        key = drafter.static_key, cache.num_rows, cache.num_slots, cache.num_positions, program, attention
        steps = partial(static_steps, self.base, drafter, state, self._layers)
        assert self._state is not None
        of_rows = self._state.rows.tokens, self._state.eos
        seconds = graphs.run(key, steps, num_steps, [*of_rows, *self._memory.tensors, *drafter.tensors()])
        if seconds and not self.uses_numbers:
            self._captured_with.append(state.rows.request.processors)
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


@dataclass(frozen=True)
class BurstResults:
    """The results of some steps, on the host."""

    outputs: list[StepOutput]
    """One for each step in which some row got a token, of the rows that did."""
    num_new: list[int]
    """Tokens that each row got."""
    has_failed: list[bool]
    """Rows whose next token would have been chosen by a NaN score."""
    not_finite: bool
    """Whether the base was not finite on a node of some row, which has not changed since."""


def read_results(state: StaticState, num_steps: int, drafter: StaticDrafter) -> BurstResults:
    """The results of the last ``num_steps`` steps of the rows of ``state``, which ``drafter`` has drafted, in
    one read."""
    on_host = read_columns(
        {
            "num_kept": state.num_kept[:num_steps].T,  # (B, W)
            "num_accepted": state.num_accepted[:num_steps].T,  # (B, W)
            "is_over": torch.stack([state.finished, state.failed, state.not_finite], dim=1),  # (B, 3)
            "tokens": _newest_tokens(state, num_steps, drafter.max_depth + 1),  # (B, W * L)
        }
    )
    state.num_unread.zero_()
    num_rows = len(state.rows.rows)  # the rows after them are not there
    outputs: list[list[RowOutput]] = [[] for _ in range(num_steps)]
    for index, row in enumerate(state.rows.rows):
        num_kept = on_host["num_kept"][index]
        is_finished, has_failed, _ = on_host["is_over"][index]
        ends = [*accumulate(num_kept)]
        for step, (kept, end) in enumerate(zip(num_kept, ends, strict=True)):
            if kept:
                output = RowOutput(
                    row,
                    on_host["tokens"][index][end - kept : end],
                    depths_of(on_host["num_accepted"][index][step])[:kept],
                    has_ended=bool(is_finished and not has_failed and end == ends[-1]),
                    num_drafted=drafter.num_nodes - 1,
                )
                outputs[step].append(output)
    return BurstResults(
        outputs=[StepOutput(rows, drafter.max_depth, drafter.num_nodes - 1) for rows in outputs if rows],
        num_new=[*map(sum, on_host["num_kept"][:num_rows])],
        has_failed=[bool(has_failed) for _, has_failed, _ in on_host["is_over"][:num_rows]],
        not_finite=any(not_finite for *_, not_finite in on_host["is_over"]),
    )


def sync_interval(base: CausalLM) -> int:
    """Steps after which the host reads the results of a base there."""
    return HOST_SYNC_INTERVALS.get(lm_head_device(base).type, DEFAULT_HOST_SYNC_INTERVAL)


def rounded_slots(num_slots: int) -> int:
    """The least multiple of :data:`SLOTS` that is enough, of :data:`MANY_SLOTS` beyond that."""
    multiple = SLOTS if num_slots <= MANY_SLOTS else MANY_SLOTS
    return -(-num_slots // multiple) * multiple


def _newest_tokens(state: StaticState, num_steps: int, most: int) -> Tensor:
    """The tokens that the last ``num_steps`` steps added to each row, at most ``most`` each: (B, num_steps *
    most) long; entries after the newest are undefined."""
    tokens = state.rows.tokens
    first = state.rows.lengths - state.num_kept[:num_steps].sum(0)
    columns = first[:, None] + torch.arange(num_steps * most, device=tokens.device)
    return tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1))


# ------------------------------------------------------------------ what such steps can decode


def check_static(step: str, drafter: Drafter, request: DecodeRequest) -> None:
    """Raise ValueError unless steps of fixed shape can decode ``request`` with ``drafter``; the message names
    ``step``, the obstacle, and the alternative."""
    obstacle = static_obstacle(drafter, request)
    if obstacle is not None:
        problem, alternative = obstacle
        alternatives = f"{alternative}, or step='general'" if alternative else "step='general'"
        raise ValueError(f"step={step!r} cannot work with {problem}; use {alternatives}")


def static_obstacle(drafter: Drafter, request: DecodeRequest) -> tuple[str, str] | None:
    """The reason why steps of fixed shape cannot decode ``request`` with ``drafter``, and what to use in its
    place, "" for nothing; None if they can."""
    host_bound = not_capturable(drafter)
    if host_bound:
        return (
            f"{type(host_bound[0]).__name__}, which is no StaticDrafter: it reads the text on the host, or "
            "lacks num_nodes, static_key or tensors",
            "drafter='heads', 'dynamic-heads', 'suffix', unions of these or 'plain'",
        )
    return _obstacle_of(request)


def _obstacle_of(request: DecodeRequest) -> tuple[str, str] | None:
    """As :func:`static_obstacle`, for whatever drafter."""
    if request.acceptance == "typical" or request.rule is not None:
        return f"acceptance={request.acceptance!r}", "acceptance='exact'"
    if not is_path_free(request) and row_numbers(request.processors) is None:
        reading = [
            type(processor).__name__
            for processor in request.processors
            if type(processor) not in PATH_FREE_PROCESSORS
        ]
        return (
            f"logits processors that read the tokens before each node on the host: {', '.join(reading)}",
            "",
        )
    if request.references:
        return "prediction or corpus, which are read on the host", ""
    if request.criteria:
        return "stopping criteria (stop_strings are one), which are asked on the host after every token", ""
    return None


def is_path_free(request: DecodeRequest) -> bool:
    """Whether no logits processor of ``request`` reads the text."""
    return all(type(processor) in PATH_FREE_PROCESSORS for processor in request.processors)


def can_be_shared(request: DecodeRequest) -> bool:
    """Whether a row of ``request`` can be in static steps beside others: what it asks for is in tensors, and
    nothing has to be looked at after each token."""
    is_in_tensors = request.num_logprobs is None and row_numbers(request.processors) is not None
    return is_in_tensors and _obstacle_of(request) is None


def capture_key_of(request: DecodeRequest) -> Hashable:
    """The settings of a call whose own processors static steps run, by which what is captured for it is
    known; None where they are numbers in tensors."""
    if not is_path_free(request):
        return None
    return request.seeds is None, request.temperature, pickle.dumps(list(request.processors))
