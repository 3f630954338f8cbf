"""The rows of one request in static steps: the host's part, and which requests such steps can decode.

The host starts several steps, and reads their results in one copy. The steps are in
:mod:`medusa.decoding.static`, their capture as CUDA graphs in :mod:`medusa.decoding.cuda_graphs`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from medusa.acceptance.sampling import PATH_FREE_PROCESSORS
from medusa.base.causal_lm import CausalLM, lm_head_device
from medusa.decoding.adaptive import AdaptiveDrafting
from medusa.decoding.cuda_graphs import KeptRunners, StaticRunner, settings_of
from medusa.decoding.state import DecodeRequest, DecodeState, Row
from medusa.decoding.static import STATIC_DRAFT_RULES, StaticState
from medusa.decoding.statistics import PhaseClock
from medusa.decoding.step import BurstRoom, RowOutput, StepBurst, StepOutput, depths_of
from medusa.drafters.protocol import Drafter, StaticDrafter, is_builtin, not_capturable, raise_violated
from medusa.options import StepKind

HOST_SYNC_INTERVALS = {"cpu": 1}
"""Steps after which the host reads the results, by kind of device: on a CPU reading costs nothing."""
DEFAULT_HOST_SYNC_INTERVAL = 8
"""On other devices. When the last row ends, half of these steps have run in vain, on average."""
SLOTS, MANY_SLOTS = 256, 1024
"""A cache is read in whole multiples of the first; beyond the second, in multiples of that."""


class StaticRows:
    """The rows of one request, in steps of fixed shape.

    The host reads the results every :attr:`interval` steps. With ``captured``, the steps are CUDA graphs,
    whose runners are kept there for the calls to come.
    """

    def __init__(
        self, base: CausalLM, drafter: StaticDrafter, step: StepKind, captured: KeptRunners | None = None
    ):
        self.step = step
        self.interval = sync_interval(base)
        self.base = base
        self.drafter = drafter
        self._captured = captured
        self._runner: StaticRunner | None = None
        self._key: Hashable = None
        self._lengths: list[int] = []  # of the rows, when the host last read them
        self._ends: list[int] = []  # the largest length of each row; its own length once it has ended

    def advance(
        self,
        state: DecodeState,
        drafter: Drafter,
        clock: PhaseClock,
        adaptive: AdaptiveDrafting | None,
        room: BurstRoom,
    ) -> StepBurst:
        """The next steps, drafted by this object's own drafter, or by nobody where ``drafter`` is another.

        ``state`` is read only at the first call, which takes over its keys and values.
        """
        burst = self._burst(state, drafts=drafter is self.drafter)
        clock.lap_whole(burst.setup_seconds)
        return burst

    def _burst(self, rows: DecodeState, drafts: bool) -> StepBurst:
        runner = self._runner or self._begin(rows)
        state = runner.state
        num_steps = min(self.interval, self._most_left)
        state.reserve(self._slots_needed(num_steps))
        seconds = runner.run_steps(num_steps, drafts)
        if not is_builtin(self.drafter):
            raise_violated(self.drafter, STATIC_DRAFT_RULES, state.violations)
        outputs, not_finite = self._read(state, num_steps, drafts)
        if not_finite:
            state.cache.clear_uncommitted()
            state.not_finite.fill_(False)
            seconds += runner.run_steps(1, False)
            outputs += self._read(state, 1, False)[0]
        return StepBurst(outputs, num_steps, seconds)

    def kind_for(self, rows: list[Row]) -> StepKind:
        """The same for all."""
        return self.step

    @property
    def keeps_ended_rows(self) -> bool:
        """Whether rows decode: from here on all of them stay, though some have ended."""
        return self._runner is not None

    def close(self) -> None:
        """Give the runner back."""
        if self._captured is not None and self._runner is not None:
            self._captured.keep(self._key, self._runner)

    def _begin(self, rows: DecodeState) -> StaticRunner:
        kept = self._captured
        self._key = len(rows.rows), self.drafter.static_key, self.interval, settings_of(self.base, rows)
        runner = None if kept is None else kept.take(self._key)
        if runner is None:
            runner = StaticRunner(self.base, self.drafter, rows, self.interval, captures=kept is not None)
        if kept is not None:
            kept.make_room(self.base.device)  # before this one grows
        self._runner = runner
        num_left = rows.request.max_new_tokens - 1
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
        results = read_results(state, num_steps, self.drafter if drafts else None)
        for index, (num_new, has_ended) in enumerate(zip(results.num_new, results.has_ended, strict=True)):
            self._lengths[index] += num_new
            if has_ended:
                self._ends[index] = self._lengths[index]
        return results.outputs, results.not_finite


@dataclass(frozen=True)
class BurstResults:
    """The results of some steps, on the host."""

    outputs: list[StepOutput]
    """One for each step in which some row got a token."""
    num_new: list[int]
    """Tokens that each row got."""
    has_ended: list[bool]
    has_failed: list[bool]
    """Rows whose next token would have been chosen by a NaN score."""
    not_finite: bool
    """Whether the base was not finite on a node of some row, which has not changed since."""


def read_results(state: StaticState, num_steps: int, drafter: StaticDrafter | None) -> BurstResults:
    """The results of the last ``num_steps`` steps of the rows of ``state``, which ``drafter`` or nobody has
    drafted, in one read."""
    depth = 0 if drafter is None else drafter.max_depth
    num_drafted = 0 if drafter is None else drafter.num_nodes - 1
    numbers = torch.cat(
        [
            state.num_kept[:num_steps].T,  # (B, W)
            state.num_accepted[:num_steps].T,  # (B, W)
            torch.stack([state.finished, state.failed, state.not_finite], dim=1).long(),  # (B, 3)
            _newest_tokens(state, num_steps, depth + 1),  # (B, W * L)
        ],
        dim=1,
    ).tolist()
    state.num_unread.zero_()
    flags = [[*map(bool, columns[2 * num_steps : 2 * num_steps + 3])] for columns in numbers]
    num_rows = len(state.rows.rows)  # the rows after them are not there
    has_ended = [is_finished and not has_failed for is_finished, has_failed, _ in flags[:num_rows]]
    outputs_of_rows = [
        _outputs_of_row(row, columns, num_steps, num_drafted, is_over)
        for row, columns, is_over in zip(state.rows.rows, numbers[:num_rows], has_ended, strict=True)
    ]
    return BurstResults(
        outputs=[
            StepOutput(list(row_outputs), depth, num_drafted)
            for row_outputs in zip(*outputs_of_rows, strict=True)
            if any(output.tokens for output in row_outputs)
        ],
        num_new=[sum(columns[:num_steps]) for columns in numbers[:num_rows]],
        has_ended=has_ended,
        has_failed=[has_failed for _, has_failed, _ in flags[:num_rows]],
        not_finite=any(not_finite for *_, not_finite in flags),
    )


def _outputs_of_row(
    row: Row, columns: list[int], num_steps: int, num_drafted: int, has_ended: bool
) -> list[RowOutput]:
    """The output of each step for ``row``, from its numbers of :func:`read_results`."""
    num_kept = columns[:num_steps]
    num_accepted = columns[num_steps : 2 * num_steps]
    tokens = columns[2 * num_steps + 3 :]
    ends = [*accumulate(num_kept)]
    return [
        RowOutput(
            row,
            tokens[end - kept : end],
            depths_of(accepted)[:kept],
            has_ended and end == ends[-1],
            num_drafted=num_drafted if kept else 0,
        )
        for kept, accepted, end in zip(num_kept, num_accepted, ends, strict=True)
    ]


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


def static_drafter(step: str, drafter: Drafter, request: DecodeRequest) -> StaticDrafter:
    """``drafter``, if steps of fixed shape can decode ``request`` with it.

    Raises:
        ValueError: they cannot; the message names ``step``, the obstacle, and the alternative.
    """
    obstacle = static_obstacle(drafter, request)
    if obstacle is not None:
        problem, alternative = obstacle
        alternatives = f"{alternative}, or step='general'" if alternative else "step='general'"
        raise ValueError(f"step={step!r} cannot work with {problem}; use {alternatives}")
    return cast(StaticDrafter, drafter)


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
    if request.acceptance == "typical" or request.rule is not None:
        return f"acceptance={request.acceptance!r}", "acceptance='exact'"
    kinds = [type(processor) for processor in request.processors]
    reading = [kind.__name__ for kind in kinds if kind not in PATH_FREE_PROCESSORS]
    if reading:
        return (
            f"logits processors that read the tokens before each node on the host: {', '.join(reading)}",
            "",
        )
    if request.references:
        return "prediction or corpus, which are read on the host", ""
    if request.criteria:
        return "stopping criteria (stop_strings are one), which are asked on the host after every token", ""
    return None
