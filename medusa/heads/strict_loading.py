"""Heads modules from what a heads directory says and holds, exactly or not at all.

Unknown and missing keys, tensors that are missing, left over, of another shape or cut short: each is an
error that names what is wrong and where.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from medusa.heads.eagle import EagleConfig, EagleHead, Heads
from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads

Config = TypeVar("Config", HeadsConfig, EagleConfig)

HEADER_KEYS = ("format_version", "kind", "base_model", "adapter")
"""Keys of config.json that are no part of a module's configuration."""
BLOCK_TENSOR = re.compile(r"blocks\.(?P<head>\d+)\.(?P<layer>\d+)\.")


def heads_holding(
    weights: dict[str, Tensor], raw: Mapping[str, Any], config_path: Path, weights_path: Path
) -> Heads:
    """The module that ``raw``, a config.json, describes, holding ``weights``.

    Raises:
        ValueError: the two contradict each other or themselves; the message names the file and the key or
            tensor.
    """
    kind = raw.get("kind", "medusa")
    if kind == "eagle":
        head = EagleHead(strict_config(EagleConfig, raw, config_path), weights.get("token_map"))
        return _filled(head, weights, "an 'eagle' head", weights_path)
    if kind != "medusa":
        raise ValueError(
            f"{config_path} says kind={kind!r}, this version of medusa reads 'medusa' or 'eagle'"
        )
    config = strict_config(HeadsConfig, raw, config_path)
    _check_counts(config, weights, config_path, weights_path)
    heads = MedusaHeads(config, weights.get("token_map") if config.unembedding == "token_map" else None)
    return _filled(heads, weights, f"{config.unembedding!r} heads", weights_path)


def strict_config(config_type: type[Config], raw: Mapping[str, Any], path: Path) -> Config:
    """The configuration in a config.json."""
    known = {f.name for f in fields(config_type)}
    values = {key: value for key, value in raw.items() if key not in HEADER_KEYS}
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            advice = f"did you mean {nearest[0]!r}?" if nearest else f"known are {sorted(known)}"
            raise ValueError(f"{path} has unknown key {key!r}; {advice}")
    missing = [f.name for f in fields(config_type) if f.default is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{path} must say {' and '.join(missing)}; copy or train it again")
    return config_type(**values)


def read_weights(path: Path, device: str) -> dict[str, Tensor]:
    """Every tensor of a safetensors file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is damaged or cut short.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the heads directory is incomplete")
    try:
        with safe_open(path, framework="pt") as opened:
            opened.keys()
        return load_file(path, device=device)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); copy or train it again") from error


def _check_counts(
    config: HeadsConfig, weights: Mapping[str, Tensor], config_path: Path, weights_path: Path
) -> None:
    """Head and layer counts are read from the tensors; a config that says others is refused."""
    blocks = [match for match in map(BLOCK_TENSOR.match, weights) if match]
    counted = {
        "num_heads": 1 + max((int(block["head"]) for block in blocks), default=-1),
        "num_layers": 1 + max((int(block["layer"]) for block in blocks), default=-1),
    }
    for name, count in counted.items():
        if getattr(config, name) != count:
            raise ValueError(
                f"{config_path} says {name}={getattr(config, name)}, {weights_path.name} holds {count}; "
                "the two files do not belong together"
            )


Module = TypeVar("Module", bound=nn.Module)


def _filled(module: Module, weights: dict[str, Tensor], what: str, path: Path) -> Module:
    """``module`` holding ``weights``, which must be its tensors and no others."""
    expected = module.state_dict()
    missing, extra = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    if missing or extra:
        raise ValueError(f"{path} does not hold the tensors of {what}: missing {missing}, extra {extra}")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise ValueError(
                f"{path}: tensor {name!r} must have shape {tuple(tensor.shape)}, "
                f"got {tuple(weights[name].shape)}"
            )
    module.load_state_dict(weights, assign=True)
    return module
