"""The LoRA adapter that joint training leaves beside the heads, and putting it onto a base model.

Heads trained together with an adapter (Medusa-2, arXiv 2401.10774, section 2.2.2) belong to the *adapted*
base: they read its states, and decoding with them is exact with respect to its text. The adapter stays
unmerged, in peft's own format, so that a user who has the base downloads only a few megabytes.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, copy_sharing_parameters
from medusa.heads.fingerprint import BaseFingerprint

PREFIX = "base_model.model."
FIRST = ".lora_A.weight"
SECOND = ".lora_B.weight"
"""A layer's two tensors are called PREFIX + layer + FIRST, (r, in), and PREFIX + layer + SECOND, (out, r)."""


@dataclass(frozen=True)
class Adapter:
    """An adapter as peft's two files hold it."""

    config: Mapping[str, Any]
    """adapter_config.json."""
    weights: Mapping[str, Tensor]
    """adapter_model.safetensors."""
    fingerprint: BaseFingerprint | None = None
    """The fingerprint of the base it was trained on."""

    @property
    def layers(self) -> list[str]:
        """Names of the base's layers that it changes."""
        return [name[len(PREFIX) : -len(FIRST)] for name in self.weights if name.endswith(FIRST)]

    def summary(self) -> dict[str, Any]:
        """Its description, in plain values."""
        return {
            "type": "lora",
            "rank": self.config.get("r"),
            "alpha": self.config.get("lora_alpha"),
            "targets": sorted({name.rpartition(".")[2] for name in self.layers}),
            "num_layers": len(self.layers),
            "num_parameters": sum(weight.numel() for weight in self.weights.values()),
        }


def peft_library() -> ModuleType:
    """The peft package.

    Raises:
        ImportError: it is not installed; the message says how to.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("a LoRA adapter needs peft, which is not installed: pip install peft") from error
    return peft


def apply_adapter(base: CausalLM, adapter: Adapter) -> None:
    """Put ``adapter`` onto ``base``, which is changed: its layers are wrapped, its weights stay as they are.

    Raises:
        ImportError: peft is not installed.
        ValueError: ``base`` carries an adapter already, or is not the model that this one was trained on;
            it is left as it was. Or peft cannot apply the adapter's configuration.
    """
    peft = peft_library()
    if _adapter_names(base):
        raise ValueError(
            f"base model {base.name_or_path!r} carries an adapter already "
            f"({', '.join(_adapter_names(base))}); give one without"
        )
    _check_fits(base, adapter)
    _check_base(base, adapter)
    try:
        wrapped = injected(base, peft.PeftConfig.from_peft_type(**adapter.config))
    except (AttributeError, ImportError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"peft cannot apply the adapter's configuration: {error}") from error
    state = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    expected = {name: weight.shape for name, weight in state.items()}
    shapes = {name: weight.shape for name, weight in adapter.weights.items()}
    differing = sorted(name for name in expected | shapes if expected.get(name) != shapes.get(name))
    if differing:
        raise ValueError(f"the adapter's tensors do not fit its configuration: {differing[:4]} ...")
    peft.set_peft_model_state_dict(wrapped, dict(adapter.weights))
    base.requires_grad_(False).eval()


def injected(base: CausalLM, config: Any) -> Any:
    """peft's wrapper around ``base``, whose layers now carry the new adapter that ``config`` describes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        return peft_library().get_peft_model(base, config)


def folded(base: CausalLM) -> CausalLM:
    """``base`` with its LoRA layers as plain linear ones: ``base`` itself where there are none.

    The result shares every parameter with ``base``, which is not changed, except the weights of adapted
    layers: these are sums of the layer's own weight and the adapter's delta. A layer that is more than such a
    sum is not merged.
    """
    if not _adapter_names(base):
        return base
    clone = copy_sharing_parameters(base)
    for name, module in list(clone.named_modules()):
        if _is_plain_sum(module):
            clone.set_submodule(name, _folded_linear(module))
    return clone.eval()


def _is_plain_sum(module: Any) -> bool:
    """Whether ``module`` is a linear layer with LoRA products at work on it, and nothing else."""
    if type(getattr(module, "base_layer", None)) is not nn.Linear or not hasattr(module, "lora_A"):
        return False
    if module.disable_adapters or module.merged or getattr(module, "lora_variant", {}):
        return False
    return all(product.bias is None for product in module.lora_B.values())


def _folded_linear(module: Any) -> nn.Linear:
    """The plain linear layer that computes as an adapted one does."""
    layer = module.base_layer
    deltas = [module.get_delta_weight(name) for name in module.active_adapters if name in module.lora_A]
    weight = layer.weight.detach() + sum(deltas)
    linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    linear.bias = layer.bias
    return linear


