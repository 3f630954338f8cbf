"""Runs the passes of general steps: a prompt, and a draft below each row's text.

A runner is chosen once for a request or a batch (:mod:`medusa.decoding.step_plan`). It knows how passes are
computed (by the base's modules or compiled ahead), which cache they need, and when a pass must be run again:

- **A node is not finite.** The base gives NaN or infinity on a guess that nobody would write. Attention
  multiplies masked slots by 0, so one such node makes all others NaN. The pass is run again without guesses.
- **A near tie of a recurrent base.** Its layers round differently where they read several tokens at once.
  Where two scores are so close that plain decoding could choose the other, the row's text is read again token
  by token, and the pass is run again without guesses.

Steps of fixed shape are run by :mod:`medusa.decoding.static_rows`, and repaired there too: their host reads
many steps at once, so a row whose node is not finite stands still until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.acceptance.exact import Acceptance
from medusa.acceptance.sampling import UpcomingNoise
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import CausalLM, new_cache, prefill
from medusa.base.causal_lm import verify as eager_pass
from medusa.base.profile import BaseProfile
from medusa.base.recurrent import StatefulCache
from medusa.decoding.accept import node_scores, noise_of_nodes
from medusa.decoding.state import DecodeState
from medusa.drafters.protocol import Draft
from medusa.hardware import multiplies_in_float32

CHUNK = 512
"""Tokens of a prompt that one pass reads at most."""
CPU_CHUNK = 256
"""The same on a CPU, where more take no less time, and more memory: 0.4 GB in a model of 8B."""


@dataclass(frozen=True)
class Verified:
    """A draft after its pass."""

    draft: Draft
    """The nodes that the pass read: all that were drafted, or the root alone."""
    hidden: Tensor
    """(B, N, D): their hidden states, then those of the drafter's layers."""
    logits: Tensor
    """(B, N, V)."""
    num_replayed: int = 0
    """Committed tokens that a recurrent base read again, of the row with most of them."""

    def rows_not_finite(self) -> Tensor:
        """(B, 1) bool: whether a row has a node whose hidden state is not finite."""
        return (self.hidden * 0).flatten(1).any(dim=1, keepdim=True)  # 0 * x is NaN, which counts as true


