"""Medusa output is plain output, token for token: any heads, any tree, any batch, every temperature."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    BUSHY,
    READING,
    SLIDING_WINDOW,
    OracleDrafter,
    assert_exact,
    counting_model,
    left_padded,
    random_heads,
    random_prompts,
    tiny_model,
)
from transformers import StoppingCriteria, StoppingCriteriaList

from medusa import CandidateTree, HeadsConfig, MedusaHeads, MedusaModel
from medusa.acceptance.sampling import gumbel_noise

PLAIN = CandidateTree.chain(0)


def answers_of(sequences: torch.Tensor, lengths: list[int], prompt_width: int) -> list[list[int]]:
    """Unpadded prompt and answer of every row."""
    return [row[prompt_width - n :].tolist() for row, n in zip(sequences, lengths, strict=True)]


def plain_and_drafted(
    model: MedusaModel, batch: dict, lengths: list[int], tree: CandidateTree = BUSHY, hit_rate=0.8, **kwargs
):
    """Plain decoding, and the same call with a drafter that is often right."""
    plain = model.generate(**batch, **kwargs)
    oracle = OracleDrafter(answers_of(plain, lengths, batch["input_ids"].shape[1]), tree, hit_rate)
    drafted = model.generate(**batch, **kwargs, drafter=oracle, return_dict_in_generate=True)
    return plain, drafted


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_transformers_generate_past_the_sliding_window(architecture, attention):
    base = tiny_model(architecture)
    base.set_attn_implementation(attention)
    try:
        for length in (1, SLIDING_WINDOW - 3, 600):
            prompt = random_prompts(1, length)
            batch = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            reference = base.generate(**batch, max_new_tokens=16, do_sample=False)
            plain, drafted = plain_and_drafted(
                MedusaModel(base), batch, [length], max_new_tokens=16, do_sample=False
            )
            assert plain.tolist() == reference.tolist()
            assert drafted.sequences.tolist() == reference.tolist()
            assert drafted.statistics.tokens_per_step > 2
    finally:
        base.set_attn_implementation("sdpa")


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"do_sample": True, "temperature": 1.3, "repetition_penalty": 1.4}],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_ragged_batch_equals_plain_decoding_and_every_row_its_own_run(architecture, options):
    model = MedusaModel(tiny_model(architecture))
    lengths = [40, 7, 1, 33]
    batch = left_padded(random_prompts(4, 40), lengths)
    options = {**options, "max_new_tokens": 16}
    plain, drafted = plain_and_drafted(model, batch, lengths, **options, seed=[5, 6, 7, 8])
    assert drafted.sequences.tolist() == plain.tolist()
    assert drafted.statistics.tokens_per_step > 1.3
    for row, length in enumerate(lengths):
        prompt = batch["input_ids"][row : row + 1, 40 - length :]
        alone = model.generate(prompt, **options, seed=5 + row)
        assert plain[row, 40 - length :].tolist() == alone[0].tolist()


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("unembedding", ["shared", "full", "token_map"])
def test_every_kind_of_heads_gives_plain_output(unembedding, reading):
    base = tiny_model("qwen3")
    ids = list(range(3, 40)) if unembedding == "token_map" else None
    heads = random_heads(std=0.1, token_map=ids, **{"unembedding": unembedding, **READING[reading]})
    tree = CandidateTree.from_paths([(), (0,), (1,), (0, 0), (1, 2), (1, 2, 0)])
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 1.1, "seed": 3}):
        model = MedusaModel(base, heads, tree)
        assert_exact(model, random_prompts(2, 11), {"tree": tree}, max_new_tokens=15, **options)


def test_heads_that_read_their_path_know_what_follows_it():
    """A base that counts, and heads that see nothing but the last token of their path and add one."""
    size = 48
    base = counting_model(size)
    heads = MedusaHeads(HeadsConfig(size, size, num_heads=3, reads_path=True))
    for depth, rows in enumerate(heads.paths, start=1):
        rows.data[:, (depth - 1) * size :] = 1000 * torch.eye(size).roll(1, dims=0)
    tree = CandidateTree.from_paths([(), (0,), (1,), (1, 0), (0, 0), (0, 0, 0)])
    out = MedusaModel(base, heads).generate(
        torch.tensor([[5]]), tree=tree, max_new_tokens=33, do_sample=False, return_dict_in_generate=True
    )
    assert out.sequences[0].tolist() == [(5 + i) % size for i in range(34)]
    assert out.statistics.acceptance_rate == [1.0, 1.0, 1.0]


def test_heads_that_fuse_a_layer_read_it_at_the_state_that_chose_the_root():
    """A base that counts, and a head that adds one to what the layer gave, whatever the last state is."""
    size = 48
    heads = MedusaHeads(HeadsConfig(size, size, num_heads=1, fused_layers=(1,)))
    heads.fusion.weight.data = 1000 * torch.eye(size).roll(1, dims=0)
    tree = CandidateTree.from_paths([(), (0,), (1,)])
    out = MedusaModel(counting_model(size), heads).generate(
        torch.tensor([[5], [9]]), tree=tree, max_new_tokens=33, do_sample=False, return_dict_in_generate=True
    )
    for row, first in zip(out.sequences.tolist(), (5, 9), strict=True):
        assert row == [(first + i) % size for i in range(34)]
    assert out.statistics.acceptance_rate == [1.0]


@pytest.mark.parametrize("engine", ["eager", "packed", "int8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_heads_that_fuse_layers_give_plain_output_on_every_architecture(architecture, engine):
    base = tiny_model(architecture)
    heads = random_heads(std=0.1, reads_path=True, fused_layers=(1, 2))
    model = MedusaModel(base, heads, tree=BUSHY.subtree(3), engine=engine)
    batch, options = left_padded(random_prompts(2, 11), [11, 6]), {"max_new_tokens": 15, "do_sample": False}
    with_heads = model.generate(**batch, **options, tree=model.tree)
    assert with_heads.tolist() == model.generate(**batch, **options, tree=PLAIN).tolist()


def test_heads_that_know_the_future_are_right_at_every_depth():
    """A base that counts, and heads whose head d adds d + 1: an order off by one would accept nothing."""
    size = 48
    base = counting_model(size)
    heads = MedusaHeads(HeadsConfig(size, size, num_heads=3, unembedding="full"))
    for d, rows in enumerate(heads.unembed, start=1):
        rows.data = torch.eye(size).roll(1 + d, dims=0)
    out = MedusaModel(base, heads).generate(
        torch.tensor([[5]]),
        tree=CandidateTree.chain(3),
        max_new_tokens=33,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert out.sequences[0].tolist() == [(5 + i) % size for i in range(34)]
    assert out.statistics.acceptance_rate == [1.0, 1.0, 1.0]
    assert out.statistics.tokens_per_step == 4.0


def test_end_of_sequence_inside_an_accepted_path_ends_the_row_there():
    model = MedusaModel(tiny_model("llama"))
    lengths = [12, 5, 9]
    batch = left_padded(random_prompts(3, 12), lengths)
    free = model.generate(**batch, max_new_tokens=30, do_sample=True, temperature=1.3, seed=1)
    eos = [int(free[0, 12 + 6]), int(free[1, 12 + 13])]
    options = {
        "max_new_tokens": 30,
        "do_sample": True,
        "temperature": 1.3,
        "seed": 1,
        "eos_token_id": eos,
        "pad_token_id": 0,
    }
    plain = model.generate(**batch, **options)
    oracle = OracleDrafter(answers_of(free, lengths, 12), BUSHY, hit_rate=1.0)
    drafted = model.generate(**batch, **options, drafter=oracle, return_dict_in_generate=True)
    assert drafted.sequences.tolist() == plain.tolist()
    for row, sequence in enumerate(plain[:, 12:].tolist()):
        expected = free[row, 12:].tolist()
        end = min((i for i, token in enumerate(expected) if token in eos), default=len(expected) - 1)
        assert sequence[: end + 1] == expected[: end + 1]
        assert set(sequence[end + 1 :]) <= {0}
    assert drafted.statistics.tokens_per_step > 2


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
def test_max_new_tokens_inside_an_accepted_path_is_exact(max_new_tokens):
    model = MedusaModel(tiny_model("llama"))
    prompt = random_prompts(1, 6)
    long = model.generate(prompt, max_new_tokens=24, do_sample=False)
    oracle = OracleDrafter([long[0].tolist()], CandidateTree.chain(4), hit_rate=1.0)
    out = model.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False, drafter=oracle)
    assert out.tolist() == long[:, : 6 + max_new_tokens].tolist()


def test_padding_slots_holding_token_zero_are_never_accepted():
    """A base that always emits token 0: a short path padded with zeros would look like a longer match."""
    base = counting_model(16)
    with torch.no_grad():
        base.lm_head.weight.zero_()
        base.lm_head.weight[0] = 1.0
    model = MedusaModel(base)
    tree = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 0, 0)])
    oracle = OracleDrafter([[5] + [0] * 40], tree, hit_rate=0.0)
    oracle._filled = lambda row, length: [0, 7, 0, 0, 0]  # depth 1: 7 and 0; below 7: zeros
    out = model.generate(
        torch.tensor([[5]]), max_new_tokens=9, do_sample=False, drafter=oracle, return_dict_in_generate=True
    )
    assert out.sequences[0].tolist() == [5] + [0] * 9
    assert out.statistics.accepted_histogram == [0, 4, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "eos_token_id": list(range(3, 40))},
        {"bad_words_ids": [[5], [6, 7]]},
        {"forced_eos_token_id": 7, "eos_token_id": 7},
        {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 9},
        {"typical_p": 0.7, "do_sample": True},
        {"repetition_penalty": 1.3, "do_sample": True, "top_k": 7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_see_each_node_with_its_own_path(options):
    model = MedusaModel(tiny_model("llama"))
    lengths = [10, 6, 3]
    batch = left_padded(random_prompts(3, 10), lengths)
    options = {"do_sample": False, "seed": 4, "max_new_tokens": 16, "pad_token_id": 0, **options}
    plain, drafted = plain_and_drafted(model, batch, lengths, **options)
    assert drafted.sequences.tolist() == plain.tolist()
    for row, length in enumerate(lengths):
        single = batch["input_ids"][row : row + 1, 10 - length :]
        alone = model.generate(single, **{**options, "seed": 4 + row})[0].tolist()
        assert plain[row, 10 - length :].tolist()[: len(alone)] == alone
        if not options["do_sample"]:
            reference = model.base.generate(single, **{k: v for k, v in options.items() if k != "seed"})
            assert alone == reference[0].tolist()


class StopsAfterSum(StoppingCriteria):
    """Ends a row once its tokens sum past a bound: checked after every single token or missed."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids % 5 == 3).sum(dim=1) >= 8


