"""The reference writes what transformers writes; the library what the reference writes, in as many steps."""

from __future__ import annotations

import pytest
import torch
from conftest import BUSHY, random_heads, random_prompts, tiny_model
from fitted_heads import heads_that_know

from medusa import CandidateTree, MedusaModel, reference

TREES = {"bushy": BUSHY.subtree(3), "chain": CandidateTree.chain(3), "root alone": CandidateTree.chain(0)}
NEW_TOKENS = 30


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt-neox", "phi"])
def test_the_reference_writes_what_transformers_writes(architecture, tree):
    base, prompt = tiny_model(architecture), random_prompts(1, 9)
    theirs = base.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    heads = heads_that_know(base, [theirs])
    answer, num_steps = reference.generate(base, heads, tree, prompt[0], NEW_TOKENS)
    assert answer == theirs[0, 9:].tolist()
    assert num_steps < NEW_TOKENS - 1 or not tree.depth, "the heads are right now and then"


@pytest.mark.parametrize("reads_path", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_library_writes_what_the_reference_writes_in_as_many_steps(tree, temperature, reads_path):
    base, prompt = tiny_model("llama"), random_prompts(1, 9, seed=1)
    sampling = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    model = MedusaModel(base, random_heads(reads_path=reads_path), tree)
    if not reads_path:
        greedy = base.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
        )
        model = MedusaModel(base, heads_that_know(base, [greedy]), tree)
    output = model.generate(
        prompt, **sampling, seed=4, tree=tree, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True
    )
    answer, num_steps = reference.generate(
        base, model.heads, tree, prompt[0], NEW_TOKENS, temperature, seed=4
    )
    assert answer == output.sequences[0, 9:].tolist()
    assert num_steps == output.statistics.num_steps


def test_an_answer_ends_at_the_token_that_ends_it(monkeypatch):
    base, prompt = tiny_model("llama"), random_prompts(1, 9)
    answer, _ = reference.generate(base, random_heads(), TREES["bushy"], prompt[0], NEW_TOKENS)
    end = answer[10]
    monkeypatch.setattr(base.generation_config, "eos_token_id", end)
    ended, _ = reference.generate(base, random_heads(), TREES["bushy"], prompt[0], NEW_TOKENS)
    assert ended == answer[: answer.index(end) + 1]


def test_no_step_follows_an_accepted_guess_that_ends_the_answer(monkeypatch):
    base = tiny_model("llama")
    prompt = random_prompts(1, 9)
    plain = base.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
    heads = heads_that_know(base, [plain])
    chain = CandidateTree.chain(2)
    for end in plain[0, 9:21].tolist():
        monkeypatch.setattr(base.generation_config, "eos_token_id", end)
        answer, num_steps = reference.generate(base, heads, chain, prompt[0], NEW_TOKENS)
        output = MedusaModel(base, heads, chain).generate(
            prompt, do_sample=False, tree=chain, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True
        )
        assert answer == output.sequences[0, 9:].tolist()
        assert num_steps == output.statistics.num_steps
