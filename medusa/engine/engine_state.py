"""Applies an engine: its modules for a base and its heads, and whether they are still valid."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import get_args

import torch

from medusa.base.causal_lm import CausalLM, lm_head, lm_head_device
from medusa.base.passes import with_rules
from medusa.console import log_console
from medusa.engine.card.support import card_unsupported_reason, fused_on_card, is_on_a_card
from medusa.engine.kernels import kernels_unsupported_reason
from medusa.engine.matrix_rule import matrix_rule
from medusa.engine.optimized_heads import optimized_heads
from medusa.engine.snapshot import Snapshot, alteration_of
from medusa.engine.views import float32_unsupported_reason, packed_as, packed_unsupported_reason, view_of
from medusa.hardware import device_name
from medusa.heads.adapter import folded
from medusa.heads.checkpoint import check_heads_fit
from medusa.heads.protocol import Heads
from medusa.options import Engine
from medusa.trees.tuned_trees import Runtime


def apply_engine(base: CausalLM, engine: Engine) -> CausalLM:
    """The model to decode with: ``base`` itself, or a view of it that shares its parameters, as of a base
    that keeps states (:func:`medusa.base.passes.with_rules`).

    Raises:
        ValueError: unknown engine, or one that cannot run this model; the message names the missing
        requirement.
    """
    engine = resolved_engine(base, engine)
    if engine == "eager":
        return with_rules(base)
    if packed_as(base) is not None:
        if base.dtype != torch.float32 or base.device.type != "cpu":
            raise ValueError(
                f"engine={engine!r} holds the weights of the base packed, for float32 on a CPU, and it has "
                f"been cast or moved since, to {base.dtype} on {base.device}; load it again"
            )
        return with_rules(base, matrix_rule)
    is_for_card = engine == "packed" and is_on_a_card(base)
    lacks = card_unsupported_reason(base) if is_for_card else packed_unsupported_reason(base)
    if lacks is not None:
        raise ValueError(f"engine={engine!r} needs {lacks}; use engine='eager'")
    if is_for_card:
        return fused_on_card(base)
    return with_rules(view_of(base, int8=engine == "int8"), matrix_rule)


def resolved_engine(base: CausalLM, engine: Engine) -> Engine:
    """``engine``, with "auto" resolved for this model.

    Raises:
        ValueError: unknown engine.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine must be one of {get_args(Engine)}, got {engine!r}")
    held = packed_as(base)
    if held is not None:
        if engine not in ("auto", held):
            raise ValueError(
                f"engine={engine!r} needs the weights of the base, which was loaded for engine={held!r} and "
                "holds them packed; load it again for the other"
            )
        return held
    if engine == "auto":
        if float32_unsupported_reason(base) is not None:
            return "eager"
        lacks = kernels_unsupported_reason()
        if lacks is not None:
            _say_once(lacks)
            return "eager"
        return "packed"
    return engine


@functools.cache
def _say_once(lacks: str) -> None:
    text = f"engine='auto' runs eager, so decoding is slower: packed needs {lacks}"
    log_console().print(text, style="dim", soft_wrap=True)


class EngineState:
    """A base and its heads as ``engine`` runs them.

    Raises:
        ValueError: the heads were made for other sizes, or the engine cannot run the base.
    """

    def __init__(
        self, base: CausalLM, heads: Heads | None, engine: Engine, engine_base: CausalLM | None = None
    ):
        self.base = base
        self.heads = heads
        self.engine = engine
        name = resolved_engine(base, engine)
        self._has_kernels = name != "eager"
        self._is_held_once = packed_as(base) is not None
        if engine_base is None:
            has_adapter = bool(getattr(base, "peft_config", None))
            engine_base = apply_engine(folded(base) if has_adapter and name != "eager" else base, engine)
        self.engine_base = engine_base
        """The base model as the engine runs it; ``base`` itself when eager."""
        self.optimized_heads = heads
        """The heads as the engine computes them; ``heads`` itself where it has no quicker way."""
        if heads is not None:
            check_heads_fit(heads, base)
            heads.to(device=lm_head_device(base)).eval()
            self.optimized_heads = optimized_heads(heads, lm_head(self.engine_base))
        self.runtime = Runtime(
            device_name(lm_head_device(base)), str(base.dtype).removeprefix("torch."), name
        )
        """The runtime: a tuned tree is used only where it was timed on the same one."""
        self._snapshot = Snapshot(*filter(None, (base, heads)))

    def with_heads(self, heads: Heads) -> EngineState:
        """The same base with other heads."""
        return EngineState(self.base, heads, self.engine, self.engine_base)

    def is_current(self) -> bool:
        """Whether an answer can start; false where the state must be rebuilt first: ``auto`` falls back for
        hooks and patches by itself, and captured graphs of changed weights are dropped.

        Raises:
            ValueError: the engine has taken weights or modules that have changed; or the base is in training
                mode.
        """
        base = self.base
        is_made = self._has_kernels
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
        alteration = alteration_of(base) if is_made else None
        if alteration is not None:
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
        snapshot = self._snapshot
        is_cast = self._is_cast
        is_made = self._has_kernels

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
