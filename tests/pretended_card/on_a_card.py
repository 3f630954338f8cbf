"""What decoding and training do on cards that are pretended: run by test_on_a_pretended_card.py, as a process
of its own in which ``pretended_card`` was imported before torch."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from contextlib import contextmanager
from itertools import product

import pytest
import tiny_training
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.state import AcceleratorState
from conftest import (
    GROUPED,
    VOCAB_SIZE,
    RandomDrafting,
    decode,
    left_padded,
    program,
    random_heads,
    random_prompts,
    tiny_model,
)
from gguf import GGMLQuantizationType
from quantised_files import write_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import medusa.base.attention
import medusa.decoding.cuda_graphs
import medusa.decoding.kept_steppers
import medusa.decoding.static_stepper
import pretended_card
from medusa import CandidateTree, MedusaModel
from medusa.base.attention import grouped_attention, pinned_attention
from medusa.base.causal_lm import lm_head_device
from medusa.decoding.batch import Batch, BatchLimits, Row
from medusa.decoding.executor import Call, Executor
from medusa.decoding.state import DecodeRequest
from medusa.decoding.step import GeneralStepper
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.registry import DrafterFactory, DrafterSettings
from medusa.engine.weights.load import load_base
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.heads.checkpoint import HeadsCheckpoint
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.training.config import BaseOptions
from medusa.training.data.batching import PaddedBatch
from medusa.training.states.base import OnlineHiddenStates, end_on, live_states
from pretended_card import PretendedGraph, counts

TREE = CandidateTree.from_paths([(), (0,), (1,), (0, 0), (1, 2), (1, 2, 0)])
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 3}
RULES = {"greedy": GREEDY, "sampled": SAMPLED}
STEPS = ["general", "static", "captured"]
STATIC_DRAFTERS = ["plain", "heads", "dynamic-heads", "suffix", "dynamic-heads+suffix", "heads+suffix"]
OTHER_DRAFTERS = ["draft-model", "early-exit", "eagle3"]
NUM_LAYERS = 4

MOST_WAITS = {"plain": 1, "heads": 1, "dynamic-heads+suffix": 1}
"""Times that the host waits for the device in a general step of one row, as it is: they may only fall."""
MOST_WAITS_OF_A_CALL = 7
"""And in a call of one token: four times in ``transformers``' own part of it, and for the ids, for what may
have changed since the last call, and for the token."""
MOST_LAUNCHES = {
    ("plain", "greedy"): 24,
    ("plain", "sampled"): 118,
    ("heads", "greedy"): 80,
    ("heads", "sampled"): 183,
    ("dynamic-heads+suffix", "greedy"): 533,
    ("dynamic-heads+suffix", "sampled"): 728,
}
"""Operators of a captured step of one row that are none of the base's pass."""
MOST_WAITS_OF_A_BURST = 1
"""And in a burst of static or captured steps, whose results it reads together."""
MOST_LAUNCHES_OF_A_SHARED_STEP = {"greedy": 549, "sampled": 769}
"""Operators of a captured step of a shared batch that are none of the base's pass, by the default drafter."""
MOST_LAUNCHES_BESIDE_REPLAYS = 12
"""Operators of a call of a shared batch whose rows have not changed, beside its replays: they read the
results."""


