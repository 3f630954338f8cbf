"""Watching drafters, and the length of chains that suits a machine."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import counting_model, random_prompts, tiny_model

from medusa import MedusaModel
from medusa.drafters.registry import DrafterSettings
from medusa.drafters.suffix import SuffixDrafter
from medusa.measurement.contenders import NamedDrafters
from medusa.measurement.draft_length import (
    DraftRecord,
    Probe,
    StepCosts,
    best_draft_length,
    expected_tokens,
    probe_draft_length,
    verification_seconds,
    watched_answer,
)


def test_the_best_length_balances_what_drafts_are_worth_and_what_they_cost():
    """Checked against the formula written out: E / (g * draft + verify(g + 1))."""
    record = DraftRecord(num_steps=100, num_drafted_steps=100, num_accepted=80, num_rejected=20)
    costs = StepCosts(draft_seconds=0.1, verify_seconds=[1 + 0.05 * n for n in range(17)])
    best = best_draft_length(record, costs)
    values = {g: (1 - 0.8 ** (g + 1)) / (1 - 0.8) / (0.1 * g + 1 + 0.05 * g) for g in range(1, 17)}
    assert best.draft_length == max(values, key=lambda g: values[g]) == 5
    assert best.tokens_per_step == pytest.approx(expected_tokens(0.8, 5))
    assert best.speedup == pytest.approx(values[5])


@pytest.mark.parametrize(
    ("accepted", "draft_seconds", "expected"),
    [(100, 0.0, 16), (99, 0.0, 16), (0, 0.1, 1), (50, 0.0, 4), (50, 1.0, 1)],
)
def test_free_and_sure_drafts_are_long_and_dear_or_poor_ones_short(accepted, draft_seconds, expected):
    record = DraftRecord(100, 100, accepted, 100 - accepted)
    costs = StepCosts(draft_seconds, [1 + 0.02 * n for n in range(17)])
    assert best_draft_length(record, costs).draft_length == expected


def test_steps_without_a_draft_count_as_plain_steps():
    record = DraftRecord(num_steps=100, num_drafted_steps=25, num_accepted=150, num_rejected=5)
    costs = StepCosts(0.0, [1.0, *[2.0] * 16], other_seconds=0.5)
    best = best_draft_length(record, costs)
    a = 150 / 155
    assert best.draft_length == 16
    assert best.tokens_per_step == pytest.approx(1 + 0.25 * (expected_tokens(a, 16) - 1))
    assert best.step_seconds == pytest.approx(0.5 + 0.25 * 2.0 + 0.75 * 1.0)
    assert best.plain_step_seconds == 1.5


def test_lengths_that_were_not_timed_are_refused():
    record = DraftRecord(10, 10, 5, 5)
    with pytest.raises(ValueError, match="verify_seconds must reach 17 nodes, got 4"):
        best_draft_length(record, StepCosts(0.1, [1.0] * 4))
    assert best_draft_length(record, StepCosts(0.1, [1.0] * 4), max_length=3).draft_length <= 3
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        best_draft_length(record, StepCosts(0.1, [1.0] * 4), max_length=0)


def test_the_acceptance_of_a_simulated_chain_is_recovered():
    """5,000 steps of chains of 4 at a = 0.7; the estimate's standard error is about 0.004."""
    generator = torch.Generator().manual_seed(0)
    hits = torch.rand(5000, 4, generator=generator) < 0.7
    record = DraftRecord()
    for accepted in hits.long().cumprod(1).sum(1).tolist():
        record += DraftRecord.of_step([*range(1, accepted + 1), 0], draft_depth=4)
    assert record.acceptance_rate == pytest.approx(0.7, abs=0.016)
    measured = 1 + record.num_accepted / record.num_steps
    assert record.expected_tokens(4) == pytest.approx(measured, abs=0.05)


