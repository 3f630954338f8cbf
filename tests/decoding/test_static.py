"""Static steps: the general loop's own results, nothing asked of the device, captured or as they are."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    BUSHY,
    READING,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    OracleDrafter,
    assert_exact,
    counting_model,
    decode,
    left_padded,
    random_heads,
    random_prompts,
    tiny_model,
)
from refusals import refusals
from static_oracle import StaticOracle
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as hf

from medusa import CandidateTree, DecodingStatistics, HeadsConfig, MedusaHeads, MedusaModel
from medusa.acceptance.sampling import PATH_FREE_PROCESSORS
from medusa.base.fixed_cache import FixedTreeCache
from medusa.decoding.batch import Batch, StepResult
from medusa.decoding.executor import Call, Executor
from medusa.decoding.kept_steppers import MAX_KEPT
from medusa.decoding.state import DecodeRequest
from medusa.decoding.static_stepper import rounded_slots
from medusa.drafters.dynamic import DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import PlainDrafter
from medusa.drafters.suffix import SuffixDrafter
from medusa.drafters.union import UnionDrafter

TREE = CandidateTree.from_paths([(), (0,), (1,), (0, 0), (1, 2), (1, 2, 0)])
CHAIN = CandidateTree.chain(3)
TREES = [
    CandidateTree.chain(0),
    CandidateTree.chain(3),
    BUSHY,
    CandidateTree.from_paths([(rank,) for rank in range(5)]),
    CandidateTree.from_paths([(1,), (1, 2), (1, 2, 0)]),
]
LENGTHS = [40, 7, 1]
SAMPLED = {
    "seeds": torch.tensor([3, 4, 5]),
    "temperature": 1.2,
    "processors": LogitsProcessorList([hf.TemperatureLogitsWarper(1.2), hf.TopKLogitsWarper(30)]),
}


def request_of(lengths=LENGTHS, max_new_tokens: int = 21, **kwargs) -> DecodeRequest:
    """Ragged rows, stored from column 0."""
    prompts = random_prompts(len(lengths), max(lengths))
    return DecodeRequest(prompts, torch.tensor(lengths), max_new_tokens, **kwargs)


def answers_of(base, request: DecodeRequest) -> list[list[int]]:
    """Prompt and plain answer of every row."""
    rows = [row[:n].tolist() for row, n in zip(request.tokens, request.lengths.tolist(), strict=True)]
    for step in decode(base, PlainDrafter(), request):
        for row, new in zip(rows, step.tokens, strict=True):
            row.extend(new)
    return rows


def both(base, drafter_of, request: DecodeRequest, host_sync_interval: int = 4, step="static"):
    """(results, statistics) of the general loop, and of static steps."""
    general, static = DecodingStatistics(), DecodingStatistics()
    expected = list(decode(base, drafter_of(), request, general))
    runners = Executor(base)
    results = list(decode(runners, drafter_of(), request, static, None, step, host_sync_interval))
    return (expected, general), (results, static)


def assert_same(general: tuple, static: tuple) -> list[StepResult]:
    (expected, expected_statistics), (results, statistics) = general, static
    assert results == expected
    for name in ("num_rows", "num_steps", "num_passes", "accepted_histogram"):
        assert getattr(statistics, name) == getattr(expected_statistics, name)
    return results


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_ragged_batch_gives_what_the_general_loop_gives(architecture, sampled):
    base = tiny_model(architecture)
    request = request_of([SLIDING_WINDOW + 8, 7, 1], **sampled)
    answers = answers_of(base, request)
    results = assert_same(*both(base, lambda: StaticOracle(answers, BUSHY), request))
    assert len(results) < 16  # 21 tokens each: many guesses were right


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.num_nodes} nodes")
def test_every_shape_of_tree_gives_it(tree, attention):
    base = tiny_model("gemma3")
    base.set_attn_implementation(attention)
    try:
        request = request_of([33], **{**SAMPLED, "seeds": torch.tensor([9])})
        answers = answers_of(base, request)
        assert_same(*both(base, lambda: StaticOracle(answers, tree), request, host_sync_interval=8))
    finally:
        base.set_attn_implementation("sdpa")


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("unembedding", ["shared", "full", "token_map"])
def test_every_kind_of_heads_gives_it(unembedding, reading):
    base = tiny_model("qwen3")
    ids = list(range(3, 40)) if unembedding == "token_map" else None
    heads = random_heads(std=0.1, token_map=ids, **{"unembedding": unembedding, **READING[reading]})
    drafter_of = lambda: HeadsDrafter(heads, base.get_output_embeddings(), TREE)  # noqa: E731
    assert_same(*both(base, drafter_of, request_of(**SAMPLED)))


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[9], [12, 7, 1]], ids=["one row", "ragged rows"])
def test_a_tree_that_branches_with_as_many_nodes_as_a_chain_of_its_depth_is_exact(lengths, sampled):
    """The heads' tree is a chain; dynamic heads take its size and choose another shape at every step."""
    base = tiny_model("llama")
    heads = random_heads()
    chain, embedding = CandidateTree.chain(3), base.get_output_embeddings()
    if sampled:
        sampled = {**sampled, "seeds": sampled["seeds"][: len(lengths)]}
    request = request_of(lengths, max_new_tokens=30, **sampled)
    results = assert_same(*both(base, lambda: DynamicHeadsDrafter(heads, embedding, chain), request))
    rows = [row[:n].tolist() for row, n in zip(request.tokens, lengths, strict=True)]
    for result in results:
        for row, new in zip(rows, result.tokens, strict=True):
            row.extend(new)
    assert rows == answers_of(base, request)


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("suffix_length", [1, 4, 9])
def test_dynamic_trees_with_a_suffix_match_are_the_same_in_static_steps(suffix_length, sampled):
    """The counting base repeats itself, so that matches are right; the heads give nothing but NaN."""
    base = counting_model(8)
    heads = MedusaHeads(HeadsConfig(8, 8, num_heads=3, unembedding="full"))
    for parameter in heads.parameters():
        parameter.data.fill_(float("nan"))
    heads = DynamicHeadsDrafter(heads, base.get_output_embeddings(), CandidateTree.chain(3))
    if sampled:
        sampled = {**sampled, "seeds": sampled["seeds"][:2]}
    prompts = torch.tensor([[1, 2, 3, 4], [5, 0, 0, 0]])
    request = DecodeRequest(prompts, torch.tensor([4, 1]), 60, **sampled)
    results = assert_same(*both(base, lambda: heads.with_suffix(suffix_length), request))
    assert sampled or len(results) <= 10 + 52 / (1 + min(suffix_length, 4))


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
def test_max_new_tokens_inside_an_accepted_path_is_exact(max_new_tokens):
    base = tiny_model("llama")
    answers = answers_of(base, request_of(max_new_tokens=24))
    request = request_of(max_new_tokens=max_new_tokens)
    drafter_of = lambda: StaticOracle(answers, CandidateTree.chain(4), always=True)  # noqa: E731
    results = assert_same(*both(base, drafter_of, request, host_sync_interval=3))
    assert [sum(len(r.tokens[row]) for r in results) for row in range(3)] == [max_new_tokens] * 3


