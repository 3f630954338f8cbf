import pytest
import torch
from conftest import random_prompts, tiny_model

from medusa.measurement.bounds import Divergence, divergence, total_divergence


def greedy(base, prompt, num_tokens=12):
    ids = torch.tensor([prompt])
    return base.generate(ids, max_new_tokens=num_tokens, do_sample=False)[0, len(prompt) :].tolist()


def test_a_greedy_answer_diverges_nowhere_and_a_changed_token_is_seen_with_its_gap():
    base, prompt = tiny_model("llama"), random_prompts(1, 9)[0].tolist()
    answer = greedy(base, prompt)
    assert divergence(base, prompt, answer) == Divergence(12, 0, 0.0)
    wrong = [*answer[:-1], (answer[-1] + 1) % 61]
    found = divergence(base, prompt, wrong)
    assert (found.num_tokens, found.num_diverging) == (12, 1)
    with torch.no_grad():
        last = base(torch.tensor([prompt + answer[:-1]])).logits[0, -1]
    assert found.largest_gap == pytest.approx(float(last.max() - last[wrong[-1]]), abs=1e-4)


def test_answers_add_up_and_no_more_are_read_than_asked():
    base = tiny_model("llama")
    prompts = random_prompts(3, 7).tolist()
    pairs = [(prompt, greedy(base, prompt)) for prompt in prompts]
    assert total_divergence(base, pairs, most=2).num_tokens == 24
    both = Divergence(4, 1, 0.5) + Divergence(6, 2, 0.25)
    assert (both, both.rate) == (Divergence(10, 3, 0.5), 0.3)
    assert divergence(base, prompts[0], []).rate == 0.0
