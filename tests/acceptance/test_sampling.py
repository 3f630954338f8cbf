"""Noise that is a function of seed and position, and processors that see each node's own path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import left_padded, random_prompts, tiny_model
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from medusa import CandidateTree, MedusaModel
from medusa.acceptance.sampling import (
    CHUNK,
    PATH_FREE_PROCESSORS,
    WARPERS,
    NodePaths,
    UpcomingNoise,
    choose,
    edge_of_kept,
    gumbel_noise,
    hashed_bits,
    process_node_logits,
    row_seeds,
    warp_logits,
)

CPU = torch.device("cpu")
VOCAB = 13
TREE = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
PREFIXES = [[3, 1, 4, 1], [9, 2]]
PADDING = [0, 2]
PAD = 12


def node_paths(seed: int = 0) -> NodePaths:
    """Two rows, prompts of 4 and 2 tokens, the second padded by 2 in the caller's batch."""
    prefix = torch.zeros(2, 6, dtype=torch.long)
    for row, tokens in enumerate(PREFIXES):
        prefix[row, : len(tokens)] = torch.tensor(tokens)
    generator = torch.Generator().manual_seed(seed)
    return NodePaths(
        prefix=prefix,
        prefix_lengths=torch.tensor([len(tokens) for tokens in PREFIXES]),
        padding=[torch.full((width,), PAD) for width in PADDING],
        tokens=torch.randint(0, VOCAB - 1, (2, TREE.num_nodes), generator=generator),
        topology=TREE.topology(),
    )


def own_path(paths: NodePaths, row: int, node: int, padded: bool) -> list[int]:
    """The sequence that ends in ``node``, found by climbing from it."""
    above = [node]
    while above[-1]:
        above.append(TREE.parents[above[-1]])
    pad = [PAD] * PADDING[row] if padded else []
    return pad + PREFIXES[row] + paths.tokens[row, above[::-1]].tolist()


def random_logits(seed: int = 0) -> Tensor:
    return 3 * torch.randn(2, TREE.num_nodes, VOCAB, generator=torch.Generator().manual_seed(seed))


def one_by_one(logits: Tensor, processor: LogitsProcessor, paths: NodePaths, padded: bool) -> Tensor:
    """Every node alone, as if its path had been generated token by token."""
    scores = torch.empty_like(logits)
    for row in range(2):
        for node in range(TREE.num_nodes):
            ids = torch.tensor([own_path(paths, row, node, padded)])
            scores[row, node] = processor(ids, logits[row, node][None].clone())[0]
    return scores


def test_noise_is_the_same_for_a_row_alone_and_in_any_company():
    seeds, positions = torch.tensor([5, 2**40, 5]), torch.tensor([[0, 9], [3, 4], [9, 10]])
    together = gumbel_noise(seeds, positions, 50)
    assert together.shape == (3, 2, 50) and together.dtype == torch.float32
    assert torch.equal(together, gumbel_noise(seeds, positions, 50))
    for row in range(3):
        for column in range(2):
            alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1, column : column + 1], 50)
            assert torch.equal(together[row, column], alone[0, 0])
    assert torch.equal(together[0, 1], together[2, 0])  # same seed, same position
    assert torch.equal(gumbel_noise(seeds, positions, 20), together[..., :20])


def test_noise_changes_with_any_bit_of_seed_and_position():
    base = gumbel_noise(torch.tensor([0]), torch.tensor([[0]]), 200)
    for bit in range(62):
        other = gumbel_noise(torch.tensor([1 << bit]), torch.tensor([[0]]), 200)
        assert (other != base).float().mean() > 0.95
    for bit in range(30):
        other = gumbel_noise(torch.tensor([0]), torch.tensor([[1 << bit]]), 200)
        assert (other != base).float().mean() > 0.95


def test_noise_is_finite_even_where_the_hash_is_extreme():
    noise = gumbel_noise(torch.arange(40), torch.arange(50).expand(40, -1), 500)
    assert noise.isfinite().all()
    assert noise.max() > 10  # the tail that decides an argmax over a large vocabulary is there


