"""Drafters by name, the length of their chains, and what is counted while one works."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB_SIZE, counting_model, random_prompts, tiny_model
from tiny_chat import chat_base, chat_model
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.acceptance.rules import expected_tokens, independent_chains
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.drafters.dynamic import DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.length import ChainRecord, StepCosts, best_draft_length
from medusa.drafters.plain import PlainDrafter
from medusa.drafters.probe import (
    Probe,
    interpolated,
    probe_draft_length,
    step_record,
    verification_seconds,
    watched_answer,
)
from medusa.drafters.registry import (
    DRAFTERS,
    DrafterSettings,
    available_drafters,
    draft_sources,
    drafter_named,
    source_named,
)
from medusa.drafters.self_draft import LowPrecisionDrafter, SelfDrafter
from medusa.drafters.suffix import SuffixDrafter
from medusa.drafters.union import UnionDrafter
from medusa.engine.packed import PackedLinear, missing_for_packed
from medusa.trees.tuned_trees import TunedTree

BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (1, 0)])


def model_with_heads(tree=BUSHY) -> MedusaModel:
    base = tiny_model("llama")
    heads = MedusaHeads(HeadsConfig(base.config.hidden_size, VOCAB_SIZE, num_heads=3))
    return MedusaModel(base, heads, tree)


def test_heads_take_the_tree_tuned_for_the_rows_and_leave_a_union_where_they_do_not_pay():
    plain = model_with_heads()
    tuned = [
        TunedTree(plain.place, 4, CandidateTree.chain(0)),
        TunedTree(plain.place, 2, CandidateTree.chain(3)),
    ]
    model = MedusaModel(plain.base, plain.heads, BUSHY, tuned=tuned)
    parts = draft_sources(["heads+suffix"], model, DrafterSettings())
    heads, union = source_named("heads", parts), source_named("heads+suffix", parts)
    assert heads.drafter(num_rows=2).tree == CandidateTree.chain(3)
    assert heads.drafter(num_rows=4).tree == CandidateTree.chain(3), "asked for alone, heads draft a chain"
    assert isinstance(union.drafter(num_rows=2), UnionDrafter)
    assert isinstance(union.drafter(num_rows=4), SuffixDrafter)
    untuned = source_named("heads", draft_sources(["heads"], plain, DrafterSettings()))
    assert untuned.drafter(num_rows=4).tree == BUSHY


def test_every_name_gives_its_drafter_and_every_drafter_is_exact():
    model = model_with_heads()
    settings = DrafterSettings(draft_length=3, exit_layer=1, draft_model=tiny_model("llama"))
    kinds = {
        "plain": PlainDrafter,
        "heads": HeadsDrafter,
        "dynamic-heads": DynamicHeadsDrafter,
        "dynamic-heads+suffix": UnionDrafter,
        "draft-model": DraftModelDrafter,
        "early-exit": SelfDrafter,
        "low-precision": LowPrecisionDrafter,
        "suffix": SuffixDrafter,
        "heads+suffix": UnionDrafter,
        "early-exit+suffix+heads": UnionDrafter,
    }
    assert set(DRAFTERS) <= set(kinds) | {"eagle"}
    prompts = random_prompts(2, 7)
    options = {"do_sample": True, "temperature": 0.9, "seed": 5, "max_new_tokens": 12}
    plain = model.generate(prompts, **options, tree=CandidateTree.chain(0))
    for name, kind in kinds.items():
        drafter = drafter_named(name, model, settings)
        assert type(drafter) is kind
        assert model.generate(prompts, **options, drafter=drafter).tolist() == plain.tolist()


def test_models_that_draft_run_on_the_engine_of_the_base(tmp_path):
    base = tiny_model("llama")
    if missing_for_packed(base):
        pytest.skip("this torch packs no weights")
    model = MedusaModel(base, engine="packed")
    base.save_pretrained(tmp_path)
    settings = DrafterSettings(exit_layer=1, draft_model=tmp_path)
    prompts = random_prompts(2, 7)
    plain = model.generate(prompts, do_sample=False, max_new_tokens=12)
    for name, attribute in (("early-exit", "cheaper"), ("draft-model", "draft_model")):
        drafter = drafter_named(name, model, settings)
        layers = getattr(drafter, attribute).modules()
        assert any(isinstance(layer, PackedLinear) for layer in layers)
        drafted = model.generate(prompts, do_sample=False, max_new_tokens=12, drafter=drafter)
        assert drafted.tolist() == plain.tolist()


def test_chains_have_the_length_asked_for_and_heads_keep_their_tree():
    model = model_with_heads()
    settings = DrafterSettings(draft_length=7, exit_layer=1)
    assert drafter_named("suffix", model, settings).max_depth == 7
    assert drafter_named("early-exit", model, settings).tree == CandidateTree.chain(7)
    assert drafter_named("heads", model, settings).tree == BUSHY
    assert drafter_named("heads", model, settings, only_chain=True).tree == CandidateTree.chain(3)
    shorter = DrafterSettings(draft_length=2)
    assert drafter_named("heads", model, shorter, only_chain=True).tree == CandidateTree.chain(2)
    assert drafter_named("heads+suffix", model, settings).max_depth == 7


def test_heads_whose_tuned_tree_is_the_root_alone_draft_a_chain():
    assert drafter_named("heads", model_with_heads(CandidateTree.chain(0))).tree == CandidateTree.chain(3)


def test_a_wider_draft_is_for_rules_that_take_a_tree():
    model = model_with_heads()
    settings = DrafterSettings(draft_length=4, draft_width=2, exit_layer=1)
    assert drafter_named("early-exit", model, settings).tree == independent_chains(2, 4)
    assert drafter_named("early-exit", model, settings, only_chain=True).tree == CandidateTree.chain(4)


def test_a_union_prepares_each_part_once():
    model = model_with_heads()
    parts = draft_sources(["heads", "suffix", "heads+suffix"], model, DrafterSettings())
    assert list(parts) == ["heads", "suffix"]
    parts["suffix"] = parts["suffix"].with_length(3)
    heads, suffix = source_named("heads+suffix", parts).drafter().drafters
    assert (type(heads), type(suffix), suffix.length) == (HeadsDrafter, SuffixDrafter, 3)


def test_available_drafters_are_those_that_lack_nothing():
    bare = MedusaModel(tiny_model("llama"))
    assert available_drafters(bare, DrafterSettings()) == ["suffix", "low-precision"]
    everything = DrafterSettings(exit_layer=1, draft_model="somewhere")
    found = available_drafters(model_with_heads(), everything)
    assert [name for name in found if name != "eagle"] == [
        "heads",
        "dynamic-heads",
        "suffix",
        "draft-model",
        "early-exit",
        "low-precision",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "lookup",
            r"drafter 'lookup' is unknown; there are heads, .*plain, and unions such as heads\+suffix",
        ),
        ("heads+lookup", "drafter 'lookup' is unknown"),
        ("suffix+suffix", r"a union names each drafter once, .* got 'suffix\+suffix'"),
        ("plain+suffix", r"not 'plain', which proposes nothing; got 'plain\+suffix'"),
        ("heads", "drafter 'heads' needs heads, and the model was loaded without; give --heads"),
        ("early-exit", "'early-exit' needs a number of layers, 1 to 1 for this base; give --exit-layer"),
        ("draft-model", "'draft-model' needs a smaller model of the same family; give --draft-model"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_with_what_it_lacks(name, message):
    with pytest.raises(ValueError, match=message):
        drafter_named(name, MedusaModel(tiny_model("llama")))


def test_lengths_below_one_are_refused():
    with pytest.raises(ValueError, match="draft_length must be at least 1, got 0"):
        DrafterSettings(draft_length=0)
    with pytest.raises(ValueError, match="draft_width must be at least 1, got 0"):
        DrafterSettings(draft_width=0)


def test_a_draft_model_directory_is_loaded_and_its_tokens_checked(tmp_path):
    model = chat_model()
    chat_base(seed=3).save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    drafter = drafter_named("draft-model", model, DrafterSettings(draft_model=tmp_path, draft_length=2))
    assert drafter.draft_model.config.num_hidden_layers == 2
    model.tokenizer.add_tokens(["<|new|>"])
    with pytest.raises(ValueError, match="draft model must share the base model's tokens, 1 differ"):
        drafter_named("draft-model", model, DrafterSettings(draft_model=tmp_path))
    other = LlamaForCausalLM(LlamaConfig(**{**tiny_model("llama").config.to_dict(), "vocab_size": 500}))
    with pytest.raises(ValueError, match="draft model has vocab_size=500"):
        drafter_named("draft-model", model_with_heads(), DrafterSettings(draft_model=other))


# ------------------------------------------------------------------ draft length


def test_the_best_length_balances_what_drafts_are_worth_and_what_they_cost():
    """Checked against the formula written out: E / (g * draft + verify(g + 1))."""
    record = ChainRecord(num_steps=100, num_drafted_steps=100, num_accepted=80, num_rejected=20)
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
    record = ChainRecord(100, 100, accepted, 100 - accepted)
    costs = StepCosts(draft_seconds, [1 + 0.02 * n for n in range(17)])
    assert best_draft_length(record, costs).draft_length == expected


def test_steps_without_a_draft_count_as_plain_steps():
    record = ChainRecord(num_steps=100, num_drafted_steps=25, num_accepted=150, num_rejected=5)
    costs = StepCosts(0.0, [1.0, *[2.0] * 16], other_seconds=0.5)
    best = best_draft_length(record, costs)
    a = 150 / 155
    assert best.draft_length == 16
    assert best.tokens_per_step == pytest.approx(1 + 0.25 * (expected_tokens(a, 16) - 1))
    assert best.step_seconds == pytest.approx(0.5 + 0.25 * 2.0 + 0.75 * 1.0)
    assert best.plain_step_seconds == 1.5


def test_lengths_that_were_not_timed_are_refused():
    record = ChainRecord(10, 10, 5, 5)
    with pytest.raises(ValueError, match="verify_seconds must reach 17 nodes, got 4"):
        best_draft_length(record, StepCosts(0.1, [1.0] * 4))
    assert best_draft_length(record, StepCosts(0.1, [1.0] * 4), max_length=3).draft_length <= 3
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        best_draft_length(record, StepCosts(0.1, [1.0] * 4), max_length=0)


def test_the_acceptance_of_a_simulated_chain_is_recovered():
    """5,000 steps of chains of 4 at a = 0.7; the estimate's standard error is about 0.004."""
    generator = torch.Generator().manual_seed(0)
    hits = torch.rand(5000, 4, generator=generator) < 0.7
    record = ChainRecord()
    for accepted in hits.long().cumprod(1).sum(1).tolist():
        record += step_record([*range(1, accepted + 1), 0], draft_depth=4)
    assert record.acceptance_rate == pytest.approx(0.7, abs=0.016)
    measured = 1 + record.num_accepted / record.num_steps
    assert record.expected_tokens(4) == pytest.approx(measured, abs=0.05)