def test_end_of_sequence_inside_an_accepted_path_ends_each_row_there():
    """One row ends with its first token and leaves the batch, one inside a path, one at its limit."""
    base = tiny_model("llama")
    free = [row[n:] for row, n in zip(answers_of(base, request_of()), LENGTHS, strict=True)]
    eos = frozenset({free[1][0], free[0][9]})
    request = request_of(eos_ids=eos)
    answers = [
        prompt[:n].tolist() + new for prompt, n, new in zip(request.tokens, LENGTHS, free, strict=True)
    ]
    for tree in (CandidateTree.chain(4), BUSHY):
        drafter_of = lambda: StaticOracle(answers, tree, always=True)  # noqa: B023, E731
        results = assert_same(*both(base, drafter_of, request))
        for row in range(3):
            end = next((at + 1 for at, token in enumerate(free[row]) if token in eos), 21)
            assert [token for result in results for token in result.tokens[row]] == free[row][:end]
    assert len(free[1][:1]) == 1 and not eos & set(free[0][:9])


def test_a_row_that_has_ended_stands_still_while_the_others_go_on():
    """A counting base: one row reaches the end of sequence at once, the other needs dozens of tokens."""
    base, size = counting_model(48), 48
    heads = MedusaHeads(HeadsConfig(size, size, num_heads=3, unembedding="full"))
    for d, rows in enumerate(heads.unembed, start=1):
        rows.data = torch.eye(size).roll(1 + d, dims=0)
    model = MedusaModel(base, heads, tree=CandidateTree.chain(3))
    prompts = torch.tensor([[38], [2]])
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": 41, "pad_token_id": 0}
    out = model.generate(prompts, **options, step="static", return_dict_in_generate=True)
    assert out.sequences.tolist() == [[38, 39, 40, 41] + [0] * 36, list(range(2, 42))]
    assert out.statistics.acceptance_rate[0] == 1.0


