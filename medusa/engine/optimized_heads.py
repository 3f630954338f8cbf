"""Heads optimised for their engine: their guesses never change the text.

Every guess is verified, so heads need not be computed in the precision they were trained in. Where the base
computes with the kernels, the heads' own layers do so with int8 weights, and so do the scores of a token map:
drafting reads these weights at every step, and that is most of its time. What a file holds in fewer bits, the
heads' own weights in Q4_0 and the LM head of a quantised base, stays in these. On any other engine the rows
of a token map are gathered once.

Heads that read their path run once for each level of a dynamic tree, and calling their operators takes longer
than computing them. For compiled steps all of them are one program (:func:`compile_heads`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import HasQuantisedRows, copy_sharing_parameters, embedding_rows, embedding_weight
from medusa.engine.libraries import found_compiler
from medusa.engine.programs import Part, Program
from medusa.engine.weights.products import GroupQuantisedLMHead, GroupQuantisedMatmul, PackedMatmul
from medusa.engine.weights.stored import QuantisedRows
from medusa.heads.draft_vocab import DraftVocab, GatheredRows
from medusa.heads.medusa_heads import MedusaHeads
from medusa.heads.stored_types import exact_four_bits

AnyHeads = TypeVar("AnyHeads", bound=DraftVocab)


def optimized_heads(heads: AnyHeads, lm_head: nn.Module) -> AnyHeads:
    """The heads optimised for drafting with ``lm_head``; ``heads`` where there is no gain.

    They share the parameters of ``heads`` and hold copies made from them and the LM head: make them again
    when a weight has changed.
    """
    weight = embedding_weight(lm_head)
    if weight.device.type == "cuda" and weight.dtype in (torch.bfloat16, torch.float16):
        heads = _in_type(heads, weight.dtype)
    scored = heads.token_map if heads.scores_base_rows else None
    has_kernels = isinstance(lm_head, PackedMatmul) and next(heads.parameters()).dtype == torch.float32
    if not has_kernels and scored is None:
        return heads
    quick = copy_sharing_parameters(heads)
    if has_kernels:
        for module in list(quick.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, _packed_linear(child))
        if type(heads) in _ON_KERNELS:
            quick = _ON_KERNELS[type(heads)](quick)
    if scored is not None:
        quick.scorer = _packed_scorer(lm_head, scored) if has_kernels else GatheredRows(lm_head, scored)
    return quick


def _packed_linear(linear: nn.Linear) -> PackedMatmul:
    """A linear layer of heads as :func:`_packed_product` has its weight."""
    product = _packed_product(linear.weight.detach(), linear.bias)
    product.weight = linear.weight  # for code that reads it
    return product


def _packed_product(weight: Tensor, bias: Tensor | None = None) -> PackedMatmul:
    """The product of a matrix (out, in) of heads, in four bits if it was read in these, else in int8."""
    rows = exact_four_bits(weight)
    if rows is None:
        return PackedMatmul([weight], bias, int8=True)
    return GroupQuantisedMatmul([_four_bits(rows, weight.shape[1])], bias, in_whole_numbers=True)


def _four_bits(rows: Tensor, num_inputs: int) -> QuantisedRows:
    from gguf import GGMLQuantizationType

    return QuantisedRows(rows, int(GGMLQuantizationType.Q4_0), num_inputs)


def _packed_scorer(lm_head: nn.Module, tokens: Tensor) -> PackedMatmul:
    """The rows of ``lm_head`` for ``tokens`` (V',) long: as its file has quantised them, else in int8."""
    if isinstance(lm_head, GroupQuantisedLMHead):
        rows = QuantisedRows(lm_head.file_rows[tokens], lm_head.file_type, lm_head.num_inputs)
        bias = None if lm_head.bias is None else lm_head.bias.detach()[tokens]
        return GroupQuantisedMatmul([rows], bias, in_whole_numbers=True)
    gathered = GatheredRows(lm_head, tokens)
    return PackedMatmul([gathered.rows], gathered.bias, int8=True)


def _in_type(heads: AnyHeads, dtype: torch.dtype) -> AnyHeads:
    """Heads with weights of their own in ``dtype``, as the base has them: half the bytes of each step. Rotary
    frequencies, which no file holds, stay as they are."""
    cast = copy.deepcopy(heads)
    for weight in cast.state_dict(keep_vars=True).values():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return cast


class OptimizedHeads(MedusaHeads):
    """Medusa heads whose products are the kernels'."""

    path_products: nn.ModuleList
    programs: list[Program] | None = None
    """The programs of the heads, once :func:`compile_heads` has made them."""
    fusing: Program | None = None
    """The program of :meth:`fuse`, made with them."""

    @classmethod
    def of(cls, heads: MedusaHeads) -> Self:
        """These heads over the parts of ``heads``, but for their paths, which are packed."""
        with torch.device("meta"):
            optimized = cls(heads.config)
        for name, part in (*heads.named_children(), *heads.named_buffers(recurse=False)):
            setattr(optimized, name, part)
        optimized._modules.pop("paths", None)
        paths = heads.paths if heads.config.reads_path else ()
        optimized.path_products = nn.ModuleList(_packed_product(weight.detach()) for weight in paths)
        return optimized.train(heads.training)

    def fuse(self, hidden: Tensor) -> Tensor:
        if self.fusing is None or hidden.dim() != 2:
            return super().fuse(hidden)
        return self.fusing([hidden.contiguous()])[0]

    def logits_of(self, index: int, hidden: Tensor, lm_head: nn.Module, path: Tensor | None = None) -> Tensor:
        if self.programs is None or path is None:
            return super().logits_of(index, hidden, lm_head, path)
        inputs = [hidden, path, _held_rows(lm_head)]
        return self.programs[index]([tensor.contiguous() for tensor in inputs])[0]

    def _read_path(self, index: int, rows: Tensor) -> Tensor:
        return self.path_products[index](rows)


_ON_KERNELS: dict[type[nn.Module], Callable[[Any], Any]] = {MedusaHeads: OptimizedHeads.of}
"""Kinds of heads with more for the kernels than their linear layers, and what makes them from a copy."""


def parts_of_heads(heads: Any, lm_head: nn.Module) -> list[Part]:
    """The parts that :func:`compile_heads` compiles: a head, and the fusion of layers; empty without a
    gain."""
    if not isinstance(heads, OptimizedHeads) or not heads.config.reads_path or heads.num_heads < 3:
        return []
    config = heads.config
    tokens = _held_rows(lm_head)
    settings = (config,)
    trials = [
        (
            torch.randn(rows, nodes, config.hidden_size),
            torch.zeros(rows, nodes, depth, dtype=torch.long),
            tokens,
        )
        for rows, nodes, depth in ((4, 7, 2), (5, 6, 3))
    ]
    one, other = (_OneHead(heads, index, lm_head) for index in (1, 2))
    parts = [Part("heads", one, trials, settings, other)]
    if config.fused_layers:
        states = [
            (torch.randn(rows, (1 + len(config.fused_layers)) * config.hidden_size),) for rows in (4, 5)
        ]
        parts.append(Part("heads-fuse", _Fused(heads), states, settings))
    return parts


def _held_rows(lm_head: nn.Module) -> Tensor:
    """The rows of ``lm_head`` as they are held: an input of the programs of heads."""
    if isinstance(lm_head, GroupQuantisedLMHead):
        return lm_head.file_rows
    return embedding_rows(lm_head)


def compile_heads(heads: Any, lm_head: nn.Module) -> None:
    """Have programs compute ``heads``, where :func:`parts_of_heads` has some; not where some are not on disk
    and there is no compiler."""
    parts = parts_of_heads(heads, lm_head)
    can_compile = found_compiler() is not None or all(part.path.exists() for part in parts)
    if parts and can_compile and heads.programs is None:
        for part in parts:
            part.compile()
        modules = [_OneHead(heads, index, lm_head) for index in range(heads.num_heads)]
        heads.programs = [Program(module, parts[0]) for module in modules]
        heads.fusing = Program(_Fused(heads), parts[1]) if parts[1:] else None


def _with_parts(
    heads: OptimizedHeads, parts: dict[str, nn.Module | None], buffers: dict[str, Tensor | None]
) -> OptimizedHeads:
    """``heads`` with only some of their parts, computed by their own code."""
    some = copy.copy(heads)
    some.programs = some.fusing = None
    some._modules = parts
    some._parameters = {}
    some._buffers = buffers
    return some


class _OneHead(nn.Module):
    """A head as a function of (hidden (B, M, D), path (B, M, d) long, rows of the LM head (V, D)):
    logits (B, M, V')."""

    def __init__(self, heads: OptimizedHeads, index: int, lm_head: nn.Module):
        super().__init__()
        parts: dict[str, nn.Module | None] = {
            "blocks": nn.ModuleList([heads.blocks[index]]),
            "path_products": nn.ModuleList([heads.path_products[index]]),
        }
        if heads.config.unembedding == "full":
            parts["unembed"] = nn.ParameterList([heads.unembed[index]])
        elif isinstance(heads.scorer, nn.Module):
            parts["scorer"] = heads.scorer
        else:
            self.embedding = lm_head
        self.heads = _with_parts(heads, parts, {"token_map": heads.token_map})
        self._embed = lm_head.forward
        self._typed = embedding_weight(lm_head).detach().new_empty(0)
        self._type: int | None = lm_head.file_type if isinstance(lm_head, GroupQuantisedLMHead) else None
        self._width = heads.config.hidden_size

    def forward(self, hidden: Tensor, path: Tensor, rows: Tensor) -> list[Tensor]:
        if self._type is None:
            lm_head: Any = _Rows(self._embed, self._typed, rows)
        else:
            lm_head = _QuantisedRows(self._embed, self._typed, rows, self._type, self._width)
        return [self.heads.logits_of(0, hidden, lm_head, path)]


class _Fused(nn.Module):
    """How heads fuse layers, as a function of hidden (B, (1 + L) D): (B, D)."""

    def __init__(self, heads: OptimizedHeads):
        super().__init__()
        parts: dict[str, nn.Module | None] = {
            "fusion": heads.fusion,
            "blocks": nn.ModuleList(heads.blocks[:1]),
        }
        self.heads = _with_parts(heads, parts, {"layer_scale": heads.layer_scale})

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [self.heads.fuse(hidden)]


@dataclass
class _Rows:
    """An LM head whose rows are an input, so that no library holds a copy of them. A base that was loaded by
    its name holds them in another type than its LM head computes in."""

    forward: Callable[[Tensor], Tensor]
    weight: Tensor
    """Read for its type only."""
    rows: Tensor


@dataclass
class _QuantisedRows(HasQuantisedRows):
    """The same with rows as a file has quantised them."""

    forward: Callable[[Tensor], Tensor]
    weight: Tensor
    file_rows: Tensor
    file_type: int
    width: int

    def rows_at(self, ids: Tensor) -> Tensor:
        return torch.ops.medusa.quantised_rows(self.file_rows, ids, self.file_type, self.width)
