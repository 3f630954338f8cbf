"""Reads files of the GGUF format: metadata, and where each tensor lies.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A model may be split into several
files, ``NAME-00001-of-00003.gguf``; any of them names all. Files are mapped into memory, and every size,
offset and count in them is checked before it is used.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

SUFFIX = ".gguf"
MAGIC = b"GGUF"
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
VERSIONS = (2, 3)
FLOAT_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of tensors that are numbers as torch has them."""
INFILL_TOKENS = "medusa_infill_tokens"
"""Setting of a tokenizer from a file that says by which tokens a gap is marked: their names by what they are,
``prefix``, ``suffix`` and ``middle``, and lists of ``others``, ``files`` and ``repositories``."""
MOST_DIMENSIONS = 4
MOST_ENTRIES = 2**20
"""Most metadata entries, and most tensors, of a file: far more than any model has."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies, and in which form."""

    name: str
    shape: tuple[int, ...]
    """In the order of torch: the last dimension is contiguous."""
    type: int
    """The number of its type; :func:`type_name` names it."""
    file: Path
    offset: int
    """In its file, in bytes."""
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is the last dimension."""
        return self.num_bytes // max(1, math.prod(self.shape[:-1]))

    def check_shape(self, expected: Sequence[int]) -> None:
        """Raise ValueError if it has another shape than the model that the metadata describe."""
        check_shape(self.file, self.name, self.shape, expected)


def check_shape(file: Path, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    """Raise ValueError if a tensor of ``file`` has another shape than the model that the metadata
    describe."""
    if tuple(shape) != tuple(expected):
        raise ValueError(
            f"{file}: tensor {name!r} must have shape {tuple(expected)}, as the file's metadata say, got "
            f"{tuple(shape)}"
        )


@dataclass
class GGUFFile:
    """A model in one GGUF file, or split into several."""

    path: Path
    """The file, or the first of several."""
    metadata: Mapping[str, Any]
    """The values by key; an array of strings is its length."""
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    _texts: Mapping[str, _Texts] = field(repr=False, compare=False)
    _files: Mapping[Path, _MappedFile] = field(repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Read the header of the file at ``path``, and those of the other parts where it is split.

        Raises:
            FileNotFoundError: a part is missing.
            ValueError: a file is no GGUF file, or is damaged; the message names the file and the place.
        """
        parts = _parts(Path(path))
        for part in parts:
            if not part.is_file():
                raise FileNotFoundError(f"{part.name}, a part of the model {str(path)!r}, is not beside it")
        metadata: dict[str, Any] = {}
        tensors: dict[str, TensorEntry] = {}
        texts: dict[str, _Texts] = {}
        files = {part: _MappedFile(part) for part in parts}
        for part in reversed(parts):  # what the first part says, counts
            header = _Header(files[part])
            part_metadata, entries = header.read()
            metadata.update(part_metadata)
            texts.update(header.texts)
            for entry in entries:
                if entry.name in tensors:
                    raise ValueError(f"{part}: tensor {entry.name!r} is there twice; download the file again")
                tensors[entry.name] = entry
        if not isinstance(metadata.get("general.architecture"), str):
            raise ValueError(f"{path} must name its architecture (general.architecture), and does not")
        return cls(parts[0], metadata, tensors, texts, files)

    @staticmethod
    def parts(path: Path) -> list[Path]:
        """The files of the model that the file at ``path`` belongs to, in order."""
        return _parts(path)

    @staticmethod
    def first_part(path: Path) -> Path:
        """The first of :meth:`parts`."""
        return _parts(path)[0]

    @property
    def architecture(self) -> str:
        """As llama.cpp names it: "llama", "qwen2", "gemma3", ..."""
        return str(self.metadata["general.architecture"])

    @property
    def num_bytes(self) -> int:
        """The size of all tensors together."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    @property
    def arrays_of_strings(self) -> Collection[str]:
        """The keys of metadata that are arrays of strings."""
        return self._texts.keys()

    def texts(self, key: str) -> list[str]:
        """The strings of a metadata array, which must be there."""
        texts = self._texts[key]
        return [texts.header.text(*texts.span(place)) for place in range(len(texts))]

    @functools.cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, (V,) long, which must be there."""
        return self.texts("tokenizer.ggml.tokens")

    @functools.cached_property
    def token_ids(self) -> dict[str, int]:
        """The ids of :attr:`tokens`."""
        return {text: token for token, text in enumerate(self.tokens)}

    def rows(self, name: str) -> Tensor:
        """The bytes of a tensor's rows, (R, bytes) uint8: a view of the mapped file.

        Raises:
            ValueError: the file was cut after it had been opened.
        """
        entry = self.tensors[name]
        file = self._files[entry.file]
        file.check_reaches(entry.offset + entry.num_bytes)
        return file.bytes[entry.offset : entry.offset + entry.num_bytes].view(-1, entry.row_bytes)

    def plain(self, name: str) -> Tensor:
        """A tensor of one of :data:`FLOAT_TYPES` in its own type and shape: a view of the mapped file."""
        entry = self.tensors[name]
        return self.rows(name).flatten().view(FLOAT_TYPES[entry.type]).view(entry.shape)

    def floats(self, name: str) -> Tensor:
        """The numbers of a tensor, float32 in its shape, exactly as the file means them.

        Raises:
            ValueError: its type cannot be read.
        """
        import gguf

        entry = self.tensors[name]
        try:
            numbers = gguf.dequantize(self.rows(name).numpy(), gguf.GGMLQuantizationType(entry.type))
        except NotImplementedError as error:
            raise ValueError(
                f"{entry.file}: tensor {name!r} is of type {type_name(entry.type)}, which cannot be read"
            ) from error
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).view(entry.shape)


