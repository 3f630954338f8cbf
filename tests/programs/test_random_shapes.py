"""Random models of a shape load as trained ones of it do."""

from dataclasses import replace

import pytest
import torch
from bench import random_shapes
from bench.random_shapes import MIXTURES, SHAPES, write_gguf, write_mixture, write_shape
from conftest import needs_kernels, random_prompts
from tiny_chat import save_chat_model

from medusa.engine.weights.load import load_base

pytestmark = needs_kernels
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
SMALL = {
    "num_layers": 2,
    "hidden": 256,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 4,
    "num_chosen": 2,
    "expert_width": 256,
    "vocab_size": 300,
}


def logits_of(path):
    base = load_base(path, "auto")
    with torch.no_grad():
        logits = base(random_prompts(1, 5)).logits
    assert logits.isfinite().all()
    assert logits.std() > 0
    return logits


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_loads_from_its_file(name, tmp_path, monkeypatch):
    monkeypatch.setitem(MIXTURES, name, replace(MIXTURES[name], **SMALL))
    write_mixture(name, tmp_path / "mixture.gguf")
    assert logits_of(tmp_path / "mixture.gguf").shape == (1, 5, 300)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_dense_shape_loads_from_its_directory_and_its_files(is_tied, tmp_path, monkeypatch):
    shape = "1B" if is_tied else "8B"
    monkeypatch.setitem(SHAPES, shape, SIZES)
    monkeypatch.setattr(random_shapes, "VOCABULARY", 300)
    save_chat_model(tmp_path / "tokenizer")
    write_shape(shape, tmp_path / "model", tmp_path / "tokenizer")
    for kind in ("BF16", "Q4_K_M"):
        write_gguf(tmp_path / "model", tmp_path / f"{kind}.gguf", kind)
    sources = "model", "BF16.gguf", "Q4_K_M.gguf"
    assert {logits_of(tmp_path / each).shape for each in sources} == {(1, 5, 300)}
