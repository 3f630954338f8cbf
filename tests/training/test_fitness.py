"""Bases that cannot be trained on the documents at hand are found before training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from transformers import (
    BioGptConfig,
    BioGptForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from medusa import HeadsCheckpoint, load_heads, save_heads
from medusa.base.causal_lm import hidden_states, output_embedding
from medusa.base.logits import logit_scale
from medusa.training.config import DataOptions
from medusa.training.data.dataset import Document, Documents
from medusa.training.recipes.medusa_heads import new_heads
from medusa.training.states.base import LiveStates, check_documents, check_packing
from medusa.training.states.feeds import BaseStates

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LEAKING = {
    "falcon": lambda: FalconForCausalLM(FalconConfig(**SIZES, alibi=False)),
    "biogpt": lambda: BioGptForCausalLM(BioGptConfig(**SIZES)),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    ),
}
SCALED = {
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.0625)),
}


def documents_of(largest: int = 60, length: int = 20) -> Documents:
    random = np.random.default_rng(0)
    lengths = (length, length // 2, length - 3)
    drawn = [random.integers(3, largest, each).astype(np.int32) for each in lengths]
    return Documents.of(Document(tokens, np.ones(len(tokens), dtype=bool)) for tokens in drawn)


@pytest.mark.parametrize("name", LEAKING)
def test_packing_on_a_base_that_lets_documents_see_each_other_is_refused(name):
    torch.manual_seed(0)
    base = LEAKING[name]().eval()
    check_packing(LiveStates(base), documents_of(), DataOptions(data=["x"], packing=False))
    with pytest.raises(ValueError, match=r"packing must keep documents apart.*--packing false"):
        check_packing(LiveStates(base), documents_of(), DataOptions(data=["x"], packing=True))


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "phi", "mixtral-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packing_on_a_base_that_keeps_documents_apart_is_taken(name, dtype):
    base = type(tiny_model(name))(tiny_model(name).config)
    base.load_state_dict(tiny_model(name).state_dict())
    check_packing(LiveStates(base.to(dtype).eval()), documents_of(), DataOptions(data=["x"], packing=True))


def test_tokens_and_lengths_beyond_the_base_are_refused():
    base = tiny_model("llama")  # 61 tokens, 1,024 positions
    check_documents(base, documents_of(), "tiny")
    with pytest.raises(ValueError, match=r"token id \d\d, and its input embedding has 61 rows"):
        check_documents(base, documents_of(largest=99), "tiny")
    with pytest.raises(ValueError, match=r"max_length must be at most 1024.*has 1025 tokens"):
        check_documents(base, documents_of(length=1025), "tiny")


@pytest.mark.parametrize(("name", "scale"), [("granite", 0.125), ("cohere", 0.0625)])
@pytest.mark.parametrize("unembedding", ["shared", "full", "token_map"])
def test_new_heads_give_probabilities_of_the_size_of_the_bases_own(tmp_path, name, scale, unembedding):
    from tiny_training import configuration_of

    torch.manual_seed(0)
    base, documents = SCALED[name]().eval(), documents_of()
    size = {"token_map_size": 61} if unembedding == "token_map" else {}
    configuration = configuration_of(
        base="x", data="x", output_dir="x", max_steps=1, unembedding=unembedding, reads_path=False, **size
    )
    heads = new_heads(configuration, BaseStates.of(base), documents)
    ids = torch.tensor([documents[0].tokens.tolist()])
    with torch.no_grad():
        states, own = hidden_states(base, ids), base(input_ids=ids).logits
        ours = [
            heads(states, output_embedding(base))[:, :, 0],
            heads.logits_of(1, states, output_embedding(base)),
        ]
    for logits in ours:  # untrained, a head is the base's own
        torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
    assert (
        load_heads(save_heads(HeadsCheckpoint(heads, "x"), tmp_path / "h")).heads.config.logit_scale == scale
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_base_that_does_not_scale_has_scale_1(name):
    assert logit_scale(tiny_model(name)) == 1  # gemma3 here caps its logits at 3
