"""Teacher rows are the base model's own logits, whatever the architecture does to them."""

from __future__ import annotations

import pytest
import torch
from conftest import ARCHITECTURES, random_prompts, tiny_model

from medusa.base.causal_lm import hidden_states
from medusa.training.losses.targets import teacher_of


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("token_map", [None, torch.tensor([4, 9, 33])], ids=["all tokens", "token map"])
@torch.no_grad()
def test_the_teacher_gives_the_logits_of_the_base(architecture, token_map):
    base, tokens = tiny_model(architecture), random_prompts(2, 9)
    expected = base(input_ids=tokens).logits.flatten(0, 1)
    states = hidden_states(base, tokens).flatten(0, 1)
    logits = teacher_of(base, token_map)(states)
    torch.testing.assert_close(logits, expected if token_map is None else expected[:, token_map])


def test_nothing_stays_attached_to_the_base():
    base = tiny_model("gemma3")
    teacher_of(base)(torch.zeros(2, 32))
    assert not base.get_output_embeddings()._forward_pre_hooks
