"""The decisions of continuous batching: who waits, who is prefilled, who decodes, and who is preempted.

No tensor is known here, and torch is not imported. Rows are known by their lengths, and memory by cache
slots. :class:`medusa.decoding.batch.Batch` carries the decisions out, and reports what came of them. A call
of its ``step`` asks in this order:

1. :meth:`Scheduler.begin_call`: is this call prefill or decode?
2. Prefill: :meth:`Scheduler.next_to_start` and :meth:`Scheduler.next_chunk` by turns, until no chunk is left.
   The batch answers with :meth:`Scheduler.start`, and with :meth:`Scheduler.chunk_read` or
   :meth:`Scheduler.join`.
3. Decode: :meth:`Scheduler.make_room` names the rows that are preempted before the pass.

Rows that end or fail leave by :meth:`Scheduler.leave` or :meth:`Scheduler.drop_prefill`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from medusa.options import check_at_least

MAX_OVERTAKES = 16
"""How often shorter rows may start before a waiting row that does not fit yet."""
LEAST_CHUNK = 16
"""A high price makes no chunk smaller than this: fewer tokens take hardly less time."""


class QueueFull(RuntimeError):
    """The queue is full."""


@dataclass(frozen=True)
class SchedulerLimits:
    """The limits of a scheduler."""

    max_rows: int = 16
    """Requests that decode together."""
    max_slots: int = 32768
    """Cache slots of all rows together. Each row takes as many as the longest one, rounded up to a multiple
    of 256."""
    max_waiting: int = 64
    """Requests that wait."""
    chunk: int = 256
    """Prompt tokens that are prefilled between two decode steps, over all rows."""
    by_time: bool = False
    """Whether a token of a prompt counts by the time that it takes: behind thousands of others it takes
    several times as long, and all others wait for it. That makes no chunk smaller than
    :data:`LEAST_CHUNK`."""
    chunk_seconds: float = math.inf
    """Longest time of a call's prefill, by what tokens took before, for who comes meanwhile; it makes no
    chunk smaller than :data:`LEAST_CHUNK`. For ``by_time``."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_rows", "max_slots", "chunk")
        check_at_least(self, 0, "max_waiting")


class Phase(Enum):
    """The kind of work of one call."""

    PREFILL = "prefill"
    DECODE = "decode"


class ScheduledRow(Protocol):
    """The fields of a row that a scheduler reads and writes. Rows are told apart by identity."""

    num_overtaken: int
    """How often a later row has overtaken it because this one did not fit."""
    order: int
    """How many rows joined the batch before it; the last ones are preempted first."""

    @property
    def length(self) -> int:
        """Tokens of its prompt and its answer so far."""


AnyRow = TypeVar("AnyRow", bound=ScheduledRow)


@dataclass(eq=False)
class Prefill(Generic[AnyRow]):
    """The rows of one request during prefill. Who executes it may add fields."""

    rows: list[AnyRow]
    length: int
    """Tokens of the longest row, its answer so far included."""
    num_read: int
    """How many of them are in the cache."""
    num_slots: int
    """Cache slots that are allocated for it."""
    seconds_per_token: float = field(default=0.0, init=False)
    """In the last chunk; 0 before."""

    @property
    def num_remaining(self) -> int:
        """How many tokens are not prefilled yet."""
        return self.length - self.num_read


AnyPrefill = TypeVar("AnyPrefill", bound=Prefill[Any])


@dataclass(frozen=True)
class Chunk(Generic[AnyPrefill]):
    """The tokens of a prompt that are read next."""

    prefill: AnyPrefill
    num_tokens: int
    cost: int
    """Their part of the budget of a call."""
    is_last: bool
    """Whether they are the rest of the prompt. If so, the scheduler has let go of ``prefill``, and its rows
    are to join those that decode."""


