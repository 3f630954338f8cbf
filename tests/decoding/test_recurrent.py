"""A base that keeps a state writes what ``transformers`` has it write, whatever is guessed and rejected."""

from __future__ import annotations

import warnings

import pytest
import torch
from conftest import (
    BUSHY,
    VOCAB_SIZE,
    OracleDrafter,
    assert_exact,
    left_padded,
    random_heads,
    random_prompts,
    tiny_model,
)
from hypothesis import given, note, settings
from hypothesis import strategies as st
from refusals import refusals
from stateful_models import DECODABLE, model_of_twins, stateful_model, turned_at_a_tie
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from medusa import CandidateTree, MedusaModel
from medusa.acceptance.rules import RULES
from medusa.decoding.batch import BatchLimits, Row
from medusa.decoding.runners import MAX_REPLAY_TOKENS
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.drafters.dynamic import BestPathDrafter, best_path
from medusa.drafters.protocol import Draft
from medusa.drafters.suffix import SuffixDrafter
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.trees.candidate_tree import TreeTopology

EOS, CHAIN = [11, 12, 13], CandidateTree.chain(3)
GREEDY = {"max_new_tokens": 30, "do_sample": False}
SOME = ("falcon_h1", "lfm2", "mamba2", "qwen3_next")
"""Both in one layer; convolutions; no attention; a delta rule and experts."""


def model_of(model_type: str, **config) -> MedusaModel:
    return MedusaModel(stateful_model(model_type), random_heads(3, **config))


def own_answer(model: MedusaModel, prompt: torch.Tensor, **options) -> torch.Tensor:
    """What ``transformers`` writes, greedily."""
    mask = torch.ones_like(prompt)
    return model.base.generate(prompt, attention_mask=mask, do_sample=False, pad_token_id=0, **options)


def ties_of(model_type: str, num_prompts: int, new: int) -> int:
    """How many answers turn at a tie, of ``num_prompts`` with drafts that are wrong, mixed and right."""
    model, ties = model_of(model_type), 0
    for seed in range(num_prompts):
        prompt = random_prompts(1, 3 + 2 * seed, seed)
        expected = own_answer(model, prompt, max_new_tokens=new)
        for hit_rate in (0.0, 0.6, 1.0):
            drafter = OracleDrafter(expected.tolist(), CandidateTree.chain(3), hit_rate, seed)
            text = model.generate(prompt, max_new_tokens=new, do_sample=False, drafter=drafter)
            ties += turned_at_a_tie(model.base, text, expected, prompt.shape[1])
    return ties


@pytest.mark.parametrize("model_type", DECODABLE)
def test_greedy_text_is_that_of_transformers_whatever_is_accepted(model_type):
    assert ties_of(model_type, num_prompts=1, new=18) == 0


@pytest.mark.slow
def test_of_two_thousand_greedy_answers_fewer_than_one_in_a_hundred_turns_at_a_tie():
    ties = {model_type: ties_of(model_type, num_prompts=48, new=24) for model_type in DECODABLE}
    assert sum(ties.values()) < 0.01 * 3 * 48 * len(DECODABLE), ties


@pytest.mark.parametrize("model_type", DECODABLE)
def test_text_is_that_of_plain_decoding_where_the_two_best_logits_all_but_tie(model_type):
    model, prompt = MedusaModel(model_of_twins(model_type)), random_prompts(1, 9)
    plain = model.generate(prompt, **GREEDY, tree=CHAIN.subtree(0))
    hows = ({"drafter": OracleDrafter(plain.tolist(), CHAIN, hit_rate)} for hit_rate in (0.6, 1.0))
    assert_exact(model, prompt, *hows, expected=plain, **GREEDY)


