"""Sets of heads against each other on numbers made up by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_chat import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    chat_base,
    chat_heads,
    chat_model,
    perfect_heads,
    save_chat_model,
    wide_tree,
)

from medusa import HeadsCheckpoint, HeadsConfig, MedusaHeads
from medusa.decoding.statistics import DecodingStatistics
from medusa.heads.calibration import AnsweredTokens, calibrate, calibrate_each
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.measurement.comparison import (
    NamedHeads,
    against,
    comparison_report,
    in_a_chain,
    measured_steps,
    read_named,
    split_label,
    step_milliseconds,
    tokens_per_step,
    training_cost,
)
from medusa.trees.rank_counts import RankCounts


def test_one_pass_of_the_base_serves_every_set_of_heads():
    base, torch_rows = chat_base(), torch.Generator().manual_seed(0)
    rows = [
        AnsweredTokens(torch.randint(256, (n,), generator=torch_rows).tolist(), [i >= 3 for i in range(n)])
        for n in (25, 7, 16)
    ]
    torch.manual_seed(5)
    sets = [
        chat_heads(),
        perfect_heads(2),
        Eagle3Head(Eagle3Config(HIDDEN_SIZE, 4, 2, 8, 32, vocab_size=VOCAB_SIZE, fused_layers=(1,))).eval(),
    ]
    for layers in ((1,), (2,)):
        fusing = MedusaHeads(HeadsConfig(HIDDEN_SIZE, VOCAB_SIZE, 2, fused_layers=layers)).eval()
        torch.nn.init.normal_(fusing.fusion.weight)
        sets.append(fusing)
    passes = []
    handle = base.register_forward_pre_hook(lambda *_: passes.append(1))
    together = calibrate_each(base, sets, rows, batch_size=2)
    handle.remove()
    assert len(passes) == 2, "three rows, two at a time"
    for heads, counts in zip(sets, together, strict=True):
        alone = calibrate(base, heads, rows, batch_size=2)
        assert all(torch.equal(a, b) for a, b in zip(alone.ranks, counts.ranks, strict=True))


def test_a_difference_is_taken_answer_by_answer():
    ours = np.array([[10, 20], [10, 40]] * 20)
    theirs = np.array([[20, 20], [20, 40]] * 20)
    assert tokens_per_step(ours)["value"] == 3.0
    found = against(ours, theirs)
    assert found["value"] == found["low"] == found["high"] == 2.0, "every answer doubles, however long it is"
    assert tokens_per_step(ours)["low"] < 3.0 < tokens_per_step(ours)["high"]


def test_an_answer_of_one_token_takes_no_part():
    assert tokens_per_step(np.array([[0, 0], [5, 10]]))["value"] == 2.0


def test_a_chain_takes_each_heads_first_guess_and_no_other():
    ranks = torch.tensor([[0, 0], [0, 1], [1, 0], [0, 0]] * 3, dtype=torch.int16)
    # Steps begin at tokens 0, 3, 6 (where the first guess is wrong), 7 and 10 (wrong again), and end at 11.
    assert in_a_chain(RankCounts((ranks,) * 4, max_rank=2))["value"] == 11 / 5


def test_a_better_set_of_heads_comes_out_ahead():
    right, wrong = torch.zeros(30, 1, dtype=torch.int16), torch.full((30, 1), -1, dtype=torch.int16)
    sets = [RankCounts((part,) * 6, max_rank=2) for part in (wrong, right)]
    named = read_named_from_modules({"bad": perfect_heads(), "good": perfect_heads()})
    bad, good = comparison_report(named, sets, [2], {})
    assert bad["tokens_per_step"]["2"]["value"] == 1.0
    assert good["against_first"]["2"]["value"] == pytest.approx(29 / 15)
    assert (bad["top1"], good["top1"]) == ([0.0], [1.0])


def read_named_from_modules(modules):
    return [NamedHeads(label, label, HeadsCheckpoint(heads, "base")) for label, heads in modules.items()]


def test_labels_are_given_or_taken_from_the_run():
    assert split_label("two layers=runs/a/heads") == ("two layers", "runs/a/heads")
    assert split_label("runs/a/heads") == ("a", "runs/a/heads")
    assert split_label("smollm2-135m-instruct") == ("smollm2-135m-instruct", "smollm2-135m-instruct")


def test_two_sets_of_one_label_are_refused(tmp_path):
    _, heads = save_chat_model(tmp_path)
    with pytest.raises(ValueError, match="two sets of heads are called 'a'"):
        read_named([f"a={heads}", f"a={heads}"])


def test_steps_that_never_happen_cannot_be_timed():
    model, heads = chat_model(), chat_heads()
    counts = RankCounts((torch.zeros(30, 3, dtype=torch.int16),) * 2, max_rank=4)
    prompts = [{"input_ids": torch.arange(5)[None], "attention_mask": torch.ones(1, 5, dtype=torch.long)}]
    with pytest.raises(ValueError, match="no answer after the first lasted a step"):
        measured_steps(model, read_named_from_modules({"a": heads}), [counts], wide_tree().num_nodes, prompts)


def test_sets_take_turns_at_going_first_and_the_first_round_only_warms_up(monkeypatch):
    """A stand-in for decoding says what the first round took, 100 s a step, and the others, 1 s."""
    model, order = chat_model(), []
    named = read_named_from_modules({"a": chat_heads(), "b": perfect_heads(3)})

    def generate(drafter, **_):
        order.append("a" if drafter.heads is named[0].checkpoint.heads else "b")
        seconds = 100.0 if len(order) <= 2 else 1.0
        phases = {"draft": seconds / 4, "verify": 0.0, "accept": 0.0, "commit": 0.0}
        found = DecodingStatistics(num_passes=1, decode_seconds=seconds, phase_seconds=phases)
        return SimpleNamespace(statistics=found)

    monkeypatch.setattr(model, "generate", generate)
    counts = [RankCounts((torch.zeros(30, 3, dtype=torch.int16),) * 2, max_rank=4)] * 2
    times = measured_steps(model, named, counts, 3, [{}] * 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert sorted(times) == ["a", "b"] and [len(each) for each in times.values()] == [2, 2]
    for answers in times.values():
        assert step_milliseconds(answers) == {"draft_milliseconds": 250.0, "step_milliseconds": 1000.0}


def test_training_cost_comes_from_the_record():
    assert training_cost({}) == {"training_tokens": None, "training_milliseconds_per_step": None}
    exact = {"training": {"seconds_per_step": 1.25, "minutes": 1.0, "steps": 40, "tokens": 9}}
    assert training_cost(exact) == {"training_tokens": 9, "training_milliseconds_per_step": 1250.0}
