"""Reading tensors of heads, ours and others': safetensors and ``torch.save`` files, whole models in shards.

``torch.save`` files are pickles. They are read with ``weights_only=True``, which builds tensors and nothing
else: a file cannot run code.
"""

from __future__ import annotations

import errno
import pickle
import struct
import zipfile
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from medusa.files import read_json
from medusa.heads.fingerprint import READABLE_TYPES

_Wanted = Callable[[str], bool]
"""Whether the tensor of a name is to be read."""
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_UNPICKLING_ERRORS = (
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""Exceptions of ``torch.load`` on bytes that are no pickle, or half of one, depending on the bytes."""
_WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")


def read_tensors(
    path: Path, wanted: _Wanted = lambda name: True, integers: Container[str] = ()
) -> dict[str, Tensor]:
    """The tensors of a file whose names are ``wanted``, on the CPU.

    All must hold floats but those called as in ``integers``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is damaged or cut short, holds anything but tensors by name, or a wanted tensor is no
            float tensor or not finite. The message names the file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the directory is incomplete, download it again")
    if path.suffix == ".safetensors":
        tensors = _read_safetensors(path, wanted)
    else:
        tensors = _read_pickle(path, wanted)
    for name, tensor in tensors.items():
        _check_plain(path, name, tensor)
        if tensor.dtype not in READABLE_TYPES and (tensor.is_floating_point() or name not in integers):
            raise ValueError(
                f"{path}: tensor {name!r} must hold floats, got {tensor.dtype}; quantised heads cannot be "
                "read, get them in float16, bfloat16 or float32"
            )
    check_finite(tensors, str(path))
    return tensors


def check_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError unless every weight is finite in float32: NaN puts guesses in no order."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise ValueError(
                f"{where}: tensor {name!r} must hold finite numbers, got NaN or infinity; train the heads "
                "again, with a lower learning rate if the loss diverged"
            )


def check_tensors(
    held: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], heads_name: str, where: Path
) -> None:
    """Raise ValueError unless ``held`` has the tensors of these ``shapes`` and no others.

    ``heads_name`` and ``where`` are for the message, which names the first wrong tensor.
    """
    missing = [name for name in shapes if name not in held]
    if missing:
        raise ValueError(
            f"{where} lacks {_listed(missing)}, of {heads_name}; the file is incomplete, get it again"
        )
    extra = [name for name in held if name not in shapes]
    if extra:
        raise ValueError(
            f"{where} holds tensors that are no part of {heads_name}: {_listed(extra)}; they would be left "
            "out. Get the file of such heads"
        )
    for name, shape in shapes.items():
        if tuple(held[name].shape) != tuple(shape):
            raise ValueError(
                f"{where}: tensor {name!r} must have shape {tuple(shape)}, got {tuple(held[name].shape)}; "
                "the files are damaged or do not belong together, get them again"
            )


def matrix_shape(tensors: Mapping[str, Tensor], name: str, where: Path) -> tuple[int, int]:
    """The shape of the tensor of this name.

    Raises:
        ValueError: there is none, or it is no matrix.
    """
    if name not in tensors:
        raise ValueError(
            f"{where} lacks {name}; it holds {_listed(sorted(tensors)) or 'nothing'}. Get it again"
        )
    rows, *columns = tensors[name].shape or (0,)
    if len(columns) != 1:
        raise ValueError(
            f"{where}: tensor {name!r} must have 2 dimensions, got {tuple(tensors[name].shape)}; get it again"
        )
    return rows, columns[0]


