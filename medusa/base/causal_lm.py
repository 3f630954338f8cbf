"""The parts of a causal language model, read through its public interface: its LM head, its embeddings, its
layers, its sizes, and where it computes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

CausalLM = Any
"""A ``transformers`` causal LM: PreTrainedModel and GenerationMixin, which share no static type."""


def lm_head(base: CausalLM) -> nn.Module:
    """The module that turns a hidden state (..., D) into logits (..., V)."""
    module = base.get_output_embeddings()
    if module is None:
        raise ValueError(
            f"{type(base).__name__} has no LM head, so it is not a causal language model; "
            "load it with AutoModelForCausalLM"
        )
    return module


def embedding_weight(lm_head: nn.Module) -> Tensor:
    """The weight (V, D) of an LM head, for its shape, type and place; :func:`embedding_rows` gives its
    values."""
    return cast(Tensor, lm_head.weight)


def embedding_rows(embedding: nn.Module) -> Tensor:
    """The rows (V, D) of an input embedding or LM head, in the precision that they are held in."""
    if isinstance(embedding, HasQuantisedRows):
        return embedding.rows_at(torch.arange(len(embedding_weight(embedding))))
    rows = cast(Tensor, getattr(embedding, "rows", embedding.weight)).detach()
    hook = _offloading_hook(embedding) if rows.is_meta else None
    if hook is not None:
        return hook.weights_map["weight"].detach().to(place_of(embedding))
    return rows


class HasQuantisedRows:
    """An input embedding or LM head whose rows are widened one by one: all of them may not fit."""

    def rows_at(self, ids: Tensor) -> Tensor:
        """The rows of ``ids`` (...) long, (..., D) float32."""
        raise NotImplementedError


def rows_at(embedding: nn.Module, ids: Tensor) -> Tensor:
    """The rows of an input embedding or LM head for ``ids`` (...) long, (..., D), in the precision that they
    are held in."""
    if isinstance(embedding, HasQuantisedRows):
        return embedding.rows_at(ids)
    return nn.functional.embedding(ids, embedding_rows(embedding))


def place_of(embedding: nn.Module) -> torch.device:
    """Where an input embedding or LM head computes: where its weight is, or, where that was offloaded, where
    accelerate brings it for each pass."""
    device = embedding_weight(embedding).device
    hook = _offloading_hook(embedding) if device.type == "meta" else None
    return device if hook is None else torch.device(hook.execution_device)


def _offloading_hook(module: nn.Module) -> Any:
    """accelerate's hook on ``module`` that brings offloaded weights; None where there is none."""
    outer = getattr(module, "_hf_hook", None)
    hooks = getattr(outer, "hooks", [outer])  # one hook, or a sequence of them
    return next((hook for hook in hooks if getattr(hook, "offload", False)), None)


def lm_head_device(base: CausalLM) -> torch.device:
    """Where a decode step's own tensors live: beside the LM head, wherever the layers are.

    With a ``device_map``, accelerate's hooks move inputs and outputs from device to device.
    """
    return place_of(lm_head(base))


def hidden_size(base: CausalLM) -> int:
    """D: the input size of the LM head."""
    return embedding_weight(lm_head(base)).shape[1]


def vocab_size(base: CausalLM) -> int:
    """V: rows of the LM head."""
    return embedding_weight(lm_head(base)).shape[0]


def end_ids(base: CausalLM, tokenizer: Any = None) -> frozenset[int]:
    """The tokens that end an answer: from the generation configuration, as for ``transformers``'
    ``generate``; else from the tokenizer."""
    named = base.generation_config.eos_token_id
    if named is None:
        named = getattr(tokenizer, "eos_token_id", None)
    return frozenset(ids_of(named))


def ids_of(named: int | Sequence[int] | Tensor | None) -> list[int]:
    """The ids that a setting of a configuration names: none, one or several."""
    if isinstance(named, Tensor):
        named = named.tolist()
    if named is None:
        return []
    return [named] if isinstance(named, int) else list(named)


def decoder_layers(base: CausalLM) -> nn.ModuleList:
    """The model's decoder layers, first to last; the text model's where there are others."""
    count = base.config.get_text_config(decoder=True).num_hidden_layers
    for module in base.get_decoder().modules():  # outer modules come first
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(base).__name__} has no list of its {count} decoder layers: none can be read")


def copy_sharing_parameters(module: Any) -> Any:
    """A copy of ``module``: modules of their own over its parameters, buffers and accelerate hooks."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    hooks = [part._hf_hook for part in module.modules() if hasattr(part, "_hf_hook")]
    shared.update((id(hook), hook) for hook in hooks)
    return copy.deepcopy(module, shared)  # what it finds in `shared` it takes for copied


def in_type(model: Any, dtype: torch.dtype) -> Any:
    """``model``, computing in ``dtype``: all its numbers but the frequencies of rotary angles, which
    ``transformers`` too keeps in float32. Rounded, they turn far positions by other angles."""
    frequencies = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if name.endswith("inv_freq")
    ]
    model = model.to(dtype)
    for module, name, buffer in frequencies:
        module._buffers[name] = buffer
    return model
