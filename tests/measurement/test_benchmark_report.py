import pytest

from medusa import DecodingStatistics
from medusa.measurement.benchmark_report import Timing, new_tokens, setting_report


def timing(contender, batch, seconds, tokens=((1, 2),), step=1.0, category="all"):
    statistics = None
    if contender != "transformers":
        statistics = DecodingStatistics(num_rows=1, num_steps=2, num_passes=2, accepted_histogram=[1, 1])
        statistics.decode_seconds = 2 * step
        statistics.phase_seconds = {"draft": 0.2, "verify": 1.0, "accept": 0.4, "commit": 0.4}
    return Timing(contender, batch, category, tokens, seconds, statistics)


def three_batches():
    timings = []
    for batch, slow in enumerate((1, 1, 10)):
        for repeat in (1, 1, 100):
            timings += [
                timing("transformers", batch, 8.0 * slow * repeat),
                timing("plain", batch, 6.0 * slow * repeat),
                timing("heads", batch, 4.0 * slow * repeat, step=1.5 * slow * repeat),
            ]
    return timings


def test_times_are_medians_over_batches_of_medians_over_repeats():
    report = setting_report(three_batches(), is_greedy=True)
    assert report["milliseconds_per_token"] == {"transformers": 4000.0, "plain": 3000.0, "heads": 2000.0}
    assert (report["speedup_vs_plain"], report["speedup_vs_transformers"]) == (1.5, 2.0)
    assert report["speedup_of_heads_over"] == {"transformers": 2.0, "plain": 1.5, "heads": 1.0}
    assert report["overhead"] == 1.5
    assert report["tokens_per_step"] == 1.5
    assert report["step_milliseconds"]["heads"] == {"draft": 100, "verify": 500, "accept": 200, "commit": 200}
    assert report["identical"]


def test_an_answer_that_differs_is_noticed_in_any_repeat():
    odd = [*three_batches(), timing("transformers", 1, 8.0, tokens=((1, 3),))]
    report = setting_report(odd, is_greedy=True)
    assert (report["identical"], report["num_identical"]) == (False, 2)
    assert setting_report(odd, is_greedy=False)["identical"], "sampling compares our own two only"
    assert setting_report(odd, is_greedy=True, is_exact=False)["identical"] is None
    assert setting_report(odd, is_greedy=True, is_same_model=False)["compared"] == ["heads", "plain"]


def test_a_step_of_a_batch_is_one_forward_pass_whatever_its_rows():
    batch = timing("plain", 0, 12.0, tokens=((1, 2), (3, 4)))
    batch.statistics.num_steps = 4
    report = setting_report([batch], is_greedy=True)
    assert report["milliseconds_per_step"] == {"plain": 1000.0}
    assert report["milliseconds_per_token"] == {"plain": 3000.0}
    assert report["num_prompts"] == 2, "every row is an answer"


def test_agreement_is_counted_in_tokens_up_to_the_first_that_differs():
    timings = [
        timing("plain", 0, 1.0, tokens=((1, 2, 3, 4), (5, 6))),
        timing("heads", 0, 1.0, tokens=((1, 2, 9, 4), (5, 6))),
        timing("transformers", 0, 1.0, tokens=((1, 2, 3), (5, 6))),
    ]
    same = setting_report(timings, is_greedy=True)["same_as_plain"]
    assert same["heads"] == {"num_answers": 1, "num_tokens": 4, "of_answers": 2, "of_tokens": 6}
    assert same["transformers"]["num_tokens"] == 5
    assert "transformers" not in setting_report(timings, is_greedy=False)["same_as_plain"]


def test_what_a_missing_contender_would_have_told_is_none():
    report = setting_report([timing("plain", 0, 1.0)], is_greedy=True)
    assert report["tokens_per_step"] is report["overhead"] is report["speedup_vs_plain"] is None
    assert report["speedup_over_plain"] == {"plain": 1.0}


def test_an_answer_that_ended_with_the_prefill_has_no_step():
    short = Timing("plain", 0, "all", ((7,),), 1.0, DecodingStatistics(num_rows=1))
    report = setting_report([short], is_greedy=True)
    assert report["milliseconds_per_step"] == {"plain": None}
    assert report["step_milliseconds"]["plain"]["verify"] is None


def test_new_tokens_end_with_the_first_that_ends_an_answer():
    sequences = [[9, 9, 1, 2, 0, 0], [9, 9, 1, 2, 3, 4], [9, 9, 0, 0, 0, 0]]
    assert new_tokens(sequences, 2, {0}) == ((1, 2, 0), (1, 2, 3, 4), (0,))
    assert new_tokens(sequences, 2, set())[2] == (0, 0, 0, 0)


def test_contenders_are_told_apart_by_category():
    timings = [timing("plain", 0, 1.0, category="a"), timing("plain", 1, 3.0, category="b")]
    by_category = setting_report(timings, is_greedy=True)["by_category"]
    assert by_category["a"]["milliseconds_per_token"]["plain"] == pytest.approx(500.0)
    assert by_category["b"]["milliseconds_per_token"]["plain"] == pytest.approx(1500.0)
