"""Taking turns, and the numbers that are compared."""

import numpy as np
import pytest

from medusa.measurement import timing
from medusa.measurement.timing import Answer, speedup, take_turns, with_interval


def test_every_system_goes_first_in_turn_and_answers_every_question():
    calls = take_turns(["a", "b", "c"], 2, lambda *call: call, repeats=2)
    assert [name for name, _, _ in calls] == [*"abc", *"bca", *"bca", *"cab"]
    assert sorted(calls) == sorted((n, q, r) for n in "abc" for q in range(2) for r in range(2))


def test_rounds_that_warm_up_are_run_and_left_out():
    ran = []
    kept = take_turns(["a", "b"], 3, lambda *call: ran.append(call) or call, num_warm_ups=1)
    assert len(ran) == 6
    assert {question for _, question, _ in kept} == {1, 2}


def test_no_round_begins_after_the_time_is_up(monkeypatch, capsys):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr("medusa.console.SECONDS_BETWEEN_LINES", 0.0)
    found = take_turns(["a", "b"], 100, lambda *call: call, seconds=45.0, label="measuring")
    assert 2 <= len(found) < 20 and len(found) % 2 == 0, "whole rounds"
    assert "of 100 rounds" in capsys.readouterr().err


def answers(name, seconds):
    return [Answer(name, question, ((1, 2),), each) for question, each in enumerate(seconds)]


def test_a_speedup_is_of_medians_over_questions_with_an_interval():
    found = speedup(answers("fast", [1.0, 2.0, 30.0]), answers("slow", [2.0, 3.0, 40.0]))
    assert found["ratio"] == 1.5
    assert found["low"] == pytest.approx(40 / 30) and found["high"] == 2.0
    alone = speedup(answers("fast", [1.0]), answers("slow", [2.0, 5.0]))
    assert alone == {"ratio": 2.0, "low": None, "high": None}


def test_the_same_samples_give_the_same_interval():
    samples = np.random.default_rng(3).normal(size=(12, 1))
    both = [with_interval(samples, lambda drawn: drawn.mean((-1, -2))) for _ in range(2)]
    assert both[0] == both[1]
