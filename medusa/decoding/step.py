"""One step of the decode loop: draft, verify, accept, commit.

Plain decoding is this step with a tree of one node. Each row of a batch advances by the number of
tokens that it accepts. Who takes part is decided in :mod:`medusa.decoding.batch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from medusa.acceptance.exact import (
    Acceptance,
    accept_by_walking,
    accept_equal,
    accept_in_lockstep,
    accept_typical,
    accepted_up_to,
)
from medusa.acceptance.protocol import DraftKind, SampledDraft, verification_noise
from medusa.acceptance.sampling import (
    NodePaths,
    TokenLogprobs,
    UpcomingNoise,
    choose,
    process_node_logits,
    token_logprobs,
)
from medusa.base.cache import MAX_REPLAY_TOKENS, TreeCache
from medusa.base.causal_lm import CausalLM, prefill, verify, vocab_size
from medusa.base.recurrent import StatefulCache, is_recurrent
from medusa.decoding.adaptive import AdaptiveDrafting
from medusa.decoding.state import DecodeRequest, DecodeState, Row
from medusa.decoding.statistics import PhaseClock
from medusa.drafters.protocol import Draft, DraftContext, Drafter, DraftValidator
from medusa.hardware import multiplies_in_float32
from medusa.trees.candidate_tree import TreeTopology


@dataclass(frozen=True)
class ModelRunner:
    """Runs forward passes of ``base`` (or of an engine's view of it) through ``run``, and also returns the
    hidden states after ``layers`` (:func:`medusa.base.causal_lm.capture_hidden_states`)."""

    base: CausalLM
    layers: tuple[int, ...] = ()
    run: Callable[..., tuple[Tensor, Tensor]] = verify
    """As :func:`medusa.base.causal_lm.verify`."""
    keeps_features: bool = False
    """Whether the text's hidden states are kept in its cache, for drafters that read them."""

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: TreeCache,
        chunk: int = 512,
        known: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.prefill`."""
        given = tokens, lengths, cache, chunk, self.layers, self.run, self.keeps_features
        return prefill(self.base, *given, known)

    def verify(self, tokens: Tensor, topology: TreeTopology, cache: TreeCache) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.verify`."""
        hidden, logits = self.run(self.base, tokens, topology, cache, layers=self.layers)
        if self.keeps_features:
            cache.keep_features(hidden, cache.lengths, cache.longest)
        return hidden, logits


@dataclass(frozen=True)
class RowOutput:
    """The output of a forward pass for one row, cut where the row ends; no tokens where it has failed."""

    row: Row
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """The depth of each token; 0 for the base model's own."""
    has_ended: bool = True
    logprobs: list[TokenLogprobs] | None = None
    """One for each token, where the request asked for them."""
    drafted: list[int] = field(default_factory=list)
    """The depth of each verified draft token; empty for steps of fixed shape, which do not read it back."""

    @property
    def finish_reason(self) -> str | None:
        """The row's own, in its last output."""
        return self.row.finish_reason if self.has_ended else None


@dataclass(frozen=True)
class StepOutput:
    """The output of one forward pass."""

    rows: list[RowOutput]
    max_depth: int
    """The depth of the verified tree."""
    num_drafted: int
    """The number of its nodes without the root."""
    num_replayed: int = 0
    """Largest number of replayed tokens over the rows."""


def decode_step(
    runner: ModelRunner,
    drafter: Drafter,
    state: DecodeState,
    clock: PhaseClock,
    validator: DraftValidator,
    adaptive: AdaptiveDrafting | None = None,
) -> StepOutput:
    """One step of all rows of ``state``: draft, verify, accept, commit. Rows that end stay in ``state``.

    ``adaptive`` decides how many nodes of a draft with ``path_logprob`` are verified.
    """
    num_replay_tokens = state.cache.num_replay_tokens
    context = draft_context(state, runner.base, 0.0 if adaptive is None else adaptive.min_accept_prob)
    draft = drafter.draft(context)
    validator.check(drafter, draft, context)
    if draft.path_logprob is not None:
        whole = draft.topology.num_nodes - draft.num_optional_nodes
        draft = draft.first(whole if adaptive is None else adaptive.num_nodes(draft.path_logprob, whole))
    if num_replay_tokens >= MAX_REPLAY_TOKENS:  # such a pass is committed whole and updates the states
        draft = draft.root_only()
    clock.lap("draft")
    hidden, logits = runner.verify(draft.tokens, draft.topology, state.cache)
    walks = _walks(state, draft, logits)
    # To look at a device is to wait for it, so that is done once, when rows have accepted: unless accepting
    # has other effects, or reads numbers itself.
    is_on_cpu = logits.device.type == "cpu"
    looks_first = is_on_cpu or state.lockstep_batch is not None or bool(state.cache.rows_needing_recheck)
    seen, rule_state = None, state.rule_state
    if looks_first:
        is_broken = bool((hidden * 0).any())
    else:
        acceptance = acceptance_of(state, draft, logits, context.noise)
        seen = _seen(draft, acceptance, hidden)
        is_broken = seen.is_broken
    if is_broken:  # not finite: one such node spreads through masked slots to all others
        draft, state.rule_state = _root_only(state, draft), rule_state
        state.cache.clear_uncommitted()  # a pass over it is to meet nothing but numbers
        hidden, logits = runner.verify(draft.tokens, draft.topology, state.cache)
    clock.lap("verify")
    if is_broken or looks_first:
        acceptance, seen = acceptance_of(state, draft, logits, context.noise, walks), None
    while rows := _rows_near_a_tie(state, draft, logits, context.noise, acceptance):
        draft = draft.root_only()
        num_replay_tokens = max(num_replay_tokens, _read_plainly(runner, state, rows))
        hidden, logits = runner.verify(draft.tokens, draft.topology, state.cache)
        acceptance = acceptance_of(state, draft, logits, context.noise, walks)
        seen = None
    seen = _seen(draft, acceptance) if seen is None else seen
    _check_numbers(state, seen.broken_rows)
    logprobs = _logprobs(state, logits, acceptance.path, seen.tokens)
    output = _cut(state, seen, draft, logprobs, num_replay_tokens)
    clock.lap("accept")
    state.commit(acceptance, hidden, draft.topology.is_chain, seen.paths)
    new = [each.tokens for each in output.rows]
    given = acceptance.tokens(draft.tokens), acceptance.num_accepted + 1
    state.append(new, given if new == seen.tokens else None)
    clock.lap("commit")
    return output


SCORES_AT_ONCE = 2**21
"""Up to this number of scores, taking the best token of all nodes at once is faster than walking down the
path."""


def _walks(state: DecodeState, draft: Draft, logits: Tensor) -> bool:
    """Whether scoring only accepted nodes, one depth after the other, is faster than scoring all nodes."""
    num_nodes = draft.topology.num_nodes
    if logits.device.type != "cpu" or num_nodes == 1:
        return False
    is_dear = state.seeds is not None or any(row.request.processors for row in state.rows)
    return is_dear or len(logits) * num_nodes * logits.shape[2] > SCORES_AT_ONCE


@dataclass(frozen=True)
class _Seen:
    """The values of a step that the host reads."""

    tokens: list[list[int]]
    """New tokens of each row."""
    paths: list[list[int]]
    """The accepted nodes of each row, the root first."""
    depths: list[list[int]]
    """The depth of each draft node but the root, in each row."""
    broken_rows: list[int]
    """Rows for which a token was chosen from scores that are no numbers."""
    is_broken: bool = False
    """The base is not finite on a node."""


def _seen(draft: Draft, acceptance: Acceptance, hidden: Tensor | None = None) -> _Seen:
    """All values that the host needs, in one read; sets :attr:`_Seen.is_broken` if ``hidden`` is passed."""
    num_rows, flags = len(draft.tokens), acceptance.is_broken
    parts = [
        acceptance.num_accepted[:, None],
        acceptance.path,
        acceptance.tokens(draft.tokens),
        draft.topology.depths[:, 1:].expand(num_rows, -1),
        acceptance.num_accepted.new_zeros(num_rows, 1) if flags is None else flags[:, None].long(),
    ]
    if hidden is not None:
        parts.append((hidden * 0).flatten(1).any(dim=1, keepdim=True).long())
    widths, rows = [part.shape[1] for part in parts], torch.cat(parts, dim=1).tolist()
    ends = [*accumulate(widths)]
    counts = [row[0] + 1 for row in rows]
    paths, tokens, depths = ([row[start:end] for row in rows] for start, end in pairwise(ends[:4]))
    return _Seen(
        [row[:count] for row, count in zip(tokens, counts, strict=True)],
        [row[:count] for row, count in zip(paths, counts, strict=True)],
        depths,
        [number for number, row in enumerate(rows) if row[ends[3]]],
        hidden is not None and any(row[-1] for row in rows),
    )


NEAR_TIE = 5e-5
"""Two scores that differ by less than this share of the largest one may change places where a base that keeps
a state reads several tokens at once."""


def _rows_near_a_tie(
    state: DecodeState, draft: Draft, logits: Tensor, noise: UpcomingNoise | None, acceptance: Acceptance
) -> list[int]:
    """Rows where one-token decoding could choose another token, because its rounding differs.

    Only in float32: narrower logits tie all the time. Stateful processors are not called again here.
    """
    is_plain_text = state.sampled is None and state.request.is_exact and state.lockstep_batch is None
    in_float32 = multiplies_in_float32(logits.dtype, logits.device)
    if not is_plain_text or not in_float32 or not state.cache.rows_needing_recheck:
        return []
    scores = _scores(state, draft, logits)
    largest = scores.abs().masked_fill(scores.isinf(), 0).amax(dim=2)
    if noise is not None:
        scores = scores + _by_node(noise, draft.topology, len(scores))
    first, second = scores.topk(2, dim=2).values.unbind(dim=2)
    is_near = (first - second < NEAR_TIE * largest).gather(1, acceptance.path)
    steps = torch.arange(is_near.shape[1], device=is_near.device)
    is_near &= steps <= acceptance.num_accepted[:, None]
    return [row for row in state.cache.rows_needing_recheck if is_near[row].any()]


def _read_plainly(runner: ModelRunner, state: DecodeState, rows: list[int]) -> int:
    """Read the text of ``rows`` again one token at a time, from the last exact checkpoint to the root; the
    largest number of replayed tokens over the rows."""
    assert isinstance(state.cache, StatefulCache)
    most, alone = 0, state.cache.split_rows()
    for row in rows:
        alone[row].restore_checkpoint()
        before_root = state.lengths[row : row + 1] - 1
        if num_replayed := int(before_root - alone[row].lengths):
            runner.prefill(state.tokens[row : row + 1], before_root, alone[row], chunk=1)
            most = max(most, num_replayed)
    state.cache.sync_lengths()
    return most


def _root_only(state: DecodeState, draft: Draft) -> Draft:
    """``draft`` cut to its root, because the base is not finite on a draft token."""
    rule = state.request.rule
    if state.sampled is not None and rule is not None and rule.context_only_proposal:
        raise ValueError(
            f"the base is not finite (NaN or infinite) on a guess, and acceptance={rule.name!r}, which "
            "carries drafts of one length from step to step, cannot leave one out; use another rule"
        )
    return draft.root_only()


def prefill_request(
    runner: ModelRunner,
    request: DecodeRequest,
    prefix: TreeCache,
    rows: list[Row],
    *,
    refuses_nan: bool = False,
) -> tuple[DecodeState, StepOutput]:
    """Prefill: the decode state with each row's next token, and the output with that token.

    ``request`` is that of the ``rows``, its prompts with the answer so far. ``prefix`` holds the part of them
    that is cached already. ``refuses_nan`` is a field of the state.
    """
    known = [len(prompt) for prompt in request.prompts]
    hidden, logits = runner.prefill(request.tokens, request.lengths, prefix, known=known)
    last = request.lengths[:, None] - 1
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
    # The last prompt token is the only node of a tree, and the first token is chosen after it.
    lone = Draft(request.tokens.gather(1, last), TreeTopology.chain(1, last.device))
    noise = state.noise(logits.shape[-1])
    acceptance = acceptance_of(state, lone, logits[:, None], noise)
    seen = _seen(lone, acceptance)
    _check_numbers(state, seen.broken_rows)
    logprobs = _logprobs(state, logits[:, None], acceptance.path, seen.tokens)
    output = _cut(state, seen, lone, logprobs)
    new = [each.tokens for each in output.rows]
    state.append(new, (acceptance.next_token[:, None], torch.ones_like(acceptance.num_accepted)))
    return state, output


def sampled_kind(drafter: Drafter, request: DecodeRequest, base: CausalLM) -> DraftKind | None:
    """How ``drafter`` must draw for the request's rule, refused if it cannot; None when it may rank."""
    rule = request.rule
    if rule is None or drafter.max_depth == 0:
        return None
    kind = drafter.sampled_kind(rule.draft_kinds[0])
    rule.require(kind, drafter.context_only, is_recurrent(base))
    return kind


def draft_context(state: DecodeState, base: CausalLM, min_accept_prob: float = 0.0) -> DraftContext:
    """The context of a draft, with the noise that will choose the token at every depth."""
    return DraftContext(
        root=state.tokens.gather(1, state.lengths[:, None] - 1).squeeze(1),
        hidden=state.hidden,
        tokens=state.tokens,
        lengths=state.lengths,
        cache=state.cache,
        noise=None if state.sampled else state.noise(vocab_size(base)),
        temperature=state.temperature,
        features=state.cache.features,
        sampled=state.sampled,
        seeds=state.seeds,
        processors=state.request.processors,
        references=state.references,
        min_accept_prob=min_accept_prob,
        vocab_size=vocab_size(base),
    )


def acceptance_of(
    state: DecodeState, draft: Draft, logits: Tensor, noise: UpcomingNoise | None, walks: bool = False
) -> Acceptance:
    """The accepted candidates: those that a rule for sampled drafts accepts, that the base chooses itself
    with ``noise`` by depth, or that it finds plausible (typical acceptance).

    With ``walks`` only accepted nodes are scored, one depth after the other: less work, but the host waits
    for the device at each."""
    if state.sampled is not None:
        return _accept_sampled(state, draft, logits)
    if state.lockstep_batch is not None:
        indices = [row.index for row in state.rows]
        return accept_in_lockstep(state.lockstep_batch, indices, draft.tokens, draft.topology, logits, noise)
    if walks and state.request.acceptance != "typical":
        return accept_by_walking(draft.tokens, draft.topology, _choice(state, draft, logits, noise))
    scores = _scores(state, draft, logits)
    chosen = choose(scores, None if noise is None else _by_node(noise, draft.topology, len(scores)))
    if state.request.acceptance == "typical":
        accepted = accept_typical(draft.tokens, chosen, scores, draft.topology)
    else:
        accepted = accept_equal(draft.tokens, chosen, draft.topology)
    if not state.refuses_nan:
        return accepted
    return replace(accepted, is_broken=scores.gather(2, chosen[..., None]).flatten(1).isnan().any(1))


def _choice(
    state: DecodeState, draft: Draft, logits: Tensor, noise: UpcomingNoise | None
) -> Callable[[list[int], list[int], int], list[int]]:
    """The base's choice after nodes, as an argument of :func:`medusa.acceptance.exact.accept_by_walking`."""

    def choose_after(rows: list[int], nodes: list[int], depth: int) -> list[int]:
        scores = _scores(state, draft, logits[rows, nodes][:, None], rows, nodes)[:, 0]
        chosen = choose(scores, None if noise is None else noise.until(depth + 1)[rows, depth])
        if state.refuses_nan:
            is_broken = scores.gather(1, chosen[:, None]).isnan().any(1).tolist()
            _check_numbers(state, [row for row, broken in zip(rows, is_broken, strict=True) if broken])
        return chosen.tolist()

    return choose_after


def _check_numbers(state: DecodeState, broken: list[int]) -> None:
    """Raise RowsFailed where there are ``broken`` rows, whose tokens were chosen from scores that are no
    numbers."""
    if broken:
        failed = [state.rows[row] for row in broken]
        raise RowsFailed(failed) from ValueError("the base model's logits are not numbers (NaN)")


def _by_node(noise: UpcomingNoise, topology: TreeTopology, num_rows: int) -> Tensor:
    """The noise (B, N, V) that chooses after each node."""
    depths, by_depth = topology.depths.expand(num_rows, -1), noise.until(topology.max_depth + 1)
    return by_depth.gather(1, depths[..., None].expand(-1, -1, by_depth.shape[2]))


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


def _scores(
    state: DecodeState,
    draft: Draft,
    logits: Tensor,
    rows: list[int] | None = None,
    nodes: list[int] | None = None,
) -> Tensor:
    """Logits (R, M, V) of ``rows`` after every processor, for one of ``nodes`` in each row, or for all of
    both; untouched when there is no processor."""
    rows = list(range(len(logits))) if rows is None else rows
    groups = state.rows_by_processors(rows)
    if not any(processors for processors, _ in groups):
        return logits.float()
    paths = NodePaths(
        prefix=state.tokens,
        prefix_lengths=state.lengths - 1,
        padding=state.padding,
        tokens=draft.tokens,
        topology=draft.topology,
    )
    at = None if nodes is None else draft.tokens.new_tensor(nodes)[:, None]  # (R, 1)
    if len(groups) == 1 and len(rows) == len(state.rows):
        return process_node_logits(logits, groups[0][0], paths, at)
    scores = logits.to(torch.float32, copy=True)
    for processors, places in groups:
        if processors:
            place, row = (
                torch.tensor(each, device=scores.device)
                for each in (places, [rows[place] for place in places])
            )
            try:
                scores[place] = process_node_logits(
                    logits[place], processors, paths.of_rows(row), None if at is None else at[place]
                )
            except Exception as error:
                raise RowsFailed([state.rows[each] for each in row.tolist()]) from error
    return scores


class RowsFailed(RuntimeError):
    """A step failed because of ``rows``; nothing was committed."""

    def __init__(self, rows: list[Row]):
        super().__init__(f"{len(rows)} rows made a step fail")
        self.rows = rows


def _cut(
    state: DecodeState,
    seen: _Seen,
    draft: Draft,
    logprobs: dict[int, list[TokenLogprobs]],
    num_replayed: int = 0,
) -> StepOutput:
    """The output of a step for each row, cut where the row ends."""
    outputs = []
    for index, (row, new) in enumerate(zip(state.rows, seen.tokens, strict=True)):
        kept, has_ended = state.num_until_end(index, new)
        of_tokens = logprobs[index][:kept] if index in logprobs else None
        depths = depths_of(len(new) - 1)[:kept]
        outputs.append(RowOutput(row, new[:kept], depths, has_ended, of_tokens, seen.depths[index]))
    return StepOutput(outputs, draft.topology.max_depth, draft.topology.num_nodes - 1, num_replayed)


def _logprobs(
    state: DecodeState, logits: Tensor, path: Tensor, tokens: list[list[int]]
) -> dict[int, list[TokenLogprobs]]:
    """The base's log-probabilities of each row's ``tokens``, chosen along ``path`` (B, L) long from logits
    (B, N, V), for rows whose request asks for them."""
    found = {}
    for index, row in enumerate(state.rows):
        if row.request.num_logprobs is not None:
            new, nodes = logits.new_tensor(tokens[index], dtype=torch.long), path[index, : len(tokens[index])]
            found[index] = token_logprobs(logits[index, nodes], new, row.request.num_logprobs)
    return found


def depths_of(num_accepted: int) -> list[int]:
    """The depth of each token of a step; the last one is the base's own, with depth 0."""
    return [*range(1, num_accepted + 1), 0]
