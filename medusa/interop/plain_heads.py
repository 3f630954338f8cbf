"""Plain Medusa heads as tensors, whatever a format calls them; and the checkpoints that hold them of
FasterDecoding/Medusa, the code of the Medusa paper (arXiv 2401.10774).

Head k of K: L residual blocks x + SiLU(W x + b), then rows that score the vocabulary. The counts K and L, the
hidden size D and the vocabulary V are read from names and shapes; the values in a config.json are only
compared.

    heads    config.json, and medusa_lm_head.pt (v1) or medusa_lm_head.safetensors (v2): the state_dict of a
             ModuleList of Sequentials: {head}.{layer}.linear.weight, .bias, then {head}.{L}.weight (V, D),
             which some v2 files leave out: the base's LM head scores
    whole    Medusa-2: a transformers model whose weights hold medusa_head.* beside the base's own

config.json says medusa_num_heads and medusa_num_layers, and of the first published heads wrongly: 2, where
the file holds 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, embedding_weight, lm_head, vocab_size
from medusa.base.passes import logit_scale
from medusa.files import read_json
from medusa.heads.draft_vocab import MAX_LAYERS
from medusa.heads.fingerprint import TOLERANCE, relative_distance
from medusa.heads.medusa_heads import MAX_DEPTH, HeadsConfig, MedusaHeads, Unembedding
from medusa.heads.tensor_files import (
    check_tensors,
    matrix_shape,
    model_files,
    names_in,
    read_model_tensors,
    read_tensors,
)
from medusa.interop.protocol import (
    CONFIG_FILE,
    ForeignFormat,
    ForeignHeads,
    ReadRequest,
    check_fits,
    checked_against_config,
    named_base,
)

_SCALE_KEY = "logit_scale"
"""The key of the logit scale in a config.json; vLLM reads it."""


@dataclass(frozen=True)
class TensorNames:
    """The names of the tensors of plain heads in a format."""

    block: str
    """Name of a block's linear layer, with {head}, {layer} and {part}, which is weight or bias."""
    rows: str
    """Name of a head's own rows (V, D), with {head} and perhaps {layer}, which is then L."""
    shared: str = ""
    """Name of rows that all heads share; empty where the format has none."""


_OURS = TensorNames("blocks.{head}.{layer}.linear.{part}", "unembed.{head}", "shared")


