"""The kernels for a card compute what torch's operators do, and a node's bits do not depend on the others."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import CHECKOUT
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from triton_device import DEVICE, DTYPES, NEAR

from medusa import CandidateTree
from medusa.base.attention import tree_attention_masks
from medusa.engine.card import attention_kernel, block_kernels
from medusa.engine.card.attention_kernel import PART, tree_attention
from medusa.engine.card.block_kernels import block_product
from medusa.engine.card.rotary_kernel import turned_queries
from medusa.engine.card.row_kernels import NormWeights, gated, sum_and_norm
from medusa.engine.card.stored_blocks import StoredBlocks


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def noise(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_near(ours, theirs):
    near = NEAR[ours.dtype]
    torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=near, rtol=near)


# ------------------------------------------------------------------ rows


def norm_of(kind, width, dtype):
    norm = kind(width, eps=3e-3).to(DEVICE, dtype)
    nn.init.normal_(norm.weight, mean=0.5, std=0.3)
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 77, 896])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_a_sum_and_its_norm_are_those_of_the_modules(kind, width, dtype):
    norm = norm_of(kind, width, dtype)
    inner = norm_of(GemmaRMSNorm, width, dtype)
    adds_one = kind is GemmaRMSNorm
    weights = NormWeights(norm.weight, 3e-3, adds_one)
    for num_rows in (1, 5):
        x = noise(2, num_rows, width, dtype=dtype)
        more = noise(2, num_rows, width, dtype=dtype)
        for inside, theirs in ((None, more), (NormWeights(inner.weight, 3e-3, True), inner(more))):
            total, normed = sum_and_norm(x, more, weights, inside)
            assert_near(total, x + theirs)
            assert_near(normed, norm(x + theirs))
            assert torch.equal(sum_and_norm(x, more, None, inside)[1], total)
        assert_near(sum_and_norm(x, None, weights)[1], norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 1500])
def test_a_gate_is_that_of_the_modules(width, dtype):
    rows = 3 * noise(4, 3, 2 * width, dtype=dtype)
    gate, up = rows.chunk(2, dim=-1)
    assert_near(gated(rows, is_silu=True), F.silu(gate) * up)
    assert_near(gated(rows, is_silu=False), F.gelu(gate, approximate="tanh") * up)


def test_a_row_has_the_same_bits_alone():
    weights = NormWeights(noise(200), 1e-6)
    x = noise(9, 200)
    more = noise(9, 200)
    together = (*sum_and_norm(x, more, weights), gated(x, is_silu=True))
    for row in range(9):
        at = slice(row, row + 1)
        alone = (*sum_and_norm(x[at].clone(), more[at].clone(), weights), gated(x[at].clone(), is_silu=True))
        assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, together, strict=True))


# ------------------------------------------------------------------ rotary angles


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "turned", "num_heads", "key_heads"),
    [(64, 64, 3, 1), (96, 96, 2, 2), (128, 32, 4, 2), (80, 20, 8, 1), (256, 256, 2, 1)],
)
@pytest.mark.parametrize("head_norm", [None, LlamaRMSNorm, GemmaRMSNorm])
def test_queries_turn_and_keys_and_values_go_to_their_slots(
    head_norm, width, turned, num_heads, key_heads, dtype
):
    num_rows, num_nodes, num_slots = 2, 3, 11
    rows = noise(num_rows, num_nodes, (num_heads + 2 * key_heads) * width, dtype=dtype)
    slots = torch.tensor([[4, 5, 6], [9, 10, 0]], device=DEVICE)
    angles = 6 * torch.rand(num_rows, num_nodes, turned // 2, device=DEVICE).repeat(1, 1, 2)
    cosines = angles.cos().to(dtype)
    sines = angles.sin().to(dtype)
    keys = noise(num_rows, key_heads, num_slots, width, dtype=dtype)
    values = noise(num_rows, key_heads, num_slots, width, dtype=dtype)
    heads = rows.unflatten(2, (-1, width)).transpose(1, 2)
    query, key, value = heads.split([num_heads, key_heads, key_heads], dim=1)
    norms = None
    if head_norm is not None:
        modules = [norm_of(head_norm, width, dtype) for _ in range(2)]
        query = modules[0](query)
        key = modules[1](key)
        adds_one = head_norm is GemmaRMSNorm
        norms = tuple(NormWeights(module.weight.detach(), 3e-3, adds_one) for module in modules)
    turning = apply_rotary_pos_emb(query[..., :turned], key[..., :turned], cosines, sines)
    query = torch.cat([turning[0], query[..., turned:]], dim=-1)
    key = torch.cat([turning[1], key[..., turned:]], dim=-1)
    at = slots[:, None, :, None].expand(-1, key_heads, -1, width)
    their_keys = keys.clone().scatter_(2, at, key)
    their_values = values.clone().scatter_(2, at, value)
    queries = turned_queries(rows, cosines, sines, slots, keys, values, norms)
    assert_near(queries, query.transpose(1, 2))
    assert_near(keys, their_keys)
    assert torch.equal(values, their_values)


def test_a_slot_that_is_not_there_is_not_written_and_all_rows_may_share_their_angles():
    rows = noise(2, 2, 4 * 16)
    angles = torch.rand(1, 2, 16, device=DEVICE)
    buffer = torch.zeros(2, 1, 6, 16, device=DEVICE)
    keys = buffer[:, :, :4]  # of which the cache has more
    values = torch.zeros_like(buffer)[:, :, :4]
    slots = torch.tensor([[0, 4], [3, 5]], device=DEVICE)
    alike = turned_queries(rows, angles.cos(), angles.sin(), slots, keys, values)
    assert not buffer[:, :, 4:].any() and keys[0, :, 0].all() and keys[1, :, 3].all()
    both = angles.expand(2, -1, -1)
    apart = turned_queries(rows, both.cos().contiguous(), both.sin().contiguous(), slots, keys, values)
    assert torch.equal(alike, apart)


# ------------------------------------------------------------------ attention over a tree


def chain_or_tree(num_nodes):
    paths = [()]
    for path in paths:
        paths += [(*path, rank) for rank in range(3)][: num_nodes - len(paths)]
    return CandidateTree.from_paths(paths[1:]) if num_nodes > 1 else CandidateTree.chain(0)


def case_of(num_nodes, group, width, lengths, num_slots, window=None, key_heads=2, dtype=torch.float32):
    """Queries, keys, values and the mask of a tree in rows of these lengths."""
    topology = chain_or_tree(num_nodes).topology(DEVICE)
    mask = tree_attention_masks(
        torch.tensor(lengths, device=DEVICE), num_slots, topology, {"full_attention": window}
    )
    entries = [noise(len(lengths), key_heads, num_slots, width, dtype=dtype) for _ in range(2)]
    return noise(len(lengths), num_nodes, key_heads * group, width, dtype=dtype), *entries, mask


def plain_attention(queries, keys, values, mask, scale, cap=0.0, sinks=None):
    """The same by torch's operators in float32."""
    group = queries.shape[2] // keys.shape[1]
    keys, values = (entries.float().repeat_interleave(group, dim=1) for entries in (keys, values))
    scores = queries.float().transpose(1, 2) @ keys.transpose(2, 3) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return (weights @ values).transpose(1, 2)


