"""Commands on a base that is a GGUF file."""

import pytest
from conftest import needs_kernels
from quantised_files import write_model
from reported import assert_fidelity_is_told, last_report

from medusa.cli.main import main

pytestmark = needs_kernels
pytest.importorskip("medusa.base.gguf_model", exc_type=ImportError, reason="needs a newer transformers")


@pytest.fixture
def file(tmp_path):
    return write_model(tmp_path / "a model.gguf", "qwen2")


def test_info_says_what_a_file_holds(file, capsys):
    assert main(["info", str(file), "--json"]) == 0
    told = last_report(capsys)
    assert told["model"] == "Qwen2ForCausalLM" and told["decodes"] == "yes" and told["chat_template"] == "yes"
    assert "of Q4_K" in told["weights"] and "bits a weight" in told["weights"]


def test_a_damaged_file_is_one_sentence(file, capsys):
    file.write_bytes(file.read_bytes()[:2000])
    for command in ("info", "generate"):
        arguments = [str(file)] if command == "info" else ["hello", "--base", str(file)]
        assert main([command, *arguments]) == 1
        said = capsys.readouterr().err
        assert "is damaged or cut" in said and "a model.gguf" in said and "Traceback" not in said


def test_answers_are_the_same_with_drafts_and_without_and_with_another_tokenizer(file, tmp_path, capsys):
    texts = []
    for more in (["--plain"], ["--drafter", "suffix"], ["--tokenizer", str(file)]):
        flags = ["--base", str(file), "--step", "general", "--max-new-tokens", "12", *more]
        assert main(["generate", "the thin man and the thin", *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] and texts[0] == texts[1] == texts[2]


def test_fidelity_is_told_against_the_widened_file(file, tmp_path, capsys):
    assert_fidelity_is_told(file, tmp_path, capsys)
