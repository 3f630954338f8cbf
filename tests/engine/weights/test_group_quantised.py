import dataclasses
import itertools

import gguf
import pytest
import torch
from conftest import needs_kernels
from quantised_files import TYPES, random_rows

from medusa.base.gguf_file import type_name
from medusa.base.quantised_forms import QuantisedMatrix
from medusa.engine import kernels
from medusa.engine.weights.products import GroupQuantisedMatmul
from medusa.engine.weights.stored import QuantisedRows, gguf_types

pytestmark = needs_kernels
needs_tiles = pytest.mark.skipif(
    needs_kernels.args[0] or not kernels.has_tiles(), reason="needs tile registers"
)
NUM_ROWS, NUM_INPUTS = 75, 512


def assert_tiles_give_the_bits_of_vectors(product, x):
    in_tiles = product(x)
    kernels.has_tiles(False)
    try:
        assert torch.equal(product(x), in_tiles)
    finally:
        kernels.has_tiles(True)


def quantised(kind, num_rows=NUM_ROWS, num_inputs=NUM_INPUTS, seed=0):
    return QuantisedRows(
        torch.from_numpy(random_rows(kind, num_rows, num_inputs, seed)), int(kind), num_inputs
    )


def numbers_of(weight):
    return torch.from_numpy(gguf.dequantize(weight.rows.numpy(), gguf.GGMLQuantizationType(weight.type)))


DIRECTORIES = list(itertools.product((4, 8), (torch.float16, torch.bfloat16), (True, False)))
"""Bits, type of scales, and whether zero is the same code everywhere."""


def matrix_of(bits, dtype, is_symmetric, num_rows=NUM_ROWS, num_inputs=NUM_INPUTS):
    """As a directory has it: any codes and any zeros, also the least and the greatest."""
    generator, blocks = torch.Generator().manual_seed(bits), num_inputs // 32
    codes = torch.randint(0, 2**bits, (num_rows, num_inputs), generator=generator, dtype=torch.uint8)
    scales = (0.003 * torch.randn(num_rows, blocks, generator=generator)).to(dtype)
    zeros = torch.randint(0, 2**bits, (num_rows, blocks), generator=generator, dtype=torch.uint8)
    zeros[0], zeros[1] = 0, 2**bits - 1
    return QuantisedMatrix(codes, bits, scales, None if is_symmetric else zeros, None)


