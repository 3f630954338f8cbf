"""Int8 weights and activations: a quarter of the memory traffic, on a model of its own.

Weights have one scale per output channel, activations one per row, taken when the row comes. One scale for
all rows would let the other nodes of a tree change a node's logits. Sums are of integers and therefore
exact, so what a row gives does not depend on how many rows come with it.

An activation is two int8 digits, about 15 bits: some inputs are a hundred times as large as the others, and
one digit keeps too little of these. A product has twice the rows then, and reads the weight once all the
same, which is what a step of few nodes waits for.
On 1,038 tokens of SmolLM2-135M's own answers the mean KL divergence from float32 was: weights in int8 alone
0.0039 nats, activations in one digit alone 0.031, both 0.032; both with two digits 0.0039.

Rounding to int8 turns a difference in the last bit of a float into a whole step wherever a value lies on
the edge of two steps, and attention does differ in its last bits with the number of queries and slots.
Hence attention runs in float64 here (:data:`medusa.base.attention.FLOAT64_ATTENTION`): rounded to float32,
its result is the same for any tree, but for the rare value on the very edge of two floats. On SmolLM2-135M (6
prompts, 32 tokens) a tree of 8 nodes gave the plain answer to all 6 so, and to none with float32 attention;
the price on one core is 7 % of a step of 1 or 6 tokens after 128 tokens, 27 and 47 % after 1,024. Compiled
passes (:mod:`medusa.engine.compiled`) do without it.
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

_TINY = torch.finfo(torch.float32).tiny
"""Keeps the scale of a row of zeros above zero; it is too small to change any other scale."""

ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")
WHOLE_VECTORS = 32
"""Numbers that torch's elementwise loops take at a time, at most: two vectors of 16."""

DRAFT_DIGITS = 1
"""Of the activations of heads: what they guess is verified."""


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


def int8_view(base: CausalLM) -> CausalLM:
    """A model that shares every parameter with ``base`` and whose linear layers compute in int8.

    ``base`` is left as it is. The int8 weights take a quarter of the linear layers' memory on top of it; they
    are taken when this is called and do not follow later changes of the parameters. Layers that are no
    ``nn.Linear`` stay float32.
    """
    view = view_of(base, Int8Linear, Int8Product)
    for parent in list(view.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__module__ in ACTIVATION_MODULES:
                setattr(parent, name, RowwiseActivation(child))
    view.set_attn_implementation(FLOAT64_ATTENTION)
    return view


class RowwiseActivation(nn.Module):
    """An activation function that gives a row (..., W) the same bits whatever stands beside it.

    torch computes ``gelu`` by other code where rows do not follow each other, and what is left of all
    numbers after the last whole vector by other code than the rest. Here rows follow each other and are
    whole vectors.
    """

    def __init__(self, function: nn.Module):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % WHOLE_VECTORS
        if missing:
            return self.function(nn.functional.pad(x, (0, missing)))[..., : x.shape[-1]]
        return self.function(x.contiguous())


class Int8Product(PackedProduct):
    """Rows times a matrix in int8, float32 outside: (..., in) -> (..., out).

    Args:
        weight: (out, in); taken now, later changes do not count.
        bias: (out,), or None.
        num_digits: int8 numbers that an activation is made of, 1 or 2.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, num_digits: int = 2):
        codes, scales = quantised(weight)
        super().__init__(codes.T)
        self.bias = bias
        self._digits = Digits(num_digits)
        self._scales = scales / self._digits.largest_code
        self._zeros = torch.zeros(len(scales), dtype=torch.long)

    def _in_own_layout(self, weight: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_prepack(weight.T.contiguous(), None)  # it is (in, out), packed or not

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None, Digits]:
        """Codes (out, in) and scales (out,) as :func:`quantised` gives them, the bias, and the digits."""
        codes = self._packed.to_dense().T.contiguous()
        return codes, self._scales * self._digits.largest_code, self.bias, self._digits

    def forward(self, x: Tensor) -> Tensor:
        return int8_product(x, self._packed, self._scales, self._zeros, self.bias, self._digits)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 codes (out, in) and scales (out,) of a weight (out, in): the product of both is near it."""
    scales = weight.abs().amax(dim=1).clamp_(min=_TINY) / WEIGHT_STEPS
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def int8_product(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, digits: Digits
) -> Tensor:
    """Rows x (..., in) times a weight packed by oneDNN: (..., out).

    ``scales`` (out,) are the weight's over :attr:`Digits.largest_code`, ``zeros`` (out,) are 0.
    """
    rows = x.flatten(0, -2)
    codes, largest = digits.of(rows)
    out = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, digits.zero, packed, scales, zeros, *_PLAIN_FLOAT32_OUTPUT
    )
    if digits.number == 2:
        high, low = out.unbind(0)
        out = torch.add(low, high, alpha=digits.radix)
    out = out * largest if bias is None else torch.addcmul(bias, out, largest)
    return out.unflatten(0, x.shape[:-1])


class Digits:
    """Activations as int8: the value nearest to ``code / largest_code`` of the row's largest, in one digit or
    in two of a code in base ``radix``.

    A digit is stored with :attr:`zero` added, as an unsigned number: oneDNN has no fast product for signed
    ones. With two, a product has twice the rows and reads the weight once all the same.
    """

    def __init__(self, number: int):
        steps = activation_steps()
        self.number, self.zero, self.radix = number, steps + 1, 2 * (steps + 1)
        self.largest_code = steps if number == 1 else steps * self.radix
        self._shifts = torch.tensor([[[self.radix.bit_length() - 1]], [[0]]], dtype=torch.int32)

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of rows (M, in): (M, in) uint8, or (2, M, in), high digits first; and the largest of each
        row (M, 1)."""
        largest = rows.abs().amax(dim=-1, keepdim=True) + _TINY
        code = rows * (self.largest_code / largest)
        if self.number == 1:
            return (code + (self.zero + 0.5)).to(torch.uint8), largest  # cut off
        code = (code + (self.zero * (self.radix + 1) + 0.5)).to(torch.int32)
        digits = (code[None] >> self._shifts) & (self.radix - 1)
        return digits.to(torch.uint8), largest


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
        return Int8Product(weight, bias, DRAFT_DIGITS)


def int8_scorer(output_embedding: nn.Module, token_ids: Tensor) -> Int8Product:
    """The rows of an output embedding for ``token_ids`` (V',) long alone, in int8."""
    weight, bias = embedding_weight(output_embedding).detach(), output_embedding.bias
    taken_bias = None if bias is None else cast(Tensor, bias).detach()[token_ids]
    return Int8Product(weight[token_ids], taken_bias, DRAFT_DIGITS)


_PLAIN_FLOAT32_OUTPUT: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
"""Of oneDNN's product: no bias, no scale, no operation after it."""
