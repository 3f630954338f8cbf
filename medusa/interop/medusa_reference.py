"""The checkpoints of FasterDecoding/Medusa, the code of the Medusa paper (arXiv 2401.10774).

    heads    config.json, and medusa_lm_head.pt (v1) or medusa_lm_head.safetensors (v2): the state_dict of a
             ModuleList of Sequentials: {head}.{layer}.linear.weight, .bias, then {head}.{L}.weight (V, D),
             which some v2 files leave out: the base's LM head scores
    whole    Medusa-2: a transformers model whose weights hold medusa_head.* beside the base's own

config.json says medusa_num_heads and medusa_num_layers, and of the first published heads wrongly: 2, where
the file holds 5.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from medusa.base.causal_lm import embedding_weight, output_embedding
from medusa.files import read_json
from medusa.heads.fingerprint import TOLERANCE, relative_distance
from medusa.heads.tensor_files import model_files, names_in, read_model_tensors, read_tensors
from medusa.interop.plain_heads import TensorNames, as_medusa_heads, read_plain_heads
from medusa.interop.protocol import (
    CONFIG_FILE,
    ForeignFormat,
    ForeignHeads,
    ReadRequest,
    checked_against_config,
    named_base,
)

HEADS_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
NAMES = TensorNames("{head}.{layer}.linear.{part}", "{head}.{layer}.weight")
_PREFIX, _LM_HEAD = "medusa_head.", "lm_head.weight"
_WHOLE_MODEL_NAMES = TensorNames(_PREFIX + NAMES.block, _PREFIX + NAMES.rows)


def _read_heads(request: ReadRequest) -> ForeignHeads:
    """The heads of a v1 or v2 directory."""
    path = _heads_file(request.directory)
    return _heads_of_tensors(request, path, read_tensors(path), NAMES)


def _heads_file(directory: Path) -> Path:
    """The file of the heads; safetensors where there are both."""
    for name in HEADS_FILES:
        if (directory / name).exists():
            return directory / name
    raise FileNotFoundError(f"{directory} holds neither {' nor '.join(HEADS_FILES)}; download it again")


def _heads_of_tensors(
    request: ReadRequest, path: Path, tensors: dict[str, Tensor], names: TensorNames
) -> ForeignHeads:
    """The heads that ``tensors``, of the file ``path``, are; config.json is held against them."""
    config_path = request.directory / CONFIG_FILE
    config = read_json(config_path)
    plain = read_plain_heads(tensors, names, path)
    held = {
        "medusa_num_heads": plain.num_heads,
        "medusa_num_layers": plain.num_layers,
        "hidden_size": plain.hidden_size,
        "vocab_size": plain.vocab_size,
    }
    more = checked_against_config(config, held, config_path, path, request.trust_tensors)
    heads = as_medusa_heads(plain, request.base, path, config)
    return ForeignHeads(heads, plain.dtype, plain.notes + more)


def _read_whole_model(request: ReadRequest) -> ForeignHeads:
    """The heads in a Medusa-2 model; they belong to the base beside them."""
    found = read_model_tensors(request.directory, lambda name: name.startswith(_PREFIX) or name == _LM_HEAD)
    path, rows = found.pop(_LM_HEAD, (request.directory, None))
    if rows is not None:
        _check_same_base(request, path, rows)
    paths = [path for path, _ in found.values()]
    where = paths[0] if len(set(paths)) == 1 else request.directory
    tensors = {name: tensor for name, (_, tensor) in found.items()}
    return _heads_of_tensors(request, where, tensors, _WHOLE_MODEL_NAMES)


def _check_same_base(request: ReadRequest, path: Path, rows: Tensor) -> None:
    ours = embedding_weight(output_embedding(request.base)).detach()
    if relative_distance(rows, ours) <= TOLERANCE:
        return
    raise ValueError(
        f"{path}: {_LM_HEAD} is not the output embedding of the base model {request.base.name_or_path!r}; "
        f"Medusa-2 heads belong to the base in the same files: give --base {request.directory}, or leave "
        "--base out"
    )


def _is_heads_directory(directory: Path) -> bool:
    """Whether ``directory`` holds v1 or v2 heads."""
    return any((directory / name).exists() for name in HEADS_FILES)


def _is_whole_model(directory: Path) -> bool:
    """Whether ``directory`` holds a model with Medusa heads inside."""
    if _is_heads_directory(directory) or not (directory / CONFIG_FILE).exists():
        return False
    try:
        files = model_files(directory)
    except FileNotFoundError:
        return False
    for path, names in files.items():
        if names is None:
            if path.suffix != ".safetensors":
                return "medusa_num_heads" in read_json(directory / CONFIG_FILE)
            names = names_in(path)
        if any(name.startswith(_PREFIX) for name in names):
            return True
    return False


MEDUSA = ForeignFormat("medusa", "FasterDecoding/Medusa", _read_heads, named_base, _is_heads_directory)
MEDUSA_FULL = ForeignFormat(
    "medusa-full", "FasterDecoding/Medusa", _read_whole_model, str, _is_whole_model, holds_base=True
)
