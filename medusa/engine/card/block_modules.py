"""Linear layers and embeddings of a base on a card whose weights stay in the bits of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.base.causal_lm import HasQuantisedRows
from medusa.engine.card.block_kernels import block_product, widened_rows
from medusa.engine.card.stored_blocks import StoredBlocks

MOST_ROWS = 256
"""Rows that are multiplied by the bits of the file. For more, as of a prompt, a matrix is widened for the
moment, which takes less time than to widen it again for every 64 rows."""


def block_products(x: Tensor, matrices: Sequence[StoredBlocks], bias: Tensor | None) -> Tensor:
    """``x`` (..., in) times ``matrices``, whose outputs lie side by side, plus ``bias``: (..., all outs).

    Raises:
        ValueError: ``x`` is on another device.
    """
    if x.device != matrices[0].codes.device:
        raise ValueError(
            f"the base holds the blocks of its file on {matrices[0].codes.device}, and was moved to "
            f"{x.device} since; load it again"
        )
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    widths = [matrix.num_rows for matrix in matrices]
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    products = x.new_empty(len(rows), sum(widths))
    parts = products.split(widths, dim=1)
    for matrix, part, of_part in zip(matrices, parts, biases, strict=True):
        if len(rows) <= MOST_ROWS:
            block_product(rows, matrix, of_part, part)
        else:
            part.copy_(F.linear(rows, widened_rows(matrix, x.dtype), of_part))
    return products.unflatten(0, x.shape[:-1])


class QuantisedLinear(nn.Module, HasQuantisedRows):
    """A linear layer over the blocks of a file: (..., in) -> (..., out).

    Its ``weight`` is a placeholder for the shape, the type and the place.
    """

    def __init__(self, linear: nn.Linear, matrix: StoredBlocks, dtype: torch.dtype):
        super().__init__()
        self.matrix = matrix
        self.in_features = matrix.width
        self.out_features = matrix.num_rows
        self.weight = placeholder(matrix, dtype)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return block_products(x, [self.matrix], self.bias)

    def rows_at(self, ids: Tensor) -> Tensor:
        return widened_rows(self.matrix, torch.float32, ids.to(self.matrix.codes.device))


class QuantisedLookup(nn.Module, HasQuantisedRows):
    """An embedding over the blocks of a file: ids (...) long -> (..., D)."""

    def __init__(self, embedding: nn.Embedding, matrix: StoredBlocks, dtype: torch.dtype):
        super().__init__()
        self.matrix = matrix
        self.num_embeddings = matrix.num_rows
        self.embedding_dim = matrix.width
        self.padding_idx = embedding.padding_idx
        self.weight = placeholder(matrix, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return widened_rows(self.matrix, self.weight.dtype, ids)

    def rows_at(self, ids: Tensor) -> Tensor:
        return widened_rows(self.matrix, torch.float32, ids.to(self.matrix.codes.device))


def placeholder(matrix: StoredBlocks, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of the shape and place of ``matrix`` that takes no memory: each number of it is none."""
    nothing = torch.full((), float("nan"), dtype=dtype, device=matrix.codes.device)
    return nn.Parameter(nothing.expand(matrix.num_rows, matrix.width), requires_grad=False)
