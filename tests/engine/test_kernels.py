"""The kernels compute what torch computes, to the same bits whatever stands beside a row; how they are
built."""

from __future__ import annotations

import errno
import gc
import hashlib
import mmap
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ARCHITECTURES, CHECKOUT, GROUPED, random_prompts, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_candidate_tree import trees
from test_causal_lm import OTHERS
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, MedusaModel, files
from medusa.acceptance import sampling
from medusa.acceptance.sampling import hashed_bits
from medusa.base.attention import TREE_ATTENTION, seen_slots, tree_attention_masks
from medusa.base.passes import new_cache, prefill, verify
from medusa.engine import building, engine_state, kernels
from medusa.engine.kernels import has_tiles, kernels_unsupported_reason
from medusa.engine.views import view_of
from medusa.engine.weights import forms, memory
from medusa.engine.weights.forms import narrowest_dtype, packed
from medusa.engine.weights.memory import HugePages
from medusa.engine.weights.products import PackedMatmul
from medusa.trees.candidate_tree import TreeTopology

needs_kernels = pytest.mark.skipif(
    kernels_unsupported_reason() is not None, reason="no C++ compiler is installed"
)
BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def product(shape, dtype, has_bias=True):
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if has_bias else None
    if dtype == torch.int8:
        return PackedMatmul([weight], bias, int8=True), weight, bias
    weight = weight.to(dtype).float()
    return PackedMatmul([weight], bias), weight, bias


@pytest.fixture(params=["vectors", "tiles", "vectors, twelve bits", "tiles, twelve bits"])
def multiplied_in(request, monkeypatch):
    """Products are computed in vector registers, or in tile registers where the processor has them; from
    weights in twelve bits or sixteen where they are bfloat16."""
    before, wanted = has_tiles(), request.param.startswith("tiles")
    if has_tiles(wanted) != wanted:
        pytest.skip("this processor has no tile registers")
    if "twelve bits" in request.param:
        monkeypatch.setattr(forms, "TWELVE_BITS_FROM", 0)
        monkeypatch.setattr(forms, "_twelve_bits", True)
    yield request.param
    has_tiles(before)


def dtype_of(made):
    """The type of the numbers that a product holds."""
    return torch.bfloat16 if made.num_outliers is not None else made.panels.dtype


SIZES = [(3, 5), (1 << 20, 20), (7,), (1 << 20, 30), (64,), (1, 1, 1)]


def test_weights_in_huge_pages_have_memory_of_their_own_which_is_given_back_with_the_last_of_them():
    pages = HugePages()
    made = [pages.empty(shape, DTYPES[index % 4]).fill_(index) for index, shape in enumerate(SIZES)]
    assert [tuple(each.shape) for each in made] == SIZES
    assert all((each == index).all() for index, each in enumerate(made))
    assert all(each.data_ptr() % HugePages.LINE == 0 for each in made)
    part = weakref.ref(pages._part)
    del pages, made[1:]
    gc.collect()
    assert part() is None and (made[0] == 0).all()


@needs_kernels
def test_where_a_system_has_no_huge_pages_weights_lie_in_small_ones(monkeypatch):
    class Small(mmap.mmap):
        def madvise(self, *advice):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Small)
    monkeypatch.setattr(memory, "weight_memory", HugePages())
    made, weight, bias = product((130, 77), torch.float32)
    x = torch.randn(2, 77)
    torch.testing.assert_close(made(x), nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(130, 77), (16, 16), (5, 3), (1, 1), (64, 1000)], ids=str)
def test_a_product_is_the_product(multiplied_in, shape, dtype):
    for has_bias in (True, False):
        made, weight, bias = product(shape, dtype, has_bias)
        assert dtype_of(made) == dtype
        if dtype == torch.int8:
            weight = made.unpacked()
        for lead in ((), (3,), (2, 5), (0,), (37,)):
            x = torch.randn(*lead, shape[1])
            exact = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
            step = x.abs().max() / 32767 if dtype == torch.int8 and x.numel() else torch.tensor(0.0)
            most = float(step / 2 * weight.abs().sum(1).max())  # that rounding rows to such steps may do
            torch.testing.assert_close(made(x).double(), exact, atol=1e-4 + most, rtol=1e-4)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(130, 77), (48, 64)], ids=str)
