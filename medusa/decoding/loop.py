"""The decode loop: draft, verify, accept, commit.

Plain decoding is this loop with a tree of one node. Rows of a batch advance by as many tokens as
each accepts, and leave the batch when they finish. This module knows nothing of prompts as text,
generation configurations or files; :class:`medusa.MedusaModel` prepares the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance, accept_equal, accepted_up_to
from medusa.acceptance.noise import verification_noise
from medusa.acceptance.protocol import DraftKind
from medusa.acceptance.rules import SampledDraft
from medusa.acceptance.sampling import (
    NodePaths,
    TokenLogprobs,
    choose,
    process_node_logits,
    token_logprobs,
)
from medusa.acceptance.typical import accept_typical
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import CausalLM, new_cache, prefill, verify, vocab_size
from medusa.decoding.in_step import accept_in_step
from medusa.decoding.pausing import Pausing
from medusa.decoding.state import DecodeRequest, DecodeState, Prefix
from medusa.decoding.statistics import DecodingStatistics, PhaseClock
from medusa.drafters.plain import PlainDrafter
from medusa.drafters.protocol import Draft, DraftContext, Drafter
from medusa.drafters.validation import DraftValidator
from medusa.engine.compiled import CompiledPass
from medusa.trees.candidate_tree import TreeTopology

Verify = Callable[[CausalLM, Tensor, TreeTopology, TreeCache], tuple[Tensor, Tensor]]
"""Runs a tree, as :func:`medusa.base.causal_lm.verify`, with the layers that it is bound to."""


@dataclass(frozen=True)
class StepResult:
    """What one forward pass gave, for every row of the request; finished rows have empty lists."""

    tokens: list[list[int]]
    depths: list[list[int]]
    """The depth of the guess behind each token; 0 for the base model's own."""
    is_first: bool = False
    """The prefill, which gives each row its first token."""


@dataclass(frozen=True)
class Advance:
    """What one forward pass gave the rows of a state, in their order, cut where a row ends."""

    tokens: list[list[int]]
    depths: list[list[int]]
    """As in :class:`StepResult`."""
    has_ended: list[bool]
    max_depth: int
    """Of the tree that was verified."""
    num_drafted: int
    """Its nodes without the root."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Row -> one entry for each of its tokens, where its request asked for them."""


@torch.inference_mode(False)  # a stream may be continued outside the mode that it was begun in
@torch.no_grad()
def decode(
    base: CausalLM,
    drafter: Drafter,
    request: DecodeRequest,
    statistics: DecodingStatistics | None = None,
    pausing: Pausing | None = None,
    compiled: CompiledPass | None = None,
) -> Iterator[StepResult]:
    """Decode ``request``, one :class:`StepResult` per forward pass; ``statistics`` is filled as it goes.

    ``pausing`` decides which steps draft; without, every one. Only an exact request has the same text then.
    ``compiled`` is a pass that was compiled for ``base`` (:mod:`medusa.engine.compiled`), to be run in the
    place of its modules.
    """
    statistics = DecodingStatistics() if statistics is None else statistics
    num_rows = len(request.lengths)
    clock, validator = PhaseClock(statistics), DraftValidator(drafter, vocab_size(base))
    resting = PlainDrafter() if pausing is None else pausing.resting
    resting.begin(num_rows)

    drafter.begin(num_rows)
    sampled = sampled_kind(drafter, request)
    state, first = begin(base, request, drafter.reads_layers, drafter.needs_features, compiled=compiled)
    state.sampled = sampled
    clock.prefill_done(num_rows=num_rows)
    yield finish_step(state, (drafter, resting), num_rows, first, True)

    while state.rows:
        clock.start()
        guessing = drafter if pausing is None else pausing.chosen(drafter)
        validated = validator if guessing is drafter else None
        run = partial(compiled.verify if compiled else verify, layers=drafter.reads_layers)
        advance = advanced(base, guessing, state, clock, run, validated, pausing)
        record_step(advance, guessing is drafter, statistics, pausing, clock.step_seconds)
        yield finish_step(state, (drafter, resting), num_rows, advance, False)


