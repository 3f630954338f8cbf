"""Guessing pauses where it does not pay, goes on where it does, and never changes the text."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    RandomDrafting,
    counting_model,
    decode,
    random_heads,
    random_prompts,
    tiny_model,
)

import medusa.decoding.batch
import medusa.decoding.static
from medusa import CandidateTree, DecodingStatistics, HeadsConfig, MedusaHeads, MedusaModel
from medusa.decoding.adaptive import (
    FIRST_INTERVAL,
    LAST_INTERVAL,
    MAX_DEBT,
    AdaptiveDrafting,
    DraftCost,
    DraftCosts,
)
from medusa.decoding.executor import Executor
from medusa.decoding.runners import Runner
from medusa.decoding.state import DecodeRequest
from medusa.decoding.statistics import PhaseClock
from medusa.drafters.autoregressive import AutoregressiveDrafter
from medusa.drafters.draft_model import (
    DraftModelDrafter,
    LowPrecisionDrafter,
    SelfDrafter,
    early_exit,
    low_precision,
)
from medusa.drafters.dynamic import DynamicHeadsDrafter
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.protocol import PlainDrafter
from medusa.drafters.suffix import SuffixDrafter
from medusa.drafters.union import UnionDrafter
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head

CHAIN = CandidateTree.chain(3)
Tokens = Callable[[int], int]
"""What a drafted step emits where the answer has so many tokens."""


class Answer:
    """One answer on a clock of its own: a plain step takes 1, a drafted one ``price``, give or take noise."""

    def __init__(self, tokens: Tokens, length: int, price: float, cost: DraftCost, noise: float = 0.0):
        self.seconds, self.is_drafted = 0.0, list[bool]()
        self.length, num_tokens = length, 0
        clock, adaptive = random.Random(length), AdaptiveDrafting(cost)
        while num_tokens < length:
            drafts = adaptive.drafts
            new = tokens(num_tokens) if drafts else 1
            seconds = (price if drafts else 1.0) * clock.lognormvariate(0, noise)
            adaptive.record(new, seconds)
            self.seconds, num_tokens = self.seconds + seconds, num_tokens + new
            self.is_drafted.append(drafts)

    @property
    def speed(self) -> float:
        """Times that of plain decoding."""
        return self.length / self.seconds


def known(price: float) -> DraftCost:
    """What a model knows after some requests."""
    cost = DraftCost()
    for _ in range(5):
        cost.learn(price, 1.0)
    return cost


@pytest.mark.parametrize("price", [1.15, 1.5])
@pytest.mark.parametrize(("length", "least"), [(128, 0.97), (1000, 0.985), (10_000, 0.993)])
def test_guesses_that_are_always_wrong_cost_little(price, length, least):
    assert Answer(lambda _: 1, length, price, known(price)).speed > least


def test_guesses_that_pay_lose_next_to_nothing():
    rolls = random.Random(3)
    answer = Answer(lambda _: rolls.choice([1, 2, 3, 4]), 2000, 1.2, known(1.2), noise=0.1)
    assert answer.is_drafted.count(False) < 0.04 * len(answer.is_drafted)
    assert answer.speed > 0.97 * 2.5 / 1.2


def test_a_first_request_learns_what_a_draft_costs_and_the_next_know():
    cost = DraftCost()
    assert cost.plain_steps() is None
    first = Answer(lambda _: 3, 60, 1.4, cost)
    assert cost.plain_steps() == pytest.approx(1.4)
    assert first.is_drafted[:8] == [True, True, False, True, False, True, False, True]
    assert all(Answer(lambda _: 3, 60, 1.4, cost).is_drafted)
    assert all(Answer(lambda _: 1, 60, 0.9, known(0.9)).is_drafted[:20]), (
        "it costs nothing, so it loses nothing"
    )


def test_a_pause_ends_soon_after_the_text_has_become_easy():
    answer = Answer(lambda at: 1 if at < 500 else 4, 1500, 1.5, known(1.5))
    resumed = next(
        at for at in range(len(answer.is_drafted)) if all(answer.is_drafted[at : at + 10])
    )  # steps before it give one token each
    assert 500 <= resumed < 500 + LAST_INTERVAL
    hard = Answer(lambda at: 4 if at < 500 else 1, 1500, 1.5, known(1.5)).is_drafted
    assert all(hard[:100])
    assert sum(hard[125:]) < 0.04 * len(hard[125:])


def test_probes_become_rarer_while_they_lose():
    drafted = Answer(lambda _: 1, 700, 1 + MAX_DEBT, known(1 + MAX_DEBT)).is_drafted
    at = [step for step, is_drafted in enumerate(drafted) if is_drafted]
    gaps = [later - earlier - 1 for earlier, later in pairwise(at)]
    assert gaps[:4] == [FIRST_INTERVAL * 2**n for n in range(4)]
    assert max(gaps) == LAST_INTERVAL


def draft_of(*probabilities: float) -> torch.Tensor:
    """What nodes are worth in a draft of one row, the root first."""
    return torch.tensor([[1.0, *probabilities]]).log()


def sized(cost, path_logprob: torch.Tensor, num_steps: int, seconds_of, tokens: float = 1.5) -> list[int]:
    """The nodes that steps verify of such drafts, timed by ``seconds_of`` their number, or None."""
    adaptive, found = AdaptiveDrafting(cost), list[int]()
    for _ in range(num_steps):
        if not adaptive.drafts:
            adaptive.record(1, seconds_of(None))
            continue
        found.append(adaptive.num_nodes(path_logprob, path_logprob.shape[1]))
        adaptive.record(tokens, seconds_of(found[-1]), num_nodes=found[-1])
    return found


@pytest.mark.parametrize(("node", "expected"), [(0.0, 5), (0.02, 4), (0.15, 3), (0.5, 1)])
def test_as_many_nodes_are_verified_as_pay(node, expected):
    cost, path_logprob, noise = DraftCost(), draft_of(0.5, 0.3, 0.1, 0.0), random.Random(1)

    def seconds(nodes: int | None) -> float:
        return (1.0 if nodes is None else 1.1 * (1 + node * (nodes - 1))) * noise.lognormvariate(0, 0.02)

    found = sized(cost, path_logprob, 400, seconds)
    assert cost.node == pytest.approx(node, abs=0.02)
    assert cost.plain_steps(3) == pytest.approx(1.1 * (1 + 2 * node), rel=0.03)
    late = found[-40:]
    assert sum(each == expected for each in late) >= len(late) - 4, late
    assert max(found[100:]) == 5, "a whole draft is verified now and then, to learn what nodes cost now"


def test_the_smallest_drafts_can_be_left_out_too():
    steep = sized(DraftCost(), draft_of(0.1), 100, lambda nodes: 1.0 if nodes is None else nodes, tokens=1.1)
    assert 1 in steep and steep[-1] == 1
    assert sized(DraftCost(), draft_of(), 20, lambda nodes: 1.0)[0] == 1


def test_a_batch_verifies_the_nodes_that_pay_on_average():
    cost = DraftCost()
    sized(cost, draft_of(0.5, 0.3), 60, lambda nodes: 1.0 if nodes is None else 1 + 0.2 * (nodes - 1))
    assert cost.min_accept_prob == pytest.approx(0.2 * 1.5 / 1.3, abs=0.05)
    cost.num_since_node = 0
    sure, unsure = draft_of(0.9, 0.8, 0.1), draft_of(0.2, 0.0, 0.0)
    assert verified(cost, sure) == 3
    assert verified(cost, sure, unsure) == 3
    assert verified(cost, sure, unsure, unsure, unsure) == 2
    assert verified(cost, unsure) == 1
    cost.node = 0.0
    assert verified(cost, *[unsure] * 40) == 4, (
        "nodes that cost nothing all pay, in as many rows as there are"
    )


def verified(cost: DraftCost, *rows: torch.Tensor, num_optional_nodes: int = 0) -> int:
    return AdaptiveDrafting(cost).num_nodes(torch.cat(rows), rows[0].shape[1] - num_optional_nodes)


def test_spare_nodes_are_verified_where_they_are_likely():
    cost = DraftCost()
    sized(cost, draft_of(0.5, 0.3), 60, lambda nodes: 1.0 if nodes is None else 1 + 0.05 * (nodes - 1))
    cost.num_since_node = 0
    assert verified(cost, draft_of(0.9, 0.8, 0.7, 0.4), num_optional_nodes=3) == 4
    assert verified(cost, draft_of(0.9, 0.4, 0.4, 0.4), num_optional_nodes=3) == 2
    assert verified(cost, draft_of(0.9, 0.4, 0.4, 0.4)) == 5


def test_what_a_node_costs_is_learnt_from_passes_of_a_bounded_size():
    deep = torch.cat([draft_of(*[0.5] * 16)] * 16)
    assert verified(DraftCost(), deep) == 1
    cost = DraftCost()
    cost.count(1.0, 2)
    assert verified(cost, deep) == 2
    assert verified(cost, deep[:1]) == 17


def test_a_step_that_also_compiled_teaches_nothing():
    cost = DraftCost()
    adaptive = AdaptiveDrafting(cost)
    for _ in range(20):
        adaptive.record(1, 100.0 if adaptive.drafts else None)
    assert cost.plain_steps() is None
    adaptive = AdaptiveDrafting(cost)
    for _ in range(20):
        adaptive.record(1, None if adaptive.drafts else 1.0)
    assert cost.plain_steps() is None


def test_the_first_draft_of_a_request_has_a_prompt_to_read_and_is_not_timed():
    cost = DraftCost()
    for _ in range(9):
        adaptive = AdaptiveDrafting(cost)
        for seconds in (50.0, 1.5):
            adaptive.record(3, seconds)
        if not adaptive.drafts:
            adaptive.record(1, 1.0)
    assert cost.plain_steps() == 1.5


def test_steps_that_come_several_at_a_time_are_priced_one_by_one():
    cost = DraftCost()
    adaptive = AdaptiveDrafting(cost)
    for _ in range(12):
        adaptive.record(8.0, 12.0 if adaptive.drafts else 8.0, num_steps=8)
    assert cost.plain_steps() == 1.5
    assert not adaptive.drafts, "eight steps without a hit lose more than the stake"


def test_a_match_that_pays_ends_a_pause_and_a_wrong_one_costs_once_between_two_probes():
    drafter, fallback = SuffixDrafter(), SuffixDrafter()
    adaptive = AdaptiveDrafting(known(2.0), fallback)
    assert adaptive.select_drafter(drafter) is drafter
    adaptive.record(1, 2.0)
    assert adaptive.select_drafter(drafter) is fallback
    adaptive.record(1, 2.0, used_fallback=True)
    for _ in range(FIRST_INTERVAL):
        assert adaptive.select_drafter(drafter).max_depth == 0
        adaptive.record(1, 1.0)
    adaptive.record(1, 2.0)
    assert adaptive.select_drafter(drafter) is fallback
    adaptive.record(9, 2.0, used_fallback=True)
    assert adaptive.select_drafter(drafter) is drafter


@pytest.mark.parametrize(("step", "copies"), [("general", True), ("compiled", True), ("static", False)])
def test_a_pause_copies_where_drafts_may_have_any_shape(step, copies):
    adaptive = DraftCosts().adaptive(SuffixDrafter(), True, step, 1)
    assert isinstance(adaptive.fallback, SuffixDrafter) == copies


# ------------------------------------------------------------------ in the loops


def eagle3(base) -> AutoregressiveDrafter:
    torch.manual_seed(3)
    head = Eagle3Head(Eagle3Config.of_base(base, fused_layers=(1, 2), max_depth=3)).eval()
    return AutoregressiveDrafter(head, base, CHAIN)


def union(base) -> UnionDrafter:
    dynamic = DynamicHeadsDrafter(random_heads(), base.get_output_embeddings(), CHAIN)
    return UnionDrafter([eagle3(base), dynamic, SuffixDrafter(min_match=1)])


DRAFTERS = {
    "heads": lambda base: HeadsDrafter(random_heads(), base.get_output_embeddings(), CHAIN),
    "suffix": lambda base: SuffixDrafter(min_match=1),
    "eagle3": eagle3,
    "draft model": lambda base: DraftModelDrafter(tiny_model("llama"), VOCAB_SIZE, CHAIN),
    "early exit": lambda base: SelfDrafter(early_exit(base, 1), CHAIN),
    "low precision": lambda base: LowPrecisionDrafter(low_precision(base), CHAIN),
    "union": union,
}


def request_of(prompts: torch.Tensor, max_new_tokens: int, **more) -> DecodeRequest:
    lengths = torch.full((len(prompts),), prompts.shape[1])
    return DecodeRequest(tokens=prompts, lengths=lengths, max_new_tokens=max_new_tokens, **more)


def drafts_by_length(base, drafter, request, adaptive) -> tuple[list[int], dict[int, list[int]]]:
    """The text, and [length of the text] = what was drafted after it."""
    drafts, draft = {}, drafter.draft

    def noting(context):
        made = draft(context)
        drafts[int(context.lengths)] = made.tokens[0].tolist()
        return made

    drafter.draft = noting
    steps = decode(base, drafter, request, None, adaptive)
    return [token for step in steps for token in step.tokens[0]], drafts


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_was_left_out_for_some_steps_drafts_as_if_it_had_been_asked(name):
    base, request = tiny_model("qwen3"), request_of(random_prompts(1, 9), 40)
    text, always = drafts_by_length(base, DRAFTERS[name](base), request, None)
    for seed in range(2):
        paused_text, drafts = drafts_by_length(base, DRAFTERS[name](base), request, RandomDrafting(seed))
        assert paused_text == text
        both = always.keys() & drafts.keys()
        assert len(both) > 1
        assert {at: drafts[at] for at in both} == {at: always[at] for at in both}


def rows_of(steps) -> list[list[int]]:
    """The tokens of each row."""
    return [list(chain.from_iterable(row)) for row in zip(*(step.tokens for step in steps), strict=True)]


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("seeds", [None, torch.tensor([3, 4, 5])])
@pytest.mark.parametrize("layers", [(), (1,)], ids=["last state", "a layer too"])
def test_static_steps_that_pause_give_the_text_and_count_the_pauses(interval, seeds, layers):
    base, heads = tiny_model("llama"), random_heads(fused_layers=layers)
    drafter = HeadsDrafter(heads, base.get_output_embeddings(), CHAIN)
    request = request_of(random_prompts(3, 7), 30, seeds=seeds)
    expected = rows_of(decode(base, drafter, request))
    counted = DecodingStatistics()
    steps = decode(
        Executor(base), drafter, request, counted, RandomDrafting(2 * interval), "static", interval
    )
    assert rows_of(steps) == expected
    assert 0 < counted.num_paused < counted.num_steps
    assert counted.num_tokens == 3 * 30


def test_steps_behind_the_end_of_the_text_took_time_too(monkeypatch):
    base, request = tiny_model("llama"), request_of(random_prompts(1, 7), 30)
    text = rows_of(decode(base, PlainDrafter(), request))[0]
    ending = replace(request, eos_ids=frozenset({text[3]}))
    adaptive, counts = RandomDrafting(0), []
    monkeypatch.setattr(adaptive, "record", lambda tokens, seconds, num_steps, **_: counts.append(num_steps))
    steps = list(decode(Executor(base), PlainDrafter(), ending, None, adaptive, "static", 8))
    assert len(steps) == 1 + text.index(text[3]) < 8
    assert counts == [8]


class FakeClock:
    """Stands still but for what :meth:`taking` says."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    def taking(self, seconds: float, call: Callable) -> Callable:
        def slow(*args, **kwargs):
            self.time += seconds
            return call(*args, **kwargs)

        return slow


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    """A pass of the base takes a second, and so does a draft of heads."""
    clock = FakeClock()
    monkeypatch.setattr(medusa.decoding.batch, "PhaseClock", partial(PhaseClock, now=clock))
    passes = ((Runner, "verify"), (medusa.decoding.static, "_commit"))
    drafts = ((HeadsDrafter, "_ranked"), (DynamicHeadsDrafter, "_ranked"))
    for owner, name in (*passes, *drafts):
        monkeypatch.setattr(owner, name, clock.taking(1.0, getattr(owner, name)))
    return clock


