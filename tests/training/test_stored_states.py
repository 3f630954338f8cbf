"""States from the file give the losses of the base itself, and a stale file is not used."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import VOCAB_SIZE, tiny_model
from rich.console import Console

from medusa import HeadsConfig, MedusaHeads
from medusa.base.causal_lm import output_embedding
from medusa.files import read_json
from medusa.progress import ProgressReporter
from medusa.training.config.options import DataOptions, LossOptions
from medusa.training.data.documents import Document, Documents
from medusa.training.losses.teacher import teacher_of
from medusa.training.recipes.medusa_heads import HeadsLoss
from medusa.training.states.feeds import FeatureFeed, StateFeed
from medusa.training.states.stored_states import (
    StateFile,
    states_size,
    store_states,
)

NUM_HEADS = 3
BATCH = [[[4], [0]], [[2], [1]]]


def documents_of(seed: int = 0) -> Documents:
    random = np.random.default_rng(seed)
    return Documents.of(
        Document(random.integers(3, VOCAB_SIZE, length).astype(np.int32), np.arange(length) >= length // 2)
        for length in (30, 4, 25, 60, 2)
    )


def fill(directory: Path, documents: Documents, dtype: str = "float32", layers=()) -> StateFeed:
    base = tiny_model("llama")
    line = ProgressReporter("states", Console(quiet=True))
    store_states(directory, base, documents, NUM_HEADS, dtype, DataOptions(tokens_per_batch=64), line, layers)
    file = StateFile(directory, documents, NUM_HEADS)
    return StateFeed(base, documents, NUM_HEADS, layers=layers, stored=file)


def losses(source: StateFeed, layers=()) -> torch.Tensor:
    """(2, K) sums of the KL objective, which reads the base's own rows as well."""
    base = tiny_model("llama")
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, NUM_HEADS, fused_layers=layers))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    module = HeadsLoss(heads, LossOptions("kl"))
    with torch.no_grad():
        results = [
            module(*source(batch), output_embedding(base), torch.ones(NUM_HEADS), teacher_of(base))[1]
            for batch in BATCH
        ]
    return torch.stack([sums.loss for sums in results])


@pytest.mark.parametrize("layers", [(), (1, 2)], ids=["last state", "layers too"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 3e-3)])
def test_stored_states_give_the_losses_of_the_base(tmp_path, dtype, tolerance, layers):
    documents = documents_of()
    live = losses(StateFeed(tiny_model("llama"), documents, NUM_HEADS, layers=layers), layers)
    assert live.min() > 1
    stored = losses(fill(tmp_path, documents, dtype, layers), layers)
    torch.testing.assert_close(stored, live, rtol=tolerance, atol=tolerance)


def test_only_states_that_predict_a_label_are_stored(tmp_path):
    documents = documents_of()
    fill(tmp_path, documents)
    size = (tmp_path / "states.bin").stat().st_size
    assert size == states_size(tiny_model("llama"), documents, NUM_HEADS, "float32")
    assert size < documents.num_tokens * 32 * 4


@pytest.mark.parametrize("batch", [[[4], [0]], [[2, 1], [3, 4]], []], ids=["padded", "packed", "empty"])
def test_stored_features_are_those_of_the_base(tmp_path, batch):
    base, documents = tiny_model("llama"), documents_of()
    line = ProgressReporter("states", Console(quiet=True))
    store_states(tmp_path, base, documents, None, "float32", DataOptions(tokens_per_batch=64), line)
    assert (tmp_path / "states.bin").stat().st_size == documents.num_tokens * 32 * 4
    file = StateFile(tmp_path, documents, None)
    (stored, stored_alignment) = FeatureFeed(base, documents, NUM_HEADS, stored=file)(batch)
    (live, live_alignment) = FeatureFeed(base, documents, NUM_HEADS)(batch)
    assert torch.equal(stored_alignment.sources, live_alignment.sources)
    assert torch.equal(stored.next_embeddings, live.next_embeddings)
    for row, indices in enumerate(batch):  # padding has a state of its own in a live batch
        end = int(documents.lengths[indices].sum())
        torch.testing.assert_close(stored.features[row, :end], live.features[row, :end])


def test_an_empty_batch_has_no_targets(tmp_path):
    states, alignment = fill(tmp_path, documents_of())([])
    assert states.shape == (0, 32)
    assert alignment.sources.shape == (NUM_HEADS + 1, 0)


def test_a_file_of_the_same_documents_is_used_again(tmp_path):
    fill(tmp_path, documents_of())
    made = (tmp_path / "states.bin").stat().st_mtime_ns
    fill(tmp_path, documents_of())
    assert (tmp_path / "states.bin").stat().st_mtime_ns == made


@pytest.mark.parametrize("change", ["documents", "dtype", "layers"])
def test_a_file_of_something_else_is_made_anew(tmp_path, change):
    fill(tmp_path, documents_of())
    documents = documents_of(seed=1 if change == "documents" else 0)
    dtype = "float16" if change == "dtype" else "float32"
    layers = (1,) if change == "layers" else ()
    live = losses(StateFeed(tiny_model("llama"), documents, NUM_HEADS, layers=layers), layers)
    stored = losses(fill(tmp_path, documents, dtype, layers), layers)
    torch.testing.assert_close(stored, live, rtol=3e-3, atol=3e-3)


def test_a_file_of_another_precision_is_made_anew(tmp_path):
    documents = documents_of()
    fill(tmp_path, documents)
    in_float32 = (tmp_path / "states.bin").read_bytes()
    with torch.autocast("cpu", torch.bfloat16):
        fill(tmp_path, documents)
    assert read_json(tmp_path / "states.json")["arithmetic"] == "torch.bfloat16"
    assert (tmp_path / "states.bin").read_bytes() != in_float32
    fill(tmp_path, documents)
    assert (tmp_path / "states.bin").read_bytes() == in_float32


def test_a_file_that_was_not_finished_is_not_used(tmp_path, monkeypatch):
    documents = documents_of()
    with monkeypatch.context() as patch:
        patch.setattr("medusa.training.states.stored_states.frozen_states", lambda *_: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            fill(tmp_path, documents)
    assert not (tmp_path / "states.json").exists()
    live = losses(StateFeed(tiny_model("llama"), documents, NUM_HEADS))
    torch.testing.assert_close(losses(fill(tmp_path, documents)), live)


def test_a_disk_with_too_little_room_is_noticed_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100))
    with pytest.raises(OSError, match=r"cache_hidden_states needs .* GiB in .* choose cache_dtype=bfloat16"):
        fill(tmp_path, documents_of())
    assert not list(tmp_path.iterdir())
