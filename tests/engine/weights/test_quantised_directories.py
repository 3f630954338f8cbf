"""A base in a directory with a ``quantization_config``: held in its own bits, and its text is the same
whatever is guessed. What cannot be held is refused before anything is read."""

import dataclasses
import functools
import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_kinds import OF_IMAGES, TINY
from conftest import BUSHY, OracleDrafter, assert_exact, left_padded, needs_kernels
from quantised_directories import (
    FORMS,
    HIDDEN,
    VOCAB_SIZE,
    WHOLE,
    gptq,
    of_gptq,
    quantise_saved,
    random_matrix,
    save_tensors,
    scheme,
    write_directory,
)
from refusals import refusals
from safetensors import safe_open

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.causal_lm import end_ids, lm_head, rows_at
from medusa.base.loading import find_base
from medusa.engine.views import packed_as, packed_bytes
from medusa.engine.weights.load import load_base
from medusa.engine.weights.products import GroupQuantisedMatmul, JoinedLinear
from medusa.heads.fingerprint import BaseFingerprint

pytestmark = needs_kernels
SAMPLINGS = [{"do_sample": False}, {"do_sample": True, "temperature": 0.9, "seed": 3}]
TRIED = [("gptq, order", "llama"), ("w4a16, zeros", "qwen2"), ("w8a8", "llama"), ("fp8, blocks", "llama")]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Writes a tiny model once: its directory, and the model that it means."""
    made = {}

    def write(form, architecture="llama", **more):
        key = (form, architecture, *more.items())
        if key not in made:
            path = tmp_path_factory.mktemp("quantised") / "model"
            made[key] = path, write_directory(path, form, architecture, **more)
        return made[key]

    return write


def prompts(num_rows=1, length=12):
    ids = torch.randint(0, 250, (num_rows, length), generator=torch.Generator().manual_seed(5))
    return left_padded(ids, [length - 3 * row for row in range(num_rows)])


def tensors_of(path):
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    return found


# ------------------------------------------------------------------ numbers


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_a_base_is_the_widened_one_with_every_engine(form, directories):
    path, expected = directories(form)
    ids = prompts()["input_ids"]
    wanted = expected(ids).logits
    torch.testing.assert_close(load_base(path)(ids).logits, wanted)
    torch.testing.assert_close(load_base(path, "eager")(ids).logits, wanted)
    torch.testing.assert_close(load_base(path, "packed")(ids).logits, wanted, atol=1e-5, rtol=1e-5)
    error = (load_base(path, "auto")(ids).logits - wanted).norm() / wanted.norm()
    assert (1e-3 < error < 0.04) if form in WHOLE else error < 1e-5, "FP8 is no whole number"


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "is_tied"), [("gptq, zeros", True), ("w4a16", False), ("fp8, blocks", True)]
)
def test_biases_and_what_is_not_quantised_stay_as_they_are(form, is_tied, directories):
    path, expected = directories(form, "qwen2", is_tied=is_tied)
    base, ids = load_base(path, "packed"), prompts()["input_ids"]
    assert expected.model.layers[0].self_attn.q_proj.bias.abs().max() > 0.05
    torch.testing.assert_close(base(ids).logits, expected(ids).logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(base.get_input_embeddings()(ids), expected.get_input_embeddings()(ids))
    assert torch.equal(rows_at(lm_head(base), ids).float(), expected.lm_head.weight[ids])
    assert BaseFingerprint.of(expected).difference(base) is None
    assert end_ids(base) == {258, 259}, "as generation_config.json says"
    assert getattr(base.config, "quantization_config", None) is None
    assert base.name_or_path == str(path)


@torch.no_grad()
def test_zeros_of_older_files_and_tensors_without_a_use_are_read_too(directories, tmp_path):
    path, expected = directories("w4a16, zeros")
    tensors = tensors_of(path)
    for name in [name for name in tensors if name.endswith("weight_zero_point")]:
        packed, (num_outputs, _) = tensors[name], tensors[name.replace("zero_point", "shape")].tolist()
        codes = torch.stack([packed >> 4 * at & 15 for at in range(8)], 1).flatten(0, 1)[:num_outputs]
        tensors[name] = (codes - 8).to(torch.int8)
        tensors[name.replace("weight_zero_point", "input_scale")] = torch.ones(1)
        tensors[name.replace("weight_zero_point", "weight_g_idx")] = torch.full((HIDDEN,), -1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    write_directory(tmp_path / "other", "w4a16, zeros")
    save_tensors(tmp_path / "other", tensors)
    ids = prompts()["input_ids"]
    logits = load_base(tmp_path / "other", "packed")(ids).logits
    torch.testing.assert_close(logits, expected(ids).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_tied_matrix_that_a_file_has_twice_is_no_tensor_without_a_place(directories, tmp_path):
    path, expected = directories("fp8, blocks", "qwen2", is_tied=True)
    tensors = tensors_of(path)
    write_directory(tmp_path / "other", "fp8, blocks", "qwen2", is_tied=True)
    save_tensors(
        tmp_path / "other", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    )
    ids = prompts()["input_ids"]
    logits = load_base(tmp_path / "other", "packed")(ids).logits
    torch.testing.assert_close(logits, expected(ids).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_layers_that_read_one_input_share_a_product_where_their_inputs_have_one_order(directories):
    for form, are_joined in [("gptq", True), ("gptq, order", True), ("gptq, orders", False)]:
        path, _ = directories(form)
        attention = load_base(path, "auto").model.layers[0].self_attn
        assert isinstance(attention.q_proj, JoinedLinear) == are_joined
        assert isinstance(attention.o_proj, GroupQuantisedMatmul)
        assert (attention.o_proj.input_order is None) == (form == "gptq")


@torch.no_grad()
def test_scales_that_only_float32_holds_are_not_rounded(directories, tmp_path, capsys):
    path, expected = directories("w4a16")
    tensors, name = tensors_of(path), "model.layers.1.mlp.down_proj"
    factor = 1 + 2**-15
    tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"].float() * factor
    write_directory(tmp_path / "other", "w4a16")
    save_tensors(tmp_path / "other", tensors)
    base = load_base(tmp_path / "other", "auto")
    assert "1 weight widened to float32" in capsys.readouterr().err.replace("\n", " ")
    numbers = expected.get_submodule(name).weight * factor
    assert torch.equal(base.get_submodule(name).unpacked(), numbers)


def head_of_gptq(order):
    matrix = random_matrix(np.random.default_rng(7), (264, HIDDEN), order=order)
    return gptq(matrix, 4), matrix.numbers


def head_of_fp8():
    return FORMS["fp8, channels"][1](np.random.default_rng(7), (264, HIDDEN))


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "head", "held"),
    [
        ("gptq", lambda: head_of_gptq(None), "4 bits"),
        ("gptq", lambda: head_of_gptq("shared"), "float32"),
        ("fp8, channels", head_of_fp8, "bfloat16"),
    ],
    ids=["gptq", "gptq with an order of inputs", "fp8"],
)
def test_a_quantised_lm_head_is_held_too_and_its_rows_can_be_looked_up(form, head, held, tmp_path):
    path, ids = tmp_path / "model", prompts()["input_ids"]
    expected = write_directory(path, form, vocab_size=264)
    tensors, (parts, numbers) = tensors_of(path), head()
    del tensors["lm_head.weight"]
    save_tensors(path, tensors | {f"lm_head.{part}": each.contiguous() for part, each in parts.items()})
    expected.lm_head.weight.copy_(numbers)
    base = load_base(path, "packed")
    assert held in packed_bytes(base)
    torch.testing.assert_close(base(ids).logits, expected(ids).logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(rows_at(lm_head(base), ids).float(), numbers[ids])


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "engine", "held"),
    [
        ("w4a16", "auto", "int8"),
        ("w4a16", "int8", "int8"),
        ("w4a16", "packed", "packed"),
        ("fp8, channels", "auto", "packed"),
        ("fp8, channels", "packed", "packed"),
        ("fp8, channels", "int8", "int8"),
    ],
)
def test_whole_numbers_are_multiplied_by_themselves_and_fp8_as_bfloat16_is(form, engine, held, directories):
    path, expected = directories(form)
    base, ids = load_base(path, engine), prompts()["input_ids"]
    assert packed_as(base) == held
    assert ("4 bits" in packed_bytes(base)) == (form == "w4a16")
    error = (base(ids).logits - expected(ids).logits).norm() / expected(ids).logits.norm()
    assert error < (0.04 if held == "int8" else 1e-5)


# ------------------------------------------------------------------ text


@pytest.mark.parametrize(("engine", "sampling"), [("packed", SAMPLINGS[0]), ("auto", SAMPLINGS[1])])
@pytest.mark.parametrize(("form", "architecture"), TRIED)
def test_no_draft_changes_the_text(form, architecture, engine, sampling, directories):
    path, expected = directories(form, architecture)
    torch.manual_seed(1)
    heads = MedusaHeads(HeadsConfig(HIDDEN, VOCAB_SIZE, num_heads=4, reads_path=True))
    base = MedusaModel.from_pretrained(path, engine=engine).base
    model = MedusaModel(base, heads, BUSHY, engine=engine)
    call = {"max_new_tokens": 24, **sampling}
    for batch in (prompts(1), prompts(3)):
        plain = model.generate(**batch, **call, tree=CandidateTree.chain(0))
        oracle = OracleDrafter([row.tolist() for row in plain], BUSHY, hit_rate=0.7, seed=2)
        hows = [{"drafter": name} for name in ("heads", "dynamic-heads", "suffix")]
        assert_exact(model, batch, *hows, {"drafter": oracle}, {}, expected=plain, **call)
    if engine == "packed":
        assert MedusaModel(expected).generate(**batch, **call).tolist() == plain.tolist()


def test_compiled_steps_write_the_text_of_general_ones_with_any_draft(directories):
    """With inputs in an order, which no GGUF file has, and biases. Programs are the same for all forms, and
    for rows in whole numbers and in float32: the bytes of the weights say which these are."""
    base = load_base(directories("gptq, order", "qwen2", num_layers=4)[0], "int8")
    heads = MedusaHeads(HeadsConfig(HIDDEN, VOCAB_SIZE, num_heads=4, reads_path=True))
    model = MedusaModel(base, heads, BUSHY, engine="int8", step="compiled")
    batch, call = prompts(2), {"max_new_tokens": 16, "do_sample": True, "seed": 1}
    plain = model.generate(**batch, **call, tree=CandidateTree.chain(0))
    hows = [{"drafter": name} for name in ("heads", "suffix", "dynamic-heads+suffix")]
    assert_exact(model, batch, *hows, expected=plain, **call)
    general = MedusaModel(base, engine="int8").generate(**batch, **call, tree=CandidateTree.chain(0))
    assert general.tolist() == plain.tolist()


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("form", ["gptq, order", "w4a16", "w8a8"])
def test_what_is_held_is_what_the_files_have(form, directories):
    path, _ = directories(form, num_layers=6)
    base = load_base(path, "auto")
    layers = [part.num_bytes for name, part in stored(path).items() if ".layers." in name]
    products = [module for module in base.modules() if isinstance(module, GroupQuantisedMatmul)]
    assert sum(module.panels.nbytes for module in products) < 1.25 * sum(layers) + 2**16
    assert not any(parameter.numel() > 400 for parameter in base.parameters() if not parameter.isnan().all())
    gc.collect()
    mapped, lines = 0, iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if str(path) in line:
            mapped += next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    sizes = [os.path.getsize(each) for each in path.glob("*.safetensors")]
    # the system maps what it has read around a page
    assert 1024 * mapped < 0.75 * sum(sizes), "pages of the files are given back"


def stored(path):
    from medusa.base.loading import quantised_directory

    return quantised_directory(find_base(path)).tensors


def test_too_little_memory_is_said_before_anything_is_read(directories, monkeypatch):
    monkeypatch.setattr("medusa.engine.weights.plan.available_memory", lambda: 2**20)
    for engine in ("auto", "eager"):
        with pytest.raises(MemoryError, match=rf"takes 0\.\d GB with engine='{engine}', and 0.0 GB"):
            load_base(directories("gptq")[0], engine)


@torch.no_grad()
def test_biases_of_zeros_that_older_files_of_gptq_have_are_left_out(directories, tmp_path):
    path, expected = directories("gptq")
    write_directory(tmp_path, "gptq")
    tensors = tensors_of(path)
    for name in [name for name in tensors if name.endswith(".qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1])
    save_tensors(tmp_path, tensors)
    ids = prompts()["input_ids"]
    logits = load_base(tmp_path, "packed")(ids).logits
    torch.testing.assert_close(logits, expected(ids).logits, atol=1e-5, rtol=1e-5)
    tensors[f"{NAME}.bias"][3] = 0.1
    save_tensors(tmp_path, tensors)
    with pytest.raises(ValueError, match=rf"tensor '{NAME}.bias' \(1 in all\) has no place"):
        load_base(tmp_path, "packed")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Qwen2.5-VL", "Gemma 3"])
def test_of_a_model_of_images_the_text_part_is_held_whatever_its_tensors_were_called(kind, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    widths = dataclasses.replace(TINY, text={**TINY.text, **sizes}, axes=(8, 12, 12))
    OF_IMAGES[kind](widths).save_pretrained(tmp_path / "quantised")
    quantise_saved(tmp_path / "quantised", "awq", tmp_path / "numbers")
    ids = torch.arange(2, 11)[None]
    expected = load_base(tmp_path / "numbers", dtype=torch.float32)(ids).logits
    for load in (functools.partial(load_base, engine="packed"), load_base):
        base = load(tmp_path / "quantised")
        torch.testing.assert_close(base(ids).logits, expected, atol=1e-4, rtol=1e-4)
        assert not [name for name, _ in base.named_parameters() if "vision" in name or "visual" in name]


# ------------------------------------------------------------------ refusals


def asked(tmp_path, form="gptq", settings=None, change=None):
    """Loads a directory with these settings, whose tensors ``change`` has changed; no weight may be read."""
    path = tmp_path / "model"
    write_directory(path, form, settings=settings)
    if change is not None:
        tensors = tensors_of(path)
        change(tensors)
        save_tensors(path, tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medusa.base.quantised_directory.QuantisedDirectory.parts", None)
        load_base(path, "auto")


NAME = "model.layers.1.mlp.up_proj"


def groups_of_16(tensors):
    tensors[f"{NAME}.g_idx"] = (torch.arange(HIDDEN) >= 16).int()


def cut(part):
    def change(tensors):
        tensors[f"{NAME}.{part}"] = tensors[f"{NAME}.{part}"][:-1].clone()

    return change


def renamed(name, other):
    def change(tensors):
        tensors[other] = tensors.pop(name)

    return change


def without_lines(words):
    return f"is quantised in a way that is not read on a CPU ... {words} ... GPTQ and ... a GGUF file of it"


test_what_cannot_be_held_is_refused_before_it_is_read = refusals(
    (
        "3 bits",
        lambda tmp_path: asked(tmp_path, settings=of_gptq(3)),
        without_lines("bits ... 4 or 8, got 3"),
    ),
    (
        "another layout of GPTQ",
        lambda tmp_path: asked(tmp_path, settings=of_gptq(checkpoint_format="marlin")),
        without_lines("checkpoint_format ... must be gptq or gptq_v2, got marlin"),
    ),
    (
        "another layout of AWQ",
        lambda tmp_path: asked(tmp_path, settings={"quant_method": "awq", "bits": 4, "version": "GEMV"}),
        without_lines("version ... must be gemm, got gemv"),
    ),
    (
        "floats of 4 bits",
        lambda tmp_path: asked(tmp_path, "w4a16", scheme("nvfp4-pack-quantized", 4, 16, type="float")),
        without_lines("format ... must be pack-quantized or ... got nvfp4-pack-quantized"),
    ),
    (
        "2 bits",
        lambda tmp_path: asked(tmp_path, "w4a16", scheme("pack-quantized", 2, 128)),
        without_lines("num_bits ... must be 4 or 8, got 2"),
    ),
    (
        "sparse",
        lambda tmp_path: asked(
            tmp_path, "w4a16", scheme("pack-quantized", 4, 128) | {"sparsity_config": {"format": "sparse-24"}}
        ),
        without_lines("sparsity_config.format ... must be dense, got sparse-24"),
    ),
    (
        "turned",
        lambda tmp_path: asked(
            tmp_path, "w4a16", scheme("pack-quantized", 4, 128) | {"transform_config": {"config_groups": {}}}
        ),
        without_lines("transform_config"),
    ),
    (
        "small groups",
        lambda tmp_path: asked(tmp_path, change=groups_of_16),
        without_lines(f"groups of '{NAME}' must be whole 32 inputs, got 2 for 256 inputs"),
    ),
    (
        "a tensor without a place",
        lambda tmp_path: asked(tmp_path, change=renamed(f"{NAME}.qweight", f"{NAME}.experts.qweight")),
        without_lines(f"its tensor '{NAME}. ... (4 in all) has no place in LlamaForCausalLM"),
    ),
    (
        "no scales",
        lambda tmp_path: asked(tmp_path, change=lambda tensors: tensors.pop(f"{NAME}.scales")),
        without_lines(f"'{NAME}.qweight' has no scales of type BF16, F16, F32"),
    ),
    (
        "zeros of another shape",
        lambda tmp_path: asked(tmp_path, change=cut("qzeros")),
        f"tensor '{NAME}.qzeros' must have shape (2, 48), as its configuration says, got (1, 48); copy or",
    ),
    (
        "a norm that is missing",
        lambda tmp_path: asked(tmp_path, change=lambda tensors: tensors.pop("model.norm.weight")),
        "must have a tensor for 'model.norm.weight' (1 in all), and has none; copy or download it again",
    ),
    (
        "a norm of another shape",
        lambda tmp_path: asked(
            tmp_path, change=lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})
        ),
        "tensor 'model.norm.weight' must have shape (256,), as its configuration says, got (3,)",
    ),
    (
        "FP8 scales of another shape",
        lambda tmp_path: asked(
            tmp_path,
            "fp8, blocks",
            change=lambda tensors: tensors.update({f"{NAME}.weight_scale_inv": torch.ones(5, 2)}),
        ),
        without_lines(f"'{NAME}' has scales of shape (5, 2) for a weight of (352, 256)"),
    ),
)


def test_a_damaged_file_is_one_sentence(tmp_path):
    write_directory(tmp_path / "model", "awq")
    file = next((tmp_path / "model").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match="a safetensors file is damaged"):
        load_base(tmp_path / "model", "auto")


def test_a_directory_without_safetensors_is_refused(tmp_path):
    write_directory(tmp_path / "model", "awq")
    for file in (tmp_path / "model").glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(
        ValueError, match=r"awq in 4 bits, groups of 128.*safetensors files, of which it has none"
    ):
        load_base(tmp_path / "model", "auto")


def test_an_adapter_beside_quantised_weights_is_not_left_out_quietly(tmp_path):
    write_directory(tmp_path / "model", "awq")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    for engine in ("auto", "eager"):
        with pytest.raises(ValueError, match=r"has an adapter beside its weights \(adapter_config.json\)"):
            load_base(tmp_path / "model", engine)


def test_other_methods_are_left_to_transformers(tmp_path):
    write_directory(tmp_path / "model", "gptq", settings={"quant_method": "hqq", "quant_config": {}})
    with pytest.raises((ImportError, ValueError), match=r"(?i)hqq"):
        load_base(tmp_path / "model", "auto")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
