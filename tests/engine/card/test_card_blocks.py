"""On a card a GGUF file keeps its bits, and products with them are those with the numbers that it means."""

from __future__ import annotations

import gguf
import pytest
import torch
from quantised_files import random_rows, write_model
from torch import nn
from torch.nn import functional as F
from triton_device import DEVICE, DTYPES, NEAR

from medusa import CandidateTree, MedusaModel
from medusa.base.causal_lm import embedding_rows, lm_head, rows_at
from medusa.base.loading import find_base
from medusa.engine.card.block_kernels import block_product, widened_rows
from medusa.engine.card.block_modules import MOST_ROWS, QuantisedLinear, QuantisedLookup
from medusa.engine.card.file_loading import load_blocks
from medusa.engine.card.fused_layer import card_view, num_fused
from medusa.engine.card.joined_weights import joined_product
from medusa.engine.card.stored_blocks import FORMS, StoredBlocks
from medusa.engine.weights.load import load_base

Type = gguf.GGMLQuantizationType
TYPES = [Type(number) for number in FORMS]
WIDTHS = {32: [32, 96, 288], 256: [256, 768]}
"""By the numbers of a block: of one block, and of several that fill no step of a kernel."""


def matrix_of(kind, num_rows, width, seed=0):
    """A random matrix of a type, and its numbers in float32 by the package ``gguf``."""
    rows = random_rows(kind, num_rows, width, seed, scale=0.02)
    numbers = torch.from_numpy(gguf.dequantize(rows, kind)).to(DEVICE)
    return StoredBlocks.of(torch.from_numpy(rows).to(DEVICE), kind.value), numbers


def noise(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def product(rows, matrix, bias=None):
    products = rows.new_empty(len(rows), matrix.num_rows)
    block_product(rows, matrix, bias, products)
    return products


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_file_and_products_are_with_them(kind):
    for width in WIDTHS[FORMS[kind.value].block]:
        matrix, numbers = matrix_of(kind, 21, width)
        assert torch.equal(widened_rows(matrix, torch.float32), numbers)
        ids = torch.tensor([[20, 0, 7]], device=DEVICE)
        assert torch.equal(widened_rows(matrix, torch.float32, ids), numbers[ids])
        x = noise(3, width)
        expected = F.linear(x, numbers)
        near = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(product(x, matrix), expected, atol=near, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q8_0], ids=lambda kind: kind.name)
def test_in_a_narrow_type_the_numbers_are_rounded_once_and_summed_in_float32(kind, dtype):
    matrix, numbers = matrix_of(kind, 21, 256)
    assert torch.equal(widened_rows(matrix, dtype), numbers.to(dtype))
    x = noise(3, 256, dtype=dtype)
    expected = (x.double() @ numbers.to(dtype).double().T).to(dtype)
    near = NEAR[dtype] * float(expected.abs().max())
    torch.testing.assert_close(product(x, matrix), expected, atol=near / 4, rtol=0)


@pytest.mark.parametrize(
    "num_rows", [1, 17, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 16, 63, 64, 65))]
)
@pytest.mark.parametrize("num_outputs", [1, 40])
def test_any_number_of_rows_and_outputs_is_multiplied_and_nothing_beside_them_is_written(
    num_rows, num_outputs
):
    matrix, numbers = matrix_of(Type.Q5_K, num_outputs, 256)
    x = noise(num_rows, 256)
    bias = noise(num_outputs)
    around = torch.full((num_rows + 1, num_outputs + 9), 5.0, device=DEVICE)
    block_product(x, matrix, bias, around[:num_rows, 4 : 4 + num_outputs])
    expected = F.linear(x, numbers, bias)
    torch.testing.assert_close(around[:num_rows, 4 : 4 + num_outputs], expected, atol=1e-4, rtol=1e-4)
    around[:num_rows, 4 : 4 + num_outputs] = 5
    assert around.eq(5).all()


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q6_K], ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_alone(kind):
    matrix, _ = matrix_of(kind, 24, 256)
    x = noise(20, 256)
    together = product(x, matrix)
    for row in (0, 13, 19):
        assert torch.equal(product(x[row : row + 1].clone(), matrix)[0], together[row])


def linear_of(kind, num_outputs, width, seed, has_bias=True):
    matrix, numbers = matrix_of(kind, num_outputs, width, seed)
    linear = nn.Linear(width, num_outputs, bias=has_bias, device=DEVICE)
    return QuantisedLinear(linear, matrix, torch.float32), numbers


