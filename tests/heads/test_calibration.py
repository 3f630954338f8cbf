import math

import pytest
import torch
from tiny_chat import chat_base, chat_heads, chat_model, wide_tree
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import CandidateTree, HeadsConfig, MedusaHeads, best_tree
from medusa.base.causal_lm import hidden_states, output_embedding
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.trees.candidate_tree import independent_path_values
from medusa.trees.rank_counts import MISS, UNKNOWN, RankCounts


def counts_of(*answers, max_rank=4):
    return RankCounts(tuple(torch.tensor(answer, dtype=torch.int16) for answer in answers), max_rank)


def marginal_tree(counts, num_nodes):
    rates = counts.head_counts / torch.tensor(counts.head_totals)[:, None]
    return best_tree(independent_path_values(rates.tolist()), num_nodes)


def test_ranks_are_those_of_the_true_token_d_places_after_the_root():
    base, heads = chat_base(), chat_heads(num_heads=3)
    ids = torch.randint(256, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt_length = 8
    row = AnsweredTokens(ids, [i >= prompt_length for i in range(20)])
    (ranks,) = calibrate(base, heads, [row], max_rank=260).ranks
    assert ranks.shape == (20 - prompt_length, 3)
    with torch.no_grad():
        logits = heads(hidden_states(base, torch.tensor([ids]))[0], output_embedding(base))  # (T, K, V)
    for position in range(20 - prompt_length):
        t = prompt_length - 1 + position  # the state that emits the root token t + 1
        for d in (1, 2, 3):
            if t + 1 + d >= 20:
                assert ranks[position, d - 1] == UNKNOWN
            else:
                order = logits[t, d - 1].argsort(descending=True).tolist()
                assert order[ranks[position, d - 1]] == ids[t + 1 + d]


def test_a_counting_sequence_gives_every_head_full_accuracy():
    """The base's state is the one-hot code of its last token, and head d adds 1 + d to it."""
    size, num_heads = 40, 3
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
    )
    base = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        base.get_input_embeddings().weight.copy_(torch.eye(size))
        base.get_output_embeddings().weight.copy_(torch.eye(size))
        for layer in base.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    heads = MedusaHeads(HeadsConfig(size, size, num_heads=num_heads, unembedding="full"))
    with torch.no_grad():
        for d, rows in enumerate(heads.unembed, start=1):
            rows.copy_(torch.eye(size).roll(1 + d, dims=0))
    ids = list(range(30))
    counts = calibrate(base, heads, [AnsweredTokens(ids, [i >= 5 for i in ids])], max_rank=2)
    assert counts.top_k_accuracy(1) == [1.0] * num_heads
    assert counts.joint_counts[(0, 0, 0)] == counts.num_positions == 25 - num_heads


def test_batching_chunking_and_padding_change_no_rank(monkeypatch):
    base, heads = chat_base(), chat_heads()
    generator = torch.Generator().manual_seed(0)
    rows = [
        AnsweredTokens(torch.randint(256, (n,), generator=generator).tolist(), [i >= 3 for i in range(n)])
        for n in (25, 7, 16, 11, 30)
    ]
    alone = [calibrate(base, heads, [row]).ranks[0] for row in rows]
    monkeypatch.setattr("medusa.heads.calibration.LOGITS_PER_CHUNK", 4 * 3 * 260)
    together = calibrate(base, heads, rows, batch_size=3).ranks
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_each_answer_of_a_conversation_is_counted_by_itself():
    base, heads = chat_base(), chat_heads(num_heads=2)
    labels = [False] * 4 + [True] * 5 + [False] * 3 + [True] * 3
    counts = calibrate(base, heads, [AnsweredTokens(list(range(15)), labels)])
    assert [len(ranks) for ranks in counts.ranks] == [5, 3]
    assert counts.head_totals == [4 + 2, 3 + 1]
    assert counts.num_positions == 4


def test_the_first_token_of_a_row_is_never_guessed_since_no_state_comes_before_it():
    (ranks,) = calibrate(chat_base(), chat_heads(), [AnsweredTokens(list(range(9)), [True] * 9)]).ranks
    assert len(ranks) == 8


def test_a_token_outside_a_token_map_is_a_miss():
    base = chat_base()
    config = HeadsConfig(32, 260, num_heads=1, unembedding="token_map", token_map_size=8)
    heads = MedusaHeads(config, token_map=range(100, 108))
    row = AnsweredTokens([1, 2, 3, 104, 5, 105], [False, True, True, True, True, True])
    (ranks,) = calibrate(base, heads, [row], max_rank=16).ranks
    assert [int(rank) >= 0 for rank in ranks[:, 0]] == [False, True, False, True, False]
    assert ranks[:, 0].tolist()[0] == MISS
    assert ranks[:, 0].tolist()[-1] == UNKNOWN


def test_top_k_accuracy_counts_known_positions_only():
    counts = counts_of([[0, 2], [1, MISS], [0, 0], [3, UNKNOWN], [UNKNOWN, UNKNOWN]])
    assert counts.top_k_accuracy(1) == [0.5, 1 / 3]
    assert counts.top_k_accuracy(3) == [0.75, 2 / 3]
    with pytest.raises(ValueError, match=r"k must be in \[1, max_rank=4\], got 5"):
        counts.top_k_accuracy(5)
    assert math.isnan(counts_of([[0, UNKNOWN]]).top_k_accuracy(1)[1])


