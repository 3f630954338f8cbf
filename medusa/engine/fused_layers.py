"""Decoder layers as a few operators of ours: how passes run where torch cannot compile them, for want of a
compiler.

Run as modules, a layer is fifty operators of torch and as many calls of Python, which take as long as half
of its products. Here it is nine. It is known by its modules: norms before attention and before a gated unit,
one product for queries, keys and values, rotary angles that turn halves of a head, and sums with what came
before, as in Llama, Mistral and Qwen2. A trial then decides whether it computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from medusa.engine.pass_parts import LayerCall, LayersAsFunction, tensors_in
from medusa.engine.programs import Part
from medusa.engine.views import InPlaceNorm
from medusa.engine.weights.products import JoinedLinear, PackedMatmul

HALF_HEAD = 16
"""Half of a head's width is a multiple of this: whole vectors of any processor."""
CLOSE = 0.05
"""Largest difference to the modules in a trial, as a share of the largest number that a layer adds: rounding,
also that of rows to 8 bits, stays below it, and a layer of another kind does not."""
CHILDREN = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
"""The modules of such a layer, by where they are."""


@dataclass(frozen=True)
class FusedLayer:
    """The weights of a layer, and what else it computes with."""

    first_norm: InPlaceNorm
    rows: PackedMatmul
    """Queries, keys and values."""
    output: PackedMatmul
    second_norm: InPlaceNorm
    gates: PackedMatmul
    down: PackedMatmul
    scale: float
    places: tuple[int, int, int]
    """Which of the tensors that the layer takes are its mask, its cosines and its sines."""


class FusedLayers:
    """The layers of a group as a function of the inputs of their program; its result is the program's.

    Args:
        is_tried: whether layers of their class were tried before.

    Raises:
        ValueError: a layer is of another kind, or computes something else.
    """

    def __init__(self, part: Part, is_tried: bool):
        function = part.module
        assert type(function) is LayersAsFunction, "a group of layers is made of one"
        self._num_places = len(function.places)
        self._takes = [[function.places.index(place) for place in taken] for taken in function.takes]
        self._layers = [fused_layer(call) for call in function.calls]
        kept = [part for parts in function.parts for part in parts]
        if len(kept) != len(self._layers) or any(part.num_inputs != 2 for part in kept):
            raise ValueError("keep something else than keys and values")
        if not is_tried and not self._distance(function, part.trials[0]) <= CLOSE:
            raise ValueError("compute something else than their modules")

    @torch.no_grad()
    def _distance(self, function: LayersAsFunction, inputs: Sequence[Tensor]) -> float:
        """The largest difference to ``function``, as a share of what layers add to their input, where that
        and all keys and values are noise: the texts of a trial are all alike."""
        generator = torch.Generator().manual_seed(0)
        first = self._takes[0][0]
        changed = (first, *range(self._num_places + 1, len(inputs)))
        noise = {place: torch.randn(inputs[place].shape, generator=generator) for place in changed}
        hidden = noise[first]
        both = []
        for compute in (self, lambda values: function(*values)):
            values = [noise[place].clone() if place in noise else value for place, value in enumerate(inputs)]
            both.append(torch.stack([hidden, *compute(values)]))
        mine, theirs = both
        return float((mine - theirs).abs().max() / theirs.diff(dim=0).abs().max())

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        ops = torch.ops.medusa
        slots = inputs[self._num_places]
        entries = iter(inputs[self._num_places + 1 :])
        hidden = inputs[self._takes[0][0]].contiguous()
        normed = ops.norm(hidden, self._layers[0].first_norm.weight, self._layers[0].first_norm.eps)
        next_norms = [layer.first_norm for layer in self._layers[1:]]
        outputs = []
        for number, layer in enumerate(self._layers):
            seen, cosines, sines = (inputs[self._takes[number][place]] for place in layer.places)
            keys = next(entries)
            values = next(entries)
            queries = ops.turned_queries(layer.rows(normed), cosines, sines, slots, keys, values)
            attended = ops.tree_attention(queries, keys, values, seen, layer.scale, 0.0, None)
            more = layer.output(attended.flatten(2))
            hidden, normed = ops.sum_and_norm(hidden, more, layer.second_norm.weight, layer.second_norm.eps)
            more = layer.down(ops.gated(layer.gates(normed)))
            if number < len(next_norms):
                norm = next_norms[number]
                hidden, normed = ops.sum_and_norm(hidden, more, norm.weight, norm.eps)
            else:
                hidden = hidden + more
            outputs.append(hidden)
        return outputs


def fused_layer(call: LayerCall) -> FusedLayer:
    """The weights of the layer that ``call`` is of.

    Raises:
        ValueError: it is of another kind.
    """
    layer: Any = call.layer
    for name, children in CHILDREN.items():
        part = layer.get_submodule(name) if {*layer._modules} == CHILDREN[""] else layer
        if {*part._modules} != children or part._parameters:
            raise ValueError(f"are of another kind: {type(part).__name__} is made of other modules")
    attention = layer.self_attn
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    angles: Any = call.kwargs[0].get("position_embeddings")
    is_known = (
        all(type(norm) is InPlaceNorm for norm in norms)
        and _is_joint(attention.q_proj, attention.k_proj, attention.v_proj)
        and _is_joint(layer.mlp.gate_proj, layer.mlp.up_proj)
        and type(getattr(layer.mlp.act_fn, "function", None)) in (nn.SiLU, SiLUActivation)
        and attention.head_dim % (2 * HALF_HEAD) == 0
        and type(angles) is tuple
        and all(angle.shape[-1] == attention.head_dim for angle in angles)
    )
    if not is_known:
        raise ValueError(f"are of another kind: {type(layer).__name__} has other norms, gates or angles")
    taken = tensors_in((call.args[0], call.kwargs[0]))
    used = (call.kwargs[0]["attention_mask"], *angles)
    seen, cosines, sines = (
        next(place for place, tensor in enumerate(taken) if tensor is each) for each in used
    )
    return FusedLayer(
        first_norm=layer.input_layernorm,
        rows=attention.q_proj.product,
        output=attention.o_proj,
        second_norm=layer.post_attention_layernorm,
        gates=layer.mlp.gate_proj.product,
        down=layer.mlp.down_proj,
        scale=attention.scaling,
        places=(seen, cosines, sines),
    )


def _is_joint(*linears: Any) -> bool:
    """Whether these, in this order, are all that one product computes."""
    if any(type(linear) is not JoinedLinear for linear in linears):
        return False
    shared = linears[0].shared
    return len(shared.widths) == len(linears) and all(linear.shared is shared for linear in linears)
