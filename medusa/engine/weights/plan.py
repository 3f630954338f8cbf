"""The base as an engine will hold it, planned before one of its weights is read: its memory, and whether it
fits.

A plan is held by what holds the base itself, of matrices without memory: so it has every buffer that the base
will have. Only what the numbers decide is not known: a matrix of float32 whose numbers fit a narrower type,
and one of bfloat16 with too many exponents for twelve bits.
"""

from __future__ import annotations

from medusa.base.causal_lm import CausalLM, copy_sharing_parameters, lm_head
from medusa.base.loading import BaseSource
from medusa.console import gigabytes
from medusa.engine.weights.hold import Holder
from medusa.engine.weights.memory import is_placeholder
from medusa.engine.weights.sources import BaseWeights, weights_of
from medusa.hardware import available_memory
from medusa.options import Engine

SPARE_BYTES = 400 * 2**20
"""Memory that a start takes beside the weights: caches, the first pass, heads."""
LOOKED_UP = ("rows", "file_rows")
"""Buffers of an LM head with its rows as they lie in the file: they are read to train alone."""


def planned(weights: BaseWeights, engine: Engine) -> CausalLM:
    """The model of ``weights`` as ``engine`` will hold it, without memory for its parameters."""
    engine = weights.chosen(engine)
    if engine == "eager":
        return weights.model
    model = copy_sharing_parameters(weights.model)
    release = None if weights.is_beside else _nothing_to_release
    Holder(weights.arithmetic(engine), weights.described(), release, lm_head(model)).hold(model)
    return model


def _nothing_to_release(weight: object) -> None:
    """Gives back no pages."""


def num_bytes(base: CausalLM) -> int:
    """Memory that the weights and buffers of ``base`` take, or will take where it is planned."""
    looked_up = {id(buffer) for name, buffer in lm_head(base)._buffers.items() if name in LOOKED_UP}
    sizes = {}
    for tensor in (*base.parameters(), *base.buffers()):
        if not is_placeholder(tensor) and id(tensor) not in looked_up:
            sizes[tensor.untyped_storage()._cdata, tensor.storage_offset()] = tensor.nbytes
    return sum(sizes.values())


def held_bytes(source: BaseSource, engine: Engine) -> int:
    """Memory that the weights of the base at ``source`` take on a CPU as ``engine`` holds them; none of them
    is read.

    Raises:
        ValueError: its files are damaged, or in a form that is not read.
    """
    return num_bytes(planned(weights_of(source), engine))


def check_fits(weights: BaseWeights, engine: Engine) -> None:
    """Raise MemoryError where the base of ``weights``, as ``engine`` holds it, finds no place beside what
    runs here."""
    free = available_memory()
    needed = num_bytes(planned(weights, engine)) + SPARE_BYTES
    if free is None or needed <= free:
        return
    sizes = {other: num_bytes(planned(weights, other)) for other in weights.engines}
    fitting = [other for other, size in sizes.items() if size + SPARE_BYTES <= free]
    fits = " or ".join(f"engine={other!r}, {gigabytes(sizes[other])}" for other in fitting)
    advice = f"what fits is {fits}" if fits else "no engine holds it here; choose a smaller base"
    raise MemoryError(
        f"base {weights.source.name!r} takes {gigabytes(needed)} with engine={engine!r}, and "
        f"{gigabytes(free)} of memory are free; {advice}"
    )
