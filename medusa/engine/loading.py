"""Loads a base by its name, straight from its files into the packed weights of a CPU engine.

``transformers`` maps a checkpoint's files into memory, and a weight that is wanted in the type of the file is
a view of its file: nothing is read before it is used. Each matrix is then read and packed by all cores
(:mod:`medusa.engine.kernels`), and its pages of the file are given back. So the base is held once, in the
bytes of its file (int8: in half of them), where the ordinary way holds float32 weights beside the packed
ones.

The modules are ``transformers``' own. Embeddings stay in the file (:mod:`medusa.engine.file_weights`). Norms,
biases and everything else without a kernel are float32. Adapters, training, ``state_dict`` and other users of
the weights themselves need a base that was loaded in the ordinary way, with ``engine="eager"``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from medusa.base.architecture_check import check_decodable, is_tested
from medusa.base.attention import is_code_of_transformers
from medusa.base.causal_lm import CausalLM, embedding_rows, lm_head
from medusa.base.loading import (
    BaseSource,
    explained_damage,
    find_base,
    is_held_quantised,
    load_base,
    weight_files,
)
from medusa.console import gigabytes
from medusa.engine.file_weights import (
    NarrowEmbedding,
    is_lookup,
    is_narrow,
    misses_weights,
    packed_rest,
    released_pages,
)
from medusa.engine.kernels import TWELVE_BITS, kernels_unsupported_reason, uses_twelve_bits
from medusa.engine.quantised_loading import SPARE_BYTES, load_quantised
from medusa.hardware import available_memory
from medusa.options import Engine

PLACING = ("dtype", "torch_dtype", "device_map", "quantization_config", "variant", "tp_plan")
"""Arguments of ``from_pretrained`` that say in which precision a base is loaded, or where."""
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Types of weights that can be packed, as safetensors names them, the narrowest first."""


def load_for_engine(source: str | Path | BaseSource, engine: Engine, **kwargs: Any) -> CausalLM:
    """The base at ``source`` for ``engine``, in float32 arithmetic on a CPU: packed as it is read where the
    engine has kernels for it, else as ``transformers`` loads it in float32.

    Args:
        kwargs: as for :func:`medusa.base.loading.find_base`, except :data:`PLACING`.

    Raises:
        FileNotFoundError: as :func:`medusa.base.loading.find_base`.
        ValueError: so too, and as :func:`medusa.base.architecture_check.check_decodable`.
        MemoryError: there is too little memory for it; the message says what would fit.
    """
    source = find_base(source, **kwargs)
    if is_held_quantised(source):
        return load_quantised(source, engine)
    sizes = FileSizes.of(source)
    if sizes is not None:
        sizes.check_memory(source.name, engine)
    if sizes is None or engine == "eager" or kernels_unsupported_reason() is not None:
        return load_base(source, dtype=torch.float32)
    base = load_base(source, dtype=sizes.dtype)
    is_known_code = is_code_of_transformers(base) and is_code_of_transformers(base.get_decoder())
    if is_known_code and not getattr(base, "_hf_peft_config_loaded", False):
        check_decodable(base)  # what cannot be decoded may fail on packed weights in other words
        base = packed_in_place(base, int8=engine == "int8")
        if is_tested(base) or not misses_weights(base):
            return base
    # what other code computes for itself while it is made, in the narrow type, cannot be computed anew; and
    # an adapter that lies beside the weights, which transformers puts on, was rounded to that type
    return load_base(source, dtype=torch.float32)


def packed_in_place(base: CausalLM, int8: bool = False) -> CausalLM:
    """``base``, which computes with the kernels from here on and has let its own weights go."""
    embeddings = {  # those that are a function of only token ids
        module for module in base.modules() if is_lookup(module) and module.weight.dtype != torch.float32
    }
    rows = embedding_rows(lm_head(base))
    kept = {id(module.weight) for module in base.modules() if type(module) in (nn.Linear, Conv1D)}
    _widen(base, kept | {id(module.weight) for module in embeddings})
    for module in list(base.modules()):
        for name, child in list(module.named_children()):
            if child in embeddings:
                setattr(module, name, NarrowEmbedding(child))
    return packed_rest(base, int8, rows, released_pages())


