"""Commands on a base that is a GGUF file."""

import json
import sys

import pytest
from conftest import needs_kernels
from fake_llama_cpp import FakeLlamaCpp
from huggingface_hub import ModelCard
from quantised_files import VOCAB_SIZE, write_model
from reported import assert_fidelity_is_told, last_report, ran, reported
from transformers import modeling_gguf_pytorch_utils

import medusa.hardware
from medusa import HeadsCheckpoint, HeadsConfig, MedusaHeads, load_heads, save_heads
from medusa.base.gguf_file import GGUFFile
from medusa.base.loading import find_base, gguf_model
from medusa.cli import evaluate
from medusa.cli.main import main
from medusa.engine.weights.load import load_base
from medusa.heads.fingerprint import BaseFingerprint
from medusa.measurement import benchmark

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


def test_transformers_does_not_warn_of_a_vocabulary_that_is_there(file, monkeypatch):
    """A file may leave out vocab_size, and what transformers reads of it here is without the vocabulary."""
    warnings = []
    monkeypatch.setattr(modeling_gguf_pytorch_utils.logger, "warning", warnings.append)
    opened = GGUFFile.open(file)
    opened.metadata.pop("qwen2.vocab_size", None)
    assert gguf_model().gguf_config(opened).vocab_size == VOCAB_SIZE
    assert not warnings


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


def test_fidelity_is_told_against_the_widened_file_which_is_opened_once(file, tmp_path, capsys, monkeypatch):
    opened, open_file = [], GGUFFile.open
    monkeypatch.setattr(GGUFFile, "open", lambda path: opened.append(path) or open_file(path))
    monkeypatch.setattr(evaluate, "llama_cpp_unsupported_reason", lambda: "it is not installed")
    assert_fidelity_is_told(file, tmp_path, capsys)
    assert opened == [file] * 3, "once in each of two commands, and once to know its model"


def test_llama_cpp_reads_the_same_file_where_it_is_installed(file, tmp_path, capsys, monkeypatch):
    fake = FakeLlamaCpp(VOCAB_SIZE)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    answered = tmp_path / "answered.jsonl"
    answered.write_text(json.dumps({"prompt": "why?", "answer": "the thin man thinks"}) + "\n")
    flags = ["evaluate", "--fidelity", "--base", file, "--prompts", answered]
    found, *_ = reported(capsys, *flags)
    assert list(found["engines"]) == ["int8", "llama.cpp-a model"]
    assert found["engines"]["llama.cpp-a model"]["num_tokens"] == found["num_tokens"] > 0
    again, *_ = reported(capsys, *flags, "--llama-cpp", file)
    assert again["engines"] == found["engines"], "named too, it is read once"


def test_where_llama_cpp_is_not_installed_one_line_says_so(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "llama_cpp_unsupported_reason", lambda: "pip install '.[llama-cpp]'")
    answered = tmp_path / "answered.jsonl"
    answered.write_text(json.dumps({"prompt": "why?", "answer": "the thin man thinks"}) + "\n")
    found, _, said = reported(capsys, "evaluate", "--fidelity", "--base", file, "--prompts", answered)
    assert list(found["engines"]) == ["int8"]
    assert "llama.cpp is left out: pip install '.[llama-cpp]'" in said


def test_the_file_itself_is_measured_beside_llama_cpp_and_transformers_only_where_it_is_named(
    file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(benchmark, "NUM_WARM_UPS", 1)
    monkeypatch.setitem(medusa.hardware.PROBE_BYTES, "cpu", 2**20)
    monkeypatch.setitem(medusa.hardware.PROBE_WIDTH, "cpu", 64)
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlamaCpp(VOCAB_SIZE))
    (tmp_path / "p.jsonl").write_text('{"prompt": "why?"}\n')
    flags = ["--base", file, "--prompts", tmp_path / "p.jsonl", "--plot", tmp_path / "p.png"]
    flags += ["--max-new-tokens", 6]
    own, _, said = reported(capsys, "benchmark", *flags)
    assert "packed in Q4_K" in said and own["engine"] == "int8"
    assert "in its own bits" in own["skipped"]["transformers"]
    assert "llama.cpp-a model" in own["milliseconds_per_token"], "the base itself is the file"
    for more in (["--systems", "transformers"], ["--engine", "eager"]):
        widened, _, said = reported(capsys, "benchmark", *flags, *more)
        assert "packed in Q4_K" not in said and "transformers" in widened["milliseconds_per_token"]


# ------------------------------------------------------------------ heads for it


@pytest.fixture
def heads(file, tmp_path):
    base = load_base(file)
    trained = MedusaHeads(HeadsConfig(256, VOCAB_SIZE, num_heads=2))
    held = load_base(file, "auto")
    checkpoint = HeadsCheckpoint(trained, base.name_or_path, fingerprint=BaseFingerprint.of(held))
    return save_heads(checkpoint, tmp_path / "heads")


def test_an_export_says_what_heads_were_trained_on_and_is_read_again(file, heads, tmp_path, capsys):
    output = tmp_path / "export"
    report, _, said = reported(capsys, "export", heads, "--to", "vllm-medusa", "--output", output)
    assert report["base"] == str(file) and "trained on the quantised file 'a model.gguf'" in said
    assert "with which vLLM also wants --tokenizer" in said
    back, *_ = reported(capsys, "import", output, "--output", tmp_path / "back")
    assert back["base"] == str(file)
    assert load_heads(tmp_path / "back").fingerprint.difference(load_base(file)) is None


def test_a_push_names_the_repository_of_the_file_and_says_what_heads_were_trained_on(
    file, heads, tmp_path, capsys, hub, monkeypatch
):
    base, folder = "ada/tiny-GGUF:Q4_K_M", tmp_path / "folder"
    words = [*map(str, ["push", heads, "ada/heads", "--base", base, "--exports", "vllm-medusa"])]
    ran(capsys, [*words, "--dry-run", str(folder)])  # the export takes the file here, not the hub's
    hub.put("ada/tiny-GGUF", {"tiny-Q4_K_M.gguf": file.read_bytes()})
    monkeypatch.setenv("HF_TOKEN", "hf_ada")
    ran(capsys, words)
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "ada/tiny-GGUF"
    assert "https://huggingface.co/ada/tiny-GGUF)" in card.text
    assert "trained on the quantised file `a model.gguf`" in card.text
    back = load_heads("ada/heads")
    assert back.base_model == base
    assert find_base(back.base_model).gguf.path.name == "tiny-Q4_K_M.gguf"


def test_a_push_without_a_repository_of_the_file_is_refused(heads, tmp_path, capsys):
    said = ran(capsys, map(str, ["push", heads, "ada/heads", "--dry-run", tmp_path / "folder"]), 1).err
    assert "records the base, which must be a hub id" in said and "--base owner/name" in said
