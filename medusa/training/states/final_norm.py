"""The base's final norm: what turns its last layer's states into those that its output embedding reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, hidden_states
from medusa.training.config.options import ConfigurationError


def final_norm(base: CausalLM) -> Callable[[Tensor], Tensor]:
    """A copy of the last module before the output embedding, in float32 on the CPU: (..., D) -> (..., D).

    Of ``base`` its embeddings and its norm are enough.

    Raises:
        ConfigurationError: something that is no norm stands between the last layer and the output embedding.
    """
    given: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, _arguments: tuple, output: Any) -> None:
        if isinstance(output, Tensor):
            given.append((module, output))

    with ExitStack() as stack, torch.no_grad():
        for module in base.get_decoder().modules():
            if not any(True for _ in module.children()):
                stack.callback(module.register_forward_hook(note).remove)
        read = hidden_states(base, torch.zeros(1, 1, dtype=torch.long, device=base.device))
    module, output = given[-1] if given else (base, torch.zeros(0))
    if "norm" not in type(module).__name__.lower() or not torch.equal(output, read):
        raise ConfigurationError(
            f"the states were stored before the final norm, and {type(base).__name__} has no norm right "
            "before its output embedding; let `medusa train` store them"
        )
    return copy.deepcopy(module).to("cpu", torch.float32)