@torch.no_grad()
def _widen(base: CausalLM, kept: set[int]) -> None:
    """Convert all weights and buffers of ``base`` to float32, except ``kept``.

    Buffers that are computed and not loaded, such as the scale of an embedding, were rounded to the narrow
    type, so they are computed anew.
    """
    computed = []
    for module in base.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter._is_hf_initialized = True
                if is_narrow(parameter) and id(parameter) not in kept:
                    parameter.data = parameter.data.float()
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if is_narrow(buffer):
                module._buffers[name] = buffer.float()
                if name in module._non_persistent_buffers_set:
                    computed.append(module)
                    continue
            module._buffers[name]._is_hf_initialized = True
    for module in dict.fromkeys(computed):
        base._init_weights(module)
    for config in _configs(base.config):
        config.dtype = torch.float32


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and the configurations of its parts."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield from _configs(part)


# ------------------------------------------------------------------ content of the files


@dataclass(frozen=True)
class FileSizes:
    """The size of a checkpoint's weights, from its files."""

    dtype: torch.dtype
    """The narrowest type that holds all of them."""
    num_bytes: int
    """In their files."""
    num_weights: int

    @classmethod
    def of(cls, source: BaseSource) -> FileSizes | None:
        """The sizes of the base at ``source``; None where it has no safetensors files of plain numbers.

        Raises:
            ValueError: a file is damaged.
        """
        arguments = source.arguments
        if "gguf_file" in arguments or arguments.get("use_safetensors") is False:
            return None
        if getattr(source.config, "quantization_config", None) is not None:
            return None
        counts: Counter[str] = Counter()  # of numbers, by their type
        with explained_damage(source.name):
            for file in weight_files(source):
                with safe_open(file, "pt") as opened:
                    for part in map(opened.get_slice, opened.keys()):
                        counts[part.get_dtype()] += math.prod(part.get_shape())
        if counts.keys() - {*FLOATS, *_WHOLE}:
            return None
        floats = {FLOATS[name]: count for name, count in counts.items() if name in FLOATS}
        if not floats:
            return None
        return cls(
            next(iter(floats)) if len(floats) == 1 else torch.float32,
            sum(dtype.itemsize * count for dtype, count in floats.items()),
            sum(floats.values()),
        )

    def bytes_for(self, engine: Engine) -> int:
        """Memory that the weights take as ``engine`` holds them, about."""
        if engine == "eager":
            return 4 * self.num_weights
        if self.num_bytes < self.num_weights * self.dtype.itemsize:  # of several types, so they are widened
            return self.num_weights * self.dtype.itemsize
        if engine == "int8":
            return self.num_weights
        in_twelve_bits = (
            self.dtype == torch.bfloat16 and kernels_unsupported_reason() is None and uses_twelve_bits()
        )
        return int(self.num_weights * TWELVE_BITS / 8) if in_twelve_bits else self.num_bytes

    def check_memory(self, name: str, engine: Engine) -> None:
        """Raise MemoryError where the machine has too little memory for this engine."""
        free = available_memory()
        if engine == "auto":
            engine = "eager" if kernels_unsupported_reason() is not None else "packed"
        needed = self.bytes_for(engine) + SPARE_BYTES
        if free is None or needed <= free:
            return
        known: tuple[Engine, ...] = ("packed", "int8")
        others = [each for each in known if self.bytes_for(each) + SPARE_BYTES <= free]
        fits = " or ".join(f"engine={each!r}, {gigabytes(self.bytes_for(each))}" for each in others)
        advice = f"what fits is {fits}" if fits else "no engine holds it here; choose a smaller base"
        raise MemoryError(
            f"base {name!r} takes {gigabytes(needed)} with engine={engine!r}, and "
            f"{gigabytes(free)} of memory are free; {advice}"
        )


_WHOLE = ("I8", "I16", "I32", "I64", "U8", "BOOL")