def counting(is_right: bool, dtype: torch.dtype = torch.float32, size: int = 160) -> MedusaModel:
    """A base that counts, and heads whose head d adds d + 1, or goes back."""
    heads = MedusaHeads(HeadsConfig(size, size, num_heads=3, unembedding="full"))
    for depth, rows in enumerate(heads.unembed, start=1):
        rows.data = torch.eye(size).roll(1 + depth if is_right else -1, dims=0)
    return MedusaModel(counting_model(size).to(dtype), heads.to(dtype), CHAIN)


def counted(model: MedusaModel, num_tokens: int = 60, **options) -> DecodingStatistics:
    """How the model counts on from 5."""
    options = {"max_new_tokens": num_tokens, "do_sample": False, "return_dict_in_generate": True, **options}
    out = model.generate(torch.tensor([[5]]), **options)
    assert out.sequences[0].tolist() == list(range(5, 6 + num_tokens))
    return out.statistics


@pytest.mark.parametrize("step", ["general", "static"])
def test_heads_that_are_always_wrong_pause_and_heads_that_are_right_do_not(clock, step):
    wrong = counting(is_right=False)
    statistics = counted(wrong, 150, step=step)
    assert statistics.num_steps == 149 and statistics.num_paused > 130
    assert statistics.tokens_per_step == 1.0 and statistics.acceptance_rate == [0.0] * 3
    assert statistics.decode_seconds < 1.12 * 149, "the first request learns what a draft costs"
    assert counted(wrong, 150, step=step).decode_seconds < 1.04 * 149
    right = counting(is_right=True)
    statistics = counted(right, step=step)
    assert statistics.num_paused == 3, "plain steps that were taken to be timed"
    assert statistics.acceptance_rate[0] == 1.0
    assert counted(right, step=step).num_paused == 0


