"""The heads: untrained they are the base's own LM head, and each owns its weights."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import READING
from refusals import refusals
from torch import nn

from medusa import HeadsConfig, MedusaHeads

HIDDEN_SIZE, VOCAB_SIZE, NUM_HEADS = 8, 21, 3
MAP = [20, 3, 7, 0, 11]


def config_of(unembedding: str, **changes) -> HeadsConfig:
    size = len(MAP) if unembedding == "token_map" else None
    values = {
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "num_heads": NUM_HEADS,
        "num_layers": 2,
        "unembedding": unembedding,
        "token_map_size": size,
    }
    return HeadsConfig(**{**values, **changes})


def heads_of(unembedding: str, is_random: bool = False, **changes) -> MedusaHeads:
    torch.manual_seed(3)
    heads = MedusaHeads(config_of(unembedding, **changes), MAP if unembedding == "token_map" else None)
    if is_random:
        for parameter in heads.parameters():
            nn.init.normal_(parameter, std=0.5)
    return heads


def lm_head(bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=bias)


HIDDEN = torch.randn(2, 5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
PATH = torch.randint(0, VOCAB_SIZE, (2, 5, NUM_HEADS), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("unembedding", ["shared", "full", "token_map"])
def test_untrained_heads_are_the_base_models_own_lm_head(unembedding, bias, reading):
    embedding = lm_head(bias=bias and unembedding != "full")
    heads = heads_of(unembedding, **READING[reading])
    heads.initialise(SimpleNamespace(get_output_embeddings=lambda: embedding))
    expected = embedding(HIDDEN)
    if unembedding == "token_map":
        expected = expected[..., MAP]
    below = torch.randn(2, 5, len(heads.fused_layers) * HIDDEN_SIZE)
    logits = heads(heads.fuse(torch.cat([HIDDEN, below], -1)), embedding, PATH)
    assert logits.shape == (2, 5, NUM_HEADS, expected.shape[-1])
    for k in range(NUM_HEADS):
        torch.testing.assert_close(logits[:, :, k], expected)


@pytest.mark.parametrize("unembedding", ["shared", "full", "token_map"])
def test_one_head_alone_gives_its_column_of_all(unembedding):
    embedding, heads = lm_head(), heads_of(unembedding, is_random=True)
    together = heads(HIDDEN, embedding)
    assert not torch.allclose(together[..., 0, :], together[..., 1, :])
    for k in range(NUM_HEADS):
        torch.testing.assert_close(heads.logits_of(k, HIDDEN, embedding), together[..., k, :])


@pytest.mark.parametrize("unembedding", ["shared", "full", "token_map"])
def test_a_head_reads_its_own_parameters_and_no_others(unembedding):
    embedding, heads = lm_head(), heads_of(unembedding, is_random=True)
    heads.logits_of(1, HIDDEN, embedding).sum().backward()
    own = {id(parameter) for parameter in heads.parameters_of(1)}
    touched = {id(p) for p in heads.parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched == own
    everyones = [id(p) for k in range(NUM_HEADS) for p in heads.parameters_of(k)]
    assert sorted(everyones) == sorted(id(p) for p in heads.parameters())


def test_no_two_blocks_share_a_weight():
    """The ``[block] * n`` bug: one module repeated, so that all heads train the same weights."""
    heads = heads_of("shared", num_layers=3)
    embedding = lm_head()
    before = heads(HIDDEN, embedding)
    nn.init.constant_(heads.blocks[1][2].linear.bias, 1.0)
    changed = (heads(HIDDEN, embedding) != before).flatten(0, 1).flatten(2).any(dim=2).any(dim=0)
    assert changed.tolist() == [False, True, False]


def test_columns_of_a_token_map_stand_for_its_tokens():
    embedding, heads = lm_head(bias=True), heads_of("token_map", is_random=True)
    logits = heads(HIDDEN, embedding)
    every_token = heads_of("shared", is_random=True)(HIDDEN, embedding)
    torch.testing.assert_close(logits, every_token[..., MAP])
    assert heads.token_ids(torch.tensor([[4, 0], [1, 1]])).tolist() == [[11, 20], [3, 3]]
    best = heads.token_ids(logits.argmax(dim=-1))
    assert set(best.flatten().tolist()) <= set(MAP)
    assert {name.split(".")[0] for name in heads.state_dict()} == {"blocks", "token_map"}
    columns = torch.tensor([5, 0])
    assert heads_of("shared").token_ids(columns) is columns


def test_a_token_map_follows_the_output_embedding_when_it_changes():
    heads, every_token = (heads_of(kind, is_random=True) for kind in ("token_map", "shared"))
    heads(HIDDEN, lm_head())
    other = lm_head(seed=9)
    torch.testing.assert_close(heads(HIDDEN, other), every_token(HIDDEN, other)[..., MAP])
    with torch.no_grad():
        other.weight.mul_(2.0)
    torch.testing.assert_close(heads(HIDDEN, other), every_token(HIDDEN, other)[..., MAP])
    other.to(torch.bfloat16)
    assert heads(HIDDEN, other).dtype == torch.bfloat16
    other.to(torch.float32)
    heads.token_map = heads.token_map.flip(0)
    torch.testing.assert_close(heads(HIDDEN, other), every_token(HIDDEN, other)[..., MAP[::-1]])


def test_heads_in_float32_sit_on_a_base_in_bfloat16():
    embedding = lm_head().to(torch.bfloat16)
    for unembedding in ("shared", "token_map", "full"):
        heads = heads_of(unembedding, is_random=True)
        logits = heads(HIDDEN.to(torch.bfloat16), embedding)
        assert logits.shape[:3] == (2, 5, NUM_HEADS) and logits.isfinite().all()


def mapped(*token_map):
    return lambda: MedusaHeads(config_of("token_map"), token_map)


test_heads_that_cannot_be_are_refused = refusals(
    *(
        (f"{name} of {value!r}"[:30], partial(config_of, "shared", **{name: value}), f"{name} ... {rule}")
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers", "path_rank")
        for value in (0, "4", 2.0, True, *([None] if name != "path_rank" else []), 10**30)
        for rule in [f"an int from 1 to ... got {value!r}"]
    ),
    *(
        (f"fused layers {layers!r}"[:30], partial(config_of, "shared", fused_layers=layers),
         "fused_layers ... different ints from 1 to 4096, in ascending")
        for layers in ((0,), (3, 2), (2, 2), ("1",), (1.0,), 3, "12", (10**30,))
    ),
    ("no size", lambda: config_of("token_map", token_map_size=None), "token_map_size=None"),
    ("a size alone", lambda: config_of("shared", token_map_size=5), "'shared', token_map_size=5"),
    ("too few", mapped(1, 2, 3), "5 different ids, got shape (3,)"),
    ("one twice", mapped(1, 2, 3, 4, 4), "5 different ids"),
    ("past the vocabulary", mapped(1, 2, 3, 4, VOCAB_SIZE), "in [0, 21), got 1 to 21"),
    ("below it", mapped(1, 2, 3, 4, -1), "in [0, 21), got -1 to 4"),
    ("floats", mapped(1.0, 2.0, 3.0, 4.5, 5.0), "ids, which are ints, got torch.float32"),
    ("booleans", mapped(*[True] * 5), "ids, which are ints, got torch.bool"),
    ("a huge id", mapped(1, 2, 3, 4, 10**30), "token_map must hold token ids, got"),
    ("words", mapped(*"abcde"), "token_map must hold token ids, got"),
    ("a map for others", lambda: MedusaHeads(config_of("shared"), MAP), "goes with ... 'shared'"),
    ("no path", lambda: heads_of("shared", reads_path=True)(HIDDEN, lm_head()), "pass path"),
    ("a rank alone", lambda: config_of("shared", path_rank=4), "path_rank ... reads_path, got path_rank=4"),
)  # fmt: skip


@pytest.mark.parametrize("path_rank", [None, 4])
def test_a_head_reads_the_tokens_of_its_path_and_none_behind_them(path_rank):
    embedding = lm_head()
    heads = heads_of("shared", is_random=True, reads_path=True, path_rank=path_rank)
    logits = heads(HIDDEN, embedding, PATH)
    for depth in range(1, NUM_HEADS + 1):
        torch.testing.assert_close(
            heads.logits_of(depth - 1, HIDDEN, embedding, PATH[..., :depth]), logits[..., depth - 1, :]
        )
        other = PATH.clone()
        other[..., depth - 1] += 1
        is_same = (heads(HIDDEN, embedding, other % VOCAB_SIZE) == logits).flatten(0, 1).all(-1).all(0)
        assert is_same.tolist() == [index < depth - 1 for index in range(NUM_HEADS)]


def test_fused_layers_are_read_at_unit_size_whatever_the_size_of_their_dimensions():
    heads = heads_of("shared", fused_layers=(2, 5))
    torch.manual_seed(0)
    below = torch.randn(200, 2 * HIDDEN_SIZE)
    sizes = torch.logspace(-2, 3, 2 * HIDDEN_SIZE)
    heads.set_layer_scale(torch.cat([torch.zeros(200, HIDDEN_SIZE), below * sizes], -1))
    torch.testing.assert_close(heads.layer_scale, sizes * below.square().mean(0).sqrt())
    heads.fusion.weight.data.normal_()
    hidden = torch.cat([torch.ones(200, HIDDEN_SIZE), below * sizes], -1)
    unit = (below / below.square().mean(0).sqrt()).unflatten(-1, (2, HIDDEN_SIZE))
    unit = unit / unit.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(heads.fuse(hidden), 1 + unit.flatten(-2) @ heads.fusion.weight.T)