def test_joint_counts_beat_marginals_where_ranks_are_correlated():
    # Rank 1 follows rank 0 and rank 0 follows rank 1, always; by marginals the four pairs look alike.
    counts = counts_of([[0, 1], [1, 0]] * 50)
    joint, marginal = counts.best_tree(5), marginal_tree(counts, 5)
    assert set(joint.paths) == {(), (0,), (1,), (0, 1), (1, 0)}
    assert counts.expected_tokens_per_step(joint) == 3.0
    assert counts.expected_tokens_per_step(marginal) == 2.5


@pytest.mark.parametrize("num_nodes", [2, 5, 9, 17])
def test_with_many_counts_the_joint_tree_is_never_worse_than_the_marginal_one(num_nodes):
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 5, (4000,), generator=generator)
    stays = torch.rand(4000, generator=generator) < 0.7
    second = torch.where(stays, first, torch.randint(0, 5, (4000,), generator=generator))
    ranks = torch.stack([first, second], dim=1)
    counts = RankCounts((ranks.masked_fill(ranks == 4, MISS).to(torch.int16),), max_rank=4)
    joint = counts.expected_tokens_per_step(counts.best_tree(num_nodes))
    assert joint >= counts.expected_tokens_per_step(marginal_tree(counts, num_nodes)) - 1e-9


def test_path_values_never_grow_along_a_path_and_fall_back_to_independence():
    counts = counts_of([[0, 1], [1, 0], [MISS, 0], [0, MISS]])
    values = counts.path_values()
    assert all(values[path] <= values[path[:-1]] for path in values if len(path) > 1)
    trusting_only_marginals = counts.path_values(prior_strength=1e9)
    # Of 4 positions one has rank 1, for either head; each of the 4 ranks counts 0.1 more.
    assert trusting_only_marginals[(1, 1)] == pytest.approx((1.1 / 4.4) ** 2)
    assert counts.path_values(prior_strength=1e-9)[(1, 1)] == pytest.approx(0.0, abs=1e-6)


def test_a_tree_of_any_size_can_be_built_from_few_counts_and_no_deeper_than_asked():
    counts = counts_of([[0, 1], [0, 0]])
    assert counts.best_tree(21).num_nodes == 21, "4 ranks of 2 heads make 1 + 4 + 16 nodes"
    assert counts.best_tree(21, max_depth=1).num_nodes == 5
    assert counts.best_tree(3).paths == ((), (0,), (0, 0))
    with pytest.raises(ValueError, match="num_nodes must be at least 1"):
        counts.best_tree(0)


def test_expected_tokens_per_step_averages_over_positions_and_replay_walks():
    # From position 0 both guesses are right; position 1 and 2 are then never the start of a step.
    counts = counts_of([[0, 0], [MISS, 0], [MISS, 0], [0, 0], [0, UNKNOWN], [UNKNOWN, UNKNOWN]])
    chain = CandidateTree.chain(2)
    assert counts.num_positions == 4
    assert counts.expected_tokens_per_step(chain) == 1 + (2 + 0 + 0 + 2) / 4
    # Steps: 0 -> 3 (2 accepted), 3 -> 5 (one accepted, then the answer is over: its own token is cut).
    assert counts.replayed_tokens_per_step(chain) == 1 + (2 + 1) / 2
    assert counts.replayed_tokens_per_step(CandidateTree.chain(0)) == 1.0


def test_replay_predicts_what_live_greedy_decoding_measures():
    model = chat_model()
    counts, steps, accepted = [], 0, 0
    tree = wide_tree(depth=3, width=60)
    for text in ("hello", "a longer prompt", "zz"):
        ids = model.tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, tree=tree, max_new_tokens=60, do_sample=False, return_dict_in_generate=True)
        steps, accepted = steps + out.statistics.num_steps, accepted + out.statistics.num_accepted
        tokens = out.sequences[0].tolist()
        row = AnsweredTokens(tokens, [i >= ids.shape[1] for i in range(len(tokens))])
        counts.append(calibrate(model.base, model.heads, [row], max_rank=60))
    replayed = (counts[0] + counts[1] + counts[2]).replayed_tokens_per_step(tree)
    assert accepted > 10, "the comparison says something only when guesses are accepted"
    assert replayed == pytest.approx(1 + accepted / steps)


def test_halves_deal_the_answers_out():
    counts = counts_of([[0]], [[1]], [[2]])
    even, odd = counts.halves()
    assert [ranks.tolist() for ranks in even.ranks] == [[[0]], [[2]]]
    assert [ranks.tolist() for ranks in odd.ranks] == [[[1]]]
    with pytest.raises(ValueError, match="at least 2 answers, got 1"):
        odd.halves()


def test_nothing_to_calibrate_on_is_an_error_that_says_what_is_missing():
    base, heads = chat_base(), chat_heads()
    with pytest.raises(ValueError, match="no labelled token"):
        calibrate(base, heads, [AnsweredTokens([1, 2, 3], [False] * 3)])
    with pytest.raises(ValueError, match="takes 4 tokens"):
        calibrate(base, heads, [AnsweredTokens([1, 2, 3], [False, True, True])]).best_tree(4)
    with pytest.raises(ValueError, match=r"agree in \(max_rank, heads\)"):
        counts_of([[0]]) + counts_of([[0]], max_rank=5)
