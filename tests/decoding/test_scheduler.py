"""The scheduler alone: random lives of many rows, compared with a simulation of a page and held to laws."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import pytest

from medusa.decoding.scheduler import (
    LEAST_CHUNK,
    MAX_OVERTAKES,
    Chunk,
    Phase,
    Prefill,
    QueueFull,
    Scheduler,
    SchedulerLimits,
)

SEEDS = range(400)
STEP = 16
"""Slots are allocated in multiples of it; few, so that memory is often short."""
MOST_EVENTS = 20_000
"""A scene that takes more of them has no end."""


def rounded_up(num_slots: int) -> int:
    return math.ceil(num_slots / STEP) * STEP


def seconds_of(num_before: int, num_tokens: int) -> float:
    """How long a chunk takes where a token takes longer behind others."""
    return num_tokens + sum(range(num_before, num_before + num_tokens)) / 10


@dataclass(eq=False)
class FakeRow:
    """A row without tokens, whose life is known before it begins."""

    name: int
    num_prompt: int
    num_new: int
    """Tokens of its whole answer."""
    arrives: int = 0
    """The call before which it arrives."""
    cancelled: float = math.inf
    """The call before which it is cancelled, if it is there."""
    fails: float = math.inf
    """Its pass fails once so many tokens are read, or written."""
    num_known: int = 0
    """Tokens of its prompt that the prefix cache has."""
    num_written: int = 0
    end: str = ""
    """"done", "error", "cancelled", "full" (the queue) or "refused" (it can never fit)."""
    order: int = -1
    num_overtaken: int = 0
    num_read: int = 0
    num_slots: int = 0
    seconds: float = 0.0
    """These three are the simulation's."""

    @property
    def length(self) -> int:
        return self.num_prompt + self.num_written

    def write(self, num_tokens: int) -> None:
        self.num_written = min(self.num_new, self.num_written + num_tokens)
        if self.length >= self.fails:
            self.end = "error"
        elif self.num_written == self.num_new:
            self.end = "done"


@dataclass(frozen=True)
class Scene:
    """Rows, in the order they come, and the limits that they meet."""

    limits: SchedulerLimits
    rows: list[FakeRow]
    max_nodes: int = 1

    def slots(self, num_rows: int, longest: int) -> int:
        return num_rows * rounded_up(longest + self.max_nodes)

    def write(self, rows: list[FakeRow]) -> None:
        """Take the rows one pass further, by different numbers of tokens."""
        for row in rows:
            row.write(1 + (row.name + row.num_written) % self.max_nodes)


def scene(seed: int) -> Scene:
    """A random scene. In every other one, memory is so short and prompts are read so slowly that the running
    rows often outgrow the room that a prompt had when it started."""
    draw = random.Random(seed)
    is_tight = seed % 2 == 1
    limits = SchedulerLimits(
        max_rows=draw.randint(3, 6) if is_tight else draw.randint(1, 6),
        max_slots=STEP * (draw.randint(20, 40) if is_tight else draw.choice([8, 12, 16, 20, 30])),
        max_waiting=draw.choice([1, 4, 30]),
        chunk=draw.randint(2, 8) if is_tight else draw.choice([1, 3, 12, 20, 40, 200]),
        by_time=draw.random() < 0.4,
        chunk_seconds=(math.inf, 60.0, 20.0)[seed % 3],
    )
    rows, call = [], 0
    prompts = [20, 60, 100] if is_tight else [draw.choice([20, 60, 150])]
    answers = [80, 100, 120] if is_tight else [1, 5, 20, 60]
    pause = draw.choice([0, 1, 5])
    for name in range(draw.randint(1, 24)):
        call += draw.choice([0, 0, pause])
        row = FakeRow(name, draw.randint(1, draw.choice(prompts)), draw.choice(answers), call)
        if draw.random() < 0.15:
            row.cancelled = call + draw.randint(0, 40)
        if draw.random() < 0.15:
            row.fails = draw.randint(1, row.num_prompt + row.num_new)
        if draw.random() < 0.3:
            row.num_known = draw.randint(0, row.num_prompt - 1)
        rows.append(row)
    return Scene(limits, rows, max_nodes=8 if is_tight else draw.randint(1, 5))


