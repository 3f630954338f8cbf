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

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import ADAPTER_CONFIG_NAME

from medusa.base.architecture_check import check_decodable, is_tested
from medusa.base.attention import is_code_of_transformers
from medusa.base.causal_lm import CausalLM, embedding_rows, end_ids, lm_head, vocab_size
from medusa.base.experts import expert_matrices, is_experts
from medusa.base.loading import (
    BaseSource,
    explained_kind,
    find_base,
    gguf_path,
    is_held_quantised,
    load_base,
    one_device,
    widened_dtype,
)
from medusa.base.stored_weights import StoredWeights
from medusa.base.text_part import empty_model, text_part
from medusa.engine.card.support import is_card, triton_unsupported_reason
from medusa.engine.file_weights import (
    NarrowEmbedding,
    is_lookup,
    is_narrow,
    misses_weights,
    packed_rest,
    released_pages,
)
from medusa.engine.held_sizes import HeldSizes, check_fits
from medusa.engine.kernels import kernels_unsupported_reason
from medusa.engine.quantised_loading import bytes_of_quantised, load_held_mtp_layers, load_quantised
from medusa.engine.views import pack_linears, packed_as
from medusa.heads.checkpoint import HeadsCheckpoint
from medusa.heads.draft_vocab import likely_tokens
from medusa.heads.mtp import MtpHead, empty_own_head, num_mtp_layers, own_head
from medusa.options import Engine

PLACING = ("dtype", "torch_dtype", "device_map", "quantization_config", "variant", "tp_plan")
"""Arguments of ``from_pretrained`` that say in which precision a base is loaded, or where."""
OWN_DEPTH = 3
"""How deep the layers that come with a base draft as its heads: of Qwen3.5's one layer, 0.91 of the first
guesses and 0.75 of the second are right, as others publish."""


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
    engine = _chosen(engine)
    stored, sizes = _sizes(source, engine)
    check_fits(source.name, engine, sizes.bytes_for)
    if stored is None or sizes.is_beside:
        return load_base(source, dtype=torch.float32)
    base = load_base(source, dtype=stored.dtype)
    if not getattr(base, "_hf_peft_config_loaded", False):
        check_decodable(base)  # what cannot be decoded may fail on packed weights in other words
        stored.give_back(base)
        base = packed_in_place(base, int8=engine == "int8")
        if is_tested(base) or not misses_weights(base):
            return base
    # what other code computes for itself while it is made, in the narrow type, cannot be computed anew; and
    # an adapter that lies beside the weights, which transformers puts on, was rounded to that type
    return load_base(source, dtype=torch.float32)


def load_placed(source: BaseSource, engine: Engine, device: torch.device | None = None) -> CausalLM:
    """The base at ``source`` on ``device``, or where its arguments place it, as ``transformers`` computes; a
    GGUF file that goes to a card for ``engine="packed"`` is held in its own bits.

    Raises:
        FileNotFoundError: as :func:`medusa.base.loading.load_base`.
        ValueError: so too, or the card cannot compute with the file's bits.
    """
    if engine == "packed" and source.gguf is not None:
        place = device or one_device(source)
        if is_card(place):
            lacks = triton_unsupported_reason(place)
            if lacks is not None:
                raise ValueError(f"engine={engine!r} needs {lacks}; use engine='eager'")
            from medusa.engine.card.file_loading import load_blocks  # which imports Triton

            return load_blocks(source, place, widened_dtype(source, place))
    base: Any = load_base(source)
    return base if device is None else base.to(device)


def held_bytes(source: BaseSource, engine: Engine) -> int:
    """Memory that the weights of the base at ``source`` take on a CPU as ``engine`` holds them, about; none
    of them is read.

    Raises:
        ValueError: its files are damaged, or in a form that is not read.
    """
    if is_held_quantised(source):
        return bytes_of_quantised(source, engine)
    engine = _chosen(engine)
    return _sizes(source, engine)[1].bytes_for(engine)


def _chosen(engine: Engine) -> Engine:
    """The engine that "auto" means for a base that is not quantised."""
    if engine != "auto":
        return engine
    return "eager" if kernels_unsupported_reason() is not None else "packed"


def _sizes(source: BaseSource, engine: Engine) -> tuple[StoredWeights | None, HeldSizes]:
    """The weights in the files of a base that is not quantised, None where they cannot be mapped; and their
    sizes in memory."""
    has_kernels = engine != "eager" and kernels_unsupported_reason() is None
    with explained_kind(source.name):
        model = empty_model(source.config, bool(source.arguments.get("trust_remote_code")))
    stored = StoredWeights.of(source, model)
    is_ours = stored is not None and has_kernels and is_code_of_transformers(model)
    is_ours = is_ours and is_code_of_transformers(model.get_decoder()) and not _has_adapter(source)
    return stored, HeldSizes.of(text_part(model), stored, is_beside=not is_ours)


def load_own_head(base: CausalLM, max_depth: int | None = None) -> MtpHead:
    """The layers for multi-token prediction that come with ``base`` (:mod:`medusa.heads.mtp`), as its engine
    holds weights: in the bits of a GGUF file, of other files in int8; in the type of a base that is not
    packed. Of a large vocabulary they draft :func:`medusa.heads.draft_vocab.likely_tokens`.

    Args:
        max_depth: how deep they draft; None is as deep as they are many.

    Raises:
        ValueError: as :func:`medusa.heads.mtp.own_head`.
    """
    token_map = likely_tokens(vocab_size(base), end_ids(base))
    if packed_as(base) is None:
        return own_head(base, max_depth, token_map=token_map)
    path = gguf_path(base.name_or_path, {})
    if path is None:
        head = own_head(base, max_depth, token_map=token_map, dtype=torch.bfloat16)
    else:
        head = empty_own_head(base, max_depth, token_map)
        load_held_mtp_layers(path, head)
    release = released_pages()
    for module in list(head.modules()):
        pack_linears(module, True, release)
    return head.float()


def load_own_heads(base: CausalLM) -> HeadsCheckpoint:
    """:func:`load_own_head` as heads, at least :data:`OWN_DEPTH` deep.

    Raises:
        ValueError: as there.
    """
    depth = max(num_mtp_layers(base.config), OWN_DEPTH)
    return HeadsCheckpoint(load_own_head(base, depth), base.name_or_path)


def _has_adapter(source: BaseSource) -> bool:
    return Path(source.name, ADAPTER_CONFIG_NAME).exists()


def packed_in_place(base: CausalLM, int8: bool = False) -> CausalLM:
    """``base``, which computes with the kernels from here on and has let its own weights go."""
    embeddings = {  # those that are a function of only token ids
        module for module in base.modules() if is_lookup(module) and module.weight.dtype != torch.float32
    }
    rows = embedding_rows(lm_head(base))
    kept = {id(module.weight) for module in base.modules() if type(module) in (nn.Linear, Conv1D)}
    for experts in filter(is_experts, base.modules()):
        kept |= {id(experts._parameters[name]) for name in expert_matrices(experts)}
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
    owners = {  # the innermost model of each module: its configuration has what the module is made of
        module: model
        for model in base.modules()
        if isinstance(model, PreTrainedModel)
        for module in model.modules()
    }
    for module in dict.fromkeys(computed):
        owners[module]._init_weights(module)
    for config in _configs(base.config):
        config.dtype = torch.float32


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and the configurations of its parts."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)