def llama(num_layers: int = NUM_LAYERS) -> LlamaForCausalLM:
    """A random base with layers enough for early exits and EAGLE-3, the same one every time."""
    torch.manual_seed(7)
    sizes = {**GROUPED, "num_hidden_layers": num_layers, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def named(model: MedusaModel, name: str):
    """A drafter for ``model``, made of random parts where it has some of its own."""
    if name not in OTHER_DRAFTERS:
        return name
    options = {"max_depth": 3, "token_map_size": 40, "own_lm_head": True, "fused_layers": (1, 2, 3)}
    config = Eagle3Config.of_base(model.base, **options)
    torch.manual_seed(5)
    eagle3 = HeadsCheckpoint(Eagle3Head(config, token_map=list(range(3, 43))).eval(), "x", TREE)
    draft_model = llama(1).to(model.device)
    settings = DrafterSettings(draft_model=draft_model, exit_layer=1, eagle3=eagle3)
    return DrafterFactory(model, settings).make(name)


def batch(num_rows: int) -> dict[str, Tensor]:
    return left_padded(random_prompts(num_rows, 17), [17, 9, 4][:num_rows])


def on_card(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.to("cuda") for name, each in given.items()}


def same_as_cpu(on_cpu: MedusaModel, card: MedusaModel, drafter: str, step: str, num_rows: int, **options):
    """The answers of both, which must be the same; those of captured steps twice, so that graphs are kept."""
    given = batch(num_rows)
    options = {"max_new_tokens": 14, **options}
    expected = on_cpu.generate(**given, **options, drafter=named(on_cpu, drafter))
    for _ in range(2 if step == "captured" else 1):
        found = card.generate(**on_card(given), **options, drafter=named(card, drafter), step=step)
        assert torch.equal(found.cpu(), expected)


@pytest.fixture(scope="module")
def models():
    """The same base and heads on the CPU and on a card."""
    base = llama()
    return (
        MedusaModel(base, random_heads(), TREE),
        MedusaModel(copy.deepcopy(base).to("cuda"), random_heads(), TREE),
    )


CASES = [*product(STATIC_DRAFTERS, STEPS), *((name, "general") for name in OTHER_DRAFTERS)]
CORE = [
    ("plain", "captured", 1, "greedy"),
    ("plain", "general", 3, "sampled"),
    ("heads", "general", 3, "greedy"),
    ("heads", "static", 1, "sampled"),
    ("heads", "captured", 3, "sampled"),
    ("dynamic-heads+suffix", "general", 3, "sampled"),
    ("dynamic-heads+suffix", "captured", 1, "greedy"),
    ("draft-model", "general", 3, "sampled"),
    ("early-exit", "general", 1, "sampled"),
    ("eagle3", "general", 3, "greedy"),
]
"""Of all cases, those that every run of the tests tries."""
ALL = [(*case, num_rows, rule) for case, num_rows, rule in product(CASES, (1, 3), RULES)]


@pytest.mark.parametrize(
    ("drafter", "step", "num_rows", "rule"),
    [pytest.param(*case, marks=() if case in CORE else pytest.mark.slow) for case in ALL],
)
def test_tokens_are_those_of_the_cpu(models, drafter, step, num_rows, rule):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # steps that cannot be captured
        same_as_cpu(*models, drafter, step, num_rows, **RULES[rule])


@pytest.mark.parametrize("step", ["general", pytest.param("static", marks=pytest.mark.slow), "captured"])
def test_heads_that_read_path_layers_and_a_token_map_give_the_tokens_of_the_cpu(step):
    config = {"reads_path": True, "fused_layers": (1, 3), "token_map": list(range(3, 40))}
    base = llama()
    card = MedusaModel(copy.deepcopy(base).to("cuda"), random_heads(**config), TREE)
    on_cpu = MedusaModel(base, random_heads(**config), TREE)
    same_as_cpu(on_cpu, card, "dynamic-heads+suffix", step, 3, **SAMPLED)


POISON = 60


class PoisonedLevels(LevelDrafter):
    """Guesses a token on which the base is not finite, among others."""

    vocab_size = VOCAB_SIZE

    def logits_after(self, context, tokens, nodes):
        liked = torch.tensor([POISON, 7], device=tokens.device)
        logits = torch.zeros(len(tokens), nodes.stop - nodes.start, VOCAB_SIZE, device=tokens.device)
        return logits.index_fill(2, liked, 4.0)


@pytest.mark.parametrize(
    "options", [GREEDY, SAMPLED, SAMPLED | {"acceptance": "multi_draft"}], ids=["greedy", "sampled", "a rule"]
)
def test_a_guess_on_which_the_base_is_not_finite_leaves_the_text_of_the_cpu(options):
    base = llama(2)
    with torch.no_grad():
        base.get_input_embeddings().weight[POISON] = float("nan")
    given, options = batch(3), {**options, "max_new_tokens": 12, "suppress_tokens": [POISON]}
    expected = MedusaModel(base).generate(**given, **options, drafter=PoisonedLevels(TREE, "cpu"))
    card = MedusaModel(copy.deepcopy(base).to("cuda"))
    found = card.generate(**on_card(given), **options, drafter=PoisonedLevels(TREE, "cuda"))
    assert torch.equal(found.cpu(), expected)


def test_requests_that_share_passes_get_the_tokens_of_the_cpu_alone(models):
    requests = [
        (random_prompts(1, 17), GREEDY | {"repetition_penalty": 1.3}),
        (random_prompts(1, 5, seed=1), SAMPLED),
        (random_prompts(1, 9, seed=2), GREEDY | {"no_repeat_ngram_size": 2}),
    ]
    limits = {"max_new_tokens": 10}
    expected = [models[0].generate(ids, **options, **limits)[0, ids.shape[1] :] for ids, options in requests]
    shared = models[1].continuous_batch(BatchLimits(max_rows=3, chunk=8))
    rows = [Row(models[1].request(ids.to("cuda"), **options, **limits)) for ids, options in requests]
    for row in rows:
        shared.add(row)
        shared.step()
    while shared.is_busy:
        shared.step()
    assert [row.tokens for row in rows] == [each.tolist() for each in expected]


# ------------------------------------------------------------------ a batch that requests join


def clients(num_tokens: int = 24) -> list[tuple[Tensor, dict]]:
    """Prompts of several clients and their options, no two alike."""
    penalised = {"do_sample": True, "seed": 8, "temperature": 0.8, "repetition_penalty": 1.2}
    rules = (
        GREEDY,
        SAMPLED,
        GREEDY | {"eos_token_id": [20]},
        penalised,
        {"do_sample": True, "min_p": 0.1, "seed": 1},
    )
    return [
        (random_prompts(1, 5 + 3 * place, seed=place), {**rule, "max_new_tokens": num_tokens + 9 * place})
        for place, rule in enumerate(rules)
    ]


def rows_on_card(model: MedusaModel, asked: list[tuple[Tensor, dict]]) -> list[Row]:
    return [Row(model.request(ids.to("cuda"), **options)) for ids, options in asked]


def answer_apart(shared: Batch, rows: list[Row], num_calls: int = 2) -> None:
    """Add ``rows`` some calls apart, and run until all have ended."""
    for row in rows:
        shared.add(row)
        for _ in range(num_calls):
            shared.step()
    while shared.is_busy:
        shared.step()


def texts_of_cpu(model: MedusaModel, asked: list[tuple[Tensor, dict]]) -> list[list[int]]:
    """The answer to each alone."""
    return [model.generate(ids, **options)[0, ids.shape[1] :].tolist() for ids, options in asked]


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_shared_batch_replays_graphs_and_gives_the_tokens_of_the_cpu_alone(models, monkeypatch, plain):
    """The third time nothing has to be captured, though rows come and go: steps of few bursts are captured
    when they come again."""
    asked = clients()
    expected = texts_of_cpu(models[0], asked)
    model = MedusaModel(models[1].base, random_heads(), TREE)
    model._executor.costs.adaptive = lambda *_: None  # what does not pay here depends on time
    shared = model.continuous_batch(BatchLimits(max_rows=4, chunk=8), plain=plain)
    monkeypatch.setattr(GeneralStepper, "advance", lambda *_: pytest.fail("a general step"))
    num_graphs = []
    PretendedGraph.made.clear()
    for _ in range(3):
        rows = rows_on_card(model, asked)
        answer_apart(shared, rows)
        assert [row.tokens for row in rows] == expected
        num_graphs.append(len(PretendedGraph.made))
    assert num_graphs[1] == num_graphs[2] > 1


def test_steps_with_drafts_and_without_by_turns_capture_nothing_again(models):
    model = MedusaModel(models[1].base, random_heads(), TREE)
    model._executor.costs.adaptive = lambda *_: RandomDrafting(3)
    shared = model.continuous_batch(BatchLimits(max_rows=1))
    PretendedGraph.made.clear()
    for _ in range(3):
        answer_apart(shared, rows_on_card(model, [(random_prompts(1, 9), GREEDY | {"max_new_tokens": 90})]))
    assert len(PretendedGraph.made) == 2


def test_a_burst_of_a_shared_batch_waits_once_and_launches_little_beside_its_replays(models):
    shared = models[1].continuous_batch(BatchLimits(max_rows=4), plain=True)
    answer_apart(shared, rows_on_card(models[1], clients()[:3]))
    num_bursts, stood = 0, None
    for row in rows_on_card(models[1], clients()[:3]):
        shared.add(row)
    while shared.is_busy:
        num_graphs, before = len(PretendedGraph.made), shared._state and shared._state.rows
        with pretended_card.watched() as seen:
            shared.step()
        if seen.launches["replay"] and len(PretendedGraph.made) == num_graphs:
            num_bursts += 1
            assert seen.waits.total() == MOST_WAITS_OF_A_BURST, seen.waits
            if shared._state is not None and shared._state.rows is before is stood:
                assert seen.launches.total() - seen.launches["replay"] <= MOST_LAUNCHES_BESIDE_REPLAYS
            stood = before
    assert num_bursts >= 4


def test_a_shared_batch_is_captured_again_once_a_request_that_cannot_be_has_ended(models):
    asked = clients(24)[:4]
    asked[1] = (random_prompts(1, 7), {"do_sample": False, "no_repeat_ngram_size": 2, "max_new_tokens": 12})
    expected = texts_of_cpu(models[0], asked)
    model = MedusaModel(models[1].base, random_heads(), TREE)
    shared = model.continuous_batch(BatchLimits(max_rows=5))
    rows, kinds = rows_on_card(model, asked), []
    for row in rows[:2]:
        shared.add(row)
    while shared.is_busy:
        if shared._state is not None:
            kinds.append(shared._stepper.kind_for(shared._state.rows))
        if len(kinds) == 4:
            for row in rows[2:]:
                shared.add(row)
        shared.step()
    assert [row.tokens for row in rows] == expected
    assert kinds[0] == "general" and kinds[-1] == "captured"


@pytest.mark.parametrize("what", ["a hook", "mixtral-moe"])
def test_a_shared_batch_that_cannot_be_captured_runs_general_steps_unasked(models, what):
    base = copy.deepcopy(tiny_model("mixtral-moe" if what == "mixtral-moe" else "llama"))
    asked = clients(6)[:2]
    expected = texts_of_cpu(MedusaModel(base, random_heads(), TREE), asked)
    base = copy.deepcopy(base).to("cuda")
    if what == "a hook":
        base.model.layers[0].register_forward_hook(lambda module, given, out: None)
    model = MedusaModel(base, random_heads(), TREE)
    shared = model.continuous_batch(BatchLimits(max_rows=3))
    rows = rows_on_card(model, asked)
    with warnings.catch_warnings(record=True):
        answer_apart(shared, rows)
    assert [row.tokens for row in rows] == expected
    assert shared._stepper.kind_for([]) == "general"


# ------------------------------------------------------------------ waits


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", MOST_WAITS)
def test_a_general_step_waits_no_more_often_than_it_did(models, drafter, rule):
    model, options, num_seen = models[1], RULES[rule], []
    with pretended_card.watched() as seen:
        prompt = random_prompts(1, 9).to("cuda")
        for _ in model.stream(prompt, **options, drafter=drafter, max_new_tokens=24):
            num_seen.append(seen.waits.total())
    steps = num_seen[2:-1]  # without the prompt, the first draft of it, and the end
    assert (steps[-1] - steps[0]) / (len(steps) - 1) <= MOST_WAITS[drafter], seen.waits.most_common(20)


@pytest.mark.parametrize("step", ["static", "captured"])
def test_steps_of_fixed_shape_wait_once_in_a_burst_alone(models, step):
    model, options = models[1], {**GREEDY, "max_new_tokens": 41, "drafter": "plain", "step": step}
    prompt = random_prompts(1, 9).to("cuda")
    model.generate(prompt, **options)
    with pretended_card.watched() as seen:
        model.generate(prompt, **options)
    of_steps = {
        where: count
        for where, count in seen.waits.items()
        if "decoding/static" in where or "decoding/cuda_graphs" in where
    }
    at_the_start = 3  # what ends a row, the lengths, and that captured steps have been set up
    assert sum(of_steps.values()) <= MOST_WAITS_OF_A_BURST * 5 + at_the_start, of_steps  # of 8 steps each


@pytest.mark.parametrize("rule", counts.RULES)
@pytest.mark.parametrize("drafter", counts.DRAFTERS)
def test_a_captured_step_launches_and_a_call_of_one_token_waits_no_more_than_it_did(counted, drafter, rule):
    model, of_a_pass = counted
    regrouped = 0 if drafter == "plain" else 2 * NUM_LAYERS  # the queries of several nodes, and their results
    ours = counts.launches_of_a_step(model, drafter, rule) - of_a_pass - regrouped
    assert ours <= MOST_LAUNCHES[drafter, rule]
    assert counts.waits_of_a_call(model, drafter, rule) <= MOST_WAITS_OF_A_CALL


@pytest.mark.parametrize("rule", counts.RULES)
def test_a_step_of_a_shared_batch_launches_as_much_whatever_the_number_of_rows(counted, rule):
    """A few operators more than one of a call, whose rows all have the same settings and never fail alone."""
    model, of_a_pass = counted
    launches = []
    for num_rows in (2, 4):
        of_a_step, waits = counts.shared_burst(model, num_rows, rule)
        launches.append(of_a_step - of_a_pass - 2 * NUM_LAYERS)
        assert waits == MOST_WAITS_OF_A_BURST
    assert launches[0] == launches[1] <= MOST_LAUNCHES_OF_A_SHARED_STEP[rule]


@pytest.fixture(scope="module")
def counted():
    """A model, and the launches of a pass of its base."""
    model = counts.model_of(NUM_LAYERS)
    return model, counts.launches_of_a_pass(model)


# ------------------------------------------------------------------ what was captured


def scale(base, _):
    for layer in base.model.layers:
        layer.self_attn.scaling *= 3


def hook(base, _):
    base.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 2)


