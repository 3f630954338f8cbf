"""Views of a model: the same parameters, other modules to compute with them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from medusa.base.architecture_check import is_tested, verification_error
from medusa.base.attention import TREE_ATTENTION
from medusa.base.causal_lm import CausalLM, copy_sharing_parameters
from medusa.base.experts import is_experts
from medusa.base.rowwise import RowwiseActivation
from medusa.engine.kernels import (
    PackedLinear,
    PackedMatmul,
    kernels_unsupported_reason,
    narrowest_dtype,
)
from medusa.engine.packed_columns import pack_columns
from medusa.engine.packed_experts import PackedExperts, is_router, pack_router
from medusa.engine.snapshot import alteration_of

ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")


def view_of(base: CausalLM, int8: bool = False) -> CausalLM:
    """A model that shares every parameter and buffer with ``base``, and computes with the kernels.

    ``base`` is not changed. The packed weights are held in addition to its own, and do not follow later
    changes of the parameters.
    """
    return with_kernels(copy_sharing_parameters(base), int8)


def with_kernels(model: CausalLM, int8: bool, release: Callable[[Tensor], Tensor] | None = None) -> CausalLM:
    """``model`` with its modules replaced by modules that compute with the kernels.

    Linear layers with the same input share one product, each of the others has its own; a subclass of
    ``nn.Linear`` keeps its own forward. Norms are replaced if the results stay bit-identical, attention if
    :func:`takes_tree_attention` is true.

    Args:
        int8: whether weights are rounded to int8, also weights that are packed already. release: called with
        each packed weight, to free it; its return value replaces the weight.
    """
    for parent in list(model.modules()):
        pack_linears(parent, int8, release)
        for name, child in list(parent.named_children()):
            norm = in_place_norm(child)
            if isinstance(child, PackedMatmul) and int8 and not (child.is_int8 or is_router(parent)):
                setattr(parent, name, child.rounded())
                if isinstance(parent, JoinedLinear):
                    parent.share(parent.product)
            elif norm is not None:
                setattr(parent, name, norm)
            elif type(child).__module__ in ACTIVATION_MODULES:
                setattr(parent, name, RowwiseActivation(child))
        pack_columns(parent, int8)
    if takes_tree_attention(model):
        model.set_attn_implementation(TREE_ATTENTION[_attention_of(model)])
    return model.eval()


def pack_linears(parent: nn.Module, int8: bool, release: Callable[[Tensor], Tensor] | None = None) -> None:
    """Replace the linear layers directly below ``parent``; the arguments are those of
    :func:`with_kernels`."""
    others: dict[nn.Module, nn.Module] = {}
    for linears in joinable_linears(parent):
        if not int8 and len({narrowest_dtype(each.weight.detach()) for each in linears}) > 1:
            continue  # one product is in one type, and the narrower ones would be widened to it
        others.update(zip(linears, joined(linears, int8), strict=True))
    child: Any
    for name, child in list(parent.named_children()):
        if type(child) in (nn.Linear, Conv1D):
            packed: Any = others[child] if child in others else PackedLinear(child, int8)
            if release is not None:
                del packed.weight
                packed.weight = release(child.weight.detach())
            setattr(parent, name, packed)
        elif is_experts(child) and not isinstance(parent, PackedExperts):
            setattr(parent, name, PackedExperts.of(child, int8, release))
    if any(isinstance(child, PackedExperts) for child in parent.children()):
        pack_router(parent, release or Tensor.detach)


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


ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names, within one module, of layers that read one input, in the order in which they are called. A layer
with another input still gives the right result, only without a gain."""


def joinable_linears(module: nn.Module) -> Iterator[list[nn.Linear]]:
    """The groups of linear layers directly below ``module`` that read one input."""
    for names in ONE_INPUT:
        layers = [module._modules.get(name) for name in names]
        linears = [layer for layer in layers if type(layer) is nn.Linear]
        inputs = {(layer.in_features, layer.bias is None) for layer in linears}
        if len(linears) == len(names) and len(inputs) == 1:
            yield linears


def joined(linears: list[nn.Linear], int8: bool = False) -> list[nn.Module]:
    """Replacements of ``linears`` that share one product."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    product = PackedMatmul(
        [linear.weight.detach() for linear in linears], torch.cat(biases) if biases else None, int8
    )
    return share_product(linears, product)


def share_product(linears: Sequence[nn.Linear], product: PackedMatmul) -> list[nn.Module]:
    """Replacements of ``linears`` that are computed by ``product``, which has their outputs in order."""
    shared = _JointProduct(product, [linear.out_features for linear in linears])
    return [JoinedLinear(linear, shared, index) for index, linear in enumerate(linears)]


class JoinedLinear(nn.Module):
    """A linear layer that is computed together with others of the same input: (..., in) -> (..., out)."""

    def __init__(self, linear: nn.Linear, shared: _JointProduct, index: int):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias  # shared with the base
        self.shared = shared
        """The product of all of them, in which this one's columns are those of its place."""
        self._index = index
        if index == 0:
            self.product = shared.product

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.part(self._index, x)

    def share(self, product: nn.Module) -> None:
        """Have all layers of the group compute with ``product``."""
        self.shared.product = product


class _JointProduct:
    """One product for several layers, and its result for the last input until all have taken their part.

    Not an ``nn.Module``, so that a model does not list the same one under each of its layers.
    """

    def __init__(self, product: nn.Module, widths: list[int]):
        self.product = product
        self.widths = widths
        self._held: tuple[Tensor, int, tuple[Tensor, ...]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_held": None}

    def part(self, index: int, x: Tensor) -> Tensor:
        """Columns of layer ``index`` for input ``x`` (..., in)."""
        held = self._held
        version = 0 if x.is_inference() else x._version
        if held is None or held[0] is not x or held[1] != version:
            held = (x, version, self.product(x).split(self.widths, dim=-1))
        self._held = None if index == len(self.widths) - 1 else held
        return held[2][index]
