"""Heads for others: complete, under their names, with their flags; and back again to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from foreign_heads import VllmMedusa, refused
from reported import ran
from safetensors.torch import load_file
from tiny_chat import HIDDEN_SIZE, VOCAB_SIZE, chat_base, chat_tokenizer, save_chat_model, wide_tree
from transformers import GraniteConfig, GraniteForCausalLM, PhiConfig, PhiForCausalLM

import medusa.interop.conversion
from medusa import Adapter, HeadsCheckpoint, HeadsConfig, MedusaHeads, load_heads, save_heads
from medusa.cli.main import main
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.heads.fingerprint import BaseFingerprint
from medusa.interop.conversion import FORMATS
from medusa.interop.plain_heads import expanded_rows
from medusa.options import ForeignName
from medusa.trees.tuned_trees import Runtime, TunedTree

BASE = chat_base()
VLLM = "vllm-medusa"
MAP = [200, 3, 97, 41, 255, 12]
KINDS = [("shared", 1), ("shared", 2), ("full", 1), ("full", 2), ("token_map", 1), ("token_map", 2)]


def plain_heads(unembedding: str = "shared", num_layers: int = 1, **reading) -> MedusaHeads:
    token_map = MAP if unembedding == "token_map" else None
    torch.manual_seed(3)
    sizes = {"num_heads": 3, "num_layers": num_layers, "token_map_size": token_map and len(MAP)}
    config = HeadsConfig(HIDDEN_SIZE, VOCAB_SIZE, unembedding=unembedding, **sizes, **reading)
    heads = MedusaHeads(config, token_map)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return heads.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("chat"))[0]


def saved(directory: Path, base: str, heads, **parts) -> str:
    parts = {"fingerprint": BaseFingerprint.of(BASE)} | parts
    return str(save_heads(HeadsCheckpoint(heads, base, **parts), directory / "heads"))


def exported(heads: str, directory: Path, *words: str) -> tuple[dict, dict]:
    """config.json and the tensors of an export."""
    output = directory / VLLM
    assert main(["export", heads, "--to", VLLM, "--output", str(output), *words]) == 0
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "model.safetensors"]
    return json.loads((output / "config.json").read_text()), load_file(output / "model.safetensors")


def hidden_states() -> torch.Tensor:
    return torch.randn(40, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))


def guesses(logits: torch.Tensor, heads: MedusaHeads) -> torch.Tensor:
    """The best token of each head."""
    return heads.token_ids(logits.argmax(dim=-1))


@pytest.mark.parametrize(("unembedding", "num_layers"), KINDS)
def test_what_vllm_makes_of_an_export_guesses_the_same_and_it_comes_back_to_the_bit(
    unembedding, num_layers, base, tmp_path
):
    heads = plain_heads(unembedding, num_layers)
    config, tensors = exported(saved(tmp_path, base, heads), tmp_path)
    assert config == {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": base,
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "truncated_vocab_size": VOCAB_SIZE,
        "num_heads": 3,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": unembedding != "full",
    }
    assert not [key for key in config if "num" in key and key not in ("num_heads", "num_hidden_layers")]
    theirs = VllmMedusa(config)
    theirs.load_state_dict(tensors, strict=True)
    with torch.no_grad():
        ours = heads(hidden_states(), BASE.lm_head)
        logits = theirs(hidden_states())
    assert torch.equal(logits.argmax(dim=-1), guesses(ours, heads))
    if unembedding != "token_map":
        assert torch.equal(logits, ours)
    assert main(["import", str(tmp_path / VLLM), "--base", base, "--output", str(tmp_path / "back")]) == 0
    back = load_heads(tmp_path / "back").heads
    assert back.config == heads.config
    before, after = heads.state_dict(), back.state_dict()
    if unembedding == "token_map":
        assert after.pop("token_map").tolist() == sorted(before.pop("token_map").tolist()) == sorted(MAP)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def scaled_base(tmp_path_factory) -> str:
    """A base that divides its logits by 8."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = GraniteConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        **sizes,
        logits_scaling=8.0,
        pad_token_id=256,
    )
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("scaled") / "base"
    GraniteForCausalLM(config).save_pretrained(directory)
    chat_tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("unembedding", ["shared", "full", "token_map"])
