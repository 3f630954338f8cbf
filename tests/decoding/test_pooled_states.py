"""Embeddings beside the hidden states of transformers, for texts that are read in any parts."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from stateful_models import stateful_model

from medusa import MedusaModel
from medusa.base.pooling import Pooling

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def embedded(model: MedusaModel, pooling: Pooling, part: int) -> torch.Tensor:
    states = model.pooled_states(IDS, pooling)
    while states.num_left:
        states.read(part)
    return states.vector()


def reference(base, pooling: Pooling) -> torch.Tensor:
    """From the states after the last norm."""
    with torch.no_grad():
        states = base.get_decoder()(input_ids=torch.tensor([IDS])).last_hidden_state[0]
    vector = states.mean(dim=0) if pooling.kind == "mean" else states[-1]
    return vector / vector.norm() if pooling.is_normalised else vector


@pytest.mark.parametrize("part", [1, 4, 100])
@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt-neox"])
def test_an_embedding_is_pooled_from_the_states_of_transformers(architecture, kind, is_normalised, part):
    base = tiny_model(architecture)
    pooling = Pooling(kind, is_normalised)
    vector = embedded(MedusaModel(base), pooling, part)
    assert vector.dtype == torch.float32 and vector.shape == (base.config.hidden_size,)
    torch.testing.assert_close(vector, reference(base, pooling), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["lfm2", "mamba2"])
def test_a_base_that_keeps_a_state_is_read_in_parts_too(model_type):
    base = stateful_model(model_type)
    for kind in ("mean", "last"):
        vector = embedded(MedusaModel(base), Pooling(kind), 4)
        torch.testing.assert_close(vector, reference(base, Pooling(kind)), rtol=1e-4, atol=1e-5)
