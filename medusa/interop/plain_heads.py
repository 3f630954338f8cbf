"""Plain Medusa heads as tensors, whatever a format calls them.

Head k of K: L residual blocks x + SiLU(W x + b), then rows that score the vocabulary (arXiv 2401.10774). The
counts K and L, the hidden size D and the vocabulary V are read from names and shapes; what a config.json says
of them is compared, and never used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa.base.causal_lm import (
    CausalLM,
    embedding_weight,
    hidden_size,
    logit_scale,
    output_embedding,
    vocab_size,
)
from medusa.heads.causal_layer import MAX_LAYERS
from medusa.heads.fingerprint import TOLERANCE
from medusa.heads.medusa_heads import MAX_DEPTH, HeadsConfig, MedusaHeads, Unembedding
from medusa.interop.protocol import check_fits, listed

PARTS = ("weight", "bias")
SCALE_KEY = "logit_scale"
"""Where a config.json says what the logits are multiplied by; vLLM reads it."""


@dataclass(frozen=True)
class TensorNames:
    """What a format calls the tensors of plain heads."""

    block: str
    """Of a block's linear layer, with {head}, {layer} and {part}, which is weight or bias."""
    unembedding: str
    """Of a head's own rows (V, D), with {head} and perhaps {layer}, which is then L."""
    shared: str | None = None
    """Of rows that all heads share; None where the format has none."""
    prefix: str = ""
    """Of all names."""

    def block_name(self, head: int, layer: int, part: str) -> str:
        return self.prefix + self.block.format(head=head, layer=layer, part=part)

    def unembedding_name(self, head: int, num_layers: int) -> str:
        return self.prefix + self.unembedding.format(head=head, layer=num_layers)

    @property
    def shared_name(self) -> str | None:
        return None if self.shared is None else self.prefix + self.shared

    @cached_property
    def block_pattern(self) -> re.Pattern[str]:
        return self._pattern(self.block)

    @cached_property
    def unembedding_pattern(self) -> re.Pattern[str]:
        return self._pattern(self.unembedding)

    def _pattern(self, template: str) -> re.Pattern[str]:
        groups = {
            "head": r"(?P<head>\d{1,6})",
            "layer": r"(?P<layer>\d{1,6})",
            "part": "(?P<part>weight|bias)",
        }
        return re.compile(re.escape(self.prefix) + template.replace(".", r"\.").format(**groups))


@dataclass(frozen=True)
class PlainHeads:
    """The tensors of plain Medusa heads."""

    blocks: tuple[tuple[tuple[Tensor, Tensor | None], ...], ...]
    """Of each head, of each layer: weight (D, D) and bias (D,); no bias is a bias of zero."""
    own_rows: tuple[Tensor, ...] = ()
    """Rows (V, D) of each head; none where all heads share some."""
    shared_rows: Tensor | None = None
    """Rows (V, D) of all heads; None where they have their own, or read the base's output embedding."""

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    @property
    def num_layers(self) -> int:
        return len(self.blocks[0])

    @property
    def hidden_size(self) -> int:
        return (self.blocks[0][0][0] if self.num_layers else self.rows[0]).shape[-1]

    @property
    def vocab_size(self) -> int | None:
        """None where the heads read the base's output embedding."""
        return self.rows[0].shape[0] if self.rows else None

    @property
    def dtype(self) -> torch.dtype:
        """Of all tensors; float32 where they differ."""
        blocks = [tensor for layers in self.blocks for block in layers for tensor in block]
        found = {tensor.dtype for tensor in (*blocks, *self.rows) if tensor is not None}
        return found.pop() if len(found) == 1 else torch.float32

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """All rows that the heads hold."""
        return self.own_rows if self.shared_rows is None else (self.shared_rows,)


# ------------------------------------------------------------------ names to heads