def _listed(names: Sequence[str], most: int = 6) -> str:
    """The first names of many."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _check_plain(path: Path, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless ``tensor`` is contiguous, with the number of elements that the file holds."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout)
        raise ValueError(
            f"{path}: tensor {name!r} must be a plain one, got a {kind} tensor; save it as a dense tensor"
        )
    num_bytes = tensor.numel() * tensor.itemsize
    bytes_in_file = tensor.untyped_storage().nbytes()
    if num_bytes > bytes_in_file:
        raise ValueError(
            f"{path}: tensor {name!r} repeats {bytes_in_file:,} bytes to {num_bytes:,} (shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}); save its contiguous() copy"
        )


def read_model_tensors(
    directory: Path, wanted: _Wanted, integers: Container[str] = ()
) -> dict[str, tuple[Path, Tensor]]:
    """The tensors of a model directory, in one file or in shards, whose names are ``wanted``; the file of
    each. Tensors named in ``integers`` need not hold floats.

    Raises:
        FileNotFoundError: there is no weights file, or a shard is missing.
        ValueError: as :func:`read_tensors`, or a shard lacks a tensor that the index says it holds.
    """
    tensors: dict[str, tuple[Path, Tensor]] = {}
    for path, names in model_files(directory).items():
        if names is None:  # no index says what the file holds
            in_file = read_tensors(path, wanted, integers)
        else:
            listed = {name for name in names if wanted(name)}
            if not listed:
                continue
            in_file = read_tensors(path, listed.__contains__, integers)
            missing = sorted(listed - in_file.keys())
            if missing:
                raise ValueError(f"{path} lacks {missing}, which the index says it holds; download it again")
        tensors |= {name: (path, tensor) for name, tensor in in_file.items()}
    return tensors


def model_files(directory: Path) -> dict[Path, list[str] | None]:
    """The weight files of a model directory, each with the names it holds; None where there is no index.

    Raises:
        FileNotFoundError: there are none.
        ValueError: the index cannot be read.
    """
    for name in _INDEXES:
        if (directory / name).exists():
            return _indexed_files(directory / name)
    for name in _WHOLE_FILES:
        if (directory / name).exists():
            return {directory / name: None}
    raise FileNotFoundError(
        f"{directory} holds none of {', '.join((*_INDEXES, *_WHOLE_FILES))}; download it again"
    )


def _indexed_files(index: Path) -> dict[Path, list[str] | None]:
    """The files that an index lists, each with the names it holds."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} must hold weight_map, from tensor names to files; download it again")
    files: dict[Path, list[str] | None] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if Path(shard).name != shard:
            raise ValueError(
                f"{index} names the file {shard!r}, which must be in the same directory; download it again"
            )
        files[index.parent / shard] = [name for name, file in weight_map.items() if file == shard]
    return files


def names_in(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file.

    Raises:
        ValueError: it is damaged or cut short.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _read_safetensors(path: Path, wanted: _Wanted) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _read_pickle(path: Path, wanted: _Wanted) -> dict[str, Tensor]:
    _check_not_packed(path)
    try:
        held: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Weights only load failed" in str(error) and "GLOBAL" in str(error):
            raise ValueError(
                f"{path} holds pickled Python objects beside tensors, which could run any code when they are "
                "read; they are not. Write its tensors to a safetensors file where you trust it"
            ) from error
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # which torch gives where a short archive has lost its end
            raise
        raise _damaged(path, error) from error
    except _UNPICKLING_ERRORS as error:
        raise _damaged(path, error) from error
    if not isinstance(held, Mapping):
        raise ValueError(
            f"{path} must hold tensors by name, got {type(held).__name__}; save the state_dict of the heads"
        )
    for name, value in held.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path} must hold tensors by name, got {type(value).__name__} at {name!r}; save the "
                "state_dict of only the heads"
            )
    return {name: value for name, value in held.items() if wanted(name)}


def _check_not_packed(path: Path) -> None:
    """Raise ValueError where a file of ``torch.save``, a zip archive whose entries are not packed, is."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except zipfile.BadZipFile as error:
        raise _damaged(path, error) from error
    size = path.stat().st_size
    if unpacked > size:
        raise ValueError(
            f"{path} is packed, {size:,} bytes of {unpacked:,}, as torch.save packs none; write it again "
            "with torch.save, or as safetensors"
        )


def _damaged(path: Path, error: Exception) -> ValueError:
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    return ValueError(
        f"{path} is damaged or cut short ({first_line[:200]}); download, copy or train it again"
    )