def test_warped_logits_are_those_of_the_warpers_alone_in_their_order():
    logits = random_logits()
    warpers = [hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(5), hf.TopPLogitsWarper(0.8)]
    others = [hf.RepetitionPenaltyLogitsProcessor(1.5), hf.SuppressTokensLogitsProcessor([1], "cpu")]
    expected = logits.view(-1, VOCAB)
    for warper in warpers:
        expected = warper(None, expected)
    warped = warp_logits(logits, LogitsProcessorList([others[0], *warpers, others[1]]))
    assert torch.equal(warped, expected.view_as(logits))
    assert 0 < warped.isfinite().sum() < 5 * TREE.num_nodes * 2 + 1
    swapped = warp_logits(logits, LogitsProcessorList([warpers[2], warpers[0]]))
    assert not torch.equal(swapped, warp_logits(logits, LogitsProcessorList([warpers[0], warpers[2]])))


@pytest.mark.parametrize("warper", WARPERS)
def test_every_warper_keeps_a_token_of_a_row_with_columns_that_hold_none(warper):
    """A draft model with fewer rows than the base says minus infinity of the tokens it does not have."""
    strict = {hf.TemperatureLogitsWarper: 0.1, hf.TopKLogitsWarper: 1, hf.MinPLogitsWarper: 1.0}
    logits = torch.nn.functional.pad(random_logits(), (0, 3), value=-torch.inf)
    warped = warp_logits(logits, LogitsProcessorList([warper(strict.get(warper, 0.01))]))
    proposal = warped.softmax(-1)
    assert torch.allclose(proposal.sum(-1), torch.ones(2, TREE.num_nodes))
    assert (proposal[..., VOCAB:] == 0).all()


def test_a_processor_that_writes_in_place_does_not_reach_the_logits(monkeypatch):
    monkeypatch.setattr(
        hf.TemperatureLogitsWarper, "__call__", lambda self, input_ids, scores: scores.div_(2)
    )
    logits = random_logits()
    given = logits.clone()
    scores = process_node_logits(logits, LogitsProcessorList([hf.TemperatureLogitsWarper(0.5)]), node_paths())
    assert torch.equal(scores, given / 2)
    assert torch.equal(logits, given)
    assert torch.equal(warp_logits(logits, LogitsProcessorList([hf.TemperatureLogitsWarper(0.5)])), given / 2)
    assert torch.equal(logits, given)


def mixed(x: int) -> int:
    """The finaliser on unsigned 32-bit integers, as its author wrote it."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def with_noise(scores: Tensor, is_sampled: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What is chosen in each row of scores (R, V), by all of the noise, and by as much as is needed."""
    noise = [
        UpcomingNoise(torch.arange(7, 7 + len(scores)), torch.arange(3, 3 + len(scores)), V, is_sampled)
        for V in [scores.shape[1]] * 2
    ]
    rows = list(range(len(scores)))
    return choose(scores, noise[0].until(2)[:, 1]), noise[1].chosen(scores, 2, rows)


@pytest.mark.parametrize("vocab_size", [1, 13, 4_096, 50_257])
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0, 1e6])
def test_what_is_chosen_needs_the_noise_of_few_tokens(scale, vocab_size):
    scores = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(2)) * scale
    for cut in (None, 5, 1):
        if cut is not None:
            scores = hf.TopKLogitsWarper(cut)(None, scores)
        expected, chosen = with_noise(scores)
        assert torch.equal(chosen, expected)
    is_sampled = torch.arange(40) % 3 > 0
    expected, chosen = with_noise(scores, is_sampled)
    assert torch.equal(chosen, expected)
    assert torch.equal(chosen[~is_sampled], scores[~is_sampled].argmax(1))


def test_where_the_last_bits_decide_or_scores_are_no_numbers_all_of_the_noise_is_drawn():
    scores = torch.zeros(6, 3_000)
    noise = UpcomingNoise(torch.arange(7, 13), torch.arange(3, 9), 3_000).until(2)[:, 1]
    scores[0] -= noise[0]  # all sums are the same but for rounding
    best, runner_up = noise[1].topk(2).indices
    scores[1, runner_up] = noise[1, best] - noise[1, runner_up]
    scores[2], scores[3, 70], scores[4, 2_900] = -torch.inf, torch.nan, torch.inf
    scores[5, [3, 2_999]] = 1e30
    expected, chosen = with_noise(scores)
    assert torch.equal(chosen, expected)