def test_the_scale_of_the_logits_goes_out_and_comes_back(unembedding, scaled_base, tmp_path):
    heads = plain_heads(unembedding, logit_scale=0.125)
    path = str(save_heads(HeadsCheckpoint(heads, scaled_base), tmp_path / "heads"))
    config, _ = exported(path, tmp_path)
    assert config["logit_scale"] == 0.125
    words = ["import", str(tmp_path / VLLM), "--base", scaled_base]
    assert main([*words, "--output", str(tmp_path / "back")]) == 0
    assert load_heads(tmp_path / "back").heads.config == heads.config
    (tmp_path / VLLM / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k[:5] != "logit"})
    )
    assert main([*words, "--output", str(tmp_path / "other")]) == 0
    expected = 1.0 if unembedding == "full" else 0.125  # rows of their own, or the base's
    assert load_heads(tmp_path / "other").heads.config.logit_scale == expected


def test_a_token_outside_the_map_is_never_guessed_first():
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) - 3  # most logits are negative
    token_map = torch.tensor([40, 7, 23])
    expanded = expanded_rows(rows, token_map)
    features = torch.randn(2000, 8, generator=torch.Generator().manual_seed(1))
    best = token_map[(features @ rows[token_map].T).argmax(dim=-1)]
    assert torch.equal((features @ expanded.T).argmax(dim=-1), best)


def test_what_is_lost_and_what_to_do_next_is_said(base, tmp_path, capsys):
    tuned = (TunedTree(Runtime("cpu", "float32", "eager"), 1, wide_tree()),)
    heads = saved(tmp_path, base, plain_heads("token_map"), tree=wide_tree(), tuned=tuned)
    exported(heads, tmp_path, "--json", str(tmp_path / "report.json"))
    said = capsys.readouterr().err
    nodes = wide_tree().num_nodes
    assert f"the candidate tree of {nodes} nodes is left out: vLLM verifies a chain of the 3 best" in said
    assert "the trees tuned for 1 runtimes are left out" in said
    size = VOCAB_SIZE * HIDDEN_SIZE * 4 / 1e6
    assert f"the token map of 6 tokens is expanded to {VOCAB_SIZE} rows, {size:.1f} MB" in said
    assert f"medusa check {tmp_path / VLLM} --as {VLLM} --base {base}" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert f'"model": "{tmp_path / VLLM}", "num_speculative_tokens": 3' in report["serve"]
    assert len(report["changes"]) == 3 and report["format"] == VLLM


def test_the_type_of_the_tensors_is_chosen(base, tmp_path):
    heads = saved(tmp_path, base, plain_heads())
    _, tensors = exported(heads, tmp_path, "--dtype", "bfloat16")
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}


def refuses(heads: str, tmp_path: Path, capsys, message: str, *words: str) -> None:
    refused(["export", heads, "--to", VLLM, *words], tmp_path, capsys, message)


def test_heads_that_read_more_than_the_last_state_are_refused_with_what_to_train(base, tmp_path, capsys):
    message = "reads_path is true ... fused_layers is [8, 16, 24] ... Train heads ... --reads-path false"
    refuses("smollm2-135m-instruct", tmp_path, capsys, message, "--base", "no/such/base")  # is not asked for
    for changes, message in (
        ({"reads_path": True}, "reads_path is true"),
        ({"fused_layers": (1,)}, "is [1]"),
    ):
        heads = HeadsCheckpoint(plain_heads(**changes), base)
        path = str(save_heads(heads, tmp_path / "heads", overwrite=True))
        refuses(path, tmp_path, capsys, f"{message}: ... --reads-path false")