def switch_off(_, wrapped):
    wrapped.base_model.disable_adapter_layers()


def replace_buffer(base, _):
    base.model.rotary_emb.inv_freq = base.model.rotary_emb.inv_freq * 2


def renew_buffer(base, _):
    base.model.rotary_emb.inv_freq = base.model.rotary_emb.inv_freq.clone()


def write(base, _):
    base.lm_head.weight.data.mul_(-1)


@pytest.mark.parametrize("change", [scale, hook, switch_off, replace_buffer, renew_buffer, write])
def test_what_was_captured_is_not_replayed_once_the_base_has_changed(change):
    base, wrapped = llama(2).to("cuda"), None
    if change is switch_off:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        wrapped = peft.get_peft_model(base, config).eval()
        base = wrapped.get_base_model()
    model = MedusaModel(base, random_heads(), TREE)
    prompt, options = random_prompts(1, 9).to("cuda"), {**GREEDY, "max_new_tokens": 14, "drafter": "heads"}
    before = model.generate(prompt, **options, step="captured")
    change(base, wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if change is hook else "error", UserWarning)
        found = model.generate(prompt, **options, step="captured")
    assert torch.equal(found, model.generate(prompt, **options))
    assert torch.equal(found, before) == (change is renew_buffer), "the change is one of the text"