@pytest.mark.parametrize("num_tokens", [20, 300])
def test_the_cache_grows_between_steps_and_keeps_what_it_holds(num_tokens):
    base = tiny_model("mistral-sliding")
    request = request_of([250, 180], max_new_tokens=num_tokens)
    answers = answers_of(base, request)
    drafter_of = lambda: StaticOracle(answers, CandidateTree.chain(3), always=True)  # noqa: E731
    assert_same(*both(base, drafter_of, request, host_sync_interval=5))


def test_a_pass_reads_few_sizes_of_cache_and_not_much_more_than_the_tokens(monkeypatch):
    assert [rounded_slots(n) for n in (1, 256, 257, 1024, 1025, 4000, 4097)] == [
        256,
        256,
        512,
        1024,
        2048,
        4096,
        5120,
    ]
    base, used, use_slots = tiny_model("llama"), [], FixedTreeCache.use_slots
    monkeypatch.setattr(
        FixedTreeCache, "use_slots", lambda cache, slots: (used.append(slots), use_slots(cache, slots))
    )
    for _ in decode(base, PlainDrafter(), request_of([240], 300), None, None, "static", 8):
        pass
    assert sorted(set(used)) == [256, 512, 768]
    assert base.config.max_position_embeddings > 768


@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "top_p": 0.9, "seed": 2}], ids=["greedy", "sampled"]
)
def test_generate_and_stream_give_the_same_on_every_engine(engine, options):
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=2))
    model = MedusaModel(tiny_model("phi"), heads, CandidateTree.chain(2), engine=engine)
    batch = left_padded(random_prompts(3, 40), LENGTHS)
    options = {"do_sample": False, "max_new_tokens": 12, **options}
    expected = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, step="static"), expected)
    rows: list[list[int]] = [[], [], []]
    for result in model.stream(**batch, **options, step="static"):
        for row, new in zip(rows, result.tokens, strict=True):
            row.extend(new)
    assert rows == expected[:, 40:].tolist()


def test_two_streams_of_one_model_do_not_disturb_each_other():
    model = MedusaModel(tiny_model("llama"), step="static")
    one, two = random_prompts(1, 9), random_prompts(1, 9, seed=1)
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = [model.generate(prompt, **options, step="general")[0, 9:].tolist() for prompt in (one, two)]
    pairs = zip(model.stream(one, **options), model.stream(two, **options), strict=True)
    streamed = [[result.tokens[0][0] for result in pair] for pair in pairs]
    assert [list(row) for row in zip(*streamed, strict=True)] == expected


def test_every_processor_that_reads_no_path_is_let_through():
    base, vocab = tiny_model("llama"), VOCAB_SIZE
    made = {
        hf.TemperatureLogitsWarper: (0.8,),
        hf.TopKLogitsWarper: (20,),
        hf.TopPLogitsWarper: (0.9,),
        hf.MinPLogitsWarper: (0.02,),
        hf.TypicalLogitsWarper: (0.9,),
        hf.EpsilonLogitsWarper: (0.01,),
        hf.EtaLogitsWarper: (0.01,),
        hf.SuppressTokensLogitsProcessor: ([4, 5],),
        hf.InfNanRemoveLogitsProcessor: (),
        hf.LogitNormalization: (),
    }
    assert set(made) == set(PATH_FREE_PROCESSORS) and vocab == base.config.vocab_size
    processors = LogitsProcessorList(kind(*arguments) for kind, arguments in made.items())
    request = request_of(**{**SAMPLED, "processors": processors}, max_new_tokens=8)
    answers = answers_of(base, request)
    assert_same(*both(base, lambda: StaticOracle(answers, BUSHY), request))