def collected(
    tensors: Mapping[str, Tensor], names: TensorNames, where: Path
) -> tuple[PlainHeads, tuple[str, ...]]:
    """The heads that ``tensors`` are under ``names``, and what was decided on the way.

    A checkpoint of the reference code may hold one block for several layers: that code puts one block into a
    head several times, and safetensors writes it once.

    Raises:
        ValueError: a tensor is missing, left over or of another shape; the message names ``where`` and it.
    """
    blocks, own, shared = _by_place(tensors, names, where)
    num_heads = 1 + max([*(head for head, _, _ in blocks), *own], default=-1)
    if not 1 <= num_heads <= MAX_DEPTH:
        raise ValueError(
            f"{where} holds {num_heads or 'no'} Medusa heads, which are 1 to {MAX_DEPTH}, each of tensors "
            f"such as {names.block_name(0, 0, 'weight')}; give the directory of the heads"
        )
    num_layers = _num_layers(blocks, own, where)
    notes: tuple[str, ...] = ()
    if _holds_one_block_a_head(blocks, num_heads, num_layers):
        layers = range(num_layers)
        blocks |= {(k, layer, part): each for (k, _, part), each in blocks.items() for layer in layers}
        notes = (f"{where.name} holds one block for the {num_layers} layers of each head: they share it",)
    parts = PARTS if any(part == "bias" for _, _, part in blocks) else PARTS[:1]
    places = [(k, layer, part) for k in range(num_heads) for layer in range(num_layers) for part in parts]
    missing = [names.block_name(*place) for place in places if place not in blocks]
    if own:
        missing += [names.unembedding_name(k, num_layers) for k in range(num_heads) if k not in own]
    if missing:
        raise ValueError(
            f"{where} lacks {listed(missing)}, of {num_heads} heads with {num_layers} layers; the file is "
            "incomplete, get it again"
        )
    plain = PlainHeads(
        tuple(
            tuple((blocks[k, layer, "weight"], blocks.get((k, layer, "bias"))) for layer in range(num_layers))
            for k in range(num_heads)
        ),
        tuple(own[k][1] for k in range(num_heads)) if own else (),
        shared,
    )
    _check_shapes(plain, names, where)
    return plain, notes


Blocks = dict[tuple[int, int, str], Tensor]
"""By head, layer and part."""
OwnRows = dict[int, tuple[int | None, Tensor]]
"""By head: the layer that the name says, and the rows."""


def _by_place(
    tensors: Mapping[str, Tensor], names: TensorNames, where: Path
) -> tuple[Blocks, OwnRows, Tensor | None]:
    """The blocks, the rows of each head, and those of all heads.

    Raises:
        ValueError: there are other tensors, or rows of both kinds.
    """
    blocks: Blocks = {}
    own: OwnRows = {}
    shared, extra = None, []
    for name, tensor in tensors.items():
        if match := names.block_pattern.fullmatch(name):
            blocks[int(match["head"]), int(match["layer"]), match["part"]] = tensor
        elif match := names.unembedding_pattern.fullmatch(name):
            layer = match.groupdict().get("layer")
            own[int(match["head"])] = (None if layer is None else int(layer), tensor)
        elif name == names.shared_name:
            shared = tensor
        else:
            extra.append(name)
    if extra:
        raise ValueError(
            f"{where} holds tensors that are no part of plain Medusa heads: {listed(extra)}; they would be "
            "left out. Get the file of such heads, or use the engine that this one is for"
        )
    if own and shared is not None:
        raise ValueError(
            f"{where} holds {names.shared_name} for all heads and rows of each head; take out those that are "
            "not meant"
        )
    return blocks, own, shared


