"""Int8 weights and activations: a quarter of the memory traffic, on a model of its own.

Weights have one scale per output channel, activations one per row, taken when the row comes. One scale for
all rows would let the other nodes of a tree change a node's logits. Sums are of integers and therefore
exact, so what a row gives does not depend on how many rows come with it.

Rounding to int8 turns a difference in the last bit of a float into a whole step wherever a value lies on
the edge of two steps, and attention does differ in its last bits with the number of queries and slots.
Hence attention runs in float64 here (:data:`medusa.base.attention.FLOAT64_ATTENTION`): rounded to float32,
its result is the same for any tree, but for the rare value on the very edge of two floats. On SmolLM2-135M (6
prompts, 32 tokens) a tree of 8 nodes gave the plain answer to all 6 so, and to none with float32 attention;
the price on one core is 7 % of a step of 1 or 6 tokens after 128 tokens, 27 and 47 % after 1,024.

What int8 does to that model's own answers, teacher-forced (502 tokens): the likeliest token is that of
float32 for 93.2 % (98.3 % where float32 leads by more than half a nat), mean KL divergence 0.031 nats. An
output embedding left in float32 gains little (93.4 %, 0.028), so it is int8 too.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from medusa.base.attention import FLOAT64_ATTENTION
from medusa.base.causal_lm import CausalLM, embedding_weight
from medusa.engine.views import PackedProduct, missing_for_plain_float32, takes_attention, view_of

WEIGHT_STEPS = 127
"""Steps of a weight on either side of zero."""

_TINY = torch.tensor(torch.finfo(torch.float32).tiny)
"""Keeps the scale of a row of zeros above zero; it is too small to change any other scale."""


def activation_steps() -> int:
    """Steps of an activation on either side of zero on this processor.

    Without VNNI instructions, products are added in pairs in 16 bits, which seven bits cannot overflow:
    2 * 127 * 127 < 2**15.
    """
    return 127 if torch.cpu._is_vnni_supported() else 63


def missing_for_int8(base: CausalLM) -> str | None:
    """What :func:`int8_view` lacks to run ``base``; None when nothing."""
    if (lacks := missing_for_int8_layers(base)) is not None or takes_attention(base, FLOAT64_ATTENTION):
        return lacks
    attention = base.config.get_text_config(decoder=True)._attn_implementation
    if attention != "sdpa":
        return f"attn_implementation='sdpa', to be run in float64, got {attention!r}"
    return f"attention that also runs in float64, and that of {type(base).__name__} does not"


def missing_for_int8_layers(base: CausalLM) -> str | None:
    """What :class:`Int8Linear` lacks to replace the linear layers of ``base``; None when nothing."""
    return missing_for_plain_float32(base) if has_int8_products() else "a torch built with oneDNN"


def has_int8_products() -> bool:
    """Whether this torch has oneDNN's int8 products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_prepack")


def int8_view(base: CausalLM, is_exact: bool = True) -> CausalLM:
    """A model that shares every parameter with ``base`` and whose linear layers compute in int8.

    ``base`` is left as it is. The int8 weights take a quarter of the linear layers' memory on top of it; they
    are taken when this is called and do not follow later changes of the parameters. Layers that are no
    ``nn.Linear`` stay float32.

    Without ``is_exact`` attention stays float32: several times faster in large batches of long rows, and what
    a row says then depends, where two tokens nearly tie, on the rows beside it.
    """
    view = view_of(base, Int8Linear, Int8Product)
    if is_exact:
        view.set_attn_implementation(FLOAT64_ATTENTION)
    return view


class Int8Product(PackedProduct):
    """Rows times a matrix in int8, float32 outside: (..., in) -> (..., out).

    Args:
        weight: (out, in); taken now, later changes do not count.
        bias: (out,), or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        scales = weight.abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / WEIGHT_STEPS
        codes = (weight / scales[:, None]).round_().to(torch.int8)
        super().__init__(codes.T)
        self.bias = bias
        self._steps = activation_steps()
        self._scales = scales / self._steps
        self._zeros = torch.zeros(len(scales), dtype=torch.long)
        self._zero = self._steps + 1  # unsigned activations: oneDNN has no fast product for signed ones
        self._rounded_zero = torch.tensor(self._zero + 0.5)

    def _in_own_layout(self, weight: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(weight.T.contiguous(), None)  # it is (in, out), packed or not

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=-1, keepdim=True).add_(_TINY)
        codes = torch.addcdiv(self._rounded_zero, x, largest, value=self._steps).to(torch.uint8)  # cut off
        out = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, self._zero, self._packed, self._scales, self._zeros, *_PLAIN_FLOAT32_OUTPUT
        )
        return out.mul_(largest) if self.bias is None else torch.addcmul(self.bias, out, largest)


class Int8Linear(Int8Product):
    """A linear layer that computes in int8."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.weight.detach(), linear.bias)
        self.weight = linear.weight  # shared with the base, for code that reads it

    def scorer_of(self, token_ids: Tensor) -> nn.Module:
        """See :class:`medusa.engine.quick_heads.QuickProducts`."""
        return int8_scorer(self, token_ids)

    def product_of(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """See :class:`medusa.engine.quick_heads.QuickProducts`."""
        return Int8Product(weight, bias)


def int8_scorer(output_embedding: nn.Module, token_ids: Tensor) -> Int8Product:
    """The rows of an output embedding for ``token_ids`` (V',) long alone, in int8."""
    weight, bias = embedding_weight(output_embedding).detach(), output_embedding.bias
    return Int8Product(weight[token_ids], None if bias is None else cast(Tensor, bias).detach()[token_ids])


_PLAIN_FLOAT32_OUTPUT: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
"""Of oneDNN's product: no bias, no scale, no operation after it."""
