"""Heads fitted a little to the answers that they will be asked for, for the tests of real engines."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.nn import functional as F

from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.causal_lm import hidden_size, lm_head, vocab_size
from medusa.base.passes import hidden_states
from medusa.heads.autoregressive_head import unroll
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.interop.conversion import FORMATS, check_chain, export_heads
from medusa.interop.protocol import ReadRequest, ToExport
from medusa.prompts import encode_messages

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
                logits = heads.logits_of(head, state[:-ahead], lm_head(base))
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
        states = [hidden_states(base, answer, layers=head.fused_layers) for answer in answers]
        embedded = [base.get_input_embeddings()(answer) for answer in answers]
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for answer, state, embeddings in zip(answers, states, embedded, strict=True):
            at = torch.arange(answer.shape[1] - 1)[None]
            drafted = unroll(head, state[:, :-1], embeddings[:, 1:], at)
            for depth, given in enumerate(drafted):
                logits = head.unembedded(given[0, depth:-1], lm_head(base))
                F.cross_entropy(logits, column[answer[0, depth + 2 :]]).backward(retain_graph=True)
        optimizer.step()
    return head.eval()


def plain_answers(base, tokenizer) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """The encoded prompts, and each with the base's greedy answer after it (1, T)."""
    prompts = [encode_messages(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    plain = MedusaModel(base, None, CandidateTree.chain(0), tokenizer, engine="auto")
    return prompts, [
        plain.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False) for prompt in prompts
    ]


def exported(to: str, heads, base, tokenizer, prompts, directory: Path) -> list[float]:
    """Export ``heads`` into ``directory``; how often our own chain of what is read back is accepted, by
    depth."""
    name = str(Path(base.name_or_path).resolve())
    request = ToExport("the heads", HeadsCheckpoint(heads, name), lambda: base, name, torch.float32)
    export_heads(request, to, directory)
    read = FORMATS[to].read(ReadRequest(directory, base)).heads
    model = MedusaModel(base, read, tokenizer=tokenizer, engine="auto")
    return check_chain(model, prompts, NUM_TOKENS).statistics.acceptance_rate


def assert_accepted_alike(ours: list[float], theirs: list[float], drafts: int) -> None:
    print(json.dumps({"drafts": drafts, "theirs": theirs, "ours": ours}))
    assert ours[0] > 0.2, "the heads know the answers"
    for our_rate, their_rate in zip(ours, theirs, strict=True):
        # engines also count what they accept past the end of an answer
        error = (our_rate * (1 - our_rate) / drafts) ** 0.5
        assert abs(our_rate - their_rate) <= 2 * error + len(PROMPTS) / drafts
