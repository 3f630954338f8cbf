"""Commands on a base in a directory that is quantised."""

import json

import pytest
from conftest import needs_kernels
from quantised_directories import of_gptq, write_directory
from reported import assert_fidelity_is_told, last_report
from tiny_chat import chat_tokenizer

from medusa.cli.main import main

pytestmark = needs_kernels


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("gptq, order", "gptq in 4 bits, groups of 128, with an order of inputs: "),
        ("awq", "awq in 4 bits, groups of 128: "),
        ("w8a16", "compressed-tensors (pack-quantized), int of 8 bits, a scale for each channel: "),
        ("fp8, blocks", "fp8, a scale for 128x128 weights: "),
    ],
)
def test_info_says_the_form_and_what_it_takes(form, told, tmp_path, capsys):
    write_directory(tmp_path / "model", form)
    assert main(["info", str(tmp_path / "model"), "--json"]) == 0
    found = last_report(capsys)
    assert found["model"] == "LlamaForCausalLM" and found["decodes"] == "yes"
    assert found["weights"].startswith(told)
    assert " MB of quantised layers, " in found["weights"] and " MB of BF16" in found["weights"]


SPELLINGS = [
    *[("gptq", {"group_size": None}), ("gptq", {"group_size": "128"}), ("awq", {"group_size": None})],
    *[("fp8, blocks", {"weight_block_size": size}) for size in (None, "128", [128], 128, ["a", "b"])],
    *[("w4a16", {"config_groups": groups}) for groups in (None, [], {"a": None}, {"a": {"weights": []}})],
    ("w8a8", {"sparsity_config": []}),
]


@pytest.mark.parametrize("form, changes", SPELLINGS)
def test_a_setting_that_is_spelled_otherwise_ends_in_no_traceback(form, changes, tmp_path, capsys):
    path = tmp_path / "model"
    write_directory(path, form)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"].update(changes)
    (path / "config.json").write_text(json.dumps(config))
    assert main(["info", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"].startswith(
        config["quantization_config"]["quant_method"]
    )


def test_info_says_why_a_directory_cannot_be_decoded(tmp_path, capsys):
    write_directory(tmp_path / "model", settings=of_gptq(3))
    assert main(["info", str(tmp_path / "model"), "--json"]) == 0
    found = last_report(capsys)
    assert found["weights"] == "gptq in 3 bits, groups of 128"
    assert found["decodes"].startswith("no: base ") and "must be 4 or 8, got 3" in found["decodes"]


def test_a_form_that_is_not_read_is_one_sentence(tmp_path, capsys):
    write_directory(tmp_path / "model", settings=of_gptq(3))
    chat_tokenizer().save_pretrained(tmp_path / "model")
    assert main(["generate", "hello", "--base", str(tmp_path / "model")]) == 1
    said = capsys.readouterr().err
    assert "must be 4 or 8, got 3" in said and "Traceback" not in said


@pytest.fixture
def directory(tmp_path):
    write_directory(tmp_path / "model", "w4a16, zeros", vocab_size=300)
    chat_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_answers_are_the_same_with_drafts_and_without(directory, capsys):
    texts = []
    for more in (["--plain"], ["--drafter", "suffix"]):
        flags = ["--base", str(directory), "--step", "general", "--max-new-tokens", "12", *more]
        assert main(["generate", "the thin man and the thin", *flags]) == 0
        told = capsys.readouterr()
        texts.append(told.out)
        assert "of weights packed in 4 bits" in told.err.replace("\n", " ")
    assert texts[0] and texts[0] == texts[1]


def test_fidelity_is_told_against_the_widened_weights(directory, tmp_path, capsys):
    assert_fidelity_is_told(directory, tmp_path, capsys)