def test_a_step_is_recorded_as_what_was_judged():
    assert step_record([1, 2, 0], 4) == ChainRecord(1, 1, 2, 1), "stopped by a rejected token"
    assert step_record([1, 2, 0], 2) == ChainRecord(1, 1, 2, 0), "stopped by the end of the chain"
    assert step_record([1, 2], 4) == ChainRecord(1, 1, 2, 0), "cut by the end of the answer"
    assert step_record([0], 0) == ChainRecord(1, 0, 0, 0), "nothing drafted"
    assert ChainRecord().acceptance_rate == ChainRecord().drafted_share == 0.0


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
    assert list(answer.tokens) == [(4 + i) % 16 for i in range(61)]
    assert answer.statistics.accepted_histogram == [15, 0, 1, 0, 0, 7]
    assert answer.record == ChainRecord(
        num_steps=23, num_drafted_steps=8, num_accepted=7 * 5 + 3, num_rejected=0
    )
    assert answer.num_nodes == 15 + 8 * 6
    assert answer.all_chains
    assert len(answer.draft_token_seconds) == 8
    assert answer.seconds > 0


def test_watching_keeps_the_law_and_the_tokens():
    model = model_with_heads()
    inputs = {"input_ids": random_prompts(1, 6)}
    options = {"do_sample": True, "temperature": 1.0, "seed": 3, "max_new_tokens": 10}
    for name, rule in (("heads", "exact"), ("early-exit", "block"), ("early-exit", "greedy_block")):
        settings = DrafterSettings(exit_layer=1)
        drafter = drafter_named(name, model, settings)
        own = model.generate(**inputs, **options, drafter=drafter, acceptance=rule)[0, 6:].tolist()
        answer = watched_answer(model, inputs, drafter, acceptance=rule, **options)
        assert list(answer.tokens) == own
        assert answer.all_chains == (name == "early-exit")


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
