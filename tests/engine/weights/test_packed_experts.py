"""The experts of a mixture and their router, over packed weights."""

import copy

import pytest
import torch
from conftest import needs_kernels
from gguf import GGMLQuantizationType as Type
from quantised_files import random_rows
from torch import nn

from medusa.engine.kernels import kernels_unsupported_reason
from medusa.engine.weights.experts import RouterWeight
from medusa.engine.weights.products import GroupQuantisedMatmul, PackedMatmul
from medusa.engine.weights.stored import QuantisedRows, padded_rows

pytestmark = needs_kernels
NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS = 6, 96, 512


def products(kind):
    """The matrices of all experts as one product, in this form."""
    torch.manual_seed(0)
    if isinstance(kind, Type):
        rows = torch.from_numpy(random_rows(kind, NUM_EXPERTS * NUM_OUTPUTS, NUM_INPUTS))
        parts = padded_rows(rows.view(NUM_EXPERTS, NUM_OUTPUTS, -1)).flatten(0, 1)
        return GroupQuantisedMatmul([QuantisedRows(parts, kind, NUM_INPUTS)], None, True)
    matrices = torch.randn(NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS)
    if kind != "float32":
        matrices = matrices.bfloat16()
    return PackedMatmul(list(padded_rows(matrices)), None, int8=kind == "int8")


def chosen(product, x, choices, bias=None):
    width = product.width // NUM_EXPERTS
    found = torch.ops.medusa.expert_products(
        x, choices, product.panels, product.scales, bias, NUM_EXPERTS, width
    )
    return found[..., :NUM_OUTPUTS]


@pytest.fixture(params=[False, True], ids=["torch", "own"])
def threads(request):
    assert kernels_unsupported_reason() is None
    torch.ops.medusa.force_own_threads(request.param)
    yield
    torch.ops.medusa.force_own_threads(False)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", Type.Q4_K, Type.Q6_K, Type.MXFP4], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 300])
@pytest.mark.usefixtures("threads")
def test_each_choice_has_the_bits_of_its_row_times_its_expert_alone(kind, num_rows):
    product = products(kind)
    x = torch.randn(num_rows, NUM_INPUTS)
    choices = torch.rand(num_rows, NUM_EXPERTS).topk(3).indices
    bias = torch.randn(product.width)
    alone = product(x).view(num_rows, NUM_EXPERTS, -1) + bias.view(NUM_EXPERTS, -1)
    rows = torch.arange(num_rows)[:, None]
    expected = alone[rows, choices][..., :NUM_OUTPUTS]
    assert torch.equal(chosen(product, x, choices, bias), expected)
    of_choices = torch.randn(num_rows, 3, NUM_INPUTS)
    alone = product(of_choices).view(num_rows, 3, NUM_EXPERTS, -1)[rows, torch.arange(3), choices]
    assert torch.equal(chosen(product, of_choices, choices), alone[..., :NUM_OUTPUTS])


def test_no_rows_have_no_products():
    assert chosen(products("float32"), torch.zeros(0, NUM_INPUTS), torch.zeros(0, 3).long()).shape == (
        0,
        3,
        96,
    )


def test_a_router_reads_its_weight_through_the_kernels_and_nothing_else_does():
    torch.manual_seed(0)
    weight, bias, x = torch.randn(32, 64), torch.randn(32), torch.randn(7, 64)
    packed = RouterWeight.of(PackedMatmul([weight], None), torch.full((), torch.nan).expand(weight.shape))
    scores = nn.functional.linear(x, packed, bias)
    torch.testing.assert_close(scores, x @ weight.T + bias)
    assert type(scores) is torch.Tensor
    assert all(
        torch.equal(nn.functional.linear(row[None], packed, bias=bias)[0], full)
        for row, full in zip(x, scores, strict=True)
    )
    widened = nn.functional.linear(x, packed.type(torch.float32))
    assert torch.equal(widened, nn.functional.linear(x, packed.float()))
    assert torch.equal(nn.functional.linear(input=x, weight=packed.to(dtype=torch.float32)), widened)
    again = copy.deepcopy(packed)
    assert again.product is not packed.product and torch.equal(nn.functional.linear(x, again, bias), scores)
    assert (packed + 1).isnan().all(), "nothing else may read its numbers"
