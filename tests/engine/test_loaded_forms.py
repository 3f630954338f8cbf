"""Each form in which people hold a base loads by its directory: with the text of ``transformers``, and in the
memory that the check named before anything was read."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import GROUPED, OracleDrafter, needs_kernels, random_prompts
from loadable_models import MODELS, TEXT, bytes_held
from quantised_directories import write_directory
from quantised_files import write_model
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, MedusaModel
from medusa.base.loading import find_base, quantised_directory
from medusa.base.recurrent import is_recurrent
from medusa.base.text_part import auto_class
from medusa.engine import held_sizes, loading, quantised_loading

pytestmark = needs_kernels
WEIGHTS = "model.safetensors"
GREEDY = {"do_sample": False, "max_new_tokens": 16}
MOST = {"FP8": 2.0}
"""Bytes held for each byte of the files, at most, where numbers are held in a wider type; 1.3 elsewhere:
norms are widened, and panels padded."""
FORMS = (*MODELS, "one tensor in float32", "a .bin file", "MXFP4", "GPTQ", "FP8", "GGUF")


def written(form, directory):
    """A directory, or a file, with random weights in this form."""
    torch.manual_seed(5)
    if form in ("GPTQ", "FP8"):
        write_directory(directory, {"GPTQ": "gptq", "FP8": "fp8, channels"}[form])
        return directory
    if form == "GGUF":
        return write_model(directory / "model.gguf")
    if form == "MXFP4":
        return written_in_mxfp4(directory)
    model = MODELS.get(form, lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)))().bfloat16()
    if form == "one tensor in float32":
        proj = model.model.layers[0].self_attn.v_proj.float()
        proj.weight.data += 2.0**-20
    model.save_pretrained(directory)
    if form == "a .bin file":
        torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
        (directory / WEIGHTS).unlink()
    return directory


def written_in_mxfp4(directory):
    """A GPT-OSS whose experts have four bits a weight, as its own files have them."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    config = GptOssConfig(
        **{**TEXT, **sizes, "hidden_size": 128, "intermediate_size": 128},
        layer_types=["sliding_attention", "full_attention"],
    )
    GptOssForCausalLM(config).bfloat16().save_pretrained(directory)
    tensors = load_file(directory / WEIGHTS)
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, num_inputs, num_outputs = tensors.pop(name).shape
        blocks = experts, num_outputs, num_inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, blocks, dtype=torch.uint8)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def test_experts_that_are_not_whole_are_refused_by_name(tmp_path):
    tensors = load_file(written_in_mxfp4(tmp_path) / WEIGHTS)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for scales in (tensors[name][:, :, :1].clone(), None):
        changed = {**tensors, name: scales}
        save_file({key: each for key, each in changed.items() if each is not None}, tmp_path / WEIGHTS)
        with pytest.raises(ValueError, match=rf"{name}' must have shape \(4, 128, 4\)"):
            MedusaModel.from_pretrained(tmp_path)
    assert "experts" in quantised_directory(find_base(tmp_path)).described


def theirs(path):
    """The model as ``transformers`` loads it, whole and in float32; of quantised files with their numbers."""
    source = find_base(path)
    if source.gguf is not None or loading.is_held_quantised(source):
        return loading.load_base(path, dtype=torch.float32)
    return auto_class(source.config).from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("form", FORMS)
def test_a_form_loads_by_its_directory_exactly_and_in_the_memory_that_was_named(form, tmp_path, monkeypatch):
    named = []

    def note(name, engine, bytes_for, *others):
        named.append(bytes_for(engine))
        held_sizes.check_fits(name, engine, bytes_for, *others)

    monkeypatch.setattr(loading, "check_fits", note)
    monkeypatch.setattr(quantised_loading, "check_fits", note)
    path = written(form, tmp_path)
    model = MedusaModel.from_pretrained(path, engine="packed")
    ids = random_prompts(1, 9)
    own = theirs(path)
    with torch.no_grad():
        torch.testing.assert_close(model.engine_base(ids).logits, own(ids).logits, rtol=1e-4, atol=1e-4)
    reference = own.generate(ids, **GREEDY, attention_mask=torch.ones_like(ids))
    tree = (
        CandidateTree.chain(2) if is_recurrent(model.base) else CandidateTree.from_paths([(0,), (1,), (0, 0)])
    )
    for drafter in ("plain", OracleDrafter(reference.tolist(), tree, hit_rate=0.8)):
        assert model.generate(ids, **GREEDY, drafter=drafter).tolist() == reference.tolist(), drafter
    (said,) = named
    held = bytes_held(model.engine_base, model.base)
    assert said / 1.1 < held < said * 1.1, f"{held} bytes are held, and {said} were named"
    files = [each for each in tmp_path.iterdir() if each.suffix in (".safetensors", ".bin", ".gguf")]
    in_files = sum(each.stat().st_size for each in files)
    assert held < MOST.get(form, 1.3) * in_files, f"{held} bytes are held of {in_files}"
