"""Plans lose no document, pad little, repeat exactly; packing changes no loss."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES, SLIDING_WINDOW, SWITCH, VOCAB_SIZE, longrope_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa import HeadsConfig, MedusaHeads
from medusa.base.causal_lm import lm_head
from medusa.base.profile import longrope_threshold
from medusa.training.config import DataOptions, LossOptions
from medusa.training.data.batching import MicroBatch, collate, plan_epoch, plan_in_order
from medusa.training.data.dataset import Document, Documents
from medusa.training.losses import add_metrics
from medusa.training.recipes.recipe import HeadsLoss, LossSums
from medusa.training.states.base import OnlineHiddenStates, check_packing
from medusa.training.states.stored import HiddenStateSource

ROW = 64
LENGTHS = st.lists(st.integers(2, ROW), min_size=1, max_size=60)


def documents_of(lengths: list[int], seed: int = 0) -> Documents:
    """Random documents; about half of their tokens are labels."""
    random = np.random.default_rng(seed)
    return Documents.of(
        Document(random.integers(3, VOCAB_SIZE, length).astype(np.int32), random.random(length) < 0.5)
        for length in lengths
    )


def in_plan(plan: list[MicroBatch]) -> list[int]:
    return [index for batch in plan for row in batch for index in row]


@settings(deadline=None, max_examples=60)
@given(lengths=LENGTHS, packing=st.booleans(), tokens=st.integers(1, 400), epoch=st.integers(0, 3))
def test_every_document_is_in_an_epoch_once_and_no_batch_is_too_large(lengths, packing, tokens, epoch):
    options = DataOptions(tokens_per_batch=tokens, packing=packing, max_length=ROW, seed=1)
    plan = plan_epoch(np.array(lengths), options, epoch=epoch)
    assert sorted(in_plan(plan)) == list(range(len(lengths)))
    for batch in plan:
        width = max(sum(lengths[index] for index in row) for row in batch)
        assert width <= ROW
        assert len(batch) * width <= tokens or len(batch) == 1


def test_the_same_seed_and_epoch_give_the_same_plan_and_another_epoch_another():
    lengths = np.random.default_rng(0).integers(2, 50, 200)
    options = DataOptions(tokens_per_batch=128, seed=4)
    first = plan_epoch(lengths, options, epoch=0)
    assert plan_epoch(lengths, options, epoch=0) == first
    assert plan_epoch(lengths, options, epoch=1) != first
    assert plan_epoch(lengths, dataclasses.replace(options, seed=5), epoch=0) != first


def test_documents_of_like_length_share_a_batch():
    lengths = np.random.default_rng(0).integers(10, 1000, 2000)
    plan = plan_epoch(lengths, DataOptions(tokens_per_batch=8192), epoch=0)
    padded = sum(len(batch) * max(lengths[row[0]] for row in batch) for batch in plan)
    assert padded < 1.1 * lengths.sum()
    shuffled = [lengths[batch[0][0]] for batch in plan]
    assert np.corrcoef(shuffled, np.arange(len(shuffled)))[0, 1] < 0.5


def test_packed_rows_are_nearly_full():
    lengths = np.random.default_rng(0).integers(10, 300, 2000)
    plan = plan_epoch(lengths, DataOptions(packing=True), epoch=0)
    assert sum(len(batch) for batch in plan) * 1024 < 1.05 * lengths.sum()


def test_evaluation_takes_every_document():
    documents = documents_of([5, 60, 9, 33])
    assert sorted(in_plan(plan_in_order(documents.lengths, DataOptions(tokens_per_batch=64)))) == [0, 1, 2, 3]


def test_positions_restart_at_each_document_and_behind_the_last_of_several():
    batch = collate(documents_of([3, 2, 7]), [[0, 1], [2]])
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert not batch.is_label[0, 5:].any()


def test_padding_behind_one_document_needs_no_mask():
    batch = collate(documents_of([3, 5]), [[0], [1]])
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_documents_have_the_losses_of_documents_alone(architecture):
    base = tiny_model(architecture)
    documents = documents_of([40, 5, SLIDING_WINDOW + 30, 17, 2])
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    states, loss = HiddenStateSource.of(base), HeadsLoss(heads, LossOptions())

    @torch.no_grad()
    def sums_of(plan: list[MicroBatch]) -> LossSums:
        total = LossSums.zeros(3)
        for batch in plan:
            rows, padded = states.of_batch(documents, "training", batch, ())
            given = rows, padded.aligned(3), lm_head(base), torch.ones(3)
            total = add_metrics(total, loss(*given)[1])
        return total

    alone = sums_of([[[index]] for index in range(5)])
    padded = sums_of([[[0], [1], [2], [3], [4]]])
    packed = sums_of([[[0, 1, 3], [2, 4]]])
    assert alone.num_labels.sum() > 100
    for sums in (padded, packed):
        torch.testing.assert_close(sums.loss, alone.loss, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(sums.weighted, alone.weighted, rtol=1e-5, atol=1e-4)
        for ours, theirs in zip(sums[2:], alone[2:], strict=True):
            assert torch.equal(ours, theirs)
    assert alone.num_scored.tolist() == documents.num_scored(3).sum(0).tolist()


@pytest.mark.parametrize("plan", [plan_in_order, lambda *given: plan_epoch(*given[:2], 0, *given[2:])])
@torch.no_grad()
def test_a_longrope_base_reads_every_document_as_it_does_alone(plan):
    base, documents = longrope_model(), documents_of([SWITCH, 9, SWITCH + 1, 40, SWITCH - 2, 12])
    batches = plan(documents.lengths, DataOptions(tokens_per_batch=400), longrope_threshold(base))
    assert sorted(in_plan(batches)) == list(range(6))
    assert len(batches) == 2, "one for each side"
    for batch in batches:
        states = OnlineHiddenStates(base)(collate(documents, batch))
        for row, (index,) in zip(states, batch, strict=True):
            alone = OnlineHiddenStates(base)(collate(documents, [[index]]))[0]
            torch.testing.assert_close(row[: len(alone)], alone, rtol=1e-4, atol=1e-4)


def test_packing_past_the_switch_of_a_longrope_base_is_refused():
    live, documents = OnlineHiddenStates(longrope_model()), documents_of([9, 12])
    with pytest.raises(ValueError, match=rf"max_length of at most {SWITCH}, got 25: .* --packing false, or"):
        check_packing(live, documents, DataOptions(packing=True, max_length=SWITCH + 1))
    options = DataOptions(packing=True, max_length=SWITCH, tokens_per_batch=400)
    check_packing(live, documents, options)
    several = documents_of([20, 9, 4, 24])
    (batch,) = plan_epoch(several.lengths, options, 0)
    padded = collate(several, batch)
    assert int(padded.positions.max()) < SWITCH
