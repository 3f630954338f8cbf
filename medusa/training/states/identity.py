"""Which base model stored states are of, told without reading all of its weights.

The name of a model says little: the same directory may hold other weights tomorrow. A hub id has its commit;
of a directory, blocks of its weight files are read, closer together than the matrices that a fine-tuning
changes are large.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from medusa.base.causal_lm import CausalLM

NUM_BLOCKS, BLOCK = 1024, 4096
"""Blocks read of each file, evenly spread, and their bytes; a file of no more than that is read whole."""
NUM_NUMBERS = 4096
"""Read of each tensor of a model that lies in memory only."""
NOT_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "architectures")
"""Keys of a configuration that say nothing of what the model computes."""


def identity_of(base: CausalLM) -> dict[str, str]:
    """``weights`` and ``configuration`` of ``base``, which change when the model does.

    The configuration includes the rotary settings, windows and scales. Of ``base`` its name and its
    configuration are enough, except for a model that was made in memory.
    """
    said = {
        key: value
        for key, value in base.config.to_dict().items()
        if key not in NOT_THE_MODEL and not key.startswith("_")
    }
    configuration = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()
    return {"weights": _weights(base), "configuration": configuration}


def _weights(base: CausalLM) -> str:
    commit = getattr(base.config, "_commit_hash", None)
    if commit is not None:
        return f"commit {commit}"
    directory = Path(base.name_or_path)
    if base.name_or_path and directory.is_dir():
        for pattern in ("*.safetensors", "*.bin", "*.gguf"):
            if files := sorted(directory.glob(pattern)):
                return f"files {_of_files(files)}"
    return f"tensors {_of_tensors(base)}"


def _of_files(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            if size <= NUM_BLOCKS * BLOCK:
                found.update(file.read())
                continue
            for number in range(NUM_BLOCKS):
                file.seek(number * (size - BLOCK) // (NUM_BLOCKS - 1))
                found.update(file.read(BLOCK))
    return found.hexdigest()


def _of_tensors(base: CausalLM) -> str:
    found = hashlib.sha256()
    for name, each in base.state_dict().items():
        flat = each.detach().flatten()
        some = flat[:: max(1, len(flat) // NUM_NUMBERS)]
        found.update(f"{name} {tuple(each.shape)}".encode())
        found.update(some.to("cpu", torch.float32).numpy().tobytes())
    return found.hexdigest()