def test_stopping_criteria_end_a_row_at_the_exact_token():
    model = MedusaModel(tiny_model("llama"))
    prompt = random_prompts(1, 8)
    options = {"max_new_tokens": 40, "do_sample": True, "temperature": 1.3, "seed": 2}
    criteria = StoppingCriteriaList([StopsAfterSum()])
    free = model.generate(prompt, **options)
    oracle = OracleDrafter(free.tolist(), BUSHY, hit_rate=1.0)
    out = model.generate(prompt, **options, stopping_criteria=criteria, drafter=oracle)[0].tolist()
    assert out == free[0, : len(out)].tolist()
    assert sum(token % 5 == 3 for token in out) == 8 and out[-1] % 5 == 3


@pytest.mark.parametrize("tree", [PLAIN, BUSHY], ids=["plain", "tree"])
def test_sampling_follows_the_exact_joint_distribution(tree):
    """Chi-square over the first two tokens of 1,500 seeds; false alarm rate 1e-4 a case."""
    from scipy.stats import chi2

    base = tiny_model("gpt-neox")
    model = MedusaModel(base)
    num_rows, keep = 1500, 6
    prompt = random_prompts(1, 5)
    options = {"do_sample": True, "temperature": 0.9, "top_k": keep, "max_new_tokens": 3}
    if tree is PLAIN:
        drafter = None
    else:
        known = model.generate(prompt.expand(num_rows, -1), **options, seed=0)
        drafter = OracleDrafter(known.tolist(), tree, hit_rate=0.7)
    rows = model.generate(prompt.expand(num_rows, -1), **options, seed=0, drafter=drafter)[:, 5:7].tolist()
    counts: dict[tuple[int, int], int] = {}
    for pair in rows:
        counts[tuple(pair)] = counts.get(tuple(pair), 0) + 1
    statistic, cells = 0.0, 0
    for first, p_first in next_law(base, prompt, 0.9, keep).items():
        after = torch.cat([prompt, torch.tensor([[first]])], dim=1)
        for second, p_second in next_law(base, after, 0.9, keep).items():
            expected = num_rows * p_first * p_second
            observed = counts.pop((first, second), 0)
            if expected >= 5:
                statistic += (observed - expected) ** 2 / expected
                cells += 1
    assert not counts, f"tokens outside the distribution's support: {counts}"
    assert cells >= 10
    assert statistic < chi2.isf(1e-4, cells)


