"""Heads that others trained: every variant is read as it was, and decodes exactly; bad ones write nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import BUSHY, left_padded
from damage import changed, config_says, removed, written
from foreign_heads import (
    reference_heads,
    reference_logits,
    refused,
    use_base_rows,
    vllm_heads,
    write_heads,
    write_vllm_heads,
    write_whole_model,
)
from reported import ran
from safetensors.torch import load_file, save_file
from tiny_chat import HIDDEN_SIZE, VOCAB_SIZE, chat_base, save_chat_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, MedusaModel, load_heads
from medusa.cli.main import main

BASE = chat_base()
SAFE, PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("chat"))[0]


def without(directory: Path, file: str, drops) -> Path:
    """``directory`` with tensors of ``file`` taken out."""
    tensors = load_file(directory / file)
    save_file({name: each for name, each in tensors.items() if not drops(name)}, directory / file)
    return directory


def v1(directory, base, **shape):
    heads = reference_heads(BASE, **shape)
    return write_heads(directory, heads, base), heads


def v1_half(directory, base):
    heads = reference_heads(BASE).half()
    return write_heads(directory, heads, base), heads.float()


def v1_with_base_rows(directory, base):
    heads = use_base_rows(reference_heads(BASE), BASE)
    return write_heads(directory, heads, base), heads


def v2(directory, base, **shape):
    heads = use_base_rows(reference_heads(BASE, **shape), BASE)
    rows = f".{len(heads[0]) - 1}.weight"
    return without(write_heads(directory, heads, base, SAFE), SAFE, lambda name: name.endswith(rows)), heads


def v2_with_rows(directory, base):
    heads = reference_heads(BASE)
    return write_heads(directory, heads, base, SAFE), heads


def v2_repeated_once(directory, base):
    """What safetensors keeps of blocks that share their memory."""
    heads = reference_heads(BASE, num_layers=2, repeats_block=True)
    written = write_heads(directory, heads, base, SAFE)
    return without(written, SAFE, lambda name: ".1.linear." in name), heads


def whole(directory, base, layout):
    heads = reference_heads(BASE)
    return write_whole_model(directory, heads, BASE, layout), heads


def vllm(directory, base, **kwargs):
    heads, config = vllm_heads(BASE, **kwargs)
    return write_vllm_heads(directory, heads, config), heads


def vllm_first_rows(directory, base):
    """vLLM takes the first head's rows for all where ``original_lm_head`` is true."""
    directory, heads = vllm(directory, base, is_shared=True)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, directory / "model.safetensors")
    return directory, heads