@pytest.mark.parametrize("rule", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 2}])
def test_a_repetition_penalty_is_let_through_and_does_not_see_the_padding(rule):
    model = MedusaModel(tiny_model("llama"), random_heads(), TREE)
    batch = left_padded(random_prompts(3, 12), [12, 5, 1])
    options = {"max_new_tokens": 25, "repetition_penalty": 1.6, "pad_token_id": 0, **rule}
    out = assert_exact(model, batch, {"step": "static"}, {"step": "static", "tree": CHAIN}, **options)
    without = model.generate(**batch, **{**options, "repetition_penalty": 1.0})
    assert out.sequences.tolist() != without.tolist()


ON_THE_HOST = OracleDrafter([[1]], BUSHY, hit_rate=1.0)
NEVER = StoppingCriteriaList([lambda ids, scores, **_: torch.zeros(1).bool()])
STATIC = {
    "a processor": (
        {"no_repeat_ngram_size": 2},
        "logits processors that read ... NoRepeatNGramLogitsProcessor",
    ),
    "a stopping criterion": ({"stopping_criteria": NEVER}, "stopping criteria"),
    "typical acceptance": ({"acceptance": "typical"}, "acceptance='typical'; use acceptance='exact', or"),
    "another rule": (
        {"acceptance": "token", "do_sample": True},
        "acceptance='token'; use acceptance='exact', or",
    ),
    "another drafter": (
        {"drafter": ON_THE_HOST},
        "OracleDrafter, which is no StaticDrafter: it reads the text on the host, or lacks num_nodes",
    ),
    "such a part": ({"drafter": UnionDrafter([SuffixDrafter(4), ON_THE_HOST])}, "OracleDrafter, which"),
}
STEPS = [
    ("captured", "eager", "step='captured' needs ... CUDA device, got one on cpu; use step='static'"),
    ("compiled", "eager", "step='compiled' needs engine='packed' or 'int8'"),
    ("fast", "eager", "step must be one of ('auto', ... 'captured'), got 'fast'"),
]


def asked(method: str, step: str, **options):
    model, call = MedusaModel(tiny_model("llama")), {"max_new_tokens": 4, "do_sample": False, **options}
    return lambda: getattr(model, method)(random_prompts(1, 5), **call, step=step)


test_what_a_step_cannot_run_on_is_refused_by_name = refusals(
    *(
        (f"{what}, {method}", asked(method, "static", **options), f"step='static' cannot work with {words}")
        for what, (options, words) in STATIC.items()
        for method in ("generate", "stream")
    ),
    *((f"{step} for a call", asked("stream", step), words) for step, _, words in STEPS),
    *(
        (step, partial(MedusaModel, tiny_model("llama"), engine=engine, step=step), words)
        for step, engine, words in STEPS
    ),
)


def test_greedily_every_rule_is_the_exact_one_and_runs():
    model, call = MedusaModel(tiny_model("llama")), {"max_new_tokens": 6, "do_sample": False}
    assert_exact(model, random_prompts(1, 5), {"acceptance": "block", "step": "static"}, **call)


@pytest.mark.parametrize("step", ["compiled", "captured"])
def test_on_a_sharded_model_only_static_steps_run(step, monkeypatch):
    base = tiny_model("llama")
    monkeypatch.setattr(base, "hf_device_map", {"model": "cpu", "lm_head": "disk"}, raising=False)
    with pytest.raises(ValueError, match=r"this one is sharded.*\(device_map\); use step='static'"):
        MedusaModel(base, step=step)
    prompt, options = random_prompts(1, 4), {"max_new_tokens": 5, "do_sample": False}
    expected = MedusaModel(base).generate(prompt, **options)
    assert torch.equal(MedusaModel(base, step="static").generate(prompt, **options), expected)


