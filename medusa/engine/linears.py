"""Views of a model: the same parameters, other linear layers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from medusa.base import CausalLM


def with_linears(base: CausalLM, replacement: Callable[[nn.Linear], nn.Module]) -> CausalLM:
    """A model that shares every parameter and buffer with ``base``, its linear layers replaced.

    ``base`` is left as it is. A subclass of ``nn.Linear`` keeps its own forward and is not replaced.
    """
    shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    view = copy.deepcopy(base, shared)
    for name, module in list(view.named_modules()):
        if type(module) is nn.Linear:
            view.set_submodule(name, replacement(module))
    return view.eval()


def missing_for_plain_float32(base: CausalLM) -> str | None:
    """What a CPU engine that reads float32 weights lacks in ``base``; None when nothing."""
    devices = {parameter.device.type for parameter in base.parameters()}
    if base.dtype != torch.float32 or devices != {"cpu"}:
        return f"a float32 model on the CPU, got {base.dtype} on {', '.join(sorted(devices))}"
    if any(type(m) is nn.Linear and type(m.weight) is not nn.Parameter for m in base.modules()):
        return "plain weights, and this model's are quantised already"
    if len(set(getattr(base, "hf_device_map", {}).values())) > 1:
        return "the whole model in one place, and this one is sharded (device_map)"
    return None
