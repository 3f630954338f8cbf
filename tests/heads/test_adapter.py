"""Heads and adapter on disk, and back onto a base: the very model that was trained, or a clear refusal."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from conftest import VOCAB_SIZE, random_prompts, tiny_model
from damage import changed, config_says, cut, removed, says
from refusals import assert_refused, refusals
from reported import ran
from safetensors.torch import load_file
from tiny_chat import chat_base, chat_heads, save_chat_model, wide_tree
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from medusa import (
    Adapter,
    CandidateTree,
    HeadsCheckpoint,
    HeadsConfig,
    MedusaHeads,
    MedusaModel,
    apply_adapter,
    load_heads,
    save_heads,
)
from medusa.base.loading import load_tokenizer
from medusa.cli.main import main
from medusa.engine.views import packed_unsupported_reason
from medusa.engine.weights.load import load_base
from medusa.engine.weights.products import PackedMatmul
from medusa.heads.adapter import folded
from medusa.training.config import JointOptions
from medusa.training.recipes.joint import TrainedAdapter

ADAPTED = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
ENGINES = ["eager", *(["packed"] if packed_unsupported_reason(chat_base()) is None else [])]
PROMPTS = torch.tensor([[256, 40, 77, 12, 9, 33], [256, 41, 78, 13, 10, 34]])


def new_adapter(seed: int = 5) -> Adapter:
    """An adapter large enough to change every answer."""
    adapter = TrainedAdapter(chat_base(), JointOptions(joint=True, lora_rank=4, lora_alpha=8), seed)
    torch.manual_seed(seed)
    for name, each in adapter.parameters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.3)
    return adapter.taken_out()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Path]:
    """A base and, in another directory, heads with an adapter."""
    place = tmp_path_factory.mktemp("joint")
    base, heads = save_chat_model(place)
    checkpoint = HeadsCheckpoint(chat_heads(), base, wide_tree(), adapter=new_adapter())
    save_heads(checkpoint, heads, overwrite=True)
    return Path(base), Path(heads)


@pytest.fixture
def copied(saved, tmp_path) -> Path:
    """The heads directory, to be damaged."""
    return Path(shutil.copytree(saved[1], tmp_path / "heads"))


def by_peft(saved: tuple[Path, Path]) -> torch.nn.Module:
    """The adapted model as peft itself loads it from the files."""
    base = AutoModelForCausalLM.from_pretrained(saved[0], dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, saved[1] / "adapter").get_base_model().eval()


@pytest.mark.parametrize("engine", ENGINES)
def test_decoding_is_exactly_plain_decoding_of_the_adapted_model(saved, engine):
    model = MedusaModel.from_pretrained(*saved, engine=engine)
    options = {"max_new_tokens": 24, "do_sample": False}
    ours = model.generate(PROMPTS, **options)
    assert ours.tolist() == by_peft(saved).generate(PROMPTS, **options).tolist()
    assert ours.tolist() != chat_base().generate(PROMPTS, **options).tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_sampling_draws_the_tokens_that_the_adapted_model_would(saved, engine):
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.9, "seed": 3}
    plain = MedusaModel(by_peft(saved)).generate(PROMPTS, **options)
    ours = MedusaModel.from_pretrained(*saved, engine=engine).generate(PROMPTS, **options)
    assert ours.tolist() == plain.tolist()


@pytest.mark.skipif("packed" not in ENGINES, reason="no C++ compiler to compile the kernels with")
def test_packing_folds_the_adapter_into_the_packed_weights_and_leaves_the_base_alone(saved):
    """Two more products a layer would cost a third of a step."""
    model = MedusaModel.from_pretrained(*saved, engine="packed")
    assert isinstance(model.engine_base.model.layers[0].self_attn.o_proj, PackedMatmul)
    query = model.base.model.layers[0].self_attn.q_proj
    assert type(query.base_layer) is torch.nn.Linear
    assert torch.equal(query.base_layer.weight, chat_base().model.layers[0].self_attn.q_proj.weight)
    with torch.no_grad():
        assert torch.allclose(model.engine_base(PROMPTS).logits, model.base(PROMPTS).logits, atol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3", "gpt-neox", "phi", "mixtral-moe"])
def test_other_architectures_take_an_adapter_out_and_on_and_decode_exactly(architecture):
    trained, fresh = (copy.deepcopy(tiny_model(architecture)) for _ in range(2))
    adapter = TrainedAdapter(trained, JointOptions(joint=True, lora_rank=3), seed=1)
    for each in adapter.parameters.values():
        torch.nn.init.normal_(each, std=0.3)
    apply_adapter(fresh, adapter.taken_out())
    ids, options = random_prompts(2, 9), {"max_new_tokens": 12, "do_sample": False}
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=3))
    ours = MedusaModel(fresh, heads, engine="auto").generate(ids, **options)
    assert ours.tolist() == trained.generate(ids, **options).tolist()
    with torch.no_grad():
        assert torch.equal(fresh(ids).logits, trained(ids).logits)
        assert not torch.allclose(fresh(ids).logits, tiny_model(architecture)(ids).logits, atol=1e-2)


def test_folding_leaves_what_is_no_plain_sum_as_it_is():
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], use_dora=True)
    base = peft.get_peft_model(chat_base(), config).get_base_model()
    assert hasattr(folded(base).model.layers[0].self_attn.q_proj, "lora_A")
    assert folded(plain := chat_base()) is plain
    switched_off = chat_base()
    wrapped = peft.get_peft_model(switched_off, peft.LoraConfig(r=3, target_modules=["q_proj"]))
    wrapped.base_model.disable_adapter_layers()
    with torch.no_grad():
        assert torch.equal(folded(switched_off)(PROMPTS).logits, chat_base()(PROMPTS).logits)


def test_the_files_hold_what_was_saved(saved):
    checkpoint, adapter = load_heads(saved[1]), new_adapter()
    assert checkpoint.adapter.weights.keys() == adapter.weights.keys()
    for name, tensor in checkpoint.adapter.weights.items():
        assert torch.equal(tensor, adapter.weights[name])
    assert checkpoint.adapter.fingerprint == checkpoint.fingerprint == adapter.fingerprint
    assert json.loads((saved[1] / "config.json").read_text())["adapter"]["type"] == "lora"
    assert sorted(path.name for path in (saved[1] / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_heads_without_an_adapter_say_nothing_of_one(tmp_path):
    save_heads(HeadsCheckpoint(chat_heads(), "base"), tmp_path / "heads")
    assert "adapter" not in json.loads((tmp_path / "heads" / "config.json").read_text())
    assert load_heads(tmp_path / "heads").adapter is None


def test_heads_from_the_hub_bring_their_adapter(saved, hub):
    hub.put("owner/heads", saved[1])
    assert MedusaModel.from_pretrained(saved[0], "owner/heads").base.peft_config


def test_joint_heads_are_pushed_with_their_adapter_and_not_for_a_plain_base(saved, tmp_path, capsys):
    folder = tmp_path / "folder"
    assert main(["push", str(saved[1]), "me/heads", "--base", "me/base", "--dry-run", str(folder)]) == 0
    assert not (folder / "custom_generate").exists()
    assert load_file(folder / "adapter/adapter_model.safetensors").keys()
    card = (folder / "README.md").read_text()
    assert "custom_generate" not in card and "trained together with a LoRA adapter" in card
    assert str(saved[0]) not in (folder / "adapter/adapter_config.json").read_text()
    assert MedusaModel.from_pretrained(saved[0], folder).base.peft_config


def test_a_loaded_base_that_carries_the_adapter_is_taken(saved):
    base = chat_base()
    apply_adapter(base, load_heads(saved[1]).adapter)
    model = MedusaModel.from_pretrained(base, saved[1])
    options = {"max_new_tokens": 16, "do_sample": False}
    assert model.generate(PROMPTS, **options).tolist() == by_peft(saved).generate(PROMPTS, **options).tolist()
    assert MedusaModel.from_pretrained(by_peft(saved), saved[1]).heads is not None  # peft's own loading too


@pytest.fixture(scope="module")
def lora(saved, tmp_path_factory) -> Path:
    """An adapter as peft itself writes it."""
    base = AutoModelForCausalLM.from_pretrained(saved[0], dtype=torch.float32)
    options = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    path = tmp_path_factory.mktemp("lora")
    peft.get_peft_model(base, options).save_pretrained(path)
    return path


@pytest.mark.parametrize("load", [load_base, load_tokenizer, MedusaModel.from_pretrained])
@pytest.mark.parametrize("is_on_the_hub", [False, True], ids=["directory", "hub"])
def test_an_adapter_in_place_of_a_base_is_refused_with_what_to_do(lora, hub, load, is_on_the_hub):
    name = str(lora)
    if is_on_the_hub:
        hub.put(name := "ada/adapter", {path.name: path.read_bytes() for path in lora.iterdir()})
    with pytest.raises(ValueError, match=f"base must be a whole model, got '{name}', a PEFT adapter"):
        load(name)


def test_no_command_takes_an_adapter_for_a_base(lora, capsys):
    inspect = ["train", "--data", "x.jsonl", "--output_dir", "out", "--inspect", "--base", str(lora)]
    for command in (["info", str(lora)], ["generate", "Hi", "--base", str(lora)], inspect):
        assert "a PEFT adapter for one; write both into a directory" in ran(capsys, command, 1).err


def test_an_adapter_that_is_merged_as_the_error_says_is_a_base(lora, tmp_path):
    adapted = AutoModelForCausalLM.from_pretrained(lora, dtype=torch.float32).eval()
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(str(lora)).merge_and_unload()
    merged.save_pretrained(tmp_path)
    for each in (expected := adapted(PROMPTS).logits), load_base(tmp_path)(PROMPTS).logits:
        torch.testing.assert_close(each, expected)


def with_another():
    base = chat_base()
    apply_adapter(base, new_adapter(seed=6))
    return base


def switched_off(saved):
    wrapped = peft.PeftModel.from_pretrained(chat_base(), saved[1] / "adapter")
    wrapped.base_model.disable_adapter_layers()
    return wrapped.get_base_model()


def applied(saved, base=None, **sizes):
    """The saved adapter on another base, or on one of other sizes."""
    config = LlamaConfig(**{**chat_base().config.to_dict(), **sizes})
    apply_adapter(base or LlamaForCausalLM(config), load_heads(saved[1]).adapter)


def configured(**changes):
    """An adapter whose configuration is not that of its tensors."""
    adapter = new_adapter()
    return partial(apply_adapter, chat_base(), Adapter({**adapter.config, **changes}, adapter.weights))


def flattened():
    adapter = new_adapter()
    name = min(adapter.weights)
    weights = {**adapter.weights, name: adapter.weights[name].flatten()}
    apply_adapter(chat_base(), Adapter(adapter.config, weights))


def without_peft(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert load_heads(saved[1]).adapter is not None  # looking is possible without
    load(*saved)


def spoilt(change):
    def read(copied):
        change(copied)
        load_heads(copied)

    return read


WEIGHTS, CONFIG = "adapter/adapter_model.safetensors", "adapter/adapter_config.json"
NAN = {min(new_adapter().weights): torch.full((4, 32), torch.nan)}
load, RANKS = MedusaModel.from_pretrained, "ranks from 1 to 4, ... got"
test_an_adapter_and_a_base_that_do_not_belong_together_are_refused = refusals(
    ("none", lambda saved: load(chat_base(), saved[1]), "trained together with a LoRA adapter, ... has none"),
    (
        "another",
        lambda saved: load(with_another(), saved[1]),
        "carries another (default), or has it switched off",
    ),
    (
        "a second",
        lambda: apply_adapter(with_another(), new_adapter()),
        "carries an adapter already (default)",
    ),
    (
        "off",
        lambda saved: load(switched_off(saved), saved[1]),
        "or has it switched off; pass the base's path",
    ),
    (
        "another base",
        lambda saved: applied(saved, chat_base(seed=1)),
        "on another model than ... its LM head",
    ),
    (
        "and its heads",
        lambda saved: load(chat_base(seed=1), saved[1]),
        "adapter was trained on another model",
    ),
    (
        "a layer less",
        lambda saved: applied(saved, num_hidden_layers=1),
        "'model.layers.1 ... has no such layer",
    ),
    ("wider", lambda saved: applied(saved, intermediate_size=80), "64 inputs x 32 outputs ... has 80 x 32"),
    ("no peft", without_peft, ImportError, "needs peft, which is not installed: pip install peft"),
    ("no matrix", flattened, "the adapter's tensor ' ... must be a matrix"),
    ("a huge rank", configured(r=10**12), f"{RANKS} 1000000000000"),
    ("a rank as text", configured(r="4"), f"{RANKS} '4'"),
    ("huge in a pattern", configured(rank_pattern={"q_proj": 10**12}), f"{RANKS} 1000000000000"),
    ("no pattern", configured(rank_pattern=7), f"{RANKS} 7"),
    ("other layers", configured(target_modules=["q_proj"]), "tensors do not fit its configuration"),
    ("another rank", configured(r=3), "tensors do not fit its configuration"),
    ("dropout as text", configured(lora_dropout="x"), "peft cannot apply the adapter's configuration: "),
    (
        "another library",
        configured(megatron_config={"a": 1}),
        "peft cannot apply the adapter's configuration: ",
    ),
    ("unsaid", spoilt(config_says("adapter")), "an adapter that config.json does not speak of"),
    (
        "no LoRA",
        spoilt(config_says(adapter={"type": "ia3"})),
        "adapter={'type': 'ia3'}, this version ... 'lora'",
    ),
    ("another type", spoilt(says(CONFIG, peft_type="IA3")), "peft_type='LORA', got 'IA3'"),
    ("no config", spoilt(removed(CONFIG)), FileNotFoundError, "adapter_config.json does not exist"),
    ("no weights", spoilt(removed(WEIGHTS)), FileNotFoundError, "adapter_model.safetensors does not exist"),
    ("cut short", spoilt(cut(WEIGHTS, -100)), "adapter_model.safetensors is damaged or cut short"),
    ("no number", spoilt(changed(WEIGHTS, NAN)), "adapter_model.safetensors: tensor ' ... must hold finite"),
)


def test_a_base_that_is_refused_is_left_alone_and_a_cast_one_is_taken(saved):
    adapter, other = load_heads(saved[1]).adapter, chat_base(seed=1)
    assert_refused(lambda: apply_adapter(other, adapter), ValueError, "another model")
    assert not hasattr(other, "peft_config")
    for dtype in (torch.bfloat16, torch.float16):
        apply_adapter(chat_base().to(dtype), adapter)


def test_a_tensor_of_the_adapter_that_is_no_matrix_is_refused():
    adapter = new_adapter()
    name = min(adapter.weights)
    weights = {**adapter.weights, name: adapter.weights[name].flatten()}
    with pytest.raises(ValueError, match=f"the adapter's tensor '{name}' must be a matrix"):
        apply_adapter(chat_base(), Adapter(adapter.config, weights))


def test_info_shows_the_adapter(saved, capsys, tmp_path):
    assert main(["info", "--json", str(saved[1])]) == 0
    described = json.loads(capsys.readouterr().out)["adapter"]
    assert described["rank"] == 4
    assert described["targets"] == ADAPTED
    assert described["num_parameters"] == sum(each.numel() for each in new_adapter().weights.values())
    assert main(["info", str(saved[1])]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "LoRA of rank 4" in shown
    save_heads(HeadsCheckpoint(chat_heads(), "base"), tmp_path / "heads")
    assert "none: the text is the base model's own" in ran(capsys, ["info", str(tmp_path / "heads")]).out


def test_plain_decoding_on_the_command_line_is_the_adapted_model_s(saved, capsys):
    flags = ["--base", str(saved[0]), "--heads", str(saved[1]), "--max-new-tokens", "16", "Hello"]
    printed = ran(capsys, ["generate", *flags])
    assert "the text is the adapted model's" in printed.err
    assert ran(capsys, ["generate", *flags, "--plain"]).out == printed.out


def test_the_benchmark_compares_with_the_adapted_model(saved, capsys):
    prompts = saved[0].parent / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    flags = ["--base", str(saved[0]), "--heads", str(saved[1]), "--prompts", str(prompts)]
    assert (
        main(["benchmark", *flags, "--max-new-tokens", "8", "--plot", str(prompts.with_suffix(".png"))]) == 0
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["compared"] == ["default", "heads", "plain", "transformers"]
    assert report["identical"]


def test_a_tree_of_another_size_goes_with_an_adapter(saved):
    model = MedusaModel.from_pretrained(*saved, tree=CandidateTree.chain(2))
    assert model.tree.num_nodes == 3
