"""Models that are known by what is in their files, whatever they are called and wherever they lie; and the
heads that there are for them."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch
from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
from safetensors import safe_open
from transformers.utils import CONFIG_NAME

from medusa.assets import DEFAULT_HEADS, FETCHABLE_FILES, base_named, known_heads, shipped_heads
from medusa.base.gguf_file import GGUFFile
from medusa.base.loading import gguf_path, is_gguf
from medusa.hub import looks_like_repository, split_revision
from medusa.learning.learned_heads import LearnedHeads, learned_home

F32 = 0
"""The type of tensors in 32 bits."""
READ_BYTES = 2**20
"""Of a file whose tensors are not read one by one."""
NUM_SAMPLES = 64
"""Parts of a file that its digest is of."""
SAMPLE_BYTES = 2**15
"""Of each of them."""


def heads_for(base: str | None) -> str:
    """The heads that there are for ``base``, as :func:`heads_that_fit` knows them.

    Raises:
        FileNotFoundError: a part of its file is missing.
        ValueError: there are none.
    """
    name = None if base is None else heads_that_fit(base)
    if name is None:
        raise ValueError(
            f"heads={DEFAULT_HEADS!r} means the heads that the base has learned (`medusa learn BASE`), or "
            f"those that ship for it, which exist for {', '.join(shipped_heads())}, got base {base!r}; name "
            "a heads directory or a hub id"
        )
    return name


def heads_that_fit(base: str) -> str | None:
    """The heads for ``base``: the directory of those that were learned for it (``medusa learn``), else the
    name of those that ship for its name or for the model in its GGUF file; None where there are none."""
    learned = learned_for(base)
    directory = None if learned is None else learned.in_use
    return shipped_for(base) if directory is None else str(directory)


def shipped_for(base: str) -> str | None:
    """The name of the heads that ship for ``base``; None where none do."""
    name = known_heads(base)
    if name is not None or not Path(base).exists():
        return name
    path = gguf_path(base, {})
    signature = None if path is None else _file_signature(path, _state_of(path))
    model = next((name for name, file in FETCHABLE_FILES.items() if file.signature == signature), None)
    return model if model in shipped_heads() else None


def learned_for(base: str) -> LearnedHeads | None:
    """What was learned for ``base``, perhaps nothing yet; None where nothing ever was, or the base is not
    here."""
    if not learned_home().is_dir():
        return None
    signature = signature_of(base)
    return None if signature is None else LearnedHeads.of_signature(signature)


def learning_place(base: str) -> LearnedHeads:
    """Where what ``base`` learns is kept; perhaps it learned nothing yet.

    Raises:
        ValueError: no file tells it from other bases.
    """
    signature = signature_of(base)
    if signature is None:
        raise ValueError(
            f"base must be a GGUF file, a directory or a hub id with files of weights, got {base!r}; save "
            "the model into a directory, and name that"
        )
    return LearnedHeads.of_signature(signature)


def signature_of(base: str) -> str | None:
    """The digest that tells a model from all others, of a directory, a GGUF file, a name that is known here
    or a hub id in the cache; None where it is not here."""
    place = _place_of(base)
    if place is None:
        return None
    if place.is_file():
        return _file_signature(place, _state_of(place))
    if not (place / CONFIG_NAME).is_file():
        return None
    states = tuple(map(_state_of, _weight_files(place)))
    return _directory_signature(place, states) if states else None


def digest_of_files(base: str) -> str | None:
    """A digest of the weights' bytes, of samples from all over each file: equal for copies, and other for
    other quantisations. None where the base is in no files here."""
    place = _place_of(base)
    if place is None:
        return None
    if place.is_file():
        files = [part for part in sorted(place.parent.iterdir()) if place == _first_of(part)]
    else:
        files = _weight_files(place)
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for sample in range(NUM_SAMPLES):
                file.seek(size * sample // NUM_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else None


def _first_of(path: Path) -> Path:
    """The first part of the file of which ``path`` is one, or ``path``."""
    return GGUFFile.first_part(path) if is_gguf(path) else path


def _place_of(base: str) -> Path | None:
    """The GGUF file or the directory of ``base``; None where it is not here."""
    try:
        name = base_named(base)
    except FileNotFoundError:
        return None
    is_here = Path(name).exists()
    path = gguf_path(name, {}) if is_here or ":" in name else None
    return path or (Path(name) if is_here else _cached_directory(name))


def _cached_directory(repository: str) -> Path | None:
    """The newest snapshot of a repository in the hub's cache; None where it has none."""
    name, revision = split_revision(repository)
    if not looks_like_repository(name):
        return None
    cached = try_to_load_from_cache(name, CONFIG_NAME, revision=revision)
    return None if cached in (None, _CACHED_NO_EXIST) else Path(str(cached)).parent


def _state_of(path: Path) -> tuple[int, int]:
    """What changes when a file is written anew."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(16)
def _file_signature(path: Path, state: tuple[int, int]) -> str:
    """The signature of a GGUF file, for each time that it was written."""
    return model_signature(GGUFFile.open(path))


def model_signature(file: GGUFFile) -> str:
    """The digest of a model's norms and biases, which are F32 in its files of any quantisation.

    Training changes them; files that were made of weights scaled by AWQ have others too.
    """
    digest = hashlib.sha256(file.architecture.encode())
    for name, entry in sorted(file.tensors.items()):
        if entry.type == F32 and len(entry.shape) == 1:
            digest.update(name.encode())
            digest.update(file.rows(name).numpy().tobytes())
    return digest.hexdigest()


@functools.lru_cache(16)
def _directory_signature(directory: Path, states: tuple[tuple[int, int], ...]) -> str:
    """The digest of the norms and biases in a directory's files of weights, for each time that they were
    written; of files that are no safetensors, of the beginning of each."""
    digest = hashlib.sha256()
    for path in _weight_files(directory):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                for name in sorted(tensors.keys()):
                    if len(tensors.get_slice(name).get_shape()) == 1:
                        digest.update(name.encode())
                        digest.update(tensors.get_tensor(name).view(torch.uint8).numpy().tobytes())
        else:
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(READ_BYTES))
    return digest.hexdigest()


def _weight_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt"))
