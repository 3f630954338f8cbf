"""Checks how quantised layers compute: a trial of one layer of each kind.

Libraries that quantise bring layers of their own, whose arithmetic is nowhere declared. Two things matter to
draft tokens, which share a pass:

- **Other rows.** LLM.int8 of bitsandbytes multiplies those columns in full precision in which any row of the
  pass has a large number, and layers with one scale for all activations round by the largest row. There the
  guesses are part of the result, in any precision.
- **Less than float32.** Layers that round their input, or compute in bfloat16, make a difference in the last
  bits large. A base loaded in float32 is then only as exact as one in bfloat16.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, lm_head_device

NUM_INPUTS = 2**17
"""Numbers of a trial: rounding shows in a few of them. At least :data:`MIN_ROWS` rows."""
MIN_ROWS = 64
LARGE = 20.0
"""By how much the other rows are larger: some of their numbers count as outliers then."""
NOISE = 2.0**-17
"""A change of the input that float32 arithmetic hands on as it is, in parts of each number."""
HANDED_ON = 8 * NOISE
"""Largest allowed deviation, relative to the largest result; rounding to bfloat16 gives thirty times as
much."""


def check_quantised_layers(base: CausalLM) -> None:
    """Warn where a float32 ``base`` has quantised layers that compute in less.

    Raises:
        ValueError: the output of a quantised layer for a token depends on the other tokens of the pass.
    """
    rounding = []
    for name, layer in _one_of_each_kind(base):
        depends, rounds = _tried(layer, base)
        if depends:
            raise ValueError(
                f"what {_named(layer)} ({name}) gives for a token depends on the tokens beside it, so "
                "guesses would change the text; load the base with weights quantised otherwise, in 4 bits or "
                "with torchao's Int8WeightOnlyConfig say, or use its own generate"
            )
        if rounds:
            rounding.append(_named(layer))
    if rounding:
        warnings.warn(
            f"{' and '.join(dict.fromkeys(rounding))} compute in less than float32, in which this base is "
            "loaded: as in half precision, guesses may decide between two tokens that are nearly equally "
            "likely",
            stacklevel=4,
        )


def _one_of_each_kind(base: CausalLM) -> Iterator[tuple[str, Any]]:
    """The first linear layer of each kind and shape whose weights are quantised, and its name."""
    seen = set()
    for name, layer in base.named_modules():
        if not _is_linear(layer) or any(_is_linear(child) for child in layer.children()):
            continue  # adapters wrap the layer that counts
        weight = getattr(layer, "weight", None)
        is_plain = type(weight) is nn.Parameter and weight.dtype.is_floating_point and weight.itemsize > 1
        kind = (type(layer), type(weight), layer.in_features, layer.out_features)
        if not is_plain and kind not in seen:
            seen.add(kind)
            yield name, layer


def _is_linear(layer: nn.Module) -> bool:
    return all(isinstance(getattr(layer, name, None), int) for name in ("in_features", "out_features"))


def _named(layer: nn.Module) -> str:
    weight, library = getattr(layer, "weight", None), type(layer).__module__.partition(".")[0]
    if type(layer) is nn.Linear:  # torchao replaces only the weight
        return f"layers with {type(weight).__name__} weights"
    return f"{type(layer).__name__} layers of {library}"


@torch.no_grad()
def _tried(layer: Any, base: CausalLM) -> tuple[bool, bool]:
    """Whether what ``layer`` gives for a row depends on the others of a pass, and whether it computes in less
    than float32 though ``base`` is loaded so."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, max(MIN_ROWS, NUM_INPUTS // layer.in_features), layer.in_features)
    device = next((each.device for each in chain(layer.parameters(), layer.buffers())), lm_head_device(base))
    if device.type == "meta":  # accelerate loads the weights on demand
        device = lm_head_device(base)

    def drawn() -> Tensor:
        return torch.randn(shape, generator=generator)

    def result(given: Tensor) -> Tensor:
        return layer(given.to(device, base.dtype)).float()

    rows, others, noise = drawn(), drawn() * LARGE, drawn().sign() * NOISE
    others[:, 0] = rows[:, 0]
    found = result(rows)
    depends = not torch.equal(found[:, 0], result(others)[:, 0])
    if base.dtype != torch.float32:
        return depends, False
    apart = (result(rows + rows * noise) - found).abs().max()
    return depends, bool(apart > HANDED_ON * found.abs().max())
