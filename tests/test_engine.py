"""The packed engine computes what the eager one computes, and leaves the base alone."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB_SIZE, left_padded, random_prompts, tiny_model

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.engine import PackedLinear, can_pack, packed, prepared_base

needs_packing = pytest.mark.skipif(
    not can_pack(tiny_model("llama")), reason="this torch has no oneDNN to pack weights with"
)


@needs_packing
@pytest.mark.parametrize("architecture", ["llama", "phi", "gemma3", "gpt-neox", "mixtral-moe"])
def test_packed_logits_equal_eager_ones(architecture):
    base = tiny_model(architecture)
    for num_tokens in (1, 2, 16, 100):
        ids = random_prompts(2, num_tokens)
        with torch.no_grad():
            assert torch.allclose(packed(base)(ids).logits, base(ids).logits, atol=1e-4)


@needs_packing
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_decoding_on_the_packed_engine_is_token_identical(temperature):
    base = tiny_model("llama")
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3))
    tree = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
    options = {"do_sample": temperature > 0, "seed": 2, "max_new_tokens": 20}
    if temperature:
        options["temperature"] = temperature
    batch = left_padded(random_prompts(3, 14), [14, 2, 9])
    eager = MedusaModel(base).generate(**batch, **options)
    fast = MedusaModel(base, heads, tree, engine="packed")
    assert fast.generate(**batch, **options).tolist() == eager.tolist()
    assert fast.base is base and fast.runner is not base


@needs_packing
def test_packing_shares_parameters_and_leaves_the_base_as_it_was():
    base = tiny_model("llama")
    clone = packed(base)
    assert {id(p) for p in clone.parameters()} == {id(p) for p in base.parameters()}
    assert any(isinstance(module, PackedLinear) for module in clone.modules())
    assert not any(isinstance(module, PackedLinear) for module in base.modules())
    assert clone.get_output_embeddings().weight is base.get_output_embeddings().weight


def test_auto_falls_back_to_eager_where_packing_does_not_apply():
    base = tiny_model("phi").to(torch.bfloat16)
    try:
        assert prepared_base(base, "auto") is base
        with pytest.raises(ValueError, match=r"needs a float32 model on the CPU .* got torch.bfloat16"):
            prepared_base(base, "packed")
    finally:
        base.to(torch.float32)


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match=r"engine must be one of .*'eager', 'packed'.*, got 'warp'"):
        MedusaModel(tiny_model("llama"), engine="warp")
