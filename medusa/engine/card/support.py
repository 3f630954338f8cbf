"""Whether the kernels for a card can run, and the base that computes with them."""

from __future__ import annotations

import functools
import importlib.util

import torch

from medusa.base.causal_lm import CausalLM
from medusa.base.recurrent import is_recurrent
from medusa.console import log_console
from medusa.engine.views import kinds_of_devices, unplain_reason

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_TRITON = (
    "triton, which torch for CUDA brings along and which is not installed here (pip install triton, for the "
    "version of torch)"
)


def is_on_a_card(base: CausalLM) -> bool:
    """Whether all weights of ``base`` are on CUDA devices."""
    return kinds_of_devices(base) == {"cuda"}


def card_unsupported_reason(base: CausalLM) -> str | None:
    """The missing requirement of :func:`fused_on_card` for ``base``, which is on a card; None if there is
    none."""
    if base.dtype not in DTYPES:
        return f"a base in bfloat16, float16 or float32, got {base.dtype}"
    devices = {parameter.device for parameter in base.parameters()}
    if len(devices) > 1:
        return f"the whole model on one card, and this one is on {', '.join(sorted(map(str, devices)))}"
    if is_recurrent(base):
        return "a base whose layers are all attention, and this one keeps a state"
    return unplain_reason(base) or triton_unsupported_reason(devices.pop())


@functools.cache
def triton_unsupported_reason(device: torch.device) -> str | None:
    """Why no kernel in Triton runs on ``device``; None where one has run."""
    if importlib.util.find_spec("triton") is None:
        return NO_TRITON
    from medusa.engine.card.row_kernels import gated

    try:
        result = gated(torch.ones(1, 2, device=device), is_silu=True)
    except Exception as error:  # of a compiler, a driver or a linker, each with classes of its own
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        return f"triton, which cannot compile for {device} here ({first_line})"
    silu_of_one = 0.7310586
    if abs(float(result) - silu_of_one) > 1e-5:
        return f"triton, which computes something else on {device} here: SiLU of 1 is {float(result):.4g}"
    return None


def fused_on_card(base: CausalLM) -> CausalLM:
    """A model that shares the parameters of ``base``, and computes its decoder layers with the kernels.

    The weights of layers that one product computes then lie in one piece, and the parameters of ``base`` are
    views of it.

    Raises:
        ValueError: none of its layers can be computed so, and it holds no blocks of a file either.
    """
    from medusa.engine.card.block_modules import QuantisedLinear
    from medusa.engine.card.fused_layer import card_view, num_fused

    view, reasons = card_view(base)
    holds_blocks = any(type(module) is QuantisedLinear for module in base.modules())
    if num_fused(view) == 0 and not holds_blocks:
        raise ValueError(
            f"engine='packed' knows no layer of {type(base).__name__} on a card: {'; '.join(reasons)}; use "
            "engine='eager'"
        )
    if reasons:
        log_console().print(
            f"engine='packed' leaves some layers to their modules: {'; '.join(reasons)}",
            style="dim",
            soft_wrap=True,
        )
    return view
