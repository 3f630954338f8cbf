"""Counting ranks: which guess of each head is the true token, on text that the base reads."""

from __future__ import annotations

import pytest
import torch
from conftest import SWITCH, VOCAB_SIZE, longrope_model, random_prompts
from tiny_chat import chat_base, chat_heads, chat_model, wide_tree

from medusa import HeadsConfig, MedusaHeads
from medusa.base.causal_lm import lm_head
from medusa.base.passes import hidden_states
from medusa.heads.calibration import AnsweredTokens, calibrate
from medusa.trees.rank_counts import MISS, UNKNOWN


def test_ranks_are_those_of_the_true_token_d_places_after_the_root():
    base, heads = chat_base(), chat_heads(num_heads=3)
    ids = torch.randint(256, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt_length = 8
    row = AnsweredTokens(ids, [i >= prompt_length for i in range(20)])
    (ranks,) = calibrate(base, heads, [row], max_rank=260).ranks
    assert ranks.shape == (20 - prompt_length, 3)
    with torch.no_grad():
        logits = heads(hidden_states(base, torch.tensor([ids]))[0], lm_head(base))  # (T, K, V)
    for position in range(20 - prompt_length):
        t = prompt_length - 1 + position  # the state that emits the root token t + 1
        for d in (1, 2, 3):
            if t + 1 + d >= 20:
                assert ranks[position, d - 1] == UNKNOWN
            else:
                order = logits[t, d - 1].argsort(descending=True).tolist()
                assert order[ranks[position, d - 1]] == ids[t + 1 + d]


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


def test_replay_predicts_what_live_greedy_decoding_measures():
    model = chat_model()
    rows, steps, accepted = [], 0, 0
    tree = wide_tree(depth=3, width=60)
    for text in ("hello", "a longer prompt", "zz"):
        ids = model.tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, tree=tree, max_new_tokens=60, do_sample=False, return_dict_in_generate=True)
        steps, accepted = steps + out.statistics.num_steps, accepted + out.statistics.num_accepted
        tokens = out.sequences[0].tolist()
        rows.append(AnsweredTokens.after_prompt(tokens, ids.shape[1]))
    counts = calibrate(model.base, model.heads, rows, max_rank=60)
    num_steps, num_tokens = map(sum, zip(*counts.replay(tree), strict=True))
    assert accepted > 10, "the comparison says something only when guesses are accepted"
    assert num_tokens / num_steps == pytest.approx(1 + accepted / steps)


def test_nothing_to_calibrate_on_is_an_error_that_says_what_is_missing():
    base, heads = chat_base(), chat_heads()
    with pytest.raises(ValueError, match="no labelled token"):
        calibrate(base, heads, [AnsweredTokens([1, 2, 3], [False] * 3)])
    with pytest.raises(ValueError, match="takes 4 tokens"):
        calibrate(base, heads, [AnsweredTokens([1, 2, 3], [False, True, True])]).best_tree(4)


def test_a_longrope_base_gives_each_row_the_ranks_that_it_has_alone():
    torch.manual_seed(0)
    heads = MedusaHeads(HeadsConfig(32, VOCAB_SIZE, num_heads=2))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    base = longrope_model()
    rows = [
        AnsweredTokens.after_prompt(random_prompts(1, length, seed=length)[0].tolist(), 4)
        for length in (SWITCH + 9, 10, SWITCH, 20, SWITCH + 1)
    ]
    together = calibrate(base, heads, rows)
    alone = [calibrate(base, heads, [row]).ranks[0] for row in rows]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(together.ranks, alone, strict=True))
