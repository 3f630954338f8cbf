"""The facts about a base on which the way of running depends, for whatever decodes with it; among them how
far it can be read.

Functions that get a bare base, before it is decoded with, find what they need by themselves.

Besides its context a model may have a position past which it computes otherwise:

- LongRoPE (arXiv 2402.13753; Phi-3, 3.5 and 4-mini) has two sets of rotary frequencies. ``transformers``
  takes the long set for a whole pass as soon as one of its positions is past the original context. So a
  request stays on one side: its nodes are kept within the original context, or its first chunk reaches past
  it.
- A few models have a ``sliding_window`` in their configuration that their code never masks by, while the
  cache of ``transformers`` forgets all earlier tokens. Up to the window both agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from medusa.base.attention import masks_by_window
from medusa.base.causal_lm import CausalLM, lm_head_device, vocab_size
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


def context_length(base: CausalLM) -> int | None:
    """Positions the model was made for, None when its configuration does not say.

    YaRN (arXiv 2309.00071) stretches an original context by a factor, which the model's card may have users
    add to a configuration that still names the original.
    """
    named = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if named is None:
        return None
    stretched = [
        int(rope["factor"] * (rope.get("original_max_position_embeddings") or named))
        for kind, rope in zip(rope_types(base), _rope_parameters(base), strict=True)
        if kind == "yarn" and rope.get("factor")
    ]
    return max(named, min(stretched, default=named))


def longrope_threshold(base: CausalLM) -> int | None:
    """The position from which LongRoPE takes its long factors; None for other models."""
    thresholds = [
        rope["original_max_position_embeddings"]
        for kind, rope in zip(rope_types(base), _rope_parameters(base), strict=True)
        if kind == "longrope"
    ]
    return min(thresholds, default=None)


def rope_types(base: CausalLM) -> list[str | None]:
    """The kinds of the model's rotary embeddings, None where its configuration names none."""
    return [rope.get("rope_type", rope.get("type")) for rope in _rope_parameters(base)]


def _rope_parameters(base: CausalLM) -> list[dict]:
    """The rotary settings of the model: one set, or one for each layer type."""
    parameters = getattr(base.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return by_layer_type or [parameters]


def check_positions(base: CausalLM, prompt_lengths: Sequence[int], max_new_tokens: int) -> None:
    """Raise ValueError unless ``base`` can continue prompts of these lengths by ``max_new_tokens`` tokens."""
    longest = max(prompt_lengths)
    reached = longest + max_new_tokens - 1  # the last new token is never read
    context = context_length(base)
    request = f"prompt of {longest} tokens + max_new_tokens={max_new_tokens}"
    if context is not None and longest + max_new_tokens > context:
        advice = "shorten the prompt" if longest >= context else "shorten the prompt or max_new_tokens"
        raise ValueError(f"{request} must fit the base model's context of {context} positions; {advice}")
    window = unmasked_window(base)
    if window is not None and reached > window:
        raise ValueError(
            f"{request} must fit sliding_window={window} of {type(base).__name__}: its code attends to all "
            "tokens and the cache of transformers keeps the window, so beyond it the text is not "
            "defined; shorten the prompt or max_new_tokens"
        )
    switch = longrope_threshold(base)
    if switch is None or reached <= switch or min(prompt_lengths) > switch:  # all stay on one side of it
        return
    if longest > switch:
        raise ValueError(
            f"prompts of one batch must all be longer than {switch} tokens, or none: {type(base).__name__} "
            f"changes its rotary frequencies there (LongRoPE), for all rows at once; got lengths from "
            f"{min(prompt_lengths)} to {longest}; decode them in two batches"
        )
    raise ValueError(
        f"{request} must stay within {switch} positions, or the prompt be longer than that: "
        f"{type(base).__name__} changes its rotary frequencies there (LongRoPE), and the keys of earlier "
        f"tokens do not follow; set max_new_tokens to {switch - longest + 1} or less"
    )


def common_context(base: CausalLM) -> int | None:
    """Positions within which rows of any lengths may share a pass; None when nothing bounds them."""
    limits = (context_length(base), unmasked_window(base), longrope_threshold(base))
    return min((limit for limit in limits if limit is not None), default=None)


def unmasked_window(base: CausalLM) -> int | None:
    """The sliding window that the cache of ``transformers`` applies and the model's code does not."""
    config = base.config.get_text_config(decoder=True)
    is_used = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return getattr(config, "sliding_window", None) if is_used and not masks_by_window(base) else None
