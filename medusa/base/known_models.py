"""Models that are known by what is in their file, whatever it is called and wherever it lies."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from medusa.assets import DEFAULT_HEADS, FETCHABLE_FILES, known_heads, shipped_heads
from medusa.base.gguf_file import GGUFFile
from medusa.base.loading import gguf_path

F32 = 0
"""The type of tensors in 32 bits."""


def heads_for(base: str | None) -> str:
    """The name of the heads that ship for ``base``, as :func:`heads_that_fit` knows it.

    Raises:
        FileNotFoundError: a part of its file is missing.
        ValueError: none do.
    """
    name = None if base is None else heads_that_fit(base)
    if name is None:
        raise ValueError(
            f"heads={DEFAULT_HEADS!r} means the heads that ship with the base, which exist for "
            f"{', '.join(shipped_heads())}, got base {base!r}; name a heads directory or a hub id"
        )
    return name


def heads_that_fit(base: str) -> str | None:
    """The name of the heads that ship for ``base``: for its name, or for the model that is in its GGUF file;
    None where none do."""
    name = known_heads(base)
    if name is not None or not Path(base).exists():
        return name
    path = gguf_path(base, {})
    if path is None:
        return None
    stat = path.stat()
    model = _model_as_of(path, stat.st_mtime_ns, stat.st_size)
    return model if model in shipped_heads() else None


@functools.lru_cache(16)
def _model_as_of(path: Path, modified: int, size: int) -> str | None:
    """The name of the model in a file, for each time that it was written."""
    signature = model_signature(GGUFFile.open(path))
    return next((name for name, file in FETCHABLE_FILES.items() if file.signature == signature), None)


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
