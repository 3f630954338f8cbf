"""Heads say which base they were trained on: another one of equal sizes is named, every copy of it passes."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace

import pytest
import torch
from conftest import ARCHITECTURES, tiny_model
from tiny_chat import chat_base, chat_heads, chat_model, wide_tree
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import HeadsCheckpoint, MedusaModel, load_heads, save_heads
from medusa.assets import EMBEDDED_BASE, shipped_heads
from medusa.drafters.registry import DrafterFactory, DrafterSettings
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.heads.fingerprint import BaseFingerprint

ANOTHER = r"trained on another model \('tiny'\) than the base .*its LM head is 1\d\d\.\d% away"


@pytest.fixture
def saved(tmp_path):
    """Heads that say which base they were trained on."""
    checkpoint = HeadsCheckpoint(
        chat_heads(), "tiny", wide_tree(), fingerprint=BaseFingerprint.of(chat_base())
    )
    return save_heads(checkpoint, tmp_path / "heads")


def loads_without_a_word(base, heads) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MedusaModel.from_pretrained(base, heads, engine="eager")


def test_another_base_of_the_same_sizes_is_warned_of(saved):
    with pytest.warns(UserWarning, match=ANOTHER):
        MedusaModel.from_pretrained(chat_base(seed=1), saved)


def moved_base(share: float) -> LlamaForCausalLM:
    """The base with noise on its weights, of this share of their size."""
    base = chat_base()
    with torch.no_grad():
        for each in base.parameters():
            noise = torch.randn(each.shape, generator=torch.Generator().manual_seed(0))
            each.add_(share * each.std() * noise)
    return base


@pytest.mark.parametrize("share", [0.03, 0.3])
def test_a_finetuned_base_is_told_from_another_model(saved, share):
    with pytest.warns(UserWarning, match="was trained further than.*some guesses are lost; `medusa learn"):
        MedusaModel.from_pretrained(moved_base(share), saved)


def test_a_base_is_the_same_a_finetuned_one_or_another(saved):
    fingerprint = load_heads(saved).fingerprint
    quantised = replace(fingerprint, is_quantised=True)
    kinds = {
        "same": fingerprint.kinship(chat_base()),
        "finetuned": fingerprint.kinship(moved_base(0.3)),
        "other": fingerprint.kinship(chat_base(seed=1)),
        "unknown": replace(fingerprint, sample=None).kinship(chat_base()),
        "quantised": quantised.kinship(moved_base(0.1)),
    }
    assert {name: kinship.kind for name, kinship in kinds.items()} == {name: name for name in kinds}
    assert {name for name, kinship in kinds.items() if kinship.difference} == {"finetuned", "other"}
    assert re.search(r"\(its LM head is \d\d\.\d% away from theirs\): some", kinds["finetuned"].described)


def test_a_base_of_another_shape_of_equal_sizes_is_warned_of(saved):
    base = LlamaForCausalLM(LlamaConfig(**{**chat_base().config.to_dict(), "num_hidden_layers": 1})).eval()
    base.load_state_dict(chat_base().state_dict(), strict=False)
    with pytest.warns(UserWarning, match="num_hidden_layers was 2 and is 1. The text stays the base's own"):
        MedusaModel.from_pretrained(base, saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_cast_of_the_same_base_passes(saved, dtype):
    loads_without_a_word(chat_base().to(dtype), saved)


def test_blocks_of_8_bits_pass():
    """What a GGUF file of type Q8_0 makes of a base."""
    base = tiny_model("llama")
    fingerprint, rows = BaseFingerprint.of(base), base.get_output_embeddings().weight.detach().clone()
    scale = rows.abs().amax(1, keepdim=True) / 127
    rounded = LlamaForCausalLM(base.config)
    rounded.load_state_dict({**base.state_dict(), "lm_head.weight": (rows / scale).round() * scale})
    assert fingerprint.difference(rounded) is None


def test_heads_without_a_fingerprint_and_bases_that_cannot_be_read_pass(saved, tmp_path):
    silent = save_heads(HeadsCheckpoint(chat_heads(), "tiny"), tmp_path / "silent")
    assert "base_fingerprint" not in json.loads((silent / "config.json").read_text())
    loads_without_a_word(chat_base(seed=1), silent)
    quantised = chat_base(seed=1)
    weight = quantised.get_output_embeddings().weight
    quantised.get_output_embeddings().weight = torch.nn.Parameter(weight.to(torch.int8), requires_grad=False)
    assert BaseFingerprint.of(quantised).sample is None
    again = load_heads(save_heads(load_heads(saved), tmp_path / "again"))
    assert again.fingerprint == load_heads(saved).fingerprint == BaseFingerprint.of(chat_base())
    assert again.fingerprint.difference(quantised) is None
    assert BaseFingerprint.of(quantised).difference(chat_base()) is None


def test_an_eagle3_head_of_another_base_is_warned_of(tmp_path):
    head = Eagle3Head(Eagle3Config.of_base(chat_base(), fused_layers=(1,)))
    fingerprint = BaseFingerprint.of(chat_base(seed=1))
    path = save_heads(HeadsCheckpoint(head, "tiny", fingerprint=fingerprint), tmp_path / "eagle3")
    with pytest.warns(UserWarning, match=ANOTHER):
        DrafterFactory(chat_model(), DrafterSettings(eagle3=str(path))).make("eagle3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_fingerprint_survives_its_file_and_knows_its_own_base(architecture):
    base = tiny_model(architecture)
    written = json.loads(json.dumps(BaseFingerprint.of(base).as_json()))
    read = BaseFingerprint.from_json(written, "config.json")
    assert read == BaseFingerprint.of(base)
    assert len(read.sample) == 64 and read.configuration["num_hidden_layers"] == 2
    assert read.difference(base) is None


def test_shipped_heads_know_the_embedded_base(real_base):
    for name in shipped_heads():
        fingerprint = load_heads(name).fingerprint
        assert fingerprint is not None and fingerprint.sample is not None
        assert (fingerprint.difference(real_base) is None) == (name == EMBEDDED_BASE)