def next_law(base, ids: torch.Tensor, temperature: float, keep: int) -> dict[int, float]:
    with torch.no_grad():
        top = (base(ids).logits[0, -1] / temperature).topk(keep)
    return dict(zip(top.indices.tolist(), top.values.softmax(0).tolist(), strict=True))


def test_noise_is_gumbel_and_differs_by_seed_position_and_token():
    from scipy.stats import kstest

    noise = gumbel_noise(torch.tensor([0, 1]), torch.tensor([[3, 4], [3, 4]]), 20000)
    assert kstest(noise[0, 0].numpy(), "gumbel_r").pvalue > 1e-4
    rows = noise.view(4, -1)
    assert (torch.corrcoef(rows) - torch.eye(4)).abs().max() < 0.04
    assert torch.equal(noise[1], gumbel_noise(torch.tensor([1]), torch.tensor([[3, 4]]), 20000)[0])


def test_a_batch_row_draws_the_stream_of_its_own_seed():
    model = MedusaModel(tiny_model("phi"))
    prompts = random_prompts(1, 5).expand(3, -1)
    rows = model.generate(prompts, do_sample=True, temperature=1.3, seed=10, max_new_tokens=8)
    assert len({tuple(row) for row in rows.tolist()}) == 3
    alone = model.generate(prompts[:1], do_sample=True, temperature=1.3, seed=12, max_new_tokens=8)
    assert rows[2].tolist() == alone[0].tolist()


def test_without_a_seed_torch_manual_seed_decides():
    model = MedusaModel(tiny_model("phi"))
    options = {"do_sample": True, "temperature": 1.3, "max_new_tokens": 8}
    runs = []
    for manual in (1, 1, 2):
        torch.manual_seed(manual)
        runs.append(model.generate(random_prompts(1, 5), **options).tolist())
    assert runs[0] == runs[1] != runs[2]