@dataclass(frozen=True)
class Runner:
    """Runs passes of a base whose layers are all attention."""

    base: CausalLM
    """The base, or an engine's view of it."""
    profile: BaseProfile
    """The facts about it."""
    layers: tuple[int, ...] = ()
    """The decoder layers whose output drafters read too (``aux_layers`` of a drafter); it is appended to the
    hidden states."""
    keeps_features: bool = False
    """Whether the hidden states of the text are stored in the cache, for drafters that read them."""
    run_pass: Callable[..., tuple[Tensor, Tensor]] = eager_pass
    """Runs one pass: :func:`medusa.base.causal_lm.verify`, or a compiled form of it."""

    def new_cache(self, num_rows: int) -> TreeCache:
        """An empty cache for ``num_rows`` rows."""
        return new_cache(self.base, num_rows)

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: TreeCache,
        chunk: int | None = None,
        known: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.causal_lm.prefill`; ``chunk`` is :data:`CPU_CHUNK` or :data:`CHUNK` by
        default."""
        if chunk is None:
            chunk = CPU_CHUNK if self.profile.is_on_cpu else CHUNK
        return prefill(
            self.base, tokens, lengths, cache, chunk, self.layers, self.run_pass, self.keeps_features, known
        )

    def verify(self, draft: Draft, cache: TreeCache) -> Verified:
        """One forward pass over the nodes of ``draft`` below each row's text in ``cache``."""
        hidden, logits = self.run_pass(self.base, draft.tokens, draft.topology, cache, layers=self.layers)
        if self.keeps_features:
            cache.keep_features(hidden, cache.lengths, cache.longest)
        return Verified(draft, hidden, logits)

    def verify_again(
        self,
        state: DecodeState,
        verified: Verified,
        acceptance: Acceptance,
        noise: UpcomingNoise | None,
        is_finite: bool,
    ) -> Verified | None:
        """Another pass in place of ``verified``, whose ``acceptance`` cannot be trusted; None where it can.

        ``is_finite`` says that all hidden states are finite. The returned pass may have to be replaced again.
        """
        if is_finite or verified.draft.topology.num_nodes == 1:
            return None
        return self._verify_root_only(state, verified.draft)

    def finite(self, state: DecodeState, verified: Verified) -> Verified:
        """``verified``, or another pass in its place where a hidden state is not finite: for steps that
        cannot accept twice. Waits for the device."""
        if verified.draft.topology.num_nodes == 1 or not bool(verified.rows_not_finite().any()):
            return verified
        return self._verify_root_only(state, verified.draft)

    def _verify_root_only(self, state: DecodeState, draft: Draft) -> Verified:
        """The pass without guesses, after that of ``draft``, which had a node that is not finite.

        Raises:
            ValueError: the acceptance rule cannot leave a draft out.
        """
        rule = state.request.rule
        if state.sampled is not None and rule is not None and rule.context_only_proposal:
            raise ValueError(
                f"the base is not finite (NaN or infinite) on a guess, and acceptance={rule.name!r}, which "
                "carries drafts of one length from step to step, cannot leave one out; use another rule"
            )
        state.cache.clear_uncommitted()  # or the next pass would read NaN from these slots
        return self.verify(draft.root_only(), state.cache)


MAX_REPLAY_TOKENS = 12
"""From this number of tokens to be read again on, a step has no guesses."""
NEAR_TIE = 5e-5
"""Two scores that differ by less than this share of the largest one may change their order when a recurrent
base reads several tokens in one pass."""


@dataclass(frozen=True)
class RecurrentRunner(Runner):
    """Runs passes of a base whose layers keep a state, which begins each from a snapshot
    (:mod:`medusa.base.recurrent`)."""

    def verify(self, draft: Draft, cache: TreeCache) -> Verified:
        """As :meth:`Runner.verify`. Where many tokens must be read again, the root alone is verified: then
        nothing is rejected, and the next pass has none to read again."""
        assert isinstance(cache, StatefulCache)
        num_replayed = cache.num_replay_tokens
        if num_replayed >= MAX_REPLAY_TOKENS:
            draft = draft.root_only()
        return replace(super().verify(draft, cache), num_replayed=num_replayed)

    def verify_again(
        self,
        state: DecodeState,
        verified: Verified,
        acceptance: Acceptance,
        noise: UpcomingNoise | None,
        is_finite: bool,
    ) -> Verified | None:
        """As :meth:`Runner.verify_again`, and where rows are near a tie.

        This ends: a row that was read again token by token is exact, and no longer among them.
        """
        again = super().verify_again(state, verified, acceptance, noise, is_finite)
        if again is not None:
            return again
        rows = self._rows_near_a_tie(state, verified, acceptance, noise)
        if not rows:
            return None
        num_read = self._read_plainly(state, rows)
        again = self.verify(verified.draft.root_only(), state.cache)
        return replace(again, num_replayed=max(num_read, verified.num_replayed))

    def _rows_near_a_tie(
        self, state: DecodeState, verified: Verified, acceptance: Acceptance, noise: UpcomingNoise | None
    ) -> list[int]:
        """Rows where one-token decoding could choose another token along the accepted path.

        Only in float32: with fewer bits, ties are too frequent. Not in lockstep: processors that keep a state
        must not be called again.
        """
        assert isinstance(state.cache, StatefulCache)
        logits = verified.logits
        is_exact = state.sampled is None and state.request.is_exact and state.lockstep_batch is None
        if not is_exact or not multiplies_in_float32(logits.dtype, logits.device):
            return []
        inexact_rows = state.cache.inexact_rows
        if not inexact_rows:
            return []
        scores = node_scores(state, verified.draft, logits)  # all nodes: batches of these bases are small
        largest = scores.abs().masked_fill(scores.isinf(), 0).amax(dim=2)  # (B, N)
        if noise is not None:
            scores = scores + noise_of_nodes(noise, verified.draft.topology, len(scores))
        first, second = scores.topk(2, dim=2).values.unbind(dim=2)
        is_near = (first - second < NEAR_TIE * largest).gather(1, acceptance.path)  # (B, L)
        depths = torch.arange(is_near.shape[1], device=is_near.device)
        is_near &= depths <= acceptance.num_accepted[:, None]
        return [row for row in inexact_rows if is_near[row].any()]

    def _read_plainly(self, state: DecodeState, rows: list[int]) -> int:
        """Read the text of ``rows`` again one token at a time, from the last checkpoint of exact states up to
        the token before the root. Returns the largest number of tokens that a row has read."""
        assert isinstance(state.cache, StatefulCache)
        most_read = 0
        row_caches = state.cache.split_rows()
        for row in rows:
            cache = row_caches[row]
            cache.restore_checkpoint()
            before_root = state.lengths[row : row + 1] - 1
            num_missing = int(before_root - cache.lengths)
            if num_missing:
                self.prefill(state.tokens[row : row + 1], before_root, cache, chunk=1)
                most_read = max(most_read, num_missing)
        state.cache.sync_lengths()
        return most_read


def runner_for(
    base: CausalLM,
    profile: BaseProfile,
    layers: tuple[int, ...] = (),
    keeps_features: bool = False,
    run_pass: Callable[..., tuple[Tensor, Tensor]] = eager_pass,
) -> Runner:
    """The runner of general steps of ``base``; arguments as the fields of :class:`Runner`."""
    kind = RecurrentRunner if profile.keeps_state else Runner
    return kind(base, profile, layers, keeps_features, run_pass)
