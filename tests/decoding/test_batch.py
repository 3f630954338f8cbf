"""Requests join and leave a batch between steps, and each says what it says alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from batches import alone, answer_all, assert_each_says_what_it_says_alone, row_of
from conftest import (
    BUSHY,
    RandomDrafting,
    random_heads,
    random_prompts,
    tiny_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from stateful_models import tiny_stateful_model
from tiny_chat import chat_base, chat_heads, wide_tree
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

from medusa import CandidateTree, MedusaModel
from medusa.base.cache import TreeCache
from medusa.base.passes import cache_bytes
from medusa.decoding import batch as batch_module
from medusa.decoding.batch import BatchLimits, Row
from medusa.decoding.prefix_cache import PrefixCache
from medusa.decoding.runners import Runner
from medusa.decoding.scheduler import MAX_OVERTAKES, QueueFull
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head

EOS = 11


def model_of(architecture: str, seed: int = 0) -> MedusaModel:
    base = tiny_model(architecture)
    return MedusaModel(base, random_heads(seed, num_heads=4), BUSHY)


def eagle3_model() -> MedusaModel:
    base = tiny_model("llama")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = Eagle3Head(Eagle3Config.of_base(base, fused_layers=(1, 2)))
    return MedusaModel(base, head, CandidateTree.chain(3))


@st.composite
def requests(draw) -> tuple[list[int], dict]:
    """A prompt and the options of a call."""
    prompt = draw(st.lists(st.integers(3, 60), min_size=1, max_size=40))
    options = {
        "max_new_tokens": draw(st.integers(1, 20)),
        "do_sample": draw(st.booleans()),
        "pad_token_id": 0,
    }
    if options["do_sample"]:
        options |= {"temperature": draw(st.sampled_from([0.6, 1.0, 1.4])), "seed": draw(st.integers(0, 99))}
        options |= draw(st.sampled_from([{}, {"top_k": 7}, {"top_p": 0.8, "min_p": 0.02}]))
    if draw(st.booleans()):
        options["eos_token_id"] = [EOS, 12, 13]
    options |= draw(
        st.sampled_from(
            [{}, {}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 4}]
        )
    )
    return prompt, options


LIMITS = st.builds(
    BatchLimits,
    max_rows=st.integers(1, 5),
    max_slots=st.sampled_from([256, 512, 768, 4096]),
    max_waiting=st.just(64),
    chunk=st.sampled_from([1, 3, 8, 64]),
    prefix_bytes=st.sampled_from([0, 4096, 2**20]),
)


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(["llama", "gemma3", "mistral-sliding", "gpt-neox", "eagle3"]),
    arrivals=st.lists(st.tuples(requests(), st.integers(0, 6)), min_size=1, max_size=7),
    limits=LIMITS,
    pauses=st.booleans(),
    cancelled=st.sets(st.integers(0, 6), max_size=2),
    seed=st.integers(0, 99),
)
def test_a_request_says_what_it_says_alone_whatever_is_batched_with_it(
    kind, arrivals, limits, pauses, cancelled, seed
):
    """Random arrivals, a step or several apart; some begin as others do, some are cancelled midway."""
    model = eagle3_model() if kind == "eagle3" else model_of(kind, seed)
    if pauses:
        model._executor.costs.adaptive = lambda *_: RandomDrafting(seed)
    batch = model.continuous_batch(limits)
    arrivals = [
        ((arrivals[0][0][0][:length] + prompt if length else prompt, options), length)
        for (prompt, options), length in arrivals
    ]
    assert_each_says_what_it_says_alone(model, batch, arrivals, cancelled, limits)


@pytest.mark.parametrize("do_sample", [False, True])
def test_in_int8_too_a_request_says_what_it_says_alone(do_sample):
    model = MedusaModel(chat_base(), chat_heads(), wide_tree(), engine="int8")
    options = [
        {"max_new_tokens": 24, "do_sample": do_sample, **({"seed": seed} if do_sample else {})}
        for seed in range(5)
    ]
    prompts = [random_prompts(1, 3 + 17 * seed % 50, seed)[0].tolist() for seed in range(5)]
    rows = [row_of(model, each[0], **each[1]) for each in zip(prompts, options, strict=True)]
    answer_all(model.continuous_batch(BatchLimits(max_rows=3, chunk=16)), rows)
    for row, prompt, given_options in zip(rows, prompts, options, strict=True):
        assert row.tokens == alone(model, prompt, given_options)


@pytest.mark.parametrize("prefix_bytes", [0, 2**20])
def test_rows_that_outgrow_the_slots_step_back_and_go_on_as_if_nothing_had_been(prefix_bytes):
    model = model_of("llama")
    prompts = random_prompts(2, 232).tolist()  # with a draft they just fit in 256 slots
    rows = [row_of(model, prompt, max_new_tokens=270, do_sample=True, seed=7) for prompt in prompts]
    batch = model.continuous_batch(BatchLimits(max_rows=3, max_slots=1024, prefix_bytes=prefix_bytes))
    stepped_back = 0
    for row in rows:
        batch.add(row)
    while batch.is_busy:
        running = batch.num_rows
        ended = sum(bool(output.row.finish_reason) for output in batch.step())
        stepped_back += batch.num_rows < running - ended
        assert batch.num_slots <= 1024
    assert stepped_back > 0
    assert [row.num_reused for row in rows] == [0, 0]  # not what they have read themselves
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.tokens == alone(model, prompt, {"max_new_tokens": 270, "do_sample": True, "seed": 7})


def test_the_next_turn_of_a_conversation_reads_only_what_is_new():
    model = model_of("llama")
    batch = model.continuous_batch(BatchLimits())
    first = row_of(model, random_prompts(1, 50)[0].tolist(), max_new_tokens=10, do_sample=False)
    answer_all(batch, [first])
    follow_up = first.prompt + first.tokens + [5, 6, 7]
    second = row_of(model, follow_up, max_new_tokens=10, do_sample=False)
    third = row_of(model, [*follow_up[:-1], 9], max_new_tokens=10, do_sample=False)
    answer_all(batch, [second, third])  # the third finds what the second, still under way, has read
    assert (second.num_reused, third.num_reused) == (59, 62)
    for row in (second, third):
        assert row.tokens == alone(model, row.prompt, {"max_new_tokens": 10, "do_sample": False})


def test_what_one_owner_has_read_is_read_again_for_another():
    model, options = model_of("llama"), {"max_new_tokens": 10, "do_sample": False}
    batch = model.continuous_batch(BatchLimits())
    prompt = random_prompts(1, 50)[0].tolist()

    def rows_of(*owners):
        rows = [Row(row_of(model, prompt, **options).request, owner=owner) for owner in owners]
        answer_all(batch, rows)
        return [row.num_reused for row in rows]

    assert rows_of("a", "b", "a", None) == [0, 0, 49, 0]  # those before are under way
    assert rows_of("c", "b", "a", None) == [0, 49, 49, 49]  # those before have ended
    assert len(batch.prefixes) == 4


def test_the_prefixes_of_all_owners_share_one_bound():
    model = model_of("llama")
    batch = model.continuous_batch(BatchLimits())
    prompt = random_prompts(1, 50)[0].tolist()
    answer_all(batch, [row_of(model, prompt, max_new_tokens=2, do_sample=False)])
    prefix = batch.prefixes.longest(prompt).source
    store = PrefixCache(3 * prefix.num_bytes)
    for owner in range(4):
        store.keep(prompt, prefix, owner)
    assert [store.is_known(prompt, owner) for owner in range(4)] == [False, True, True, True]
    assert store.num_bytes == store.max_bytes


def test_of_a_text_that_is_longer_than_the_bound_the_leading_part_is_kept_and_it_is_counted():
    model, options = model_of("llama"), {"max_new_tokens": 2, "do_sample": False}
    per_token, _ = cache_bytes(model.engine_base)
    batch = model.continuous_batch(BatchLimits(prefix_bytes=30 * per_token))
    prompt = random_prompts(1, 50)[0].tolist()
    first, second = (row_of(model, prompt, **options) for _ in range(2))
    answer_all(batch, [first])
    assert batch.prefixes.num_cut == 1
    answer_all(batch, [second])
    assert second.num_reused == 30 and second.tokens == first.tokens
    nothing = model.continuous_batch(BatchLimits(prefix_bytes=per_token - 1))
    answer_all(nothing, [row_of(model, prompt, **options)])
    assert nothing.prefixes.num_cut == 1 and not len(nothing.prefixes)


def test_limits_follow_what_is_left_of_the_memory_and_what_a_token_takes(monkeypatch):
    base = tiny_model("llama")
    per_token, _ = cache_bytes(base)
    monkeypatch.setattr("medusa.decoding.batch.available_memory", lambda device: 8000 * per_token)
    limits = BatchLimits(max_rows=3).in_memory(base)
    assert (limits.max_rows, limits.max_slots, limits.prefix_bytes) == (3, 4000, 1000 * per_token)
    given = BatchLimits().in_memory(base, 600 * per_token, 70)
    assert (given.max_slots, given.prefix_bytes) == (600, 70)
    assert BatchLimits().in_memory(base, 1).max_slots == 256, "room for one row at least"


def test_a_long_prompt_is_read_between_the_steps_of_the_others():
    model = model_of("llama")
    batch = model.continuous_batch(BatchLimits(chunk=10), plain=True)
    running = row_of(model, [5, 6], max_new_tokens=60, do_sample=False)
    batch.add(running)
    batch.step()
    batch.add(row_of(model, random_prompts(1, 95)[0].tolist(), max_new_tokens=5, do_sample=False))
    before = len(running.tokens)
    steps = 0
    while batch.num_rows == 1:
        batch.step()
        steps += 1
    assert steps == 20 and len(running.tokens) == before + 10, "by turns"


def test_short_prompts_pass_a_long_one_which_loses_half_its_time_at_most():
    model, options = model_of("llama"), {"max_new_tokens": 3, "do_sample": False}
    batch = model.continuous_batch(BatchLimits(chunk=8, prefix_bytes=0), plain=True)
    long = row_of(model, random_prompts(1, 160)[0].tolist(), **options)
    batch.add(long)
    batch.step()
    num_steps, short = 1, []
    while not long.tokens:
        if not short or short[-1].tokens:
            short.append(row_of(model, [5 + len(short), 6, 7], **options))
            batch.add(short[-1])
        batch.step()
        batch.step()
        num_steps += 1
        assert short[-1].tokens  # when prompts were next read
    assert len(short) > 10 and num_steps <= 2 * 160 // 8
    while batch.is_busy:
        batch.step()
    for row in (long, *short):
        assert row.tokens == alone(model, row.prompt, options)


def test_a_row_without_room_is_passed_by_so_many_and_then_comes_next():
    model, options = model_of("llama"), {"max_new_tokens": 12, "do_sample": False}
    batch = model.continuous_batch(BatchLimits(max_slots=1024, max_rows=4, prefix_bytes=0), plain=True)
    long = row_of(model, random_prompts(1, 520)[0].tolist(), **options)
    rows = [row_of(model, [5], **options), long]
    batch.add(rows[0])
    batch.step()
    batch.add(long)
    began = []
    while not long.tokens:
        if len(batch.waiting) < 3:
            rows.append(row_of(model, [5 + len(rows) % 40, 6], **options))
            batch.add(rows[-1])
        batch.step()
        began.append(sum(bool(row.tokens) for row in rows if row is not long) - 1)
        assert batch.num_slots <= 1024
    assert began[-1] == MAX_OVERTAKES
    while batch.is_busy:
        batch.step()
    for row in rows:
        assert row.tokens == alone(model, row.prompt, options)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_progress_that_ends_a_row_is_the_last_one_and_says_so(length):
    model, told = model_of("llama"), []
    batch = model.continuous_batch(BatchLimits(), plain=True)
    batch.add(row_of(model, [5, 6], max_new_tokens=length, do_sample=False))
    while batch.is_busy:
        told += batch.step()
    assert [output.finish_reason for output in told] == [None] * (length - 1) + ["length"]


def test_a_cancelled_row_is_gone_at_once_wherever_it_was():
    model = model_of("llama")
    batch = model.continuous_batch(BatchLimits(max_rows=1, chunk=4))
    rows = [row_of(model, list(range(3, 23)), max_new_tokens=50, do_sample=False) for _ in range(3)]
    batch.add(rows[0])
    while not rows[0].tokens:
        batch.step()
    batch.add(rows[1])
    batch.cancel(rows[0])
    assert batch.num_rows == 0 and batch.is_busy
    batch.step()  # reads the first chunk of the next prompt
    batch.cancel(rows[1])
    assert not batch.is_busy and batch.step() == []
    batch.add(rows[2])
    batch.cancel(rows[2])
    assert not batch.is_busy
    assert {row.finish_reason for row in rows} == {"cancelled"}


@pytest.mark.parametrize("keeps_state", [False, True])
def test_what_was_read_for_a_cancelled_row_is_not_read_again_for_the_next_try(keeps_state):
    model = MedusaModel(tiny_stateful_model("qwen3_next")) if keeps_state else model_of("llama")
    options = {"max_new_tokens": 6, "do_sample": False}
    batch = model.continuous_batch(BatchLimits(chunk=4, prefix_bytes=2**20))
    prompt = [3 + place % 50 for place in range(22)]
    request = row_of(model, prompt, **options).request
    first, other, again = (Row(request, owner=owner) for owner in ("me", "you", "me"))
    batch.add(first)
    for _ in range(3):
        batch.step()
    batch.cancel(first)
    assert not batch.is_busy and len(batch.prefixes) == 1
    for row in (other, again):
        batch.add(row)
        while batch.is_busy:
            batch.step()
    assert (other.num_reused, again.num_reused) == (0, 12)
    assert other.tokens == again.tokens == alone(model, prompt, options)


class Raises(SuppressTokensLogitsProcessor):
    """Fails when the text is long enough."""

    def __call__(self, input_ids, scores):
        raise ArithmeticError("no")


def test_a_processor_that_raises_ends_its_own_request_alone(monkeypatch):
    monkeypatch.setattr("medusa.acceptance.sampling.TEXT_PROCESSORS", (Raises,))
    model, options = model_of("llama"), {"max_new_tokens": 20, "do_sample": False}
    good, bad = (row_of(model, [seed, 6, 7], **options) for seed in (4, 5))
    batch = model.continuous_batch(BatchLimits())
    batch.add(good)
    batch.add(bad)
    batch.step()
    broken = LogitsProcessorList([Raises([3])])
    bad.request = replace(bad.request, processors=broken)
    while batch.is_busy:
        batch.step()
    assert (bad.finish_reason, str(bad.error)) == ("error", "no")
    assert good.tokens == alone(model, [4, 6, 7], options)
    late = row_of(model, [8, 9], **options)
    late.request = replace(late.request, processors=broken)
    answer_all(batch, [late])
    assert (late.finish_reason, late.num_reused) == ("error", 0)


def test_logits_that_are_no_numbers_end_their_own_request_alone():
    model, options = model_of("llama"), {"max_new_tokens": 30, "do_sample": False}
    batch = model.continuous_batch(BatchLimits(), plain=True)
    good, bad = (row_of(model, [seed, 6, 7], **options) for seed in (4, 5))
    batch.add(good)
    batch.add(bad)
    batch.step()
    for layer in batch._state.cache.tree_layers:
        layer.entries[1][1, :, 0] = float("nan")
    while bad.finish_reason is None:
        batch.step()
    assert "not numbers" in str(bad.error)
    late = row_of(model, [8, 9], **options)
    answer_all(batch, [late])
    for row in (good, late):
        assert row.tokens == alone(model, row.prompt, options)


def test_a_pass_that_fails_loses_its_rows_and_not_the_batch(monkeypatch):
    model, options = model_of("llama"), {"max_new_tokens": 10, "do_sample": False}
    batch = model.continuous_batch(BatchLimits())
    lost = row_of(model, [4, 5], **options)
    batch.add(lost)

    def fails(*_args):
        raise MemoryError("out of memory")

    batch.step()
    monkeypatch.setattr(Runner, "verify", fails)
    batch.step()
    assert (lost.finish_reason, str(lost.error)) == ("error", "out of memory")
    monkeypatch.undo()
    monkeypatch.setattr(TreeCache, "join", fails)
    both = [row_of(model, [token, 5], **options) for token in (4, 6)]
    answer_all(batch, both)
    assert [str(row.error) for row in both] == ["out of memory"] * 2
    monkeypatch.undo()
    kept = [row_of(model, [token, 5], **options) for token in (4, 6)]
    answer_all(batch, kept)
    for row in kept:
        assert row.tokens == alone(model, row.prompt, options)


def test_a_step_that_is_refused_has_changed_no_row():
    model = MedusaModel(copy.deepcopy(tiny_model("llama")), random_heads(0, num_heads=4), BUSHY)
    batch, row = model.continuous_batch(), row_of(model, [4, 5], max_new_tokens=10, do_sample=False)
    batch.add(row)
    told = [token for output in batch.step() for token in output.tokens]
    model.base.train()
    with pytest.raises(ValueError, match="set to training mode"):
        batch.step()
    model.base.eval()
    while batch.is_busy:
        told += [token for output in batch.step() for token in output.tokens]
    assert told == row.tokens == alone(model, [4, 5], {"max_new_tokens": 10, "do_sample": False})


def test_logprobs_are_those_of_plain_decoding():
    model = model_of("llama")
    options = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.7, "seed": 3, "num_logprobs": 4}

    def reported(plain):
        batch, found = model.continuous_batch(BatchLimits(), plain=plain), []
        batch.add(row_of(model, [5, 6, 7], **options))
        while batch.is_busy:
            found += [entry for output in batch.step() for entry in output.logprobs or []]
        return found

    drafted, plain = reported(False), reported(True)
    assert [each.token for each in drafted] == [each.token for each in plain] and len(plain) == 16
    ids = torch.tensor([[5, 6, 7] + [each.token for each in plain]])
    with torch.no_grad():
        expected = model.base(ids).logits[0, 2:-1].log_softmax(-1)
    for index, (ours, theirs) in enumerate(zip(drafted, plain, strict=True)):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.logprob == pytest.approx(float(expected[index, ours.token]), abs=1e-4)
        assert [token for token, _ in ours.top] == expected[index].topk(4).indices.tolist()
        assert [value for _, value in ours.top] == pytest.approx(
            expected[index].topk(4).values.tolist(), abs=1e-4
        )


def test_the_queue_and_the_sizes_have_limits():
    model, options = model_of("llama"), {"max_new_tokens": 5, "do_sample": False}
    batch = model.continuous_batch(BatchLimits(max_rows=1, max_slots=512, max_waiting=1))
    for _ in range(2):
        batch.add(row_of(model, [4, 5], **options))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        batch.add(row_of(model, [4, 5], **options))
    with pytest.raises(ValueError, match="max_slots=512, and may take 768"):
        batch.add(row_of(model, random_prompts(1, 600)[0].tolist(), **options))
    with pytest.raises(ValueError, match="one request, got one of 2 rows"):
        batch.add(Row(model.request(random_prompts(2, 4), **options)))
    own = LogitsProcessorList(
        [type("Own", (LogitsProcessor,), {"__call__": lambda self, ids, scores: scores})()]
    )
    with pytest.raises(ValueError, match="call generate for this one"):
        batch.add(row_of(model, [4, 5], logits_processor=own, **options))
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        BatchLimits(max_rows=0)


def test_the_tree_follows_the_number_of_rows_up_to_the_next_power_of_two():
    model, asked = model_of("llama"), []
    tree_for = model._executor.tree_for
    model._executor.tree_for = lambda num_rows, step=None: asked.append(num_rows) or tree_for(num_rows, step)
    rows = [row_of(model, [seed], max_new_tokens=4 + 6 * seed, do_sample=False) for seed in (4, 5, 6)]
    answer_all(model.continuous_batch(BatchLimits()), rows)
    assert set(asked) == {1, 2, 4}


def test_what_guessing_costs_is_learnt_for_each_number_of_rows():
    """Three rows are decoded plainly here, as four would be, which says nothing of two."""
    model = model_of("llama")
    tree_for = lambda num_rows, step=None: CandidateTree.chain(0) if num_rows == 4 else BUSHY  # noqa: E731
    model._executor.tree_for = tree_for
    rows = [row_of(model, [seed], max_new_tokens=4 + 8 * seed, do_sample=False) for seed in (4, 5, 6)]
    answer_all(model.continuous_batch(BatchLimits()), rows)
    assert set(model._executor.costs.known) == {("general", 1), ("general", 2)}


def test_by_time_a_short_prompt_waits_less_for_a_long_one_whose_tokens_take_longer(monkeypatch):
    """On a clock by which a token behind others takes as long as there are."""
    model, now = MedusaModel(tiny_model("llama")), [0.0]
    monkeypatch.setattr(batch_module.time, "perf_counter", lambda: now[0])
    waited, texts = {}, {}
    for by_time in (False, True):
        limits = BatchLimits(max_rows=4, chunk=64, by_time=by_time, prefix_bytes=0)
        batch = model.continuous_batch(limits, plain=True)
        prefill = Runner.prefill

        def slow(self, tokens, lengths, cache, *given, prefill=prefill, **more):
            before = cache.longest
            found = prefill(self, tokens, lengths, cache, *given, **more)
            now[0] += sum(range(before, cache.longest))
            return found

        monkeypatch.setattr(Runner, "prefill", slow)
        requests = [model.request(random_prompts(1, size), max_new_tokens=4) for size in (1000, 100)]
        long, short = rows = [Row(each) for each in requests]
        batch.add(long)
        while long.num_read < 500:
            batch.step()
        batch.add(short)
        began = now[0]
        while not short.tokens:
            batch.step()
        waited[by_time] = now[0] - began
        assert not long.tokens and long.num_read > 500, "it is read too"
        while batch.is_busy:
            batch.step()
        texts[by_time] = [row.tokens for row in rows]
        monkeypatch.setattr(Runner, "prefill", prefill)
    assert texts[True] == texts[False]
    assert waited[True] < waited[False] / 2


def test_the_slots_that_a_long_row_leaves_are_freed_before_others_join():
    model = model_of("llama")
    batch = model.continuous_batch(BatchLimits(max_rows=4, max_slots=2048, prefix_bytes=0), plain=True)
    options = {"do_sample": False}
    long = Row(model.request(random_prompts(1, 510), max_new_tokens=4, **options))
    others = [
        Row(model.request(random_prompts(1, 3, seed), max_new_tokens=30, **options)) for seed in range(4)
    ]
    batch.add(long)
    batch.add(others[0])
    while long.finish_reason is None:
        batch.step()
    for row in others[1:]:
        batch.add(row)
    while batch.is_busy:
        batch.step()
        assert batch.num_slots <= 2048