def test_rows_of_a_batch_that_all_but_tie_are_each_read_again():
    model, prompts = MedusaModel(model_of_twins("bamba")), random_prompts(3, 9)
    with pytest.warns(UserWarning, match="read one after the other"):
        plain = model.generate(prompts, **GREEDY, tree=CHAIN.subtree(0))
        drafter = OracleDrafter(plain.tolist(), CHAIN, 0.8)
        assert_exact(model, prompts, {"drafter": drafter}, expected=plain, **GREEDY)


@st.composite
def calls(draw) -> tuple:
    """A type, prompts, options, and who drafts."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    options = {"max_new_tokens": draw(st.integers(2, 24)), "pad_token_id": 0}
    options |= draw(st.sampled_from([{}, {"eos_token_id": EOS}, {"no_repeat_ngram_size": 2}]))
    options |= {"do_sample": True, "temperature": draw(st.sampled_from([0.7, 1.3])), "seed": 5}
    drafter = draw(
        st.sampled_from(["heads", "dynamic-heads", "suffix", "dynamic-heads+suffix", "oracle", None])
    )
    return draw(st.sampled_from(DECODABLE)), lengths, options, drafter, draw(st.integers(0, 99))


@settings(max_examples=12, deadline=None)
@given(calls())
def test_a_seed_gives_the_text_of_plain_decoding_whoever_drafts(call):
    model_type, lengths, options, drafter, seed = call
    note(str(call))
    model = MedusaModel(stateful_model(model_type), random_heads(seed))
    batch = left_padded(random_prompts(len(lengths), max(lengths), seed), lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = model.generate(**batch, **options, tree=CandidateTree.chain(0))
        if drafter == "oracle":
            answers = [
                row[max(lengths) - length :].tolist() for row, length in zip(plain, lengths, strict=True)
            ]
            drafter = OracleDrafter(answers, CandidateTree.chain(4), 0.7, seed)
        text = model.generate(**batch, **options, drafter=drafter)
    assert torch.equal(text, plain)


@pytest.mark.parametrize("model_type", SOME)
def test_rows_of_a_padded_batch_are_what_they_are_alone_and_generate_says_how_they_are_read(model_type):
    model, lengths = model_of(model_type), [9, 4, 13]
    prompts = random_prompts(3, 13)
    with pytest.warns(UserWarning, match="the 3 rows of this batch are read one after the other"):
        text = model.generate(**left_padded(prompts, lengths), max_new_tokens=16, do_sample=False)
    for row, length in enumerate(lengths):
        alone = own_answer(model, prompts[row : row + 1, 13 - length :], max_new_tokens=16)
        assert text[row, 13:].tolist() == alone[0, length:].tolist()


@pytest.mark.parametrize("model_type", SOME)
def test_tokens_that_are_read_again_never_pile_up(model_type):
    model, prompt = model_of(model_type), random_prompts(1, 9)
    plain = model.generate(prompt, max_new_tokens=60, do_sample=False, tree=CandidateTree.chain(0))
    widths = []
    hook = model.base.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: widths.append(args[0].shape[1])
    )
    drafter = OracleDrafter(plain.tolist(), CandidateTree.chain(3), 0.5)
    text = model.generate(prompt, max_new_tokens=60, do_sample=False, drafter=drafter)
    hook.remove()
    assert torch.equal(text, plain)
    assert max(widths[1:]) > MAX_REPLAY_TOKENS  # it came to that
    assert max(widths) <= MAX_REPLAY_TOKENS + 3 + 4  # what one more step may add, and a draft


class Favours(LogitsProcessor):
    """A caller's own, which must be called once for each position."""

    def __call__(self, input_ids, scores):
        favoured = input_ids.sum(dim=1, keepdim=True) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(favoured, 2, dtype=scores.dtype))


@pytest.mark.parametrize("model_type", SOME)
def test_processors_criteria_and_early_ends_are_those_of_transformers(model_type):
    model, prompt = model_of(model_type), random_prompts(1, 9)
    for options in (
        {"eos_token_id": EOS, "min_new_tokens": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"logits_processor": LogitsProcessorList([Favours()])},
    ):
        expected = own_answer(model, prompt, max_new_tokens=30, **options)
        how = {"drafter": OracleDrafter(expected.tolist(), CHAIN, 0.7)}
        assert_exact(model, prompt, how, expected=expected, **GREEDY, **options)


