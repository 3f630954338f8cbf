import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_chat import HIDDEN_SIZE, VOCAB_SIZE, chat_base, chat_heads, chat_model, save_chat_model, wide_tree
from tiny_training import chat_tokenizer, counting_rows, write_rows

from medusa import HeadsCheckpoint, HeadsConfig, MedusaHeads, save_heads
from medusa.cli.main import main
from medusa.decoding.statistics import DecodingStatistics
from medusa.heads.adapter import Adapter
from medusa.heads.calibration import AnsweredTokens, calibrate, calibrate_each
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.measurement.heads import (
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
from medusa.training.config import DataOptions
from medusa.training.data.loading import held_out_answers, load_data
from medusa.trees.rank_counts import RankCounts

PROMPTS = [{"prompt": "Hello"}, {"prompt": "Count"}, {"prompt": "And on"}, {"prompt": "Once more"}]


def compare_heads(arguments):
    return main(["compare-heads", *arguments])


def perfect_heads(num_heads=1):
    """Heads that read their path; every block is the identity, so head d repeats the base's own guess."""
    return MedusaHeads(HeadsConfig(HIDDEN_SIZE, VOCAB_SIZE, num_heads, reads_path=True)).eval()


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """A base, two sets of heads that differ in number and kind, and prompts."""
    folder = tmp_path_factory.mktemp("compare")
    base, heads = save_chat_model(folder)
    record = {"training": {"steps": 40, "minutes": 2.0, "tokens": 7000}}
    save_heads(HeadsCheckpoint(perfect_heads(), base, provenance=record), folder / "other" / "heads")
    prompts = write_rows(folder / "prompts.jsonl", PROMPTS)
    flags = ["--base", base, "--prompts", str(prompts), "--max-new-tokens", "20"]
    return folder, heads, flags


def test_all_sets_are_asked_about_the_same_answers_and_held_against_the_first(setting, capsys):
    folder, heads, flags = setting
    picture, written = folder / "plots" / "heads.png", folder / "heads.json"
    own = ["--sizes", "2,5", "--rounds", "2", "--step-nodes", "4", "--plot", str(picture)]
    status = compare_heads(
        [*flags, *own, "--json", str(written), "--heads", f"mine={heads}", str(folder / "other" / "heads")]
    )
    printed = capsys.readouterr()
    assert status == 0, printed.err
    report = json.loads(printed.out.splitlines()[-1])
    assert report == json.loads(written.read_text())
    assert report["against"] == "mine"
    assert report["num_answers"] == len(PROMPTS)
    mine, other = report["heads"]
    assert (mine["label"], other["label"]) == ("mine", "other")
    assert (mine["num_heads"], other["num_heads"]) == (3, 1)
    assert (len(mine["top1"]), len(other["top1"])) == (3, 1)
    assert mine["num_parameters"] == sum(each.numel() for each in chat_heads().parameters())
    assert list(mine["tokens_per_step"]) == ["2", "5"]
    assert mine["against_first"]["5"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert mine["training_milliseconds_per_step"] is None
    assert other["training_milliseconds_per_step"] == 3000.0
    assert all(0 < row["draft_milliseconds"] < row["step_milliseconds"] for row in (mine, other))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "optimisation" in printed.out


def test_without_rounds_nothing_is_timed(setting, capsys):
    folder, heads, flags = setting
    own = ["--rounds", "0", "--sizes", "3", "--plot", str(folder / "p.png"), "--heads", heads]
    assert compare_heads([*flags, *own]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["heads"][0]["step_milliseconds"] is None


def test_two_texts_to_ask_about_are_refused(setting, capsys):
    _, heads, flags = setting
    with pytest.raises(SystemExit):
        compare_heads([*flags, "--heads", heads, "--held-out"])
    assert "held_out and prompts both say what to ask about" in capsys.readouterr().err


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


def test_two_sets_of_one_label_and_heads_with_an_adapter_are_refused(setting, tmp_path):
    _, heads, _ = setting
    with pytest.raises(ValueError, match="two sets of heads are called 'a'"):
        read_named([f"a={heads}", f"a={heads}"])
    adapter = Adapter({"peft_type": "LORA"}, {"x": torch.zeros(1)})
    save_heads(HeadsCheckpoint(chat_heads(), "base", adapter=adapter), tmp_path / "joint")
    with pytest.raises(ValueError, match="trained with an adapter, whose base gives other answers"):
        read_named([str(tmp_path / "joint")])


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


def provenance_of(options, data):
    return {"configuration": {"data": options.data, "held_out_fraction": 0.3}, "data": data.counts}


def test_held_out_conversations_are_those_of_the_training_runs(tmp_path):
    path = write_rows(tmp_path / "data.jsonl", counting_rows(30))
    options = DataOptions(data=[str(path)], held_out_fraction=0.3)
    data = load_data(options, chat_tokenizer())
    record = provenance_of(options, data)
    found = held_out_answers({"a": record, "b": record}, chat_tokenizer())
    assert [row.token_ids for row in found] == [
        data.held_out[i].tokens.tolist() for i in range(len(data.held_out))
    ]
    assert sum(sum(row.is_label) for row in found) == data.held_out.num_labels > 0
    other = {**record, "configuration": {**record["configuration"], "seed": 7, "packing": True}}
    with pytest.raises(ValueError, match="'a' and 'b' held out other conversations: seed was 0 and is 7"):
        held_out_answers({"a": record, "b": other}, chat_tokenizer())
    with pytest.raises(ValueError, match="the heads 'b' do not say what they were trained on"):
        held_out_answers({"a": record, "b": {}}, chat_tokenizer())
    write_rows(path, counting_rows(60))
    with pytest.raises(ValueError, match="the data have changed since"):
        held_out_answers({"a": record}, chat_tokenizer())
