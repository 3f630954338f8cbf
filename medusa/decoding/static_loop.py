"""The decode loop over static steps: the host reads the results of several steps at once.

The tokens are those of :func:`medusa.decoding.loop.decode`, one :class:`StepResult` per forward pass as
there, but they come several passes at a time. Rows that end stay in the batch, standing still, until all
have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from medusa.choices import StepKind
from medusa.decoding.loop import StepResult, begin, depths_of, finish_step
from medusa.decoding.pausing import Pausing
from medusa.decoding.state import DecodeRequest
from medusa.decoding.static_step import STATIC_DRAFT_RULES, StaticState
from medusa.decoding.statistics import DecodingStatistics, PhaseClock
from medusa.decoding.step_runners import StepRunners
from medusa.drafters.protocol import StaticDrafter
from medusa.drafters.validation import is_medusas_own, raise_violated

HOST_SYNC_INTERVALS = {"cpu": 1}
"""Steps after which the host reads the results, by kind of device: on a CPU reading costs nothing."""
DEFAULT_HOST_SYNC_INTERVAL = 8
"""On other devices. When the last row ends, half of these steps have run in vain, on average."""
SLOTS, MANY_SLOTS = 256, 1024
"""A cache is read in whole multiples of the first; beyond the second, in multiples of that."""


def decode_static(
    step: StepKind,
    runners: StepRunners,
    drafter: StaticDrafter,
    request: DecodeRequest,
    statistics: DecodingStatistics | None = None,
    host_sync_interval: int | None = None,
    pausing: Pausing | None = None,
) -> Iterator[StepResult]:
    """Decode ``request`` in ``step`` "static", "compiled" or "captured".

    The host reads the results every ``host_sync_interval`` steps. ``pausing`` decides which of these draft;
    without, all of them.
    """
    if host_sync_interval is None:
        device = request.lengths.device.type
        host_sync_interval = HOST_SYNC_INTERVALS.get(device, DEFAULT_HOST_SYNC_INTERVAL)
    statistics = DecodingStatistics() if statistics is None else statistics
    return _decode(step, runners, drafter, request, statistics, host_sync_interval, pausing)


@torch.inference_mode(False)  # as in loop.decode
@torch.no_grad()
def _decode(
    step: StepKind,
    runners: StepRunners,
    drafter: StaticDrafter,
    request: DecodeRequest,
    statistics: DecodingStatistics,
    host_sync_interval: int,
    pausing: Pausing | None,
) -> Iterator[StepResult]:
    clock = PhaseClock(statistics)
    num_rows = len(request.lengths)
    drafter.begin(num_rows)
    rows, first = begin(runners.base, request, drafter.reads_layers)
    clock.prefill_done(num_rows)
    yield finish_step(rows, (drafter,), num_rows, first, True)
    if not rows.rows:
        return

    num_left = request.max_new_tokens - 1
    clock.start()
    view = HostView.of_rows(rows.rows, rows.lengths.tolist(), num_left, num_rows)
    with runners.acquire(step, drafter, rows, host_sync_interval) as runner:
        state = runner.state
        state.reserve(view.slots_needed(1, drafter.max_depth + 1, drafter.num_nodes))
        state.load(rows, num_left)
        del rows
        while view.most_left:
            num_steps = min(host_sync_interval, view.most_left)
            state.reserve(view.slots_needed(num_steps, drafter.max_depth + 1, drafter.num_nodes))
            drafts = pausing is None or pausing.drafts
            setup_seconds = runner.run(num_steps, drafts)
            if not is_medusas_own(drafter):
                raise_violated(drafter, STATIC_DRAFT_RULES, state.violations)
            results = view.read(state, num_steps)
            if bool(state.is_broken):
                state.cache.clear_uncommitted()
                state.is_broken.fill_(False)
                setup_seconds += runner.run(1, False)
                results += view.read(state, 1)
            clock.lap_whole(setup_seconds)
            tokens_per_row = 0.0
            for result in results:
                kept = [len(new) - 1 for new in result.tokens if new]
                statistics.record_step(kept, drafter.max_depth if drafts else 0, is_paused=not drafts)
                tokens_per_row += 1 + sum(kept) / len(kept)
            if pausing is not None:
                pausing.record(tokens_per_row, None if setup_seconds else clock.step_seconds, num_steps)
            yield from results
            clock.start()


@dataclass
class HostView:
    """What the host knew of the rows when it last read the results."""

    rows: list[int]
    """Their index in the request."""
    lengths: list[int]
    ends: list[int]
    """The length that each row can reach at most; the one it has, once it has ended."""
    num_answers: int
    """Rows of the request."""

    @classmethod
    def of_rows(cls, rows: list[int], lengths: list[int], num_left: int, num_answers: int) -> HostView:
        """Rows that may all get ``num_left`` tokens more."""
        return cls(rows, lengths, [length + num_left for length in lengths], num_answers)

    @property
    def most_left(self) -> int:
        """Tokens that some row may still get; 0 when all have ended."""
        return max(end - length for end, length in zip(self.ends, self.lengths, strict=True))

    def slots_needed(self, num_steps: int, most_new: int, num_nodes: int) -> int:
        """Cache slots for ``num_steps`` steps of ``num_nodes``, each adding up to ``most_new`` tokens.

        Rounded up so that few sizes occur: nothing is compiled or captured anew for each token.
        """
        before_last = (num_steps - 1) * most_new
        longest = max(
            min(length + before_last, end) for end, length in zip(self.ends, self.lengths, strict=True)
        )
        return rounded_slots(longest - 1 + num_nodes)

    def read(self, state: StaticState, num_steps: int) -> list[StepResult]:
        """What the last ``num_steps`` steps gave, those that gave nothing left out."""
        num_kept, num_accepted = state.num_kept[:num_steps].tolist(), state.num_accepted[:num_steps].tolist()
        new = _tokens_after(state, self.lengths, max(map(sum, zip(*num_kept, strict=True))))
        results = [self._result(new, kept, num_accepted[step]) for step, kept in enumerate(num_kept)]
        for row, has_ended in enumerate(state.finished.tolist()):
            self.ends[row] = self.lengths[row] if has_ended else self.ends[row]
        state.num_unread.zero_()
        return [result for result in results if any(result.tokens)]

    def _result(self, new: list[list[int]], num_kept: list[int], num_accepted: list[int]) -> StepResult:
        """One step: takes each row's tokens from the front of ``new`` and moves the row on."""
        result = StepResult([[] for _ in range(self.num_answers)], [[] for _ in range(self.num_answers)])
        for row, (kept, accepted) in enumerate(zip(num_kept, num_accepted, strict=True)):
            index = self.rows[row]
            result.tokens[index], new[row] = new[row][:kept], new[row][kept:]
            result.depths[index] = depths_of(accepted)[:kept]
            self.lengths[row] += kept
        return result


def rounded_slots(num_slots: int) -> int:
    """The least multiple of :data:`SLOTS` that is enough, of :data:`MANY_SLOTS` beyond that."""
    multiple = SLOTS if num_slots <= MANY_SLOTS else MANY_SLOTS
    return -(-num_slots // multiple) * multiple


def _tokens_after(state: StaticState, lengths: list[int], width: int) -> list[list[int]]:
    """The ``width`` columns of each row of ``state.rows.tokens`` that begin at its length."""
    tokens = state.rows.tokens
    columns = tokens.new_tensor(lengths)[:, None] + torch.arange(width, device=tokens.device)
    return tokens.gather(1, columns.clamp(max=tokens.shape[1] - 1)).tolist()
