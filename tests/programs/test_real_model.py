"""A real chat model says with heads, token for token, what transformers' own generate says without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import OracleDrafter

from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.causal_lm import hidden_size, vocab_size
from medusa.drafters.registry import Drafters, DrafterSettings
from medusa.drafters.self_draft import early_exit
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head

TREE = CandidateTree.from_paths(
    [
        *((rank,) for rank in range(6)),
        *((0, rank) for rank in range(4)),
        *((1, rank) for rank in range(2)),
        (2, 0),
        *((0, 0, rank) for rank in range(3)),
        (0, 1, 0),
        (1, 0, 0),
        *((0, 0, 0, rank) for rank in range(2)),
    ]
)
PROMPTS = [
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a lighthouse in a storm.",
    "List five things to pack for a weekend in the mountains.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the largest of three numbers.",
    "Translate into French: Where is the nearest train station?",
    "A shop sells pens at 3 euros each. What do 17 pens cost? Show the steps.",
    "Give me a recipe for pancakes with what is usually in a kitchen.",
    "Summarise the story of Little Red Riding Hood in five sentences.",
    "Who was Marie Curie, and what is she known for?",
    "Write an e-mail to my landlord: the heating has been cold since Monday.",
    "Name three advantages and three disadvantages of working from home.",
    "How does a bicycle stay upright while it moves?",
    "Invent a name and a slogan for a bakery that opens at midnight.",
    "What should I look at when I buy a used car?",
    "Continue: The old clock struck thirteen, and nobody in the house",
    "Explain recursion to a child of ten.",
    "Which planets of the solar system have rings?",
    "Turn this into a polite request: Give me the report now.",
    "Make a table of the seasons with one typical colour each.",
]


def encoded(tokenizer, prompt: str) -> dict[str, torch.Tensor]:
    messages = [{"role": "user", "content": prompt}]
    return dict(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    )


def assert_identical(base, tokenizer, prompt: str, max_new_tokens: int, drafts: str) -> None:
    """Greedy output with a drafter that is often right, or with untrained heads, is transformers' own."""
    ids, options = encoded(tokenizer, prompt), {"max_new_tokens": max_new_tokens, "do_sample": False}
    reference = base.generate(**ids, **options)
    heads = MedusaHeads(HeadsConfig(hidden_size(base), vocab_size(base), num_heads=4))
    model = MedusaModel(base, heads, TREE, tokenizer)
    if drafts == "often right":
        options["drafter"] = OracleDrafter(reference.tolist(), TREE, hit_rate=0.7)
    drafted = model.generate(**ids, **options, return_dict_in_generate=True)
    assert drafted.sequences.tolist() == reference.tolist()
    assert drafts != "often right" or drafted.statistics.tokens_per_step > 1.3


@pytest.mark.parametrize(("prompt", "drafts"), [(PROMPTS[0], "untrained heads"), (PROMPTS[1], "often right")])
def test_two_answers_of_the_real_model_are_token_identical(real_base, real_tokenizer, prompt, drafts):
    assert_identical(real_base, real_tokenizer, prompt, max_new_tokens=32, drafts=drafts)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """This model, unlike the tiny ones, is large enough to share; worth it where nothing else runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("prompt", PROMPTS)
def test_twenty_long_answers_of_the_real_model_are_token_identical(real_base, real_tokenizer, prompt):
    assert_identical(real_base, real_tokenizer, prompt, max_new_tokens=128, drafts="often right")


DRAFTERS = (
    "heads",
    "eagle3",
    "draft-model",
    "early-exit",
    "low-precision",
    "suffix",
    "heads+suffix",
)


def padded_batch(tokenizer, prompts: list[str]) -> dict[str, torch.Tensor]:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    return dict(tokenizer.apply_chat_template(chats, tokenizer_kwargs={"padding_side": "left"}, **options))


@pytest.fixture(scope="module")
def equipped(real_base, real_tokenizer) -> tuple[MedusaModel, DrafterSettings]:
    """The model with heads, and what the other drafters need; nothing is trained, since nothing need be."""
    sizes = hidden_size(real_base), vocab_size(real_base)
    torch.manual_seed(0)
    heads = MedusaHeads(
        HeadsConfig(*sizes, num_heads=3, unembedding="token_map", token_map_size=4096), range(4096)
    )
    eagle3 = Eagle3Head(Eagle3Config.of_base(real_base, intermediate_size=576))
    settings = DrafterSettings(
        draft_length=3,
        draft_model=early_exit(real_base, 10),
        exit_layer=20,
        eagle3=HeadsCheckpoint(eagle3, "the same base"),
    )
    tree = CandidateTree.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
    return MedusaModel(real_base, heads, tree, real_tokenizer), settings


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_says_what_the_real_model_says(
    equipped, real_base, real_tokenizer, name, temperature, num_rows
):
    """Greedy against transformers' own generate, sampled against plain decoding with the same seed."""
    model, settings = equipped
    ids = padded_batch(real_tokenizer, [PROMPTS[4], PROMPTS[0], PROMPTS[18]][:num_rows])
    options = {"max_new_tokens": 24, "do_sample": temperature > 0}
    if temperature:
        options |= {"temperature": temperature, "seed": 3}
        expected = model.generate(**ids, **options, tree=CandidateTree.chain(0))
    else:
        expected = real_base.generate(**ids, **options)
    drafted = model.generate(
        **ids, **options, drafter=Drafters(model, settings).make(name), return_dict_in_generate=True
    )
    assert drafted.sequences.tolist() == expected.tolist()
    assert drafted.statistics.num_steps > 0
