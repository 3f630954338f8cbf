"""A request stays where every token is computed as transformers' own generate computes it, or is refused."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    FACTORS,
    GROUPED,
    SWITCH,
    OracleDrafter,
    assert_exact,
    left_padded,
    longrope_model,
    random_prompts,
)
from test_causal_lm import tree_of
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from medusa import MedusaModel
from medusa.base.architecture_check import check_tree_verification
from medusa.base.passes import new_cache, prefill
from medusa.base.profile import common_context, context_length, longrope_threshold, unmasked_window


@pytest.fixture(scope="module")
def longrope():
    return longrope_model()


def assert_decodes_as_transformers(base, prompt, **options):
    reference = base.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
    trees = tree_of(12, seed=3), tree_of(40, seed=4)
    oracles = (OracleDrafter(reference.tolist(), tree, hit_rate=0.8) for tree in trees)
    hows = ({"drafter": each} for each in oracles)
    assert_exact(MedusaModel(base), prompt, *hows, expected=reference, **options)


@pytest.mark.parametrize(
    ("prompt_length", "max_new_tokens"), [(5, SWITCH - 4), (SWITCH, 1), (SWITCH + 1, 20), (70, 25)]
)
def test_longrope_decodes_as_transformers_does_on_either_side_of_its_switch(
    longrope, prompt_length, max_new_tokens
):
    prompt = random_prompts(1, prompt_length)
    assert_decodes_as_transformers(longrope, prompt, max_new_tokens=max_new_tokens, do_sample=False)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 7, SWITCH, 512])
def test_a_long_prompt_is_read_with_the_long_factors_in_any_chunks(longrope, chunk):
    prompts, lengths = random_prompts(2, 60), [60, SWITCH + 1]
    _, logits = prefill(longrope, prompts, torch.tensor(lengths), new_cache(longrope, 2), chunk=chunk)
    for row, length in enumerate(lengths):
        own = longrope(prompts[row : row + 1, :length]).logits[0, -1]
        torch.testing.assert_close(logits[row], own, rtol=1e-4, atol=1e-4)


def test_static_steps_keep_the_short_factors_too(longrope):
    prompt, options = random_prompts(1, 9), {"max_new_tokens": SWITCH - 8, "do_sample": False}
    reference = longrope.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
    assert MedusaModel(longrope).generate(prompt, **options, step="static").tolist() == reference.tolist()


def test_requests_that_cross_the_switch_and_no_others_are_refused(longrope):
    model = MedusaModel(longrope)
    for length, fitting in ((SWITCH, 1), (SWITCH - 7, 8), (1, SWITCH)):
        model.generate(random_prompts(1, length), max_new_tokens=fitting)
        message = rf"must stay within {SWITCH} positions, .*\(LongRoPE\).* max_new_tokens to {fitting} or"
        with pytest.raises(ValueError, match=message):
            model.generate(random_prompts(1, length), max_new_tokens=fitting + 1)
    with pytest.raises(ValueError, match=r"longer than 24 tokens, or none.* from 20 to 30; decode them in"):
        model.generate(**left_padded(random_prompts(2, 30), [30, 20]), max_new_tokens=2)
    assert common_context(longrope) == SWITCH


def test_the_switch_is_found_where_layer_types_have_settings_of_their_own():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40, **FACTORS}
    config = Gemma3TextConfig(
        **GROUPED,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": rope,
        },
    )
    assert longrope_threshold(Gemma3ForCausalLM(config)) == 40
    assert longrope_threshold(LlamaForCausalLM(LlamaConfig(**GROUPED))) is None


def test_yarn_stretches_the_context_of_a_configuration_that_names_the_original():
    """As the card of Qwen2.5 says: rope_scaling is added, and max_position_embeddings left as it is."""
    torch.manual_seed(2)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": SWITCH}
    sizes = {**GROUPED, "max_position_embeddings": SWITCH}
    base = Qwen2ForCausalLM(Qwen2Config(**sizes, rope_scaling=yarn)).eval()
    assert context_length(base) == 4 * SWITCH
    prompt = random_prompts(1, SWITCH + 5)
    assert_decodes_as_transformers(base, prompt, max_new_tokens=20, do_sample=False)
    with pytest.raises(ValueError, match=rf"must fit the base model's context of {4 * SWITCH} positions"):
        MedusaModel(base).generate(prompt, max_new_tokens=4 * SWITCH)
    sizes["max_position_embeddings"] = 5 * SWITCH
    assert context_length(Qwen2ForCausalLM(Qwen2Config(**sizes, rope_scaling=yarn))) == 5 * SWITCH


def test_dynamic_scaling_stays_within_the_context_where_it_scales_nothing():
    torch.manual_seed(2)
    config = LlamaConfig(
        **{**GROUPED, "max_position_embeddings": SWITCH},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )
    base = LlamaForCausalLM(config).eval()
    assert_decodes_as_transformers(base, random_prompts(1, 9), max_new_tokens=SWITCH - 9, do_sample=False)
    with pytest.raises(ValueError, match="must fit the base model's context of 24 positions"):
        MedusaModel(base).generate(random_prompts(1, 9), max_new_tokens=SWITCH - 8)


WINDOW = 20
UNMASKED = {
    "moshi": lambda: MoshiForCausalLM(MoshiConfig(**GROUPED, ffn_dim=48, sliding_window=WINDOW)),
    "llama with a sliding_window": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, sliding_window=WINDOW)),
}


@pytest.mark.parametrize("kind", UNMASKED)
def test_a_window_that_the_models_code_ignores_bounds_the_request_and_masks_nothing(kind):
    torch.manual_seed(1)
    base = UNMASKED[kind]().eval()
    assert unmasked_window(base) == WINDOW
    check_tree_verification(base)
    assert_decodes_as_transformers(base, random_prompts(1, 9), max_new_tokens=WINDOW - 8, do_sample=False)
    with pytest.raises(ValueError, match=r"must fit sliding_window=20 of \w+: its code attends to all"):
        MedusaModel(base).generate(random_prompts(1, 9), max_new_tokens=WINDOW - 7)