@torch.no_grad()
def test_layers_of_one_input_are_one_product_for_each_type_and_no_bits_are_held_twice():
    kinds = [Type.Q4_0, Type.Q4_0, Type.Q8_0]
    linears, numbers = zip(
        *(linear_of(kind, 16 + 8 * at, 64, at, at != 1) for at, kind in enumerate(kinds)), strict=True
    )
    x = noise(2, 3, 64)
    expected = [F.linear(x, weight, linear.bias) for linear, weight in zip(linears, numbers, strict=True)]
    together = joined_product(linears)
    for _ in range(2):  # the second time they lie in one piece
        torch.testing.assert_close(together(x), torch.cat(expected, dim=-1), atol=1e-5, rtol=1e-5)
        for linear, theirs in zip(linears, expected, strict=True):
            torch.testing.assert_close(linear(x), theirs, atol=1e-5, rtol=1e-5)
        first, second = (linear.matrix.codes for linear in linears[:2])
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        at = first.data_ptr()
        together = joined_product(linears)
        assert linears[0].matrix.codes.data_ptr() == at


@torch.no_grad()
def test_many_rows_are_multiplied_by_the_widened_matrix():
    linear, numbers = linear_of(Type.Q4_0, 8, 32, 0)
    x = noise(MOST_ROWS + 1, 32)
    assert torch.equal(linear(x), F.linear(x, numbers, linear.bias))
    torch.testing.assert_close(linear(x[:2]), F.linear(x[:2], numbers, linear.bias), atol=1e-5, rtol=1e-5)


def test_a_base_that_was_moved_is_refused():
    linear, _ = linear_of(Type.Q4_0, 8, 32, 0)
    with pytest.raises(ValueError, match="was moved to meta since; load it again"):
        linear(torch.empty(1, 32, device="meta"))


# ------------------------------------------------------------------ a whole file


@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_file_keeps_its_bits_and_gives_the_logits_of_its_widened_weights(tmp_path, is_tied):
    path = write_model(
        tmp_path / "model.gguf", matrices=Type.Q4_0, others=Type.Q8_0, hidden=64, is_tied=is_tied
    )
    source = find_base(path)
    base = load_blocks(source, torch.device(DEVICE), torch.float32)
    widened = load_base(source).to(DEVICE)
    held = [module for module in base.modules() if type(module) in (QuantisedLinear, QuantisedLookup)]
    assert len(held) == 2 * 7 + 2 and base.dtype == torch.float32
    ids = torch.tensor([[1, 2, 3, 4]], device=DEVICE)
    expected = widened(input_ids=ids).logits
    near = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(base(input_ids=ids).logits, expected, atol=near, rtol=1e-4)
    view, reasons = card_view(base)
    assert num_fused(view) == 2 and not reasons
    attention = base.model.layers[0].self_attn
    assert view.model.layers[0].layer.self_attn.q_proj.matrix is attention.q_proj.matrix  # held once
    assert attention.q_proj.matrix.codes.untyped_storage().nbytes() > attention.q_proj.matrix.codes.nbytes
    torch.testing.assert_close(base(input_ids=ids).logits, expected, atol=near, rtol=1e-4)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        theirs = getattr(widened, name)().weight
        assert torch.equal(embedding_rows(getattr(base, name)()), theirs)
        assert torch.equal(rows_at(getattr(base, name)(), ids), theirs[ids])
    assert lm_head(base).weight.shape == lm_head(widened).weight.shape
    if is_tied:
        assert lm_head(base).matrix is base.get_input_embeddings().matrix


@pytest.mark.slow
def test_a_file_of_k_types_writes_the_text_of_its_widened_weights(tmp_path):
    source = find_base(write_model(tmp_path / "model.gguf", num_layers=1))
    view, _ = card_view(load_blocks(source, torch.device(DEVICE), torch.float32))
    ids = torch.tensor([[1, 2, 3, 4]], device=DEVICE)
    call = {"max_new_tokens": 5, "do_sample": False}
    widened = MedusaModel(load_base(source).to(DEVICE), engine="eager")
    plain = widened.generate(ids, **call, tree=CandidateTree.chain(0))
    model = MedusaModel(view, engine="eager")
    for step in ("general", "static"):
        assert model.generate(ids, **call, drafter="suffix", step=step).tolist() == plain.tolist()
