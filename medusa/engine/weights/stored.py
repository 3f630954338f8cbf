"""A matrix as files or a model have it, before a module holds it: which product, LM head and lookup it
becomes.

    Numbers        a tensor of bfloat16, float16 or float32, perhaps a view of its file
    QuantisedRows  rows of whole numbers in groups, as a GGUF file or a quantised directory has them

Either may lie on the device "meta": it then has a shape and a type, and no numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch
from torch import Tensor, nn

from medusa.base.gguf_file import type_name
from medusa.base.quantised_forms import BLOCK, QuantisedMatrix
from medusa.engine.kernels import lanes
from medusa.engine.weights.forms import narrowest_dtype
from medusa.engine.weights.lookups import NarrowEmbedding, QuantisedEmbedding
from medusa.engine.weights.memory import Release
from medusa.engine.weights.products import GroupQuantisedLMHead, GroupQuantisedMatmul, PackedMatmul

FIRST_OF_DIRECTORIES = 1000
"""The first of the types of directories: whole numbers of 4 or 8 bits with a scale for each 32, in float16 or
bfloat16, and perhaps a code of their own for zero. FILE_TYPES of ``cpp/file_types.cpp`` lists them."""


@dataclass(frozen=True)
class Arithmetic:
    """How an engine multiplies by matrices."""

    int8: bool
    """Whether numbers are rounded to int8; they are held exactly otherwise."""
    in_whole_numbers: bool
    """Whether rows that meet whole numbers are rounded to 8 bits too; they are as they are otherwise."""


class StoredMatrix(ABC):
    """A matrix (out, in), or the matrices (E, out, in) of all experts."""

    @abstractmethod
    def shares_product(self, other: StoredMatrix, how: Arithmetic) -> bool:
        """Whether one product can hold both, and either as it would be alone."""

    @staticmethod
    @abstractmethod
    def product(weights: Sequence[StoredMatrix], bias: Tensor | None, how: Arithmetic) -> PackedMatmul:
        """The product of matrices of this class, one below the other."""

    @abstractmethod
    def lm_head(self, bias: Tensor | None, how: Arithmetic) -> PackedMatmul:
        """The product of an LM head, whose rows can be looked up too."""

    @abstractmethod
    def lookup(self, embedding: nn.Embedding) -> nn.Module:
        """What looks rows up in the place of ``embedding``."""

    @staticmethod
    @abstractmethod
    def expert_product(parts: Sequence[StoredMatrix], how: Arithmetic) -> PackedMatmul:
        """The product of parts of the matrices of all experts."""

    @abstractmethod
    def without_numbers(self) -> Self:
        """The same without memory."""

    @abstractmethod
    def release(self, release: Release) -> None:
        """Give back the pages of the file that it is a view of."""


@dataclass(frozen=True)
class Numbers(StoredMatrix):
    """A matrix of numbers as torch has them."""

    tensor: Tensor
    """(out, in), or (E, out, in)."""

    def shares_product(self, other: StoredMatrix, how: Arithmetic) -> bool:
        if type(other) is not Numbers:
            return False
        # one product is in one type, and the narrower matrix would be widened to it
        return how.int8 or narrowest_dtype(self.tensor) == narrowest_dtype(other.tensor)

    @staticmethod
    def product(weights: Sequence[StoredMatrix], bias: Tensor | None, how: Arithmetic) -> PackedMatmul:
        return PackedMatmul([weight.tensor for weight in cast("Sequence[Numbers]", weights)], bias, how.int8)

    def lm_head(self, bias: Tensor | None, how: Arithmetic) -> PackedMatmul:
        product = self.product([self], bias, how)
        product.register_buffer("rows", self.tensor, persistent=False)
        return product

    def lookup(self, embedding: nn.Embedding) -> nn.Module:
        if self.tensor.dtype != torch.float32:
            return NarrowEmbedding(embedding, self.tensor)
        embedding.weight = nn.Parameter(self.tensor, requires_grad=False)
        return embedding

    @staticmethod
    def expert_product(parts: Sequence[StoredMatrix], how: Arithmetic) -> PackedMatmul:
        padded = [padded_rows(part.tensor) for part in cast("Sequence[Numbers]", parts)]
        rows = [rows for of_expert in zip(*padded, strict=True) for rows in of_expert]
        return PackedMatmul(rows, None, how.int8)

    def without_numbers(self) -> Self:
        return replace(self, tensor=self.tensor.to("meta"))

    def release(self, release: Release) -> None:
        release(self.tensor)


@dataclass(frozen=True)
class QuantisedRows(StoredMatrix):
    """A matrix as a file has it, or one of each expert."""

    rows: Tensor
    """(out, bytes) uint8, or (E, out, bytes)."""
    type: int
    """Its type, of :func:`gguf_types` or from :data:`FIRST_OF_DIRECTORIES` on."""
    num_inputs: int
    order: Tensor | None = None
    """(out,) long: the row of the file that is each output; None where it is the same."""
    input_order: Tensor | None = None
    """(in,) long: the input of each column; None where they are in order."""

    @classmethod
    def of(cls, matrix: QuantisedMatrix) -> QuantisedRows | None:
        """The rows of a matrix of a directory; None where its scales are numbers of float32 only."""
        kinds = (torch.float16, torch.bfloat16)
        kind = next(
            (each for each in kinds if torch.equal(matrix.scales.to(each).float(), matrix.scales.float())),
            None,
        )
        if kind is None:
            return None
        parts = [matrix.scales.to(kind)[..., None].contiguous().view(torch.uint8)]
        if matrix.zeros is not None:
            parts.append(matrix.zeros[..., None])
        codes = matrix.codes.unflatten(1, (-1, BLOCK))  # (out, in / 32, 32)
        if matrix.bits == 4:
            codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        type = type_of_directory(matrix.bits, matrix.zeros is not None, kind)
        rows = torch.cat([*parts, codes], dim=2).flatten(1)
        return cls(rows, type, matrix.codes.shape[1], input_order=matrix.input_order)

    @property
    def type_name(self) -> str:
        """As GGUF names it; of directories "4 bits" or "8 bits"."""
        if self.type >= FIRST_OF_DIRECTORIES:
            return "8 bits" if self.type >= FIRST_OF_DIRECTORIES + 4 else "4 bits"
        return type_name(self.type)

    def shares_product(self, other: StoredMatrix, how: Arithmetic) -> bool:
        if type(other) is not QuantisedRows:
            return False
        first = self.input_order
        second = other.input_order
        if first is None or second is None:
            return first is second
        return torch.equal(first, second)

    @staticmethod
    def product(weights: Sequence[StoredMatrix], bias: Tensor | None, how: Arithmetic) -> PackedMatmul:
        return GroupQuantisedMatmul(cast("Sequence[QuantisedRows]", weights), bias, how.in_whole_numbers)

    def lm_head(self, bias: Tensor | None, how: Arithmetic) -> PackedMatmul:
        return GroupQuantisedLMHead(self, bias, how.in_whole_numbers)

    def lookup(self, embedding: nn.Embedding) -> nn.Module:
        return QuantisedEmbedding(embedding, self)

    @staticmethod
    def expert_product(parts: Sequence[StoredMatrix], how: Arithmetic) -> PackedMatmul:
        padded = [
            replace(part, rows=padded_rows(part.rows).flatten(0, 1))
            for part in cast("Sequence[QuantisedRows]", parts)
        ]
        return GroupQuantisedMatmul(padded, None, how.in_whole_numbers)

    def without_numbers(self) -> Self:
        return replace(self, rows=self.rows.to("meta"))

    def release(self, release: Release) -> None:
        release(self.rows)


def type_of_directory(bits: int, has_zeros: bool, scales: torch.dtype) -> int:
    """The type of whole numbers of ``bits`` in a directory, by the type of their ``scales``."""
    return FIRST_OF_DIRECTORIES + 4 * (bits == 8) + 2 * has_zeros + (scales == torch.bfloat16)


def gguf_types() -> frozenset[int]:
    """The types of GGUF that are held in their own bits, as GGUF numbers them: Q4_0, Q4_K, MXFP4 and others.
    FILE_TYPES of ``cpp/file_types.cpp`` lists them."""
    lanes()  # loads the kernels
    return frozenset(torch.ops.medusa.gguf_types())


def padded_rows(matrices: Tensor) -> Tensor:
    """Matrices of experts (E, out, ...) with rows of zeros, so that each has whole pairs of panels."""
    missing = -matrices.shape[1] % (2 * lanes())
    if not missing:
        return matrices
    zeros = matrices.new_zeros(matrices.shape[0], missing, *matrices.shape[2:])
    return torch.cat([matrices, zeros], dim=1)