def numbers_of_matrix(matrix):
    numbers = torch.empty(matrix.codes.shape, dtype=torch.float64)
    for k in range(matrix.codes.shape[1]):
        zeros = 2 ** (matrix.bits - 1) if matrix.zeros is None else matrix.zeros[:, k // 32].double()
        numbers[:, k] = matrix.scales[:, k // 32].double() * (matrix.codes[:, k].double() - zeros)
    return numbers


@pytest.mark.parametrize(("bits", "dtype", "is_symmetric"), DIRECTORIES)
@pytest.mark.parametrize("num_inputs", [NUM_INPUTS, 96])
def test_no_number_of_a_directory_is_changed_and_rows_are_multiplied_as_those_of_a_file(
    bits, dtype, is_symmetric, num_inputs
):
    torch.manual_seed(0)
    matrix = matrix_of(bits, dtype, is_symmetric, num_inputs=num_inputs)
    expected = numbers_of_matrix(matrix)
    assert torch.equal(matrix.widened().double(), expected)
    rows, x = QuantisedRows.of(matrix), torch.randn(150, num_inputs)
    assert rows.rows.nbytes <= num_inputs * NUM_ROWS * (bits + 0.75) / 8
    for in_whole_numbers in (True, False):
        product = GroupQuantisedMatmul([rows], None, in_whole_numbers)
        assert torch.equal(product.unpacked().double(), expected)
        together, exact = product(x), x.double() @ expected.T
        assert (together - exact).norm() / exact.norm() < (0.012 if in_whole_numbers else 1e-6)
        for start, count in [(0, 1), (7, 2), (0, 3), (3, 5), (20, 8), (0, 12), (5, 17), (1, 40)]:
            assert torch.equal(product(x[start : start + count]), together[start : start + count])
    ids = torch.tensor([[3, 70], [0, 3]])
    assert torch.equal(
        torch.ops.medusa.quantised_rows(rows.rows, ids, rows.type, num_inputs).double(), expected[ids]
    )


@needs_tiles
@pytest.mark.parametrize(("bits", "dtype", "is_symmetric"), DIRECTORIES)
def test_tiles_give_the_bits_of_vectors_for_a_directory(bits, dtype, is_symmetric):
    rows, x = QuantisedRows.of(matrix_of(bits, dtype, is_symmetric)), torch.randn(140, NUM_INPUTS)
    product = GroupQuantisedMatmul([rows], None, True)
    assert_tiles_give_the_bits_of_vectors(product, x)


def test_scales_that_only_float32_holds_are_not_rounded():
    matrix = matrix_of(4, torch.float32, True)
    assert QuantisedRows.of(matrix) is None
    halved = dataclasses.replace(matrix, scales=matrix.scales.half().float())
    assert QuantisedRows.of(halved).type == 1000


def test_columns_can_stand_in_an_order_of_inputs():
    torch.manual_seed(0)
    matrix, order = matrix_of(4, torch.float16, False), torch.randperm(NUM_INPUTS)
    moved = dataclasses.replace(matrix, input_order=order)
    product = GroupQuantisedMatmul([QuantisedRows.of(moved)], None, in_whole_numbers=False)
    assert torch.equal(product.unpacked(), moved.widened())
    assert torch.equal(product.unpacked()[:, order], matrix.widened())
    x = torch.randn(2, 3, NUM_INPUTS)
    torch.testing.assert_close(product(x), x @ moved.widened().T)


def test_each_type_that_is_said_to_be_held_is_tried_here():
    assert {int(kind) for kind in TYPES} == gguf_types()


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_no_number_of_a_file_is_changed(kind):
    weights = [quantised(kind, 43, seed=1), quantised(kind, 32, seed=2)]
    product = GroupQuantisedMatmul(weights, None, in_whole_numbers=True)
    assert torch.equal(product.unpacked(), torch.cat([numbers_of(each) for each in weights]))
    assert product.number_format == type_name(int(kind))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_rows_are_looked_up_as_the_file_means_them(kind):
    weight, ids = quantised(kind), torch.tensor([[3, 70], [0, 3]])
    rows = torch.ops.medusa.quantised_rows(weight.rows, ids, weight.type, NUM_INPUTS)
    assert torch.equal(rows, numbers_of(weight)[ids])


@pytest.mark.parametrize("in_whole_numbers", [True, False], ids=["whole numbers", "float32"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_a_rows_result_is_near_float64_and_the_same_bits_beside_any_others(kind, in_whole_numbers):
    torch.manual_seed(0)
    weight = quantised(kind)
    product = GroupQuantisedMatmul([weight], torch.randn(NUM_ROWS), in_whole_numbers)
    x = torch.randn(150, NUM_INPUTS)  # more than are multiplied at once
    together = product(x)
    expected = x.double() @ numbers_of(weight).double().T
    error = (together - product.bias - expected).norm() / expected.norm()
    assert error < (0.012 if in_whole_numbers else 1e-6)
    for start, count in [(0, 1), (7, 2), (0, 3), (64, 4), (3, 5), (9, 7), (20, 8), (0, 12), (5, 16), (1, 40)]:
        assert torch.equal(product(x[start : start + count]), together[start : start + count])


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("Q4_0", 2, 18),
        ("Q5_0", 2, 22),
        ("Q5_1", 4, 24),
        ("Q4_K", 16, 144),
        ("Q5_K", 16, 176),
        ("Q6_K", 0, 192),
    ],
)
def test_the_largest_codes_times_the_largest_numbers_have_room_in_every_sum(name, first, last):
    """Bytes ``first`` to ``last`` of a block are its codes."""
    kind = gguf.GGMLQuantizationType[name]
    weight = quantised(kind)
    blocks = weight.rows.reshape(NUM_ROWS, -1, gguf.GGML_QUANT_SIZES[kind][1])
    blocks[..., first:last] = 255
    ones = torch.ones(8, NUM_INPUTS)
    ones[1::2] *= -1
    ones[4:, ::2] *= -1
    for count in (1, 3, 8):
        exact = ones[:count].double() @ numbers_of(weight).double().T
        result = GroupQuantisedMatmul([weight], None, in_whole_numbers=True)(ones[:count])
        assert (result - exact).norm() / exact.norm() < 1e-5


def test_matrices_of_several_types_share_a_product():
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q4_K", "Q6_K", "Q5_0", "Q8_0")]
    weights = [quantised(kind, 20 + 16 * at, seed=at) for at, kind in enumerate(kinds)]
    x = torch.randn(3, NUM_INPUTS)
    for in_whole_numbers in (True, False):
        apart = [GroupQuantisedMatmul([each], None, in_whole_numbers)(x) for each in weights]
        assert torch.equal(GroupQuantisedMatmul(weights, None, in_whole_numbers)(x), torch.cat(apart, dim=1))


def test_rows_of_a_file_can_stand_in_another_order():
    weight, order = quantised(gguf.GGMLQuantizationType.Q4_K), torch.randperm(NUM_ROWS)
    moved = QuantisedRows(weight.rows, weight.type, weight.num_inputs, order)
    product = GroupQuantisedMatmul([moved], None, in_whole_numbers=False)
    assert torch.equal(product.unpacked(), numbers_of(weight)[order])


@pytest.mark.parametrize("num_inputs", [32, 96, 864])
@pytest.mark.parametrize("in_whole_numbers", [True, False], ids=["whole numbers", "float32"])
def test_a_width_need_be_no_whole_block_of_the_kernels(num_inputs, in_whole_numbers):
    weight = quantised(gguf.GGMLQuantizationType.Q5_0, num_inputs=num_inputs)
    product = GroupQuantisedMatmul([weight], None, in_whole_numbers)
    x = torch.randn(33, num_inputs)
    expected = x.double() @ numbers_of(weight).double().T
    assert (product(x) - expected).norm() / expected.norm() < 0.012
    assert torch.equal(product(x[4:6]), product(x)[4:6])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_number_that_is_none_spoils_its_own_row_alone(broken):
    product = GroupQuantisedMatmul([quantised(gguf.GGMLQuantizationType.Q4_K)], None, in_whole_numbers=True)
    x = torch.randn(20, NUM_INPUTS)
    before = product(x)
    x[5, 300] = broken
    after = product(x)
    assert not after[5].isfinite().any()
    assert torch.equal(after[:5], before[:5]) and torch.equal(after[6:], before[6:])


def test_a_row_of_zeros_gives_zeros():
    product = GroupQuantisedMatmul([quantised(gguf.GGMLQuantizationType.Q4_K)], None, in_whole_numbers=True)
    assert not product(torch.zeros(2, NUM_INPUTS)).any()


def test_threads_change_no_bit():
    product = GroupQuantisedMatmul(
        [quantised(gguf.GGMLQuantizationType.Q6_K, 400)], None, in_whole_numbers=True
    )
    x, before = torch.randn(40, NUM_INPUTS), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(product(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@needs_tiles
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("count", [17, 31, 128, 140])
def test_tiles_give_the_bits_of_vectors(kind, count):
    product, x = GroupQuantisedMatmul([quantised(kind)], None, True), torch.randn(count, NUM_INPUTS)
    assert_tiles_give_the_bits_of_vectors(product, x)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda weights: weights[:100].clone(), "whole"),
        (lambda weights: weights[64:].clone(), "packed for this processor"),
    ],
)
def test_bytes_that_are_no_packed_weights_are_refused(spoil, words):
    product = GroupQuantisedMatmul([quantised(gguf.GGMLQuantizationType.Q4_0)], None, in_whole_numbers=True)
    with pytest.raises(RuntimeError, match=words):
        torch.ops.medusa.packed_product(
            torch.randn(1, NUM_INPUTS), spoil(product.panels), None, None, NUM_ROWS
        )
