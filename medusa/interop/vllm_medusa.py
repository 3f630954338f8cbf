"""The format of vLLM's ``medusa`` method: config.json and model.safetensors, as of vLLM 0.32.

    config.json         model_type "medusa", hidden_size, vocab_size, num_heads, num_hidden_layers,
                        medusa_fc_bias (without it vLLM leaves the biases out and says nothing),
                        original_lm_head (one lm_head.weight for all heads), truncated_vocab_size,
                        logit_scale (1 where it is not there)
    model.safetensors   blocks.{head}.layers.{layer}.weight and .bias, and lm_heads.{head}.weight (V, D) or
                        lm_head.weight, or just lm_heads.0.weight; the names of the reference code are read
                        too

vLLM raises where a tensor is missing, ignores unknown ones, and takes any key with "num" and "heads" or
"layers" in it for the count. A token_map, for which its code has a place, does not load. It verifies a chain
of each head's best guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from medusa.console import megabytes
from medusa.files import read_json
from medusa.heads.medusa_heads import MedusaHeads
from medusa.heads.tensor_files import names_in, read_tensors
from medusa.interop.plain_heads import NAMES as REFERENCE_NAMES
from medusa.interop.plain_heads import (
    PlainHeads,
    TensorNames,
    as_medusa_heads,
    places,
    read_plain_heads,
    scale_of,
    stored_plain_heads,
)
from medusa.interop.protocol import (
    CONFIG_FILE,
    ExportedFiles,
    ForeignFormat,
    ForeignHeads,
    ReadRequest,
    ToExport,
    base_rows,
    check_belongs,
    checked_against_config,
    config_in,
    named_base,
    shared_changes,
    vllm_command,
)

_ARCHITECTURE = "MedusaModel"
NAMES = TensorNames("blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight", "lm_head.weight")
OLD_PREFIX, TOKEN_MAP = "medusa_heads.", "token_map"
_DEFAULTS = {
    "hidden_size": 4096,
    "num_heads": 5,
    "num_hidden_layers": 1,
    "medusa_fc_bias": False,
    "original_lm_head": False,
}
"""vLLM's defaults for missing keys."""


def _export(request: ToExport) -> ExportedFiles:
    """Plain heads as vLLM reads them."""
    heads = checked_plain(request)
    rows = base_rows(request) if heads.scores_base_rows else None
    config = {
        "model_type": "medusa",
        "architectures": [_ARCHITECTURE],
        "base_model_name_or_path": request.base_name,
        "hidden_size": heads.config.hidden_size,
        "vocab_size": heads.config.vocab_size,
        "truncated_vocab_size": heads.config.vocab_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": rows is not None,
        **scale_of(heads),
    }
    changes = [*shared_changes(request), *_row_changes(request, heads)]
    return ExportedFiles(config, stored_plain_heads(heads, NAMES, rows), tuple(changes))


def checked_plain(request: ToExport) -> MedusaHeads:
    """The heads to export.

    Raises:
        ValueError: they are more than plain Medusa heads, or trained with an adapter, or for another base.
    """
    checkpoint = request.checkpoint
    source = request.source
    heads: Any = checkpoint.heads
    config = heads.config
    more = []
    if config.reads_path:
        more.append("reads_path is true: each head also reads the tokens before its guess")
    if config.fused_layers:
        layers = ", ".join(map(str, config.fused_layers))
        more.append(f"fused_layers is [{layers}]: the heads also read those layers of the base")
    if more:
        raise ValueError(
            f"{source} cannot be served by vLLM, whose heads read the base's last hidden state and "
            f"nothing else. {'; '.join(more)}. Train heads for vLLM with --reads-path false and "
            "--fused-layers none; they guess less well"
        )
    check_belongs(request)
    return heads


