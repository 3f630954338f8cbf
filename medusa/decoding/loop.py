"""The decode loop: draft, verify, accept, commit.

Plain decoding is this loop with a tree of one node. Rows of a batch advance by as many tokens as
each accepts, and leave the batch when they finish. This module knows nothing of prompts as text,
generation configurations or files; :class:`medusa.MedusaModel` prepares the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance, accept_equal, accepted_up_to
from medusa.acceptance.noise import verification_noise
from medusa.acceptance.protocol import DraftKind
from medusa.acceptance.rules import SampledDraft
from medusa.acceptance.sampling import NodePaths, choose, process_node_logits
from medusa.acceptance.typical import accept_typical
from medusa.base.causal_lm import CausalLM, new_cache, prefill, verify, vocab_size
from medusa.decoding.in_step import accept_in_step
from medusa.decoding.pausing import Pausing
from medusa.decoding.state import DecodeRequest, DecodeState
from medusa.decoding.statistics import DecodingStatistics, PhaseClock
from medusa.drafters.plain import PlainDrafter
from medusa.drafters.protocol import Draft, DraftContext, Drafter
from medusa.drafters.validation import DraftValidator
from medusa.trees.candidate_tree import TreeTopology


@dataclass(frozen=True)
class StepResult:
    """What one forward pass gave, for every row of the request; finished rows have empty lists."""

    tokens: list[list[int]]
    depths: list[list[int]]
    """The depth of the guess behind each token; 0 for the base model's own."""
    is_first: bool = False
    """The prefill, which gives each row its first token."""


@torch.no_grad()
def decode(
    base: CausalLM,
    drafter: Drafter,
    request: DecodeRequest,
    statistics: DecodingStatistics | None = None,
    pausing: Pausing | None = None,
    compiled_verify: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Iterator[StepResult]:
    """Decode ``request``, one :class:`StepResult` per forward pass; ``statistics`` is filled as it goes.

    ``pausing`` decides which steps draft; without, every one. Only an exact request has the same text then.
    ``compiled_verify`` runs trees in the place of :func:`medusa.base.causal_lm.verify`: that of a pass that
    was compiled for ``base`` (:mod:`medusa.engine.compiled`).
    """
    statistics = DecodingStatistics() if statistics is None else statistics
    answers: list[list[int]] = [[] for _ in range(len(request.lengths))]
    clock, validator = PhaseClock(statistics), DraftValidator(drafter, vocab_size(base))
    resting = PlainDrafter() if pausing is None else pausing.resting
    resting.begin(len(answers))

    state, first = begin(base, drafter, request)
    clock.prefill_done(num_rows=len(answers))
    yield finish_step(
        state, (drafter, resting), answers, [[token] for token in first], [[0]] * len(first), True
    )

    while state.rows:
        clock.start()
        guessing = drafter if pausing is None else pausing.chosen(drafter)
        drafts = guessing is drafter
        context = draft_context(state, guessing, base)
        draft = guessing.draft(context)
        if drafts:
            validator.check(draft, context)
        clock.lap("draft")
        run = compiled_verify or verify
        hidden, logits = run(base, draft.tokens, draft.topology, state.cache, layers=drafter.reads_layers)
        clock.lap("verify")
        acceptance = acceptance_of(state, draft, logits, context.noise)
        new_tokens, depths = _emitted(acceptance, draft)
        clock.lap("accept")
        state.commit(acceptance, hidden, draft.topology.is_chain)
        result = finish_step(state, (drafter, resting), answers, new_tokens, depths, False)
        clock.lap("commit")
        kept = [len(new) - 1 for new in result.tokens if new]
        depth = draft.topology.max_depth
        statistics.record_step(kept, depth, is_paused=depth == 0 and not drafts)
        if pausing is not None:
            rested = depth > 0 and not drafts
            pausing.record(1 + sum(kept) / len(kept), clock.step_seconds, rested=rested)
        yield result


def begin(base: CausalLM, drafter: Drafter, request: DecodeRequest) -> tuple[DecodeState, list[int]]:
    """Prefill; the state to go on from and each row's first token."""
    drafter.begin(len(request.lengths))
    cache = new_cache(base, len(request.lengths))
    hidden, logits = prefill(base, request.tokens, request.lengths, cache, layers=drafter.reads_layers)
    last = request.lengths[:, None] - 1
    state = DecodeState(
        rows=list(range(len(request.lengths))),
        tokens=request.tokens,
        lengths=request.lengths,
        hidden=hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[2])).squeeze(1),
        cache=cache,
        request=request,
        features=hidden if drafter.needs_features else None,
        callers_batch=request.callers_batch() if request.in_step else None,
        sampled=_sampled_kind(drafter, request),
    )
    # The last prompt token is the only node of a tree, and the first token is chosen after it.
    lone = Draft(request.tokens.gather(1, last), TreeTopology.chain(1, last.device))
    noise = state.noise(1, logits.shape[-1])
    return state, _accept_chosen(state, lone, logits[:, None], noise).next_token.tolist()