# ------------------------------------------------------------------ the scheduler at work


@dataclass
class Life:
    """What a scheduler decided in a scene, and what a bystander saw."""

    scene: Scene
    log: list[tuple] = field(default_factory=list)
    """In order: ("call", number); ("start", name, length); ("read", name, tokens, cost); ("fail", name);
    ("preempt", name, length); ("decode", *names); ("end", name); ("cancel", name)."""
    num_slots: list[int] = field(default_factory=list)
    """Slots that all rows need, at the end of each call."""
    num_missed: list[int] = field(default_factory=lambda: [0])
    """How many calls without a decode pass have followed each other, while rows were decoding."""
    unfair: list[tuple[int, int]] = field(default_factory=list)
    """Rows that started before one which had come first and could have started too."""
    num_overtaken: Counter[int] = field(default_factory=Counter)
    """How often later rows started while the row of this name had no room."""


class FakeBatch:
    """Does what a scheduler decides, without tensors, and writes it down."""

    def __init__(self, scene: Scene):
        self.scene, self.life, self.log = scene, Life(scene), []
        self.life.log = self.log
        self.scheduler: Scheduler[FakeRow, Prefill[FakeRow]] = Scheduler(scene.limits, STEP, scene.max_nodes)

    def live(self) -> Life:
        call, last = 0, self.scene.rows[-1].arrives
        while call <= last or self.scheduler.is_busy:
            self.log.append(("call", call))
            for row in self.scene.rows:
                if row.arrives == call:
                    self.add(row)
                if row.cancelled == call and not row.end:
                    self.cancel(row)
            self.call()
            call += 1
        return self.life

    def add(self, row: FakeRow) -> None:
        try:
            self.scheduler.check(row.num_prompt, row.num_new)
            self.scheduler.add(row)
        except QueueFull:
            row.end = "full"
        except ValueError:
            row.end = "refused"

    def cancel(self, row: FakeRow) -> None:
        row.end = "cancelled"
        self.scheduler.cancel(row)
        self.scheduler.leave([row])
        self.log.append(("cancel", row.name))

    def call(self) -> None:
        assert len(self.log) < MOST_EVENTS, "somebody starves"
        is_decoding = bool(self.scheduler.running)
        phase = self.scheduler.begin_call()
        has_missed = is_decoding and phase is not Phase.DECODE
        self.life.num_missed.append(self.life.num_missed[-1] + 1 if has_missed else 0)
        if phase is Phase.PREFILL:
            self.prefill()
        elif phase is Phase.DECODE:
            self.decode()
        self.life.num_slots.append(self.num_slots)

    @property
    def num_slots(self) -> int:
        in_prefill = sum(prefill.num_slots for prefill in self.scheduler.prefills)
        longest = max((row.length - 1 for row in self.scheduler.running), default=0)
        return in_prefill + len(self.scheduler.running) * rounded_up(longest)

    def prefill(self) -> None:
        while (chunk := self.next_chunk()) is not None:
            prefill = chunk.prefill
            (row,) = prefill.rows
            self.log.append(("read", row.name, chunk.num_tokens, chunk.cost))
            if prefill.num_read + chunk.num_tokens >= row.fails:
                self.scheduler.drop_prefill(prefill)
                row.end = "error"
                self.log.append(("fail", row.name))
            elif chunk.is_last:
                self.join(row)
            else:
                seconds = seconds_of(prefill.num_read, chunk.num_tokens)
                self.scheduler.chunk_read(chunk, rounded_up(row.length), seconds)

    def next_chunk(self) -> Chunk | None:
        assert len(self.log) < MOST_EVENTS, "somebody starves"
        queue = [*self.scheduler.waiting]
        row = self.scheduler.next_to_start()
        if row is not None:
            self.judge_start(row, queue[: queue.index(row)])
            self.log.append(("start", row.name, row.length))
            self.scheduler.start(Prefill([row], row.length, row.num_known, row.num_known))
        return self.scheduler.next_chunk()

    def judge_start(self, row: FakeRow, earlier: list[FakeRow]) -> None:
        """Note which of those that came before ``row`` could not start, and which could."""
        prefills = self.scheduler.prefills
        for other in earlier:
            if not self.has_room(other):
                self.life.num_overtaken[other.name] += 1
            elif not prefills or other.length <= prefills[-1].num_remaining / 2:
                self.life.unfair.append((row.name, other.name))

    def has_room(self, row: FakeRow) -> bool:
        lengths = [prefill.length for prefill in self.scheduler.prefills]
        lengths += [other.length - 1 for other in self.scheduler.running]
        needed = self.scene.slots(len(lengths) + 1, max([row.length, *lengths]) + STEP)
        limits = self.scene.limits
        return not lengths or (len(lengths) < limits.max_rows and needed <= limits.max_slots)

    def join(self, row: FakeRow) -> None:
        self.scheduler.join([row])
        row.write(1)
        self.drop_ended()

    def decode(self) -> None:
        self.log += [("preempt", row.name, row.length) for row in self.scheduler.make_room()]
        running = self.scheduler.running
        self.log.append(("decode", *sorted(row.name for row in running)))
        self.scene.write(running)
        self.drop_ended()

    def drop_ended(self) -> None:
        ended = [row for row in self.scheduler.running if row.end]
        self.scheduler.leave(ended)
        self.log += [("end", row.name) for row in ended]


