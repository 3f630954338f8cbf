"""Captured steps give the same tokens, and steps that cannot run are refused at once."""

from __future__ import annotations

import pytest
import torch
from conftest import ARCHITECTURES, VOCAB_SIZE, RandomPausing, decode, left_padded, random_prompts, tiny_model
from pretended_graphs import pretend_graphs
from test_static_step import TREE, drafter_of, sampling

from medusa import CandidateTree, DecodingStatistics, HeadsConfig, MedusaHeads, MedusaModel
from medusa.decoding.forward import MAX_KEPT
from medusa.decoding.state import DecodeRequest
from medusa.decoding.steps import Steps


def tokens_of_one_row(results):
    return [token for step in results for token in step.tokens[0]]


def test_an_unknown_kind_of_step_is_refused():
    with pytest.raises(ValueError, match=r"step must be one of \('general', .*'captured'\), got 'fast'"):
        MedusaModel(tiny_model("llama"), step="fast")


@pytest.mark.parametrize(
    ("step", "engine", "message"),
    [
        (
            "captured",
            "eager",
            "step='captured' needs a model on a CUDA device, got one on cpu; use step='static'",
        ),
        (
            "compiled",
            "eager",
            "step='compiled' needs engine='packed' or 'int8', which compile their pass ahead on a CPU",
        ),
        (
            "compiled",
            "int8",
            "step='compiled' needs widths that are multiples of 16 for engine='int8', got 8",
        ),
    ],
)
def test_steps_that_cannot_run_on_a_base_are_refused_at_once(step, engine, message):
    with pytest.raises(ValueError, match=message):
        MedusaModel(tiny_model("llama"), engine=engine, step=step)
    model = MedusaModel(tiny_model("llama"), engine=engine)
    with pytest.raises(ValueError, match=message):
        model.stream(random_prompts(1, 4), max_new_tokens=3, do_sample=False, step=step)


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


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["plain", "heads", "both", "dynamic+suffix"])
def test_captured_steps_give_the_tokens_of_the_general_loop(kind, sampled, monkeypatch):
    """With pretended graphs. The cache grows twice: its slots are other tensors after the second time."""
    graphs = pretend_graphs(monkeypatch)
    monkeypatch.setattr("medusa.decoding.static.SLOTS", 8)
    base = tiny_model("llama")
    runners, drafter = Steps(base), drafter_of(kind, base)
    request = DecodeRequest(
        random_prompts(2, 236), torch.tensor([236, 9]), 70, **(sampling(2) if sampled else {})
    )
    expected = tokens_of_one_row(decode(base, drafter, request))
    setups = []
    for _ in range(2):
        statistics = DecodingStatistics()
        results = list(decode(runners, drafter, request, statistics, None, "captured", 8))
        assert tokens_of_one_row(results) == expected
        setups.append(statistics.setup_seconds)
    assert setups[0] > 0
    assert len(graphs) > 1 and sum(graph.num_replays for graph in graphs) > len(graphs)


def test_captured_steps_that_do_not_draft_have_a_graph_of_their_own_and_both_are_kept(monkeypatch):
    graphs = pretend_graphs(monkeypatch)
    base = tiny_model("llama")
    runners, drafter = Steps(base), drafter_of("heads", base)
    request = DecodeRequest(random_prompts(1, 9), torch.tensor([9]), 60)
    expected = tokens_of_one_row(decode(base, drafter, request))

    def answered() -> float:
        statistics = DecodingStatistics()
        pausing = RandomPausing(1)
        results = decode(runners, drafter, request, statistics, pausing, "captured", 4)
        assert tokens_of_one_row(results) == expected
        return statistics.setup_seconds

    assert answered() > 0
    assert answered() == 0 and len(graphs) == 2
    base = runners.base
    weight = base.lm_head.weight
    try:
        base.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
        assert answered() > 0 and len(graphs) == 4, "a graph reads weights where they were"
    finally:
        base.lm_head.weight = weight


def test_fewer_steps_than_a_warm_up_takes_capture_nothing(monkeypatch):
    graphs = pretend_graphs(monkeypatch)
    base = tiny_model("llama")
    runners, drafter = Steps(base), drafter_of("plain", base)
    request = DecodeRequest(random_prompts(1, 9), torch.tensor([9]), 3)
    results = decode(runners, drafter, request, None, None, "captured", 8)
    assert tokens_of_one_row(results) == tokens_of_one_row(decode(base, drafter, request))
    assert graphs == []


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
    assert len(model_on_a_card._steps.captured) == MAX_KEPT