def test_graphs_are_made_for_each_size_of_the_cache_and_kept_for_the_next_answer(models, monkeypatch):
    """The cache grows on the way."""
    monkeypatch.setattr(medusa.decoding.static_stepper, "SLOTS", 8)
    graphs = PretendedGraph.made
    given, options = batch(2), {**SAMPLED, "max_new_tokens": 44, "drafter": "heads", "step": "captured"}
    expected = models[0].generate(**given, **options | {"step": "general"})
    model, setups = MedusaModel(models[1].base, random_heads(), TREE), []
    options["return_dict_in_generate"] = True
    graphs.clear()
    for _ in range(3):
        out = model.generate(**on_card(given), **options)
        assert torch.equal(out.sequences.cpu(), expected)
        setups.append((out.statistics.setup_seconds > 0, len(graphs)))
    assert setups[0][0] and setups[2] == (False, setups[1][1])
    assert len(graphs) > 1 and sum(graph.num_replays for graph in graphs) > len(graphs)


def test_captured_steps_that_do_not_draft_have_a_graph_of_their_own(models):
    base, graphs = models[1].base, PretendedGraph.made
    runners, drafter = Executor(base), HeadsDrafter(models[1].heads, base.lm_head, TREE)
    tokens = random_prompts(1, 9).to("cuda")
    request = DecodeRequest(tokens, torch.tensor([9], device="cuda"), 60)

    def answered(**options) -> list[int]:
        return [token for step in decode(runners, drafter, request, **options) for token in step.tokens[0]]

    expected = answered()
    graphs.clear()
    for num_steps in (2, 2):
        assert answered(adaptive=RandomDrafting(1), step="captured", host_sync_interval=4) == expected
        assert len(graphs) == num_steps


