"""How far a request may reach, so that every token is computed as ``transformers``' own ``generate`` does.

Besides its context a model may have a position past which it computes otherwise:

- LongRoPE (arXiv 2402.13753; Phi-3, 3.5 and 4-mini) has two sets of rotary frequencies. ``transformers``
  takes the long set for a whole pass as soon as one position of it lies past the original context. So a
  request stays on one side: its nodes are kept within the original context, or its first chunk reaches past
  it.
- A few models have a ``sliding_window`` in their configuration that their code never masks by, while the
  cache of ``transformers`` forgets what lies before it. Up to the window both agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from medusa.base.attention import masks_by_window
from medusa.base.causal_lm import CausalLM, context_length, switch_length


def check_positions(base: CausalLM, prompt_lengths: Sequence[int], max_new_tokens: int) -> None:
    """Raise ValueError unless ``base`` can continue prompts of these lengths by so many tokens."""
    longest = max(prompt_lengths)
    reached = longest + max_new_tokens - 1  # the last new token is never read
    context = context_length(base)
    given = f"prompt of {longest} tokens + max_new_tokens={max_new_tokens}"
    if context is not None and longest + max_new_tokens > context:
        advice = "shorten the prompt" if longest >= context else "shorten the prompt or max_new_tokens"
        raise ValueError(f"{given} must fit the base model's context of {context} positions; {advice}")
    window = unmasked_window(base)
    if window is not None and reached > window:
        raise ValueError(
            f"{given} must fit sliding_window={window} of {type(base).__name__}: its code attends to all "
            "tokens and the cache of transformers keeps those of the window, so beyond it the text is not "
            "defined; shorten the prompt or max_new_tokens"
        )
    switch = switch_length(base)
    if switch is None or reached <= switch or min(prompt_lengths) > switch:
        return
    if longest > switch:
        raise ValueError(
            f"prompts of one batch must all be longer than {switch} tokens, or none: {type(base).__name__} "
            f"changes its rotary frequencies there (LongRoPE), for all rows at once; got lengths from "
            f"{min(prompt_lengths)} to {longest}; decode them in two batches"
        )
    raise ValueError(
        f"{given} must stay within {switch} positions, or the prompt be longer than that: "
        f"{type(base).__name__} changes its rotary frequencies there (LongRoPE), and the keys of earlier "
        f"tokens do not follow; set max_new_tokens to {switch - longest + 1} or less"
    )


def common_context(base: CausalLM) -> int | None:
    """Positions within which rows of any lengths may share a pass; None when nothing bounds them."""
    limits = (context_length(base), unmasked_window(base), switch_length(base))
    return min((limit for limit in limits if limit is not None), default=None)


def unmasked_window(base: CausalLM) -> int | None:
    """The sliding window that the cache of ``transformers`` applies and the model's code does not."""
    config = base.config.get_text_config(decoder=True)
    is_used = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return getattr(config, "sliding_window", None) if is_used and not masks_by_window(base) else None