@pytest.mark.parametrize(
    "options",
    [{"tree": CHAIN}, {"drafter": "dynamic-heads+suffix"}, {"drafter": "heads", "step": "static"}],
    ids=["tree", "drafter", "static drafter"],
)
def test_what_the_caller_names_is_asked_at_every_step(clock, options):
    assert counted(counting(is_right=False), **options).num_paused == 0


@pytest.mark.parametrize("options", [{"acceptance": "typical"}, {"acceptance": "block", "do_sample": True}])
def test_nothing_pauses_where_drafts_decide_the_text(clock, options):
    model = counting(is_right=False)
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, **options}
    assert model.generate(torch.tensor([[5]]), **options).statistics.num_paused == 0


def test_a_pause_goes_on_with_what_followed_the_same_words(clock):
    """A base that counts in a circle, and heads that are always wrong: after a round the text repeats."""
    model = counting(is_right=False, size=40)
    options = {"max_new_tokens": 120, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(torch.tensor([[5]]), **options)
    assert out.sequences[0].tolist() == [(5 + i) % 40 for i in range(121)]
    assert out.statistics.num_passes < 40 + 80 / 3
    assert 20 < out.statistics.num_paused < 45


def test_nothing_pauses_in_a_precision_where_plain_steps_round_differently(clock):
    assert counted(counting(is_right=False, dtype=torch.bfloat16)).num_paused == 0


def test_a_batch_pauses_as_a_whole_and_counts_every_row(clock):
    model = counting(is_right=False)
    options = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    statistics = model.generate(torch.tensor([[5], [9], [30]]), **options).statistics
    assert statistics.num_passes == 59 and statistics.num_steps == 3 * 59
    assert statistics.num_paused > 3 * 42 and statistics.num_paused % 3 == 0