def test_a_streamer_and_the_steps_of_a_stream_give_the_same_tokens():
    model, prompt = model_of("lfm2"), random_prompts(1, 9)
    expected = own_answer(model, prompt, max_new_tokens=20)
    streamed = []

    class Kept(TextStreamer):
        def __init__(self):
            pass

        def put(self, value):
            streamed.extend(value.flatten().tolist())

        def end(self):
            pass

    model.generate(prompt, max_new_tokens=20, do_sample=False, streamer=Kept())
    assert streamed == expected[0].tolist()
    steps = model.stream(prompt, max_new_tokens=20, do_sample=False)
    assert [token for step in steps for token in step.tokens[0]] == expected[0, 9:].tolist()


@pytest.mark.parametrize("model_type", ["bamba", "qwen3_5_text"])
def test_an_eagle3_head_and_heads_with_fused_layers_draft(model_type):
    base, drafters = stateful_model(model_type), ("heads", "dynamic-heads", "dynamic-heads+suffix")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = Eagle3Head(Eagle3Config.of_base(base, fused_layers=(1, 2)))
    for heads in (head, random_heads(4, fused_layers=(1,))):
        hows = ({"drafter": drafter} for drafter in drafters)
        assert_exact(MedusaModel(base, heads), random_prompts(1, 9), *hows, **GREEDY)


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.only_chains])
def test_rules_for_sampled_chains_run(rule):
    model, prompt = model_of("lfm2"), random_prompts(1, 9)
    options = {"max_new_tokens": 30, "do_sample": True, "seed": 1, "acceptance": rule}
    if RULES[rule].context_only_proposal:
        with pytest.raises(ValueError, match="needs a drafter whose q depends only on the text"):
            model.generate(prompt, **options)
    else:
        assert model.generate(prompt, **options).shape == (1, 39)


def test_a_rule_that_needs_a_draft_at_every_step_is_refused_before_the_first_token():
    model, prompt = model_of("lfm2"), random_prompts(1, 9)
    drafter = DraftModelDrafter(tiny_model("llama"), VOCAB_SIZE, CandidateTree.chain(3))
    options = {"max_new_tokens": 4, "acceptance": "greedy_block", "drafter": drafter}
    with pytest.raises(ValueError, match=r"'greedy_block' needs a draft of one length .* acceptance='block'"):
        next(model.stream(prompt, do_sample=True, seed=1, **options))
    greedy = model.generate(prompt, do_sample=False, **options)  # no rule is asked
    assert torch.equal(greedy, own_answer(model, prompt, max_new_tokens=4))
    sampled = options | {"max_new_tokens": 60, "acceptance": "block"}
    assert model.generate(prompt, do_sample=True, seed=1, **sampled).shape == (1, 69)


@pytest.mark.parametrize("model_type", SOME)
def test_requests_that_join_and_leave_a_batch_say_what_they_say_alone(model_type):
    model = model_of(model_type)
    prompts = [random_prompts(1, length, seed) for seed, length in enumerate((12, 3, 7, 20))]
    expected = [own_answer(model, prompt, max_new_tokens=18)[0, prompt.shape[1] :] for prompt in prompts]
    batch = model.continuous_batch(BatchLimits(max_rows=2, chunk=5))
    rows = [Row(model.request(prompt, max_new_tokens=18, do_sample=False)) for prompt in prompts]
    for row in rows:
        batch.add(row)
    while batch.is_busy:
        batch.step()
    assert [row.tokens for row in rows] == [each.tolist() for each in expected]


