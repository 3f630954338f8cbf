"""Settings, warm-ups and the order of measuring, with stand-ins for contenders."""

from types import SimpleNamespace

import pytest
import torch

from medusa.measurement.benchmarking import AnswerOptions, Setting, able, measure
from medusa.measurement.contenders import Contender

OPTIONS = AnswerOptions({"max_new_tokens": 20, "do_sample": False}, frozenset({0}), pad_id=0)


def encoded(*lengths):
    return [
        {name: torch.ones(1, n, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        for n in lengths
    ]


def contender(name, calls, failing=None, **options):
    def answer(input_ids, attention_mask, **arguments):
        calls.append((name, tuple(input_ids.shape), arguments["max_new_tokens"]))
        if failing is not None:
            raise failing
        return SimpleNamespace(sequences=torch.nn.functional.pad(input_ids, (0, 2), value=5))

    return Contender(name, answer, **options)


def test_the_last_batch_goes_around_to_the_first_prompts():
    setting = Setting(2, None, encoded(3, 5, 4), ["a", "b", "c"])
    assert [setting.places(batch) for batch in range(2)] == [[0, 1], [2, 0]]
    assert [batch["input_ids"].shape for batch in setting.batches(0)] == [(2, 5), (2, 4)]
    assert setting.num_prompt_tokens == 4
    assert setting.category(0) == ""
    assert Setting(1, None, encoded(3), ["a"]).category(0) == "a"


def test_contenders_answer_in_an_order_that_rotates():
    calls = []
    both = {name: contender(name, calls) for name in ("plain", "heads")}
    timings = measure(
        both, Setting(1, None, encoded(3, 4), ["a", "b"]), OPTIONS, lambda items, label: iter(items)
    )
    assert [name for name, _, _ in calls] == ["plain", "heads", "heads", "plain"]
    assert [(t.contender, t.batch, t.category, t.tokens) for t in timings][:2] == [
        ("plain", 0, "a", ((5, 5),)),
        ("heads", 0, "a", ((5, 5),)),
    ]


def test_measuring_stops_between_rounds_when_the_time_is_up():
    calls = []
    both = {name: contender(name, calls) for name in ("plain", "heads")}
    setting = Setting(1, None, encoded(3, 4, 5), ["a"] * 3)
    timings = measure(both, setting, OPTIONS, lambda items, label: iter(items), seconds=0.0)
    assert [(t.contender, t.batch) for t in timings] == [("plain", 0), ("heads", 0)], "one whole round"


def test_everyone_warms_up_on_the_longest_prompts_three_short_times_or_one_full_one():
    calls = []
    names = {
        "plain": contender("plain", calls),
        "transformers-static": contender("transformers-static", calls, is_compiled=True),
    }
    working, reasons = able(names, Setting(1, None, encoded(3, 9, 4), ["a"] * 3), OPTIONS)
    assert (list(working), reasons) == (["plain", "transformers-static"], {})
    assert calls == [("plain", (1, 9), 8)] * 3 + [("transformers-static", (1, 9), 20)]


def test_a_mode_of_transformers_that_fails_is_left_out_with_its_reason_and_ours_is_an_error():
    setting = Setting(2, None, encoded(3, 4), ["a"] * 2)
    broken = contender("transformers", [], failing=RuntimeError("no luck\nand details"))
    lookup = contender("prompt-lookup", [])
    working, reasons = able({"transformers": broken, "prompt-lookup": lookup}, setting, OPTIONS)
    assert working == {}
    assert reasons == {
        "transformers": "RuntimeError: no luck (at 2 rows)",
        "prompt-lookup": "transformers offers it for one row at a time (at 2 rows)",
    }
    with pytest.raises(RuntimeError, match="no luck"):
        able({"heads": contender("heads", [], failing=RuntimeError("no luck"))}, setting, OPTIONS)
