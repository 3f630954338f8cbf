"""One step of the decode loop: draft, verify, accept, commit.

:func:`decode_step` is the general step, :func:`prefill_request` the first token of each row. Plain decoding
is this step with a tree of one node. Each row of a batch advances by its own number of accepted tokens. Which
rows take part is decided in :mod:`medusa.decoding.batch`.

Shapes beside those of :mod:`medusa`: R of the B rows, M of the N nodes, L = depth of the tree + 1.
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
    """Runs forward passes that return logits and hidden states: the last ones, and those after ``layers``
    appended to them."""

    base: CausalLM
    """The base, or an engine's view of it."""
    layers: tuple[int, ...] = ()
    """The decoder layers whose output drafters read too (``aux_layers`` of a drafter)."""
    run: Callable[..., tuple[Tensor, Tensor]] = verify
    """Runs one pass: :func:`medusa.base.causal_lm.verify`, or a compiled form of it."""
    keeps_features: bool = False
    """Whether the hidden states of the text are stored in the cache, for drafters that read them."""

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: TreeCache,
        chunk: int = 512,
        known: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.prefill`."""
        arguments = tokens, lengths, cache, chunk, self.layers, self.run, self.keeps_features
        return prefill(self.base, *arguments, known)

    def verify(self, tokens: Tensor, topology: TreeTopology, cache: TreeCache) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.verify`."""
        hidden, logits = self.run(self.base, tokens, topology, cache, layers=self.layers)
        if self.keeps_features:
            cache.keep_features(hidden, cache.lengths, cache.longest)
        return hidden, logits


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
    num_replayed: int = 0
    """Committed tokens that a recurrent base ran again in this pass (:mod:`medusa.base.recurrent`), of the
    row with most of them."""


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

    In two cases the pass is repeated without drafts: the base gave NaN or infinity; or, on a recurrent base,
    two scores are so close that plain decoding could choose the other.
    """
    num_replay_tokens = state.cache.num_replay_tokens
    context = draft_context(state, runner.base, 0.0 if adaptive is None else adaptive.min_accept_prob)
    draft = drafter.draft(context)
    validator.check(drafter, draft, context)
    if draft.path_logprob is not None:
        usual = draft.topology.num_nodes - draft.num_optional_nodes
        draft = draft.first(usual if adaptive is None else adaptive.num_nodes(draft.path_logprob, usual))
    if num_replay_tokens >= MAX_REPLAY_TOKENS:  # without drafts nothing is rejected, so replaying ends
        draft = draft.root_only()
    clock.lap("draft")
    hidden, logits = runner.verify(draft.tokens, draft.topology, state.cache)
    walks = _walks(state, draft, logits)
    # Are all hidden states finite? Each read of a GPU tensor waits for the GPU, so there the answer is read
    # with the acceptance, in one copy. It is read first where that costs nothing (on a CPU), where accepting
    # cannot be undone (in lockstep it calls the caller's processors), and where scores are read again below.
    is_on_cpu = logits.device.type == "cpu"
    checks_first = is_on_cpu or state.lockstep_batch is not None or bool(state.cache.rows_needing_recheck)
    seen, rule_state = None, state.rule_state
    if checks_first:
        is_broken = bool((hidden * 0).any())  # 0 * x is NaN, which counts as true, if x is not finite
    else:
        acceptance = acceptance_of(state, draft, logits, context.noise)
        seen = _seen(draft, acceptance, hidden)
        is_broken = seen.is_broken
    if is_broken:  # attention multiplies masked slots by 0, so one such node makes all others NaN
        draft, state.rule_state = _root_only(state, draft), rule_state
        state.cache.clear_uncommitted()  # or the next pass would read NaN from these slots
        hidden, logits = runner.verify(draft.tokens, draft.topology, state.cache)
    clock.lap("verify")
    if is_broken or checks_first:
        acceptance, seen = acceptance_of(state, draft, logits, context.noise, walks), None
    # This ends: a row that was run again token by token is exact and not among them any more.
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
    on_device = acceptance.tokens(draft.tokens), acceptance.num_accepted + 1
    state.append(new, on_device if new == seen.tokens else None)  # they differ where a row's end was cut
    clock.lap("commit")
    return output


SCORES_AT_ONCE = 2**21
"""Up to this number of scores (B * N * V), choosing the tokens of all nodes at once is faster than walking
down the accepted path."""


def _walks(state: DecodeState, draft: Draft, logits: Tensor) -> bool:
    """Whether scoring only accepted nodes, one depth after the other, is faster than scoring all nodes."""
    num_nodes = draft.topology.num_nodes
    if logits.device.type != "cpu" or num_nodes == 1:
        return False
    is_expensive = state.seeds is not None or any(row.request.processors for row in state.rows)
    return is_expensive or len(logits) * num_nodes * logits.shape[2] > SCORES_AT_ONCE


