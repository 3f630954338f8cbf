"""Loads a base by its name, straight from its files into the packed weights of a CPU engine.

``transformers`` maps a checkpoint's files into memory, and a weight that is wanted in the type of the file is
a view of its file: nothing is read before it is used. Each matrix is then read and packed by all cores
(:mod:`medusa.engine.kernels`), and its pages of the file are given back. So the base is held once, in the
bytes of its file (int8: in half of them), where the ordinary way holds float32 weights beside the packed
ones.

The modules are ``transformers``' own. Embeddings stay in the file, whose rows are widened on lookup: the file
must not be written to meanwhile. Norms, biases and everything else without a kernel are float32. Adapters,
training, ``state_dict`` and other users of the weights themselves need a base that was loaded in the ordinary
way, with ``engine="eager"``.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import math
import mmap
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from medusa.base.architecture_check import check_decodable, is_tested
from medusa.base.attention import is_code_of_transformers
from medusa.base.causal_lm import CausalLM, HasQuantisedRows, embedding_rows, lm_head
from medusa.base.gguf_file import FLOAT_TYPES, GGUFFile, TensorEntry, type_name
from medusa.base.loading import BaseSource, explained_damage, find_base, gguf_model, load_base
from medusa.console import counted, log_console, megabytes
from medusa.engine.group_quantised import (
    PACKED_TYPES,
    GroupQuantisedLinear,
    GroupQuantisedLMHead,
    GroupQuantisedMatmul,
    QuantisedRows,
)
from medusa.engine.kernels import TWELVE_BITS, kernels_unsupported_reason, uses_twelve_bits
from medusa.engine.views import joinable_linears, share_product, with_kernels
from medusa.hardware import available_memory
from medusa.options import Engine

if TYPE_CHECKING:
    from medusa.base.gguf_model import NamedWeight

PLACING = ("dtype", "torch_dtype", "device_map", "quantization_config", "variant", "tp_plan")
"""Arguments of ``from_pretrained`` that say in which precision a base is loaded, or where."""
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Types of weights that can be packed, as safetensors names them, the narrowest first."""
SPARE_BYTES = 400 * 2**20
"""Memory that a start takes beside the weights: caches, the first pass, heads."""


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
    if source.gguf is not None:
        return load_quantised(source, source.gguf, engine)
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
        if is_tested(base) or not _misses_weights(base):
            return base
    # what other code computes for itself while it is made, in the narrow type, cannot be computed anew; and
    # an adapter that lies beside the weights, which transformers puts on, was rounded to that type
    return load_base(source, dtype=torch.float32)


def packed_in_place(base: CausalLM, int8: bool = False) -> CausalLM:
    """``base``, which computes with the kernels from here on and has let its own weights go."""
    embeddings = {  # those that are a function of only token ids
        module
        for module in base.modules()
        if isinstance(module, nn.Embedding)
        and module.weight.dtype != torch.float32
        and len(inspect.signature(module.forward).parameters) == 1
        and module.max_norm is None
    }
    rows = embedding_rows(lm_head(base))
    kept = {id(module.weight) for module in base.modules() if type(module) in (nn.Linear, Conv1D)}
    _widen(base, kept | {id(module.weight) for module in embeddings})
    for module in list(base.modules()):
        for name, child in list(module.named_children()):
            if child in embeddings:
                setattr(module, name, NarrowEmbedding(child))
    base = with_kernels(base, int8, release=_released())
    output = lm_head(base)
    output.register_buffer("rows", rows, persistent=False)
    if next(base.parameters(), None) is None:  # transformers asks one for type and device
        del output.weight
        output.weight = nn.Parameter(placeholder(rows), requires_grad=False)
    base.save_pretrained = _refuse_to_save
    return base


