"""A base that keeps a state writes what ``transformers`` has it write, whatever is guessed and rejected."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import (
    BUSHY,
    VOCAB_SIZE,
    OracleDrafter,
    assert_exact,
    left_padded,
    needs_kernels,
    random_heads,
    random_prompts,
    tiny_model,
)
from hypothesis import given, note, settings
from hypothesis import strategies as st
from refusals import refusals
from stateful_models import DECODABLE, model_of_twins, stateful_model, tiny_stateful_model, turned_at_a_tie
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from medusa import CandidateTree, MedusaModel
from medusa.acceptance.rules import RULES
from medusa.base import recurrent_rules
from medusa.base.causal_lm import decoder_layers
from medusa.base.passes import cache_bytes, new_cache, prefill, verify, with_rules
from medusa.base.recurrent import Kept, MatrixState, Paths
from medusa.base.recurrent_rules import has_rules
from medusa.decoding.batch import Batch, BatchLimits, Row
from medusa.decoding.prefix_cache import PrefixCache
from medusa.drafters.draft_model import DraftModelDrafter
from medusa.drafters.dynamic import DynamicDrafter
from medusa.drafters.protocol import Draft
from medusa.drafters.suffix import SuffixDrafter
from medusa.engine import matrix_rule
from medusa.engine.engine_state import apply_engine
from medusa.engine.kernels import lanes
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
            drafter = OracleDrafter(expected.tolist(), BUSHY, hit_rate, seed)
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


REST = [pytest.param(kind, marks=pytest.mark.slow) for place, kind in enumerate(DECODABLE) if place % 4]
"""That every type gives the same bits in any pass is a test below."""


@needs_kernels
@pytest.mark.parametrize("model_type", [*DECODABLE[::4], *REST])
def test_text_is_that_of_plain_decoding_where_the_two_best_logits_all_but_tie(model_type):
    """What rounds otherwise, for several tokens or several rows, would soon write another text."""
    model = MedusaModel(model_of_twins(model_type), engine="packed")
    prompts = random_prompts(3, 9)
    alone = [model.generate(prompts[row : row + 1], **GREEDY, tree=CHAIN.subtree(0)) for row in range(3)]
    together = torch.cat(alone)
    hows = ({"drafter": OracleDrafter(together.tolist(), BUSHY, hit_rate)} for hit_rate in (0.6, 1.0))
    assert_exact(model, prompts, {"tree": CHAIN.subtree(0)}, *hows, expected=together, **GREEDY)


@st.composite
def calls(draw) -> tuple:
    """A type, prompts, options, and who drafts."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    options = {"max_new_tokens": draw(st.integers(2, 24)), "pad_token_id": 0}
    options |= draw(st.sampled_from([{}, {"eos_token_id": EOS}, {"no_repeat_ngram_size": 2}]))
    options |= {"do_sample": True, "temperature": draw(st.sampled_from([0.7, 1.3])), "seed": 5}
    drafter = draw(
        st.sampled_from(
            ["heads", "dynamic-heads", "suffix", "heads+suffix", "dynamic-heads+suffix", "oracle", None]
        )
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
            drafter = OracleDrafter(answers, BUSHY, 0.7, seed)
        text = model.generate(**batch, **options, drafter=drafter)
    assert torch.equal(text, plain)


@pytest.mark.parametrize("model_type", SOME)
def test_rows_of_a_padded_batch_are_what_they_are_alone(model_type):
    model, lengths = model_of(model_type), [9, 4, 13]
    prompts = random_prompts(3, 13)
    text = model.generate(**left_padded(prompts, lengths), max_new_tokens=16, do_sample=False)
    for row, length in enumerate(lengths):
        alone = own_answer(model, prompts[row : row + 1, 13 - length :], max_new_tokens=16)
        assert text[row, 13:].tolist() == alone[0, length:].tolist()


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
        how = {"drafter": OracleDrafter(expected.tolist(), BUSHY, 0.7)}
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


@needs_kernels
@pytest.mark.parametrize("model_type", ["jamba", "lfm2", "mamba2", "qwen3_next", "zamba2"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_cheaper_form_of_the_base_drafts_on_its_states(model_type, width):
    """Early exit and int8: what they do to the states before the verification pass is forgotten."""
    model = MedusaModel(stateful_model(model_type), engine="packed")
    settings = {"draft_length": 3, "draft_width": width}
    drafters = [
        model.make_drafter("early-exit", exit_layer=1, **settings),
        model.make_drafter("low-precision", **settings),
    ]
    hows = [{"drafter": drafter} for drafter in drafters]
    assert_exact(model, random_prompts(2, 9), {"tree": CHAIN.subtree(0)}, *hows, **GREEDY)
    steps = list(model.stream(random_prompts(1, 9), drafter=drafters[1], **GREEDY))
    assert len(steps) < 15, "int8 guesses nearly all of 30 tokens"


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.only_chains])
def test_rules_for_sampled_chains_run(rule):
    model, prompt = model_of("lfm2"), random_prompts(1, 9)
    options = {"max_new_tokens": 30, "do_sample": True, "seed": 1, "acceptance": rule}
    if RULES[rule].context_only_proposal:
        with pytest.raises(ValueError, match="needs a drafter whose q depends only on the text"):
            model.generate(prompt, **options)
    else:
        assert model.generate(prompt, **options).shape == (1, 39)


@pytest.mark.parametrize("rule", ["greedy_block", "block"])
def test_rules_that_verify_blocks_run_with_a_draft_model(rule):
    model, prompt = model_of("lfm2"), random_prompts(1, 9)
    drafter = DraftModelDrafter(tiny_model("llama"), VOCAB_SIZE, CandidateTree.chain(3))
    options = {"max_new_tokens": 30, "acceptance": rule, "drafter": drafter}
    assert model.generate(prompt, do_sample=True, seed=1, **options).shape == (1, 39)
    greedy = model.generate(prompt, do_sample=False, **options)  # no rule is asked
    assert torch.equal(greedy, own_answer(model, prompt, max_new_tokens=30))


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


def answered(model: MedusaModel, batch: Batch, ids: torch.Tensor) -> Row:
    """The row of ``ids`` (1, T) in a batch, which writes what ``transformers`` does."""
    row = Row(model.request(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False))
    batch.add(row)
    while batch.is_busy:
        batch.step()
    assert row.tokens == own_answer(model, ids, max_new_tokens=10)[0, ids.shape[1] :].tolist()
    return row


@pytest.mark.parametrize("model_type", SOME)
def test_the_next_turn_of_a_conversation_goes_on_from_the_state_that_the_last_one_left(model_type):
    model, prompt = model_of(model_type), random_prompts(1, 12)
    batch = model.continuous_batch()
    first = answered(model, batch, prompt)
    longer = torch.cat([prompt, torch.tensor([first.tokens]), random_prompts(1, 4, 1)], dim=1)
    assert answered(model, batch, longer).num_reused == prompt.shape[1] + len(first.tokens) - 1
    assert answered(model, batch, prompt).num_reused == 0  # the states have read more
    # a template that leaves the beginning of an answer out, such as thoughts, has the prompt in common
    other = torch.cat([longer, random_prompts(1, 5, 2)], dim=1)
    assert answered(model, batch, other).num_reused == longer.shape[1]


@pytest.mark.parametrize("model_type", SOME)
@pytest.mark.parametrize("end", ["length", "eos"])
def test_a_state_reads_no_accepted_guess_behind_the_end_of_its_text(model_type, end):
    model, prompt = MedusaModel(stateful_model(model_type)), random_prompts(1, 12)
    model.keep_prefixes(2**30)
    coming = own_answer(model, prompt, max_new_tokens=30)[0, 12:].tolist()
    options = {"eos_token_id": coming[9]} if end == "eos" else {"max_new_tokens": 10}
    answer = model.generate(prompt, prediction=[coming], do_sample=False, **{"max_new_tokens": 30, **options})
    text = answer[0].tolist()
    assert model.prefixes.longest([*text, 1]).length == len(text) - 1


@pytest.mark.parametrize("model_type", SOME)
def test_texts_with_the_same_beginning_go_on_from_a_state_within_it(model_type, monkeypatch):
    monkeypatch.setattr("medusa.decoding.prefix_cache.LEAST_BETWEEN", 16)
    model = model_of(model_type)
    batch = model.continuous_batch(BatchLimits(chunk=8))
    beginning = random_prompts(1, 60)
    others = [torch.cat([beginning, random_prompts(1, 9, seed)], dim=1) for seed in range(1, 4)]
    assert [answered(model, batch, each).num_reused for each in others] == [0, 56, 56]
    assert answered(model, batch, beginning[:, :30]).num_reused == 24


def test_states_within_texts_are_the_denser_the_nearer_to_its_end_and_have_a_bound():
    model = model_of("mamba2")
    cache = new_cache(model.base, 1)
    prefill(model.engine_base, random_prompts(1, 8), torch.tensor([8]), cache)
    size = cache.states_of_row(0).num_bytes
    prefixes = PrefixCache(100 * size)
    for length in range(256, 256 * 40, 256):
        prefixes.keep_states([1] * length, cache)
    ends = sorted(len(each.ids) for each in prefixes._states)
    assert ends == [256 * 39 - left for left in (3840, 768, 256, 0)]
    for owner in range(100):
        prefixes.keep_states([1], cache, owner)
    assert prefixes.num_bytes <= 50 * size and prefixes._states[-1].owner == 99
    assert prefixes.shared(cache, [1, 2, 3], [1, 2], 99).length == 1
    assert prefixes.shared(cache, [1, 2, 3], [1, 2], "another").length == 0


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


test_what_does_not_run_on_a_state_is_refused = refusals(
    ("static", refused_by(step="static"), "step='static' needs a base whose layers are all attention"),
)


def test_a_base_that_keeps_a_state_cannot_be_compiled():
    assert not model_of("lfm2").can_compile


def test_the_state_of_a_row_counts_once_and_not_for_each_token():
    base = stateful_model("mamba2")
    per_token, per_row = cache_bytes(base)
    assert per_token == 0 and per_row > 2 * 4 * 16 * 8 * 4, "the matrices of two layers at least"
    limits = BatchLimits(max_rows=3).in_memory(stateful_model("bamba"), 2**24)
    assert limits.max_slots > 2**24 // sum(cache_bytes(stateful_model("bamba")))


def test_a_layer_whose_forward_was_replaced_is_refused():
    base = tiny_stateful_model("lfm2")
    layer = base.model.layers[0].conv
    layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
    with pytest.raises(
        ValueError, match="the forward of this one has been replaced; put the model's own back"
    ):
        with_rules(base)


def test_a_base_whose_layers_have_hooks_of_accelerate_runs_the_rules():
    base = tiny_stateful_model("qwen3_5_text")
    for layer in base.model.layers:
        for module in layer.modules():
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    model = MedusaModel(base, random_heads())
    expected = own_answer(model, random_prompts(1, 9), max_new_tokens=18)
    assert torch.equal(model.generate(random_prompts(1, 9), max_new_tokens=18, do_sample=False), expected)
    assert has_rules(model.engine_base) and not has_rules(base)


def test_drafts_are_trees_by_default():
    assert isinstance(model_of("lfm2").drafter_for(1), DynamicDrafter)


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize("model_type", DECODABLE)
def test_a_state_has_the_same_bits_in_whatever_passes_its_text_was_read(model_type):
    """Prompts in chunks, trees of which a branch or nothing is kept, and other rows beside."""
    base = apply_engine(stateful_model(model_type), "packed")
    text = random_prompts(2, 40)
    lengths = torch.tensor([40, 17])
    whole = new_cache(base, 2)
    prefill(base, text, lengths, whole, chunk=40)  # convolutions lay 32 tokens and more out otherwise
    alone = new_cache(base, 1)
    prefill(base, text[1:, :17], lengths[1:], alone)
    after, chain = random_prompts(2, 1, 7), TreeTopology.chain(1, text.device)
    for expected, actual in zip(
        verify(base, after, chain, whole), verify(base, after[1:], chain, alone), strict=True
    ):
        assert torch.equal(expected[1:], actual)
    drawn = random.Random(0)
    for _ in range(4):
        cache = new_cache(base, 2)
        prefill(base, text, torch.tensor([5, 3]), cache, chunk=drawn.randint(1, 5))
        while not torch.equal(cache.lengths, lengths):
            kept = torch.tensor(
                [min(drawn.randint(0, 3), left) for left in (lengths - cache.lengths).tolist()]
            )
            nodes = random_prompts(2, BUSHY.num_nodes, drawn.randint(0, 99))
            path = torch.tensor(drawn.choice(PATHS))
            for row in range(2):  # the kept nodes of the path hold the text
                start = int(cache.lengths[row])
                count = int(kept[row])
                nodes[row, path[:count]] = text[row, start : start + count]
            verify(base, nodes, BUSHY.topology(text.device), cache)
            cache.commit(path.expand(2, -1), kept)
        for expected, actual in zip(
            verify(base, after, chain, whole), verify(base, after, chain, cache), strict=True
        ):
            assert torch.equal(expected, actual)


PATHS = [path for path in BUSHY.topology(torch.device("cpu")).lineage[0].tolist() if len(set(path)) >= 3]
"""Paths of three nodes and more."""


@needs_kernels
@pytest.mark.parametrize(
    "rule", [recurrent_rules.matrix_rule, matrix_rule.matrix_rule], ids=["torch", "kernel"]
)
@pytest.mark.parametrize("sizes", [(1, 4, 3), (3, 20, 33), (2, 128, 64)])
def test_a_selective_scan_is_that_of_its_paper(rule, sizes):
    """Equation 2 of arXiv 2312.00752, with its discretisation, written down for one head."""
    lanes()  # loads the kernels
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.rand(shape, generator=generator)

    N = 7
    H, K, V = sizes
    C, B, x, steps, A = (
        drawn(1, N, H, K),
        drawn(1, N, H, K),
        drawn(1, N, H, V),
        drawn(1, N, H, V),
        -drawn(H, K, V),
    )
    actual = rule(state_of(N), C, B, x * steps, steps, rates=A)
    for head in range(H):
        S = torch.zeros(K, V)
        for n in range(N):
            step = steps[0, n, head]
            S = torch.exp(step * A[head]) * S + torch.outer(B[0, n, head], step * x[0, n, head])
            torch.testing.assert_close(actual[0, n, head], S.T @ C[0, n, head])


@needs_kernels
@pytest.mark.parametrize(
    "rule", [recurrent_rules.matrix_rule, matrix_rule.matrix_rule], ids=["torch", "kernel"]
)
@pytest.mark.parametrize("sizes", [(1, 4, 3), (3, 20, 33), (2, 128, 64)])
def test_the_rules_are_those_of_their_papers(rule, sizes):
    """The gated delta rule, KDA and the state-space rule, written down for one head."""
    lanes()  # loads the kernels
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.rand(shape, generator=generator) / 4

    N = 7
    H, K, V = sizes
    q, k, v, beta = drawn(1, N, H, K), drawn(1, N, H, K), drawn(1, N, H, V), drawn(1, N, H)
    for decay, correction in ((drawn(1, N, H), beta), (drawn(1, N, H, K), beta), (drawn(1, N, H), None)):
        actual = rule(state_of(N), q, k, v, decay, correction)
        for head in range(H):
            S = torch.zeros(K, V)
            for n in range(N):
                S = decay[0, n, head][..., None] * S
                seen = 0 if correction is None else S.T @ k[0, n, head]
                factor = 1 if correction is None else correction[0, n, head]
                S = S + torch.outer(k[0, n, head], factor * (v[0, n, head] - seen))
                torch.testing.assert_close(actual[0, n, head], S.T @ q[0, n, head])


@needs_kernels
@pytest.mark.parametrize(
    "rule", [recurrent_rules.matrix_rule, matrix_rule.matrix_rule], ids=["torch", "kernel"]
)
def test_heads_in_turn_share_a_key(rule):
    """The bits are those of a key for each head, in a tree and behind its committed nodes."""
    lanes()  # loads the kernels
    generator = torch.Generator().manual_seed(0)
    H, G, K, V = 6, 2, 20, 33
    answers = []
    for repeats in (1, H // G):
        generator.manual_seed(1)
        paths = Paths()
        state = MatrixState(paths)
        outputs = []
        for topology in (BUSHY.topology(torch.device("cpu")), TreeTopology.chain(9, "cpu")):
            N = topology.num_nodes
            paths.begin(topology)
            state.begin_pass()
            q, k, v, decay, beta = (
                torch.rand(1, N, *shape, generator=generator) / 4
                for shape in ((G, K), (G, K), (H, V), (H,), (H,))
            )
            q, k = (each.repeat_interleave(repeats, dim=2) for each in (q, k))
            outputs.append(rule(state, q, k, v, decay, beta))
            state.commit(Kept(torch.tensor([PATHS[0]]), torch.tensor([3])), [3])
        answers.append(torch.cat(outputs, dim=1))
    assert torch.equal(*answers)


@pytest.mark.parametrize("engine", ["eager", "packed"])
@pytest.mark.parametrize("model_type", SOME)
def test_a_prompt_leaves_states_and_no_nodes(model_type, engine):
    """Also while it is read: those of a chunk may take more memory than all states. A chunk that fails is as
    if it had not been."""
    base = apply_engine(stateful_model(model_type), engine)
    text = random_prompts(1, 64)
    cache = new_cache(base, 1)
    prefill(base, text, torch.tensor([64]), cache, chunk=32)
    broken = new_cache(base, 1)
    prefill(base, text[:, :32], torch.tensor([32]), broken, chunk=32)
    num_bytes = broken.bytes_per_row

    def fail(*args):
        assert broken.bytes_per_row <= 2 * num_bytes, "states before the chunk, and after it"
        raise InterruptedError

    hook = decoder_layers(base)[-1].register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        prefill(base, text, torch.tensor([64]), broken, chunk=32)
    hook.remove()
    prefill(base, text, torch.tensor([64]), broken, chunk=32)
    after = random_prompts(1, 1, 7)
    chain = TreeTopology.chain(1, text.device)
    for expected, actual in zip(
        verify(base, after, chain, cache), verify(base, after, chain, broken), strict=True
    ):
        assert torch.equal(expected, actual)


def state_of(num_nodes: int) -> MatrixState:
    """An empty state before a chain."""
    paths = Paths()
    paths.begin(TreeTopology.chain(num_nodes, "cpu"))
    return MatrixState(paths)
