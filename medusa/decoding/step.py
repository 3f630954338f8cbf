"""One step of the decode loop: draft, verify, accept, commit.

:func:`decode_step` is the general step, :func:`prefill_request` the first token of each row. Plain decoding
is this step with a tree of one node. Each row of a batch advances by its own number of accepted tokens. Which
rows take part is decided in :mod:`medusa.decoding.scheduler`, how a pass is run in
:mod:`medusa.decoding.runners`, which nodes are accepted in :mod:`medusa.decoding.accept`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance
from medusa.acceptance.protocol import DraftKind
from medusa.acceptance.sampling import TokenLogprobs, token_logprobs
from medusa.base.cache import TreeCache
from medusa.decoding.accept import RowsFailed, accept
from medusa.decoding.adaptive import AdaptiveDrafting
from medusa.decoding.runners import Runner, Verified
from medusa.decoding.state import DecodeRequest, DecodeState, Row
from medusa.decoding.statistics import PhaseClock
from medusa.drafters.protocol import Draft, DraftContext, Drafter, DraftValidator
from medusa.hardware import read_columns
from medusa.options import StepKind
from medusa.trees.candidate_tree import TreeTopology


@dataclass(frozen=True)
class RowOutput:
    """The output of a forward pass for one row, cut where the row ends; no tokens if it has failed."""

    row: Row
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """The depth at which each token was drafted; 0 for the base model's own."""
    has_ended: bool = True
    logprobs: list[TokenLogprobs] | None = None
    """One for each token, if the request asked for them."""
    drafted: list[int] = field(default_factory=list)
    """The depth of each verified draft token, accepted or not; empty for static steps, which do not copy it
    to the host."""
    num_drafted: int = 0
    """Verified draft tokens."""

    @property
    def finish_reason(self) -> str | None:
        """The row's, if this is its last output."""
        return self.row.finish_reason if self.has_ended else None


@dataclass(frozen=True)
class StepOutput:
    """The output of one forward pass, for all rows."""

    rows: list[RowOutput]
    max_depth: int
    """The depth of the verified tree."""
    num_drafted: int
    """The number of its nodes without the root."""
    num_nodes: int = 1
    """The nodes that a row's pass read, the root included. Of a pass that was run again, those of the first:
    they are what the step was begun for, and what made it as long as it was."""


@dataclass(frozen=True)
class StepBurst:
    """The outputs of the steps that the host has started at once."""

    outputs: list[StepOutput]
    """Without those in which no row got a token."""
    num_steps: int = 1
    """All steps; a step that was repeated counts once."""
    setup_seconds: float = 0.0
    """The time that capturing took."""
    failed: list[Row] = field(default_factory=list)
    """Rows whose next token would have been chosen by a NaN score."""


class BurstRoom(Protocol):
    """The limits of the steps of one call, as the scheduler knows them."""

    @property
    def slots_of_running(self) -> int:
        """Cache slots that all rows together may have."""

    @property
    def is_awaited(self) -> bool:
        """Whether a prompt waits to be read."""


class Stepper(Protocol):
    """Runs the steps of one batch: :class:`GeneralStepper`, or
    :class:`medusa.decoding.static_stepper.StaticStepper`."""

    interval: int
    """Steps that one call runs at most."""

    def kind_for(self, rows: list[Row]) -> StepKind:
        """The kind of the next steps of ``rows``, by which their drafter is chosen."""

    @property
    def keeps_ended_rows(self) -> bool:
        """Whether the batch cannot shrink now: rows that have ended stay until all have."""

    def advance(
        self,
        state: DecodeState,
        drafter: Drafter,
        clock: PhaseClock,
        adaptive: AdaptiveDrafting | None,
        room: BurstRoom,
    ) -> StepBurst:
        """The next steps of all rows of ``state``, drafted by ``drafter``, within ``room``."""

    def close(self) -> None:
        """No step follows."""


class GeneralStepper:
    """Steps one at a time, as :func:`decode_step`."""

    keeps_ended_rows = False
    interval = 1

    def __init__(self, runner: Runner, step: StepKind):
        self.runner = runner
        self.step = step
        """Their kind: general, or compiled."""
        self._validator = DraftValidator(runner.profile.vocab_size)

    def advance(
        self,
        state: DecodeState,
        drafter: Drafter,
        clock: PhaseClock,
        adaptive: AdaptiveDrafting | None,
        room: BurstRoom,
    ) -> StepBurst:
        """One step."""
        return StepBurst([decode_step(self.runner, drafter, state, clock, self._validator, adaptive)])

    def kind_for(self, rows: list[Row]) -> StepKind:
        """The same for all."""
        return self.step

    def close(self) -> None:
        """Nothing is kept."""


