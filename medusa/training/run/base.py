"""The base model of a run, checked and frozen, and its tokenizer."""

from __future__ import annotations

from typing import Any

import torch

from medusa.base import loading
from medusa.base.causal_lm import CausalLM, hidden_states
from medusa.base.requirements import check_decodable
from medusa.training.config.options import BaseOptions, ConfigurationError


def load_base(options: BaseOptions, device: torch.device) -> CausalLM:
    """The base model on ``device``, frozen and in evaluation mode.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: it is no causal language model, or no tree can be verified on it, so heads for it would be
            of no use.
    """
    base: Any = loading.load_base(
        options.base,
        dtype=options.base_dtype,
        trust_remote_code=options.trust_remote_code,
        **({} if options.attention is None else {"attn_implementation": options.attention}),
    )
    check_decodable(base)
    base = base.to(device).requires_grad_(False).eval()
    check_causal(base, options.base)
    return base


def check_causal(base: CausalLM, name: str) -> None:
    """Raise ConfigurationError when the states of ``base`` depend on tokens behind them, as an encoder's."""
    ids = torch.tensor([[0, 1, 0], [0, 1, 2]], device=base.device)
    positions = torch.arange(3, device=base.device).expand(2, 3)
    with torch.no_grad():
        first, second = hidden_states(base, ids, position_ids=positions)[:, :2]
    rounding = 8 * torch.finfo(first.dtype).eps * first.abs().max()
    if (first - second).abs().max() > rounding:
        raise ConfigurationError(
            f"base must be a causal language model, got {name!r}, a {type(base).__name__} whose states "
            "depend on tokens behind them; choose a decoder-only one"
        )


def load_tokenizer(options: BaseOptions) -> Any:
    return loading.load_tokenizer(options.base, trust_remote_code=options.trust_remote_code)
