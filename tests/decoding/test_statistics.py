"""What a run says about itself follows from one histogram."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import OracleDrafter, random_prompts, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from medusa import CandidateTree, DecodingStatistics, MedusaModel
from medusa.decoding.statistics import PHASES

histograms = st.lists(st.integers(0, 50), min_size=1, max_size=6)


def statistics_of(histogram: list[int], num_rows: int = 2) -> DecodingStatistics:
    statistics = DecodingStatistics(num_rows=num_rows)
    for accepted, count in enumerate(histogram):
        for _ in range(count):
            statistics.record_step([accepted], max_depth=len(histogram) - 1)
    return statistics


@given(histogram=histograms, num_rows=st.integers(0, 5))
def test_counts_and_rates_hang_together(histogram, num_rows):
    statistics = statistics_of(histogram, num_rows)
    steps, accepted = sum(histogram), sum(a * count for a, count in enumerate(histogram))
    assert statistics.num_steps == steps
    assert statistics.num_accepted == accepted
    assert statistics.num_tokens == num_rows + steps + accepted
    if not steps:
        assert statistics.tokens_per_step == 1.0 and statistics.acceptance_rate == []
        return
    assert statistics.accepted_histogram == histogram
    assert statistics.tokens_per_step == pytest.approx(1 + accepted / steps)
    assert statistics.tokens_per_step == pytest.approx(1 + sum(statistics.acceptance_rate))
    rates, conditional = statistics.acceptance_rate, statistics.conditional_acceptance_rate
    assert len(rates) == len(conditional) == len(histogram) - 1
    before = 1.0
    for depth, (rate, given_before) in enumerate(zip(rates, conditional, strict=True), start=1):
        assert rate == pytest.approx(sum(histogram[depth:]) / steps)
        assert rate == pytest.approx(before * given_before)
        before = rate


def test_rates_of_a_known_histogram():
    statistics = statistics_of([4, 3, 0, 1], num_rows=1)
    assert statistics.num_tokens == 1 + 8 + 6
    assert statistics.tokens_per_step == 1.75
    assert statistics.acceptance_rate == [0.5, 0.125, 0.125]
    assert statistics.conditional_acceptance_rate == [0.5, 0.25, 1.0]


def test_a_depth_never_reached_has_rate_zero():
    statistics = statistics_of([5, 0, 0])
    assert statistics.acceptance_rate == [0.0, 0.0]
    assert statistics.conditional_acceptance_rate == [0.0, 0.0]


@given(first=histograms, second=histograms)
def test_the_sum_of_two_runs_is_the_run_of_both(first, second):
    longest = max(len(first), len(second))
    both = [a + b for a, b in zip(first + [0] * longest, second + [0] * longest, strict=False)][:longest]
    total, expected = statistics_of(first, 1) + statistics_of(second, 2), statistics_of(both, 3)
    assert total.num_rows == 3
    assert total.num_steps == expected.num_steps
    assert total.num_tokens == expected.num_tokens
    assert total.tokens_per_step == expected.tokens_per_step


def test_times_add_up_and_the_operands_stay_as_they_were():
    one, two = DecodingStatistics(), DecodingStatistics()
    one.prefill_seconds, one.decode_seconds, one.phase_seconds["draft"] = 1.0, 2.0, 0.5
    two.prefill_seconds, two.decode_seconds, two.phase_seconds["draft"] = 4.0, 8.0, 0.25
    total = one + two
    assert (total.prefill_seconds, total.decode_seconds) == (5.0, 10.0)
    assert total.phase_seconds == {**dict.fromkeys(PHASES, 0.0), "draft": 0.75}
    total.record_step([0], max_depth=0)
    assert one.num_steps == two.num_steps == 0 and one.phase_seconds["draft"] == 0.5


def test_rows_of_one_step_are_counted_each():
    statistics = DecodingStatistics()
    statistics.record_step([0, 2, 1], max_depth=2)
    statistics.record_step([0], max_depth=2)
    assert statistics.num_steps == 4
    assert statistics.accepted_histogram == [2, 1, 1]


def test_the_dictionary_is_json_and_holds_what_the_properties_say():
    statistics = statistics_of([1, 2, 3])
    values = json.loads(json.dumps(statistics.as_dict()))
    for name in ("num_rows", "num_steps", "num_tokens", "tokens_per_step", "acceptance_rate"):
        assert values[name] == getattr(statistics, name)
    assert values["conditional_acceptance_rate"] == statistics.conditional_acceptance_rate
    assert values["accepted_histogram"] == [1, 2, 3]


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
def test_tokens_cut_off_by_the_end_of_an_answer_are_not_counted(max_new_tokens):
    """A drafter that is always right, depth 3: whole steps emit 4 tokens, the last what is left."""
    model = MedusaModel(tiny_model("llama"))
    prompt = random_prompts(1, 6)
    known = model.generate(prompt, max_new_tokens=20, do_sample=False)
    oracle = OracleDrafter(known.tolist(), CandidateTree.chain(3), hit_rate=1.0)
    out = model.generate(
        prompt, max_new_tokens=max_new_tokens, do_sample=False, drafter=oracle, return_dict_in_generate=True
    )
    statistics = out.statistics
    assert out.sequences.shape[1] - 6 == statistics.num_tokens == max_new_tokens
    whole, left = divmod(max_new_tokens - 1, 4)
    expected = [0, 0, 0, whole]
    if left:
        expected[left - 1] += 1
    assert statistics.num_steps == sum(expected)
    assert (statistics.accepted_histogram or [0, 0, 0, 0]) == expected


def test_steps_that_paused_count_as_steps_and_not_as_guesses():
    statistics = statistics_of([4, 3, 0, 1], num_rows=1)
    statistics.record_step([0, 0], max_depth=0, is_paused=True)
    assert (statistics.num_steps, statistics.num_paused, statistics.num_tokens) == (10, 2, 1 + 10 + 6)
    assert statistics.accepted_histogram == [6, 3, 0, 1]
    assert statistics.tokens_per_step == 1.6
    assert statistics.acceptance_rate == [0.5, 0.125, 0.125]
    assert statistics.conditional_acceptance_rate == [0.5, 0.25, 1.0]
    twice = statistics + statistics
    assert twice.num_paused == 4 and twice.acceptance_rate == statistics.acceptance_rate
    assert twice.as_dict()["num_paused"] == 4
    only = DecodingStatistics()
    only.record_step([0], max_depth=0, is_paused=True)
    assert only.acceptance_rate == only.conditional_acceptance_rate == [] and only.tokens_per_step == 1.0


def test_rows_that_end_at_different_steps_are_counted_until_their_end():
    model = MedusaModel(tiny_model("llama"))
    prompts = random_prompts(3, 8)
    free = model.generate(prompts, max_new_tokens=20, do_sample=False)
    eos = [int(free[0, 8 + 3]), int(free[1, 8 + 9])]
    out = model.generate(
        prompts,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    lengths = [
        next((i + 1 for i, token in enumerate(row) if token in eos), 20) for row in free[:, 8:].tolist()
    ]
    assert len(set(lengths)) > 1
    assert out.statistics.num_rows == 3
    assert out.statistics.num_tokens == sum(lengths)
    assert out.statistics.num_steps == sum(lengths) - 3


def test_seconds_are_split_by_phase():
    model = MedusaModel(tiny_model("llama"))
    out = model.generate(
        random_prompts(1, 6), max_new_tokens=8, do_sample=False, return_dict_in_generate=True
    )
    statistics = out.statistics
    assert statistics.prefill_seconds > 0
    assert all(seconds > 0 for seconds in statistics.phase_seconds.values())
    assert sum(statistics.phase_seconds.values()) == pytest.approx(statistics.decode_seconds)
    assert set(statistics.phase_seconds) == set(PHASES)


def test_plain_decoding_accepts_nothing():
    model = MedusaModel(tiny_model("llama"))
    out = model.generate(
        torch.tensor([[5, 6]]), max_new_tokens=7, do_sample=False, return_dict_in_generate=True
    )
    assert out.statistics.accepted_histogram == [6]
    assert out.statistics.tokens_per_step == 1.0
    assert out.statistics.acceptance_rate == []
