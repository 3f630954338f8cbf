"""Watching drafters, and the length of chains that suits a machine."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB_SIZE, counting_model, random_prompts, tiny_model

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.drafters.registry import Drafters, DrafterSettings, draft_sources
from medusa.drafters.suffix import SuffixDrafter
from medusa.measurement.draft_length import DraftRecord, StepCosts, best_draft_length, expected_tokens
from medusa.measurement.watching import (
    Probe,
    interpolated,
    probe_draft_length,
    step_record,
    verification_seconds,
    watched_answer,
)


def model_with_heads() -> MedusaModel:
    base = tiny_model("llama")
    heads = MedusaHeads(HeadsConfig(base.config.hidden_size, VOCAB_SIZE, num_heads=3))
    return MedusaModel(base, heads, CandidateTree.from_paths([(0,), (1,), (0, 0), (1, 0)]))


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
        record += step_record([*range(1, accepted + 1), 0], draft_depth=4)
    assert record.acceptance_rate == pytest.approx(0.7, abs=0.016)
    measured = 1 + record.num_accepted / record.num_steps
    assert record.expected_tokens(4) == pytest.approx(measured, abs=0.05)


def test_a_step_is_recorded_as_what_was_judged():
    assert step_record([1, 2, 0], 4) == DraftRecord(1, 1, 2, 1, 5), "stopped by a rejected token"
    assert step_record([1, 2, 0], 2) == DraftRecord(1, 1, 2, 0, 3), "stopped by the end of the chain"
    assert step_record([1, 2], 4) == DraftRecord(1, 1, 2, 0, 5), "cut by the end of the answer"
    assert step_record([0], 0) == DraftRecord(1, 0, 0, 0, 1), "nothing drafted"
    assert DraftRecord().acceptance_rate == DraftRecord().drafted_share == 0.0


def test_times_between_measured_sizes_lie_on_straight_lines():
    assert interpolated({1: 1.0, 2: 1.0, 4: 3.0}) == [1.0, 1.0, 2.0, 3.0]


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


def test_a_watched_answer_is_the_answer_with_everything_counted():
    answer = counting_answer()
    assert list(answer.tokens[0]) == [(4 + i) % 16 for i in range(61)]
    assert answer.statistics.accepted_histogram == [15, 0, 1, 0, 0, 7]
    found = answer.drafts
    assert (found.num_steps, found.num_drafted_steps, found.num_rejected) == (23, 8, 0)
    assert found.num_accepted == 7 * 5 + 3
    assert found.num_nodes == 15 + 8 * 6
    assert found.num_branching == 0
    assert len(found.token_seconds) == 8
    assert answer.seconds > 0


def test_watching_keeps_the_law_and_the_tokens():
    model = model_with_heads()
    inputs = {"input_ids": random_prompts(1, 6)}
    options = {"do_sample": True, "temperature": 1.0, "seed": 3, "max_new_tokens": 10}
    for name, rule in (("heads", "exact"), ("early-exit", "block"), ("early-exit", "greedy_block")):
        settings = DrafterSettings(exit_layer=1)
        drafter = Drafters(model, settings).make(name)
        own = model.generate(**inputs, **options, drafter=drafter, acceptance=rule)[0, 6:].tolist()
        answer = watched_answer(model, inputs, drafter, acceptance=rule, **options)
        assert list(answer.tokens[0]) == own
        assert (answer.drafts.num_branching == 0) == (name == "early-exit")


def test_a_batch_is_watched_row_by_row():
    model = MedusaModel(counting_model(16))
    prompts = [torch.tensor([[3]]), torch.tensor([[9]])]
    options = {"do_sample": False, "max_new_tokens": 40}
    both = watched_answer(model, {"input_ids": torch.cat(prompts)}, SuffixDrafter(5, min_match=1), **options)
    alone = [
        watched_answer(model, {"input_ids": p}, SuffixDrafter(5, min_match=1), **options) for p in prompts
    ]
    assert both.tokens == alone[0].tokens + alone[1].tokens
    counted = [each.drafts.num_accepted for each in alone]
    assert both.drafts.num_accepted == sum(counted) > 0
    assert both.drafts.num_steps == sum(each.drafts.num_steps for each in alone)


def probe(base, name: str, settings: DrafterSettings, **options) -> Probe:
    model = MedusaModel(base)
    source = draft_sources([name], model, settings)[name]
    prompts = [{"input_ids": random_prompts(1, 6, seed=seed)} for seed in range(2)]
    costs = [1.0, *[1.2] * 16]
    return probe_draft_length(model, source, prompts, costs, do_sample=False, **options)


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
