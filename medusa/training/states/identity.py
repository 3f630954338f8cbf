"""Which base model stored states are of, told without reading all of its weights.

The name of a model says little: the same directory may hold other weights tomorrow. A hub id has its commit;
of a directory, blocks of its weight files are read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from medusa.base.causal_lm import CausalLM
from medusa.training.states.format import digest_of_weights

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
    if base.name_or_path and directory.is_dir() and (files := digest_of_weights(directory)):
        return files
    return f"tensors {_of_tensors(base)}"


def _of_tensors(base: CausalLM) -> str:
    found = hashlib.sha256()
    for name, each in base.state_dict().items():
        flat = each.detach().flatten()
        some = flat[:: max(1, len(flat) // NUM_NUMBERS)]
        found.update(f"{name} {tuple(each.shape)}".encode())
        found.update(some.to("cpu", torch.float32).numpy().tobytes())
    return found.hexdigest()
