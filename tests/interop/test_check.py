"""An export that vLLM would misread, or whose heads guess nothing, is caught before it is deployed."""

from __future__ import annotations

import json
import re

import pytest
import torch
from conftest import counting_heads, counting_model
from damage import changed, config_says, written
from refusals import pattern
from tiny_chat import chat_tokenizer

from medusa import HeadsCheckpoint, save_heads
from medusa.cli.main import main

SIZE = 264  # tokens of the counting base, more than the tokenizer has; heads of an even size
VLLM, FILE = "vllm-medusa", "model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base that counts, on disk, and exports of heads that count with it."""
    directory = tmp_path_factory.mktemp("counting")
    base = directory / "base"
    counting_model(SIZE).save_pretrained(base)
    chat_tokenizer().save_pretrained(base)
    (directory / "prompts.jsonl").write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
    for name in ("trained", "untrained"):
        heads = HeadsCheckpoint(counting_heads(SIZE, name == "trained"), str(base))
        save_heads(heads, directory / name)
        output = str(directory / f"{name}-export")
        assert main(["export", str(directory / name), "--to", VLLM, "--output", output]) == 0
    return directory


def check(directory, made, *words):
    prompts = ["--prompts", str(made / "prompts.jsonl"), "--max-new-tokens", "25"]  # 1, then 6 steps of 4
    return main(["check", str(directory), "--as", VLLM, *prompts, *words])


def test_heads_that_guess_right_are_accepted_whole(made, tmp_path, capsys):
    assert check(made / "trained-export", made, "--json", str(tmp_path / "report.json")) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["acceptance_rate"] == [1.0, 1.0, 1.0] and report["top1"] == [1.0, 1.0, 1.0]
    assert report["untrained_top1"] == [0.0, 0.0, 0.0]
    assert (report["num_tokens"], report["tokens_per_step"]) == (50, 4.0)
    printed = capsys.readouterr()
    assert "100.0%" in printed.out and report["serve"] in printed.err


def test_heads_that_guess_no_better_than_untrained_ones_are_refused(made, capsys):
    assert check(made / "untrained-export", made) == 1
    assert re.search(r"is right for 0.0% of the tokens, an untrained one for 0.0%", capsys.readouterr().err)


BROKEN = [
    (config_says(drop="medusa_fc_bias"), f"leaves out medusa_fc_bias, ... False, and {FILE} holds True"),
    (config_says(original_lm_head=False), f"original_lm_head=False, and {FILE} holds True"),
    (config_says(drop="hidden_size"), f"leaves out hidden_size, ... 4096, and {FILE} holds {SIZE}"),
    (config_says(medusa_num_heads=2), f"medusa_num_heads=2, and {FILE} holds 3"),
    (config_says(drop="num_heads"), "leaves out num_heads, ... taken for 5"),
    (config_says(truncated_vocab_size=9), "says truncated_vocab_size=9"),
    (config_says(architectures=["LlamaForCausalLM"]), "vLLM loads Medusa heads for"),
    (changed(FILE, {"token_map": torch.arange(9)}), "holds 'token_map', with which vLLM 0.32"),
    (changed(FILE, {"blocks.1.layers.0.weight": None}), "lacks blocks.1.layers.0.weight"),
    (changed(FILE, {"lm_head.weight": None}), "holds neither lm_heads.0.weight nor lm_head.weight"),
    (changed(FILE, {"head.weight": torch.zeros(3)}), "no part ... : head.weight"),
    (written("y.safetensors", ""), f"one safetensors file for vLLM, got {FILE}, y.safetensors"),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN)
def test_what_the_consumer_would_misread_is_named(spoil, message, made, tmp_path, capsys):
    directory = tmp_path / "export"
    directory.mkdir()
    for path in (made / "trained-export").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    spoil(directory)
    assert check(directory, made, "--base", str(made / "base")) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {directory}") and re.search(pattern(message), error), error


def test_a_directory_that_is_not_there_is_refused(made, capsys):
    assert check("nowhere", made) == 1
    assert "no directory at 'nowhere'; give one that `medusa export` wrote" in capsys.readouterr().err
