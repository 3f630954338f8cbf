"""A base that is loaded by its name is packed as it is read: the same numbers, held once."""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys

import pytest
import torch
from checkpoint_kinds import TINY, bytes_held, in_shards_of_bin_files
from conftest import (
    ARCHITECTURES,
    GROUPED,
    VOCAB_SIZE,
    needs_kernels,
    random_heads,
    random_prompts,
    tiny_model,
)
from safetensors.torch import load_file, save_file
from stateful_models import DECODABLE, stateful_model
from test_causal_lm import OTHERS
from tiny_chat import chat_base, chat_tokenizer, save_chat_model
from torch.nn import functional as F
from transformers import (
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from medusa import CandidateTree, MedusaModel
from medusa.base import architecture_check
from medusa.base.causal_lm import embedding_rows, lm_head
from medusa.base.loading import find_base
from medusa.drafters.registry import DrafterFactory, DrafterSettings
from medusa.engine.views import packed_as, view_of
from medusa.engine.weights import forms, load, memory, plan
from medusa.engine.weights.load import load_base
from medusa.heads.fingerprint import BaseFingerprint

pytestmark = needs_kernels
WEIGHTS, BINARY = "model.safetensors", "pytorch_model.bin"
GREEDY = {"do_sample": False, "max_new_tokens": 20}
MODELS = {
    **{name: lambda name=name: tiny_model(name) for name in ARCHITECTURES},
    **{name: make for name, make in OTHERS.items() if "axes of positions" not in name},  # which see too
    **{name: lambda name=name: stateful_model(name) for name in DECODABLE},
}


def saved(model, directory, dtype=torch.bfloat16):
    """The model's files, with its weights as ``dtype`` rounds them."""
    torch.manual_seed(3)
    narrow = type(model)(model.config).to(dtype)
    with torch.no_grad():
        for parameter, given in zip(narrow.parameters(), model.parameters(), strict=True):
            parameter.copy_(given)
    narrow.save_pretrained(directory)
    model.config.dtype = None
    return directory


@pytest.mark.parametrize("engine", ["packed", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_packed_as_it_is_read_computes_what_a_view_of_the_loaded_base_does(tmp_path, name, engine):
    directory = saved(MODELS[name](), tmp_path)
    ordinary = load_base(directory, dtype=torch.float32)
    view, base = view_of(ordinary, engine == "int8"), load_base(directory, engine)
    assert packed_as(base) == engine and base.dtype == torch.float32
    expected = dict(ordinary.named_buffers())
    found = {key.replace("._of.", "."): each for key, each in base.named_buffers()}
    shared = {key: each for key, each in found.items() if key in expected}
    assert shared.keys() == expected.keys(), "every buffer is where it was"
    for key, buffer in shared.items():
        assert buffer.dtype == expected[key].dtype and torch.equal(buffer, expected[key]), key
    ids = random_prompts(2, 11)
    with torch.no_grad():
        assert torch.equal(base(ids).logits, view(ids).logits)
    assert BaseFingerprint.of(ordinary).difference(base) is None


@pytest.mark.parametrize(
    ("engine", "named", "dtype", "held"),
    [
        ("eager", None, torch.float32, None),
        ("eager", "auto", torch.bfloat16, None),
        ("packed", None, torch.float32, "packed"),
        ("packed", "float32", torch.float32, "packed"),
        ("int8", torch.float32, torch.float32, "int8"),
        ("packed", "bfloat16", torch.bfloat16, None),
    ],
)
@pytest.mark.parametrize("has_layers", [True, False])
def test_an_engine_holds_a_base_in_float32_and_any_other_type_is_as_it_is_named(
    tmp_path, engine, named, dtype, held, has_layers
):
    directory = saved(tiny_model("llama"), tmp_path)
    base = load_base(directory, engine, "cpu", named, layers=has_layers)
    assert base.dtype == dtype and packed_as(base) == held
    assert len(base.model.layers) == (2 if has_layers else 0)
    assert base.config.num_hidden_layers == 2, "as of the whole model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_files_of_other_precisions_are_packed_too(tmp_path, dtype):
    directory = saved(tiny_model("llama"), tmp_path, dtype)
    model, ids = MedusaModel.from_pretrained(directory), random_prompts(1, 9)
    assert lm_head(model.base).panels.dtype == dtype
    expected = load_base(directory, dtype=torch.float32).generate(ids, **GREEDY)
    assert model.generate(ids, **GREEDY).tolist() == expected.tolist()


def test_weights_of_two_precisions_are_held_exactly(tmp_path):
    base = LlamaForCausalLM(LlamaConfig(**GROUPED)).bfloat16()
    for finer in (base.model.layers[0].mlp.down_proj, base.model.layers[1].self_attn.v_proj):
        with torch.no_grad():
            finer.float().weight.add_(2.0**-20)
    base.save_pretrained(tmp_path)
    packed, ids = load_base(tmp_path, "packed"), random_prompts(1, 9)
    assert packed.model.layers[0].mlp.down_proj.panels.dtype == torch.float32
    attention = packed.model.layers[1].self_attn
    assert attention.v_proj.panels.dtype == torch.float32
    for other in (lm_head(packed), attention.q_proj, attention.k_proj):
        assert other.panels.dtype == torch.bfloat16, "whatever lies beside it"
    with torch.no_grad():
        assert torch.equal(packed(ids).logits, view_of(load_base(tmp_path, dtype=torch.float32))(ids).logits)


@pytest.mark.parametrize("drafter", ["early-exit", "low-precision", "draft-model", "dynamic-heads+suffix"])
@pytest.mark.parametrize("engine", ["packed", "int8"])
def test_every_form_of_the_base_drafts_where_it_is_held_once(tmp_path, engine, drafter):
    directory = saved(tiny_model("llama"), tmp_path)
    chat_tokenizer().save_pretrained(directory)
    model = MedusaModel(load_base(directory, engine), random_heads(), engine=engine)
    made = DrafterFactory(model, DrafterSettings(exit_layer=1, draft_model=str(directory))).make(drafter)
    ids = random_prompts(1, 9)
    plain = model.generate(ids, **GREEDY, tree=CandidateTree.chain(0))
    output = model.generate(ids, **GREEDY, drafter=made, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert drafter in ("early-exit", "dynamic-heads+suffix") or output.statistics.num_accepted


def test_a_base_that_is_held_once_says_so_where_its_weights_are_asked_for(tmp_path):
    directory = saved(tiny_model("llama"), tmp_path)
    model = MedusaModel.from_pretrained(directory)
    assert model.base is model.engine_base and model.runtime.engine == "packed"
    for engine in ("eager", "int8"):
        with pytest.raises(ValueError, match=f"engine='{engine}' needs the weights .* engine='pac"):
            MedusaModel(model.base, engine=engine)
    assert model.base.model.layers[0].mlp.down_proj.weight.isnan().all(), "nobody computes with it"
    hook = model.base.model.layers[0].register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match=r"a forward hook on model\.layers\.0, .* load .* engine='eager'"):
        model.generate(random_prompts(1, 4), **GREEDY)
    hook.remove()
    model.generate(random_prompts(1, 4), **GREEDY)
    eager = MedusaModel.from_pretrained(directory, engine="eager")
    assert packed_as(eager.base) is None and eager.base.model.layers[0].mlp.down_proj.weight.isfinite().all()


def test_rows_of_embeddings_are_those_of_the_file(tmp_path):
    model = GPTNeoXForCausalLM(tiny_model("gpt-neox").config)
    directory = saved(model, tmp_path)
    base, ordinary = load_base(directory, "int8"), load_base(directory, dtype=torch.float32)
    for ours, theirs in (
        (base.get_input_embeddings(), ordinary.get_input_embeddings()),
        (lm_head(base), lm_head(ordinary)),
    ):
        assert embedding_rows(ours).dtype == torch.bfloat16
        assert torch.equal(embedding_rows(ours).float(), theirs.weight)
        assert ours.weight.shape == theirs.weight.shape and ours.weight.dtype == torch.float32


def test_a_start_that_must_fail_for_memory_says_what_would_fit(tmp_path, monkeypatch):
    directory = saved(tiny_model("llama"), tmp_path)
    enough = plan.held_bytes(find_base(directory), "packed")
    monkeypatch.setattr(plan, "SPARE_BYTES", 0)
    monkeypatch.setattr(plan, "available_memory", lambda: enough)
    load_base(directory, "packed")
    monkeypatch.setattr(plan, "available_memory", lambda: enough - 1)
    monkeypatch.setattr(load, "load_by_transformers", lambda *given: pytest.fail("it was loaded"))
    with pytest.raises(MemoryError, match=r"takes 0\.\d GB with engine='packed'.* fits is engine='int8'"):
        load_base(directory, "auto")
    monkeypatch.setattr(plan, "available_memory", lambda: 1)
    with pytest.raises(MemoryError, match=r"engine='eager', and .* no engine holds it"):
        load_base(directory, "eager")


@pytest.mark.parametrize("engine", ["packed", "int8"])
@pytest.mark.parametrize("in_twelve", [False, True], ids=["sixteen", "twelve"])
def test_large_matrices_take_the_memory_that_is_named(large, engine, in_twelve, monkeypatch):
    monkeypatch.setattr(forms, "_twelve_bits", in_twelve)
    named = plan.held_bytes(find_base(large[0]), engine)
    assert bytes_held(load_base(large[0], engine)) == named


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_a_base_whose_norms_have_no_weights_is_packed_too(tmp_path, is_tied):
    """OLMo has linear layers and embeddings alone, so no parameter is left that says type and device."""
    directory = saved(OlmoForCausalLM(OlmoConfig(**GROUPED, tie_word_embeddings=is_tied)), tmp_path)
    model, ids = MedusaModel.from_pretrained(directory), random_prompts(1, 9)
    assert model.base.dtype == torch.float32 and model.runtime.engine == "packed"
    expected = load_base(directory, dtype=torch.float32).generate(ids, **GREEDY)
    assert model.generate(ids, **GREEDY).tolist() == expected.tolist()


def test_code_that_reads_weights_past_their_modules_gets_them(tmp_path, monkeypatch):
    def read_past(mlp, x):
        return F.linear(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight)

    directory, ids = saved(tiny_model("llama"), tmp_path), random_prompts(1, 9)
    expected = load_base(directory, dtype=torch.float32).generate(ids, **GREEDY)
    monkeypatch.setattr(LlamaMLP, "forward", read_past)
    monkeypatch.setattr(
        architecture_check, "TESTED_MODEL_TYPES", frozenset()
    )  # those that do are none of these
    model = MedusaModel.from_pretrained(directory)
    assert packed_as(model.base) is None and model.runtime.engine == "packed"
    assert model.generate(ids, **GREEDY).tolist() == expected.tolist()


@pytest.mark.parametrize("finer", ["in other files", "in an adapter"])
def test_numbers_beside_the_safetensors_files_are_not_rounded_to_their_type(tmp_path, finer):
    directory, ids = saved(tiny_model("llama"), tmp_path), random_prompts(1, 9)
    if finer == "in other files":
        options = {"use_safetensors": False}
        weights = load_file(directory / WEIGHTS)
        torch.save({key: each.float() * (1 + 2.0**-12) for key, each in weights.items()}, tmp_path / BINARY)
    else:  # transformers puts on an adapter that lies beside the weights
        peft, options = pytest.importorskip("peft"), {}
        adapter = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(load_base(directory, dtype=torch.float32), adapter).save_pretrained(directory)
    ordinary = load_base(directory, dtype=torch.float32, **options)
    model = MedusaModel.from_pretrained(directory, engine="packed", **options)
    with torch.no_grad():
        torch.testing.assert_close(model.engine_base(ids).logits, ordinary(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "content", [b"", (4).to_bytes(8, "little") + b"[1] ", (4).to_bytes(8, "little") + b"\xff\xff\xff\xff"],
    ids=["empty", "a list", "no text"],
)  # fmt: skip
def test_a_damaged_file_is_refused_in_words(tmp_path, content):
    directory = saved(tiny_model("llama"), tmp_path)
    (directory / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=r"weights of base .* a safetensors file is damaged .* download it"):
        load_base(directory, "packed")


def test_a_base_that_is_held_once_is_neither_saved_nor_cast(tmp_path):
    base = MedusaModel.from_pretrained(saved(tiny_model("llama"), tmp_path)).base
    for save in (base.save_pretrained, pickle.loads(pickle.dumps(base)).save_pretrained):
        with pytest.raises(ValueError, match="load it with engine='eager' and save that"):
            save(tmp_path / "again")
    assert not (tmp_path / "again").exists()
    with pytest.raises(ValueError, match=r"cast or moved since, to torch\.bfloat16 on cpu; load it again"):
        MedusaModel(base.bfloat16(), engine="packed")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_a_file_from_the_hub_are_given_back_too(tmp_path):
    """The hub's cache holds files under their checksums, and links to them under their names."""
    directory = saved(tiny_model("llama"), tmp_path)
    blob = (directory / WEIGHTS).rename(tmp_path / "0123abc")
    (directory / WEIGHTS).symlink_to(blob)
    base = load_base(directory, "packed")
    start = embedding_rows(base.get_input_embeddings()).data_ptr()
    assert any(low <= start < high for low, high in memory._mapped_files())


def test_pages_of_a_packed_weight_that_is_gone_are_given_back_and_its_neighbours_stay():
    pages = memory.HugePages()
    first, second, third = (pages.empty((size,), torch.uint8).fill_(7) for size in (5000, 20_000, 64))
    start, part = second.data_ptr() - first.data_ptr(), pages._part
    view = second[9_000:]
    del second
    assert part[start : start + 20_000] == bytes([7]) * 20_000, "a view keeps it"
    del view
    assert part[8192:24_576] == bytes(16_384), "whole pages of zeros"
    assert part[:5000] == bytes([7]) * 5000 and part[start + 20_032 : start + 20_096] == bytes([7]) * 64
    assert first.eq(7).all() and third.eq(7).all()


PEAK = """
import json, sys
from medusa.engine.kernels import lanes
from medusa.engine.weights.forms import uses_twelve_bits
from medusa.engine.weights.load import load_base
lanes(), uses_twelve_bits()  # which a first start compiles and measures
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is what is held now, and not what that measuring took
def kilobytes(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
before = kilobytes("VmRSS")
base = load_base(sys.argv[1], sys.argv[2])
print(json.dumps({"peak": 1024 * (kilobytes("VmHWM") - before)}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A base of 76 million weights, its directory, and the bytes that they take there."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    with torch.device("meta"):
        base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **sizes, **heads)).bfloat16()
    base.to_empty(device="cpu").requires_grad_(False)
    for parameter in base.parameters():
        parameter.fill_(0.01)
    directory = tmp_path_factory.mktemp("large")
    base.save_pretrained(directory)
    return directory, sum(parameter.nbytes for parameter in base.parameters())


@pytest.mark.parametrize("load", [load_base, functools.partial(load_base, engine="packed")])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_file_that_the_index_names_and_that_is_not_there_is_named(tmp_path, load, ending):
    if ending == "bin":
        directory = in_shards_of_bin_files(tmp_path, TINY)
    else:
        directory = tmp_path
        tiny_model("llama").save_pretrained(directory, max_shard_size="20KB")
    missing = sorted(directory.glob(f"*-of-*.{ending}"))[-1]
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks a file .* names: .*{missing.name}.*download it"):
        load(directory)


@pytest.mark.parametrize("load", [load_base, functools.partial(load_base, engine="packed")])
def test_weights_of_other_shapes_than_the_configuration_says_are_refused_in_words(tmp_path, load):
    """Such as rows of tokens that were added to the embedding and not to ``vocab_size``."""
    directory = saved(tiny_model("llama"), tmp_path)
    settings = json.loads((directory / "config.json").read_text())
    settings["vocab_size"] -= 2
    (directory / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"have other shapes than its config\.json says.*vocab_size"):
        load(directory)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("engine, factor", [("packed", 1.1), ("int8", 0.6)])
def test_a_base_is_held_once_while_it_is_loaded_too(large, engine, factor):
    directory, size = large
    command = [sys.executable, "-c", PEAK, str(directory), engine]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    peak = json.loads(ran.stdout.splitlines()[-1])["peak"]
    assert peak < factor * size + 40e6, f"{peak / size:.2f} of the file"


@pytest.mark.parametrize("load", [load_base, functools.partial(load_base, engine="packed")])
def test_a_base_without_an_lm_head_in_its_files_is_refused(tmp_path, load):
    save_chat_model(tmp_path)
    chat_base().model.save_pretrained(tmp_path / "headless")
    load(tmp_path / "base")
    with pytest.raises(ValueError, match=r"is no language model: its files hold no LM head \(lm_head"):
        load(tmp_path / "headless")


@pytest.mark.parametrize("load", [load_base, functools.partial(load_base, engine="packed")])
def test_a_base_without_a_weight_in_its_files_is_refused(tmp_path, load):
    """Such as a quantised directory whose settings are in a file of their own (quantize_config.json)."""
    directory = saved(tiny_model("llama"), tmp_path)
    tensors = load_file(directory / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name.replace("weight", "qweight")] = tensors.pop(name).to(torch.int32)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"must have a tensor for '{name}' \(1 in all\).*quantization_config"
    ):
        load(directory)


def test_masks_of_truth_values_are_named_with_a_byte_each(tmp_path):
    config = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 1}
    positions = 32 * 2 * (1024 - 64)
    short, long = (
        plan.held_bytes(
            find_base(saved(GPTBigCodeForCausalLM(GPTBigCodeConfig(**config, n_positions=length)), tmp_path)),
            "packed",
        )
        for length in (64, 1024)
    )
    assert long - short == 1024**2 - 64**2 + positions