def assert_attends(case, **options):
    queries, keys, values, mask = case
    scale = queries.shape[3] ** -0.5
    ours = tree_attention(queries, keys, values, mask, scale, **options)
    assert_near(ours, plain_attention(queries, keys, values, mask, scale, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_nodes", "group", "width", "lengths", "num_slots"),
    [
        (1, 1, 64, [7], 8),
        (1, 4, 128, [300, 3], 320),
        (5, 7, 96, [0, 255, 256], 270),
        (64, 2, 64, [40], 128),
    ],
)
def test_attention_is_that_of_torch(num_nodes, group, width, lengths, num_slots, dtype):
    assert_attends(case_of(num_nodes, group, width, lengths, num_slots, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("num_nodes", [1, 2, 17, 64, 65])
def test_attention_is_that_of_torch_for_all_shapes(num_nodes, width, group, dtype):
    assert_attends(case_of(num_nodes, group, width, [0, 290, 31], 290 + num_nodes, dtype=dtype))


@pytest.mark.parametrize("window", [1, 5, 300])
def test_a_window_hides_what_lies_before_it(window):
    case = case_of(6, 2, 64, [3, 400], 410, window)
    assert_attends(case)
    queries, keys, values, mask = case
    for entries in (keys, values):
        entries[1].masked_fill_(~mask[1, 0].any(dim=0)[None, :, None], torch.nan)
        entries[1, :, 384:] = 0  # of the blocks that a node sees a part of, all is read
    attended = tree_attention(queries, keys, values, mask, 0.1)
    assert torch.isfinite(attended).all() or window == 300


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_bend_and_sinks_take_their_share(dtype):
    case = case_of(6, 2, 64, [3, 260], 270, dtype=dtype)
    sinks = 2 * noise(4, dtype=dtype)
    plain = tree_attention(*case, 1.0)
    for options in ({"cap": 0.7}, {"sinks": sinks}, {"cap": 0.7, "sinks": sinks}):
        ours = tree_attention(*case, 1.0, **options)
        assert_near(ours, plain_attention(*case, 1.0, **options))
        assert float((ours - plain).abs().max()) > 0.1


def test_a_mask_may_be_what_is_added_to_scores_and_strided_as_caches_are():
    queries, keys, values, mask = case_of(6, 2, 64, [3, 260], 270)
    whole = tree_attention(queries, keys, values, mask, 0.1)
    added = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, torch.finfo(torch.float32).min)
    assert torch.equal(tree_attention(queries, keys, values, added, 0.1), whole)
    joint = torch.stack([F.pad(keys, (0, 0, 0, 50)), F.pad(values, (0, 0, 0, 50))])
    views = [entries[:, :, :270] for entries in joint]
    wide_mask = F.pad(mask, (0, 50))[..., :270]
    assert torch.equal(tree_attention(queries, *views, wide_mask, 0.1), whole)


def test_a_node_has_the_same_bits_alone_in_a_tree_in_a_batch_and_in_a_longer_cache():
    queries, keys, values, mask = case_of(11, 3, 64, [PART + 5, 11], PART + 16, key_heads=1)
    together = tree_attention(queries, keys, values, mask, 0.125)
    longer = [F.pad(entries, (0, 0, 0, PART)) for entries in (keys, values)]
    padded = tree_attention(queries, *longer, F.pad(mask, (0, PART)), 0.125)
    assert torch.equal(padded, together)
    for row, node in itertools.product(range(2), (0, 7, 10)):
        at = slice(row, row + 1)
        nodes = slice(node, node + 1)
        alone = tree_attention(
            queries[at, nodes].clone(), keys[at], values[at], mask[at, :, nodes].clone(), 0.125
        )
        assert torch.equal(alone[0, 0], together[row, node])


class Noted:
    """In the place of a kernel: what its launches are compiled for, beside the types of their arguments."""

    def __init__(self):
        self.constants = []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.constants.append(constants)


def test_in_float32_one_code_serves_all_numbers_of_rows_and_nodes(monkeypatch):
    """Products of other shapes may sum in another order, which the interpreter does not show."""
    attended = Noted()
    multiplied = Noted()
    monkeypatch.setattr(attention_kernel, "_attended_parts", attended)
    monkeypatch.setattr(attention_kernel, "_sum_of_parts", Noted())
    monkeypatch.setattr(block_kernels, "_block_product", multiplied)
    for num_nodes, num_rows in ((1, 1), (40, 1), (3, 2)):
        tree_attention(*case_of(num_nodes, 2, 64, [5] * num_rows, 80), 0.1)
    matrix = StoredBlocks.of(torch.zeros(9, 36, dtype=torch.uint8, device=DEVICE), 2)
    for num_rows in (1, 20, 64):
        block_product(noise(num_rows, 64), matrix, None, noise(num_rows, 9))
    for first, *others in (attended.constants, multiplied.constants):
        assert others == [first, first]


# ------------------------------------------------------------------ compiled without a card

KERNELS = {
    "_sum_and_norm",
    "_gated",
    "_turned",
    "_attended_parts",
    "_sum_of_parts",
    "_block_product",
    "_widened_rows",
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 89, 90, 100])
def test_every_kernel_compiles_for_cards_that_are_not_here(architecture, tmp_path):
    """Of Ampere, Ada, Hopper and Blackwell; see ``compiled_for_cards.py``."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [sys.executable, str(CHECKOUT / "tests" / "compiled_for_cards.py"), str(architecture)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {answer["kernel"] for answer in answers} == KERNELS
    assert all(answer["is_ptx"] for answer in answers)
    spilled = {(answer["kernel"], answer["spilled"]) for answer in answers if answer["spilled"] > 512}
    assert not spilled
