"""Loads a base by its name: for an engine, on a device, in a type.

``transformers`` maps a checkpoint's files into memory, and a weight that is wanted in the type of the file is
a view of its file: nothing is read before it is used. Each matrix is then read and packed by all cores
(:mod:`medusa.engine.weights.hold`), and its pages of the file are given back. So the base is held once, in
the bytes of its file (int8: in half of them), where the ordinary way holds float32 weights beside the packed
ones. A quantised base is held in its own bits, multiplied in whole numbers, except with ``engine="packed"``:
in float32.

The modules are ``transformers``' own. Embeddings stay in the file (:mod:`medusa.engine.weights.lookups`).
Norms, biases and everything else without a kernel are float32. Adapters, training, ``state_dict`` and other
users of the weights themselves need a base that was loaded in the ordinary way, with ``engine="eager"``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

from medusa.base.architecture_check import check_decodable, is_tested
from medusa.base.causal_lm import CausalLM, lm_head
from medusa.base.loading import (
    BaseSource,
    find_base,
    is_held_quantised,
    load_by_transformers,
    load_widened,
)
from medusa.base.quantised_directory import quantisation_settings
from medusa.console import log_console
from medusa.engine.card.support import triton_unsupported_reason
from medusa.engine.views import with_kernels
from medusa.engine.weights.hold import Holder, Reads
from medusa.engine.weights.memory import Release, give_back_freed_memory, placeholder, released_pages
from medusa.engine.weights.plan import check_fits
from medusa.engine.weights.sources import weights_of
from medusa.engine.weights.stored import Arithmetic
from medusa.hardware import is_card, is_cpu
from medusa.options import Engine

PLACING = (
    "dtype",
    "torch_dtype",
    "device_map",
    "quantization_config",
    "variant",
    "tp_plan",
    "distributed_config",
)
"""Arguments of ``from_pretrained`` that say in which precision a base is loaded, or where: with one of them
``transformers`` loads it, and it keeps its own weights."""


def load_base(
    source: str | Path | BaseSource,
    engine: Engine = "eager",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    layers: bool = True,
    **arguments: Any,
) -> CausalLM:
    """The base at ``source`` in evaluation mode.

    In float32 on a CPU its weights are held as ``engine`` multiplies by them; with ``engine="packed"`` a GGUF
    file that goes to a card is held in its own bits there. Otherwise it is as ``transformers`` computes, its
    weights widened where they are quantised and no package of their method runs here.

    Args:
        device: where it goes; None is where ``arguments`` place it, else the CPU.
        dtype: the type of its numbers, "auto" for that of its files; None is float32 on a CPU, and "auto"
            elsewhere or where ``arguments`` place it.
        layers: whether it has its layers. Without them it is its embeddings and its final norm, under the
            configuration of the whole model, and nothing else of its files is read.
        arguments: of ``from_pretrained``, as for :func:`medusa.base.loading.find_base`.

    Raises:
        FileNotFoundError: as :func:`medusa.base.loading.find_base`.
        ValueError: so too, or a file is damaged, or in a form that is not read, or holds no LM head; or trees
            cannot be verified on a model that is held for an engine.
        MemoryError: there is too little memory for it; the message says what would fit.
    """
    source = find_base(source, **arguments)
    if layers:
        return _loaded(source, engine, device, dtype)
    return _without_layers(source, engine, device, dtype)


def _loaded(
    source: BaseSource, engine: Engine, device: torch.device | str | None, dtype: torch.dtype | str | None
) -> CausalLM:
    is_placed = not source.arguments.keys().isdisjoint(PLACING)
    is_widened = source.gguf is not None or (is_held_quantised(source) and not _finds_a_device(source))
    place = torch.device(device or "cpu")
    if is_placed and is_widened and device is None:
        place = one_device(source)
    on_cpu = is_cpu(place)
    dtype = source.arguments.get("dtype", dtype)
    if dtype is None and on_cpu and (is_widened or not is_placed):
        dtype = torch.float32
    if on_cpu and _named(dtype) == torch.float32 and not is_placed:
        base = _held(source, engine)
        if base is not None:
            return base
        is_widened = is_held_quantised(source)  # no package of its method runs on a CPU
    if engine == "packed" and source.gguf is not None and is_card(place):
        return _in_blocks(source, place, dtype)
    if is_widened:
        return load_widened(source, _named(dtype) or torch.bfloat16).to(place)
    if device is not None and not on_cpu:  # weights go straight to it
        source = find_base(source, device_map={"": place})
    return load_by_transformers(source, dtype)


def _named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The type that ``dtype`` names; None where it is that of the files."""
    if dtype is None or dtype == "auto":
        return None
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _finds_a_device(source: BaseSource) -> bool:
    """Whether ``transformers`` loads a quantised directory itself: where its method's package may run."""
    return torch.cuda.is_available() or not source.arguments.keys().isdisjoint(("device_map", "tp_plan"))