def test_an_eagle3_head_and_an_adapter_are_refused(base, tmp_path, capsys):
    eagle3 = saved(tmp_path, base, Eagle3Head(Eagle3Config.of_base(BASE, fused_layers=(1,))))
    advice = "--to vllm-eagle3 or --to speculators, ... --head-kind medusa --reads-path false"
    refuses(eagle3, tmp_path, capsys, f"holds heads of kind eagle3, ... {advice}")
    adapter = Adapter({"peft_type": "LORA"}, {"x": torch.zeros(1)})
    joint = str(save_heads(HeadsCheckpoint(plain_heads(), base, adapter=adapter), tmp_path / "joint"))
    refuses(joint, tmp_path, capsys, "was trained with a LoRA adapter ... run the base without it")


def test_another_base_is_refused(base, tmp_path, capsys):
    chat_base(seed=9).save_pretrained(tmp_path / "other")
    heads = saved(tmp_path, base, plain_heads())
    message = "another model ... than the base ... other': its LM head is ... away"
    refuses(heads, tmp_path, capsys, message, "--base", str(tmp_path / "other"))


def test_a_base_whose_output_embedding_has_a_bias_takes_full_heads_only(tmp_path, capsys):
    sizes = {"hidden_size": HIDDEN_SIZE, "vocab_size": VOCAB_SIZE, "intermediate_size": 8}
    phi = PhiForCausalLM(PhiConfig(**sizes, num_hidden_layers=1, num_attention_heads=4))
    phi.save_pretrained(tmp_path / "phi")
    shared = saved(tmp_path, str(tmp_path / "phi"), plain_heads(), fingerprint=None)
    refuses(shared, tmp_path, capsys, "the LM head of ... phi' has a bias ... --unembedding full")
    full = save_heads(HeadsCheckpoint(plain_heads("full"), str(tmp_path / "phi")), tmp_path / "full")
    exported(str(full), tmp_path)


def test_weights_too_large_for_the_type_are_refused(base, tmp_path, capsys):
    heads = plain_heads()
    heads.blocks[0][0].linear.weight.data.fill_(1e6)
    message = r"tensor 'blocks.0.layers.0.weight' must hold finite numbers"
    refuses(saved(tmp_path, base, heads), tmp_path, capsys, message, "--dtype", "float16")


def test_a_write_that_fails_leaves_what_was_there(base, tmp_path, monkeypatch):
    heads = saved(tmp_path, base, plain_heads())
    exported(heads, tmp_path)
    before = (tmp_path / VLLM / "config.json").read_bytes()

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(medusa.interop.conversion, "save_file", disk_full)
    words = ["export", heads, "--to", VLLM, "--output", str(tmp_path / VLLM)]
    assert main(words) == 1  # it holds something
    assert main([*words, "--overwrite"]) == 1
    assert (tmp_path / VLLM / "config.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads", VLLM]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("run/heads", "must not contain its own inputs, got"),
        ("run", "must not contain its own inputs, got"),
        ("link", "must not contain its own inputs, got"),
        ("other", r"overwriting replaces only an export, and .* holds something else \(provenance.json\)"),
        ("model", r"overwriting replaces only an export, .* \(config.json, model.safetensors\)"),
        ("file", "is a file, and overwriting replaces only an export"),
    ],
)
def test_overwriting_removes_nothing_but_an_export(base, tmp_path, capsys, output, message):
    (tmp_path / "run").mkdir()
    heads = saved(tmp_path / "run", base, plain_heads())
    saved(tmp_path, base, plain_heads())
    (tmp_path / "heads").rename(tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = ["export", heads, "--to", VLLM, "--output", str(tmp_path / output)]
    assert re.search(message, ran(capsys, [*words, "--overwrite"], 1).err)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_overwriting_names_what_it_replaces(base, tmp_path, capsys):
    heads = saved(tmp_path, base, plain_heads())
    exported(heads, tmp_path)
    exported(heads, tmp_path, "--overwrite")
    assert f"to be replaced:\n  {tmp_path / VLLM / 'config.json'}\n" in capsys.readouterr().err


def test_the_flags_name_the_formats_that_are_written():
    assert [name for name, each in FORMATS.items() if each.export is not None] == list(get_args(ForeignName))
    assert all(each.serve is not None for each in FORMATS.values() if each.export is not None)
    assert all(name == each.name for name, each in FORMATS.items())