@pytest.mark.parametrize(
    ("drafter", "options", "is_captured"),
    [
        ("heads", {}, True),
        ("dynamic-heads+suffix", SAMPLED, True),
        ("heads", {"repetition_penalty": 1.3}, True),
        ("draft-model", {}, False),
        ("heads", {"no_repeat_ngram_size": 3}, False),
        ("heads", {"max_time": 60.0}, False),
    ],
)
def test_steps_are_captured_where_nobody_says_how_they_run_and_general_where_they_cannot_be(
    models, drafter, options, is_captured
):
    on_cpu, card = models[0], MedusaModel(models[1].base, random_heads(), TREE)
    assert (on_cpu.step_for(), card.step_for()) == ("general", "captured")
    PretendedGraph.made.clear()
    same_as_cpu(on_cpu, card, drafter, None, 1, **GREEDY | options)
    assert bool(PretendedGraph.made) == is_captured


@contextmanager
def hung_on(base: LlamaForCausalLM):
    """Within, a hook hangs on ``base``."""
    hook = base.model.layers[0].register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        hook.remove()


def test_a_hook_on_the_base_has_steps_run_general_where_nobody_says_how(models):
    PretendedGraph.made.clear()
    with hung_on(models[1].base), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        same_as_cpu(models[0], MedusaModel(models[1].base, random_heads(), TREE), "heads", None, 1, **GREEDY)
    assert not PretendedGraph.made


def test_fewer_steps_than_a_warm_up_takes_capture_nothing(models):
    PretendedGraph.made.clear()
    options = {**GREEDY, "max_new_tokens": 3, "drafter": "plain"}
    model, prompt = MedusaModel(models[1].base), random_prompts(1, 9).to("cuda")
    expected = model.generate(prompt, **options, step="general")
    assert torch.equal(model.generate(prompt, **options, step="captured"), expected)
    assert PretendedGraph.made == []
    assert torch.equal(model.generate(prompt, **options, step="captured"), expected)
    assert len(PretendedGraph.made) == 1, "which are warm by now"


@pytest.mark.parametrize("what", ["mixtral-moe", "dynamic rope", "eta_cutoff", "a hook"])
def test_steps_that_cannot_be_captured_run_static_and_say_why(what):
    """Mixtral sorts tokens by expert on the host, dynamic RoPE asks for the longest position."""
    options = {**SAMPLED, "max_new_tokens": 14, "drafter": "heads"}
    base = copy.deepcopy(tiny_model("mixtral-moe" if what == "mixtral-moe" else "llama"))
    reason = "a step cannot be captured: .*capturing"
    if what == "dynamic rope":
        scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        torch.manual_seed(3)
        base = LlamaForCausalLM(LlamaConfig(**GROUPED, rope_parameters=scaling)).eval()
    elif what == "eta_cutoff":
        options["eta_cutoff"] = 0.001
    elif what == "a hook":
        base.model.layers[0].register_forward_hook(lambda module, given, out: None)
        reason = "the base has got a forward hook on model.layers.0, which a replay leaves out"
    expected = MedusaModel(base, random_heads(), TREE).generate(random_prompts(1, 9), **options)
    model = MedusaModel(copy.deepcopy(base).to("cuda"), random_heads(), TREE)
    prompt = random_prompts(1, 9).to("cuda")
    with pytest.warns(UserWarning, match=rf"^step='captured' runs as step='static' here: {reason}"):
        assert torch.equal(model.generate(prompt, **options, step="captured").cpu(), expected)
    assert torch.equal(model.generate(prompt, **options, step="captured").cpu(), expected)
    with warnings.catch_warnings():  # unasked it is not tried again, and what can be captured is
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(model.generate(prompt, **options).cpu(), expected)
        if what == "eta_cutoff":
            PretendedGraph.made.clear()
            model.generate(prompt, **{**options, "eta_cutoff": 0.0})
            assert PretendedGraph.made