@dataclass(frozen=True)
class _Seen:
    """The values of a step that are copied to the host."""

    tokens: list[list[int]]
    """New tokens of each row."""
    paths: list[list[int]]
    """The accepted nodes of each row, the root first."""
    depths: list[list[int]]
    """The depth of each draft node but the root, in each row."""
    broken_rows: list[int]
    """Rows for which a token was chosen by a NaN score."""
    is_broken: bool = False
    """Whether a hidden state is not finite."""


def _seen(draft: Draft, acceptance: Acceptance, hidden: Tensor | None = None) -> _Seen:
    """All values that the host needs, in one copy; sets :attr:`_Seen.is_broken` if ``hidden`` (B, N, D) is
    passed."""
    num_rows, flags = len(draft.tokens), acceptance.is_broken
    # Columns of one long matrix.
    parts = [
        acceptance.num_accepted[:, None],  # (B, 1)
        acceptance.path,  # (B, L)
        acceptance.tokens(draft.tokens),  # (B, L)
        draft.topology.depths[:, 1:].expand(num_rows, -1),  # (B, N - 1)
        acceptance.num_accepted.new_zeros(num_rows, 1) if flags is None else flags[:, None].long(),
    ]
    if hidden is not None:
        parts.append((hidden * 0).flatten(1).any(dim=1, keepdim=True).long())
    widths, rows = [part.shape[1] for part in parts], torch.cat(parts, dim=1).tolist()
    ends = [*accumulate(widths)]  # part i + 1 is in the columns ends[i] to ends[i + 1]
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
"""Two scores that differ by less than this share of the largest one may change their order when a recurrent
base runs several tokens in one pass."""


def _rows_near_a_tie(
    state: DecodeState, draft: Draft, logits: Tensor, noise: UpcomingNoise | None, acceptance: Acceptance
) -> list[int]:
    """Rows of a recurrent base where one-token decoding could choose another token, because its rounding
    differs.

    Only in float32: with fewer bits, ties are too frequent. Not in lockstep: processors that keep a state
    must not be called again.
    """
    is_exact = state.sampled is None and state.request.is_exact and state.lockstep_batch is None
    in_float32 = multiplies_in_float32(logits.dtype, logits.device)
    if not is_exact or not in_float32 or not state.cache.rows_needing_recheck:
        return []
    scores = _scores(state, draft, logits)
    largest = scores.abs().masked_fill(scores.isinf(), 0).amax(dim=2)
    if noise is not None:
        scores = scores + _by_node(noise, draft.topology, len(scores))
    first, second = scores.topk(2, dim=2).values.unbind(dim=2)
    is_near = (first - second < NEAR_TIE * largest).gather(1, acceptance.path)
    depths = torch.arange(is_near.shape[1], device=is_near.device)
    is_near &= depths <= acceptance.num_accepted[:, None]
    return [row for row in state.cache.rows_needing_recheck if is_near[row].any()]