def advanced(
    base: CausalLM,
    drafter: Drafter,
    state: DecodeState,
    clock: PhaseClock,
    run: Verify,
    validator: DraftValidator | None = None,
    pausing: Pausing | None = None,
) -> Advance:
    """One step of all rows of ``state``: draft, verify, accept, commit. Rows that end stay in ``state``.

    ``pausing`` decides how many nodes are verified of a draft that says what they are worth.
    """
    context = draft_context(state, drafter, base)
    draft = drafter.draft(context)
    if validator is not None:
        validator.check(draft, context)
    if pausing is not None and draft.worth is not None:
        draft = draft.first(pausing.num_nodes(draft.worth))
    clock.lap("draft")
    hidden, logits = run(base, draft.tokens, draft.topology, state.cache)
    if not bool(hidden.isfinite().all()):  # one such node spreads through masked slots to all others
        draft = _without_guesses(state, draft)
        hidden, logits = run(base, draft.tokens, draft.topology, state.cache)
    clock.lap("verify")
    acceptance = acceptance_of(state, draft, logits, context.noise)
    counts = acceptance.num_accepted.tolist()
    emitted = acceptance.tokens(draft.tokens).tolist()
    tokens = [row[: count + 1] for row, count in zip(emitted, counts, strict=True)]
    logprobs = _logprobs(state, logits, acceptance.path, tokens)
    depths = [depths_of(count) for count in counts]
    advance = _cut(state, tokens, depths, draft, logprobs)
    clock.lap("accept")
    state.commit(acceptance, hidden, draft.topology.is_chain)
    state.append(advance.tokens)
    clock.lap("commit")
    return advance


def _without_guesses(state: DecodeState, draft: Draft) -> Draft:
    """The root of ``draft`` alone, and a cache in which a pass over it meets nothing but numbers."""
    rule = state.request.rule
    if state.sampled is not None and rule is not None and rule.context_only_proposal:
        raise ValueError(
            f"the base is not finite (NaN or infinite) on a guess, and acceptance={rule.name!r}, which "
            "carries drafts of one length from step to step, cannot leave one out; use another rule"
        )
    state.cache.clear_uncommitted()
    return draft.root_alone()


def begin(
    base: CausalLM,
    request: DecodeRequest,
    layers: Sequence[int] = (),
    needs_features: bool = False,
    before: Prefix | None = None,
    num_before: int = 0,
    refuses_nan: bool = False,
    compiled: CompiledPass | None = None,
) -> tuple[DecodeState, Advance]:
    """Prefill: the state to go on from, which has each row's first token, and that token.

    ``layers`` and ``needs_features`` are those of who will draft, ``refuses_nan`` is of the state. ``before``
    holds what has been read of the prompt already. The last ``num_before`` tokens of the prompt are of the
    answer, which then goes on. ``compiled`` is that of :func:`decode`.
    """
    before = Prefix(new_cache(base, len(request.lengths))) if before is None else before
    cache, num_read = before.cache, before.cache.lengths
    fill = compiled.prefill if compiled else prefill
    hidden, logits = fill(base, request.tokens, request.lengths, cache, layers=layers)
    last = request.lengths[:, None] - 1
    newest = (last - num_read[:, None])[..., None].expand(-1, -1, hidden.shape[2])
    state = DecodeState(
        rows=list(range(len(request.lengths))),
        tokens=request.tokens,
        lengths=request.lengths,
        hidden=hidden.gather(1, newest).squeeze(1),
        cache=cache,
        requests=[request] * len(request.lengths),
        seeds=request.seeds,
        padding=request.padding,
        num_new=[num_before] * len(request.lengths),
        features=before.features_with(hidden) if needs_features else None,
        refuses_nan=refuses_nan,
        callers_batch=request.callers_batch() if request.in_step else None,
    )
    # The last prompt token is the only node of a tree, and the first token is chosen after it.
    lone = Draft(request.tokens.gather(1, last), TreeTopology.chain(1, last.device))
    noise = state.noise(1, logits.shape[-1])
    acceptance = _accept_chosen(state, lone, logits[:, None], noise)
    first = [[token] for token in acceptance.next_token.tolist()]
    logprobs = _logprobs(state, logits[:, None], acceptance.path, first)
    advance = _cut(state, first, [[0] for _ in first], lone, logprobs)
    state.append(advance.tokens)
    return state, advance


