"""The facts about a base on which the way of running depends, for whatever decodes with it.

Functions that get a bare base, before it is decoded with, find what they need by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa.base.causal_lm import CausalLM, common_context, lm_head_device, vocab_size
from medusa.base.recurrent import is_recurrent


@dataclass(frozen=True)
class BaseProfile:
    """A base as it is now; made anew after it was cast, moved or replaced."""

    name: str
    """The name of its class."""
    keeps_state: bool
    """Whether layers keep a recurrent state: steps are then general."""
    device: torch.device
    """Where the LM head computes, and so where a step's own tensors are."""
    devices: tuple[str, ...]
    """Where its parameters are."""
    is_sharded: bool
    """Whether ``device_map`` has spread its layers over several devices."""
    dtype: torch.dtype
    vocab_size: int
    """V: rows of the LM head."""
    context: int | None
    """Positions within which rows of any lengths may share a pass; None when nothing bounds them."""

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @classmethod
    def of(cls, base: CausalLM) -> BaseProfile:
        """The facts about ``base``; no pass is run."""
        return cls(
            name=type(base).__name__,
            keeps_state=is_recurrent(base),
            device=lm_head_device(base),
            devices=tuple(sorted({str(parameter.device) for parameter in base.parameters()})),
            is_sharded=len(set(getattr(base, "hf_device_map", {}).values())) > 1,
            dtype=base.dtype,
            vocab_size=vocab_size(base),
            context=common_context(base),
        )
