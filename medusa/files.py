"""Files and directories that are written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` for a file that takes its place when the block ends well."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path``, whole or not at all."""
    with replaced_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it does not hold a JSON object, or one too deeply nested to be read.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; a heads directory holds config.json and model.safetensors"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read; write it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


@contextmanager
def replaced_directory(directory: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory that takes the place of ``directory`` when the block ends well.

    When the block raises, ``directory`` stays as it was and the temporary one is removed.
    """
    target = Path(directory)
    if not overwrite:
        check_writable_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        yield partial
        for path in (partial, *partial.rglob("*")):  # mkdtemp and safetensors let nobody else read
            path.chmod(0o755 if path.is_dir() else 0o644)
        _take_the_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _take_the_place(partial: Path, target: Path) -> None:
    """Rename ``partial`` to ``target``; what stood there is put back when that fails, removed when not."""
    if not target.exists():
        os.replace(partial, target)
        return
    retired = partial.with_name(partial.name.replace(".partial-", ".retired-"))
    os.replace(target, retired)
    try:
        os.replace(partial, target)
    except OSError:
        os.replace(retired, target)
        raise
    shutil.rmtree(retired)


def check_writable_target(directory: str | Path) -> None:
    """Raise FileExistsError when ``directory`` holds something; call it before long work, not after."""
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(
            f"output directory {str(target)!r} exists and is not empty; choose another, or allow overwriting"
        )
