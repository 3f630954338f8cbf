"""A real chat model says with heads, token for token, what transformers' own generate says without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import BUSHY, OracleDrafter

from medusa import CandidateTree, HeadsCheckpoint, HeadsConfig, MedusaHeads, MedusaModel
from medusa.base.causal_lm import hidden_size, vocab_size
from medusa.drafters.draft_model import early_exit
from medusa.drafters.registry import DrafterFactory, DrafterSettings
from medusa.heads.eagle3 import Eagle3Config, Eagle3Head
from medusa.prompts import encode_messages, padded_batch, read_prompts

PROMPTS = [prompt.messages[-1]["content"] for prompt in read_prompts(Path("demo_prompts"), 20)]


def encoded(tokenizer, *prompts: str) -> dict[str, torch.Tensor]:
    rows = [encode_messages(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    return padded_batch(rows, tokenizer.pad_token_id)


def assert_identical(base, tokenizer, prompt: str, max_new_tokens: int, drafts: str) -> None:
    """Greedy output with a drafter that is often right, or with untrained heads, is transformers' own."""
    ids, options = encoded(tokenizer, prompt), {"max_new_tokens": max_new_tokens, "do_sample": False}
    reference = base.generate(**ids, **options)
    heads = MedusaHeads(HeadsConfig(hidden_size(base), vocab_size(base), num_heads=4))
    model = MedusaModel(base, heads, BUSHY, tokenizer)
    if drafts == "often right":
        options["drafter"] = OracleDrafter(reference.tolist(), BUSHY, hit_rate=0.7)
    drafted = model.generate(**ids, **options, return_dict_in_generate=True)
    assert drafted.sequences.tolist() == reference.tolist()
    assert drafts != "often right" or drafted.statistics.tokens_per_step > 1.3


@pytest.mark.parametrize(("prompt", "drafts"), [(PROMPTS[0], "untrained heads"), (PROMPTS[1], "often right")])
def test_two_answers_of_the_real_model_are_token_identical(real_base, real_tokenizer, prompt, drafts):
    assert_identical(real_base, real_tokenizer, prompt, max_new_tokens=16, drafts=drafts)


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


DRAFTERS = ("heads", "eagle3", "draft-model", "early-exit", "low-precision", "suffix", "heads+suffix")


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
    ids = encoded(real_tokenizer, *PROMPTS[:num_rows])
    options = {"max_new_tokens": 24, "do_sample": temperature > 0}
    if temperature:
        options |= {"temperature": temperature, "seed": 3}
        expected = model.generate(**ids, **options, tree=CandidateTree.chain(0))
    else:
        expected = real_base.generate(**ids, **options)
    drafted = model.generate(
        **ids, **options, drafter=DrafterFactory(model, settings).make(name), return_dict_in_generate=True
    )
    assert drafted.sequences.tolist() == expected.tolist()
    assert drafted.statistics.num_steps > 0