def places(template: str, names: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The names that match ``template``, and the head, layer and part of each."""
    groups = {"head": r"(?P<head>\d{1,6})", "layer": r"(?P<layer>\d{1,6})", "part": "(?P<part>weight|bias)"}
    pattern = re.compile(template.replace(".", r"\.").format(**groups))
    return {name: match.groupdict() for name in names if (match := pattern.fullmatch(name))}


def _renamed(
    tensors: Mapping[str, Tensor], names: TensorNames, to: TensorNames, num_layers: int
) -> dict[str, Tensor]:
    """``tensors`` of heads with ``num_layers`` layers, renamed from one format to another."""
    return {
        theirs.format(**{"layer": num_layers, **place}): tensors[name]
        for ours, theirs in ((names.block, to.block), (names.rows, to.rows), (names.shared, to.shared))
        for name, place in places(ours, tensors).items()
    }


@dataclass(frozen=True)
class PlainHeads:
    """The tensors of plain Medusa heads, under the names of our module."""

    tensors: Mapping[str, Tensor]
    """Rows (V, D) that all heads share are called "shared"; else the base's LM head scores."""
    num_heads: int
    num_layers: int
    notes: tuple[str, ...]
    """Notes on decisions while reading."""

    @property
    def hidden_size(self) -> int:
        return next(each.shape[-1] for name, each in self.tensors.items() if not name.endswith("bias"))

    @property
    def rows(self) -> list[Tensor]:
        """Rows (V, D) of each head, or the shared ones."""
        return [each for name, each in self.tensors.items() if name.startswith(("unembed.", _OURS.shared))]

    @property
    def vocab_size(self) -> int | None:
        """None where the heads read the base's LM head."""
        return len(self.rows[0]) if self.rows else None

    @property
    def shared_rows(self) -> Tensor | None:
        return self.tensors.get(_OURS.shared)

    @property
    def dtype(self) -> torch.dtype:
        """Type of all tensors; float32 where they differ."""
        dtypes = {tensor.dtype for tensor in self.tensors.values()}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32


def read_plain_heads(tensors: Mapping[str, Tensor], names: TensorNames, where: Path) -> PlainHeads:
    """The heads that ``tensors`` are under ``names``.

    A checkpoint of the reference code may hold one block for several layers: that code puts one block into a
    head several times, and safetensors writes it once.

    Raises:
        ValueError: a tensor is missing, left over or of another shape; the message names ``where`` and it.
    """
    of_blocks = places(names.block, tensors)
    of_rows = places(names.rows, tensors)
    num_heads = 1 + max((int(each["head"]) for each in (of_blocks | of_rows).values()), default=-1)
    first_block = names.block.format(head=0, layer=0, part="weight")
    if not 1 <= num_heads <= MAX_DEPTH:
        raise ValueError(
            f"{where} holds {num_heads or 'no'} Medusa heads, which are 1 to {MAX_DEPTH}, each of tensors "
            f"such as {first_block}; give the directory of the heads"
        )
    last = 1 + max((int(each["layer"]) for each in of_blocks.values()), default=-1)
    num_layers = max((int(each["layer"]) for each in of_rows.values() if "layer" in each), default=last)
    most = max(num_layers, last)
    if most > MAX_LAYERS:
        raise ValueError(
            f"{where} speaks of {most} layers, and heads have at most {MAX_LAYERS}; get it again"
        )
    held = dict(tensors)
    notes = tuple[str, ...]()
    if num_layers > 1 and len({(each["head"], each["layer"]) for each in of_blocks.values()}) == num_heads:
        notes = (f"{where.name} holds one block for the {num_layers} layers of each head: they share it",)
        for name, place in of_blocks.items():
            block = held.pop(name)
            held |= {names.block.format(**{**place, "layer": layer}): block for layer in range(num_layers)}
    shapes = dict[str, tuple[int, ...]]()
    if names.shared in held:
        shapes[names.shared] = matrix_shape(held, names.shared, where)
    elif of_rows:
        rows = [names.rows.format(head=head, layer=num_layers) for head in range(num_heads)]
        shapes = dict.fromkeys(rows, matrix_shape(held, rows[0], where))
    if num_layers:
        size = matrix_shape(held, first_block, where)[1]
        shapes = {name: (shape[0], size) for name, shape in shapes.items()}
        sizes = {"weight": (size, size), "bias": (size,)}
        for part in {each["part"] for each in of_blocks.values()}:
            for head, layer in product(range(num_heads), range(num_layers)):
                shapes[names.block.format(head=head, layer=layer, part=part)] = sizes[part]
    check_tensors(held, shapes, f"{num_heads} heads with {num_layers} layers", where)
    return PlainHeads(_renamed(held, names, _OURS, num_layers), num_heads, num_layers, notes)


def as_medusa_heads(plain: PlainHeads, base: CausalLM, where: Path, config: Mapping[str, Any]) -> MedusaHeads:
    """Our module with these tensors, in float32, with the same guesses on ``base``.

    Logits are scaled as ``config``, the config.json beside them, says; else as the base scales its own, where
    the rows are the base's.

    Rows that are the base's are not kept: the heads then read its LM head, or, where
    :func:`expanded_rows` made the rows, score a token map.

    Raises:
        ValueError: the sizes are not the base's; or rows that all heads share are not the base's: the heads
            belong to another base.
    """
    check_fits(where, plain.hidden_size, plain.vocab_size, base)
    kind, token_map = _unembedding_of(plain, base, where)
    heads_config = HeadsConfig(
        plain.hidden_size,
        vocab_size(base),
        plain.num_heads,
        max(1, plain.num_layers),
        kind,
        None if token_map is None else len(token_map),
        logit_scale=config.get(_SCALE_KEY, 1.0 if kind == "full" else logit_scale(base)),
    )
    with torch.device("meta"):
        heads = MedusaHeads(heads_config)
    state: dict[str, Tensor] = {}
    for name, expected in heads.state_dict().items():
        tensor = plain.tensors.get(name, plain.shared_rows if name.startswith("unembed.") else None)
        # A block of zeros is the identity: so a head of no blocks is one of ours.
        state[name] = torch.zeros(expected.shape) if tensor is None else tensor.to(torch.float32, copy=True)
    if token_map is not None:
        state["token_map"] = token_map
    heads.load_state_dict(state, assign=True)
    return heads.eval()


def scale_of(heads: MedusaHeads) -> dict[str, float]:
    """The entry for the logit scale in config.json: empty without one."""
    return {} if heads.config.logit_scale == 1 else {_SCALE_KEY: heads.config.logit_scale}


def stored_plain_heads(heads: MedusaHeads, names: TensorNames, rows: Tensor | None) -> dict[str, Tensor]:
    """The tensors of ``heads`` under ``names``; heads that score with ``rows`` (V, D), the base's, share
    them. A token map is expanded to V rows."""
    tensors = _renamed(heads.state_dict(), _OURS, names, heads.config.num_layers)
    if rows is not None:
        tensors[names.shared] = rows if heads.token_map is None else expanded_rows(rows, heads.token_map)
    return tensors


def expanded_rows(rows: Tensor, token_map: Tensor) -> Tensor:
    """Rows (V, D) with the same best guesses as the rows of ``token_map`` (V',) among ``rows`` (V, D).

    A token outside the map gets the mean of the mapped rows. Its logit is the mean of the mapped logits,
    which is never above the highest of them: it is never guessed first.
    """
    mapped = rows[token_map]
    expanded = mapped.mean(dim=0).expand_as(rows).clone()
    expanded[token_map] = mapped
    return expanded


def _unembedding_of(plain: PlainHeads, base: CausalLM, where: Path) -> tuple[Unembedding, Tensor | None]:
    """The kind of the rows of ``plain`` on ``base``, and their token map."""
    rows = plain.rows
    if not rows:
        return "shared", None
    embedding = lm_head(base)
    if getattr(embedding, "bias", None) is not None:  # which the rows go without
        return "full", None
    ours = embedding_weight(embedding).detach()
    first = rows[0]
    if all(torch.equal(first, each) for each in rows[1:]):
        is_base_row = _equal_rows(first, ours)
        rest = first[~is_base_row]
        if len(rest) == 0:
            return "shared", None
        if len(rest) < len(first) and bool((rest == rest[0]).all()):
            return "token_map", is_base_row.nonzero().flatten()
    if plain.shared_rows is None:
        return "full", None
    distance = relative_distance(first, ours)
    if distance > TOLERANCE:
        raise ValueError(
            f"{where} holds rows of the vocabulary for all heads, {distance:.1%} away from the output "
            f"embedding of the base model {base.name_or_path!r}; the heads belong to another base: give "
            "that one, --base"
        )
    return "shared", None


def _equal_rows(theirs: Tensor, ours: Tensor) -> Tensor:
    """(V,) bool: the rows that are the same in the coarser of the two types."""
    cast_ours = (theirs == ours.to(theirs.dtype)).all(dim=1)
    return cast_ours | (theirs.to(ours.dtype) == ours).all(dim=1)


# ------------------------------------------------------------------ the checkpoints of FasterDecoding/Medusa


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
    stored_tensors = read_model_tensors(
        request.directory, lambda name: name.startswith(_PREFIX) or name == _LM_HEAD
    )
    path, rows = stored_tensors.pop(_LM_HEAD, (request.directory, None))
    if rows is not None:
        _check_same_base(request, path, rows)
    paths = [path for path, _ in stored_tensors.values()]
    where = paths[0] if len(set(paths)) == 1 else request.directory
    tensors = {name: tensor for name, (_, tensor) in stored_tensors.items()}
    return _heads_of_tensors(request, where, tensors, _WHOLE_MODEL_NAMES)


def _check_same_base(request: ReadRequest, path: Path, rows: Tensor) -> None:
    ours = embedding_weight(lm_head(request.base)).detach()
    if relative_distance(rows, ours) <= TOLERANCE:
        return
    raise ValueError(
        f"{path}: {_LM_HEAD} is not the LM head of the base model {request.base.name_or_path!r}; "
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