def test_a_step_is_recorded_as_what_was_judged():
    of_step = DraftRecord.of_step
    assert of_step([1, 2, 0], 4) == DraftRecord(1, 1, 2, 1), "stopped by a rejected token"
    assert of_step([1, 2, 0], 2) == DraftRecord(1, 1, 2, 0), "stopped by the end of the chain"
    assert of_step([1, 2], 4) == DraftRecord(1, 1, 2, 0), "cut by the end of the answer"
    assert of_step([0], 0) == DraftRecord(1, 0, 0, 0), "nothing drafted"
    assert DraftRecord().acceptance_rate == DraftRecord().drafted_share == 0.0


def test_a_verification_is_timed_for_every_number_of_nodes():
    model = MedusaModel(tiny_model("gemma3"))
    seconds = verification_seconds(model, {"input_ids": random_prompts(1, 9)}, max_nodes=6, rounds=2)
    assert len(seconds) == 6
    assert all(time > 0 for time in seconds)


# ------------------------------------------------------------------ watching


def counting_answer(length: int = 5, max_new_tokens: int = 61):
    """A base that counts modulo 16; after 16 tokens a suffix match is always right."""
    return watched_answer(
        MedusaModel(counting_model(16)),
        {"input_ids": torch.tensor([[3]])},
        SuffixDrafter(length, min_match=1),
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )


def test_what_is_drafted_in_an_answer_is_counted_and_timed():
    found, statistics = counting_answer()
    assert statistics.accepted_histogram == [15, 0, 1, 0, 0, 7]
    assert (found.num_steps, found.num_drafted_steps, found.num_rejected) == (23, 8, 0)
    assert found.num_accepted == 7 * 5 + 3
    assert len(found.token_seconds) == 8


def test_a_batch_is_watched_row_by_row():
    model = MedusaModel(counting_model(16))
    prompts = [torch.tensor([[3]]), torch.tensor([[9]])]

    def record(ids):
        options = {"do_sample": False, "max_new_tokens": 40}
        return watched_answer(model, {"input_ids": ids}, SuffixDrafter(5, min_match=1), **options)[0]

    both, alone = record(torch.cat(prompts)), [record(prompt) for prompt in prompts]
    assert both.num_accepted == sum(each.num_accepted for each in alone) > 0
    assert both.num_steps == sum(each.num_steps for each in alone)


def probe(base, name: str, settings: DrafterSettings, **options) -> Probe:
    model = MedusaModel(base)
    drafters = NamedDrafters([name], model, settings)
    prompts = [{"input_ids": random_prompts(1, 6, seed=seed)} for seed in range(2)]
    costs = [1.0, *[1.2] * 16]
    new = partial(drafters.new, name, only_chain=True)
    return probe_draft_length(model, new, prompts, costs, do_sample=False, **options)


def test_a_perfect_draft_model_is_probed_as_perfect():
    found = probe(
        tiny_model("llama"),
        "draft-model",
        DrafterSettings(draft_model=tiny_model("llama")),
        max_new_tokens=22,
    )
    assert (found.record.acceptance_rate, found.record.drafted_share) == (1.0, 1.0)
    assert found.record.num_steps == 10
    assert found.costs.draft_seconds > 0
    assert found.choice.draft_length == 16, "verification costs a second here, a draft token milliseconds"


def test_without_a_draft_no_length_is_chosen_and_without_a_step_it_is_an_error():
    settings = DrafterSettings()
    drafted_nothing = probe(counting_model(64), "suffix", settings, max_new_tokens=3)
    assert drafted_nothing.record.num_drafted_steps == 0
    assert drafted_nothing.choice is None
    with pytest.raises(ValueError, match="every answer ended with its first token"):
        probe(counting_model(64), "suffix", settings, max_new_tokens=1)


def test_expected_tokens_is_the_geometric_sum():
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(1 - 1e-12, 7) == pytest.approx(8)
    assert expected_tokens(0.5, 0) == 1


@pytest.mark.parametrize(("rate", "length"), [(1.2, 3), (-0.1, 3), (float("nan"), 3), (0.5, -1)])
def test_expected_tokens_refuses_what_is_no_rate_or_length(rate, length):
    with pytest.raises(ValueError, match=r"acceptance_rate must be in|draft_length must be at least 0"):
        expected_tokens(rate, length)
