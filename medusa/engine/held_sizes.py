"""The memory that the weights of a base will take, by engine, before one of them is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from medusa.base.causal_lm import CausalLM
from medusa.base.experts import expert_matrices, is_experts, shape_of_experts
from medusa.base.stored_weights import StoredWeights
from medusa.console import gigabytes
from medusa.engine.file_weights import is_lookup
from medusa.engine.kernels import (
    TWELVE_BITS,
    TWELVE_BITS_FROM,
    kernels_unsupported_reason,
    lanes,
    uses_twelve_bits,
)
from medusa.engine.views import joinable_linears
from medusa.hardware import available_memory
from medusa.options import Engine

SPARE_BYTES = 400 * 2**20
"""Memory that a start takes beside the weights: caches, the first pass, heads."""


@dataclass(frozen=True)
class HeldSizes:
    """The weights of a base that is not quantised, as engines hold them."""

    products: tuple[tuple[torch.dtype, int, int], ...]
    """Matrices that are multiplied by the kernels: the type, outputs and inputs of each."""
    num_bytes_of_rows: int
    """Of embeddings, which stay in the type of their file."""
    num_others: int
    """Numbers that are float32 in every engine: norms, biases, buffers."""
    num_bytes_of_integers: int
    """Bytes of buffers that are no floats, such as causal masks."""
    num_weights: int
    is_beside: bool
    """Whether packed weights are held beside those of the model, which is loaded in float32."""

    @classmethod
    def of(cls, model: CausalLM, stored: StoredWeights | None, is_beside: bool) -> HeldSizes:
        """The sizes of ``model``, which has no memory; ``stored`` are the types in its files, bfloat16 where
        they are not known."""
        dtypes: dict[int, torch.dtype] = {}
        default = torch.bfloat16
        if stored is not None:
            named = model.named_parameters(remove_duplicate=False)
            dtypes = {id(weight): stored.dtypes[name] for name, weight in named if name in stored.dtypes}
            default = stored.dtype

        def dtype_of(weight: Tensor) -> torch.dtype:
            return dtypes.get(id(weight), default)

        products = []
        packed: set[int] = set()
        for linears, dtype in matrices(model, dtype_of):
            products.append((dtype, sum(map(_outputs, linears)), _inputs(linears[0])))
            packed.update(id(linear.weight) for linear in linears)
        for experts in filter(is_experts, model.modules()):
            for name in expert_matrices(experts):
                weight = experts._parameters[name]
                num_experts, num_outputs, num_inputs = shape_of_experts(experts, name)
                padded = -(-num_outputs // (2 * lanes())) * 2 * lanes()
                products.append((dtype_of(weight), num_experts * padded, num_inputs))
                packed.add(id(weight))
        rows = {id(module.weight): module.weight for module in model.modules() if is_lookup(module)}
        parameters = list(model.parameters())
        others = [weight for weight in parameters if id(weight) not in packed and id(weight) not in rows]
        floats = sum(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point())
        integers = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
        return cls(
            products=tuple(products),
            num_bytes_of_rows=sum(weight.numel() * dtype_of(weight).itemsize for weight in rows.values()),
            num_others=sum(weight.numel() for weight in others) + floats,
            num_bytes_of_integers=sum(buffer.nbytes for buffer in integers),
            num_weights=sum(weight.numel() for weight in parameters) + floats,
            is_beside=is_beside,
        )

    def bytes_for(self, engine: Engine) -> int:
        """Memory that the weights take as ``engine`` holds them, about."""
        in_float32 = 4 * self.num_weights + self.num_bytes_of_integers
        if engine == "eager" or kernels_unsupported_reason() is not None:
            return in_float32
        packed = sum(
            product_bytes(dtype, num_outputs, num_inputs, int8=engine == "int8")
            for dtype, num_outputs, num_inputs in self.products
        )
        if self.is_beside:
            return in_float32 + packed
        return packed + self.num_bytes_of_rows + 4 * self.num_others + self.num_bytes_of_integers


def matrices(
    model: nn.Module, dtype_of: Callable[[Tensor], torch.dtype | None]
) -> Iterator[tuple[list[Any], torch.dtype]]:
    """The linear layers of ``model`` that :func:`medusa.engine.views.pack_linears` makes one product of, and
    the type that it holds them in. Layers whose weights have none are left out."""
    for parent in model.modules():
        together: list[list[Any]] = [
            linears
            for linears in joinable_linears(parent)
            if len({dtype_of(linear.weight) for linear in linears}) == 1
        ]
        joined = {linear for linears in together for linear in linears}
        alone = [child for child in parent.children() if type(child) in (nn.Linear, Conv1D)]
        for group in [*together, *([linear] for linear in alone if linear not in joined)]:
            dtype = dtype_of(group[0].weight)
            if dtype is not None:
                yield group, dtype


def bytes_of_group(linears: Sequence[Any], dtype: torch.dtype, int8: bool) -> int:
    """Memory of the product of a group of :func:`matrices`."""
    return product_bytes(dtype, sum(map(_outputs, linears)), _inputs(linears[0]), int8)


def _outputs(linear: Any) -> int:
    return int(linear.weight.shape[1 if isinstance(linear, Conv1D) else 0])


def _inputs(linear: Any) -> int:
    return int(linear.weight.shape[0 if isinstance(linear, Conv1D) else 1])


def product_bytes(dtype: torch.dtype, num_outputs: int, num_inputs: int, int8: bool) -> int:
    """Memory of a packed matrix (:func:`medusa.engine.kernels.pack`)."""
    num_weights = -(-num_outputs // lanes()) * lanes() * num_inputs
    if int8:
        return num_weights + 4 * num_outputs
    if dtype == torch.bfloat16 and num_outputs * num_inputs >= TWELVE_BITS_FROM and uses_twelve_bits():
        return int(num_weights * TWELVE_BITS / 8)
    return num_weights * dtype.itemsize


def check_fits(
    name: str,
    engine: Engine,
    bytes_for: Callable[[Engine], int],
    others: tuple[Engine, ...] = ("packed", "int8"),
) -> None:
    """Raise MemoryError where the base called ``name`` finds no place beside what runs here.

    Args:
        bytes_for: the memory that its weights take, by engine. others: engines that may hold it in less.
    """
    free = available_memory()
    needed = bytes_for(engine) + SPARE_BYTES
    if free is None or needed <= free:
        return
    fitting = [other for other in others if bytes_for(other) + SPARE_BYTES <= free]
    fits = " or ".join(f"engine={other!r}, {gigabytes(bytes_for(other))}" for other in fitting)
    advice = f"what fits is {fits}" if fits else "no engine holds it here; choose a smaller base"
    raise MemoryError(
        f"base {name!r} takes {gigabytes(needed)} with engine={engine!r}, and {gigabytes(free)} of memory "
        f"are free; {advice}"
    )
