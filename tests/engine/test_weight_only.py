"""Engines that quantise weights alone: they leave the base alone, decode their own text, and say what they
lack. Where torchao is not installed only the last is tested."""

from __future__ import annotations

import copy
import importlib.util
import json

import pytest
import torch
from conftest import VOCAB_SIZE, left_padded, program, random_prompts, tiny_model
from tiny_chat import chat_base, chat_heads, wide_tree

import medusa.hardware
from gpu_parts.lab import GpuOptions
from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.cli.options import parse
from medusa.drafters.self_draft import SelfDrafter, early_exit
from medusa.engine import prepared_base, resolved_engine
from medusa.engine.weight_only import INT4_GROUP, int8_weights_view, quantisable_linears

PLAIN = CandidateTree.chain(0)
BUSHY = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install torchao"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
QUANTISING = ["int8_weights", pytest.param("int4_weights", marks=[pytest.mark.gpu, needs_cuda])]
GREEDY = {"do_sample": False, "max_new_tokens": 24}


def base_for(engine):
    """A tiny model that the engine can run: int4 wants widths of its groups, bfloat16 and a CUDA device."""
    if engine != "int4_weights":
        return tiny_model("llama")
    config = copy.deepcopy(tiny_model("llama").config)
    config.hidden_size, config.intermediate_size, config.head_dim = 2 * INT4_GROUP, 4 * INT4_GROUP, 32
    torch.manual_seed(0)
    return type(tiny_model("llama"))(config).to("cuda", torch.bfloat16).eval()


@needs_torchao
@pytest.mark.parametrize("architecture", ["llama", "phi", "gemma3", "mixtral-moe"])
def test_int8_weights_give_the_logits_of_the_weights_that_they_stand_for(architecture):
    base = tiny_model(architecture)
    view, rounded = int8_weights_view(base), copy.deepcopy(base)
    with torch.no_grad():
        for stored, linear in zip(quantisable_linears(view), quantisable_linears(rounded), strict=True):
            weight = stored.weight.dequantize()
            step = linear.weight.abs().amax(1, keepdim=True) / 127
            assert ((weight - linear.weight).abs() <= 0.51 * step).all()
            linear.weight.copy_(weight)
    ids = random_prompts(2, 20)
    with torch.no_grad():
        given, expected, exact = (each(ids).logits for each in (view, rounded, base))
    assert torch.allclose(given, expected, atol=1e-4)
    assert (given - exact).abs().max() > 1e-3


@needs_torchao
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("step", ["general", "static"])
def test_a_tree_on_int8_weights_gives_the_text_of_one_token_at_a_time(temperature, step):
    base = tiny_model("llama")
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3))
    model = MedusaModel(base, heads, BUSHY, engine="int8_weights", step=step)
    options = {"do_sample": temperature > 0, "seed": 2, "max_new_tokens": 30}
    if temperature:
        options["temperature"] = temperature
    batch = left_padded(random_prompts(3, 14), [14, 2, 9])
    plain = model.generate(**batch, **options, tree=PLAIN, step="general")
    assert model.generate(**batch, **options, tree=model.tree).tolist() == plain.tolist()


@needs_torchao
@pytest.mark.parametrize(
    "options",
    [{}, {"reads_path": True}, {"unembedding": "token_map", "token_map_size": 31}],
    ids=["plain", "reading their path", "with a token map"],
)
def test_every_kind_of_heads_drafts_from_the_output_embedding_as_loaded(options):
    torch.manual_seed(0)
    token_map = list(range(0, VOCAB_SIZE, 2)) if "token_map_size" in options else None
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3, **options), token_map)
    model = MedusaModel(tiny_model("llama"), heads, BUSHY, engine="int8_weights")
    plain = model.generate(random_prompts(1, 9), **GREEDY, tree=PLAIN)
    assert torch.equal(model.generate(random_prompts(1, 9), **GREEDY), plain)
    hidden, path = torch.randn(4, 32), torch.randint(VOCAB_SIZE, (4, 3))
    embeddings = (each.get_output_embeddings() for each in (model.base, model.runner))
    with torch.no_grad():
        assert torch.equal(*(heads(hidden, each, path) for each in embeddings))


@needs_torchao
def test_a_base_that_drafts_with_its_first_layers_does_so_on_int8_weights():
    base = tiny_model("llama")
    model = MedusaModel(base, engine="int8_weights")
    plain = model.generate(random_prompts(1, 9), **GREEDY)
    drafter = SelfDrafter(prepared_base(early_exit(base, 1), "int8_weights"), CandidateTree.chain(3))
    assert torch.equal(model.generate(random_prompts(1, 9), **GREEDY, drafter=drafter), plain)