VARIANTS = {
    "v1": (v1, {}, "full"),
    "v1, two layers": (v1, {"num_layers": 2}, "full"),
    "v1, one block twice": (v1, {"num_layers": 2, "repeats_block": True}, "full"),
    "v1, no blocks": (v1, {"num_layers": 0}, "full"),
    "v1, one head": (v1, {"num_heads": 1}, "full"),
    "v1 in half precision": (v1_half, {}, "full"),
    "v1 with the base's rows": (v1_with_base_rows, {}, "shared"),
    "v2": (v2, {}, "shared"),
    "v2, two layers": (v2, {"num_layers": 2}, "shared"),
    "v2 with rows": (v2_with_rows, {}, "full"),
    "v2, one block once": (v2_repeated_once, {}, "full"),
    "Medusa-2": (whole, {"layout": "one file"}, "full"),
    "Medusa-2 in shards": (whole, {"layout": "shards"}, "full"),
    "Medusa-2, pickled": (whole, {"layout": "pickle"}, "full"),
    "vLLM": (vllm, {"is_shared": False}, "full"),
    "vLLM, one LM head": (vllm, {"is_shared": True, "num_layers": 2}, "shared"),
    "vLLM, the first head's rows": (vllm_first_rows, {}, "shared"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_of_others_guess_here_what_they_guess_there_and_decode_exactly(variant, base, tmp_path):
    make, arguments, unembedding = VARIANTS[variant]
    directory, theirs = make(tmp_path / "theirs", base, **arguments)
    where = [] if make is whole else ["--base", base]
    assert main(["import", str(directory), *where, "--output", str(tmp_path / "heads")]) == 0
    checkpoint = load_heads(tmp_path / "heads")
    heads = checkpoint.heads
    assert heads.config.unembedding == unembedding
    assert checkpoint.base_model == (str(directory) if make is whole else base)
    assert checkpoint.provenance["imported_from"] == str(directory)

    hidden = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(hidden) if variant.startswith("vLLM") else reference_logits(theirs, hidden)
        assert torch.equal(heads(hidden, BASE.lm_head), expected)

    model = MedusaModel.from_pretrained(BASE, checkpoint)
    prompts = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(2))
    tree = BUSHY.subtree(heads.num_heads)
    arguments = {**left_padded(prompts, [9, 4, 7]), "max_new_tokens": 16, "seed": 3}
    arguments |= {"do_sample": True, "temperature": 0.7}
    plain = model.generate(**arguments, tree=CandidateTree.chain(0))
    assert torch.equal(model.generate(**arguments, tree=tree), plain)


def test_the_base_of_a_whole_model_is_written_apart_on_request(base, tmp_path, capsys):
    directory, _ = whole(tmp_path / "theirs", base, "shards")
    outputs = ["--output", str(tmp_path / "heads"), "--base-output", str(tmp_path / "base")]
    assert f"medusa chat --base {tmp_path / 'base'}" in ran(capsys, ["import", str(directory), *outputs]).err
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert "medusa_num_heads" not in json.loads((tmp_path / "base" / "config.json").read_text())
    assert all(torch.equal(BASE.state_dict()[name], each) for name, each in alone.state_dict().items())
    assert load_heads(tmp_path / "heads").base_model == str(tmp_path / "base")
    assert MedusaModel.from_pretrained(tmp_path / "base", tmp_path / "heads").tokenizer is not None


def test_counts_are_read_from_the_tensors_and_a_contradiction_is_refused_unless_they_are_trusted(
    base, tmp_path, capsys
):
    directory, _ = v1(tmp_path / "theirs", base)
    config_says(medusa_num_heads=2)(directory)
    words = ["import", str(directory), "--output", str(tmp_path / "heads")]
    assert main(words) == 1
    text = f"{directory / 'config.json'} says medusa_num_heads=2, and medusa_lm_head.pt holds 3"
    assert text in (error := capsys.readouterr().err) and "--trust-tensors" in error
    assert not (tmp_path / "heads").exists()
    assert f"{text}: the tensors are right" in ran(capsys, [*words, "--trust-tensors"]).err
    assert load_heads(tmp_path / "heads").heads.num_heads == 3


BLOCK, BIAS, ROWS = "0.0.linear.weight", "1.0.linear.bias", "0.1.weight"
BAD_HEADS = [
    (written(PICKLE, "hello"), f"{PICKLE} is damaged or cut short"),
    (lambda directory: torch.save({}, directory / PICKLE), f"{PICKLE} holds no Medusa heads ... as {BLOCK}"),
    (changed(PICKLE, {"1.0.linear.weight": None}), f"{PICKLE} lacks 1.0.linear.weight, of 3 heads"),
    (changed(PICKLE, {"2.0.linear.bias": None}), f"{PICKLE} lacks 2.0.linear.bias"),
    (changed(PICKLE, {ROWS: None}), f"{PICKLE} lacks {ROWS}"),
    (changed(PICKLE, {"fc": torch.zeros(2)}), f"{PICKLE} holds tensors that are no part ... : fc;"),
    (changed(PICKLE, {"0.2.weight": torch.zeros(2, 2)}), "lacks 1.2.weight, 2.2.weight, of 3 heads"),
    (changed(PICKLE, {"999999.0.linear.bias": torch.zeros(32)}), "holds 1000000 Medusa heads"),
    (changed(PICKLE, {"0.999999.linear.bias": torch.zeros(32)}), "speaks of 1000000 layers"),
    (changed(PICKLE, {"0.1.linear.weight": torch.zeros(32, 32)}), "with 1 layers: 0.1.linear.weight"),
    (changed(PICKLE, {BIAS: torch.zeros(31)}), f"'{BIAS}' must have shape (32,) ... got (31,)"),
    (changed(PICKLE, {ROWS: torch.zeros(9, 31)}), f"'{ROWS}' must have shape (9, 32), got (9, 31)"),
    (changed(PICKLE, {BLOCK: torch.zeros(())}), f"'{BLOCK}' must have 2 dimensions"),
    (removed("config.json"), "config.json does not exist"),
    (written("config.json", "{"), "config.json is not valid JSON"),
    (config_says(medusa_num_layers=2), f"medusa_num_layers=2, and {PICKLE} holds 1 ... --trust-tensors"),
    (config_says(hidden_size=64), f"hidden_size=64, and {PICKLE} holds 32"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_HEADS)
def test_bad_heads_are_refused_in_one_line_that_names_the_file_and_nothing_is_written(
    spoil, message, base, tmp_path, capsys
):
    directory, _ = v1(tmp_path / "theirs", base)
    spoil(directory)
    refused(["import", str(directory), "--base", base], tmp_path, capsys, f"error: {directory} ... {message}")


def test_rows_of_one_head_where_v2_leaves_out_all_or_none_are_refused(base, tmp_path, capsys):
    directory, _ = v2(tmp_path / "theirs", base)
    rows = {"0.1.weight": torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)}
    save_file(load_file(directory / SAFE) | rows, directory / SAFE)
    words = ["import", str(directory), "--base", base]
    refused(words, tmp_path, capsys, f"error: {directory} ... {SAFE} lacks 1.1.weight, 2.1.weight")


@pytest.mark.parametrize(("size", "vocab"), [(64, VOCAB_SIZE), (HIDDEN_SIZE, VOCAB_SIZE + 1)])
def test_a_base_of_other_sizes_is_refused(size, vocab, base, tmp_path, capsys):
    config = LlamaConfig(
        hidden_size=size, vocab_size=vocab, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    directory, _ = v1(tmp_path / "theirs", base)
    name, theirs, ours = ("hidden_size", 32, 64) if size == 64 else ("vocab_size", VOCAB_SIZE, VOCAB_SIZE + 1)
    refused(
        ["import", str(directory), "--base", str(tmp_path / "other")],
        tmp_path,
        capsys,
        f"{PICKLE} holds heads for {name}={theirs}, base model ... other' has {ours}; ... --base",
    )


@pytest.mark.parametrize("kind", ["vLLM", "Medusa-2"])
def test_a_base_of_the_same_sizes_with_another_lm_head_is_refused(kind, base, tmp_path, capsys):
    chat_base(seed=9).save_pretrained(tmp_path / "other")
    if kind == "vLLM":
        directory, _ = vllm(tmp_path / "theirs", base, is_shared=True)
        message = "model.safetensors holds rows of the vocabulary for all heads ... % away from the output"
    else:
        directory, _ = whole(tmp_path / "theirs", base, "one file")
        message = "model.safetensors: lm_head.weight is not the LM head of the base model ... other'"
    words = ["import", str(directory), "--base", str(tmp_path / "other")]
    refused(words, tmp_path, capsys, message)


def test_a_directory_of_no_known_format_is_refused_with_what_it_holds(base, tmp_path, capsys):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "weights.gguf").write_text("")
    refused(
        ["import", str(tmp_path / "theirs")],
        tmp_path,
        capsys,
        "no heads of a known ... it holds weights.gguf",
    )
    refused(["import", base], tmp_path, capsys, "holds no heads of a known format")
    own = str(Path(base).parent / "heads")
    refused(["import", own], tmp_path, capsys, "heads directory of this project, which needs no import")


def test_options_of_eagle3_heads_are_refused_for_others(base, tmp_path, capsys):
    directory, _ = v1(tmp_path / "theirs", base)
    for name, *values in (("fused-layers", "1", "2"), ("max-depth", "3")):
        message = f"{name.replace('-', '_')} is for an EAGLE-3 head ... leave --{name} out"
        refused(["import", str(directory), f"--{name}", *values], tmp_path, capsys, message)


def test_a_base_that_nobody_names_is_asked_for(base, tmp_path, capsys):
    directory, _ = v1(tmp_path / "theirs", base)
    config_says("base_model_name_or_path")(directory)
    refused(["import", str(directory)], tmp_path, capsys, "config.json names no base model; give it: --base")


def test_a_lost_shard_or_tensor_of_a_whole_model_is_named(base, tmp_path, capsys):
    directory, _ = whole(tmp_path / "theirs", base, "shards")
    words = ["import", str(directory), "--base", base]
    name = "medusa_head.1.0.linear.weight"
    file = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]
    without(directory, file, lambda each: each == name)
    refused(words, tmp_path, capsys, f"{file} lacks ... {name} ... index says")
    (directory / file).unlink()
    refused(words, tmp_path, capsys, f"{file} does not exist; ... download it again")


