import pytest
import torch
from tiny_chat import chat_base

from medusa.training.distillation.continuous_batch import ContinuousBatch, Row, repeated_tail

MAX_NEW_TOKENS = 12


def test_a_place_is_free_for_the_next_row_as_soon_as_one_ends():
    base = chat_base()
    first_choice = int(base(torch.tensor([[7, 8, 9]])).logits[0, -1].argmax())
    batch = ContinuousBatch(base, batch_size=2, max_new_tokens=30)
    batch.add(Row("long", [7, 8, 9, 10], frozenset()))
    batch.add(Row("stops at once", [7, 8, 9], frozenset([first_choice])))
    assert (batch.num_vacant, batch.has_finished) == (0, True)
    (ended,) = batch.take_finished()
    assert (ended.tag, ended.finish_reason, ended.tokens) == ("stops at once", "stop", [])
    assert batch.num_vacant == 1
    batch.add(Row("next", [11, 12], frozenset()))
    batch.step()
    assert [len(row.tokens) for row in batch.places] == [2, 2]


def test_an_empty_batch_has_nothing_to_step():
    with pytest.raises(ValueError, match="empty batch"):
        ContinuousBatch(chat_base(), 2, 5).step()
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        ContinuousBatch(chat_base(), 0, 5)


def test_a_row_that_is_replaced_late_says_what_it_says_alone():
    def run(batch_size, requests):
        batch = ContinuousBatch(chat_base(), batch_size, MAX_NEW_TOKENS)
        waiting, finished = list(requests), {}
        while True:
            for row in batch.take_finished():
                finished[row.tag] = row.tokens
            while batch.num_vacant and waiting:
                tag, length = waiting.pop(0)
                batch.add(Row(tag, list(range(20, 20 + length)), frozenset([256]), 0.5 * (tag % 3), seed=tag))
            if not batch.num_rows:
                return finished
            batch.step()

    requests = [(tag, 1 + 37 * tag % 60) for tag in range(11)]
    assert run(3, requests) == run(1, requests) == run(11, reversed(requests))


def test_an_answer_that_repeats_itself_is_cut_where_it_began_to():
    loop = [5, 6, 7]
    assert repeated_tail([1, 2, 3, 4] + loop * 17) == 48
    assert repeated_tail([1, 2, 3, 4] + loop * 16) == 0
    assert repeated_tail([9] * 49) == 48
    assert repeated_tail(list(range(60)) * 3) == 120
    assert repeated_tail(list(range(60)) * 2) == 0
    assert repeated_tail(list(range(200))) == 0


def test_stopping_loops_can_be_turned_off():
    def answer(stop_loops):
        base = chat_base()
        with torch.no_grad():  # this model says token 65 for ever
            base.lm_head.weight.zero_()
            base.lm_head.weight[65] = 1.0
            base.model.norm.weight.zero_()
        batch = ContinuousBatch(base, 1, max_new_tokens=80, stop_loops=stop_loops)
        batch.add(Row(0, [1, 2, 3], frozenset([256])))
        while not batch.has_finished:
            batch.step()
        (row,) = batch.take_finished()
        return len(row.tokens), row.finish_reason

    assert answer(stop_loops=True) == (1, "loop")
    assert answer(stop_loops=False) == (80, "length")
