"""The benchmark end to end on a tiny model: systems, drafters, rules, other heads and settings."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from conftest import CHECKOUT
from reported import ran, reported
from tiny_chat import save_chat_model, wide_tree

import medusa.hardware
from medusa.drafters.registry import DRAFTERS
from medusa.measurement import benchmark
from medusa.prompts import read_prompts

PROMPTS = [
    {"prompt": "Hello", "category": "letters"},
    {"turns": ["Count to three", "And on"], "category": "counting"},
    {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "[bold]Hi[/bold]"}]},
]


@pytest.fixture(autouse=True)
def little_beside(monkeypatch):
    """Nothing here looks at the times: rates of the device from little work, and little warming up."""
    monkeypatch.setitem(medusa.hardware.PROBE_BYTES, "cpu", 2**20)
    monkeypatch.setitem(medusa.hardware.PROBE_WIDTH, "cpu", 64)
    monkeypatch.setattr(benchmark, "NUM_WARM_UPS", 1)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """(base, heads, flags) of the tiny model."""
    folder = tmp_path_factory.mktemp("benchmark")
    base, heads = save_chat_model(folder)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    flags = ["--base", base, "--heads", heads, "--prompts", str(prompts), "--max-new-tokens", "14"]
    return base, heads, [*flags, "--plot", str(folder / "plots" / "picture.png")]


def measured(capsys, *flags) -> tuple[dict, str]:
    """The report of a run that ended well, and all of standard output."""
    return reported(capsys, "benchmark", *flags)[:2]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_it_ends_with_the_agreed_keys_and_identical_answers(setting, capsys, temperature, tmp_path):
    flags = [*setting[2], "--systems", "transformers", "heads", "--plot", tmp_path / "benchmark.png"]
    report, printed = measured(capsys, *flags, "--temperature", temperature, "--repeats", 2)
    agreed = {"tokens_per_step", "overhead", "speedup_vs_plain", "speedup_vs_transformers", "identical"}
    assert agreed | {"num_prompts"} <= set(report)
    assert report["identical"] is True
    answers = 3 if temperature == "0" else 6  # repeats have seeds of their own when sampling
    assert (report["num_prompts"], report["num_identical"], report["num_answers"]) == (3, answers, answers)
    assert report["compared"] == ["heads", "plain", *(["transformers"] if temperature == "0" else [])]
    assert report["num_tokens"] <= answers * 14, "repeats are not counted twice"
    assert set(report["by_category"]) == {"letters", "counting", "uncategorised"}
    assert f"{answers} of {answers} answers token-identical" in printed
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")


def test_every_setting_is_measured_with_bounds_and_who_cannot_take_part_is_said(setting, capsys):
    names = ["transformers", "prompt-lookup", "assisted", "heads", "heads+suffix"]
    own = [*setting[2], "--max-new-tokens", "6", "--draft-length", 4, "--systems", *names]
    report, _ = measured(capsys, *own, "--batch-sizes", "2,1", "--context-lengths", "220,40")
    settings = report["by_setting"]
    where = [(setting["context_length"], setting["batch_size"]) for setting in settings]
    assert where == [(40, 1), (40, 2), (220, 1), (220, 2)]
    assert 40 < settings[2]["num_prompt_tokens"] <= 220
    assert "give --draft-model" in report["skipped"]["assisted"]
    assert "one row at a time (at 2 rows, 40 tokens)" in report["skipped"]["prompt-lookup"]
    for found in settings:
        ours = {"plain", "heads", "heads+suffix"}
        lookup = {"prompt-lookup"} if found["batch_size"] == 1 else set()
        assert set(found["milliseconds_per_token"]) == ours | lookup | {"transformers"}
        assert set(found["step_milliseconds"]) == ours
        assert all(value > 0 for value in found["step_milliseconds"]["heads"].values())
        assert found["num_nodes"] == {"plain": 1, "heads": wide_tree().num_nodes}
        assert found["f_hw"]["heads"] > 0 and found["f_hw"]["plain"] > 0
        assert 0 < found["f_tree"] < 3
        assert found["num_identical"] == found["num_prompts"] == {1: 3, 2: 4}[found["batch_size"]]
        same = found["same_as_plain"]["heads+suffix"]
        assert same["num_tokens"] == same["of_tokens"] and same["num_answers"] == same["of_answers"]
    assert report["speedup_vs_plain"] == settings[0]["speedup_vs_plain"]
    assert report["device_rates"]["bytes_per_second"] > 0


def test_no_identity_is_claimed_in_low_precision_and_the_divergence_is_reported(setting, capsys):
    flags = [*setting[2], "--limit", "2", "--systems", "heads", "--dtype", "bfloat16"]
    report, printed = measured(capsys, *flags)
    assert report["identical"] is None and report["dtype"] == "bfloat16"
    assert set(report["divergence"]) == {"plain", "heads"}
    assert all(0 <= entry["rate"] <= 1 for entry in report["divergence"].values())
    assert "which this precision does not promise" in printed


def test_a_base_without_heads_is_compared_with_the_default_by_default(setting, capsys):
    report, printed = measured(capsys, *setting[2], "--heads", "none", "--limit", 1)
    assert {"plain", "default"} <= set(report["speedup_over_plain"]) and "default" in printed
    assert "suffix" not in report["speedup_over_plain"] and report["identical"] is True


def test_without_heads_drafters_are_compared_and_measuring_stops_when_the_time_is_up(setting, capsys):
    report, _ = measured(capsys, *setting[2], "--systems", "suffix", "--max-minutes", "0.0001")
    assert report["num_prompts"] == 1, "one round is always measured"
    assert report["speedup_vs_plain"] is None and set(report["speedup_over_plain"]) == {"plain", "suffix"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--systems", "early-exit"], "'early-exit' needs a number of layers, 1 to 1 for this base; give"),
        (["--systems", "draft-model"], "'draft-model' needs a smaller model of the same family; give"),
        (["--heads", "no/such/heads"], "no heads directory at 'no/such/heads'"),
    ],
)
def test_what_cannot_be_loaded_ends_the_program_with_what_it_lacks(setting, capsys, flags, message):
    assert message in ran(capsys, ["benchmark", *setting[2], *flags], 1).err.replace("\n", " ")


# ------------------------------------------------------------------ texts and other heads


def test_texts_are_shown_as_they_are_and_those_of_other_heads_are_the_same(setting, capsys):
    _, heads, flags = setting
    report, printed = measured(capsys, *flags, "--systems", "heads", f"others={heads}", "--show")
    assert report["identical"] is True and report["compared"] == ["heads", "others", "plain"]
    assert report["tokens_per_step_of"]["others"] == report["tokens_per_step_of"]["heads"] > 1
    assert "[bold]Hi[/bold]" in printed
    assert printed.count("others: 14 tokens in") == 3
    assert "ANOTHER TEXT" not in printed


def test_a_text_that_differs_is_shown(setting, capsys):
    flags = [*setting[2], "--systems", "suffix", "--acceptance", "typical", "--temperature", 2, "--show"]
    report, printed = measured(capsys, *flags, "--draft-length", 3)
    if report["same_as_plain"]["suffix x typical"]["num_answers"] < 3:
        assert "ANOTHER TEXT" in printed
    assert report["compared"] == ["plain"] and "LOSSY" in printed


# ------------------------------------------------------------------ drafters and rules


def test_greedy_every_drafter_is_identical_to_plain_and_rules_for_samples_are_refused(setting, capsys):
    base, _, flags = setting
    own = ["--limit", 1, "--systems", "drafters", "--exit-layer", 1, "--draft-model", base]
    report, printed = measured(capsys, *flags, *own, "--acceptance", "exact", "typical", "block")
    names = [name for name in DRAFTERS if name not in {"eagle3", "mtp", "plain"}]
    names += ["heads+suffix", "dynamic-heads+suffix"]
    pairs = [each for name in names for each in (name, f"{name} x typical")]
    assert list(report["speedup_over_plain"]) == ["plain", *pairs]
    assert report["compared"] == sorted(["plain", *names])
    assert report["identical"] is True
    reason = "at temperature 0 it is the exact rule"
    assert report["skipped"] == {f"{name} x block": reason for name in names}
    for name in names:
        assert report["tokens_per_step_of"][name] == pytest.approx(1 + sum(report["acceptance_rate"][name]))
    assert report["acceptance_rate"]["draft-model"][0] > 0.6, "it is the base itself, but answers end"
    assert report["ratios"] == []
    assert "LOSSY" in printed
    assert "heads x block, dynamic-heads x block" in printed.replace("\n", " ")


def test_sampled_rules_are_paired_with_token_verification_and_biased_pairs_refused(setting, capsys):
    own = ["--systems", "heads", "early-exit", "suffix", "--exit-layer", 1, "--draft-length", 3]
    sampled = ["--temperature", 1, "--acceptance", "exact", "token", "block", "greedy_block"]
    report, printed = measured(capsys, *setting[2], *own, *sampled)
    assert report["identical"] is True and report["num_answers"] == 3
    assert len(report["acceptance_rate"]["heads x token"]) == 3, "a rule that walks one path gets a chain"
    assert "point mass, so a test on p/q is biased" in report["skipped"]["suffix x token"]
    assert "q depends only on the text" in report["skipped"]["heads x greedy_block"]
    assert "early-exit x greedy_block" not in report["skipped"]
    assert [(row["drafter"], row["rule"], row["against"]) for row in report["ratios"]] == [
        ("heads", "block", "token"),
        ("early-exit", "block", "token"),
        ("early-exit", "greedy_block", "token"),
    ]
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in report["ratios"])
    assert "in law" in printed and "95 %: interval from a bootstrap over prompts" in printed


def test_rules_are_compared_over_many_seeds_in_one_batch(setting, capsys):
    """Tokens per step of a batch are those of its rows decoded one by one, seed by seed."""
    own = ["--systems", "low-precision", "--draft-length", 3, "--temperature", 1, "--limit", 2]
    own += ["--acceptance", "token", "block"]
    report, _ = measured(capsys, *setting[2], *own, "--num-seeds", 4)
    assert (report["num_prompts"], report["num_seeds"], report["num_answers"]) == (2, 4, 8)
    (ratio,) = report["ratios"]
    assert (ratio["rule"], ratio["against"], ratio["num_answers"]) == ("block", "token", 8)
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    per_step = {rule: report["tokens_per_step_of"][f"low-precision x {rule}"] for rule in ("token", "block")}
    assert ratio["ratio"] == pytest.approx(per_step["block"] / per_step["token"])
    alone, _ = measured(capsys, *setting[2], *own, "--repeats", 4)
    assert all(alone["tokens_per_step_of"][f"low-precision x {r}"] == each for r, each in per_step.items())


def test_without_token_verification_the_first_rule_is_what_others_are_held_against(setting, capsys):
    own = ["--systems", "early-exit", "--exit-layer", 1, "--draft-length", 2, "--temperature", 1]
    report, _ = measured(capsys, *setting[2], *own, "--acceptance", "exact", "block", "multi_draft")
    assert [(row["rule"], row["against"]) for row in report["ratios"]] == [("multi_draft", "block")]


def test_drafters_that_need_no_heads_are_compared_on_another_base_with_one_flag(setting, capsys):
    base, _, flags = setting
    report, _ = measured(capsys, "--base", base, *flags[4:], "--systems", "drafters", "--limit", 2)
    need_more = {"heads", "dynamic-heads", "eagle3", "mtp", "draft-model", "early-exit", "plain"}
    assert list(report["speedup_over_plain"]) == [
        "plain",
        *(name for name in DRAFTERS if name not in need_more),
    ]


def test_sampling_is_from_all_tokens_unless_flags_cut_some_off(setting, capsys):
    """The base drafting for itself is always accepted: what is cut off the base is cut off the draft."""
    base, _, flags = setting
    own = [*flags, "--systems", "draft-model", "early-exit", "--draft-model", base, "--exit-layer", 1]
    own += [
        "--draft-length",
        3,
        "--max-new-tokens",
        13,
        "--temperature",
        1,
        "--limit",
        2,
    ]  # three whole steps
    whole, _ = measured(capsys, *own, "--acceptance", "token")
    cut, _ = measured(capsys, *own, "--acceptance", "token", "exact", "--top-k", 5, "--top-p", 0.8)
    rates = [
        [report["acceptance_rate"][f"{name} x token"][0] for name in ("draft-model", "early-exit")]
        for report in (whole, cut)
    ]
    assert rates[0][0] == rates[1][0] == 1.0
    assert rates[0][1] != rates[1][1]
    assert cut["identical"] is True


# ------------------------------------------------------------------ prompts that repeat text

REPETITIVE = CHECKOUT / "configs" / "repetitive_prompts.jsonl"


def test_the_repetitive_prompts_are_three_of_each_kind():
    counts = Counter(prompt.category for prompt in read_prompts(REPETITIVE))
    assert counts == {"code-edit": 3, "summary": 3, "quote": 3, "table": 3}


def test_the_repetitive_prompts_have_100_to_200_tokens(real_tokenizer):
    for prompt in read_prompts(REPETITIVE):
        assert 100 <= len(real_tokenizer(prompt.messages[0]["content"])["input_ids"]) <= 200
