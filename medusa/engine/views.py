"""Views of a model: the same parameters, other modules to compute with them."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Literal

import torch
from torch import Tensor, nn

from medusa.base.architecture_check import is_tested, verification_error
from medusa.base.attention import TREE_ATTENTION
from medusa.base.causal_lm import CausalLM, copy_sharing_parameters
from medusa.base.rowwise import RowwiseActivation
from medusa.engine.kernels import kernels_unsupported_reason
from medusa.engine.snapshot import alteration_of
from medusa.engine.weights.hold import Holder
from medusa.engine.weights.products import PackedMatmul
from medusa.engine.weights.stored import Arithmetic

ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")


def view_of(base: CausalLM, int8: bool = False) -> CausalLM:
    """A model that shares every parameter and buffer with ``base``, and computes with the kernels.

    ``base`` is not changed. The packed weights are held in addition to its own, and do not follow later
    changes of the parameters. Where ``int8``, weights are rounded to int8, also those that are packed
    already.
    """
    return with_kernels(copy_sharing_parameters(base), Holder(Arithmetic(int8, in_whole_numbers=True)))


def with_kernels(model: CausalLM, holder: Holder) -> CausalLM:
    """``model`` with its modules replaced by modules that compute with the kernels: its weights as ``holder``
    holds them, norms if the results stay bit-identical, and attention if :func:`takes_tree_attention` is
    true."""
    holder.hold(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            norm = in_place_norm(child)
            if norm is not None:
                setattr(parent, name, norm)
            elif type(child).__module__ in ACTIVATION_MODULES:
                setattr(parent, name, RowwiseActivation(child))
    if takes_tree_attention(model):
        model.set_attn_implementation(TREE_ATTENTION[_attention_of(model)])
    return model.eval()


def takes_tree_attention(base: CausalLM) -> bool:
    """Whether ``base`` computes the same with the kernels' attention instead of its own.

    Models that derive masks of their own from ours, such as Doge, do not; a trial decides (see
    :mod:`medusa.base.architecture_check`).
    """
    attention = _attention_of(base)
    if attention not in TREE_ATTENTION or not base._can_set_attn_implementation():
        return False
    if is_tested(base):
        return True
    view = copy_sharing_parameters(base)
    view.set_attn_implementation(TREE_ATTENTION[attention])
    return verification_error(view) is None


def _attention_of(base: CausalLM) -> str:
    return base.config.get_text_config(decoder=True)._attn_implementation


def packed_unsupported_reason(base: CausalLM) -> str | None:
    """The missing requirement of :func:`view_of` for ``base``; None if there is none."""
    return float32_unsupported_reason(base) or kernels_unsupported_reason()


def packed_as(base: CausalLM) -> Literal["packed", "int8"] | None:
    """The engine whose weights ``base`` computes with; None where its own modules compute."""
    products = [module for module in base.modules() if isinstance(module, PackedMatmul)]
    if not products:
        return None
    return "int8" if any(product.is_int8 for product in products) else "packed"


def float32_unsupported_reason(base: CausalLM) -> str | None:
    """The missing requirement of a CPU engine with float32 weights for ``base``; None if there is none."""
    devices = kinds_of_devices(base)
    if base.dtype != torch.float32 or devices != {"cpu"}:
        return f"a float32 model on the CPU, got {base.dtype} on {', '.join(sorted(devices))}"
    return unplain_reason(base)


def kinds_of_devices(base: CausalLM) -> set[str]:
    """The kinds of devices that the weights of ``base`` are on."""
    return {parameter.device.type for parameter in base.parameters()}


def unplain_reason(base: CausalLM) -> str | None:
    """What keeps modules of ours from computing in the place of those of ``base``, as a requirement that it
    does not meet; None if nothing does."""
    if any(type(m) is nn.Linear and type(m.weight) is not nn.Parameter for m in base.modules()):
        return "plain weights, and this model's are quantised already"
    if len(set(getattr(base, "hf_device_map", {}).values())) > 1:
        return "the whole model in one place, and this one is sharded (device_map)"
    alteration = alteration_of(base)
    if alteration is not None:
        return f"modules that run as their classes say, and this model has {alteration}"
    return None


def packed_bytes(view: CausalLM) -> dict[str, int]:
    """Bytes of packed weights by :attr:`PackedMatmul.number_format`; empty where the base's own modules
    compute. They are held in addition to the base's own weights, or instead of them if it was loaded for an
    engine."""
    held: Counter[str] = Counter()
    for module in view.modules():
        if isinstance(module, PackedMatmul):
            held.update(module.bytes_by_format)
    return dict(held)


def share_of_outliers(view: CausalLM) -> float:
    """The share of the weights in twelve bits that are outliers; 0 where none are in twelve bits."""
    products = [
        each for each in view.modules() if isinstance(each, PackedMatmul) and each.num_outliers is not None
    ]
    num_weights = sum(each.width * each.num_inputs for each in products)
    return sum(each.num_outliers or 0 for each in products) / max(num_weights, 1)


class InPlaceNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), without the copies that
    ``transformers`` makes.

    A decode step runs two for every layer, over a few rows each, and calling operators is most of their cost:
    on one core a norm of 6 rows of 576 takes 60 microseconds in ``transformers``, the same with
    ``F.rms_norm``, and 38 here.
    """

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (x * scale).mul_(self.weight)


def in_place_norm(module: nn.Module) -> InPlaceNorm | None:
    """The norm that gives the same bits as ``module``, a norm of ``transformers``; None for all others.

    Norms are recognised by the name of their epsilon, and accepted only if a trial gives equal results.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # norms of recurrent layers take a gate too
        return None
    norm = InPlaceNorm(weight, eps)
    trial = torch.linspace(-2, 3, 7 * len(weight), dtype=weight.dtype, device=weight.device).view(7, -1)
    with torch.no_grad():
        return norm if torch.equal(norm(trial), module(trial)) else None