def test_the_noise_is_right_to_far_less_than_what_decides():
    seeds, positions = torch.arange(20), torch.arange(20)[:, None]
    bits = hashed_bits(seeds, positions, 50_000)
    uniform = ((bits.float() + 0.5) * -(2.0**-31)).clamp(min=2.0**-24 - 1).double()
    exact = -(-uniform.log1p()).log()
    assert (gumbel_noise(seeds, positions, 50_000) - exact).abs().max() < 1e-5


def test_the_noise_of_some_tokens_is_that_of_all():
    seeds, first = torch.tensor([5, 9]), torch.tensor([30, 40])
    tokens = torch.tensor([[3, 200, 3], [0, 299, 7]])
    noise = UpcomingNoise(seeds, first, 300, torch.tensor([True, False]))
    some = noise.of_tokens(4, tokens)
    assert torch.equal(some, noise.of_tokens(4, None).gather(1, tokens)) and not some[1].any()
    everything = gumbel_noise(seeds, first[:, None] + 3, 300)
    assert torch.equal(
        gumbel_noise(seeds, first[:, None] + 3, 300, tokens)[:, 0], everything[:, 0].gather(1, tokens)
    )


def test_the_bits_of_the_noise_are_those_of_whole_numbers_without_end():
    """So every device that has 32-bit integers gives the same ones."""
    golden = 0x9E3779B9
    seeds, positions = [0, 5, 2**40 + 3, 2**62 + 2**31], [0, 7, 2**20 + 1]
    bits = hashed_bits(torch.tensor(seeds), torch.tensor(positions).expand(len(seeds), -1), 3)
    for row, seed in enumerate(seeds):
        key = mixed(seed % 2**32 ^ mixed((seed >> 32) + golden & 0xFFFFFFFF))
        for column, position in enumerate(positions):
            first = mixed(position ^ key)
            second = mixed(first + golden & 0xFFFFFFFF)
            expected = [mixed(mixed(token + first & 0xFFFFFFFF) ^ second) & 0x7FFFFFFF for token in range(3)]
            assert bits[row, column].tolist() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_on_a_gpu_is_the_noise_on_the_cpu():
    """Bit for bit as far as it is hashed; its logarithms to the last bits, and so the tokens chosen by it."""
    seeds, positions = torch.tensor([5, -1 & (2**63 - 1)]), torch.arange(8).expand(2, -1)
    here, there = ((seeds.to(each), positions.to(each), 5000) for each in ("cpu", "cuda"))
    assert torch.equal(hashed_bits(*there).cpu(), hashed_bits(*here))
    torch.testing.assert_close(gumbel_noise(*there).cpu(), gumbel_noise(*here), rtol=1e-6, atol=1e-6)
    assert torch.equal(gumbel_noise(*there).argmax(-1).cpu(), gumbel_noise(*here).argmax(-1))


@pytest.mark.parametrize(
    "warper",
    [hf.TopPLogitsWarper(share, min_tokens_to_keep=2) for share in (0.3, 0.9, 0.999)]
    + [hf.TopKLogitsWarper(count) for count in (1, 50, 30_000)],
    ids=lambda warper: f"{getattr(warper, 'top_p', '')}{getattr(warper, 'top_k', '')}",
)
@pytest.mark.parametrize(
    "kind", ["peaked", "flat", "equal scores", "left out before", "few left", "no numbers"]
)
def test_what_is_cut_without_sorting_is_what_transformers_cuts(kind, warper):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 20_000, generator=generator) * (0.5 if kind == "flat" else 4)
    if kind == "equal scores":
        logits = logits.round()
    elif kind == "left out before":
        logits[:, ::3] = -torch.inf
    elif kind == "few left":
        logits = hf.TopKLogitsWarper(20)(None, logits)
    elif kind == "no numbers":
        logits[0, [5, 7_000]] = torch.nan
    expected, num_quick = warper(None, logits.clone()), 0
    for row, theirs in zip(logits.split(1), expected.split(1), strict=True):
        if (edge := edge_of_kept(row, warper)) is not None:
            num_quick += 1
            ours = row.masked_fill(row < edge, -torch.inf)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert num_quick == 40 or kind in ("equal scores", "few left", "no numbers")
    assert edge_of_kept(logits, hf.MinPLogitsWarper(0.1)) is None


def test_rows_are_cut_each_at_its_own_edge():
    logits = 4 * torch.randn(3, 20_000, generator=torch.Generator().manual_seed(1))
    chain = LogitsProcessorList(
        [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(30), hf.TopPLogitsWarper(0.8)]
    )
    assert torch.equal(warp_logits(logits, chain), chain(None, logits))