@cache
def life(seed: int) -> Life:
    return FakeBatch(scene(seed)).live()


# ------------------------------------------------------------------ the rules, as a simulation of a page


class Simulation:
    """The log of a scene from the rules alone: three lists, oldest first, and every sum made anew."""

    def __init__(self, scene: Scene):
        self.scene, self.limits, self.log = scene, scene.limits, []
        self.queue, self.reading, self.running = [], [], []
        self.was_prefill, self.cheapest = False, math.inf

    def live(self) -> list[tuple]:
        call, last = 0, self.scene.rows[-1].arrives
        while call <= last or self.queue or self.reading or self.running:
            self.log.append(("call", call))
            for row in self.scene.rows:
                if row.arrives == call:
                    self.arrive(row)
                if row.cancelled == call and not row.end:
                    row.end = "cancelled"
                    self.log.append(("cancel", row.name))
                    self.forget_ended()
            has_turn = not self.running or not self.was_prefill
            self.was_prefill = has_turn and bool(self.queue or self.reading)
            if self.was_prefill:
                self.read()
            elif self.running:
                self.decode()
            call += 1
        return self.log

    def arrive(self, row):
        num_free = self.limits.max_rows - len(self.running) - len(self.reading)
        if self.scene.slots(1, row.num_prompt + row.num_new) > self.limits.max_slots:
            row.end = "refused"
        elif len(self.queue) >= max(0, num_free) + self.limits.max_waiting:
            row.end = "full"
        else:
            self.queue.append(row)

    def forget_ended(self):
        self.log += [("end", row.name) for row in self.running if row.end and row.end != "cancelled"]
        for rows in (self.queue, self.reading, self.running):
            rows[:] = [row for row in rows if not row.end]

    def fits(self, num_rows, length, growth):
        lengths = [row.length for row in self.reading] + [row.length - 1 for row in self.running]
        return self.scene.slots(num_rows, max([length, *lengths]) + growth) <= self.limits.max_slots

    def start(self):
        num_rows = 1 + len(self.running) + len(self.reading)
        overtaken = []
        for row in self.queue:
            has_room = num_rows <= self.limits.max_rows and self.fits(num_rows, row.length, STEP)
            to_read = [reading.length - reading.num_read for reading in self.reading]
            is_short = not to_read or 2 * row.length <= to_read[-1]
            if num_rows > 1 and not has_room:
                overtaken.append(row)
                if row.num_overtaken == MAX_OVERTAKES:
                    return
            elif is_short:
                for other in overtaken:
                    other.num_overtaken += 1
                row.num_read, row.num_slots, row.seconds = row.num_known, row.num_known, 0.0
                self.queue.remove(row)
                self.reading.append(row)
                self.log.append(("start", row.name, row.length))
                return

    def read(self):
        budget, by_time = self.limits.chunk, self.limits.by_time
        if by_time and self.cheapest < math.inf:
            budget = round(min(budget, max(LEAST_CHUNK, self.limits.chunk_seconds / self.cheapest)))
        oldest_part = max(1, budget // 4) if by_time else math.ceil(budget / 2)
        while budget > 0:
            self.start()
            if not self.reading:
                return
            share, row = budget, self.reading[0]
            if len(self.reading) > 1 and budget > oldest_part:
                share, row = budget - oldest_part, self.reading[-1]
            is_waited_for = self.running or len(self.reading) > 1
            cheapest = self.cheapest if is_waited_for else self.limits.chunk_seconds / budget
            is_priced = by_time and row.seconds > cheapest
            price = row.seconds / cheapest if is_priced else 1.0
            most = max(min(share, LEAST_CHUNK), int(share / price)) if is_priced else share
            num_tokens = min(most, row.length - row.num_read)
            is_last = row.num_read + num_tokens == row.length
            num_rows = len(self.running) + len(self.reading)
            if is_last and self.running and not self.fits(num_rows, row.length, 0):
                self.postpone(row)
                return
            cost = math.ceil(num_tokens * price)
            self.log.append(("read", row.name, num_tokens, cost))
            has_failed = row.num_read + num_tokens >= row.fails
            budget -= 0 if has_failed and not is_last else cost
            if has_failed:
                row.end = "error"
                self.log.append(("fail", row.name))
            elif is_last:
                self.reading.remove(row)
                self.running.append(row)
                row.write(1)
            elif num_tokens >= LEAST_CHUNK:
                row.seconds = seconds_of(row.num_read, num_tokens) / num_tokens
                self.cheapest = min(row.seconds, 1.02 * self.cheapest)
            row.num_read += num_tokens
            row.num_slots = rounded_up(row.length)
            self.forget_ended()

    def postpone(self, row):
        self.reading.remove(row)
        self.queue.insert(0, row)

    def decode(self):
        while True:
            taken = self.scene.slots(len(self.running), max(row.length - 1 for row in self.running))
            if taken + sum(row.num_slots for row in self.reading) <= self.limits.max_slots:
                break
            if self.reading:
                self.postpone(self.reading[-1])
                continue
            self.queue.insert(0, self.running.pop())
            self.log.append(("preempt", self.queue[0].name, self.queue[0].length))
        self.log.append(("decode", *sorted(row.name for row in self.running)))
        self.scene.write(self.running)
        self.forget_ended()


# ------------------------------------------------------------------ laws


def test_the_scheduler_decides_what_a_simulation_of_the_rules_does():
    for seed in SEEDS:
        assert life(seed).log == Simulation(scene(seed)).live(), seed


def test_the_scenes_are_crowded_enough_to_show_something():
    kinds = Counter(event[0] for seed in SEEDS for event in life(seed).log)
    ends = Counter(row.end for seed in SEEDS for row in life(seed).scene.rows)
    num_started = sum(len({event[1] for event in life(seed).log if event[0] == "start"}) for seed in SEEDS)
    num_preempted_prefills = kinds["start"] - num_started - kinds["preempt"]  # nearly: some never come back
    assert min(kinds[kind] for kind in ("start", "read", "decode", "fail", "cancel", "preempt")) > 80
    assert min(ends[end] for end in ("done", "error", "cancelled", "full", "refused")) > 50
    assert num_preempted_prefills > 50
    assert sum(len(life(seed).num_overtaken) for seed in SEEDS) > 100


def test_every_row_that_is_admitted_ends_or_fails_or_is_cancelled():
    for seed in SEEDS:
        for row in life(seed).scene.rows:
            assert row.end, (seed, row)
            assert row.end != "done" or row.num_written == row.num_new, (seed, row)


def test_the_slots_and_the_rows_are_never_over_the_limit():
    for seed in SEEDS:
        limits = life(seed).scene.limits
        assert max(life(seed).num_slots) <= limits.max_slots, seed
        for kind, *names in life(seed).log:
            assert kind != "decode" or len(names) <= limits.max_rows, seed


def test_rows_start_in_the_order_they_came_but_for_overtakes_that_are_allowed():
    for seed in SEEDS:
        assert life(seed).unfair == [], seed
        assert max(life(seed).num_overtaken.values(), default=0) <= MAX_OVERTAKES, seed


def test_a_row_that_has_ended_or_failed_or_was_cancelled_is_never_named_again():
    for seed in SEEDS:
        gone = set()
        for kind, *values in life(seed).log:
            names = {*values} if kind == "decode" else {*values[:1]} if kind != "call" else set()
            assert not gone & names, seed
            gone |= names if kind in ("end", "fail", "cancel") else set()


def test_a_row_starts_with_all_its_text_and_decodes_once_that_is_read():
    """A preempted row too: it comes back with its answer so far."""
    for seed in SEEDS:
        rows = life(seed).scene.rows
        length, lacks = {row.name: row.num_prompt for row in rows}, {}
        for kind, name, *values in life(seed).log:
            if kind == "preempt":
                (length[name],) = values
                del lacks[name]
            elif kind == "start":
                assert values == [length[name]], (seed, name)
                lacks[name] = length[name] - rows[name].num_known
            elif kind == "read":
                lacks[name] -= values[0]
            elif kind == "decode":
                assert {lacks[other] for other in (name, *values)} == {0}, seed


def reads_of_calls(log: list[tuple]) -> Iterator[list[tuple]]:
    """The ("read", ...) of each call, without those that failed, which count nothing."""
    reads: list[tuple] = []
    for event in [*log, ("call", None)]:
        if event[0] == "call":
            yield reads
            reads = []
        elif event[0] == "read":
            reads.append(event)
        elif event[0] == "fail":
            reads.pop()


def test_a_call_reads_no_more_than_its_budget():
    for seed in SEEDS:
        limits = life(seed).scene.limits
        for reads in reads_of_calls(life(seed).log):
            assert sum(num_tokens for _, _, num_tokens, _ in reads) <= limits.chunk, seed
            for _, _, num_tokens, cost in reads:
                assert cost == num_tokens or limits.by_time, seed
                assert cost <= limits.chunk or num_tokens <= LEAST_CHUNK, seed


def test_prefill_and_decode_take_turns():
    for seed in SEEDS:
        assert max(life(seed).num_missed) <= 1, seed


def test_a_row_without_room_starts_though_short_ones_never_cease_to_come():
    shorts = [FakeRow(name, 1, 4, arrives=name) for name in range(2, 400)]
    rows = [FakeRow(0, 4, 4), FakeRow(1, 90, 4), *shorts]
    limits = SchedulerLimits(max_rows=4, max_slots=8 * STEP, max_waiting=400)
    seen = FakeBatch(Scene(limits, rows)).live()
    starts = [event[1] for event in seen.log if event[0] == "start"]
    assert seen.num_overtaken[1] == MAX_OVERTAKES == starts.index(1) - 1
    assert {row.end for row in rows} == {"done"}


def test_the_oldest_prompt_gets_half_of_the_budget_though_shorter_ones_never_cease_to_come():
    rows = [FakeRow(0, 160, 1), *(FakeRow(name, 4, 1, arrives=name) for name in range(1, 400))]
    limits = SchedulerLimits(max_rows=4, max_slots=40 * STEP, max_waiting=400, chunk=8)
    reads = [*reads_of_calls(FakeBatch(Scene(limits, rows)).live().log)]
    of_oldest = [sum(event[2] for event in call if event[1] == 0) for call in reads]
    assert of_oldest[1:40] == [8, *[4] * 38], of_oldest


def test_the_youngest_prefill_steps_back_first_and_then_the_youngest_row():
    scheduler: Scheduler[FakeRow, Prefill[FakeRow]] = Scheduler(SchedulerLimits(max_slots=8 * STEP), STEP)
    old, young, long, short = (FakeRow(name, STEP, 999) for name in range(4))
    scheduler.join([old, young])
    scheduler.start(Prefill([long], 2 * STEP, num_read=0, num_slots=2 * STEP))
    scheduler.start(Prefill([short], STEP, num_read=0, num_slots=STEP))
    assert scheduler.make_room() == [] and not scheduler.waiting
    old.write(2 * STEP)  # 3 * STEP slots for either row, and as many for the prefills
    assert scheduler.make_room() == [] and [*scheduler.waiting] == [short]
    old.write(2 * STEP)
    assert scheduler.make_room() == [young] and [*scheduler.waiting] == [young, long, short]
    assert scheduler.running == [old] and scheduler.most_rows(5 * STEP) == 1
    scheduler.clear()
    assert not scheduler.is_busy


def test_too_many_rows_and_rows_that_can_never_fit_are_refused():
    limits = SchedulerLimits(max_rows=1, max_slots=2 * STEP, max_waiting=1)
    scheduler: Scheduler[FakeRow, Prefill[FakeRow]] = Scheduler(limits, STEP, max_nodes=2, context=28)
    assert scheduler.max_tokens == 28
    scheduler.check(20, 8)
    with pytest.raises(ValueError, match="max_new_tokens=9 must fit the 28 positions"):
        scheduler.check(20, 9)
    with pytest.raises(ValueError, match="max_slots=32, and may take 48"):
        Scheduler(limits, STEP, max_nodes=2).check(20, 11)
    scheduler.add(FakeRow(0, 1, 1))
    scheduler.add(FakeRow(1, 1, 1))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        scheduler.add(FakeRow(2, 1, 1))
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        SchedulerLimits(chunk=0)


def test_it_is_imported_without_torch():
    code = "import sys; sys.modules['torch'] = None; import medusa.decoding.scheduler"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nobody_waits_longer_for_a_prompt_than_its_parts_may_take():
    """Behind thousands of tokens a token takes several times as long; what takes longest is the first part,
    of which nothing is known."""
    limits = SchedulerLimits(max_slots=10**6, chunk=64, by_time=True, chunk_seconds=0.25)
    scheduler = Scheduler(limits, STEP)
    scheduler.add(FakeRow(0, 9000, 1))
    times, now = [], 0
    scheduler.begin_call()
    scheduler.start(Prefill([scheduler.next_to_start()], 9000, 0, 0))
    while True:
        taken = 0.0
        while (chunk := scheduler.next_chunk()) is not None and not chunk.is_last:
            seconds = chunk.num_tokens * (0.004 + 1e-6 * now)
            scheduler.chunk_read(chunk, 0, seconds)
            taken += seconds
            now += chunk.num_tokens
        if chunk is not None:
            break
        times.append(taken)
        scheduler.begin_call()
    assert times[0] == 64 * 0.004 and max(times[1:]) <= 0.26
    assert min(times[1:]) > 0.2, "and not in smaller parts than needed"