def decode_step(
    runner: Runner,
    drafter: Drafter,
    state: DecodeState,
    clock: PhaseClock,
    validator: DraftValidator,
    adaptive: AdaptiveDrafting | None = None,
) -> StepOutput:
    """One step of all rows of ``state``: draft, verify, accept, commit. Rows that end stay in ``state``.

    ``adaptive`` tells the drafter how likely a node must be, and decides how many nodes of a draft with
    ``path_logprob`` are verified.
    """
    # 1. Draft: a tree below each row's root token, which is the base's own choice and always right.
    context = draft_context(
        state, runner.profile.vocab_size, 0.0 if adaptive is None else adaptive.min_accept_prob
    )
    draft = drafter.draft(context)
    validator.check(drafter, draft, context)
    draft = _worth_verifying(draft, adaptive)
    clock.lap("draft")
    # 2. Verify: one forward pass over all nodes of all rows.
    verified = runner.verify(draft, state.cache)
    num_nodes = verified.draft.topology.num_nodes
    if state.lockstep_batch is not None:  # to accept is to call the caller's processors: it is done once
        verified = runner.finite(state, verified)
    clock.lap("verify")
    # 3. Accept: a path from the root, by the request's rule. By default its tokens are the base's own choice.
    while True:
        acceptance = accept(state, verified.draft, verified.logits, context.noise)
        outcome = _read(verified, acceptance)
        again = runner.verify_again(state, verified, outcome.is_finite)
        if again is None:
            break
        verified = again
    output = _output(state, verified, acceptance, outcome, num_nodes)
    clock.lap("accept")
    # 4. Commit: the cache keeps the entries of the accepted path up to the row's end, the text its tokens.
    for path, row in zip(outcome.paths, output.rows, strict=True):
        del path[len(row.tokens) :]
    state.commit(acceptance, verified.hidden, verified.draft.topology.is_chain, outcome.paths)
    _append(state, output, verified, acceptance, outcome)
    clock.lap("commit")
    return output


def prefill_request(
    runner: Runner,
    request: DecodeRequest,
    prefix: TreeCache,
    rows: list[Row],
    *,
    refuses_nan: bool = False,
) -> tuple[DecodeState, StepOutput]:
    """Prefill what ``prefix`` lacks of the prompts, and choose each row's next token: the decode state with
    this token as root, and the output with it.

    ``request`` is that of the ``rows``, with the answers so far appended to its prompts. ``refuses_nan`` is
    :attr:`medusa.decoding.state.DecodeState.refuses_nan`.
    """
    known = [len(prompt) for prompt in request.prompts]
    hidden, logits = runner.prefill(request.tokens, request.lengths, prefix, known=known)
    state = DecodeState(
        rows=rows,
        tokens=request.tokens,
        lengths=request.lengths,
        known=(request.lengths, known),
        hidden=hidden,
        cache=prefix,
        seeds=request.seeds,
        refuses_nan=refuses_nan,
        lockstep_batch=request.lockstep_batch() if request.in_lockstep else None,
    )
    # A step without guesses, whose root is the last prompt token: it chooses the first new token.
    last_token = request.tokens.gather(1, request.lengths[:, None] - 1)
    draft = Draft(last_token, TreeTopology.chain(1, last_token.device))
    verified = Verified(draft, hidden[:, None], logits[:, None])
    acceptance = accept(state, draft, verified.logits, state.noise(logits.shape[-1]))
    outcome = _read(verified, acceptance)
    output = _output(state, verified, acceptance, outcome)
    _append(state, output, verified, acceptance, outcome)
    return state, output


def sampled_kind(drafter: Drafter, request: DecodeRequest, runner: Runner) -> DraftKind | None:
    """How ``drafter`` must draw for the request's rule; None if the rule takes ranked guesses. Raises
    ValueError if it cannot."""
    rule = request.rule
    if rule is None or drafter.max_depth == 0:
        return None
    kind = drafter.sampled_kind(rule.draft_kinds[0])
    rule.require(kind, drafter.context_only)
    return kind


def draft_context(state: DecodeState, vocab_size: int, min_accept_prob: float = 0.0) -> DraftContext:
    """The input of a drafter. It has the noise that will choose the tokens, unless the rule forbids that."""
    return DraftContext(
        root=state.tokens.gather(1, state.lengths[:, None] - 1).squeeze(1),
        hidden=state.hidden,
        tokens=state.tokens,
        lengths=state.lengths,
        cache=state.cache,
        noise=None if state.sampled else state.noise(vocab_size),
        temperature=state.temperature,
        features=state.cache.features,
        sampled=state.sampled,
        seeds=state.seeds,
        processors=state.request.processors,
        references=state.references,
        min_accept_prob=min_accept_prob,
        vocab_size=vocab_size,
    )


