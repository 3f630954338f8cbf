"""How the base model's layers are executed: as loaded, or with weights packed for this processor.

A CPU's ordinary matrix product is poor between 2 and 32 rows, which is exactly what verifying a tree asks
for. Packing each weight once into the blocked layout of oneDNN (what Inductor's freezing does under
``torch.compile``) mends that without compiling anything. The arithmetic stays float32.
"""

from __future__ import annotations

import copy
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from medusa.base import CausalLM

Engine = Literal["auto", "eager", "packed"]
"""auto: packed where it applies, eager elsewhere. eager: the model as loaded. packed: see :func:`packed`."""

PACKED_ROWS = 16
"""Rows that the packed layout is tuned for; any number works."""


def prepared_base(base: CausalLM, engine: Engine) -> CausalLM:
    """The model to decode with: ``base`` itself, or a packed view of it.

    Raises:
        ValueError: unknown engine, or one that cannot run this model.
    """
    engine = resolved_engine(base, engine)
    if engine == "eager":
        return base
    if not can_pack(base):
        raise ValueError(
            f"engine='packed' needs a float32 model on the CPU and a torch with oneDNN, got {base.dtype} on "
            f"{base.device}; use engine='eager'"
        )
    return packed(base)


def resolved_engine(base: CausalLM, engine: Engine) -> Engine:
    """``engine``, or what "auto" stands for on this model.

    Raises:
        ValueError: unknown engine.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine must be one of {get_args(Engine)}, got {engine!r}")
    if engine == "auto":
        return "packed" if can_pack(base) else "eager"
    return engine


def can_pack(base: CausalLM) -> bool:
    """Whether :func:`packed` applies: float32 weights on a CPU, and a torch built with oneDNN."""
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return has_onednn and base.device.type == "cpu" and base.dtype == torch.float32


def packed(base: CausalLM) -> CausalLM:
    """A model that shares every parameter with ``base`` and whose linear layers read packed weights.

    ``base`` is left as it is. The packed weights take as much memory again as the linear layers; they are
    taken when this is called and do not follow later changes of the parameters.
    """
    shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    clone = copy.deepcopy(base, shared)
    for name, module in list(clone.named_modules()):
        if type(module) is nn.Linear:
            clone.set_submodule(name, PackedLinear(module))
    return clone.eval()


class PackedLinear(nn.Module):
    """A linear layer over a packed weight: (..., in) -> (..., out)."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = (
            linear.weight,
            linear.bias,
        )  # shared; the weight is kept for those who read it
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return out.reshape(*x.shape[:-1], self.weight.shape[0])