@needs_torchao
@pytest.mark.parametrize("engine", QUANTISING)
def test_weights_are_quantised_in_the_view_and_nowhere_else(engine):
    base = base_for(engine)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    view = prepared_base(base, engine)
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
    assert all(type(parameter) is torch.nn.Parameter for parameter in base.parameters())
    ours, theirs = ({id(each) for each in model.parameters()} for model in (view, base))
    quantised = quantisable_linears(view)
    assert len(ours - theirs) == len(quantised) == 7 * base.config.num_hidden_layers
    assert all(type(linear.weight) is not torch.nn.Parameter for linear in quantised)
    assert view.get_output_embeddings().weight is base.get_output_embeddings().weight
    assert prepared_base(view, "auto") is view  # quantised once is enough
    with pytest.raises(ValueError, match="plain weights, and this model's are quantised already"):
        prepared_base(view, "int8_weights")


@needs_torchao
@pytest.mark.parametrize("engine", QUANTISING)
def test_quantised_weights_decode_in_bfloat16_with_heads_and_without(engine):
    base = base_for(engine) if engine == "int4_weights" else chat_base().to(torch.bfloat16)
    heads = chat_heads() if engine == "int8_weights" else None
    if heads is None:
        heads = MedusaHeads(HeadsConfig(base.config.hidden_size, VOCAB_SIZE, num_heads=3))
    model = MedusaModel(base, heads.to(torch.bfloat16), wide_tree(), engine=engine)
    prompt = random_prompts(1, 9).to(base.device)
    for tree in (PLAIN, wide_tree()):
        answer = model.generate(prompt, do_sample=False, max_new_tokens=12, eos_token_id=-1, tree=tree)
        assert answer.shape == (1, 21)


@needs_torchao
@pytest.mark.slow
def test_a_compiled_step_reads_int8_weights_and_gives_the_same_tokens():
    model = MedusaModel(tiny_model("llama"), engine="int8_weights")
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3))
    expected = model.generate(random_prompts(1, 9), **GREEDY)
    compiled = MedusaModel(tiny_model("llama"), heads, BUSHY, engine="int8_weights", step="compiled")
    assert torch.equal(compiled.generate(random_prompts(1, 9), **GREEDY), expected)


@needs_torchao
@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("engine", QUANTISING)
def test_a_captured_step_reads_quantised_weights(engine):
    base = copy.deepcopy(base_for(engine)).to("cuda", torch.bfloat16)
    heads = MedusaHeads(HeadsConfig(base.config.hidden_size, VOCAB_SIZE, num_heads=3)).to(torch.bfloat16)
    model = MedusaModel(base, heads, BUSHY, engine=engine, step="captured")
    assert model.generate(random_prompts(1, 9).cuda(), **GREEDY).shape == (1, 33)


@needs_torchao
def test_the_program_for_gpus_times_int8_weights_and_says_why_int4_cannot_run(monkeypatch, tmp_path):
    monkeypatch.setitem(medusa.hardware.PROBE_BYTES, "cpu", 2**20)
    monkeypatch.setitem(medusa.hardware.PROBE_WIDTH, "cpu", 64)
    script = program("scripts/on_gpu.py")
    flags = ["--device", "cpu", "--shapes", "tiny", "--dtype", "float32", "--rounds", "1", "--steps", "1"]
    flags += ["--engines", "int8_weights", "int4_weights", "--step", "general", "--nodes", "2"]
    flags += ["--batch-sizes", "1", "--context-lengths", "16", "--part", "steps", "--output", str(tmp_path)]
    assert script.run_inside(parse(GpuOptions, flags), watch=False) == 0
    record = json.loads((tmp_path / "2-steps.json").read_text())
    rows = [row for each in record["cases"].values() for row in each.get("steps", ())]
    assert {row["engine"] for row in rows} == {"int8_weights"}
    (reason,) = [why for name, why in record["skipped"].items() if "int4_weights" in name]
    assert "needs a bfloat16 model on a CUDA device" in reason


def test_without_torchao_the_message_names_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs torchao \(pip install torchao\); use engine="):
        MedusaModel(tiny_model("llama"), engine="int8_weights")


def test_int4_weights_need_a_device_that_has_int4_products(monkeypatch):
    with pytest.raises(ValueError, match=r"bfloat16 model on a CUDA device .*, got torch.float32 on cpu"):
        prepared_base(tiny_model("llama"), "int4_weights")
    base = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    monkeypatch.setattr(type(base), "device", property(lambda self: torch.device("cuda:0")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8.0 or newer, got 7.5"):
        prepared_base(base, "int4_weights")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match=r"inputs are a multiple of 64 wide, got widths of 32, 48"):
        prepared_base(base, "int4_weights")


def test_a_model_without_linear_layers_or_in_several_places_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    bare = copy.deepcopy(tiny_model("llama"))
    bare.hf_device_map = {"model": "cpu", "lm_head": "cuda:0"}
    with pytest.raises(ValueError, match=r"the whole model in one place, and this one is sharded"):
        prepared_base(bare, "int8_weights")
    bare.model.layers = torch.nn.ModuleList()
    with pytest.raises(
        ValueError, match=r"linear layers \(nn.Linear\) to quantise, and LlamaForCausalLM has"
    ):
        prepared_base(bare, "int8_weights")


def test_auto_never_quantises():
    base = tiny_model("llama")
    assert resolved_engine(base, "auto") in ("eager", "packed")
    assert resolved_engine(copy.deepcopy(base).to(torch.bfloat16), "auto") == "eager"