def _worth_verifying(draft: Draft, adaptive: AdaptiveDrafting | None) -> Draft:
    """The first nodes of ``draft``, as many as ``adaptive`` finds worth their time; by default all but the
    optional ones. A draft that says nothing about its nodes is verified whole."""
    if draft.path_logprob is None:
        return draft
    num_nodes = draft.topology.num_nodes - draft.num_optional_nodes
    if adaptive is not None:
        num_nodes = adaptive.num_nodes(draft.path_logprob, num_nodes)
    return draft.first(num_nodes)


@dataclass(frozen=True)
class _Outcome:
    """The values of a step that the host reads, for each row."""

    tokens: list[list[int]]
    """New tokens."""
    paths: list[list[int]]
    """The accepted nodes, the root first."""
    depths: list[list[int]]
    """The depth of each draft node but the root."""
    nan_rows: list[int]
    """Rows for which a token was chosen by a NaN score."""
    is_finite: bool
    """Whether all hidden states are finite."""


def _read(verified: Verified, acceptance: Acceptance) -> _Outcome:
    """The outcome, in one copy from the device: the host waits for it once."""
    draft = verified.draft
    num_rows = len(draft.tokens)
    chose_nan = acceptance.chose_nan
    if chose_nan is None:
        chose_nan = torch.zeros_like(acceptance.num_accepted)
    parts = read_columns(
        {
            "num_accepted": acceptance.num_accepted[:, None],  # (B, 1)
            "path": acceptance.path,  # (B, L)
            "tokens": acceptance.tokens(draft.tokens),  # (B, L)
            "depths": draft.topology.depths[:, 1:].expand(num_rows, -1),  # (B, N - 1)
            "chose_nan": chose_nan[:, None],  # (B, 1)
            "not_finite": verified.rows_not_finite(),  # (B, 1)
        }
    )
    counts = [count + 1 for (count,) in parts["num_accepted"]]
    return _Outcome(
        tokens=[row[:count] for row, count in zip(parts["tokens"], counts, strict=True)],
        paths=[row[:count] for row, count in zip(parts["path"], counts, strict=True)],
        depths=parts["depths"],
        nan_rows=[index for index, (flag,) in enumerate(parts["chose_nan"]) if flag],
        is_finite=not any(flag for (flag,) in parts["not_finite"]),
    )


def _output(
    state: DecodeState, verified: Verified, acceptance: Acceptance, outcome: _Outcome, num_nodes: int = 1
) -> StepOutput:
    """The output of a step, the tokens of each row cut where the row ends; ``num_nodes`` as in it.

    Raises:
        RowsFailed: the tokens of some rows were chosen by NaN scores.
    """
    if outcome.nan_rows:
        failed = [state.rows[row] for row in outcome.nan_rows]
        raise RowsFailed(failed) from nan_logits()
    outputs = []
    for index, row in enumerate(state.rows):
        new = outcome.tokens[index]
        drafted = outcome.depths[index]
        num_kept, has_ended = state.num_until_end(index, new)
        logprobs = _logprobs(row.request, verified.logits[index], outcome.paths[index], new)
        outputs.append(
            RowOutput(
                row=row,
                tokens=new[:num_kept],
                depths=depths_of(len(new) - 1)[:num_kept],
                has_ended=has_ended,
                logprobs=None if logprobs is None else logprobs[:num_kept],
                drafted=drafted,
                num_drafted=len(drafted),
            )
        )
    topology = verified.draft.topology
    return StepOutput(outputs, topology.max_depth, topology.num_nodes - 1, num_nodes)


def nan_logits() -> ValueError:
    """The error of a row whose next token would be chosen by a NaN score."""
    return ValueError("the base model's logits are not numbers (NaN)")


def _logprobs(
    request: DecodeRequest, logits: Tensor, path: list[int], tokens: list[int]
) -> list[TokenLogprobs] | None:
    """The base's log-probabilities of the ``tokens`` of a row, which were chosen along ``path`` from logits
    (N, V); None if its request asks for none."""
    if request.num_logprobs is None:
        return None
    return token_logprobs(logits[path], torch.tensor(tokens, device=logits.device), request.num_logprobs)


def _append(
    state: DecodeState,
    output: StepOutput,
    verified: Verified,
    acceptance: Acceptance,
    outcome: _Outcome,
) -> None:
    """Add the new tokens to the text; they are on the device already, unless a row's end has cut them."""
    new_tokens = [row.tokens for row in output.rows]
    if new_tokens == outcome.tokens:
        on_device = acceptance.tokens(verified.draft.tokens), acceptance.num_accepted + 1
        state.append(new_tokens, on_device)
    else:
        state.append(new_tokens)


def depths_of(num_accepted: int) -> list[int]:
    """The depth at which each token of a step was drafted; the last one is the base's own, with depth 0."""
    return [*range(1, num_accepted + 1), 0]