def record_step(
    advance: Advance,
    drafts: bool,
    statistics: DecodingStatistics,
    pausing: Pausing | None,
    seconds: float | None,
) -> None:
    """Count a step, and tell ``pausing`` of it; ``drafts`` unless someone stood in for the drafter.

    ``seconds`` as for :meth:`medusa.decoding.pausing.Pausing.record`.
    """
    kept = [len(new) - 1 for new in advance.tokens if new]
    depth = advance.max_depth
    statistics.record_step(kept, depth, is_paused=depth == 0 and not drafts)
    if pausing is not None:
        rested = depth > 0 and not drafts
        tokens_per_row = 1 + sum(kept) / len(kept)
        pausing.record(tokens_per_row, seconds, rested=rested, num_nodes=1 + advance.num_drafted)


def sampled_kind(drafter: Drafter, request: DecodeRequest) -> DraftKind | None:
    """How ``drafter`` must draw for the request's rule, refused if it cannot; None when it may rank."""
    rule = request.rule
    if rule is None or drafter.max_depth == 0:
        return None
    kind = drafter.sampled_kind(rule.draft_kinds[0])
    rule.require(kind, drafter.context_only)
    return kind


def draft_context(state: DecodeState, drafter: Drafter, base: CausalLM) -> DraftContext:
    """What ``drafter`` is told, with the noise (B, L, V) that chooses after every depth."""
    return DraftContext(
        root=state.tokens.gather(1, state.lengths[:, None] - 1).squeeze(1),
        hidden=state.hidden,
        tokens=state.tokens,
        lengths=state.lengths,
        cache=state.cache,
        noise=None if state.sampled else state.noise(drafter.max_depth + 1, vocab_size(base)),
        temperature=state.temperature,
        features=state.features,
        sampled=state.sampled,
        seeds=state.seeds,
        processors=state.request.processors,
    )


def acceptance_of(state: DecodeState, draft: Draft, logits: Tensor, noise: Tensor | None) -> Acceptance:
    """Which candidates the base agrees with."""
    if state.sampled is not None:
        return _accept_sampled(state, draft, logits)
    return _accept_chosen(state, draft, logits, noise)


def _accept_chosen(state: DecodeState, draft: Draft, logits: Tensor, noise: Tensor | None) -> Acceptance:
    """Which candidates are what the base chooses, with ``noise`` (B, L, V) by depth, or finds plausible."""
    if state.callers_batch is not None:
        return accept_in_step(state.callers_batch, state.rows, draft.tokens, draft.topology, logits, noise)
    scores = _scores(state, draft, logits)
    if noise is not None:
        depths = draft.topology.depths.expand(len(noise), -1)
        noise = noise.gather(1, depths[..., None].expand(-1, -1, noise.shape[2]))  # (B, N, V)
    chosen = choose(scores, noise)
    if state.refuses_nan:
        is_nan = scores.gather(2, chosen[..., None]).isnan().flatten(1).any(1).tolist()
        if any(is_nan):
            rows = [index for index, broken in zip(state.rows, is_nan, strict=True) if broken]
            raise RowsFailed(rows) from ValueError("the base model's logits are not numbers (NaN)")
    if state.request.acceptance == "typical":
        return accept_typical(draft.tokens, chosen, scores, draft.topology)
    return accept_equal(draft.tokens, chosen, draft.topology)


