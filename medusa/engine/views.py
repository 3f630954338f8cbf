"""Views of a model: the same parameters, other modules to compute with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from medusa.base.attention import GROUPED_ATTENTION
from medusa.base.causal_lm import CausalLM, copy_sharing_parameters
from medusa.engine.norms import in_place_norm
from medusa.engine.siblings import Product, joined, sibling_linears


def view_of(base: CausalLM, linear: Callable[[nn.Linear], nn.Module], product: Product) -> CausalLM:
    """A model that shares every parameter and buffer with ``base``, and computes with other modules.

    Linear layers that read one input share one ``product`` (see :mod:`medusa.engine.siblings`), each of the
    others becomes its ``linear``; a subclass of ``nn.Linear`` keeps its own forward. Norms are replaced where
    that leaves every bit as it is (see :mod:`medusa.engine.norms`), ``sdpa`` by
    :func:`medusa.base.attention.grouped_attention`. ``base`` is left as it is.
    """
    view = copy_sharing_parameters(base)
    for parent in list(view.modules()):
        others: dict[nn.Module, nn.Module] = {}
        for linears in sibling_linears(parent):
            others.update(zip(linears, joined(linears, product), strict=True))
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, others[child] if child in others else linear(child))
            elif (norm := in_place_norm(child)) is not None:
                setattr(parent, name, norm)
    if takes_other_attention(view):
        view.set_attn_implementation(GROUPED_ATTENTION)
    return view.eval()


def takes_other_attention(base: CausalLM) -> bool:
    """Whether ``base`` runs ``sdpa`` and lets it be exchanged for another implementation."""
    is_sdpa = base.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
    return is_sdpa and base._can_set_attn_implementation()


def missing_for_plain_float32(base: CausalLM) -> str | None:
    """What a CPU engine that reads float32 weights lacks in ``base``; None when nothing."""
    devices = {parameter.device.type for parameter in base.parameters()}
    if base.dtype != torch.float32 or devices != {"cpu"}:
        return f"a float32 model on the CPU, got {base.dtype} on {', '.join(sorted(devices))}"
    return missing_for_plain_weights(base)


def missing_for_plain_weights(base: CausalLM) -> str | None:
    """What an engine that takes weights into a form of its own lacks in ``base``; None when nothing."""
    if any(type(m) is nn.Linear and type(m.weight) is not nn.Parameter for m in base.modules()):
        return "plain weights, and this model's are quantised already"
    if len(set(getattr(base, "hf_device_map", {}).values())) > 1:
        return "the whole model in one place, and this one is sharded (device_map)"
    return None