def test_choosing_is_argmax_of_scores_plus_noise():
    scores, noise = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[2.0, 0.0, 0.5]])
    assert choose(scores, None).tolist() == [1]
    assert choose(scores, noise).tolist() == [0]
    assert choose(torch.tensor([[-torch.inf, 2.0]]), torch.tensor([[99.0, 0.0]])).tolist() == [1]


@pytest.mark.parametrize("size", [2 * CHUNK, 2 * CHUNK + 1])
def test_the_first_of_equal_scores_is_chosen(size):
    scores = torch.randint(4, (5, 3, size), generator=torch.Generator().manual_seed(0)).float()
    scores[0, 0], scores[1, 1, CHUNK + 3], scores[2, 2, 7] = -torch.inf, torch.nan, torch.inf
    for row, chosen in zip(scores.flatten(0, 1), choose(scores, None).flatten().tolist(), strict=True):
        values = row.tolist()
        is_nan = [value != value for value in values]
        assert chosen == (is_nan.index(True) if any(is_nan) else values.index(max(values)))


def test_row_seeds_count_up_from_an_int_and_take_a_list_as_it_is():
    assert row_seeds(7, 3, CPU).tolist() == [7, 8, 9]
    assert row_seeds([4, 4, 1], 3, CPU).tolist() == [4, 4, 1]
    assert row_seeds(-1, 2, CPU).tolist() == [2**63 - 1, 0]
    torch.manual_seed(0)
    drawn = row_seeds(None, 2, CPU).tolist()
    assert drawn != row_seeds(None, 2, CPU).tolist()
    torch.manual_seed(0)
    assert drawn == row_seeds(None, 2, CPU).tolist()


@pytest.mark.parametrize("seed", [np.int64(7), np.array(7), torch.tensor(7), True + 6])
def test_any_integer_is_a_seed(seed):
    assert row_seeds(seed, 2, CPU).tolist() == [7, 8]


@pytest.mark.parametrize("seeds", [np.array([4, 1]), torch.tensor([4, 1]), (np.int32(4), torch.tensor(1))])
def test_any_sequence_of_integers_is_a_seed_for_each_row(seeds):
    assert row_seeds(seeds, 2, CPU).tolist() == [4, 1]


@pytest.mark.parametrize("seed", [1.5, torch.tensor(1.5), [1, 2.5], "12", np.array([1.0, 2.0])])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be an int or one int per row, got"):
        row_seeds(seed, 2, CPU)


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3]])
def test_a_wrong_number_of_seeds_is_refused(seeds):
    with pytest.raises(ValueError, match=f"one int per row: 2 rows, got {len(seeds)} seeds"):
        row_seeds(seeds, 2, CPU)


def test_the_noise_is_keyed_by_the_position_of_the_token_that_it_chooses():
    """Decoded by hand, one token at a time, with the noise of (seed, index of the new token)."""
    base, seed = tiny_model("llama"), 11
    prompts = left_padded(random_prompts(2, 9), [9, 4])
    options = {"do_sample": True, "temperature": 1.3, "top_k": 0, "max_new_tokens": 10, "seed": seed}
    sequences = MedusaModel(base).generate(**prompts, **options)
    for row, length in enumerate([9, 4]):
        ids = prompts["input_ids"][row, 9 - length :].tolist()
        for _ in range(10):
            with torch.no_grad():
                scores = base(torch.tensor([ids])).logits[0, -1] / 1.3
            noise = gumbel_noise(torch.tensor([seed + row]), torch.tensor([[len(ids)]]), len(scores))
            ids.append(int((scores + noise[0, 0]).argmax()))
        assert sequences[row, 9 - length :].tolist() == ids


def test_an_answer_goes_on_the_same_from_any_of_its_tokens():
    model = MedusaModel(tiny_model("llama"))
    options = {"do_sample": True, "temperature": 1.3, "seed": 3}
    whole = model.generate(random_prompts(1, 5), **options, max_new_tokens=12)
    for kept in (6, 11):
        assert torch.equal(model.generate(whole[:, :kept], **options, max_new_tokens=17 - kept), whole)


