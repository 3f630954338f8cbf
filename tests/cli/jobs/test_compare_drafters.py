"""The comparison of drafters and rules, from numbers made up by hand and end to end on a tiny model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import CHECKOUT
from tiny_chat import save_chat_model

from medusa import DecodingStatistics
from medusa.cli.jobs import compare_drafters
from medusa.cli.main import main
from medusa.measurement.draft_length import DraftRecord, expected_tokens
from medusa.measurement.drafters import exactness, paired_ratio, summary
from medusa.measurement.timing import Answer
from medusa.prompts import read_prompts


@pytest.fixture(autouse=True)
def little_warming_up(monkeypatch):
    """Nothing here looks at the times."""
    monkeypatch.setattr(compare_drafters, "NUM_WARM_UPS", 1)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """Shared flags for the tiny model, and the folder that everything is in."""
    folder = tmp_path_factory.mktemp("compare")
    base, heads = save_chat_model(folder)
    rows = [{"prompt": "abcabcabc", "category": "letters"}, {"prompt": "Count", "category": "numbers"}]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--base", base, "--heads", heads, "--prompts", str(prompts), "--max-new-tokens", "14"]
    return base, [*flags, "--plot", str(folder / "plots" / "compare.png")]


def compared(capsys, *flags) -> tuple[dict, str]:
    """The report of a run that ended well, and all of standard output."""
    status = main(["compare-drafters", *map(str, flags)])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return json.loads(printed.out.splitlines()[-1]), printed.out


def by_pair(report) -> dict:
    return {(row["drafter"], row["rule"]): row for row in report["pairings"]}


def test_greedy_every_drafter_is_identical_to_plain_and_rules_for_samples_are_refused(setting, capsys):
    base, flags = setting
    own = ["--exit-layer", 1, "--draft-model", base, "--rules", "exact", "typical", "block"]
    report, printed = compared(capsys, *flags, *own)
    pairs = by_pair(report)
    names = ["heads", "dynamic-heads", "suffix", "draft-model", "early-exit", "low-precision", "heads+suffix"]
    names.append("dynamic-heads+suffix")
    assert list(pairs) == [
        ("plain", "exact"),
        *((n, r) for n in names for r in ("exact", "typical", "block")),
    ]
    for name in names:
        exact, typical = pairs[name, "exact"], pairs[name, "typical"]
        assert (exact["exactness"], exact["num_identical"]) == ("identical", 2)
        assert typical["exactness"] == "LOSSY"
        assert pairs[name, "block"]["refused"] == "at temperature 0 it is the exact rule"
        assert exact["tokens_per_step"] == pytest.approx(1 + sum(exact["acceptance_rate"]))
        assert set(exact["by_category"]) == {"letters", "numbers"}
    assert pairs["draft-model", "exact"]["token_acceptance_rate"] == 1.0, "it is the base itself"
    assert [entry["drafter"] for entry in report["draft_lengths"]] == [
        "suffix",
        "draft-model",
        "early-exit",
        "low-precision",
    ]
    chosen = {entry["drafter"]: entry["draft_length"] for entry in report["draft_lengths"]}
    assert pairs["early-exit", "exact"]["draft_depth"] == chosen["early-exit"]
    assert report["ratios"] == []
    assert "LOSSY" in printed
    assert "refused: heads x block" in printed
    assert Path(flags[-1]).read_bytes().startswith(b"\x89PNG")


def test_sampled_rules_are_paired_with_token_verification_and_biased_pairs_refused(setting, capsys):
    _, flags = setting
    own = ["--drafters", "heads", "early-exit", "suffix", "--exit-layer", 1, "--draft-length", 3]
    sampled = ["--temperature", 1, "--rules", "exact", "token", "block", "greedy_block", "--repeats", 2]
    report, printed = compared(capsys, *flags, *own, *sampled)
    pairs = by_pair(report)
    assert pairs["heads", "exact"]["exactness"] == "identical"
    assert pairs["heads", "exact"]["num_answers"] == 4
    assert pairs["early-exit", "block"]["exactness"] == "in law"
    assert pairs["heads", "token"]["is_chain"], "a rule that walks one path gets a chain"
    assert not pairs["heads", "exact"]["is_chain"]
    assert pairs["heads", "exact"]["predicted_tokens_per_step"] is None
    chain = pairs["early-exit", "token"]
    assert chain["predicted_tokens_per_step"] == pytest.approx(
        expected_tokens(chain["token_acceptance_rate"], 3)
    )
    assert "point mass, so a test on p/q is biased" in pairs["suffix", "token"]["refused"]
    assert "q depends on the text alone" in pairs["heads", "greedy_block"]["refused"]
    assert pairs["early-exit", "greedy_block"]["refused"] is None
    assert [(row["drafter"], row["rule"], row["against"]) for row in report["ratios"]] == [
        ("heads", "block", "token"),
        ("early-exit", "block", "token"),
        ("early-exit", "greedy_block", "token"),
    ]
    assert all(row["low"] <= row["ratio"] <= row["high"] for row in report["ratios"])
    assert report["draft_lengths"] == [], "the user gave the length"
    assert "95 %: interval from a bootstrap over prompts" in printed


def test_rules_are_compared_over_many_seeds_in_one_batch(setting, capsys):
    """Tokens per step of a batch are those of its rows decoded one by one, seed by seed."""
    _, flags = setting
    own = [
        "--drafters",
        "low-precision",
        "--draft-length",
        3,
        "--temperature",
        1,
        "--rules",
        "token",
        "block",
    ]
    report, _ = compared(capsys, *flags, *own, "--num-seeds", 4)
    pairs = by_pair(report)
    assert report["num_prompts"] == 2 and report["num_seeds"] == 4
    assert all(pairs["low-precision", rule]["num_answers"] == 8 for rule in ("token", "block"))
    (ratio,) = report["ratios"]
    assert (ratio["rule"], ratio["against"], ratio["num_answers"]) == ("block", "token", 8)
    assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
    per_step = {rule: pairs["low-precision", rule]["tokens_per_step"] for rule in ("token", "block")}
    assert ratio["ratio"] == pytest.approx(per_step["block"] / per_step["token"])
    one_by_one, _ = compared(capsys, *flags, *own, "--repeats", 4)
    alone = by_pair(one_by_one)
    assert all(alone["low-precision", rule]["tokens_per_step"] == per_step[rule] for rule in per_step)


def test_without_token_verification_the_first_rule_is_what_others_are_held_against(setting, capsys):
    _, flags = setting
    own = ["--drafters", "early-exit", "--exit-layer", 1, "--draft-length", 2, "--temperature", 1]
    report, _ = compared(capsys, *flags, *own, "--rules", "exact", "block", "traversal")
    assert [(row["rule"], row["against"]) for row in report["ratios"]] == [("traversal", "block")]


def test_another_base_is_compared_with_one_flag(setting, capsys):
    base, flags = setting
    report, _ = compared(capsys, "--base", base, *flags[4:])
    assert [row["drafter"] for row in report["pairings"]] == ["plain", "suffix", "low-precision"]


def test_a_wider_draft_is_a_tree_except_for_rules_that_take_a_chain(setting, capsys):
    _, flags = setting
    own = ["--drafters", "early-exit", "--exit-layer", 1, "--draft-length", 2, "--draft-width", 3]
    sampled = ["--temperature", 0.9, "--rules", "token", "traversal"]
    report, _ = compared(capsys, *flags, *own, *sampled)
    pairs = by_pair(report)
    assert pairs["early-exit", "traversal"]["nodes_per_step"] == 7
    assert pairs["early-exit", "token"]["nodes_per_step"] == 3


def test_sampling_is_from_all_tokens_unless_flags_cut_some_off(setting, capsys):
    """The base drafting for itself is always accepted: what is cut off the base is cut off the draft."""
    base, flags = setting
    own = [*flags, "--drafters", "draft-model", "early-exit", "--draft-model", base, "--exit-layer", 1]
    own += ["--draft-length", 3, "--temperature", 1]
    whole, _ = compared(capsys, *own, "--rules", "token")
    cut, _ = compared(capsys, *own, "--rules", "token", "exact", "--top-k", 5, "--top-p", 0.8)
    rates = [
        [by_pair(report)[name, "token"]["token_acceptance_rate"] for name in ("draft-model", "early-exit")]
        for report in (whole, cut)
    ]
    assert rates[0][0] == rates[1][0] == 1.0
    assert rates[0][1] != rates[1][1]
    assert by_pair(cut)["draft-model", "exact"]["exactness"] == "identical"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafters", "lookup"], "drafter 'lookup' is unknown; there are"),
        (["--drafters", "early-exit"], "'early-exit' needs a number of layers, 1 to 1 for this base; give"),
        (["--drafters", "draft-model"], "'draft-model' needs a smaller model of the same family; give"),
    ],
)
def test_a_drafter_that_cannot_be_made_ends_the_program_with_what_it_lacks(setting, capsys, flags, message):
    assert main(["compare-drafters", *setting[1], *flags]) == 1
    assert message in capsys.readouterr().err


def test_unknown_rules_are_refused_with_a_list(setting, capsys):
    with pytest.raises(SystemExit):
        main(["compare-drafters", *setting[1], "--rules", "lucky"])
    assert "traversal" in capsys.readouterr().err


# ------------------------------------------------------------------ sums and intervals


def trial(rule: str, prompt: int, *, accepted: list[int], seconds=1.0, seed=0, tokens=(1, 2)) -> Answer:
    """An answer whose steps accepted so many tokens of chains of two."""
    counted = DecodingStatistics(num_rows=1)
    counted.record_step(accepted, max_depth=2)
    counted.decode_seconds = seconds
    record = DraftRecord(len(accepted), len(accepted), sum(accepted), sum(a < 2 for a in accepted))
    return Answer(rule, prompt, (tuple(tokens),), seconds, counted, "all", seed, record)


def test_speeds_are_medians_over_prompts_of_medians_over_repeats():
    plain, drafted = [], []
    for prompt, slow in enumerate((1, 1, 10)):
        for repeat, hiccup in enumerate((1, 1, 100)):
            plain.append(trial("exact", prompt, accepted=[0], seconds=6.0 * slow * hiccup, seed=repeat))
            drafted.append(trial("exact", prompt, accepted=[2], seconds=4.0 * slow * hiccup, seed=repeat))
    found = summary(drafted, plain, draft_depth=2, rule="exact")
    assert found["speedup_vs_plain"] == 1.5
    assert found["milliseconds_per_token"] == 2000.0
    assert found["tokens_per_step"] == 3.0
    assert found["decode_speedup_vs_plain"] == pytest.approx(1.5 * 3)
    assert found["exactness"] == "identical"


def test_an_answer_that_differs_is_counted():
    plain = [trial("exact", prompt, accepted=[1]) for prompt in range(3)]
    drafted = [*plain[:2], trial("exact", 2, accepted=[1], tokens=(1, 3))]
    found = summary(drafted, plain, draft_depth=2, rule="exact")
    assert (found["exactness"], found["num_identical"]) == ("2 of 3", 2)
    assert exactness("block", 1, 3) == "in law"
    assert exactness("typical", 3, 3) == "LOSSY"


def test_the_ratio_is_of_tokens_per_step_over_all_steps():
    ours = [trial("block", 0, accepted=[2, 2, 0]), trial("block", 1, accepted=[1])]
    theirs = [trial("token", 0, accepted=[1, 1, 2, 0]), trial("token", 1, accepted=[0, 0])]
    found = paired_ratio(ours, theirs)
    assert found["ratio"] == pytest.approx((9 / 4) / (10 / 6))
    assert (found["num_prompts"], found["num_answers"]) == (2, 2)


def test_the_interval_draws_prompts_with_all_their_answers():
    """Two prompts, ratios 3 and 1/3: resamples hold one of them twice, or both; so the interval spans all."""
    ours = [trial("block", p, accepted=[2 - 2 * p] * 5, seed=s) for p in (0, 1) for s in range(20)]
    theirs = [trial("token", p, accepted=[2 * p] * 5, seed=s) for p in (0, 1) for s in range(20)]
    found = paired_ratio(ours, theirs)
    assert (found["low"], found["ratio"], found["high"]) == pytest.approx((1 / 3, 1.0, 3.0))


def test_a_long_answer_weighs_more_than_a_short_one():
    """Seven prompts of 100 equal steps and one of a single step, which cannot move the interval far."""
    ours = [trial("block", p, accepted=[1] * 100) for p in range(7)] + [trial("block", 7, accepted=[2])]
    theirs = [trial("token", p, accepted=[1] * 100) for p in range(7)] + [trial("token", 7, accepted=[0])]
    assert paired_ratio(ours, theirs)["high"] < 1.05


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """300 comparisons of 25 prompts with a true ratio of 1.2; a 95 % interval should cover in 270 to 297.

    False alarm rate under 1e-3 for a true coverage of 94 %, what a percentile bootstrap of 25 prompts has.
    """
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        ours, theirs = [], []
        for prompt in range(25):
            ease = rng.uniform(0.6, 1.4)
            ours.append(trial("block", prompt, accepted=rng.binomial(2, 0.4 * ease, size=40).tolist()))
            theirs.append(trial("token", prompt, accepted=rng.binomial(2, 0.25 * ease, size=40).tolist()))
        found = paired_ratio(ours, theirs, resamples=400)
        covered += found["low"] <= 1.8 / 1.5 <= found["high"]
    assert 270 <= covered <= 297


def test_one_prompt_has_no_interval_and_unlike_sides_are_refused():
    ours, theirs = [trial("block", 0, accepted=[1])], [trial("token", 0, accepted=[1])]
    assert paired_ratio(ours, theirs)["low"] is None
    with pytest.raises(ValueError, match="the same prompts and seeds on both sides"):
        paired_ratio(ours, [trial("token", 0, accepted=[1], seed=1)])
    with pytest.raises(ValueError, match="every answer ended with its first token"):
        paired_ratio([trial("block", 0, accepted=[])], [trial("token", 0, accepted=[])])


# ------------------------------------------------------------------ prompts that repeat text

REPETITIVE = CHECKOUT / "configs" / "repetitive_prompts.jsonl"


def test_the_repetitive_prompts_are_three_of_each_kind():
    counts = Counter(prompt.category for prompt in read_prompts(REPETITIVE))
    assert counts == {"code-edit": 3, "summary": 3, "quote": 3, "table": 3}


def test_the_repetitive_prompts_have_100_to_200_tokens(real_tokenizer):
    for prompt in read_prompts(REPETITIVE):
        assert 100 <= len(real_tokenizer(prompt.messages[0]["content"])["input_ids"]) <= 200