def one_device(source: BaseSource) -> torch.device:
    """Where a base that is widened goes; ValueError for arguments that put it in several places."""
    places = source.arguments.get("device_map")
    if isinstance(places, Mapping) and list(places) == [""]:
        places = places[""]
    if isinstance(places, int):
        places = f"cuda:{places}"
    is_device = places is None or isinstance(places, str | torch.device)
    placing = sorted(source.arguments.keys() & {"quantization_config", "tp_plan"})
    if not is_device or places in ("auto", "balanced", "balanced_low_0", "sequential", "disk"):
        placing = ["device_map", *placing]
    if placing:
        raise ValueError(
            f"a base that is widened is loaded whole, on one device, got {placing[0]}; give device_map a "
            "device, as 'cuda:0', or give the model's own repository"
        )
    return torch.device(places or "cpu")


def _in_blocks(source: BaseSource, card: torch.device, dtype: torch.dtype | str | None) -> CausalLM:
    """The base of a GGUF file on ``card``, its matrices in their own bits.

    Raises:
        ValueError: the card cannot compute with them.
    """
    lacks = triton_unsupported_reason(card)
    if lacks is not None:
        raise ValueError(f"engine='packed' needs {lacks}; use engine='eager'")
    from medusa.engine.card.file_loading import load_blocks  # which imports Triton

    return load_blocks(source, card, _named(dtype) or torch.bfloat16)


# ------------------------------------------------------------------ held for an engine of a CPU


def _held(source: BaseSource, engine: Engine) -> CausalLM | None:
    """The base in float32 arithmetic on a CPU, as ``engine`` holds its weights; None where they are to be in
    float32, for which there is memory."""
    is_quantised = is_held_quantised(source)
    if quantisation_settings(source.config) and not is_quantised:
        return None  # another method's package holds it
    weights = weights_of(source)
    engine = weights.chosen(engine)
    check_fits(weights, engine)
    if engine == "eager" or weights.is_beside:
        return None
    base, reads = weights.filled()
    if weights.is_beside:
        return None
    base = held_base(base, weights.arithmetic(engine), reads)
    widened = weights.widened()
    if widened is not None:
        log_console().print(widened, style="dim", soft_wrap=True)
    if is_tested(base) or not misses_weights(base):
        return base
    if not is_held_quantised(weights.source):
        return None  # what its code makes of a weight by itself is in the narrow type
    raise ValueError(
        f"engine={engine!r} needs modules that are called for their products, and {type(base).__name__} "
        "reads weights itself; use engine='eager'"
    )


def held_base(base: CausalLM, how: Arithmetic, reads: Callable[[Release], Reads]) -> CausalLM:
    """``base``, which computes with the kernels from here on, and has let the weights go that ``reads`` or
    its own modules give."""
    release = released_pages()
    base = with_kernels(base, Holder(how, reads(release), release, lm_head(base)))
    if next(base.parameters(), None) is None:  # transformers asks one for type and device
        output = lm_head(base)
        weight = placeholder(cast(Tensor, output.weight))
        del output.weight
        output.weight = nn.Parameter(weight, requires_grad=False)
    base.save_pretrained = _refuse_to_save
    give_back_freed_memory()  # of what was unpacked or joined
    return base


@torch.no_grad()
def misses_weights(base: CausalLM) -> bool:
    """Whether code of ``base`` reads a weight without calling its module, and so would find the
    placeholder."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    return bool(base(input_ids=ids, use_cache=False).logits.isnan().any())


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "save_pretrained needs the weights of the base, which was loaded for a CPU engine and holds them "
        "packed; load it with engine='eager' and save that"
    )


# ------------------------------------------------------------------ without layers


def _without_layers(
    source: BaseSource, engine: Engine, device: torch.device | str | None, dtype: torch.dtype | str | None
) -> CausalLM:
    """The base with its embeddings, its final norm and no decoder layer: what training from stored states
    reads.

    Raises:
        ValueError: the architecture cannot be built so.
    """
    config = copy.deepcopy(source.config)
    text = config.get_text_config(decoder=True)
    whole = dict(text.__dict__)
    for key, value in whole.items():
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:
            setattr(text, key, type(value)())
    text.num_hidden_layers = 0
    file = source.gguf
    if file is not None:
        outer = {name: entry for name, entry in file.tensors.items() if not name.startswith("blk.")}
        file = replace(file, tensors=outer)
    ends = replace(source, arguments={**source.arguments, "config": config}, config=config, gguf=file)
    try:
        with _without_warnings():  # the layers that are left out are no surprise
            base = _loaded(ends, engine, device, dtype)
    except (ValueError, RuntimeError, IndexError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{source.name!r} cannot be loaded without its layers ({type(error).__name__}: {error}), which "
            "cache_hidden_states and base_placement need; leave them out"
        ) from error
    base.config = copy.deepcopy(base.config)  # its modules keep theirs, which knows of no layers
    kept = base.config.get_text_config(decoder=True)
    for key, value in whole.items():  # the model keeps its name
        if not key.startswith("_"):
            setattr(kept, key, value)
    check_decodable(base, attends_here=False)
    return base.eval()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Within, ``transformers`` tells errors alone."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