def _accept_sampled(state: DecodeState, draft: Draft, logits: Tensor) -> Acceptance:
    """Which candidates a rule for sampled drafts accepts, with noise of its own."""
    scores = _scores(state, draft, logits)
    rule, seeds = state.request.rule, state.seeds
    assert rule is not None and seeds is not None and draft.proposal is not None
    sampled = SampledDraft(draft.tokens, draft.topology, scores.softmax(-1), draft.proposal)
    noise = verification_noise(seeds, state.lengths - 1, draft.topology.num_nodes, scores.shape[-1])
    verdict = rule.verify(sampled, noise, state.rule_state)
    state.rule_state = verdict.state
    return accepted_up_to(verdict.best, verdict.next_token, draft.topology)


def _scores(state: DecodeState, draft: Draft, logits: Tensor) -> Tensor:
    """Logits (B, N, V) after every processor; untouched when there is none."""
    groups = state.rows_by_processors()
    if not any(processors for processors, _ in groups):
        return logits.float()
    paths = NodePaths(
        prefix=state.tokens,
        prefix_lengths=state.lengths - 1,
        padding=state.padding,
        tokens=draft.tokens,
        topology=draft.topology,
    )
    if len(groups) == 1:
        return process_node_logits(logits, groups[0][0], paths)
    scores = logits.to(torch.float32, copy=True)
    for processors, rows in groups:
        if processors:
            index = torch.tensor(rows, device=scores.device)
            try:
                scores[index] = process_node_logits(logits[index], processors, paths.of_rows(index))
            except Exception as error:
                raise RowsFailed([state.rows[row] for row in rows]) from error
    return scores


class RowsFailed(RuntimeError):
    """A step failed because of ``rows``, named as the state names them; nothing was committed."""

    def __init__(self, rows: list[int]):
        super().__init__(f"rows {rows} made a step fail")
        self.rows = rows


def _cut(
    state: DecodeState,
    tokens: list[list[int]],
    depths: list[list[int]],
    draft: Draft,
    logprobs: dict[int, list[TokenLogprobs]],
) -> Advance:
    """What a step gave each row, cut where the row ends."""
    ends = [state.num_until_end(row, new) for row, new in enumerate(tokens)]
    return Advance(
        [new[:kept] for new, (kept, _) in zip(tokens, ends, strict=True)],
        [depth[:kept] for depth, (kept, _) in zip(depths, ends, strict=True)],
        [has_ended for _, has_ended in ends],
        draft.topology.max_depth,
        draft.topology.num_nodes - 1,
        {row: each[: ends[row][0]] for row, each in logprobs.items()},
    )


def _logprobs(
    state: DecodeState, logits: Tensor, path: Tensor, tokens: list[list[int]]
) -> dict[int, list[TokenLogprobs]]:
    """What the base alone thinks of each row's ``tokens``, chosen along ``path`` (B, L) long from logits
    (B, N, V), where the row's request wants to know."""
    found = {}
    for row, request in enumerate(state.requests):
        if request.num_logprobs is not None:
            new = logits.new_tensor(tokens[row], dtype=torch.long)
            found[row] = token_logprobs(logits[row, path[row, : len(new)]], new, request.num_logprobs)
    return found


def depths_of(num_accepted: int) -> list[int]:
    """The depth of the guess behind each token of a step that accepted so many; the last is no guess."""
    return [*range(1, num_accepted + 1), 0]


def finish_step(
    state: DecodeState,
    drafters: Sequence[Drafter],
    num_answers: int,
    advance: Advance,
    is_first: bool,
) -> StepResult:
    """What a step gave each of the ``num_answers`` rows of the request; rows that have ended are dropped."""
    result = StepResult([[] for _ in range(num_answers)], [[] for _ in range(num_answers)], is_first)
    for index, tokens, depths in zip(state.rows, advance.tokens, advance.depths, strict=True):
        result.tokens[index], result.depths[index] = tokens, depths
    running = [row for row, has_ended in enumerate(advance.has_ended) if not has_ended]
    if len(running) < len(state.rows):
        state.keep_rows(running)
        for drafter in drafters:
            drafter.keep_rows(torch.tensor(running, dtype=torch.long, device=state.lengths.device))
    return result