def _sampled_kind(drafter: Drafter, request: DecodeRequest) -> DraftKind | None:
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
        temperature=state.request.temperature,
        features=state.features,
        sampled=state.sampled,
        seeds=state.request.seeds,
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
    if state.request.acceptance == "typical":
        return accept_typical(draft.tokens, chosen, scores, draft.topology)
    return accept_equal(draft.tokens, chosen, draft.topology)


def _accept_sampled(state: DecodeState, draft: Draft, logits: Tensor) -> Acceptance:
    """Which candidates a rule for sampled drafts accepts, with noise of its own."""
    scores = _scores(state, draft, logits)
    rule, seeds = state.request.rule, state.request.seeds
    assert rule is not None and seeds is not None and draft.proposal is not None
    sampled = SampledDraft(draft.tokens, draft.topology, scores.softmax(-1), draft.proposal)
    noise = verification_noise(seeds, state.lengths - 1, draft.topology.num_nodes, scores.shape[-1])
    verdict = rule.verify(sampled, noise, state.rule_state)
    state.rule_state = verdict.state
    return accepted_up_to(verdict.best, verdict.next_token, draft.topology)


def _scores(state: DecodeState, draft: Draft, logits: Tensor) -> Tensor:
    """Logits (B, N, V) after every processor; untouched when there is none."""
    request = state.request
    if not request.processors:
        return logits.float()
    paths = NodePaths(
        prefix=state.tokens,
        prefix_lengths=state.lengths - 1,
        padding=request.padding,
        tokens=draft.tokens,
        topology=draft.topology,
    )
    return process_node_logits(logits, request.processors, paths)


def _emitted(acceptance: Acceptance, draft: Draft) -> tuple[list[list[int]], list[list[int]]]:
    """Each row's new tokens and the depth of the guess behind each."""
    counts = acceptance.num_accepted.tolist()
    tokens = acceptance.tokens(draft.tokens).tolist()
    new_tokens = [row[: count + 1] for row, count in zip(tokens, counts, strict=True)]
    return new_tokens, [depths_of(count) for count in counts]


def depths_of(num_accepted: int) -> list[int]:
    """The depth of the guess behind each token of a step that accepted so many; the last is no guess."""
    return [*range(1, num_accepted + 1), 0]


def finish_step(
    state: DecodeState,
    drafters: Sequence[Drafter],
    answers: list[list[int]],
    new_tokens: list[list[int]],
    depths: list[list[int]],
    is_first: bool,
) -> StepResult:
    """Cut each row at its end, record what is left, and drop finished rows."""
    result = StepResult([[] for _ in answers], [[] for _ in answers], is_first)
    running = []
    ended = [
        state.num_until_end(row, len(answers[state.rows[row]]), new) for row, new in enumerate(new_tokens)
    ]
    state.append(new_tokens)
    for row, (num_kept, is_finished) in enumerate(ended):
        index = state.rows[row]
        result.tokens[index], result.depths[index] = new_tokens[row][:num_kept], depths[row][:num_kept]
        answers[index].extend(result.tokens[index])
        if not is_finished:
            running.append(row)
    if len(running) < len(state.rows):
        state.keep_rows(running)
        for drafter in drafters:
            drafter.keep_rows(torch.tensor(running, dtype=torch.long, device=state.lengths.device))
    return result
