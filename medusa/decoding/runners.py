"""Runs the passes of general steps: a prompt, and a draft below each row's text.

A runner is chosen once for a request or a batch (:mod:`medusa.decoding.executor`). It knows how passes are
computed (by the base's modules or compiled ahead), which cache they need, and when a pass must be run again:
where a node is not finite. The base gives NaN or infinity on a guess that nobody would write. Attention
multiplies masked slots by 0, so one such node makes all others NaN. The pass is run again without guesses.
Steps of fixed shape are run by :mod:`medusa.decoding.static_stepper`, and repaired there too: their host
reads many steps at once, so a row whose node is not finite stands still until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from medusa.base.cache import TreeCache
from medusa.base.causal_lm import CausalLM
from medusa.base.passes import CHUNK, new_cache, prefill
from medusa.base.passes import verify as eager_pass
from medusa.base.profile import BaseProfile
from medusa.decoding.state import DecodeState
from medusa.drafters.protocol import Draft

CPU_CHUNK = 256
"""As :data:`medusa.base.passes.CHUNK` on a CPU, where more take no less time, and more memory: 0.4 GB in a
model of 8B."""


@dataclass(frozen=True)
class Verified:
    """A draft after its pass."""

    draft: Draft
    """The nodes that the pass read: all that were drafted, or the root alone."""
    hidden: Tensor
    """(B, N, (1 + A) * D): their hidden states, then those of the drafter's A layers."""
    logits: Tensor
    """(B, N, V)."""

    def rows_not_finite(self) -> Tensor:
        """(B, 1) bool: whether a row has a node whose hidden state is not finite."""
        return (self.hidden * 0).flatten(1).any(dim=1, keepdim=True)  # 0 * x is NaN, which counts as true


@dataclass(frozen=True)
class Runner:
    """Runs passes of a base."""

    base: CausalLM
    """The base, or an engine's view of it."""
    profile: BaseProfile
    """The facts about it."""
    layers: tuple[int, ...] = ()
    """The decoder layers whose output drafters read too (``fused_layers`` of a drafter); it is appended to
    the hidden states."""
    keeps_features: bool = False
    """Whether the hidden states of the text are stored in the cache, for drafters that read them."""
    run_pass: Callable[..., tuple[Tensor, Tensor]] = eager_pass
    """Runs one pass: :func:`medusa.base.passes.verify`, or a compiled form of it."""

    def new_cache(self, num_rows: int) -> TreeCache:
        """An empty cache for ``num_rows`` rows."""
        return new_cache(self.base, num_rows, self.profile.keeps_state)

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: TreeCache,
        chunk: int | None = None,
        known: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As :func:`medusa.base.passes.prefill`; ``chunk`` is :data:`CPU_CHUNK` or
        :data:`medusa.base.passes.CHUNK` by default."""
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

    def verify_again(self, state: DecodeState, verified: Verified, is_finite: bool) -> Verified | None:
        """Another pass in place of ``verified``, whose acceptance cannot be trusted; None where it can.

        ``is_finite`` says that all hidden states are finite.
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