PATH_READERS = [
    hf.RepetitionPenaltyLogitsProcessor(1.7),
    hf.NoRepeatNGramLogitsProcessor(2),
    hf.NoBadWordsLogitsProcessor([[5], [3, 1]]),
    hf.SequenceBiasLogitsProcessor({(4, 1): 6.0, (2,): -3.0}),
]


@pytest.mark.parametrize("processor", PATH_READERS, ids=lambda p: type(p).__name__)
def test_a_processor_sees_each_node_with_its_own_path(processor):
    logits, paths = random_logits(), node_paths()
    given = logits.clone()
    scores = process_node_logits(logits, LogitsProcessorList([processor]), paths)
    assert torch.equal(scores, one_by_one(logits, processor, paths, padded=False))
    assert not torch.equal(scores, logits)
    assert torch.equal(logits, given)


@pytest.mark.parametrize(
    "processor",
    [
        hf.MinLengthLogitsProcessor(5, [2]),
        hf.MinNewTokensLengthLogitsProcessor(4, 3, [2]),
        hf.ForcedEOSTokenLogitsProcessor(7, 2),
        hf.ExponentialDecayLengthPenalty((1, 1.5), [2], 4),
        hf.SuppressTokensAtBeginLogitsProcessor([3, 4], 5),
    ],
    ids=lambda p: type(p).__name__,
)
def test_a_processor_that_counts_from_the_prompts_width_is_shown_the_padding(processor):
    logits, paths = random_logits(), node_paths()
    scores = process_node_logits(logits, LogitsProcessorList([processor]), paths)
    assert torch.equal(scores, one_by_one(logits, processor, paths, padded=True))
    assert not torch.equal(scores, one_by_one(logits, processor, paths, padded=False))


PATH_FREE = {
    hf.TemperatureLogitsWarper: lambda: hf.TemperatureLogitsWarper(0.7),
    hf.TopKLogitsWarper: lambda: hf.TopKLogitsWarper(4),
    hf.TopPLogitsWarper: lambda: hf.TopPLogitsWarper(0.8),
    hf.MinPLogitsWarper: lambda: hf.MinPLogitsWarper(0.1),
    hf.TypicalLogitsWarper: lambda: hf.TypicalLogitsWarper(0.7),
    hf.EpsilonLogitsWarper: lambda: hf.EpsilonLogitsWarper(0.05),
    hf.EtaLogitsWarper: lambda: hf.EtaLogitsWarper(0.1),
    hf.SuppressTokensLogitsProcessor: lambda: hf.SuppressTokensLogitsProcessor([2, 3]),
    hf.InfNanRemoveLogitsProcessor: lambda: hf.InfNanRemoveLogitsProcessor(),
    hf.LogitNormalization: lambda: hf.LogitNormalization(),
}


@pytest.mark.parametrize("kind", PATH_FREE_PROCESSORS, ids=lambda kind: kind.__name__)
def test_a_processor_that_reads_no_path_takes_all_nodes_in_one_call(kind, monkeypatch):
    processor, calls = PATH_FREE[kind](), []
    logits, paths = random_logits(), node_paths()
    expected = one_by_one(logits, processor, paths, padded=True)
    plain_call = kind.__call__

    def counted(self, input_ids, scores):
        calls.append(len(scores))
        return plain_call(self, input_ids, scores)

    monkeypatch.setattr(kind, "__call__", counted)
    scores = process_node_logits(logits, LogitsProcessorList([processor]), paths)
    torch.testing.assert_close(scores, expected)
    assert calls == [2 * TREE.num_nodes]


def test_processors_act_in_order():
    logits, paths = random_logits(), node_paths()
    penalty, warm = hf.RepetitionPenaltyLogitsProcessor(1.7), hf.TemperatureLogitsWarper(0.5)
    top = hf.TopKLogitsWarper(3)
    scores = process_node_logits(logits, LogitsProcessorList([warm, penalty, top]), paths)
    step = one_by_one(logits, warm, paths, padded=False)
    step = one_by_one(step, penalty, paths, padded=False)
    torch.testing.assert_close(scores, one_by_one(step, top, paths, padded=False))


def test_scores_are_float32_and_the_logits_untouched():
    logits = random_logits().to(torch.bfloat16)
    given = logits.clone()
    scores = process_node_logits(logits, LogitsProcessorList([hf.TopKLogitsWarper(3)]), node_paths())
    assert scores.dtype == torch.float32
    assert torch.equal(logits, given)