def _read_plainly(runner: ModelRunner, state: DecodeState, rows: list[int]) -> int:
    """Run the text of ``rows`` again one token at a time, from the last checkpoint of exact states up to the
    token before the root; returns the largest number of such tokens over the rows."""
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
    """``draft`` cut to its root, because the base gives NaN or infinity on a draft token."""
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
    """Prefill what ``prefix`` lacks of the prompts, and choose each row's next token: the decode state with
    this token as root, and the output with it.

    ``request`` is that of the ``rows``, with the answers so far appended to its prompts. ``refuses_nan`` is
    :attr:`medusa.decoding.state.DecodeState.refuses_nan`.
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
    # A step without drafts, whose root is the last prompt token: it chooses the first new token.
    root_only = Draft(request.tokens.gather(1, last), TreeTopology.chain(1, last.device))
    noise = state.noise(logits.shape[-1])
    acceptance = acceptance_of(state, root_only, logits[:, None], noise)
    seen = _seen(root_only, acceptance)
    _check_numbers(state, seen.broken_rows)
    logprobs = _logprobs(state, logits[:, None], acceptance.path, seen.tokens)
    output = _cut(state, seen, root_only, logprobs)
    new = [each.tokens for each in output.rows]
    state.append(new, (acceptance.next_token[:, None], torch.ones_like(acceptance.num_accepted)))
    return state, output


def sampled_kind(drafter: Drafter, request: DecodeRequest, base: CausalLM) -> DraftKind | None:
    """How ``drafter`` must draw for the request's rule; None if the rule takes ranked guesses. Raises
    ValueError if it cannot."""
    rule = request.rule
    if rule is None or drafter.max_depth == 0:
        return None
    kind = drafter.sampled_kind(rule.draft_kinds[0])
    rule.require(kind, drafter.context_only, is_recurrent(base))
    return kind


def draft_context(state: DecodeState, base: CausalLM, min_accept_prob: float = 0.0) -> DraftContext:
    """The input of a drafter. It has the noise that will choose the tokens, unless the rule forbids that."""
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
    """The accepted path of each row, by the request's acceptance rule, given logits (B, N, V).

    With ``walks`` only accepted nodes are scored, one depth after the other: less work, but the host waits
    for the device at each depth."""
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
    """A function (rows, a node of each, their depth) -> the token that the base chooses after each, for
    :func:`medusa.acceptance.exact.accept_by_walking`."""

    def choose_after(rows: list[int], nodes: list[int], depth: int) -> list[int]:
        scores = _scores(state, draft, logits[rows, nodes][:, None], rows, nodes)[:, 0]
        chosen = choose(scores, None if noise is None else noise.until(depth + 1)[rows, depth])
        if state.refuses_nan:
            is_broken = scores.gather(1, chosen[:, None]).isnan().any(1).tolist()
            _check_numbers(state, [row for row, broken in zip(rows, is_broken, strict=True) if broken])
        return chosen.tolist()

    return choose_after


def _check_numbers(state: DecodeState, broken: list[int]) -> None:
    """Raise RowsFailed if there are ``broken`` rows, whose tokens were chosen by NaN scores."""
    if broken:
        failed = [state.rows[row] for row in broken]
        raise RowsFailed(failed) from ValueError("the base model's logits are not numbers (NaN)")


def _by_node(noise: UpcomingNoise, topology: TreeTopology, num_rows: int) -> Tensor:
    """The noise (B, N, V) with which the token after each node is chosen."""
    depths, by_depth = topology.depths.expand(num_rows, -1), noise.until(topology.max_depth + 1)
    return by_depth.gather(1, depths[..., None].expand(-1, -1, by_depth.shape[2]))


def _accept_sampled(state: DecodeState, draft: Draft, logits: Tensor) -> Acceptance:
    """The path that a rule for sampled drafts accepts, given logits (B, N, V). Its noise is independent of
    the drafter's."""
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
    """Scores (R, M, V) float32: logits (R, M, V) after the logits processors of each row.

    By default all rows and nodes: R = B, M = N. With ``rows`` and ``nodes`` (one node of each row): M = 1.
    """
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
    node_index = None if nodes is None else draft.tokens.new_tensor(nodes)[:, None]  # (R, 1)
    if len(groups) == 1 and len(rows) == len(state.rows):
        return process_node_logits(logits, groups[0][0], paths, node_index)
    scores = logits.to(torch.float32, copy=True)
    for processors, places in groups:
        if processors:
            place, row = (
                torch.tensor(each, device=scores.device)
                for each in (places, [rows[place] for place in places])
            )
            try:
                scores[place] = process_node_logits(
                    logits[place],
                    processors,
                    paths.of_rows(row),
                    None if node_index is None else node_index[place],
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
    """The output of a step, the tokens of each row cut where the row ends."""
    outputs = []
    for index, (row, new) in enumerate(zip(state.rows, seen.tokens, strict=True)):
        kept, has_ended = state.num_until_end(index, new)
        of_tokens = logprobs[index][:kept] if index in logprobs else None
        depths = depths_of(len(new) - 1)[:kept]
        drafted = seen.depths[index]
        outputs.append(RowOutput(row, new[:kept], depths, has_ended, of_tokens, drafted, len(drafted)))
    return StepOutput(outputs, draft.topology.max_depth, draft.topology.num_nodes - 1, num_replayed)


def _logprobs(
    state: DecodeState, logits: Tensor, path: Tensor, tokens: list[list[int]]
) -> dict[int, list[TokenLogprobs]]:
    """Row index -> the base's log-probabilities of the row's ``tokens``, which were chosen along ``path``
    (B, L) long from logits (B, N, V); only rows whose request asks for them."""
    found = {}
    for index, row in enumerate(state.rows):
        if row.request.num_logprobs is not None:
            new, nodes = logits.new_tensor(tokens[index], dtype=torch.long), path[index, : len(tokens[index])]
            found[index] = token_logprobs(logits[index, nodes], new, row.request.num_logprobs)
    return found


def depths_of(num_accepted: int) -> list[int]:
    """The depth at which each token of a step was drafted; the last one is the base's own, with depth 0."""
    return [*range(1, num_accepted + 1), 0]
