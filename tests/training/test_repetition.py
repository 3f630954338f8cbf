"""Answers that repeat themselves are cut, unless that is turned off."""

from collections import deque

import torch
from tiny_chat import chat_base, chat_tokenizer

from medusa.model import MedusaModel
from medusa.training.distillation.answering import Conversation, LocalAnswerer, repeated_tail


def test_an_answer_that_repeats_itself_is_cut_where_it_began_to():
    loop = [5, 6, 7]
    assert repeated_tail([1, 2, 3, 4] + loop * 17) == 48
    assert repeated_tail([1, 2, 3, 4] + loop * 16) == 0
    assert repeated_tail([9] * 49) == 48
    assert repeated_tail(list(range(60)) * 3) == 120
    assert repeated_tail(list(range(60)) * 2) == 0
    assert repeated_tail(list(range(200))) == 0


def test_stopping_loops_can_be_turned_off():
    base = chat_base()
    with torch.no_grad():  # this model says token 65 for ever
        base.lm_head.weight.zero_()
        base.lm_head.weight[65] = 1.0
        base.model.norm.weight.zero_()

    model = MedusaModel(base, tokenizer=chat_tokenizer())

    def answer(stop_loops):
        answerer = LocalAnswerer(model, 1, max_new_tokens=80, stop_loops=stop_loops)
        waiting = deque([Conversation(0, [{"role": "user", "content": "Hello"}])])
        ((_, reply),) = answerer.replies(
            lambda: waiting.popleft() if waiting else None, lambda _: None, lambda: False
        )
        return reply.num_tokens, reply.was_cut

    assert answer(stop_loops=True) == (1, True)
    assert answer(stop_loops=False) == (80, True)
