"""The real llama.cpp converts an export with its own script, loads it beside the base, writes what plain
decoding writes, and accepts what our own chain accepts.

It needs the source of llama.cpp with one of its examples built, and a Python for its converter, for example

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    cd llama_cpp_python-0.3.36/vendor/llama.cpp
    cmake -B build -DLLAMA_BUILD_SERVER=OFF && cmake --build build --target llama-speculative-simple
    python3 -m venv converter && converter/bin/pip install torch transformers gguf sentencepiece
    export LLAMA_CPP=$PWD LLAMA_CPP_PYTHON=$PWD/converter/bin/python
    pytest -m slow tests/interop/test_served_by_llama_cpp.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fitted_heads import (
    NUM_HEADS,
    NUM_TOKENS,
    assert_accepted_alike,
    eagle3_that_knows,
    exported,
    plain_answers,
)

LLAMA_CPP = os.environ.get("LLAMA_CPP")
PYTHON = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
SETTINGS = [
    *("--spec-type", "draft-eagle3", "--spec-draft-n-max", str(NUM_HEADS), "--spec-draft-p-min", "0"),
    *("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--threads", "1"),
    *("--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32", "--threads-draft", "1"),
    *("--ctx-size", "512", "--n-predict", str(NUM_TOKENS), "--temp", "0", "--no-escape", "--verbosity", "4"),
]
"""What llama.cpp is told: numbers in float32 throughout, so that its text can be held to plain decoding's."""


def converted(directory: Path, output: Path, *words: str) -> Path:
    """The GGUF file that llama.cpp's own script makes of a directory."""
    assert LLAMA_CPP is not None
    script = Path(LLAMA_CPP) / "convert_hf_to_gguf.py"
    command = [PYTHON, str(script), str(directory), "--outtype", "f32", "--outfile", str(output), *words]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=inherited)
    assert done.returncode == 0, done.stderr[-4000:]
    return output


def answered(base: Path, drafter: Path, prompt: str) -> tuple[str, int, list[int]]:
    """What llama.cpp answers to ``prompt``, in how many drafts, and how many of them were accepted at each
    position."""
    assert LLAMA_CPP is not None
    program = Path(LLAMA_CPP) / "build" / "bin" / "llama-speculative-simple"
    command = [str(program), "-m", str(base), "-md", str(drafter), "-p", prompt, *SETTINGS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    (said,) = re.findall(r"statistics +draft-eagle3: #calls\(b,g,a\) = +\d+ +\d+ +(\d+)(.*)", done.stderr)
    drafts = int(said[0])
    rates = re.search(r"#acc rate/pos = \(([^)]*)\)", said[1])
    accepted = [round(float(rate) * drafts) for rate in rates[1].split(",")] if rates and rates[1] else []
    return done.stdout.partition(prompt)[2], drafts, accepted + [0] * (NUM_HEADS - len(accepted))


@pytest.mark.slow
@pytest.mark.skipif(LLAMA_CPP is None, reason="LLAMA_CPP names no source of llama.cpp with its example built")
def test_llama_cpp_writes_the_plain_text_and_accepts_what_our_chain_accepts(
    real_base, real_tokenizer, tmp_path
):
    prompts, answers = plain_answers(real_base, real_tokenizer)
    base = Path(real_base.name_or_path).resolve()
    heads = eagle3_that_knows(real_base, answers)
    ours = exported("vllm-eagle3", heads, real_base, real_tokenizer, prompts, tmp_path / "export")

    target = converted(base, tmp_path / "base.gguf")
    drafter = converted(tmp_path / "export", tmp_path / "drafter.gguf", "--target-model-dir", str(base))
    drafts, accepted = 0, torch.zeros(NUM_HEADS, dtype=torch.long)
    for prompt, answer in zip(prompts, answers, strict=True):
        length = prompt["input_ids"].shape[1]
        text, more, positions = answered(target, drafter, real_tokenizer.decode(answer[0, :length]))
        assert text.startswith(real_tokenizer.decode(answer[0, length:], skip_special_tokens=True))
        drafts, accepted = drafts + more, accepted + torch.tensor(positions)
    assert_accepted_alike(ours, (accepted / drafts).tolist(), drafts)