@pytest.mark.parametrize("model_type", SOME)
def test_the_next_turn_of_a_conversation_goes_on_from_the_state_that_the_last_one_left(model_type):
    model, prompt = model_of(model_type), random_prompts(1, 12)
    batch = model.continuous_batch()

    def answer(ids: torch.Tensor) -> Row:
        row = Row(model.request(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False))
        batch.add(row)
        while batch.is_busy:
            batch.step()
        assert row.tokens == own_answer(model, ids, max_new_tokens=10)[0, ids.shape[1] :].tolist()
        return row

    first = answer(prompt)
    longer = torch.cat([prompt, torch.tensor([first.tokens]), random_prompts(1, 4, 1)], dim=1)
    assert answer(longer).num_reused == prompt.shape[1] + len(first.tokens) - 1
    assert answer(prompt).num_reused == 0  # the state has read more


def test_a_guess_on_which_the_base_is_not_finite_leaves_no_trace_in_the_state():
    base = stateful_model("lfm2")
    with torch.random.fork_rng():
        poisoned = type(base)(base.config).eval()
    poisoned.load_state_dict(base.state_dict())
    model, poison = MedusaModel(poisoned), VOCAB_SIZE - 1
    with torch.no_grad():
        poisoned.get_input_embeddings().weight[poison] = torch.nan
    options = {"max_new_tokens": 20, "do_sample": False, "suppress_tokens": [poison]}
    prompt = random_prompts(1, 9).clamp(max=poison - 1)
    plain = model.generate(prompt, tree=CandidateTree.chain(0), **options)

    class Poison(SuffixDrafter):
        def draft(self, context):
            tokens = torch.cat([context.root[:, None], torch.full((1, 2), poison)], dim=1)
            return Draft(tokens, TreeTopology.chain(3, tokens.device, is_draft=True))

    assert torch.equal(model.generate(prompt, drafter=Poison(2), **options), plain)


def refused_by(**options):
    return lambda: model_of("lfm2").generate(random_prompts(1, 5), **options, max_new_tokens=4)


test_what_a_state_cannot_follow_is_refused = refusals(
    ("a tree", refused_by(tree=BUSHY), "tree must be a chain for Lfm2ForCausalLM, ... of 11 nodes"),
    ("its tree", lambda: MedusaModel(stateful_model("lfm2"), random_heads(), BUSHY.subtree(3)), "be a chain"),
    ("a union", refused_by(drafter="heads+suffix"), "'heads+suffix' drafts trees side by side"),
    ("early exit", refused_by(drafter="early-exit"), "'early-exit' needs ... layers are all attention"),
    ("drafts", refused_by(drafter=OracleDrafter([[0] * 99], BUSHY, 0.5)), "chains, got a tree"),
    ("static", refused_by(step="static"), "step='static' needs a base whose layers are all attention"),
)


def test_a_base_that_keeps_a_state_cannot_be_compiled():
    assert not model_of("lfm2").can_compile


def test_the_best_path_is_the_one_on_which_most_guesses_are_expected_to_be_right():
    parents = torch.tensor([[0, 0, 0, 1, 3]])
    topology = TreeTopology.from_parents(parents, torch.tensor([[0, 1, 1, 2, 3]]), 3)
    probabilities = torch.tensor([[1.0, 0.4, 0.5, 0.3, 0.1], [1.0, 0.3, 0.6, 0.1, 0.05]])
    draft = Draft(torch.tensor([[5, 6, 7, 8, 9]] * 2), topology, path_logprob=probabilities.log())
    path = best_path(draft)
    assert path.tokens.tolist() == [[5, 6, 8, 9], [5, 7, 7, 7]]
    assert path.topology.is_chain
    assert torch.allclose(path.path_logprob.exp(), torch.tensor([[1, 0.4, 0.3, 0.1], [1, 0.6, 0, 0]]))


def test_dynamic_heads_and_a_match_draft_the_best_path_by_default():
    drafter = model_of("lfm2").drafter_for(1)
    assert isinstance(drafter, BestPathDrafter)
    assert drafter.max_depth == 16  # as long as a match
