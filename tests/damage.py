"""Changes of a directory on disk, for tests of what is refused: each gives a function of the directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[Path], object]


def edit_json(path: Path, drop: str = "", **keys) -> None:
    held = json.loads(path.read_text())
    held.pop(drop, None)
    path.write_text(json.dumps({**held, **keys}))


def says(file: str, drop: str = "", **keys) -> Change:
    """Keys of a JSON file, one of them taken out."""
    return lambda directory: edit_json(directory / file, drop, **keys)


def config_says(drop: str = "", **keys) -> Change:
    return says("config.json", drop, **keys)


def changed(file: str, tensors: dict[str, Tensor | None]) -> Change:
    """Tensors of a file, replaced, or taken out where the value is None."""

    def change(directory: Path) -> None:
        read = load_file if file.endswith("safetensors") else torch.load
        held = read(directory / file) | tensors
        write_tensors(directory / file, {name: each for name, each in held.items() if each is not None})

    return change


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """``tensors`` in the format of the name; safetensors wants them to share no memory."""
    if path.suffix == ".safetensors":
        save_file({name: each.detach().clone().contiguous() for name, each in tensors.items()}, path)
    else:
        torch.save(tensors, path)


def written(file: str, content: str | bytes) -> Change:
    content = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / file).write_bytes(content)


def cut(file: str, length: int) -> Change:
    """The first bytes of a file, or all but so many of the last where ``length`` is negative."""
    return lambda directory: (directory / file).write_bytes((directory / file).read_bytes()[:length])


def removed(file: str) -> Change:
    return lambda directory: (directory / file).unlink()
