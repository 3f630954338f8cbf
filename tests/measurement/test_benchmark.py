"""Settings, warm-ups and what answers add up to, with stand-ins for systems and made-up times."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from rich.console import Console
from tiny_chat import chat_model

from medusa import DecodingStatistics
from medusa.decoding.statistics import PHASES
from medusa.measurement.benchmark import (
    Request,
    Setting,
    build_history,
    measure,
    num_tokens_of,
    pad_with_history,
    paired_ratio,
    runnable,
    setting_report,
)
from medusa.measurement.benchmark_report import _plot_splits, add_tables
from medusa.measurement.report import Report
from medusa.measurement.systems import System
from medusa.measurement.timing import Answer, new_tokens
from medusa.prompts import Prompt

ASKING = Request({"max_new_tokens": 20, "do_sample": False}, frozenset({0}), pad_id=0)


def encoded(*lengths):
    return [
        {name: torch.ones(1, n, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        for n in lengths
    ]


def system(name, calls, failing=None, **options):
    def answer(input_ids, attention_mask, **arguments):
        calls.append((name, tuple(input_ids.shape), arguments["max_new_tokens"]))
        if failing is not None:
            raise failing
        return SimpleNamespace(sequences=torch.nn.functional.pad(input_ids, (0, 2), value=5))

    return System(name, answer, **options)


def test_the_last_batch_goes_around_to_the_first_prompts():
    setting = Setting(2, None, encoded(3, 5, 4), ["a", "b", "c"])
    assert [setting.prompt_numbers(batch) for batch in range(2)] == [[0, 1], [2, 0]]
    assert [batch["input_ids"].shape for batch in setting.batches(0)] == [(2, 5), (2, 4)]
    assert setting.num_prompt_tokens == 4
    assert setting.category(0) == ""
    assert Setting(1, None, encoded(3), ["a"]).category(0) == "a"


def test_the_time_to_the_first_token_is_taken_where_one_row_is_answered():
    given = []

    def answer(input_ids, attention_mask, streamer=None, **arguments):
        given.append(streamer)
        for tokens in (input_ids, torch.tensor([5]), torch.tensor([5])):
            time.sleep(0.02)
            if streamer is not None:
                streamer.put(tokens)
        return SimpleNamespace(sequences=torch.nn.functional.pad(input_ids, (0, 2), value=5))

    systems = {"plain": System("plain", answer)}
    (one,) = measure(systems, Setting(1, None, encoded(3), ["a"]), ASKING)
    assert 0.04 <= one.first_token_seconds < one.seconds - 0.015, "the second put, not the prompt's"
    report = setting_report([one], is_greedy=True)
    assert report["milliseconds_to_first_token"] == {"plain": 1000 * one.first_token_seconds}
    (two,) = measure(systems, Setting(2, None, encoded(3, 3), ["a"] * 2), ASKING)
    assert (two.first_token_seconds, given[1]) == (None, None)


def test_everyone_warms_up_on_the_longest_prompts_three_short_times_or_one_full_one():
    calls = []
    names = {
        "plain": system("plain", calls),
        "transformers-static": system("transformers-static", calls, is_compiled=True),
    }
    working, reasons = runnable(names, Setting(1, None, encoded(3, 9, 4), ["a"] * 3), ASKING)
    assert (list(working), reasons) == (["plain", "transformers-static"], {})
    assert calls == [("plain", (1, 9), 8)] * 3 + [("transformers-static", (1, 9), 20)]


def test_a_mode_of_transformers_that_fails_is_left_out_with_its_reason_and_ours_is_an_error():
    setting = Setting(2, None, encoded(3, 4), ["a"] * 2)
    broken = system("transformers", [], failing=RuntimeError("no luck\nand details"))
    lookup = system("prompt-lookup", [])
    working, reasons = runnable({"transformers": broken, "prompt-lookup": lookup}, setting, ASKING)
    assert working == {}
    assert reasons == {
        "transformers": "RuntimeError: no luck (at 2 rows)",
        "prompt-lookup": "transformers offers it for one row at a time (at 2 rows)",
    }
    with pytest.raises(RuntimeError, match="no luck"):
        runnable({"heads": system("heads", [], failing=RuntimeError("no luck"))}, setting, ASKING)


# ------------------------------------------------------------------ what answers add up to


def timing(system, batch, seconds, tokens=((1, 2),), step=1.0, category="all"):
    statistics = None
    if system != "transformers":
        statistics = DecodingStatistics(num_rows=1, num_steps=2, num_passes=2, accepted_histogram=[1, 1])
        statistics.decode_seconds = 2 * step
        statistics.phase_seconds = {"draft": 0.2, "verify": 1.0, "accept": 0.4, "commit": 0.4}
    return Answer(system, batch, tokens, seconds, statistics, category)


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
    low, high = report["speedup_interval"]["heads"]
    assert low == high == 1.5, "every batch gains as much"
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


def test_what_a_missing_system_would_have_given_is_none():
    report = setting_report([timing("plain", 0, 1.0)], is_greedy=True)
    assert report["tokens_per_step"] is report["overhead"] is report["speedup_vs_plain"] is None
    assert report["speedup_over_plain"] == {"plain": 1.0}


def test_an_answer_that_ended_with_the_prefill_has_no_step():
    short = Answer("plain", 0, ((7,),), 1.0, DecodingStatistics(num_rows=1), "all")
    report = setting_report([short], is_greedy=True)
    assert report["milliseconds_per_step"] == {"plain": None}
    assert report["step_milliseconds"]["plain"]["verify"] is None


def test_steps_that_run_as_one_have_no_phases_and_the_picture_says_so():
    timings = three_batches()
    for each in timings:
        if each.statistics is not None:
            each.statistics.phase_seconds = dict.fromkeys(PHASES, 0.0)
    setting = setting_report(timings, is_greedy=True)
    assert set(setting["step_milliseconds"]["heads"].values()) == {None}
    assert setting["milliseconds_per_step"]["heads"] > 0
    _, ax = pyplot.subplots()
    _plot_splits(ax, [{**setting, "label": "1 row"}])
    assert [each.get_text() for each in ax.texts] == ["These steps run as one, without phases."]


def test_new_tokens_end_with_the_first_that_ends_an_answer():
    sequences = [[9, 9, 1, 2, 0, 0], [9, 9, 1, 2, 3, 4], [9, 9, 0, 0, 0, 0]]
    assert new_tokens(sequences, 2, {0}) == ((1, 2, 0), (1, 2, 3, 4), (0,))
    assert new_tokens(sequences, 2, set())[2] == (0, 0, 0, 0)


def test_systems_are_compared_by_category():
    timings = [timing("plain", 0, 1.0, category="a"), timing("plain", 1, 3.0, category="b")]
    by_category = setting_report(timings, is_greedy=True)["by_category"]
    assert by_category["a"]["milliseconds_per_token"]["plain"] == pytest.approx(500.0)
    assert by_category["b"]["milliseconds_per_token"]["plain"] == pytest.approx(1500.0)


def test_tables_show_every_number_at_80_columns(capsys):
    names = ("transformers", "plain", "heads", "dynamic-heads+suffix")
    answers = [timing(name, batch, 1.0 + batch / 10) for name in names for batch in range(3)]
    setting = setting_report(answers, is_greedy=True) | {
        "label": "1 row",
        "batch_size": 1,
        "context_length": None,
        "num_prompt_tokens": 57.0,
        "num_nodes": {"plain": 1, "heads": 6},
        "f_hw": {"plain": 0.5, "heads": None},
        "f_tree": 0.93,
        "divergence": {},
    }
    rates = {"bytes_per_second": 2e10, "operations_per_second": 1e11}
    report = {
        "by_setting": [setting],
        "skipped": {},
        "device": "cpu",
        "dtype": "float32",
        "device_rates": rates,
    }
    tables = Report(report)
    add_tables(tables)
    tables.show(Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert not any("…" in line for line in lines)
    assert any(line.startswith("system") and "x plain" in line for line in lines)
    assert any(line.startswith("dynamic-heads+suffix") for line in lines)


# ------------------------------------------------------------------ rules for sampled drafts


def trial(prompt, accepted, seed=0):
    """An answer whose steps accepted so many tokens of chains of two."""
    counted = DecodingStatistics(num_rows=1)
    counted.record_step(accepted, max_depth=2)
    return Answer("x", prompt, ((1, 2),), 1.0, counted, seed=seed)


def test_the_ratio_is_of_tokens_per_step_over_all_steps():
    ours = [trial(0, [2, 2, 0]), trial(1, [1])]
    theirs = [trial(0, [1, 1, 2, 0]), trial(1, [0, 0])]
    found = paired_ratio(ours, theirs)
    assert found["ratio"] == pytest.approx((9 / 4) / (10 / 6))
    assert (found["num_prompts"], found["num_answers"]) == (2, 2)


def test_the_interval_draws_prompts_with_all_their_answers():
    """Two prompts, ratios 3 and 1/3: resamples hold one of them twice, or both; so the interval spans all."""
    ours = [trial(p, [2 - 2 * p] * 5, seed=s) for p in (0, 1) for s in range(20)]
    theirs = [trial(p, [2 * p] * 5, seed=s) for p in (0, 1) for s in range(20)]
    found = paired_ratio(ours, theirs)
    assert (found["low"], found["ratio"], found["high"]) == pytest.approx((1 / 3, 1.0, 3.0))


def test_a_long_answer_weighs_more_than_a_short_one():
    """Seven prompts of 100 equal steps and one of a single step, which cannot move the interval far."""
    ours = [trial(p, [1] * 100) for p in range(7)] + [trial(7, [2])]
    theirs = [trial(p, [1] * 100) for p in range(7)] + [trial(7, [0])]
    assert paired_ratio(ours, theirs)["high"] < 1.05


def test_the_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch):
    """300 comparisons of 25 prompts with a true ratio of 1.2; a 95 % interval should cover in 270 to 297.

    False alarm rate under 1e-3 for a true coverage of 94 %, what a percentile bootstrap of 25 prompts has.
    """
    monkeypatch.setattr("medusa.measurement.timing.NUM_RESAMPLES", 400)
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        ours, theirs = [], []
        for prompt in range(25):
            ease = rng.uniform(0.6, 1.4)
            ours.append(trial(prompt, rng.binomial(2, 0.4 * ease, size=40).tolist()))
            theirs.append(trial(prompt, rng.binomial(2, 0.25 * ease, size=40).tolist()))
        found = paired_ratio(ours, theirs)
        covered += found["low"] <= 1.8 / 1.5 <= found["high"]
    assert 270 <= covered <= 297


def test_one_prompt_has_no_interval_and_unlike_sides_are_refused():
    ours, theirs = [trial(0, [1])], [trial(0, [1])]
    assert paired_ratio(ours, theirs)["low"] is None
    with pytest.raises(ValueError, match="the same prompts and seeds on both sides"):
        paired_ratio(ours, [trial(0, [1], seed=1)])
    with pytest.raises(ValueError, match="every answer ended with its first token"):
        paired_ratio([trial(0, [])], [trial(0, [])])


# ------------------------------------------------------------------ prompts after earlier talk


def prompt(text, answer=None, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    return Prompt((*messages, {"role": "user", "content": text}), answer=answer)


def test_a_prompt_is_filled_up_with_earlier_exchanges_about_other_questions():
    model = chat_model()
    prompts = [prompt("first", "one"), prompt("second", "two"), prompt("third", "three")]
    exchanges = build_history(model, prompts, num_tokens=10_000)
    assert [(q["content"], a["content"]) for q, a in exchanges] == [
        ("first", "one"),
        ("second", "two"),
        ("third", "three"),
    ]
    asked = prompt("second", system="Be kind.")
    longer = pad_with_history(model, asked, exchanges, num_tokens=80)
    contents = [message["content"] for message in longer.messages]
    assert (contents[0], contents[-1]) == ("Be kind.", "second")
    assert contents.count("second") == 1, "the question itself is not asked before"
    assert contents[-3:-1] == ["first", "one"] and contents[1:-1].count("first") > 1, "they come around again"
    length = num_tokens_of(model, longer)
    assert 80 - len("third" + "three") - 4 <= length <= 80


def test_a_prompt_that_is_longer_by_itself_stays_as_it_is():
    model = chat_model()
    asked = prompt("a question of some length")
    assert pad_with_history(model, asked, build_history(model, [prompt("x", "y")], 50), 12) == asked


def test_missing_answers_are_the_models_own_and_no_more_are_made_than_needed():
    model = chat_model()
    exchanges = build_history(model, [prompt(text) for text in ("one", "two", "three")], num_tokens=20)
    assert len(exchanges) == 1
    assert exchanges[0][1]["role"] == "assistant"


def test_without_a_chat_template_there_is_no_conversation_to_lengthen():
    model = chat_model()
    model.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template to render them"):
        build_history(model, [prompt("one")], 20)