def type_name(number: int) -> str:
    """The name of a tensor type: "Q4_K", "F32", ...; its number where it has none."""
    import gguf

    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return str(number)


@functools.cache
def _block_sizes() -> dict[int, tuple[int, int]]:
    """The numbers and the bytes of a block of each tensor type, by the number of the type."""
    import gguf

    return {int(number): size for number, size in gguf.GGML_QUANT_SIZES.items()}


def is_gguf(path: str | Path) -> bool:
    """Whether ``path`` is named as a GGUF file."""
    return str(path).lower().endswith(SUFFIX)


def begins_as_gguf(path: Path) -> bool:
    """Whether ``path`` is a file that begins as GGUF files do: Ollama names its own by their digest."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _parts(path: Path) -> list[Path]:
    """The files of the model that ``path`` belongs to, in order. A name with a number that its count has not
    is no part's."""
    match = _SPLIT.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [path]
    count = int(match["count"])
    names = (f"{match['stem']}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1))
    return [path.with_name(name) for name in names]


class _MappedFile:
    """A file that is mapped into memory, and open as long: another file that takes its name changes nothing.

    To read what was cut off since kills the process (SIGBUS), so its size is asked for before.
    """

    def __init__(self, path: Path):
        self.path = path
        self.size = path.stat().st_size
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """(size,) uint8."""
        if self.size == 0:
            return
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.size = len(self._map)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def check_reaches(self, end: int) -> None:
        """Raise ValueError where the file, as it is now, ends before byte ``end``."""
        size = self._map.size()
        if size < end:
            raise ValueError(
                f"GGUF file {self.path} had {self.size} bytes when it was opened, and was cut to {size} "
                "since; copy or download it again, under another name while it is in use"
            )


@dataclass(frozen=True)
class _Texts:
    """Where the strings of a metadata array are."""

    header: _Header
    bounds: array[int]
    """The start and the end of each."""

    def __len__(self) -> int:
        return len(self.bounds) // 2

    def span(self, place: int) -> tuple[int, int]:
        return self.bounds[2 * place], self.bounds[2 * place + 1]


class _Header:
    """The header of one file, read from its start to its end."""

    def __init__(self, file: _MappedFile):
        self._path = file.path
        self._size = file.size
        self._at = 0  # the next byte to read
        if self._size < 24:
            raise self._damaged("it is shorter than a header")
        file.check_reaches(self._size)
        self._bytes = memoryview(cast(Any, file.bytes.numpy()))
        self.texts: dict[str, _Texts] = {}

    def read(self) -> tuple[dict[str, Any], list[TensorEntry]]:
        """The metadata and the tensors; afterwards :attr:`texts` has the arrays of strings."""
        if bytes(self._bytes[: len(MAGIC)]) != MAGIC:
            raise ValueError(f"{self._path} must be a GGUF file, and does not begin as one")
        self._at = 4
        version, num_tensors, num_entries = self._numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"{self._path} must be of GGUF version 2 or 3, got {version}")
        if max(num_tensors, num_entries) > MOST_ENTRIES:
            raise self._damaged(f"it claims {num_tensors} tensors and {num_entries} metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"metadata key {key!r} is there twice")
            metadata[key] = self._value(key, *self._numbers("I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment % 8:
            raise self._damaged(f"general.alignment must be a multiple of 8, got {alignment!r}")
        tensors = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment  # of the numbers of all tensors, after the header
        return metadata, [
            self._entry(name, shape, kind, offset, start, alignment) for name, shape, kind, offset in tensors
        ]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """The name, shape, type and offset of the next tensor."""
        name = self._string()
        (num_dimensions,) = self._numbers("I")
        if not 1 <= num_dimensions <= MOST_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = self._numbers(f"{num_dimensions}Q")
        kind, offset = self._numbers("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _entry(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, alignment: int
    ) -> TensorEntry:
        """The entry of a tensor, whose bytes must be within the file."""
        sizes = _block_sizes()
        if kind not in sizes:
            raise self._damaged(f"tensor {name!r} is of type {kind}, which is none")
        block, block_bytes = sizes[kind]
        if 0 in shape or shape[-1] % block:
            raise self._damaged(f"tensor {name!r} has shape {shape}, no whole blocks of {type_name(kind)}")
        num_bytes = math.prod(shape) // block * block_bytes
        if offset % alignment or start + offset + num_bytes > self._size:
            raise self._damaged(
                f"tensor {name!r} has {num_bytes} bytes from {start + offset} on, and the file {self._size}"
            )
        return TensorEntry(name, shape, kind, self._path, start + offset, num_bytes)

    def _value(self, key: str, kind: int) -> Any:
        """The next metadata value; the length of an array of strings, which :attr:`texts` then has."""
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"metadata {key!r} is of type {kind}, which is none")
        kind, count = self._numbers("IQ")
        if kind in _SCALARS:
            if count > self._size:
                raise self._damaged(f"metadata {key!r} claims {count} numbers")
            return list(self._numbers(f"{count}{_SCALARS[kind]}"))
        if kind != _STRING:
            raise self._damaged(f"metadata {key!r} is an array of type {kind}, which is none")
        self.texts[key] = _Texts(self, self._bounds(count))
        return count

    def _bounds(self, count: int) -> array[int]:
        """Where ``count`` strings are that follow each other; half a million are usual."""
        if count > self._size // 8:
            raise self._damaged(f"it claims an array of {count} strings")
        bounds = array("Q")
        at = self._at
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            if start <= self._size:
                at = start + length_at(self._bytes, at)[0]
            if max(start, at) > self._size:
                raise self._damaged(f"it ends within its header, at byte {self._size}")
            bounds.append(start)
            bounds.append(at)
        self._at = at
        return bounds

    def _string(self) -> str:
        start, end = self._bounds(1)
        return self.text(start, end)

    def text(self, start: int, end: int) -> str:
        """The text of the bytes from ``start`` to ``end``."""
        try:
            return bytes(self._bytes[start:end]).decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"text at byte {start} is no UTF-8") from error

    def _numbers(self, formats: str) -> tuple[Any, ...]:
        """The next numbers, in the ``formats`` of :mod:`struct`."""
        start = self._at
        self._skip(struct.calcsize(f"<{formats}"))
        return struct.unpack_from(f"<{formats}", self._bytes, start)

    def _skip(self, count: int) -> None:
        if count > self._size - self._at:
            raise self._damaged(f"it ends within its header, at byte {self._size}")
        self._at += count

    def _damaged(self, how: str) -> ValueError:
        return ValueError(f"GGUF file {self._path} is damaged or cut: {how}; copy or download it again")