@torch.no_grad()
def _misses_weights(base: CausalLM) -> bool:
    """Whether code of ``base`` reads a weight without calling its module, and so would find the
    placeholder."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    return bool(base(input_ids=ids, use_cache=False).logits.isnan().any())


def _refuse_to_save(*given: Any, **named: Any) -> None:
    raise ValueError(
        "save_pretrained needs the weights of the base, which was loaded for a CPU engine and holds them "
        "packed; load it with engine='eager' and save that"
    )


# ------------------------------------------------------------------ quantised files


def load_quantised(source: BaseSource, file: GGUFFile, engine: Engine) -> CausalLM:
    """The base in a GGUF file, its matrices held as the file has quantised them.

    They are multiplied in whole numbers, except with ``engine="packed"``: in float32. Matrices of other types
    are widened and packed. With ``engine="eager"``, or where there are no kernels, all is widened.

    Raises:
        ValueError: the file is not what it says, or trees cannot be verified on its model.
        MemoryError: there is too little memory for it; the message says what would fit.
    """
    if engine == "eager" or kernels_unsupported_reason() is not None:
        _check_fits(source.name, "eager", 4 * sum(math.prod(each.shape) for each in file.tensors.values()))
        return load_base(source, dtype=torch.float32)
    model = gguf_model()
    base = model.empty_model(file, source.config)
    weights = model.placed_weights(file, base)
    quantised = _quantised_modules(file, base, weights)
    held = {weights[name].source for name in quantised if name in weights}
    plain = _plain_weights(file, base, weights)
    held |= {weights[name].source for name in plain}
    others = {name: each for name, each in file.tensors.items() if name not in held}
    num_widened = sum(math.prod(each.shape) for each in others.values())
    _check_fits(source.name, engine, sum(file.tensors[name].num_bytes for name in held) + 4 * num_widened)
    _say_what_is_widened(others)
    check_decodable(base)
    for name, values in plain.items():
        owner, _, last = name.rpartition(".")
        setattr(base.get_submodule(owner), last, nn.Parameter(values, requires_grad=False))
    rest = {name: each for name, each in weights.items() if name not in quantised and name not in plain}
    model.fill(base, file, rest, torch.float32)
    if source.config.get_text_config(decoder=True).tie_word_embeddings:
        base.tie_weights()
    release = _released()
    head = lm_head(base)
    rows = None if any(module is head for module, _ in quantised.values()) else embedding_rows(head)
    by_module = {id(module): of_file for module, of_file in quantised.values()}
    for parent in list(base.modules()):
        _hold_quantised(parent, by_module, head, engine, release)
    model.check_filled(base, file)
    base = with_kernels(base, int8=False, release=release)
    if rows is not None:
        lm_head(base).register_buffer("rows", rows, persistent=False)
    if next(base.parameters(), None) is None:
        weight = cast(Tensor, lm_head(base).weight)  # transformers asks one for type and device
        del lm_head(base).weight
        lm_head(base).weight = nn.Parameter(weight, requires_grad=False)
    base.save_pretrained = _refuse_to_save
    return base


def _quantised_modules(
    file: GGUFFile, base: CausalLM, weights: Mapping[str, NamedWeight]
) -> dict[str, tuple[nn.Module, QuantisedRows]]:
    """The linear layers and embeddings of ``base`` that can hold their weight as the file has it, by the name
    of that weight."""
    modules = dict(base.named_modules())
    found: dict[str, tuple[nn.Module, QuantisedRows]] = {}
    for name, weight in weights.items():
        entry = file.tensors[weight.source]
        module = modules[name.rpartition(".")[0]]
        is_matrix = name.endswith(".weight") and len(entry.shape) == 2
        if (
            not is_matrix
            or not isinstance(module, (nn.Linear, nn.Embedding))
            or entry.type not in PACKED_TYPES
        ):
            continue
        if entry.shape != module.weight.shape:
            raise ValueError(
                f"{entry.file}: tensor {entry.name!r} must have shape {tuple(module.weight.shape)}, as the "
                f"file's metadata say, got {entry.shape}"
            )
        order = weight.row_order(entry.shape[0])
        if order is None:
            continue
        is_same = torch.equal(order, torch.arange(len(order)))
        if not is_same and (isinstance(module, nn.Embedding) or module is lm_head(base)):
            continue
        rows = QuantisedRows(file.rows(entry.name), entry.type, entry.shape[1], None if is_same else order)
        found[name] = (module, rows)
        if module is base.get_input_embeddings() and lm_head(base).weight is module.weight:
            found["tied"] = (lm_head(base), rows)
    return found


def _plain_weights(file: GGUFFile, base: CausalLM, weights: Mapping[str, NamedWeight]) -> dict[str, Tensor]:
    """The matrices of ``base`` that are floats in the file, in their own type, by name."""
    modules = dict(base.named_modules())
    found = {}
    for name, weight in weights.items():
        entry, module = file.tensors[weight.source], modules[name.rpartition(".")[0]]
        is_matrix = isinstance(module, (nn.Linear, nn.Embedding)) and len(entry.shape) == 2
        if not is_matrix or not name.endswith(".weight") or entry.type not in FLOAT_TYPES:
            continue
        order = weight.row_order(entry.shape[0])
        if order is not None and entry.shape == module.weight.shape:
            values = file.plain(entry.name)
            is_same = torch.equal(order, torch.arange(len(order)))
            found[name] = values if is_same else values[order]
    return found


def _say_what_is_widened(others: Mapping[str, TensorEntry]) -> None:
    """Tell of matrices that cannot be held in their own bits, and what they take."""
    large = [each for each in others.values() if len(each.shape) > 1]
    if large:
        kinds = ", ".join(sorted({type_name(each.type) for each in large}))
        log_console().print(
            f"{counted(len(large), 'tensor')} of type {kinds}, widened to float32: "
            f"{megabytes(sum(4 * math.prod(each.shape) for each in large))} in place of "
            f"{megabytes(sum(each.num_bytes for each in large))}",
            style="dim",
            soft_wrap=True,
        )


def _hold_quantised(
    parent: nn.Module,
    quantised: Mapping[int, QuantisedRows],
    head: nn.Module,
    engine: Engine,
    release: Callable[[Tensor], Tensor],
) -> None:
    """Replace the modules directly below ``parent`` that are in ``quantised``, by their identity."""
    in_whole_numbers = engine != "packed"
    made: dict[nn.Module, nn.Module] = {}
    for linears in joinable_linears(parent):
        if all(id(linear) in quantised for linear in linears):
            biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
            product = GroupQuantisedMatmul(
                [quantised[id(linear)] for linear in linears],
                torch.cat(biases) if biases else None,
                in_whole_numbers,
            )
            made.update(zip(linears, share_product(linears, product), strict=True))
    for name, child in list(parent.named_children()):
        rows = quantised.get(id(child))
        if rows is None:
            if isinstance(child, nn.Embedding) and _is_narrow(child.weight):
                setattr(parent, name, NarrowEmbedding(child))
            continue
        new = made.get(child)
        if new is None and isinstance(child, nn.Embedding):
            setattr(parent, name, QuantisedEmbedding(child, rows))
            continue
        if new is None:
            kind = GroupQuantisedLMHead if child is head else GroupQuantisedLinear
            new = kind(cast(nn.Linear, child), rows, in_whole_numbers)
        del new.weight
        new.weight = placeholder(cast(Tensor, child.weight))
        setattr(parent, name, new)
        release(rows.rows)


def _check_fits(name: str, engine: Engine, num_bytes: int) -> None:
    """Raise MemoryError where ``num_bytes`` of weights find no place beside what runs here."""
    free, needed = available_memory(), num_bytes + SPARE_BYTES
    if free is not None and needed > free:
        raise MemoryError(
            f"base {name!r} takes {_gigabytes(needed)} with engine={engine!r}, and {_gigabytes(free)} of "
            "memory are free; choose a smaller file, or leave engine to be chosen"
        )


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
            for file in _weight_files(source):
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
        fits = " or ".join(f"engine={each!r}, {_gigabytes(self.bytes_for(each))}" for each in others)
        advice = f"what fits is {fits}" if fits else "no engine holds it here; choose a smaller base"
        raise MemoryError(
            f"base {name!r} takes {_gigabytes(needed)} with engine={engine!r}, and "
            f"{_gigabytes(free)} of memory are free; {advice}"
        )


_WHOLE = ("I8", "I16", "I32", "I64", "U8", "BOOL")


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _weight_files(source: BaseSource) -> list[Path]:
    """The safetensors files of a checkpoint, from the hub where they are not here; none where it has none."""
    options = {key: each for key, each in source.arguments.items() if key in _FILE_ARGUMENTS}
    missing_ok = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    if (alone := cached_file(source.name, "model.safetensors", **options, **missing_ok)) is not None:
        return [Path(alone)]
    index = cached_file(source.name, "model.safetensors.index.json", **options, **missing_ok)
    if index is None:
        return []
    files, _ = get_checkpoint_shard_files(source.name, index, **options)
    return [Path(each) for each in files]


_FILE_ARGUMENTS = (
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
    "force_download",
    "proxies",
    "subfolder",
)


# ------------------------------------------------------------------ unpacked parts


class NarrowEmbedding(nn.Module):
    """An embedding whose rows are stored in the precision of their file, and converted to float32 on
    lookup."""

    rows: Tensor

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self._of, self._is_plain = copy.copy(embedding), type(embedding) is nn.Embedding
        self._of._parameters = {}
        self.padding_idx, self._of.padding_idx = embedding.padding_idx, None  # it matters to gradients alone
        self.weight = placeholder(embedding.weight)
        self._hold(embedding)

    def _hold(self, embedding: nn.Embedding) -> None:
        self.register_buffer("rows", embedding.weight.detach(), persistent=False)

    def _looked_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows).float()

    def forward(self, ids: Tensor) -> Tensor:
        """ids (...) long -> (..., D) float32."""
        rows = self._looked_up(ids)
        if self._is_plain:
            return rows
        numbered = torch.arange(ids.numel(), device=ids.device).view_as(ids)
        return torch.func.functional_call(self._of, {"weight": rows.flatten(0, -2)}, (numbered,))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _OF_EMBEDDINGS:
                raise
            return getattr(self._of, name)


class QuantisedEmbedding(NarrowEmbedding, HasQuantisedRows):
    """An embedding whose rows stay in their file as it has quantised them, and are widened on lookup."""

    file_rows: Tensor

    def __init__(self, embedding: nn.Embedding, rows: QuantisedRows):
        super().__init__(embedding)
        self._type, self._width = rows.type, rows.num_inputs
        self.register_buffer("file_rows", rows.rows.detach(), persistent=False)

    def _hold(self, embedding: nn.Embedding) -> None:
        """The file's rows are held, and no weight of the module."""

    def rows_at(self, ids: Tensor) -> Tensor:
        return torch.ops.medusa.quantised_rows(self.file_rows, ids, self._type, self._width)

    def _looked_up(self, ids: Tensor) -> Tensor:
        return self.rows_at(ids)


