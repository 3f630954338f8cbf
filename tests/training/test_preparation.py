"""A base that heads are of no use for is refused before anything is written."""

from __future__ import annotations

import pytest
import torch
from conftest import ARCHITECTURES, tiny_model
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from medusa.training.config.options import BaseOptions
from medusa.training.run.base import check_causal, load_base

BASES = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    ),
}
MESSAGES = {
    "t5": "a t5 model; choose a decoder-only one",
    "bert": "whose states depend on tokens behind them",
}


@pytest.mark.parametrize("name", BASES)
def test_a_base_that_is_not_causal_is_refused(tmp_path, name):
    BASES[name]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"base must be a causal language model.*{MESSAGES[name]}"):
        load_base(BaseOptions(str(tmp_path)), torch.device("cpu"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_causal_base_is_not_refused(architecture):
    check_causal(tiny_model(architecture), architecture)