def test_a_row_gives_the_same_bits_alone_and_among_any_number(multiplied_in, shape, dtype):
    made = product(shape, dtype)[0]
    x = torch.randn(61, shape[1])
    together = made(x)
    for size in range(1, 50):
        assert torch.equal(torch.cat([made(part) for part in x.split(size)]), together)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(made(x), together)
    finally:
        torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(multiplied_in, dtype, broken):
    made = product((48, 600), dtype)[0]
    x = torch.randn(5, 600)
    whole = made(x)
    x[2, 555] = broken
    assert not made(x)[2].isfinite().any()
    assert torch.equal(made(x)[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


@needs_kernels
def test_numbers_of_every_size_keep_their_digits_in_int8(multiplied_in):
    """A large number takes digits from the 256 that stand beside it, and from no others."""
    made = product((16, 512), torch.int8, has_bias=False)[0]
    x = torch.randn(2, 512)
    x[0, 0] = 1e6
    x[1, 256:] = 0
    far = torch.zeros_like(x)
    far[:, :256] = x[:, :256]
    apart = made(x) - made(far)  # what the second half gives
    torch.testing.assert_close(apart[0], made(x - far)[0], atol=0.5, rtol=0)
    assert not apart[1].any() and not made(torch.zeros(1, 512)).any()


@needs_kernels
def test_rows_that_do_not_follow_each_other_are_taken_and_wrong_ones_refused():
    made, weight, bias = product((24, 40), torch.float32)
    wide = torch.randn(6, 80)
    torch.testing.assert_close(made(wide[:, ::2]), nn.functional.linear(wide[:, ::2], weight, bias))
    half = torch.randn(2, 40).bfloat16()  # as autocast makes them in training
    assert torch.equal(made(half), made(half.float()))
    for rows in (torch.randn(2, 39), torch.randn(2, 40).double()):
        with pytest.raises(RuntimeError, match="rows must be float32, of the weight's width"):
            made(rows)


def test_a_weight_lies_in_the_narrowest_type_that_holds_it():
    weight = torch.randn(8, 8)
    assert narrowest_dtype(weight) == torch.float32
    assert narrowest_dtype(weight.bfloat16().float()) == torch.bfloat16
    assert narrowest_dtype(weight.half().float()) == torch.float16
    assert narrowest_dtype(torch.full((2, 2), float("nan"))) == torch.bfloat16, "every bit of it"
    assert narrowest_dtype(torch.full((2, 2), 1e6)) == torch.float32
    assert narrowest_dtype(torch.tensor([[0.0, -0.0, float("inf"), 1e-30]])) == torch.float32


@needs_kernels
def test_a_number_times_one_is_itself_to_the_last_bit(multiplied_in):
    made = PackedMatmul([torch.eye(40)], None)
    assert dtype_of(made) == torch.bfloat16
    x = torch.randn(300, 40) * 10.0 ** torch.arange(-28.0, 32.0).repeat(5)[:, None]
    assert torch.equal(made(x), x)


@needs_kernels
@pytest.mark.parametrize("shape", [(130, 77), (33, 300), (64, 1536)], ids=str)
def test_int8_gives_the_same_bits_in_tiles_and_in_vectors(shape):
    if not has_tiles():
        pytest.skip("this processor has no tile registers")
    x = torch.randn(37, shape[1])
    in_tiles = product(shape, torch.int8)[0]
    given = in_tiles(x)
    try:
        has_tiles(False)
        in_vectors = product(shape, torch.int8)[0]
        assert torch.equal(in_vectors(x), given)
        with pytest.raises(RuntimeError, match="panels must be packed for this processor"):
            in_tiles(x)
    finally:
        has_tiles(True)


@needs_kernels
def test_the_tile_registers_of_others_are_as_they_were(multiplied_in):
    """oneDNN multiplies bfloat16 in them too, on the same threads."""
    made, x = product((64, 96), torch.bfloat16)[0], torch.randn(20, 96)
    left, right = torch.randn(128, 256).bfloat16(), torch.randn(256, 512).bfloat16()
    before, other = made(x), left @ right
    for _ in range(3):
        assert torch.equal(made(x), before) and torch.equal(left @ right, other)


def in_twelve_bits(weight, *below):
    made = PackedMatmul([weight, *below], None)
    assert made.panels.dtype == torch.uint8
    return made


ALL_NUMBERS = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)


@needs_kernels
def test_every_number_of_bfloat16_survives_twelve_bits(monkeypatch):
    monkeypatch.setattr(forms, "_twelve_bits", True)
    weight = (torch.rand(4096, 4096) * 0.9 + 1).bfloat16()
    weight[:, ::256] = ALL_NUMBERS.view(4096, 16)  # as many in a panel as it has room for
    made = in_twelve_bits(weight)
    held = torch.ops.medusa.decode_twelve(made.panels, *weight.shape)
    assert torch.equal(held.view(torch.int16), weight.view(torch.int16))
    assert made.num_outliers is not None and 0 < made.num_outliers < 2**16
    assert made.panels.nbytes < 12.3 / 8 * weight.numel()


@needs_kernels
def test_weights_that_are_kept_apart_are_multiplied_too(monkeypatch):
    monkeypatch.setattr(forms, "TWELVE_BITS_FROM", 0)
    monkeypatch.setattr(forms, "_twelve_bits", True)
    weight = torch.zeros(50, 520)
    weight[0, :40], weight[48, :40] = 1.5, -1.5
    weight[3, 519], weight[49, 0] = 2.0**100, -(2.0**-100)
    made = in_twelve_bits(weight)
    assert made.num_outliers == 2
    x = torch.randn(7, 520)
    assert torch.equal(made(x)[:, [3, 49]], torch.stack([x[:, 519] * 2.0**100, x[:, 0] * -(2.0**-100)], 1))


@needs_kernels
def test_a_matrix_with_too_many_exponents_stays_in_sixteen_bits(monkeypatch):
    monkeypatch.setattr(forms, "TWELVE_BITS_FROM", 0)
    monkeypatch.setattr(forms, "_twelve_bits", True)
    weight = (torch.rand(40, 512) * 0.9 + 1).bfloat16()
    room = 512 * kernels.lanes() // 256  # of a panel
    weight[17, : room + 1] *= 2.0**40
    made = PackedMatmul([weight], None)
    assert made.panels.dtype == torch.bfloat16 and made.num_outliers is None
    weight[17, room] = 1
    assert in_twelve_bits(weight).num_outliers == room


@needs_kernels
def test_small_matrices_and_other_machines_keep_sixteen_bits(monkeypatch):
    monkeypatch.setattr(forms, "_twelve_bits", True)
    assert PackedMatmul([torch.ones(16, 16).bfloat16()], None).panels.dtype == torch.bfloat16
    large = torch.ones(1024, 256).bfloat16()
    assert PackedMatmul([large], None).panels.dtype == torch.uint8
    monkeypatch.setattr(forms, "_twelve_bits", False)
    assert PackedMatmul([large], None).panels.dtype == torch.bfloat16


@needs_kernels
@pytest.mark.parametrize(
    "ratios, uses",
    [((0.8, 1.0, 1.1, 1.1), True), ((0.9, 1.0, 1.2, 1.0), False), ((0.7, 0.8, 0.9, 1.3), False)],
)
def test_twelve_bits_are_used_where_they_were_measured_to_be_no_slower(ratios, uses, monkeypatch, tmp_path):
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    monkeypatch.setattr(forms, "_twelve_bits", None)
    measured = dict(zip(("1", "4", "8", "32"), ratios, strict=True))
    monkeypatch.setattr(forms, "_time_ratios", lambda: measured)
    assert forms.uses_twelve_bits() == uses
    monkeypatch.setattr(forms, "_time_ratios", lambda: pytest.fail("it was measured before"))
    monkeypatch.setattr(forms, "_twelve_bits", None)
    assert forms.uses_twelve_bits() == uses
    assert forms.uses_twelve_bits(not uses) != uses


@needs_kernels
@pytest.mark.parametrize("width", [1, 3, 31, 32, 33, 40, 127, 300, 2049])
def test_twelve_bits_give_the_same_bits_for_any_rows_and_those_of_sixteen_where_none_is_apart(
    width, monkeypatch
):
    monkeypatch.setattr(forms, "TWELVE_BITS_FROM", 0)
    monkeypatch.setattr(forms, "_twelve_bits", True)
    weight = ((torch.rand(75, width) + 0.5) * torch.randn(75, 1).sign()).bfloat16()
    made, x = in_twelve_bits(weight), torch.randn(100, width)
    assert made.num_outliers == 0
    monkeypatch.setattr(forms, "_twelve_bits", False)
    assert torch.equal(made(x), PackedMatmul([weight], None)(x))
    monkeypatch.setattr(forms, "_twelve_bits", True)
    if width > 64:
        weight[::7, 5], weight[3::9, -1] = 2.0**20, 2.0**-60
    made = in_twelve_bits(weight)
    together = made(x)
    for rows in range(1, 101):
        assert torch.equal(made(x[:rows]), together[:rows]), rows
    exact = nn.functional.linear(x.double(), weight.double())
    torch.testing.assert_close(together.double(), exact, atol=1e-3, rtol=1e-4)


ODD_SHAPES = [(5, 3), (1, 1), (16, 64), (33, 70)]


@needs_kernels
@pytest.mark.parametrize("held", ["as it is", "as float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_panels_hold_every_weight_to_the_bit_and_zeros_after_the_last(shape, dtype, held):
    weight = torch.randn(shape) * 10.0 ** torch.randint(-7, 3, shape)
    weight[0, 0], weight[-1, -1] = -0.0, 1 + 2.0**-10  # which bfloat16 does not hold
    weight = weight.to(dtype)
    made = PackedMatmul([weight.float() if held == "as float32" else weight], None)
    assert made.panels.dtype == narrowest_dtype(weight.float())
    assert made.panels.dtype == dtype or shape == (1, 1)
    assert torch.equal(made.unpacked().view(torch.int32), weight.float().view(torch.int32))
    whole = made.panels.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    assert not whole[shape[0] :].any() and not whole[:, shape[1] :].any()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_int8_weights_are_their_scale_times_the_nearest_whole_number(multiplied_in, shape, dtype):
    weight = torch.randn(shape).to(dtype)
    weight[0] = 0
    made = PackedMatmul([weight], None, int8=True)
    scales = weight.float().abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    assert torch.equal(made.scales, scales)
    assert torch.equal(made.unpacked(), (weight.float() / scales[:, None]).round() * scales[:, None])


@needs_kernels
@pytest.mark.parametrize("int8", [False, True])
def test_several_weights_share_panels_as_one_weight_does(multiplied_in, int8):
    parts = [torch.randn(rows, 40).bfloat16() for rows in (5, 16, 30)]
    together, alone = (packed(each, int8)[1] for each in (parts, [torch.cat(parts)]))
    assert torch.equal(together[0], alone[0])
    assert not int8 or torch.equal(together[1], alone[1])
    mixed = [torch.full((3, 4), 1.0 + 2**-10), torch.full((3, 4), 2.0**60)]  # float16, and bfloat16 alone
    assert packed(mixed)[1][0].dtype == torch.float32


@needs_kernels
@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
    first=st.sampled_from([0, 7, 2**31 - 2, 2**40]),
    num_positions=st.integers(1, 3),
    vocab_size=st.sampled_from([1, 15, 16, 17, 100]),
)
def test_the_kernels_draw_the_bits_that_every_device_draws(seeds, first, num_positions, vocab_size):
    given = torch.tensor(seeds), torch.arange(first, first + num_positions).expand(len(seeds), -1), vocab_size
    kernels.lanes()  # loads them
    drawn = hashed_bits(*given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "are_loaded", lambda: False)
        assert torch.equal(hashed_bits(*given), drawn)
    assert torch.equal(torch.ops.medusa.hashed_bits(*given), drawn)


@needs_kernels
@pytest.mark.parametrize("size", [1, 15, 16, 1024, 5000])
def test_the_largest_score_is_the_one_that_torch_finds(size):
    kernels.lanes()  # loads them
    scores = torch.randint(-9, 9, (40, size)).float()  # many equals
    special = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for row, kind in enumerate(special.repeat(10)):
        scores[row, torch.randperm(size)[: 1 + size // 50]] = kind
    scores[-1] = -float("inf")
    scores[-2] = float("nan")
    assert torch.equal(torch.ops.medusa.argmax(scores), scores.argmax(-1))
    assert torch.equal(torch.ops.medusa.argmax(scores.T.contiguous().T), scores.argmax(-1))


def attend(query, key, value, seen, scaling=0.3, **options):
    return kernels.tree_attention(nn.Module(), query, key, value, seen, scaling, **options)[0]


def expected(query, key, value, mask, scaling=0.3, softcap=None, s_aux=None):
    """Attention as it is defined, in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        return (torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@needs_kernels
@given(
    tree=trees(),
    lengths=st.lists(st.sampled_from([0, 1, 15, 16, 250, 256, 257, 530]), min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 3, 20, 300]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    widths=st.sampled_from([(16, 16), (64, 64), (7, 5), (80, 48)]),
    options=st.sampled_from(["plain", "softcap", "sinks"]),
)
@settings(max_examples=40, deadline=None)
def test_attention_over_a_tree_is_attention_and_the_same_bits_once_committed(
    tree, lengths, window, heads, widths, options
):
    generator = torch.Generator().manual_seed(tree.num_nodes)
    lengths, topology, windows = torch.tensor(lengths), tree.topology("cpu"), {"full_attention": window}
    rows, nodes, slots = len(lengths), tree.num_nodes, int(lengths.max()) + tree.num_nodes
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    query = draw(rows, heads[0], nodes, widths[0])
    key, value = draw(rows, heads[1], slots, widths[0]), draw(rows, heads[1], slots, widths[1])
    more = {"softcap": {"softcap": 2.0}, "sinks": {"s_aux": draw(heads[0])}}.get(options, {})
    together = attend(query, key, value, seen_slots(lengths, topology, windows), **more)
    mask = tree_attention_masks(lengths, slots, topology, windows)
    exact = expected(query, key, value, mask, **more)
    torch.testing.assert_close(together.double(), exact, atol=3e-6, rtol=3e-6)
    path = topology.lineage[0, -1, : int(topology.depths[0, -1]) + 1].tolist()
    for row, length in enumerate(
        lengths.tolist()
    ):  # the path to the last node, committed and read as a prompt
        keys, values = (each[row : row + 1].clone() for each in (key, value))
        for states, own in ((keys, key), (values, value)):
            states[0, :, length : length + len(path)] = own[row, :, [length + node for node in path]]
            states[0, :, length + len(path) :] = torch.nan  # nobody looks there
        for depth, node in enumerate(path):
            first = 0 if window is None else max(0, length + depth - window + 1)
            seen = torch.tensor([[[[first, length + depth + 1]]]], dtype=torch.int32)
            alone = attend(query[row : row + 1, :, [node]], keys, values, seen, **more)
            assert torch.equal(alone[0, 0], together[row, node])


@needs_kernels
def test_attention_over_a_long_chain_is_attention():
    chain, lengths, windows = TreeTopology.chain(150, "cpu"), torch.tensor([200, 7]), {"full_attention": 90}
    query, key, value = torch.randn(2, 6, 150, 16), torch.randn(2, 2, 350, 16), torch.randn(2, 2, 350, 16)
    given = attend(query, key, value, seen_slots(lengths, chain, windows))
    exact = expected(query, key, value, tree_attention_masks(lengths, 350, chain, windows))
    torch.testing.assert_close(given.double(), exact, atol=3e-6, rtol=3e-6)


@needs_kernels
def test_attention_takes_any_layout_of_heads_and_refuses_what_it_does_not_know():
    query, key, value = torch.randn(1, 3, 4, 16), torch.randn(1, 7, 3, 16), torch.randn(1, 3, 7, 16)
    seen = seen_slots(torch.tensor([3]), CandidateTree.chain(3).topology(), {"full_attention": None})
    across, plain = key.transpose(1, 2), key.transpose(1, 2).contiguous()
    together = attend(query, plain, value, seen)
    assert torch.equal(attend(query, across, value, seen), together)
    twisted = query.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(attend(twisted, plain, value, seen), together)
    with pytest.raises(ValueError, match="attention over a tree knows no position_bias"):
        attend(query, plain, value, seen, position_bias=torch.zeros(1))


@needs_kernels
@pytest.mark.parametrize("option", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("length, slot", [(0, 0), (200, 0), (200, 130), (200, 202)])
def test_a_score_that_is_no_number_gives_none_as_in_torch_to_the_nodes_that_see_it(length, slot, option):
    topology, windows, slots = BUSHY.topology(), {"full_attention": 150}, length + BUSHY.num_nodes
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, BUSHY.num_nodes, 16), *torch.randn(2, 1, 2, slots, 16)
    key[0, 0, slot, 0] = torch.nan
    more = {"softcap": {"softcap": 2.0}, "sinks": {"s_aux": torch.randn(4)}}.get(option, {})
    found = attend(query, key, value, seen_slots(torch.tensor([length]), topology, windows), **more)
    mask = tree_attention_masks(torch.tensor([length]), slots, topology, windows)
    exact = expected(query, key, value, mask, **more)
    torch.testing.assert_close(found.double(), exact, atol=3e-6, rtol=3e-6, equal_nan=True)


INEXACT = {
    "one key for all heads": "Falcon's attention is its own, and takes no other",
}


@needs_kernels
@pytest.mark.parametrize("int8", [False, True], ids=["packed", "int8"])
@pytest.mark.parametrize("architecture", [each for each in (*ARCHITECTURES, *OTHERS) if each not in INEXACT])
@torch.no_grad()
def test_the_logits_of_a_node_are_the_same_bits_alone_in_a_tree_and_in_a_batch(architecture, int8):
    torch.manual_seed(0)
    base = tiny_model(architecture) if architecture in ARCHITECTURES else OTHERS[architecture]().eval()
    view = view_of(base, int8)
    assert view.config.get_text_config(decoder=True)._attn_implementation in TREE_ATTENTION.values()
    prompts, lengths = random_prompts(3, 41), torch.tensor([41, 13, 30])
    nodes = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]])

    def read(rows, chunk=512):
        cache = new_cache(view, len(rows))
        return cache, prefill(view, prompts[rows], lengths[rows], cache, chunk=chunk)[1]

    cache, after_prompt = read([0, 1, 2])
    _, together = verify(view, nodes, BUSHY.topology(), cache)
    for row in range(3):
        assert all(torch.equal(read([row], chunk)[1][0], after_prompt[row]) for chunk in (512, 7))
        for node, path in enumerate(BUSHY.paths):
            cache, _ = read([row])
            for at in (BUSHY.paths.index(path[:depth]) for depth in range(len(path) + 1)):
                _, alone = verify(view, nodes[[row]][:, [at]], CandidateTree.chain(0).topology(), cache)
                cache.commit_prefix(torch.ones(1, dtype=torch.long))
            assert torch.equal(alone[0, 0], together[row, node])


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """A cache of one's own, in which nothing has been built; calls that build are made anew."""
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    for function in (kernels.kernels_unsupported_reason, engine_state._say_once):
        function.cache_clear()
    yield tmp_path / "compiled"
    monkeypatch.undo()
    for function in (kernels.kernels_unsupported_reason, engine_state._say_once):
        function.cache_clear()


def test_without_a_compiler_auto_says_so_once_and_gives_the_same_text(unbuilt, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    base, prompt = tiny_model("llama"), random_prompts(1, 9)
    model = MedusaModel(base, engine="auto")
    assert model.engine_base is base
    said = capsys.readouterr().err
    assert "engine='auto' runs eager, so decoding is slower: packed needs a C++ compiler" in said
    assert "apt install g++" in said and "dnf install gcc-c++" in said and "xcode-select --install" in said
    MedusaModel(base, engine="auto")
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match=r"engine='packed' needs a C\+\+ compiler .* use engine='eager'"):
        MedusaModel(base, engine="packed")
    options = {"max_new_tokens": 12, "do_sample": False}
    reference = base.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
    assert model.generate(prompt, **options).tolist() == reference.tolist()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(unbuilt, monkeypatch):
    def fails(command, **options):
        raise subprocess.CalledProcessError(
            1, command, stderr="In file included\nx.cpp:3: error: no header\n"
        )

    monkeypatch.setattr(subprocess, "run", fails)
    compiler = kernels.found_compiler()
    assert (
        kernels_unsupported_reason()
        == f"kernels that compile, and {compiler} failed: x.cpp:3: error: no header"
    )
    assert [path.suffix for path in unbuilt.iterdir()] == [".lock"]


@needs_kernels
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_where_the_cache_cannot_be_written_kernels_are_built_for_this_process(unbuilt, capsys):
    unbuilt.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert kernels_unsupported_reason() is None
    assert "compiled for this process only" in capsys.readouterr().err


@needs_kernels
@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "arm64"])
def test_the_compiler_is_asked_for_this_processor_by_the_name_that_it_knows(tmp_path, monkeypatch, machine):
    commands = []
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    monkeypatch.setattr(building, "run", commands.append)
    monkeypatch.setattr(Path, "unlink", lambda path: None)
    kernels._built("c++", tmp_path / "kernels.so")
    option = "-march=native" if machine == "x86_64" else "-mcpu=native"
    assert all(option in command for command in commands[:-1])


ELSEWHERE = """
import sys, pytest
from medusa.engine import kernels
flags, tests = sys.argv[1].split("|"), sys.argv[2:]
kernels.FLAGS = (*kernels.FLAGS, *flags)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *tests]))
"""
"""Runs tests on kernels that are compiled with further flags."""
TILES = Path(__file__).with_name("tiles.h")
TILES_IN_SOFTWARE = (
    "-march=x86-64-v4",
    "-mavx512bf16",
    "-mavx512vnni",  # which processors with tiles have, and whose rows of 8 bits the products in them read
    f'-DTILES_HEADER="{TILES}"',
    f"-DTILES_DIGEST={hashlib.sha256(TILES.read_bytes()).hexdigest()}",  # compiles again after a change
)
LEVELS = {
    "x86-64-v4": "avx512bw",
    "x86-64-v3": "avx2",
    "x86-64": "sse2",
    "tiles in software": "avx512_bf16",
    "armv8.2-a+dotprod+i8mm": "i8mm",
    "armv8.2-a+dotprod": "asimddp",
    "armv8-a": "asimd",
}
"""Processors with AVX-512, AVX2 and neither, and what ``/proc/cpuinfo`` calls it; tile registers that are
arrays; and ARM with and without the instructions for products of int8."""


def passed_elsewhere(level, *flags, tests, environment=None):
    """Runs ``tests`` in a process whose kernels are compiled for ``level``."""
    is_arm = level.startswith("armv8")
    if platform.machine() != ("aarch64" if is_arm else "x86_64") or sys.platform != "linux":
        pytest.skip("flags of another architecture")
    if LEVELS[level] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {LEVELS[level]}")
    all_flags = TILES_IN_SOFTWARE if level == "tiles in software" else (f"-march={level}",)
    command = [sys.executable, "-c", ELSEWHERE, "|".join((*all_flags, *flags)), *tests]
    ran = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, cwd=CHECKOUT
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@needs_kernels
def test_tile_registers_give_what_vectors_give_where_they_are_only_arrays():
    if has_tiles():
        pytest.skip("this processor has tile registers, with which these tests run anyway")
    files = "tests/engine/test_kernels.py", "tests/engine/weights/test_group_quantised.py"
    tests = *files, "-k", "tiles or twelve_bits"
    assert "skipped" not in passed_elsewhere("tiles in software", "-O1", tests=tests)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_quantised_weights_hold_on_every_processor(level):
    files = "tests/engine/weights/test_group_quantised.py", "tests/engine/weights/test_packed_experts.py"
    passed_elsewhere(level, "-O2", tests=files)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_no_kernel_reads_or_writes_beside_its_memory(level):
    """Products, attention, the search for what is expected and trees that grow, in the tests of all these, as
    a sanitizer builds them: a read or a write beside their memory, and what C++ does not define, end the
    process."""
    compiler = kernels.found_compiler()
    preloaded = [library_of(compiler, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")]
    if not all(map(os.path.isabs, preloaded)):
        pytest.skip(f"{compiler} has no address sanitizer")
    sanitizers = "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    rooms = (
        *("engine/test_kernels", "engine/test_kernel_bounds", "engine/test_group_quantised"),
        *("engine/test_packed_experts", "drafters/test_kernel_drafts"),
    )
    tests = *(f"tests/{name}.py" for name in (*rooms, "drafters/test_references")), "-m", "not slow"
    environment = {"LD_PRELOAD": " ".join(preloaded), "ASAN_OPTIONS": "detect_leaks=0"}
    passed_elsewhere(level, *sanitizers, tests=tests, environment=environment)


def library_of(compiler, name):
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


BUILD = "import sys; from medusa.engine import kernels; sys.exit(kernels.kernels_unsupported_reason())"


@needs_kernels
@pytest.mark.slow
def test_two_processes_build_once_and_another_processor_builds_its_own(unbuilt, monkeypatch):
    command = [sys.executable, "-c", BUILD]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate()[1] for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert sum("compiling kernels" in each for each in said) == 1 and len(list(unbuilt.glob("*.so"))) == 1
    before = kernels._compiled(kernels.found_compiler())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert kernels._compiled(kernels.found_compiler()) != before


@needs_kernels
def test_a_damaged_library_is_not_loaded_and_another_is_made_for_this_process(unbuilt, monkeypatch, capsys):
    loaded = []
    monkeypatch.setattr(kernels, "_load", loaded.append)

    def writes(command, **options):
        with open(command[command.index("-o") + 1], "wb") as file:
            file.write(b"x" * 1000)

    monkeypatch.setattr(subprocess, "run", writes)
    kernels._compiled(kernels.found_compiler()).write_bytes(b"y" * 999)
    assert kernels_unsupported_reason() is None and loaded[0].parent.name.startswith("medusa-kernels-")
    assert re.search(r"for this process only: .*is damaged.* delete it", capsys.readouterr().err, re.DOTALL)


def refuse_locks(*args):
    raise OSError(errno.ENOLCK, "No locks available")


def refuse_names(self, *args, **options):
    raise OSError(errno.EROFS, "Read-only file system")


NO_PLACE = {
    "no locks": (files.fcntl, "flock", refuse_locks),
    "a read-only file system": (Path, "mkdir", refuse_names),
    "no home": (Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home"))),
}


@needs_kernels
@pytest.mark.parametrize("what", [*NO_PLACE, "no directory"])
def test_where_the_cache_cannot_be_used_kernels_are_made_for_this_process(unbuilt, monkeypatch, capsys, what):
    loaded = []
    monkeypatch.setattr(kernels, "_load", loaded.append)
    monkeypatch.setattr(kernels, "_built", lambda compiler, path: path)
    if what == "no home":  # and the root is not to be written to
        monkeypatch.delenv("MEDUSA_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "mkdir", refuse_names)
    if what == "no directory":
        monkeypatch.setenv("MEDUSA_CACHE", "/dev/null")
    else:
        monkeypatch.setattr(*NO_PLACE[what])
    assert kernels_unsupported_reason() is None and loaded[0].parent.name.startswith("medusa-kernels-")
    said = capsys.readouterr().err
    assert said.count("for this process only: ") == 1
    assert "; MEDUSA_CACHE names another directory than /" in said


@needs_kernels
def test_where_no_library_may_be_loaded_auto_runs_eager_and_says_why_in_a_line(unbuilt, monkeypatch, capsys):
    def refuses(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(kernels, "_load", refuses)
    monkeypatch.setattr(kernels, "_built", lambda compiler, path: path.write_bytes(b"library") and path)
    model = MedusaModel(LlamaForCausalLM(LlamaConfig(**GROUPED)).eval(), engine="auto")
    assert model.engine_base is model.base
    assert capsys.readouterr().err.count("failed to map segment") == 2, "where, and then what runs instead"
    with pytest.raises(ValueError, match=r"engine='packed' needs kernels that can be loaded: .* to map"):
        MedusaModel(LlamaForCausalLM(LlamaConfig(**GROUPED)).eval(), engine="packed")
