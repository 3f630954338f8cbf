"""Floors of a step, against what the definitions say for a model that can be counted by hand."""

import pytest
import torch
from conftest import GROUPED, needs_kernels, random_prompts, tiny_model
from tiny_chat import chat_base, chat_model
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import HeadsConfig, MedusaHeads, MedusaModel
from medusa.engine.views import packed_bytes
from medusa.engine.weights.load import load_base
from medusa.hardware import DeviceRates
from medusa.measurement.bounds import (
    best_expected_tokens,
    divergence,
    heads_cost,
    pass_cost,
    step_floor_seconds,
)
from medusa.trees.rank_counts import RankCounts


def test_an_input_embedding_of_its_own_is_not_read_whole_and_a_shared_one_is():
    untied = chat_base()
    everything = sum(parameter.numel() for parameter in untied.parameters())
    assert pass_cost(untied) == (4 * (everything - 260 * 32), everything - 260 * 32)
    tied = chat_base()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    assert pass_cost(tied)[1] == everything - 260 * 32


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
    weights = pass_cost(model.engine_base)[1]
    slow_memory = DeviceRates(bytes_per_second=1.0, operations_per_second=1e30)
    floor = step_floor_seconds(model, slow_memory, 8, num_rows=2, num_cached=10, with_heads=False)
    a_token = 2 * 2 * 2 * 8 * 4  # k and v, layers, heads, width, bytes
    assert floor == 4 * weights + 2 * 10 * a_token
    slow_arithmetic = DeviceRates(bytes_per_second=1e30, operations_per_second=1.0)
    floor = step_floor_seconds(model, slow_arithmetic, 8, num_rows=2, num_cached=10, with_heads=True)
    assert floor == 2 * weights * 8 * 2 + heads_cost(model)[1] * 2


@needs_kernels
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("engine", ["packed", "int8"])
def test_an_engine_reads_what_it_packed_and_no_less_where_the_base_is_held_once(tmp_path, engine, is_tied):
    sizes = {**GROUPED, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 128}
    heads = MedusaHeads(
        HeadsConfig(64, 128, num_heads=2, unembedding="token_map", token_map_size=32), range(32)
    )
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    base = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=is_tied)).bfloat16()
    base.save_pretrained(tmp_path)
    view = MedusaModel(load_base(tmp_path, dtype=torch.float32), heads, engine=engine)
    once = MedusaModel(load_base(tmp_path, engine), heads, engine=engine)
    assert once.base is once.engine_base and view.base is not view.engine_base
    matrices = [each for name, each in base.named_parameters() if each.dim() == 2 and "embed" not in name]
    numbers = sum(each.numel() for each in matrices) + is_tied * 128 * 64
    scales = 4 * (sum(len(each) for each in matrices) + is_tied * 128) if engine == "int8" else 0
    norms = sum(each.numel() for each in base.parameters() if each.dim() == 1)
    panels = sum(packed_bytes(once.engine_base).values())
    assert panels <= numbers * (1 if engine == "int8" else 2)
    expected = panels + scales + 4 * norms, numbers + norms
    assert pass_cost(view.engine_base) == pass_cost(once.engine_base) == expected
    own, scored = 2 * 64 * 64, 32 * 64  # in int8, whatever the engine
    expected = own + 4 * 2 * 64 + 4 * 2 * 64 + scored + 4 * 32, 2.0 * (own + 2 * 64 + 2 * scored)
    assert heads_cost(view) == heads_cost(once) == expected


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
