"""The weights in the files of a checkpoint, by the names that its model has for them; none is read for it.

``transformers`` loads all weights of a model in one type. A file may hold several: norms or a router in
float32 beside matrices in bfloat16. Loaded in the narrower type the others would be rounded, and in the wider
one all would take its memory. So those of another type get their own back after loading.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import WEIGHTS_NAME

from medusa.base.causal_lm import CausalLM
from medusa.base.loading import BaseSource, explained_damage, weight_files
from medusa.base.quantised_directory import quantisation_settings

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Types that weights are held in, as safetensors names them."""
WHOLE = ("I8", "I16", "I32", "I64", "U8", "BOOL")


@dataclass(frozen=True)
class FileTensor:
    """A tensor of floats in a file."""

    dtype: torch.dtype | None
    """None: another type than those of :data:`FLOATS`."""
    num_weights: int
    read: Callable[[], Tensor]
    """A view of its file."""


@dataclass(frozen=True)
class StoredWeights:
    """The types of a checkpoint's weights."""

    dtype: torch.dtype
    """The type to load the model in: nothing that ``transformers`` makes of several tensors is rounded."""
    dtypes: Mapping[str, torch.dtype]
    """The type of each parameter in the files, by its name in the model."""
    others: Mapping[str, FileTensor]
    """Parameters whose tensor is of another type than :attr:`dtype`, by name."""

    @classmethod
    def of(cls, source: BaseSource, model: CausalLM) -> StoredWeights | None:
        """The weights of the base at ``source``, whose model without memory is ``model``; None where it is
        quantised, or has no files of weights.

        Raises:
            ValueError: a file is damaged.
        """
        if quantisation_settings(source.config):
            return None
        tensors = dict(_file_tensors(source))
        parts_of: dict[str, list[FileTensor]] = {}  # by the name of the parameter
        converted: set[str] = set()  # parameters of several tensors, or of a part of one
        names = _names(model, tensors, source.arguments.get("key_mapping"))
        for stored, (name, is_converted) in names.items():
            parts_of.setdefault(name, []).append(tensors[stored])
            if is_converted or len(parts_of[name]) > 1 or tensors[stored].dtype is None:
                converted.add(name)
        if not parts_of:
            return None
        dtypes = {
            name: reduce(torch.promote_types, (part.dtype or torch.float32 for part in parts))
            for name, parts in parts_of.items()
        }
        counts: Counter[torch.dtype] = Counter()
        for name, parts in parts_of.items():
            counts[dtypes[name]] += sum(part.num_weights for part in parts)
        dtype = counts.most_common(1)[0][0]
        if converted:
            dtype = reduce(torch.promote_types, (dtypes[name] for name in converted))
        others = {
            name: parts[0]
            for name, parts in parts_of.items()
            if name not in converted and dtypes[name] != dtype
        }
        return cls(dtype, dtypes, others)

    def give_back(self, base: CausalLM) -> None:
        """Put the tensors of other types in the place of what ``base``, loaded in :attr:`dtype`, has of
        them."""
        held = {**dict(base.named_buffers()), **dict(base.named_parameters(remove_duplicate=False))}
        own = {
            id(held[name]): nn.Parameter(tensor.read(), requires_grad=False)
            for name, tensor in self.others.items()
            if name in held
        }
        for module in base.modules():
            for name, old in module._parameters.items():
                if id(old) in own:
                    module._parameters[name] = own[id(old)]  # type: ignore[assignment]  # a Parameter
            for name, buffer in module._buffers.items():
                if id(buffer) in own:
                    module._buffers[name] = own[id(buffer)].data


def _names(
    model: CausalLM, stored: Mapping[str, FileTensor], key_mapping: dict[str, str] | None
) -> dict[str, tuple[str, bool]]:
    """The parameter of ``model`` that each tensor is loaded into, and whether more than its name changes on
    the way. Tensors that the model has no place for are left out."""
    changes = get_model_conversion_mapping(model, key_mapping)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    state = model.state_dict()
    prefix = model.base_model_prefix
    names = {}
    for key in stored:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # a name that is right already
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state:
            names[key] = (name, pattern is not None)
    return names


def _file_tensors(source: BaseSource) -> Iterator[tuple[str, FileTensor]]:
    """The tensors of floats in the files that ``transformers`` would read, by their names there."""
    safe = source.arguments.get("use_safetensors") is not False
    with explained_damage(source.name):
        files = weight_files(source) if safe else []
        for file in files:
            opened = safe_open(file, "pt")
            for key in opened.keys():  # noqa: SIM118
                part = opened.get_slice(key)
                if part.get_dtype() not in WHOLE:
                    size = torch.Size(part.get_shape()).numel()
                    yield key, FileTensor(FLOATS.get(part.get_dtype()), size, partial(opened.get_tensor, key))
        for file in [] if files else weight_files(source, WEIGHTS_NAME):
            for key, tensor in _pickled(file, source.name).items():
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    dtype = tensor.dtype if tensor.dtype in FLOATS.values() else None
                    yield key, FileTensor(dtype, tensor.numel(), partial(Tensor.detach, tensor))


def _pickled(file: Path, name: str) -> dict[str, object]:
    """The content of a ``.bin`` file, its tensors views of it; before torch 1.6 they were written in a form
    that is read into memory."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"the weights of base {name!r} cannot be read: {file.name} is damaged ({error}); copy or "
            "download it again"
        ) from error
