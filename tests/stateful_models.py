"""Tiny random models that keep a state, and how their answers are compared."""

from __future__ import annotations

import functools

import torch
from conftest import program
from torch import Tensor
from transformers import CONFIG_MAPPING

stateful_types = program("scripts/stateful_types.py")
DECODABLE = sorted(
    set(stateful_types.TINY)
    - {"deepseek_v4", "falcon_mamba", "jamba", "mamba", "minimax", "nemotron_h", "qwen4_exp_text"}
    - {"recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"}
    - {each for each in stateful_types.TINY if each not in CONFIG_MAPPING}
)
"""The ``model_type`` of those that are not refused, as far as this ``transformers`` has them."""
TIE = 1e-4
"""Two logits that lie nearer to each other may change places: our plain decoding lays keys and values out
otherwise than ``transformers`` and so rounds otherwise. The logits range over about 10."""


@functools.cache
def stateful_model(model_type: str, **settings):
    """A random float32 model, the same one every time."""
    return stateful_types.tiny_model(model_type, **settings)


def model_of_twins(model_type: str):
    """A model that scores every token of the lower half of its vocabulary all but as high as one of the upper
    half, so that what rounds otherwise soon writes another text."""
    model = stateful_types.tiny_model(model_type)
    weight = model.get_output_embeddings().weight
    half = len(weight) // 2
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        weight[half : 2 * half] = weight[:half] * (1 + 1e-6 * torch.randn(half, 1))
    return model


def turned_at_a_tie(base, ours: Tensor, theirs: Tensor, prompt_length: int) -> bool:
    """Whether two greedy answers (1, T) long differ, which they may do first where two logits tie.

    Raises:
        AssertionError: they differ first elsewhere.
    """
    if torch.equal(ours, theirs):
        return False
    shared = min(ours.shape[1], theirs.shape[1])
    first = int((ours[0, :shared] != theirs[0, :shared]).int().argmax())
    assert first >= prompt_length
    with torch.no_grad():
        logits = base(input_ids=theirs[:, :first], use_cache=False).logits[0, -1]
    best = logits.topk(2)
    assert float(best.values[0] - best.values[1]) < TIE, f"token {first} is another one"
    assert {int(ours[0, first]), int(theirs[0, first])} <= set(best.indices.tolist())
    return True
