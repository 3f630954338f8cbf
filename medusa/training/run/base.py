"""The base model of a run, checked and frozen, and its tokenizer."""

from __future__ import annotations

from typing import Any

import torch

from medusa.base import loading
from medusa.base.architecture_check import check_decodable
from medusa.base.causal_lm import CausalLM
from medusa.training.config.options import BaseOptions, ConfigurationError
from medusa.training.data.batching import PaddedBatch
from medusa.training.states.live import LiveStates, SharedLiveStates


def load_base(options: BaseOptions, device: torch.device) -> CausalLM:
    """The base model where ``base_placement`` says, frozen and in evaluation mode.

    ``device`` is that of this process.

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
        **_placed(options, device),
    )
    check_decodable(base, attends_here=False)
    base.requires_grad_(False).eval()
    if not options.is_shared:
        check_causal(LiveStates(base), options.base)
    return base


def load_live(options: BaseOptions, device: torch.device, timeout_minutes: float) -> LiveStates:
    """What computes the base's hidden states, wherever its layers are; by all processes together.

    Raises:
        FileNotFoundError, ValueError: see :func:`load_base`.
    """
    base = load_base(options, device)
    if not options.is_shared:
        return LiveStates(base)
    live = SharedLiveStates(base, options.base_placement == "tensor_parallel", timeout_minutes)
    check_causal(live, options.base)
    return live


def _placed(options: BaseOptions, device: torch.device) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that put weights where they belong as they are read.

    Raises:
        ConfigurationError: the launch has too many processes for that, or too few.
    """
    is_launched = torch.distributed.is_initialized()
    num_processes, placement = (
        torch.distributed.get_world_size() if is_launched else 1,
        options.base_placement,
    )
    if placement == "each":
        return {} if device.type == "cpu" else {"device_map": {"": device}}
    if (placement == "auto") != (num_processes == 1):
        raise ConfigurationError(
            f"base_placement={placement} goes with "
            f"{'one process, which has all devices' if placement == 'auto' else 'several processes'}, got "
            f"{num_processes}; choose {'tensor_parallel or fsdp' if placement == 'auto' else 'auto'}"
        )
    if placement == "auto":
        return {"device_map": "auto"}
    from transformers.distributed import DistributedConfig

    is_fsdp = placement == "fsdp"
    shared = DistributedConfig(fsdp_size=num_processes) if is_fsdp else DistributedConfig(tp_plan="auto")
    return {"distributed_config": shared}


def check_causal(live: LiveStates, name: str) -> None:
    """Raise ConfigurationError when the states of a base depend on tokens behind them, as an encoder's."""
    ids, positions = torch.tensor([[0, 1, 0], [0, 1, 2]]), torch.arange(3).expand(2, 3)
    first, second = live.of(PaddedBatch(ids, positions, ids > 0))[:, :2]
    rounding = 8 * torch.finfo(first.dtype).eps * first.abs().max()
    if (first - second).abs().max() > rounding:
        raise ConfigurationError(
            f"base must be a causal language model, got {name!r}, a {type(live.base).__name__} whose states "
            "depend on tokens behind them; choose a decoder-only one"
        )


def load_tokenizer(options: BaseOptions) -> Any:
    return loading.load_tokenizer(options.base, trust_remote_code=options.trust_remote_code)
