"""Weights that layers multiply themselves give a row the same bits whatever the other rows are."""

from __future__ import annotations

import torch
from conftest import needs_kernels

from medusa.engine.weights.columns import PackedColumns, PackedColumnsOfHeads
from medusa.engine.weights.products import PackedMatmul

pytestmark = needs_kernels


@torch.no_grad()
def assert_same_alone(function, inputs: torch.Tensor, rows: int, expected: torch.Tensor):
    """``function`` of ``inputs`` is ``expected``, and has the same bits for each of them along ``rows``."""
    together = function(inputs)
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)
    for row in range(inputs.shape[rows]):
        alone = function(inputs.narrow(rows, row, 1).contiguous())
        assert torch.equal(alone, together.narrow(rows, row, 1))


@torch.no_grad()
def test_columns_have_the_same_bits_alone():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights = torch.randn(3, 70, 40)
        columns = torch.randn(3, 2, 40, 9)
    products = [PackedMatmul([weight], None) for weight in weights]
    of_heads = PackedColumnsOfHeads(products)
    assert_same_alone(lambda x: of_heads[:, None] @ x, columns, 3, weights[:, None] @ columns)
    one = PackedColumns(products[1])
    assert_same_alone(lambda x: one @ x, columns[1], 2, weights[1] @ columns[1])