def test_heads_that_guess_one_token_after_the_other_have_general_steps_unasked(models):
    options = {"max_depth": 3, "token_map_size": 40, "own_lm_head": True, "fused_layers": (1, 2, 3)}
    config = Eagle3Config.of_base(models[1].base, **options)
    head = Eagle3Head(config, token_map=list(range(3, 43))).eval()
    assert MedusaModel(models[1].base, head).step_for() == "general"


def test_graphs_are_let_go_beyond_the_memory_that_they_may_take(models, monkeypatch):
    model = MedusaModel(models[1].base, random_heads(), TREE)
    options = {**GREEDY, "max_new_tokens": 3, "step": "captured", "drafter": "plain"}

    def kept_after(row_counts: list[int]) -> int:
        for num_rows in row_counts:
            model.generate(random_prompts(num_rows, 4).to("cuda"), **options)
        return len(model._executor.captured)

    assert kept_after([1, 2, 3]) == 3
    (first, *_) = model._executor.captured
    one_row = first.num_bytes
    monkeypatch.setattr(medusa.decoding.kept_steppers, "available_memory", lambda device: 4 * 3 * one_row)
    assert kept_after([4]) == 2, "four rows, and three rows within the memory of three"
    assert kept_after([8]) == 1, "the newest alone"


def test_nothing_is_collected_in_a_capture_and_one_stream_serves_all(models, monkeypatch):
    import gc

    seen, capture = [], torch.cuda.graph

    def watched(graph, pool, stream, **options):
        seen.append((gc.isenabled(), stream))
        return capture(graph, pool, stream, **options)

    monkeypatch.setattr(torch.cuda, "graph", watched)
    model = MedusaModel(models[1].base, random_heads(), TREE)
    for drafter in ("plain", "heads"):
        prompt = random_prompts(1, 9).to("cuda")
        model.generate(prompt, **GREEDY, max_new_tokens=14, step="captured", drafter=drafter)
    assert [is_enabled for is_enabled, _ in seen] == [False, False] and gc.isenabled()
    assert len({id(stream) for _, stream in seen}) == 1


# ------------------------------------------------------------------ several places

PLACES = {"two cards": (0, 1), "LM head offloaded": (0, "cpu"), "embedding offloaded": ("cpu", 0)}
OF_SHARDED = [
    ("plain", "general"),
    ("heads", "static"),
    ("dynamic-heads+suffix", "general"),
    *((name, "general") for name in OTHER_DRAFTERS),
]
CORE_OF_OFFLOADED = [
    ("LM head offloaded", "dynamic-heads+suffix"),
    ("embedding offloaded", "heads"),
    ("embedding offloaded", "eagle3"),
]


def places(first, last, num_layers: int = NUM_LAYERS) -> dict:
    """Half of the layers here, half there."""
    found = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": last, "lm_head": last}
    halves = {
        f"model.layers.{layer}": last if 2 * layer >= num_layers else first for layer in range(num_layers)
    }
    return found | halves


@functools.cache
def base_at(name: str):
    """The base over the places of that name."""
    return dispatch_model(llama(), device_map=places(*PLACES[name]), main_device=0, force_hooks=True)


def at_places(cases):
    """Each of ``cases``, which begin with a drafter or a kind of heads, at all places: most of them slow."""
    for name, case in product(PLACES, cases):
        is_core = name == "two cards" or (name, case[0]) in CORE_OF_OFFLOADED
        yield pytest.param(name, *case, marks=() if is_core else pytest.mark.slow)


@pytest.mark.parametrize(("name", "drafter", "step"), at_places(OF_SHARDED))
def test_a_base_in_several_places_gives_the_tokens_of_the_cpu(models, name, drafter, step):
    heads = random_heads(fused_layers=(1, 4), token_map=list(range(3, 40)), reads_path=True)
    model = MedusaModel(base_at(name), heads, TREE)
    assert model.device == torch.device("cuda", int(name == "two cards"))
    same_as_cpu(models[0], model, drafter, step, 3, **SAMPLED)