def _row_changes(request: ToExport, heads: MedusaHeads) -> list[str]:
    """Sentences on the base's rows that ``heads`` score with."""
    config = heads.config
    if config.unembedding == "full":
        return []
    size = config.vocab_size * config.hidden_size * request.dtype.itemsize
    written = f"{config.vocab_size:,} rows, {megabytes(size)}"
    if config.token_map_size is None:
        return [f"the base's LM head is written into the file: {written}"]
    return [
        f"the token map of {config.token_map_size:,} tokens is expanded to {written}; rows outside the map "
        "are their mean, which is never guessed, and cost time"
    ]


def _read(request: ReadRequest) -> ForeignHeads:
    """The heads that vLLM makes of a directory."""
    config_path = request.directory / CONFIG_FILE
    config = read_json(config_path)
    _check_architecture(config, config_path)
    path = _weights_file(request.directory)
    if TOKEN_MAP in names_in(path):
        raise ValueError(
            f"{path} holds {TOKEN_MAP!r}, with which vLLM 0.32 does not load ('weights were not "
            "initialized'); write the file without it, with rows for the whole vocabulary"
        )
    tensors = {name.replace(OLD_PREFIX, ""): tensor for name, tensor in read_tensors(path).items()}
    first = NAMES.rows.format(head=0)
    if config.get("original_lm_head") and [*places(NAMES.rows, tensors)] == [first]:
        tensors[NAMES.shared] = tensors.pop(first)
    is_reference = bool(places(REFERENCE_NAMES.block, tensors))
    plain = read_plain_heads(tensors, REFERENCE_NAMES if is_reference else NAMES, path)
    if plain.vocab_size is None:
        raise ValueError(
            f"{path} holds neither {first} nor {NAMES.shared}, the rows that score the vocabulary, and vLLM "
            "does not take the base's; `medusa import` reads such heads, and `medusa export --to "
            "vllm-medusa` writes them with the rows"
        )
    held = _held(plain, config)  # with the config's own keys for the counts
    defaults = {key: value for key, value in _DEFAULTS.items() if key in held}
    more = checked_against_config(config, held, config_path, path, request.trust_tensors, defaults)
    heads = as_medusa_heads(plain, request.base, path, config)
    return ForeignHeads(heads, plain.dtype, plain.notes + more)


def _is_vllm_directory(directory: Path) -> bool:
    """Whether ``directory`` says that it is for vLLM."""
    config = config_in(directory)
    return config.get("model_type") == "medusa" or config.get("architectures") == [_ARCHITECTURE]


def _weights_file(directory: Path) -> Path:
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files) or "none"
    raise FileNotFoundError(f"{directory} must hold one safetensors file for vLLM, got {names}")


def _check_architecture(config: Mapping[str, Any], path: Path) -> None:
    configured = config.get("architectures", [_ARCHITECTURE])
    if configured != [_ARCHITECTURE]:
        raise ValueError(
            f"{path} says architectures={configured!r}, and vLLM loads Medusa heads for [{_ARCHITECTURE!r}] "
            "or where the key is not there; mend it"
        )


def _held(plain: PlainHeads, config: Mapping[str, Any]) -> dict[str, Any]:
    """The counts in the tensors, under the keys of ``config``."""
    heads = _count_keys(config, "heads") or ["num_heads"]
    layers = _count_keys(config, "layers") or ["num_hidden_layers"]
    return {
        "hidden_size": plain.hidden_size,
        "vocab_size": plain.vocab_size,
        "truncated_vocab_size": plain.vocab_size,
        "medusa_fc_bias": any(name.endswith("bias") for name in plain.tensors),
        "original_lm_head": plain.shared_rows is not None,
        **dict.fromkeys(heads, plain.num_heads),
        **dict.fromkeys(layers, plain.num_layers),
    }


def _count_keys(config: Mapping[str, Any], word: str) -> list[str]:
    """The keys that vLLM takes for the count of ``word``."""
    return [key for key in config if "num" in key and word in key]


VLLM_MEDUSA = ForeignFormat(
    "vllm-medusa",
    "vLLM",
    _read,
    named_base,
    _is_vllm_directory,
    _export,
    partial(vllm_command, "medusa"),
    training_flags="--reads-path false",
)
