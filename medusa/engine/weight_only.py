"""Weights in int8 or int4 through torchao, activations as loaded: a model of its own, on a CPU or a GPU.

Int8 weights have one scale per output channel, int4 ones a scale and a zero for every 64 inputs. The output
embedding stays as it is: it decides between near tokens, heads read its rows, and where it is tied, so does
the input. Layers that are no ``nn.Linear`` stay too. The base keeps its weights beside the smaller ones; to
hold those alone, load a model that ``transformers`` has quantised and run it with ``engine="eager"``.

An int8 weight is converted to the precision of the activations before each product, and written to memory
so, which takes back what reading less has saved: on SmolLM2-135M in float32 and one core, a step of 1 token
took 0.8 of the time of ``packed`` and one of 6 tokens 1.7 times it, where ``int8`` took 0.6 and 0.8 of it.
With ``step="compiled"`` conversion and product are torch.compile's to join. Int4 weights go through a product
of torch's own, as they are. Neither has been timed on a GPU.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from medusa.base.causal_lm import CausalLM, copy_sharing_parameters
from medusa.engine.views import missing_for_plain_weights

INT4_GROUP = 64
"""Inputs of a layer that share a scale and a zero."""

INT4_CAPABILITY = (8, 0)
"""The oldest CUDA devices that have torch's int4 product."""


def missing_for_int8_weights(base: CausalLM) -> str | None:
    """What :func:`int8_weights_view` lacks to run ``base``; None when nothing."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao (pip install torchao)"
    if not quantisable_linears(base):
        return f"linear layers (nn.Linear) to quantise, and {type(base).__name__} has none"
    return missing_for_plain_weights(base)


def missing_for_int4_weights(base: CausalLM) -> str | None:
    """What :func:`int4_weights_view` lacks to run ``base``; None when nothing."""
    if base.dtype != torch.bfloat16 or base.device.type != "cuda":
        return f"a bfloat16 model on a CUDA device (int4 products), got {base.dtype} on {base.device.type}"
    if (capability := torch.cuda.get_device_capability(base.device)) < INT4_CAPABILITY:
        oldest, ours = (".".join(map(str, each)) for each in (INT4_CAPABILITY, capability))
        return f"a CUDA device of compute capability {oldest} or newer, got {ours}"
    widths = sorted({linear.in_features for linear in quantisable_linears(base)})
    if odd := [str(width) for width in widths if width % INT4_GROUP]:
        return (
            f"linear layers whose inputs are a multiple of {INT4_GROUP} wide, got widths of {', '.join(odd)}"
        )
    return missing_for_int8_weights(base)


def int8_weights_view(base: CausalLM) -> CausalLM:
    """A model that computes as ``base`` does, with linear layers that hold int8 weights.

    ``base`` is left as it is, and the view shares all its other parameters. The int8 weights are taken when
    this is called and do not follow later changes of the parameters.
    """
    from torchao.quantization import Int8WeightOnlyConfig

    return _quantised_view(base, Int8WeightOnlyConfig(version=2, set_inductor_config=False))


def int4_weights_view(base: CausalLM) -> CausalLM:
    """The same with int4 weights."""
    from torchao.quantization import Int4WeightOnlyConfig

    tiled = Int4WeightOnlyConfig(  # the layout of the product that torch has, the default's needs a library
        group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
    )
    return _quantised_view(base, tiled)


def quantisable_linears(base: CausalLM) -> list[nn.Linear]:
    """The linear layers of ``base`` but its output embedding; a subclass has a forward of its own."""
    output = base.get_output_embeddings()
    return [module for module in base.modules() if type(module) is nn.Linear and module is not output]


def _quantised_view(base: CausalLM, config: Any) -> CausalLM:
    from torchao.quantization import quantize_

    view = copy_sharing_parameters(base)
    chosen = set(quantisable_linears(view))
    quantize_(view, config, filter_fn=lambda module, name: module in chosen)
    return view.eval()
