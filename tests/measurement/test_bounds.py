"""Floors of a step, against what the definitions say for a model that can be counted by hand."""

import pytest
import torch
from conftest import random_prompts, tiny_model
from tiny_chat import chat_base, chat_model

from medusa import HeadsConfig, MedusaHeads, MedusaModel
from medusa.hardware import DeviceRates
from medusa.measurement.bounds import (
    best_expected_tokens,
    cache_bytes,
    divergence,
    heads_cost,
    read_weights,
    step_floor_seconds,
)
from medusa.trees.rank_counts import RankCounts
from medusa.trees.tuned_trees import Runtime


def test_an_input_embedding_of_its_own_is_not_read_whole_and_a_shared_one_is():
    untied = chat_base()
    everything = sum(parameter.numel() for parameter in untied.parameters())
    assert sum(weight.numel() for weight in read_weights(untied)) == everything - 260 * 32
    tied = chat_base()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    assert sum(weight.numel() for weight in read_weights(tied)) == everything - 260 * 32


def test_a_cached_token_holds_a_key_and_a_value_in_every_layer():
    assert cache_bytes(chat_base()) == 2 * 2 * 2 * 8 * 4  # k and v, layers, heads, width, bytes


def test_heads_read_the_shared_unembedding_once_and_multiply_it_for_every_head():
    num_bytes, operations = heads_cost(chat_model())
    own, shared = 3 * (32 * 32 + 32), 260 * 32
    assert num_bytes == 4 * (own + shared)
    assert operations == 2 * (own + 3 * shared)
    full = MedusaHeads(HeadsConfig(32, 260, num_heads=2, unembedding="full"))
    own = 2 * (32 * 32 + 32 + 260 * 32)
    assert heads_cost(MedusaModel(chat_base(), full)) == (4.0 * own, 2.0 * own)


def test_a_step_is_bound_by_reading_or_by_computing():
    model = chat_model()
    weights = sum(weight.numel() for weight in read_weights(model.base))
    slow_memory = DeviceRates(bytes_per_second=1.0, operations_per_second=1e30)
    floor = step_floor_seconds(model, slow_memory, 8, num_rows=2, num_cached=10, with_heads=False)
    assert floor == 4 * weights + 2 * 10 * cache_bytes(model.base)
    slow_arithmetic = DeviceRates(bytes_per_second=1e30, operations_per_second=1.0)
    floor = step_floor_seconds(model, slow_arithmetic, 8, num_rows=2, num_cached=10, with_heads=True)
    assert floor == 2 * weights * 8 * 2 + heads_cost(model)[1] * 2


def test_an_engine_that_quantises_reads_a_byte_of_a_weight(monkeypatch):
    model = chat_model()
    monkeypatch.setattr(MedusaModel, "runtime", Runtime("a processor", "float32", "int8"))
    slow_memory = DeviceRates(bytes_per_second=1.0, operations_per_second=1e30)
    weights = read_weights(model.base)
    norms = sum(weight.numel() for weight in weights if weight.dim() == 1)
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    floor = step_floor_seconds(model, slow_memory, 1, num_rows=1, num_cached=0, with_heads=False)
    assert floor == matrices + 4 * norms


def test_the_most_a_tree_should_give_is_the_sum_of_the_largest_path_products():
    ranks = torch.tensor([[0, 0]] * 50 + [[1, 0]] * 30 + [[-1, -1]] * 20, dtype=torch.int16)
    counts = RankCounts((ranks,), max_rank=2)
    assert best_expected_tokens(counts, 1) == 1.0
    assert best_expected_tokens(counts, 2) == pytest.approx(1.5, abs=0.01)
    values = sorted(counts.path_values().values(), reverse=True)
    assert best_expected_tokens(counts, 4) == pytest.approx(1 + sum(values[:3]))


# ------------------------------------------------------------------ the base's own choices


def greedy(base, prompt, num_tokens=12):
    ids = torch.tensor([prompt])
    return base.generate(ids, max_new_tokens=num_tokens, do_sample=False)[0, len(prompt) :].tolist()


def test_a_greedy_answer_diverges_nowhere_and_a_changed_token_is_seen_with_its_gap():
    base, prompt = tiny_model("llama"), random_prompts(1, 9)[0].tolist()
    answer = greedy(base, prompt)
    none = {"rate": 0.0, "num_tokens": 12, "num_diverging": 0, "largest_gap": 0.0}
    assert divergence(base, [(prompt, answer)]) == none
    wrong = [*answer[:-1], (answer[-1] + 1) % 61]
    found = divergence(base, [(prompt, wrong), (prompt, answer)])
    assert (found["num_tokens"], found["num_diverging"], found["rate"]) == (24, 1, 1 / 24)
    with torch.no_grad():
        last = base(torch.tensor([prompt + answer[:-1]])).logits[0, -1]
    assert found["largest_gap"] == pytest.approx(float(last.max() - last[wrong[-1]]), abs=1e-4)


def test_no_more_answers_are_read_than_asked_and_empty_ones_diverge_nowhere():
    base = tiny_model("llama")
    pairs = [(prompt, greedy(base, prompt)) for prompt in random_prompts(3, 7).tolist()]
    assert divergence(base, pairs, most=2)["num_tokens"] == 24
    assert divergence(base, [(pairs[0][0], [])])["rate"] == 0.0
