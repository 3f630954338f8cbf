"""The truncated copy that drafts: what it holds, and that training brings it nearer to its base."""

from __future__ import annotations

import itertools
import json
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from conftest import program as load_program
from conftest import random_prompts, tiny_model
from tiny_chat import save_chat_model
from transformers import AutoModelForCausalLM

from medusa import MedusaModel
from medusa.drafters.draft_model import early_exit
from medusa.drafters.registry import Drafters, DrafterSettings

program = load_program("scripts/truncate_model.py")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_copy_computes_what_the_base_computes_at_that_layer_and_shares_no_memory(architecture):
    base, ids = tiny_model(architecture), random_prompts(1, 8)
    copy = program.truncated(base, 1)
    with torch.no_grad():
        assert torch.equal(copy(ids).logits, early_exit(base, 1)(ids).logits)
    ours = {parameter.data_ptr() for parameter in base.parameters()}
    assert not ours & {parameter.data_ptr() for parameter in copy.parameters()}


def test_the_directory_is_a_model_that_drafts(tmp_path, capsys):
    base, _ = save_chat_model(tmp_path)
    output = tmp_path / "draft"
    assert program.main(["--base", base, "--layers", "1", "--output", str(output)]) == 0
    assert f"wrote {output}: layers 1 to 1 of 2 of {base}" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(output).config.num_hidden_layers == 1
    assert json.loads((output / "truncated.json").read_text())["base_layers"] == 2
    model = MedusaModel.from_pretrained(base)
    drafter = Drafters(model, DrafterSettings(draft_model=output)).make("draft-model")
    prompt = random_prompts(1, 9)
    options = {"do_sample": False, "max_new_tokens": 12}
    assert (
        model.generate(prompt, **options, drafter=drafter).tolist()
        == model.generate(prompt, **options).tolist()
    )


def test_training_lowers_the_divergence_from_the_base(monkeypatch):
    """The clock counts how often it is asked, so that a slow machine trains as long as a fast one."""
    ticks = itertools.count()
    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 200))
    base = deepcopy(tiny_model("llama"))  # other tests leave gradients in theirs
    base.zero_grad()
    copy = program.truncated(base, 1)
    rows = random_prompts(16, 24, seed=2)
    torch.manual_seed(0)
    with torch.no_grad():
        before = float(program.divergence(copy, base, rows))
    made = program.train(copy, base, rows, seconds=2.0, learning_rate=3e-3)
    with torch.no_grad():
        after = float(program.divergence(copy, base, rows))
    assert after < 0.7 * before
    assert made["first_kl"] == pytest.approx(float(before), rel=0.5)
    assert made["steps"] > 100
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in base.parameters())


def test_the_divergence_is_the_mean_over_positions_and_zero_for_the_base_itself():
    base, ids = tiny_model("llama"), random_prompts(2, 5)
    copy = program.truncated(base, 1)
    with torch.no_grad():
        p, q = base(ids).logits.softmax(-1), copy(ids).logits.softmax(-1)
        expected = (p * (p / q).log()).sum(-1).mean()
        assert float(program.divergence(copy, base, ids)) == pytest.approx(float(expected), rel=1e-4)
        assert float(program.divergence(base, base, ids)) == pytest.approx(0.0, abs=1e-5)


def test_training_end_to_end_writes_how_the_copy_was_made(tmp_path):
    base, _ = save_chat_model(tmp_path)
    data = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "Hello " * 20}, {"role": "assistant", "content": "there " * 60}]
    data.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    arguments = ["--base", base, "--layers", "1", "--output", str(tmp_path / "draft"), "--data", str(data)]
    assert program.main([*arguments, "--train-minutes", "0.01"]) == 0
    made = json.loads((tmp_path / "draft" / "truncated.json").read_text())
    assert made["steps"] >= 1
    assert made["data"] == [str(data)]


def test_what_cannot_be_done_is_said_before_any_work(tmp_path, capsys):
    base, _ = save_chat_model(tmp_path)
    start = ["--base", base, "--layers", "1", "--output"]
    assert program.main([*start, base]) == 1
    assert "exists and is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main([*start, str(tmp_path / "new"), "--train-minutes", "1"])
    assert "train_minutes needs data" in capsys.readouterr().err
    small = tmp_path / "small.jsonl"
    small.write_text('{"text": "too little"}\n')
    assert program.main([*start, str(tmp_path / "new"), "--train-minutes", "1", "--data", str(small)]) == 1
    assert "data must hold at least 1024 tokens, got 10" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