class Scheduler(Generic[AnyRow, AnyPrefill]):
    """The queue, the prefills and the running rows of one batch.

    Args:
        growth_step: slots of a row are allocated in multiples of it.
        max_nodes: the largest number of nodes of a draft, root included.
        context: positions that a row may have; None for no limit.
    """

    def __init__(
        self, limits: SchedulerLimits, growth_step: int, max_nodes: int = 1, context: int | None = None
    ):
        self.limits = limits
        self.growth_step = growth_step
        self.max_nodes = max_nodes
        self.context = context
        self.waiting: deque[AnyRow] = deque()
        self.prefills: list[AnyPrefill] = []
        """Oldest first. Each was at its start at most half as long as what the one before it lacked, so few
        prompts overtake one, and the last lacks least."""
        self.running: list[AnyRow] = []
        """The rows that decode, in any order."""
        self._budget = 0  # what is left of the budget of this call
        self._reserved = 0  # the part of it that is the oldest prompt's
        self._has_read = False  # whether the last call was prefill
        self._least_seconds = math.inf  # of a token of a prompt
        self._num_joined = 0

    # ------------------------------------------------------------------ the queue

    @property
    def is_busy(self) -> bool:
        """Whether any row waits, is in prefill or decodes."""
        return bool(self.running or self.waiting or self.prefills)

    @property
    def num_prefilling(self) -> int:
        """Rows in prefill."""
        return sum(len(prefill.rows) for prefill in self.prefills)

    @property
    def is_awaited(self) -> bool:
        """Whether a prompt is being read, or may be as soon as this call ends."""
        return bool(self.prefills or (self.waiting and len(self.running) < self.limits.max_rows))

    @property
    def free_capacity(self) -> int:
        """How many more requests can be added now: free rows plus free places in the queue."""
        free_rows = max(0, self.limits.max_rows - len(self.running) - len(self.prefills))
        return self.limits.max_waiting + free_rows - len(self.waiting)

    @property
    def max_tokens(self) -> int:
        """Tokens that a prompt and its answer may have together at most."""
        most = self.limits.max_slots // self.growth_step * self.growth_step - self.max_nodes
        return most if self.context is None else min(most, self.context)

    def check(self, length: int, max_new_tokens: int) -> None:
        """Raise ValueError unless a prompt of ``length`` tokens and its answer can ever fit."""
        total = length + max_new_tokens
        request = f"prompt of {length} tokens + max_new_tokens={max_new_tokens}"
        if self.context is not None and total > self.context:
            raise ValueError(f"{request} must fit the {self.context} positions that rows of a batch may have")
        taken = self.slots(1, total)
        if taken > self.limits.max_slots:
            raise ValueError(f"{request} must fit max_slots={self.limits.max_slots}, and may take {taken}")

    def add(self, row: AnyRow) -> None:
        """Put ``row`` into the queue; QueueFull where too many wait already."""
        if self.free_capacity < 1:
            raise QueueFull(f"{len(self.waiting)} requests wait already")
        self.waiting.append(row)

    def cancel(self, row: AnyRow) -> AnyPrefill | None:
        """Drop ``row`` from the queue, or its prefill, which is returned; a row that decodes leaves by
        :meth:`leave`."""
        if row in self.waiting:
            self.waiting.remove(row)
        dropped = next((prefill for prefill in self.prefills if row in prefill.rows), None)
        if dropped is not None:
            self.drop_prefill(dropped)
        return dropped

    def clear(self) -> None:
        """Drop all rows."""
        self.waiting.clear()
        self.prefills = []
        self.running = []

    # ------------------------------------------------------------------ prefill

    def begin_call(self) -> Phase | None:
        """The phase of this call; None where there is nothing to do. Where prefill and decode are both due,
        they alternate."""
        limits = self.limits
        self._budget = limits.chunk
        if limits.by_time and self._least_seconds < math.inf:  # the time of so many of the cheapest tokens
            in_time = limits.chunk_seconds / self._least_seconds
            self._budget = round(min(limits.chunk, max(LEAST_CHUNK, in_time)))
        self._reserved = max(1, self._budget // 4) if limits.by_time else self._budget - self._budget // 2
        has_prompts = bool(self.waiting or self.prefills)
        self._has_read = has_prompts and not (self.running and self._has_read)
        if self._has_read:
            return Phase.PREFILL
        return Phase.DECODE if self.running else None

    def next_to_start(self) -> AnyRow | None:
        """The row whose prefill starts now, which leaves the queue; None where none may.

        A row may overtake a running prefill if it is at most half as long as what that one still lacks. It
        may overtake a waiting row that does not fit yet, MAX_OVERTAKES times.
        """
        if self._budget <= 0:
            return None
        max_length = self.prefills[-1].num_remaining / 2 if self.prefills else math.inf
        overtaken: list[AnyRow] = []
        for row in self.waiting:
            if not self._has_room_for(row.length):
                if row.num_overtaken >= MAX_OVERTAKES:
                    return None
                overtaken.append(row)
            elif row.length <= max_length:
                for passed in overtaken:
                    passed.num_overtaken += 1
                self.waiting.remove(row)
                return row
        return None

    def start(self, prefill: AnyPrefill) -> None:
        """Take in the prefill of a row that :meth:`next_to_start` gave."""
        self.prefills.append(prefill)

    def next_chunk(self) -> Chunk[AnyPrefill] | None:
        """The tokens to read next; None at the end of this call, which comes early where a prompt is
        preempted.

        Half of the budget, by time a quarter, is reserved for the oldest prompt; the rest goes to shorter
        prompts first.
        """
        if self._budget <= 0 or not self.prefills:
            return None
        overtakes = len(self.prefills) > 1 and self._budget > self._reserved
        prefill = self.prefills[-1 if overtakes else 0]
        price = self._price(prefill)
        num_tokens = self._affordable(self._budget - self._reserved if overtakes else self._budget, price)
        if prefill.num_remaining > num_tokens:
            return Chunk(prefill, num_tokens, math.ceil(num_tokens * price), is_last=False)
        if self.running and not self._fits(prefill.length, len(self.prefills)):
            self._preempt_prefill(prefill)  # the others have grown meanwhile
            return None
        return self._last_chunk(prefill, price)

    def _last_chunk(self, prefill: AnyPrefill, price: float) -> Chunk[AnyPrefill]:
        """The rest of ``prefill``, which is over with it. It is paid now. Other chunks are paid once they are
        read: where their pass fails, the next prompt gets their share of the budget."""
        num_tokens = prefill.num_remaining
        last = Chunk(prefill, num_tokens, math.ceil(num_tokens * price), is_last=True)
        self._budget -= last.cost
        self.prefills.remove(prefill)
        return last

    def chunk_read(self, chunk: Chunk[AnyPrefill], num_slots: int, seconds: float) -> None:
        """Note that ``chunk``, which was not the last one, took ``seconds``, and that its prefill now has
        ``num_slots`` slots."""
        prefill = chunk.prefill
        self._budget -= chunk.cost
        prefill.num_read += chunk.num_tokens
        prefill.num_slots = num_slots
        if chunk.num_tokens >= LEAST_CHUNK:
            prefill.seconds_per_token = seconds / chunk.num_tokens
            # The old least grows by 2 % each time, so that an odd one is forgotten.
            self._least_seconds = min(prefill.seconds_per_token, 1.02 * self._least_seconds)

    def drop_prefill(self, prefill: AnyPrefill) -> None:
        """Drop ``prefill``, whose pass has failed, or which nobody waits for any more."""
        self.prefills = [other for other in self.prefills if other is not prefill]

    def _price(self, prefill: AnyPrefill) -> float:
        """The time of a token of ``prefill``, in those of the cheapest token of a prompt so far; 1 where the
        budget counts tokens. Where no other row is in prefill or decodes, as many are read as there is time
        for."""
        if not self.limits.by_time or not prefill.seconds_per_token:
            return 1.0
        is_alone = not self.running and len(self.prefills) == 1
        cheapest = self.limits.chunk_seconds / self._budget if is_alone else self._least_seconds
        return max(1.0, prefill.seconds_per_token / cheapest)

    def _affordable(self, share: int, price: float) -> int:
        """How many tokens at ``price`` may be read for ``share`` of the budget."""
        if price == 1:
            return share
        return max(min(share, LEAST_CHUNK), int(share / price))

    # ------------------------------------------------------------------ rows that decode

    def join(self, rows: Sequence[AnyRow]) -> None:
        """Have ``rows`` decode from now on, whose last chunk has been read."""
        for row in rows:
            row.order = self._num_joined
            self._num_joined += 1
        self.running = [*self.running, *rows]

    def leave(self, rows: Collection[AnyRow]) -> None:
        """Forget ``rows``, which decode no more."""
        self.running = [row for row in self.running if row not in rows]

    def make_room(self) -> list[AnyRow]:
        """The rows that are preempted, in this order, so that the others have room for a pass.

        While all need more than ``max_slots``, the youngest prefill is preempted, else the row that joined
        last. Either goes back to the head of the queue, and its tokens are prefilled again later.
        """
        preempted: list[AnyRow] = []
        while self.slots(len(self.running), self._longest) > self.slots_of_running:
            if self.prefills:
                self._preempt_prefill(self.prefills[-1])
                continue
            youngest = max(self.running, key=lambda row: row.order)
            self.leave([youngest])
            self.waiting.appendleft(youngest)
            preempted.append(youngest)
        return preempted

    # ------------------------------------------------------------------ memory

    def slots(self, num_rows: int, longest: int) -> int:
        """Cache slots of ``num_rows`` rows with ``longest`` tokens and a draft."""
        return num_rows * -(-(longest + self.max_nodes) // self.growth_step) * self.growth_step

    def most_rows(self, longest: int) -> int:
        """How many rows of ``longest`` tokens may ever decode together."""
        return min(self.limits.max_rows, self.limits.max_slots // self.slots(1, longest))

    @property
    def _longest(self) -> int:
        """Tokens of the longest row that decodes which are in the cache: all but its newest."""
        return max((row.length - 1 for row in self.running), default=0)

    @property
    def slots_of_running(self) -> int:
        """Cache slots that the rows that decode may have together: all but those of prefills."""
        return self.limits.max_slots - sum(prefill.num_slots for prefill in self.prefills)

    def _has_room_for(self, length: int) -> bool:
        """Whether one more row of ``length`` tokens fits, with room for every row to grow by
        ``growth_step``."""
        num_others = len(self.running) + len(self.prefills)
        if not num_others:
            return True
        if num_others >= self.limits.max_rows:
            return False
        return self._fits(length, len(self.prefills) + 1, self.growth_step)

    def _fits(self, length: int, num_joining: int, growth: int = 0) -> bool:
        """Whether ``num_joining`` more rows, of at most ``length`` tokens, fit even if every row grows by
        ``growth`` tokens."""
        longest = max(length, self._longest, *(prefill.length for prefill in self.prefills))
        return self.slots(len(self.running) + num_joining, longest + growth) <= self.limits.max_slots

    def _preempt_prefill(self, prefill: AnyPrefill) -> None:
        """Drop ``prefill`` with all that it has read; its rows are the next in the queue."""
        self.prefills.remove(prefill)
        self.waiting.extendleft(prefill.rows)