@pytest.mark.parametrize(("name", "kind"), at_places([("medusa",), ("eagle3",)]))
def test_heads_are_evaluated_on_a_base_in_several_places_as_on_the_cpu(models, name, kind):
    answers = [AnsweredTokens.after_prompt(row.tolist(), 5) for row in random_prompts(3, 20)]
    heads = random_heads(fused_layers=(1, 4), reads_path=True)
    if kind == "eagle3":
        torch.manual_seed(5)
        heads = Eagle3Head(Eagle3Config.of_base(models[0].base, max_depth=3, fused_layers=(1, 2, 3))).eval()
    expected = calibrate(models[0].base, heads, answers)
    sharded = base_at(name)
    found = calibrate(sharded, heads.to(lm_head_device(sharded)), answers)
    for ours, theirs in zip(found.ranks, expected.ranks, strict=True):
        assert torch.equal(ours, theirs)


def test_a_draft_model_on_another_card_is_refused(models):
    settings = DrafterSettings(draft_model=llama(1).to("cuda:1"))
    with pytest.raises(ValueError, match=r"draft model must be on cuda:0, .* got one on cuda:1"):
        DrafterFactory(models[1], settings).make("draft-model")


# ------------------------------------------------------------------ training


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"reads_path": True, "fused_layers": [1]}, id="medusa"),
        pytest.param(tiny_training.EAGLE3, id="eagle3", marks=pytest.mark.slow),
        pytest.param(tiny_training.JOINT | {"max_steps": 3}, id="joint"),
        pytest.param({"cache_hidden_states": True}, id="stored states", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("place", ["one card", "two cards"])
def test_losses_of_training_are_those_of_the_cpu(tmp_path, monkeypatch, options, place):
    if "joint" in options and place == "two cards":
        pytest.skip("an adapter is trained on a base that is whole on each device")

    def losses(directory, accelerator, device) -> list[float]:
        AcceleratorState._reset_state(True)
        base = tiny_training.tiny_base().to(device)
        if device == "cuda" and place == "two cards":
            base = dispatch_model(base.cpu(), device_map=places(0, 1, 2), main_device=0, force_hooks=True)
            end_on(base, torch.device("cuda", 0))
        monkeypatch.setattr(tiny_training, "accelerator_of", lambda configuration: accelerator())
        monkeypatch.setattr(tiny_training, "tiny_base", lambda: base)
        trainer = tiny_training.new_trainer(
            directory, tiny_training.counting_rows(16), **{"max_steps": 3, "seed": 3} | options
        )
        trainer.train()
        monkeypatch.undo()
        return [each["train/loss"] for each in tiny_training.history(trainer).values()]

    on_cpu = losses(tmp_path / "cpu", lambda: Accelerator(cpu=True), "cpu")
    found = losses(tmp_path / "card", Accelerator, "cuda")
    AcceleratorState._reset_state(True)
    assert len(found) == 3 and found == pytest.approx(on_cpu, rel=1e-4)


def test_a_gguf_file_teaches_on_a_card(tmp_path):
    pytest.importorskip("medusa.base.gguf_model", exc_type=ImportError, reason="needs a newer transformers")
    eight_bits = GGMLQuantizationType.Q8_0
    path = write_model(tmp_path / "base.gguf", "llama", eight_bits, eight_bits, 128)
    ids = random_prompts(2, 12)
    given = PaddedBatch(ids, torch.arange(12).expand(2, -1), torch.ones_like(ids, dtype=torch.bool))
    live = live_states(BaseOptions(str(path)), torch.device("cuda"))
    assert live.base.device.type == "cuda" and live.base.dtype == torch.bfloat16
    assert torch.equal(live(given).cpu(), OnlineHiddenStates(load_base(path, dtype="auto"))(given))


# ------------------------------------------------------------------ attention


def test_passes_on_a_card_attend_without_cudnn_and_read_whole_blocks_of_slots(models, monkeypatch):
    """cuDNN makes a plan for each length, and its masked attention has written wrong text."""
    seen = []

    def watched(query, key, *rest, **options):
        if query.is_cuda:
            seen.append((torch.backends.cuda.cudnn_sdp_enabled(), key.shape[2]))
        return scaled_dot_product_attention(query, key, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    given = random_prompts(1, 70).to("cuda")
    for drafter in ("heads", named(models[1], "draft-model"), named(models[1], "early-exit")):
        models[1].generate(given, **GREEDY, max_new_tokens=5, drafter=drafter)
    models[1].generate(given, **GREEDY, max_new_tokens=5, step="static")
    assert {is_cudnn for is_cudnn, _ in seen} == {False} and torch.backends.cuda.cudnn_sdp_enabled()
    assert {length % 64 for _, length in seen} == {0}


@pytest.mark.parametrize("step", ["general", "captured"])
def test_keys_and_values_are_not_repeated_for_the_heads_that_share_them(models, monkeypatch, step):
    base, seen = models[1].base, set()
    attend = scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, **options):
        if attn_mask is not None:
            seen.add((key.shape[1], attn_mask.is_floating_point()))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    prompt = random_prompts(2, 9).to("cuda")
    models[1].generate(prompt, **GREEDY, max_new_tokens=12, drafter="heads", step=step)
    assert seen == {(base.config.num_key_value_heads, True)} and base.config.num_attention_heads > len(seen)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward, "for whoever comes next"


@pytest.mark.parametrize("num_nodes", [1, 5])
def test_attention_in_groups_is_that_of_transformers(models, num_nodes):
    layer = models[1].base.model.layers[0].self_attn
    torch.manual_seed(3)
    query = torch.randn(2, num_nodes, 4, 8).to("cuda").transpose(1, 2)
    key, value = torch.randn(2, 2, 2, 64, 8).to("cuda")
    masks = (torch.rand(2, 1, num_nodes, 64) > 0.5).to("cuda"), torch.randn(2, 1, num_nodes, 64).to("cuda")
    for mask in masks:
        options = {"scaling": 0.3, "position_ids": torch.zeros(2, num_nodes, device="cuda")}
        expected, _ = sdpa_attention_forward(layer, query, key, value, mask, **options)
        for _ in range(2):  # the second layer finds its mask
            with pinned_attention(query.device):
                found, _ = grouped_attention(layer, query, key, value, mask, **options)
            assert found.is_contiguous() and torch.allclose(found.cpu(), expected.cpu(), atol=1e-6)


def test_what_another_thread_computes_meanwhile_is_transformers_own(models, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    asked = []
    theirs = medusa.base.attention.sdpa_attention_forward
    monkeypatch.setattr(
        medusa.base.attention,
        "sdpa_attention_forward",
        lambda *given, **options: asked.append(1) or theirs(*given, **options),
    )
    layer = models[1].base.model.layers[0].self_attn
    query, key = torch.randn(1, 4, 3, 8).to("cuda"), torch.randn(1, 2, 64, 8).to("cuda")
    call = (layer, query, key, key, torch.ones(1, 1, 3, 64).bool().to("cuda"))
    with pinned_attention(query.device), ThreadPoolExecutor(1) as other:
        grouped_attention(*call)
        assert asked == []
        other.submit(grouped_attention, *call).result()
        assert asked == [1]


def test_guessing_never_pauses_where_float32_is_multiplied_in_tf32(models, monkeypatch):
    """The text would depend on how long steps took."""

    def pauses(model: MedusaModel, device: str) -> bool:
        request = model.request(random_prompts(1, 4).to(device), **GREEDY, max_new_tokens=4)
        plan = model._executor.plan(Call(request, "auto"))
        return plan.make_drafter(1, False, plan.step)[1] is not None

    assert pauses(models[1], "cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert not pauses(models[1], "cuda")
        assert pauses(models[0], "cpu")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_heads_beside_a_base_of_half_precision_draft_in_it():
    heads = random_heads(unembedding="full")
    model = MedusaModel(llama(2).to("cuda", torch.bfloat16), heads, TREE)
    assert {each.dtype for each in model.optimized_heads.parameters()} == {torch.bfloat16}
    assert {each.dtype for each in model.heads.parameters()} == {torch.float32}
    prompt = random_prompts(1, 9).to("cuda")
    model.generate(prompt, **GREEDY, max_new_tokens=5)
    with torch.no_grad():
        heads.unembed[0].mul_(2)
    model.generate(prompt, **GREEDY, max_new_tokens=5)
    assert torch.equal(model.optimized_heads.unembed[0], heads.unembed[0].bfloat16())


@pytest.mark.slow
def test_every_question_to_a_real_card_is_answered(capsys):
    on_gpu = program("scripts/on_gpu.py")
    assert on_gpu.main(["--tiny"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"kernels", "exact beside others", "batch", "clients"} <= {
        each["question"].partition(":")[0] for each in found
    }


# ------------------------------------------------------------------ the card itself


def test_the_pretended_card_refuses_what_a_card_refuses():
    here = torch.arange(3, device="cuda")
    with pytest.raises(RuntimeError, match="two devices"):
        here + torch.ones(3)
    with pytest.raises(RuntimeError, match="two devices"):
        here + here.to("cuda:1")
    with pytest.raises(TypeError, match="cuda:0"):
        here.numpy()
    with pretended_card.watched() as seen:
        (
            here.tolist(),
            here[here > 0],
            torch.equal(here, here),
            here.sum().item(),
            torch.tensor([1], device="cuda"),
        )
    assert len(seen.waits) == 5
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="capturing"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        here.tolist()


def test_a_replay_that_reads_memory_that_was_given_back_is_an_error():
    given, out, graph = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out.copy_(given + 1)
    assert out.tolist() == [0, 0, 0], "a capture runs nothing"
    given.fill_(4)
    graph.replay()
    assert out.tolist() == [5, 5, 5]
    del given
    with pytest.raises(RuntimeError, match="given back"):
        graph.replay()
