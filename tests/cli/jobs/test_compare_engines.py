"""How far engines are from float32, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest
from tiny_chat import save_chat_model

from medusa.cli.main import main
from medusa.engine.int8 import has_int8_products


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Shared flags for the tiny model: one prompt with an answer, one without."""
    folder = tmp_path_factory.mktemp("engines")
    base, heads = save_chat_model(folder)
    talk = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two"}]
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"prompt": "abcabc"}) + "\n")
    return ["--base", base, "--heads", heads, "--prompts", str(prompts), "--max-new-tokens", "6"]


def test_int8_is_some_way_from_float32_and_a_packed_model_is_none(flags, capsys):
    if not has_int8_products():
        pytest.skip("torch is built without oneDNN")
    kl = {}
    for engine in ("packed", "int8"):
        assert main(["compare-engines", *flags, "--engine", engine, "--tokens-per-pass", "5"]) == 0
        printed = capsys.readouterr().out
        report = json.loads(printed.splitlines()[-1])
        assert list(report["engines"]) == [engine] and engine in printed
        assert (report["num_answers"], report["num_tokens"]) == (2, 12)
        kl[engine] = report["engines"][engine]["kl"]
    assert kl["packed"] < 1e-6 < kl["int8"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--dtype", "bfloat16"], "dtype must be float32, which all are held against, got torch.bfloat16"),
        (["--llama-cpp", "absent-q8_0.gguf"], "'absent-q8_0.gguf', which is no file; give a GGUF file"),
    ],
)
def test_what_cannot_be_compared_is_refused(flags, capsys, extra, message):
    assert main(["compare-engines", *flags, *extra]) == 1
    assert message in capsys.readouterr().err


def test_sampled_answers_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        main(["compare-engines", *flags, "--temperature", "0.5"])
    assert "temperature must be 0" in capsys.readouterr().err
