"""A shared batch in static steps: requests come and go between bursts, and each says what it says alone."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager

import pytest
import torch
from batches import alone, answer_all, assert_each_says_what_it_says_alone, row_of
from conftest import (
    ARCHITECTURES,
    BUSHY,
    SLIDING_WINDOW,
    RandomDrafting,
    random_heads,
    random_prompts,
    tiny_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from medusa import CandidateTree, MedusaModel
from medusa.acceptance.row_settings import Program, row_numbers
from medusa.base.fixed_cache import CacheMemory
from medusa.base.passes import new_cache, prefill
from medusa.decoding.batch import Batch, BatchLimits
from medusa.decoding.static import StaticState
from medusa.decoding.static_stepper import AWAITED_INTERVAL, can_be_shared
from medusa.decoding.step import GeneralStepper
from medusa.drafters.registry import DrafterFactory
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head

EOS = 11
DRAFTERS = ["default", "heads", "dynamic-heads+suffix", "suffix", "plain"]
ON_THE_HOST = [
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 4, "eos_token_id": [EOS]},
    {"num_logprobs": 2},
    {"typical_p": 0.9},
]
"""Options that static steps of rows that come and go do not take."""


def model_of(architecture: str, seed: int = 0, step: str = "static") -> MedusaModel:
    return MedusaModel(tiny_model(architecture), random_heads(seed, num_heads=4), BUSHY, step=step)


def batch_of(
    model: MedusaModel, limits: BatchLimits | None = None, interval: int = 4, name: str = "default"
) -> Batch:
    """A batch whose host reads the results every ``interval`` steps, of which ``name`` drafts all."""
    batch = model.continuous_batch(limits)
    batch._stepper.interval = interval
    if name != "default":
        factory = DrafterFactory(model)
        batch._make_drafter = lambda num_rows, _, step: (
            factory.make(name, num_rows=num_rows, step=step),
            None,
        )
    return batch


@contextmanager
def no_general_steps():
    """Within, a general step is an error."""

    def refused(*_args, **_options):
        raise AssertionError("a general step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GeneralStepper, "advance", refused)
        yield


@st.composite
def requests(draw, others: bool) -> tuple[list[int], dict]:
    """A prompt and the options of a call; where ``others``, some that static steps do not take."""
    prompt = draw(st.lists(st.integers(3, 60), min_size=1, max_size=40))
    options = {
        "max_new_tokens": draw(st.integers(1, 24)),
        "do_sample": draw(st.booleans()),
        "pad_token_id": 0,
    }
    if options["do_sample"]:
        options |= {"temperature": draw(st.sampled_from([0.6, 1.0, 1.4])), "seed": draw(st.integers(0, 99))}
        options |= draw(st.sampled_from([{}, {"top_k": 7}, {"top_k": 3, "top_p": 0.8, "min_p": 0.02}]))
    options |= draw(st.sampled_from([{}, {"eos_token_id": [EOS]}, {"eos_token_id": [EOS, *range(20, 25)]}]))
    options |= draw(st.sampled_from([{}, {}, {"repetition_penalty": 1.3}, *(ON_THE_HOST if others else [])]))
    return prompt, options


LIMITS = st.builds(
    BatchLimits,
    max_rows=st.integers(1, 5),
    max_slots=st.sampled_from([256, 512, 768, 4096]),
    max_waiting=st.just(64),
    chunk=st.sampled_from([3, 8, 64]),
    prefix_bytes=st.sampled_from([0, 4096, 2**20]),
)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["llama", "gemma3", "mistral-sliding", "gpt-neox"]),
    name=st.sampled_from(DRAFTERS),
    arrivals=st.booleans().flatmap(
        lambda others: st.lists(st.tuples(requests(others), st.integers(0, 4)), min_size=1, max_size=8)
    ),
    limits=LIMITS,
    interval=st.sampled_from([1, 3, 8]),
    pauses=st.booleans(),
    cancelled=st.sets(st.integers(0, 7), max_size=2),
    seed=st.integers(0, 99),
)
def test_a_request_says_what_it_says_alone_whatever_comes_and_goes(
    kind, name, arrivals, limits, interval, pauses, cancelled, seed
):
    """Random arrivals, a burst or several apart; some begin as others do, some are cancelled midway."""
    model = model_of(kind, seed)
    if pauses:
        model._executor.costs.adaptive = lambda *_: RandomDrafting(seed)
    batch = batch_of(model, limits, interval, name)
    first = arrivals[0][0][0]
    arrivals = [((first[: 3 * wait] + prompt, options), wait) for (prompt, options), wait in arrivals]
    assert_each_says_what_it_says_alone(model, batch, arrivals, cancelled, limits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_every_architecture_share_static_steps(architecture):
    """Of some, layers differ in their keys and values, which are then no parts of one tensor."""
    model = model_of(architecture)
    options = [
        {"max_new_tokens": 14, "do_sample": False},
        {"max_new_tokens": 9, "do_sample": True, "seed": 4, "temperature": 0.8},
        {"max_new_tokens": 20, "do_sample": True, "seed": 5, "top_p": 0.9},
    ]
    prompts = [random_prompts(1, length)[0].tolist() for length in (SLIDING_WINDOW + 8, 7, 1)]
    rows = [row_of(model, prompt, **each) for prompt, each in zip(prompts, options, strict=True)]
    with no_general_steps():
        answer_all(batch_of(model, BatchLimits(max_rows=2, chunk=16)), rows)
    for row, each in zip(rows, options, strict=True):
        assert row.tokens == alone(model, row.prompt, each)


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_general_step_runs_where_all_rows_can_be_shared(name):
    model = model_of("llama")
    options = [
        {"max_new_tokens": 9, "do_sample": False},
        {"max_new_tokens": 30, "do_sample": True, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2},
        {"max_new_tokens": 20, "do_sample": True, "seed": 5, "temperature": 0.7, "eos_token_id": [EOS]},
        {"max_new_tokens": 25, "do_sample": True, "seed": 6, "top_k": 5, "min_p": 0.1},
    ]
    rows = [row_of(model, [5 + place, 6, 7], **each) for place, each in enumerate(options)]
    with no_general_steps():
        answer_all(batch_of(model, BatchLimits(max_rows=3, chunk=8), name=name), rows)
    for row, each in zip(rows, options, strict=True):
        assert row.tokens == alone(model, row.prompt, each)


def test_general_steps_run_while_a_row_needs_them_and_static_ones_after_it(monkeypatch):
    kinds: list[tuple[str, int]] = []
    model = model_of("llama")
    batch = batch_of(model, BatchLimits(max_rows=3), interval=2)
    stepper = batch._stepper
    advance = stepper.advance
    monkeypatch.setattr(
        stepper,
        "advance",
        lambda state, *rest: (
            kinds.append((stepper.kind_for(state.rows), len(state.rows))),
            advance(state, *rest),
        )[1],
    )
    options = {"do_sample": False, "pad_token_id": 0}
    rows = [
        row_of(model, [5, 6, 7], **options, max_new_tokens=40),
        row_of(model, [5, 8], **options, max_new_tokens=60),
    ]
    other = row_of(model, [9, 8], **options, max_new_tokens=12, no_repeat_ngram_size=2)
    for row in rows:
        batch.add(row)
    for _ in range(5):
        batch.step()
    batch.add(other)
    while batch.is_busy:
        batch.step()
    order = [kind for kind, _ in kinds]
    first, last = order.index("general"), len(order) - order[::-1].index("general")
    assert set(order[:first]) == set(order[last:]) == {"static"} and set(order[first:last]) == {"general"}
    assert {count for kind, count in kinds if kind == "general"} == {3}
    for row in rows:
        assert row.tokens == alone(
            model, row.prompt, {**options, "max_new_tokens": row.request.max_new_tokens}
        )
    assert other.tokens == alone(model, [9, 8], {**options, "max_new_tokens": 12, "no_repeat_ngram_size": 2})


def test_a_burst_is_short_while_a_prompt_waits_to_be_read(monkeypatch):
    model = model_of("llama")
    batch = batch_of(model, BatchLimits(max_rows=2, chunk=4), interval=8, name="plain")
    seen: list[tuple[bool, int]] = []
    advance = batch._stepper.advance

    def watched(*args):
        burst = advance(*args)
        seen.append((args[-1].is_awaited, burst.num_steps))
        return burst

    monkeypatch.setattr(batch._stepper, "advance", watched)
    batch.add(row_of(model, [5, 6], max_new_tokens=60, do_sample=False))
    batch.step()
    batch.add(row_of(model, random_prompts(1, 21)[0].tolist(), max_new_tokens=4, do_sample=False))
    batch.add(row_of(model, [7], max_new_tokens=4, do_sample=False))
    while batch.is_busy:
        batch.step()
    assert {count for is_awaited, count in seen if is_awaited} == {AWAITED_INTERVAL}
    assert 8 in {count for is_awaited, count in seen if not is_awaited}


def test_rows_are_loaded_only_where_they_have_changed(monkeypatch):
    """What stays on the device is not sent again."""
    loaded: list[int] = []
    load = StaticState.load
    monkeypatch.setattr(
        StaticState,
        "load",
        lambda state, rows, count: (loaded.append(len(rows.rows)), load(state, rows, count)),
    )
    model = model_of("llama")
    batch = batch_of(model, BatchLimits(max_rows=4), name="plain")
    rows = [row_of(model, [5, length], max_new_tokens=length, do_sample=False) for length in (30, 60)]
    answer_all(batch, rows)
    assert loaded == [2, 1]
    size_of = batch._stepper._size
    sizes = iter([2, 2, 3, 3])  # as where a prefill has ended, and more rows have room
    monkeypatch.setattr(batch._stepper, "_size", lambda *needed: (next(sizes, 4), size_of(*needed)[1]))
    answer_all(batch, [row_of(model, [5, length], max_new_tokens=25, do_sample=False) for length in (7, 8)])
    assert loaded == [2, 1, 2, 2, 2]


def test_logits_that_are_no_numbers_end_their_own_request_alone():
    model, options = model_of("llama"), {"max_new_tokens": 30, "do_sample": False}
    batch = batch_of(model, name="plain")
    good, bad, late = (row_of(model, [token, 6, 7], **options) for token in (4, 5, 8))
    with no_general_steps():
        batch.add(good)
        batch.add(bad)
        for _ in range(2):
            batch.step()
        for layer in batch._state.cache.tree_layers:
            layer.entries[1][1, :, 0] = float("nan")
        batch.add(late)
        for _ in range(30):
            batch.step()
    assert not batch.is_busy
    assert "not numbers" in str(bad.error)
    for row in (good, late):
        assert row.tokens == alone(model, row.prompt, options)


def test_a_guess_on_which_the_base_is_not_finite_is_left_out():
    """Every row guesses it at every step, and the rows that are not there do too."""
    poison = 60
    base = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        base.get_input_embeddings().weight[poison] = float("nan")
    every_token = CandidateTree.from_paths([(rank,) for rank in range(61)])
    model = MedusaModel(base, random_heads(), every_token, step="static")
    batch = batch_of(model, BatchLimits(max_rows=4), name="heads")
    options = {"max_new_tokens": 12, "do_sample": False}
    rows = [row_of(model, [token, 6, 7], **options) for token in (4, 5, 8)]
    with no_general_steps():
        answer_all(batch, rows)
    for row in rows:
        assert row.tokens == alone(model, row.prompt, options)
        assert poison not in row.tokens


def test_a_pass_that_fails_loses_its_rows_and_not_the_batch(monkeypatch):
    model, options = model_of("llama"), {"max_new_tokens": 20, "do_sample": False}
    batch = batch_of(model)
    lost = row_of(model, [4, 5], **options)
    batch.add(lost)
    batch.step()

    def fails(*_args, **_options):
        raise MemoryError("out of memory")

    monkeypatch.setattr("medusa.decoding.static.accept", fails)
    batch.step()
    assert (lost.finish_reason, str(lost.error)) == ("error", "out of memory")
    monkeypatch.undo()
    kept = [row_of(model, [token, 5], **options) for token in (4, 6)]
    answer_all(batch, kept)
    for row in kept:
        assert row.tokens == alone(model, row.prompt, options)


def test_heads_that_guess_one_token_after_the_other_are_refused_by_name():
    base = tiny_model("llama")
    head = Eagle3Head(Eagle3Config.of_base(base, fused_layers=(1, 2)))
    with pytest.raises(ValueError, match=r"step='static' cannot work with heads that guess one token after"):
        MedusaModel(base, head, CandidateTree.chain(3), step="static").continuous_batch()


# ------------------------------------------------------------------ settings of rows


def processors_of(**options) -> LogitsProcessorList:
    """The processors that ``transformers`` makes of the options of a call."""
    return model_of("llama").request(torch.tensor([[5]]), max_new_tokens=4, **options).processors


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
        {"do_sample": True, "top_k": 0, "min_p": 0.1},
    ],
)
def test_what_transformers_makes_of_usual_options_is_numbers(options):
    numbers = row_numbers(processors_of(**options))
    assert numbers is not None
    assert len(Program.of([numbers], samples=True).used) == len(processors_of(**options))


def test_processors_that_are_no_numbers_or_in_another_order_are_not():
    for options in ON_THE_HOST[:2]:
        assert row_numbers(processors_of(do_sample=False, **options)) is None
    warped = processors_of(do_sample=True, temperature=0.7, top_k=5)
    assert row_numbers(warped) is not None
    assert row_numbers(LogitsProcessorList([*warped, TemperatureLogitsWarper(0.5)])) is None


@pytest.mark.parametrize("options", [*ON_THE_HOST[:3], {"max_time": 9.0}, {"prediction": [5, 6]}])
def test_a_request_that_asks_the_host_is_in_no_static_step(options):
    model = model_of("llama", step="general")
    assert can_be_shared(model.request(torch.tensor([[5]]), max_new_tokens=4, do_sample=False))
    assert not can_be_shared(model.request(torch.tensor([[5]]), max_new_tokens=4, do_sample=False, **options))


def test_one_program_serves_many_numbers():
    few, many = ([1.0, 0.7, top_k, -1.0, 0.0] for top_k in (3.0, 60.0))
    neutral = [1.0, 1.0, math.inf, -1.0, 0.0]
    assert Program.of([few, neutral], True) == Program.of([neutral, many], True) == Program(True, (1, 2), 64)
    assert Program.of([neutral], False) == Program()


# ------------------------------------------------------------------ memory


def filled_cache(num_rows: int, length: int):
    base = tiny_model("llama")
    cache = new_cache(base, num_rows)
    tokens = random_prompts(num_rows, length)
    prefill(base, tokens, torch.full((num_rows,), length), cache)
    return cache


@torch.no_grad()
def test_memory_keeps_its_place_until_it_must_grow_and_keeps_what_is_committed():
    memory, cache = CacheMemory(), filled_cache(2, 9)
    before = [entries[:, :, :9].clone() for layer in cache.tree_layers for entries in layer.entries]

    def held() -> list[torch.Tensor]:
        return [entries[:, :, :9] for layer in cache.tree_layers for entries in layer.entries]

    memory.hold(cache, 4, 256, 4096)
    places = [tensor.data_ptr() for tensor in memory.tensors]
    assert all(map(torch.equal, held(), before)) and (memory.num_rows, memory.num_slots) == (4, 256)
    memory.hold(cache, 2, 256, 4096)
    cache.trim()  # a copy elsewhere
    assert not memory.holds(cache)
    memory.hold(cache, 4, 256, 4096)
    assert [tensor.data_ptr() for tensor in memory.tensors] == places and memory.holds(cache)
    memory.hold(cache, 2, 512, 4096)
    assert (memory.num_rows, memory.num_slots) == (4, 512)
    memory.hold(cache, 2, 1024, 2048)
    assert (memory.num_rows, memory.num_slots) == (2, 1024), "no more than may be taken"
    assert all(map(torch.equal, held(), before))


@torch.no_grad()
def test_slots_without_a_committed_token_are_0_when_other_rows_move_in():
    memory = CacheMemory()
    first = filled_cache(2, 30)
    memory.hold(first, 2, 256, 4096)
    for tensor in memory.tensors:
        tensor.fill_(float("nan"))
    second = filled_cache(1, 5)
    memory.hold(second, 1, 256, 4096)
    assert not any(tensor.isnan().any() for tensor in memory.tensors)
