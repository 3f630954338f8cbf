"""The pooling that the files of a base state: how the states of a text become one vector, its embedding.

A GGUF file has it in the key ``<architecture>.pooling_type``, as llama.cpp reads it (``llama_pooling_type``
of ``include/llama.h``); vectors have length 1 there. A directory of sentence-transformers has it in
``modules.json`` and ``1_Pooling/config.json``, as its version 5 writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from transformers.utils import cached_file

from medusa.base.causal_lm import CausalLM
from medusa.base.gguf_file import GGUFFile
from medusa.base.loading import MISSING_OK, gguf_path

PoolingKind = Literal["mean", "last"]
"""The mean of the states of all tokens, or the state of the last one."""
OF_GGUF = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""Kinds by their number in a GGUF file; 0 is none."""
MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
MODES = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls", "mean": "mean", "cls": "cls"}
"""Kinds by their names in sentence-transformers, behind ``pooling_mode_``; others have no other name."""


@dataclass(frozen=True)
class Pooling:
    """How the states of a text become its embedding."""

    kind: PoolingKind
    is_normalised: bool = True
    """Whether the vector has length 1."""


def stated_pooling(base: CausalLM) -> Pooling | None:
    """The pooling that the files of ``base`` state; None where they state none.

    Raises:
        ValueError: it is of another kind, or something follows it, or tokens are to see those behind them.
    """
    name = base.name_or_path
    path = gguf_path(name, {}) if name else None
    if path is not None:
        return _pooling_of_file(GGUFFile.open(path))
    return _pooling_of_directory(name, base.config) if name else None


def _pooling_of_file(file: GGUFFile) -> Pooling | None:
    number = file.metadata.get(f"{file.architecture}.pooling_type") or 0
    if not number:
        return None
    is_causal = file.metadata.get(f"{file.architecture}.attention.causal", True)
    return Pooling(_checked(OF_GGUF.get(number, f"type {number}"), bool(is_causal), str(file.path)))


def _pooling_of_directory(name: str, config: Any) -> Pooling | None:
    modules = _content(name, MODULES) or []
    settings = _content(name, POOLING)
    if settings is None:
        return None
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others:
        raise ValueError(
            f"{name!r} has a module {others[0]!r} behind its pooling ({MODULES}), which is not computed "
            "here; use a model without it, such as Qwen3-Embedding"
        )
    text = config.get_text_config(decoder=True)
    is_causal = getattr(text, "is_causal", True) and not getattr(text, "use_bidirectional_attention", False)
    return Pooling(_checked(_mode(settings), bool(is_causal), name), "Normalize" in kinds)


def _mode(settings: Mapping[str, Any]) -> str:
    """The kind that ``1_Pooling/config.json`` states; several are joined by +."""
    mode = settings.get("pooling_mode")
    prefix = "pooling_mode_"
    modes = [
        name.removeprefix(prefix) for name, is_on in settings.items() if name.startswith(prefix) and is_on
    ]
    return "+".join(MODES.get(name, name) for name in ([str(mode)] if mode else modes))


def _checked(kind: str, is_causal: bool, where: str) -> PoolingKind:
    if not is_causal:
        raise ValueError(
            f"{where!r} states attention to later tokens, and a base is read from left to right here; use an "
            "embedding model with causal attention, such as Qwen3-Embedding"
        )
    for known in get_args(PoolingKind):
        if kind == known:
            return known
    raise ValueError(
        f"{where!r} must state pooling of the kind mean or last, got {kind or 'none'}; use another embedding "
        "model, such as Qwen3-Embedding"
    )


def _content(name: str, file: str) -> Any:
    """The content of a JSON file of a directory or of a repository of the hub; None where there is none."""
    path = cached_file(name, file, **MISSING_OK)
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} of {name!r} must be JSON ({error}); copy or download it again") from error
