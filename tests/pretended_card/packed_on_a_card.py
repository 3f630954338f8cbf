"""What ``engine="packed"`` does on cards that are pretended: run by test_card_layers.py, as a process of its
own in which ``pretended_card`` was imported before torch."""

from __future__ import annotations

import pytest
import torch
from conftest import GROUPED, left_padded, random_heads, random_prompts
from gguf import GGMLQuantizationType as Type
from quantised_files import write_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import pretended_card
from medusa import CandidateTree, MedusaModel
from medusa.base.loading import find_base
from medusa.engine.card.block_modules import QuantisedLinear, QuantisedLookup
from medusa.engine.card.fused_layer import num_fused
from medusa.engine.weights.load import load_base
from pretended_card import PretendedGraph, triton_launches  # noqa: F401

TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (1, 2)])
MOST_LAUNCHES_OF_A_LAYER = 10
"""Of a step of one row; of the modules they are 36."""
KINDS = {
    "llama": lambda num_layers: LlamaForCausalLM(LlamaConfig(**GROUPED | {"num_hidden_layers": num_layers})),
    "qwen2": lambda num_layers: Qwen2ForCausalLM(Qwen2Config(**GROUPED | {"num_hidden_layers": num_layers})),
}


def base_of(kind, num_layers=2):
    torch.manual_seed(7)
    return KINDS[kind](num_layers).eval()


@pytest.mark.parametrize("step", ["general", "static", "captured"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_plain_decoding_by_the_modules(kind, step):
    prompts = left_padded(random_prompts(2, 9), [9, 3])
    call = {"do_sample": False, "max_new_tokens": 6}
    plain = MedusaModel(base_of(kind)).generate(**prompts, **call, tree=CandidateTree.chain(0))
    card = MedusaModel(base_of(kind).to("cuda"), random_heads(), TREE, engine="packed")
    assert num_fused(card.engine_base) == 2 and card.runtime.engine == "packed"
    given = {name: each.to("cuda") for name, each in prompts.items()}
    assert card.generate(**given, **call, step=step).tolist() == plain.tolist()


def launches_of_a_step(engine, num_layers):
    PretendedGraph.made.clear()
    model = MedusaModel(base_of("llama", num_layers).to("cuda"), engine=engine)
    prompt = random_prompts(1, 5).to("cuda")
    model.generate(prompt, do_sample=False, drafter="plain", step="captured", max_new_tokens=9)
    return PretendedGraph.made[0].num_launches


def test_a_layer_is_ten_launches():
    per_layer = {
        engine: launches_of_a_step(engine, 3) - launches_of_a_step(engine, 2)
        for engine in ("eager", "packed")
    }
    assert per_layer["packed"] <= MOST_LAUNCHES_OF_A_LAYER and per_layer["eager"] >= 30, per_layer


def test_a_general_step_waits_no_more_than_that_of_the_modules():
    waits = []
    for engine in ("eager", "packed"):
        model = MedusaModel(base_of("llama").to("cuda"), random_heads(), TREE, engine=engine)
        prompt = random_prompts(1, 5).to("cuda")
        call = {"do_sample": False, "step": "general"}
        model.generate(prompt, **call, max_new_tokens=2)
        with pretended_card.watched() as seen:
            model.generate(prompt, **call, max_new_tokens=4)
        waits.append(seen.waits.total())
    assert waits[1] <= waits[0]


def test_on_a_card_auto_takes_no_kernels_and_int8_is_refused():
    base = base_of("llama").to("cuda")
    assert MedusaModel(base).runtime.engine == "eager"
    with pytest.raises(ValueError, match="engine='int8' needs a float32 model on the CPU"):
        MedusaModel(base, engine="int8")


# ------------------------------------------------------------------ files


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "model.gguf"
    return write_model(path, matrices=Type.Q4_0, others=Type.Q8_0, hidden=64, is_tied=False)


def holds_blocks(base):
    return any(type(module) in (QuantisedLinear, QuantisedLookup) for module in base.modules())


@pytest.mark.parametrize("step", ["general", "captured"])
def test_a_file_keeps_its_bits_and_writes_the_text_of_its_widened_weights(file, step):
    call = {"do_sample": False, "max_new_tokens": 5}
    prompt = random_prompts(1, 6)
    options = {"device_map": "cuda", "dtype": torch.float32}
    widened = MedusaModel.from_pretrained(file, **options)
    packed = MedusaModel.from_pretrained(file, **options, engine="packed")
    assert holds_blocks(packed.base) and not holds_blocks(widened.base)
    assert num_fused(packed.engine_base) == 2 and packed.runtime.engine == "packed"
    plain = widened.generate(prompt.to("cuda"), **call, tree=CandidateTree.chain(0))
    assert packed.generate(prompt.to("cuda"), **call, drafter="suffix", step=step).tolist() == plain.tolist()


def test_commands_hold_blocks_only_where_they_are_asked_to(file):
    source = find_base(file)
    card = torch.device("cuda", 0)
    packed = load_base(source, "packed", card, "float16")
    assert holds_blocks(packed) and packed.dtype == torch.float16
    assert packed.model.rotary_emb.inv_freq.dtype == torch.float32
    assert load_base(source, "packed", card, None).dtype == torch.bfloat16
    assert not holds_blocks(load_base(source, "auto", card, None))
    assert not holds_blocks(load_base(source, "eager", torch.device("cpu"), None))


def test_without_triton_neither_a_file_nor_a_base_is_taken_for_packed(file, monkeypatch):
    base = base_of("llama").to("cuda")
    for name in ("weights.load.triton_unsupported_reason", "card.support.triton_unsupported_reason"):
        monkeypatch.setattr(f"medusa.engine.{name}", lambda device: "triton, which is not there")
    for load in (
        lambda: MedusaModel(base, engine="packed"),
        lambda: MedusaModel.from_pretrained(file, device_map="cuda", engine="packed"),
    ):
        with pytest.raises(ValueError, match=r"engine='packed' needs triton, .*; use engine='eager'"):
            load()
