"""A snapshot of a base, to detect later changes.

An engine computes with its own modules over copied weights, and a cache holds keys and values of the weights
that wrote it. Both are valid only while the base does not change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

NUM_SAMPLES = 8
"""Values of each weight that are compared: a write through ``.data`` is seen in nothing else."""
HARMLESS_HOOKS = ("medusa.", "transformers.", "accelerate.", "peft.")
"""Packages whose hooks look on, or are shared with every view (accelerate's)."""
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
"""How a layer of peft's is switched."""
_LINEAR_FORWARD = nn.Linear.forward
_version = operator.attrgetter("_version")


def alteration_of(model: nn.Module) -> str | None:
    """A patch on a module of ``model`` that a replacement would not run: a hook, or a ``forward`` of its own.
    In words; None without any."""
    if any(_counting(getattr(module_hooks, name)) for name in GLOBAL_HOOKS):
        return "a forward hook of all modules"
    if nn.Linear.forward is not _LINEAR_FORWARD:
        return "a forward of its own in nn.Linear"
    for name, module in model.named_modules():
        if _counting(module._forward_hooks) or _counting(module._forward_pre_hooks):
            return f"a forward hook on {name or 'the model'}"
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            return f"a forward of its own in {name or 'the model'}"
    return None


def _counting(hooks: dict[int, Any]) -> bool:
    present = list(hooks.values())  # other threads may add some meanwhile
    return any(not str(getattr(hook, "__module__", "")).startswith(HARMLESS_HOOKS) for hook in present)


class Snapshot:
    """The state of ``modules`` at construction: their submodules, settings, buffers, adapters and weights."""

    def __init__(self, *modules: nn.Module):
        self._parts = [part for module in modules for part in module.modules()]
        self._layers = [vars(part) for part in self._parts if _ADAPTER_STATE[0] in vars(part)]
        self._holders: list[dict[str, Any]] = [  # the dictionaries of each part's modules and weights
            each for part in self._parts for each in (part._modules, part._parameters)
        ]
        self._held = self._held_now()
        self._buffers = self._buffers_now()
        self._settings = [
            (vars(part), name, value)
            for part in self._parts
            for name, value in vars(part).items()
            if type(value) is float
        ]
        self._weights = [each for each in self._held if isinstance(each, Tensor)]
        self._counted = [weight for weight in self._weights if not weight.is_inference()]
        self._plain = [weight for weight in self._weights if type(weight) is nn.Parameter]
        self._samples: dict[int, list[np.ndarray]] = {}  # by the bytes of a value
        for weight in self._plain:
            if weight.device.type == "cpu":
                # numpy joins these bytes in a fifth of the time that torch takes
                sample = _strided(weight)[:, None].view(torch.uint8).numpy()
                self._samples.setdefault(weight.itemsize, []).append(sample)
        self._remote: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for weight in self._plain:
            if weight.device.type == "cuda":
                self._remote.setdefault((weight.device, weight.dtype), []).append(_strided(weight))
        self._written = self._written_now()
        self._values = self._values_now()

    @property
    def is_current(self) -> bool:
        """Whether nothing has been replaced, moved, cast or written to, and no adapter been switched."""
        return (
            self.is_unwritten
            and all(part.get(name) == value for part, name, value in self._settings)
            and _same(self._buffers, self._buffers_now(), _equal)
            and self._values == self._values_now()
        )

    @property
    def is_unwritten(self) -> bool:
        """The same for only modules, adapters and weights, on a CPU: cheap enough for every step."""
        return self._written == self._written_now() and _same(self._held, self._held_now(), _is_lent)

    def _held_now(self) -> list[Any]:
        """The class, the modules and the weights of every part: all that makes a tree of modules."""
        return [*map(type, self._parts), *chain.from_iterable(map(dict.values, self._holders))]

    def _buffers_now(self) -> list[Tensor]:
        return [each for part in self._parts for each in part._buffers.values() if each is not None]

    def _written_now(self) -> tuple[list[int], list[int], bytes, list[str]]:
        pointers = [*map(Tensor.data_ptr, self._plain)]
        values = b"".join(np.concatenate(each).tobytes() for each in self._samples.values())
        adapters = [repr([layer.get(name) for name in _ADAPTER_STATE]) for layer in self._layers]
        return [*map(_version, self._counted)], pointers, values, adapters

    def _values_now(self) -> list[bytes]:
        return [torch.cat(each).view(torch.uint8).cpu().numpy().tobytes() for each in self._remote.values()]


def _same(ours: list[Any], theirs: list[Any], is_same: Callable[[Any, Any], bool]) -> bool:
    """Whether two lists hold the same objects, but where ``is_same`` says that another one will do."""
    if len(ours) != len(theirs):
        return False
    return all(map(operator.is_, ours, theirs)) or all(
        one is other or is_same(one, other) for one, other in zip(ours, theirs, strict=True)
    )


def _is_lent(weight: Any, _other: Any) -> bool:
    """Whether accelerate puts a weight there for each pass, and takes it away again."""
    return isinstance(weight, Tensor) and weight.is_meta


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two buffers hold the same: some rotary embeddings put an equal one there in each pass."""
    return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


def _strided(weight: Tensor) -> Tensor:
    """Some values of a weight, spread over its memory: a view."""
    if not weight.numel():
        return weight.detach().view(-1)
    span = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    return weight.detach().as_strided((min(NUM_SAMPLES, span + 1),), (max(1, span // (NUM_SAMPLES - 1)),))