_OF_EMBEDDINGS = ("num_embeddings", "embedding_dim", "embed_scale", "scalar_embed_scale")
"""Attributes of an embedding that code reads besides its weight."""


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
                if _is_narrow(parameter) and id(parameter) not in kept:
                    parameter.data = parameter.data.float()
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if _is_narrow(buffer):
                module._buffers[name] = buffer.float()
                if name in module._non_persistent_buffers_set:
                    computed.append(module)
                    continue
            module._buffers[name]._is_hf_initialized = True
    for module in dict.fromkeys(computed):
        base._init_weights(module)
    for config in _configs(base.config):
        config.dtype = torch.float32


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and the configurations of its parts."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield from _configs(part)


def placeholder(weight: Tensor) -> Tensor:
    """A tensor of the shape and place of ``weight`` that takes no memory: each number of it is none."""
    return torch.full((), float("nan"), dtype=torch.float32).expand(weight.shape)


# ------------------------------------------------------------------ pages of files


def _released() -> Callable[[Tensor], Tensor]:
    """A function that releases the file pages of a packed weight, and returns the weight's placeholder."""
    files = list(_mapped_files())
    advise = ctypes.CDLL(None, use_errno=True).madvise if files else None

    def release(weight: Tensor) -> Tensor:
        start, size = weight.data_ptr(), weight.nbytes
        if advise is not None and any(low <= start and start + size <= high for low, high in files):
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if (whole := (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first) > 0:
                advise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)
        return placeholder(weight)

    return release


def _mapped_files() -> Iterator[tuple[int, int]]:
    """The addresses of mapped files in this process; empty on systems that do not report them.

    A file that comes from the hub is named by its checksum there, so names tell nothing."""
    listing = Path("/proc/self/maps")
    if sys.platform != "linux" or not listing.exists():
        return
    for line in listing.read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5) if line.count(" ") >= 5 else (line, "")
        if path.startswith("/"):
            low, high = (int(each, 16) for each in addresses.split("-"))
            yield low, high
