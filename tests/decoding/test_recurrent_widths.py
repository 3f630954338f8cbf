"""Bases that keep a state at their real widths, from random files: real sizes round, and run out of memory,
where tiny ones do not."""

from __future__ import annotations

import pytest
import torch
from bench.random_shapes import HYBRIDS, write_hybrid
from conftest import needs_kernels

from medusa import CandidateTree, MedusaModel
from medusa.decoding.batch import BatchLimits, Row
from medusa.heads.mtp import can_draft_itself

NEW_TOKENS = 24


def drawn(num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 60000, (1, num_tokens), generator=generator)


@pytest.fixture(scope="module", params=["Granite-4-H-1B", "LFM2.5-1.2B", "Qwen3.5-0.8B"])
def model(request, tmp_path_factory) -> MedusaModel:
    """The model of a file, with the layers that it drafts with where it brings some."""
    assert request.param in HYBRIDS
    path = tmp_path_factory.mktemp("wide") / "Q4_K_M.gguf"
    write_hybrid(request.param, path)
    model = MedusaModel.from_pretrained(str(path))
    if can_draft_itself(model.base.config):
        model = MedusaModel.from_pretrained(model.base, "mtp")
    return model


def plain(model: MedusaModel, text: torch.Tensor, **options) -> torch.Tensor:
    return model.generate(text, max_new_tokens=NEW_TOKENS, tree=CandidateTree.chain(0), **options)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "seed": 3, "top_k": 40}])
def test_the_default_drafts_write_what_plain_decoding_does(model, options):
    words = drawn(70, 0)
    text = torch.cat([words, words[:, :40]], dim=1)  # from which guesses are copied
    coming = plain(model, text, **options)
    assert torch.equal(model.generate(text, max_new_tokens=NEW_TOKENS, **options), coming)
    answer = coming[0, text.shape[1] :].tolist()
    answer[5] += 1  # a right guess, and then a wrong one
    predicted = model.generate(text, max_new_tokens=NEW_TOKENS, prediction=[answer], **options)
    assert torch.equal(predicted, coming)


@needs_kernels
@pytest.mark.slow
def test_texts_go_on_from_states_that_earlier_ones_left(model):
    batch = model.continuous_batch(BatchLimits(prefix_bytes=2**30))
    beginning = drawn(600, 1)
    texts = [torch.cat([beginning, drawn(30, seed)], dim=1) for seed in (2, 3)]
    texts.append(torch.cat([texts[1], drawn(9, 4)], dim=1))
    reused = []
    for text in texts:
        mask = torch.ones_like(text)
        row = Row(model.request(text, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False))
        batch.add(row)
        while batch.is_busy:
            batch.step()
        assert row.tokens == plain(model, text, do_sample=False)[0, text.shape[1] :].tolist()
        reused.append(row.num_reused)
    assert reused == [0, 512, texts[1].shape[1]]