def named(plain: PlainHeads, names: TensorNames, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of ``plain`` under ``names``, in ``dtype``, none of them sharing memory."""
    tensors: dict[str, Tensor] = {}
    for k, layers in enumerate(plain.blocks):
        for layer, block in enumerate(layers):
            for part, tensor in zip(PARTS, block, strict=True):
                if tensor is not None:
                    tensors[names.block_name(k, layer, part)] = tensor
    if plain.shared_rows is not None:
        tensors[str(names.shared_name)] = plain.shared_rows
    for k, rows in enumerate(plain.own_rows):
        tensors[names.unembedding_name(k, plain.num_layers)] = rows
    return {name: each.detach().cpu().to(dtype, copy=True).contiguous() for name, each in tensors.items()}


def _num_layers(blocks: Blocks, own: OwnRows, where: Path) -> int:
    """L: the place of the rows in the reference code's sequence of layers, else one after the last block."""
    places = {layer for layer, _ in own.values() if layer is not None}
    if (most := max([*places, *(layer for _, layer, _ in blocks)], default=0)) > MAX_LAYERS:
        raise ValueError(f"{where} speaks of layer {most}, and heads have at most {MAX_LAYERS}; get it again")
    if len(places) > 1:
        found = " and ".join(map(str, sorted(places)))
        raise ValueError(f"{where} holds heads of {found} layers; all heads must have as many, get it again")
    last = 1 + max((layer for _, layer, _ in blocks), default=-1)
    if places and last > min(places):
        raise ValueError(
            f"{where} holds a block at layer {last - 1}, where the rows of the vocabulary say that heads "
            f"have {min(places)} layers; the file is of another kind, get it again"
        )
    return places.pop() if places else last


def _holds_one_block_a_head(blocks: Blocks, num_heads: int, num_layers: int) -> bool:
    held = {(head, layer) for head, layer, _ in blocks}
    return num_layers > 1 and sorted(head for head, _ in held) == list(range(num_heads))


def _check_shapes(plain: PlainHeads, names: TensorNames, where: Path) -> None:
    """Raise ValueError unless all tensors have the sizes of the first one."""
    tensors = {
        names.block_name(k, layer, part): (part, tensor)
        for k, layers in enumerate(plain.blocks)
        for layer, block in enumerate(layers)
        for part, tensor in zip(PARTS, block, strict=True)
        if tensor is not None
    }
    for k, rows in enumerate(plain.rows):
        is_own = plain.shared_rows is None
        name = names.unembedding_name(k, plain.num_layers) if is_own else names.shared_name
        tensors[str(name)] = ("rows", rows)
    num_dims = {"weight": 2, "bias": 1, "rows": 2}
    for name, (part, tensor) in tensors.items():
        if tensor.dim() != num_dims[part]:
            raise ValueError(
                f"{where}: tensor {name!r} must have {num_dims[part]} dimensions, got {tuple(tensor.shape)}; "
                "the file is of another kind, get it again"
            )
    size = plain.hidden_size
    shapes = {"weight": (size, size), "bias": (size,), "rows": (plain.vocab_size, size)}
    for name, (part, tensor) in tensors.items():
        if tuple(tensor.shape) != shapes[part]:
            raise ValueError(
                f"{where}: tensor {name!r} must have shape {shapes[part]}, as the first tensors say, got "
                f"{tuple(tensor.shape)}; the file is damaged or of another kind, get it again"
            )


# ------------------------------------------------------------------ our module and back


def as_medusa_heads(plain: PlainHeads, base: CausalLM, where: Path, config: Mapping[str, Any]) -> MedusaHeads:
    """Our module with these tensors, in float32, which guesses what they guess on ``base``.

    Logits are scaled as ``config``, the config.json beside them, says; else as the base scales its own, where
    the rows are the base's.

    Rows that are the base's are not kept: the heads then read its output embedding, or, where
    :func:`expanded_rows` made the rows, score a token map.

    Raises:
        ValueError: the sizes are not the base's; or rows that all heads share are not the base's: the heads
            belong to another base.
    """
    check_fits(where, plain.hidden_size, plain.vocab_size, base)
    kind, token_map = _unembedding_of(plain, base, where)
    num_layers = max(1, plain.num_layers)
    scale = config.get(SCALE_KEY, 1.0 if kind == "full" else logit_scale(base))
    heads_config = HeadsConfig(
        hidden_size(base),
        vocab_size(base),
        plain.num_heads,
        num_layers,
        kind,
        None if token_map is None else len(token_map),
        logit_scale=scale,
    )
    state: dict[str, Tensor] = {} if token_map is None else {"token_map": token_map}
    zeros = torch.zeros(plain.hidden_size, plain.hidden_size)
    for k, layers in enumerate(plain.blocks):
        # A block of zeros is the identity: so a head of no blocks is one of ours.
        for layer, (weight, bias) in enumerate(layers or ((zeros, None),)):
            at = f"blocks.{k}.{layer}.linear"
            state[f"{at}.weight"] = weight.to(torch.float32, copy=True)
            state[f"{at}.bias"] = (zeros[0] if bias is None else bias).to(torch.float32, copy=True)
        if kind == "full":
            state[f"unembed.{k}"] = (plain.own_rows or plain.rows * plain.num_heads)[k].to(
                torch.float32, copy=True
            )
    with torch.device("meta"):
        heads = MedusaHeads(heads_config)
    heads.load_state_dict(state, assign=True)
    return heads.eval()


def scale_of(heads: MedusaHeads) -> dict[str, float]:
    """What config.json says of the scale of the logits: nothing where there is none."""
    return {} if heads.config.logit_scale == 1 else {SCALE_KEY: heads.config.logit_scale}


def as_plain_heads(heads: MedusaHeads, rows: Tensor | None) -> PlainHeads:
    """The tensors of ``heads``; ``rows`` (V, D) are those of the base's output embedding, for heads that
    score with them, or None where the format leaves them to the base. A token map is expanded to V rows."""
    blocks = tuple(
        tuple(
            (heads.get_parameter(f"{at}.weight"), heads.get_parameter(f"{at}.bias"))
            for at in (f"blocks.{k}.{layer}.linear" for layer in range(heads.config.num_layers))
        )
        for k in range(heads.num_heads)
    )
    if heads.config.unembedding == "full":
        return PlainHeads(blocks, tuple(heads.unembed))
    if rows is None or heads.token_map is None:
        return PlainHeads(blocks, shared_rows=rows)
    return PlainHeads(blocks, shared_rows=expanded_rows(rows, heads.token_map))


def expanded_rows(rows: Tensor, token_map: Tensor) -> Tensor:
    """Rows (V, D) that guess what the rows of ``token_map`` (V',) guess among ``rows`` (V, D).

    A token outside the map gets the mean of the mapped rows. Its logit is the mean of the mapped logits,
    which is never above the highest of them: it is never guessed first.
    """
    mapped = rows[token_map]
    expanded = mapped.mean(dim=0).expand_as(rows).clone()
    expanded[token_map] = mapped
    return expanded


def _unembedding_of(plain: PlainHeads, base: CausalLM, where: Path) -> tuple[Unembedding, Tensor | None]:
    """What the rows of ``plain`` are on ``base``, and the token map that they score."""
    if not plain.rows:
        return "shared", None
    embedding = output_embedding(base)
    if getattr(embedding, "bias", None) is not None:  # which the rows go without
        return "full", None
    ours, first = embedding_weight(embedding).detach(), plain.rows[0]
    if all(torch.equal(first, each) for each in plain.rows[1:]):
        is_base_row = _equal_rows(first, ours)
        rest = first[~is_base_row]
        if len(rest) == 0:
            return "shared", None
        if len(rest) < len(first) and bool((rest == rest[0]).all()):
            return "token_map", is_base_row.nonzero().flatten()
    if plain.own_rows:
        return "full", None
    distance = distance_of_rows(first, base)
    if distance > TOLERANCE:
        raise ValueError(
            f"{where} holds rows of the vocabulary for all heads, {distance:.1%} away from the output "
            f"embedding of the base model {base.name_or_path!r}; the heads belong to another base: give "
            "that one, --base"
        )
    return "shared", None


def distance_of_rows(rows: Tensor, base: CausalLM) -> float:
    """How far rows (V, D) are from those of the output embedding of ``base``, relative to their size."""
    ours = embedding_weight(output_embedding(base)).detach().float()
    return float((rows.float() - ours).norm() / ours.norm().clamp(min=1e-12))


def _equal_rows(theirs: Tensor, ours: Tensor) -> Tensor:
    """(V,) bool: the rows that are the same in the coarser of the two types."""
    cast_ours = (theirs == ours.to(theirs.dtype)).all(dim=1)
    return cast_ours | (theirs.to(ours.dtype) == ours).all(dim=1)