def check_carries(base: CausalLM, adapter: Adapter) -> None:
    """Raise ValueError unless exactly ``adapter`` works in ``base``."""
    _check_base(base, adapter)
    names = _adapter_names(base)
    advice = (
        "pass the base's path or hub id and the adapter is loaded with it, or put it onto the loaded base "
        "first: apply_adapter(base, load_heads(...).adapter), which changes base"
    )
    if not names:
        raise ValueError(
            f"the heads were trained together with a LoRA adapter, and the loaded base model "
            f"{base.name_or_path!r} has none; {advice}. A base into which it was merged goes with "
            "MedusaModel(base, heads, tree)"
        )
    if not any(_is_at_work(base, name) and _equal(base, name, adapter) for name in names):
        raise ValueError(
            f"the heads were trained together with a LoRA adapter, and the loaded base model "
            f"{base.name_or_path!r} carries another ({', '.join(names)}), or has it switched off; {advice}"
        )


def _check_base(base: CausalLM, adapter: Adapter) -> None:
    """Raise ValueError when ``base`` is another model than ``adapter`` was trained on."""
    difference = None if adapter.fingerprint is None else adapter.fingerprint.difference(base)
    if difference is not None:
        raise ValueError(
            f"the adapter was trained on another model than {base.name_or_path!r}: {difference}; load the "
            "base model that the heads were trained on"
        )


def _adapter_names(base: CausalLM) -> list[str]:
    """The names under which peft has put adapters onto ``base``."""
    return list(getattr(base, "peft_config", None) or {})


def _is_at_work(base: CausalLM, name: str) -> bool:
    """Whether the layers that carry adapter ``name`` use it, and no other."""
    layers = [module for module in base.modules() if name in getattr(module, "lora_A", ())]
    return all(layer.active_adapters == [name] and not layer.disable_adapters for layer in layers)


def _equal(base: CausalLM, name: str, adapter: Adapter) -> bool:
    """Whether the adapter called ``name`` in ``base`` has the weights of ``adapter``, in its own type."""
    state = peft_library().get_peft_model_state_dict(base, adapter_name=name, save_embedding_layers=False)
    carried = {key.removeprefix(PREFIX): weight for key, weight in state.items()}
    expected = {key.removeprefix(PREFIX): weight for key, weight in adapter.weights.items()}
    return carried.keys() == expected.keys() and all(
        weight.shape == expected[key].shape
        and torch.equal(weight.cpu(), expected[key].to(weight.dtype).cpu())
        for key, weight in carried.items()
    )


def _check_fits(base: CausalLM, adapter: Adapter) -> None:
    """Raise ValueError unless every layer that ``adapter`` changes is in ``base``, and as large."""
    _check_ranks(adapter)
    modules = dict(base.named_modules())
    for name in adapter.layers:
        second = adapter.weights.get(PREFIX + name + SECOND)
        inputs = adapter.weights[PREFIX + name + FIRST].shape[1]
        outputs = 0 if second is None else second.shape[0]
        sizes = linear_sizes(modules[name]) if name in modules else None
        if sizes != (inputs, outputs):
            holds = "has no such layer" if sizes is None else f"has {sizes[0]} x {sizes[1]}"
            raise ValueError(
                f"the adapter changes layer {name!r} of {inputs} inputs x {outputs} outputs, base model "
                f"{base.name_or_path!r} {holds}; load the base model that the heads were trained on"
            )


def _check_ranks(adapter: Adapter) -> None:
    """Raise ValueError unless the configuration, from which peft makes tensors, asks for ranks that the files
    hold."""
    factors = {name: weight for name, weight in adapter.weights.items() if name.endswith((FIRST, SECOND))}
    for name, factor in factors.items():
        if factor.dim() != 2:
            raise ValueError(
                f"the adapter's tensor {name!r} must be a matrix, got shape {tuple(factor.shape)}"
            )
    largest = max((len(factor) for name, factor in factors.items() if name.endswith(FIRST)), default=0)
    pattern = adapter.config.get("rank_pattern") or {}
    ranks = [adapter.config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    for rank in ranks:
        if not isinstance(rank, int) or not 1 <= rank <= largest:
            raise ValueError(
                f"the adapter's configuration must ask for ranks from 1 to {largest}, the largest that its "
                f"tensors hold, got {reprlib.repr(rank)}; the files do not belong together"
            )


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer, quantised or transformers' Conv1D too; None of anything else."""
    for inputs, outputs in (("in_features", "out_features"), ("nx", "nf")):
        if hasattr(module, inputs) and hasattr(module, outputs):
            return getattr(module, inputs), getattr(module, outputs)
    return None