def test_an_output_that_holds_something_is_refused_before_anything_is_read(base, tmp_path, capsys):
    directory, _ = v1(tmp_path / "theirs", base)
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "mine.txt").write_text("mine")
    words = ["import", str(directory), "--output", str(tmp_path / "heads")]
    assert "is not empty" in ran(capsys, words, 1).err
    assert "replaces only a heads directory, and" in ran(capsys, [*words, "--overwrite"], 1).err
    (tmp_path / "heads" / "mine.txt").unlink()
    assert main(words) == 0
    assert f"  {tmp_path / 'heads' / 'model.safetensors'}\n" in ran(capsys, [*words, "--overwrite"]).err


def test_a_base_of_ones_own_and_the_source_are_never_replaced(base, tmp_path, capsys):
    directory, _ = v1(tmp_path / "theirs", base)
    for output in (directory, tmp_path, base):
        before = {path: path.read_bytes() for path in Path(output).rglob("*") if path.is_file()}
        assert main(["import", str(directory), "--output", str(output), "--base", base, "--overwrite"]) == 1
        assert re.search("must not contain its own inputs, got|replaces only", capsys.readouterr().err)
        assert {path: path.read_bytes() for path in before} == before


def test_base_output_is_for_whole_models(base, tmp_path, capsys):
    directory, _ = v1(tmp_path / "theirs", base)
    words = ["import", str(directory), "--base-output", str(tmp_path / "base")]
    refused(words, tmp_path, capsys, "base_output goes with a Medusa-2 model")


def test_a_hub_id_is_downloaded_and_only_the_files_that_are_read(base, tmp_path, monkeypatch, hub):
    directory, _ = v1(tmp_path / "theirs", base)
    (directory / "optimizer.pt").write_bytes(b"not read")
    hub.put("someone/medusa-heads", directory)
    monkeypatch.chdir(tmp_path)
    assert main(["import", "someone/medusa-heads", "--output", "heads"]) == 0
    assert load_heads(tmp_path / "heads").provenance["imported_from"] == "someone/medusa-heads"
    fetched = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert "config.json" in fetched and "optimizer.pt" not in fetched
