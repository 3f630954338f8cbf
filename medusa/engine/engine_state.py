"""The engine's modules for a base and its heads, and whether they are still valid."""

from __future__ import annotations

from collections.abc import Callable

import torch

from medusa.base.causal_lm import CausalLM, lm_head, lm_head_device
from medusa.engine import Engine, apply_engine, resolved_engine
from medusa.engine.optimized_heads import optimized_heads
from medusa.engine.snapshot import Snapshot, alteration_of
from medusa.engine.views import packed_as
from medusa.hardware import device_name
from medusa.heads.adapter import folded
from medusa.heads.autoregressive_head import Heads, check_heads_fit
from medusa.trees.tuned_trees import Runtime


class EngineState:
    """A base and its heads as ``engine`` runs them.

    Raises:
        ValueError: the heads were made for other sizes, or the engine cannot run the base.
    """

    def __init__(self, base: CausalLM, heads: Heads | None, engine: Engine):
        self.base, self.heads, self.engine = base, heads, engine
        name = resolved_engine(base, engine)
        self._has_kernels, self._is_held_once = name != "eager", packed_as(base) is not None
        self.runner: CausalLM = apply_engine(base if name == "eager" else folded(base), engine)
        """The base model as the engine runs it; ``base`` itself when eager."""
        self.optimized_heads = heads
        """The heads as the engine computes them; ``heads`` itself where it has no quicker way."""
        if heads is not None:
            check_heads_fit(heads, base)
            heads.to(device=lm_head_device(base)).eval()
            self.optimized_heads = optimized_heads(heads, lm_head(self.runner))
        self.runtime = Runtime(
            device_name(lm_head_device(base)), str(base.dtype).removeprefix("torch."), name
        )
        """The runtime: a tuned tree is used only where it was timed on the same one."""
        self._snapshot = self._new_snapshot()

    def is_current(self) -> bool:
        """Whether an answer can start; false where the state must be rebuilt first: ``auto`` falls back for
        hooks and patches by itself, and captured graphs of changed weights are dropped.

        Raises:
            ValueError: the engine has taken weights or modules that have changed; or the base is in training
                mode.
        """
        base, is_made = self.base, self._has_kernels
        if base.training:
            raise ValueError(
                "the base is in training mode, in which dropout may change its answers; call eval() on it"
            )
        if is_made and self._is_cast:
            raise ValueError(
                f"torch.autocast has the base compute in another precision, and engine={self.engine!r} keeps "
                "its own; decode outside of autocast, or use engine='eager'"
            )
        if not self._snapshot.is_current:
            if is_made:
                raise ValueError(
                    f"the weights of the base or the heads have changed (written to, cast, moved, replaced "
                    f"or set otherwise, or an adapter was switched) since engine={self.engine!r} took them; "
                    "call refresh() on this MedusaModel first"
                )
            return False  # rebuilding costs no more than an answer
        if is_made and (alteration := alteration_of(base)) is not None:
            if self.engine != "auto" or self._is_held_once:
                advice = "load the base with engine='eager'" if self._is_held_once else "use engine='eager'"
                raise ValueError(
                    f"the base has got {alteration}, which engine={self.runtime.engine!r} would not run; "
                    f"remove it, or {advice}"
                )
            return False
        return True

    def staleness_check(self) -> Callable[[bool], None]:
        """A function that raises ValueError where base, heads or precision have changed since now: a full
        check when called with True (for a new request), a quick one otherwise (after a pass)."""
        snapshot, is_cast, is_made = self._snapshot, self._is_cast, self._has_kernels

        def check(is_new_request: bool) -> None:
            is_same = snapshot.is_unwritten and not self.base.training and self._is_cast == is_cast
            if is_same and is_new_request:
                is_same = snapshot.is_current and not (is_made and alteration_of(self.base) is not None)
            if not is_same:
                raise ValueError(
                    "the base or the heads have changed since this answer or batch was begun (written to, "
                    "cast, moved, replaced, an adapter switched, set to training mode, or autocast was "
                    "switched), and its keys and values belong to the old ones; ask again, or make a new "
                    "batch with continuous_batch()"
                )

        return check

    @property
    def _is_cast(self) -> bool:
        """Whether ``torch.autocast`` has the base compute in another precision."""
        return torch.is_autocast_enabled(lm_head_device(self.base).type)

    def _new_snapshot(self) -> Snapshot:
        return Snapshot(self.base) if self.heads is None else Snapshot(self.base, self.heads)