def test_a_model_that_layers_were_offloaded_from_runs_static_steps(tmp_path):
    """accelerate's own hooks on every module, a layer's weights on disk."""
    hooks = pytest.importorskip("accelerate")
    base = ARCHITECTURES["llama"]().eval()
    prompt, options = random_prompts(2, 4), {"max_new_tokens": 5, "do_sample": False}
    expected = MedusaModel(base).generate(prompt, **options)
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), "cpu")
    places |= {"model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    sharded = hooks.dispatch_model(base, places, main_device="cpu", offload_dir=tmp_path)
    for step in ("general", "static"):
        assert torch.equal(MedusaModel(sharded, step=step).generate(prompt, **options), expected)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def model_on_a_card(request):
    torch.manual_seed(0)
    base = ARCHITECTURES[getattr(request, "param", "llama")]().to("cuda").eval()
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3, reads_path=True))
    return MedusaModel(base, heads, TREE)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("model_on_a_card", sorted(ARCHITECTURES), indirect=True)
@pytest.mark.parametrize("step", ["static", "captured"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9, "top_k": 20, "seed": 3}])
def test_on_a_card_every_kind_of_step_gives_the_tokens_of_the_general_loop(model_on_a_card, step, options):
    """Twice, so that what was captured is replayed; past 256 slots, so that the cache grows."""
    batch = {name: each.to("cuda") for name, each in left_padded(random_prompts(3, 240), [240, 9, 1]).items()}
    options = {"do_sample": False, "max_new_tokens": 60, **options}
    expected = model_on_a_card.generate(**batch, **options)
    assert torch.equal(expected, model_on_a_card.generate(**batch, **options, tree=CandidateTree.chain(0)))
    for _ in range(2):
        assert torch.equal(model_on_a_card.generate(**batch, **options, step=step), expected)


@pytest.mark.gpu
@needs_cuda
def test_what_was_captured_is_kept_for_the_next_answer_and_captured_anew_when_weights_move(model_on_a_card):
    def answered() -> tuple[torch.Tensor, float]:
        prompt = random_prompts(1, 9).to("cuda")
        options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
        options["drafter"] = "heads"  # which never pauses: a pause has a graph of its own
        out = model_on_a_card.generate(prompt, **options, step="captured")
        assert torch.equal(out.sequences, model_on_a_card.generate(prompt, **options).sequences)
        return out.statistics.setup_seconds

    assert answered() > 0
    assert answered() == 0
    with torch.no_grad():
        lm_head = model_on_a_card.base.lm_head
        lm_head.weight = torch.nn.Parameter(lm_head.weight.flip(0).contiguous())
    assert answered() > 0


@pytest.mark.gpu
@needs_cuda
def test_two_captured_streams_do_not_disturb_each_other(model_on_a_card):
    one, two = (random_prompts(1, 9, seed=seed).to("cuda") for seed in range(2))
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = [model_on_a_card.generate(prompt, **options)[0, 9:].tolist() for prompt in (one, two)]
    streams = [model_on_a_card.stream(prompt, **options, step="captured") for prompt in (one, two)]
    answers: list[list[int]] = [[], []]
    while streams:
        for stream, answer in zip(list(streams), answers, strict=False):
            answer.extend(next(stream).tokens[0])
        streams = [] if any(len(answer) >= 30 for answer in answers) else streams
    for answer, full in zip(answers, expected, strict=True):
        assert answer == full[: len(answer)]


@pytest.mark.gpu
@needs_cuda
def test_a_model_keeps_the_graphs_of_its_last_settings_only(model_on_a_card):
    for depth in range(4):
        for num_rows in range(1, 8):
            model_on_a_card.generate(
                random_prompts(num_rows, 4).to("cuda"),
                tree=CandidateTree.chain(depth),
                max_new_tokens=4,
                do_sample=False,
                step="captured",
            )
    assert len(model_on_a_card._executor.captured) == MAX_KEPT


def test_the_keys_and_values_of_the_prompt_are_held_once():
    """In the memory of the static steps, to which they were moved."""
    executor = Executor(tiny_model("llama"))
    batch = Batch(executor.plan(Call(request_of(), "static", PlainDrafter())))
    batch.start(request_of())
    batch.step()
    entries = [weakref.ref(each) for layer in batch._state.cache.tree_layers for each in layer.entries]
    assert all(entry() is not None for entry in entries)
    batch.step()
    gc.collect()
    assert [entry() for entry in entries] == [None] * len(entries)
    assert batch._stepper._memory.holds(batch._state.cache)
