"""A model on which a tree would change the text is refused, with the reason or with the numbers."""

from __future__ import annotations

import pytest
import torch
from conftest import ARCHITECTURES, GROUPED, SIZES, needs_newest, random_prompts, tiny_model
from stateful_models import DECODABLE, stateful_model, tiny_stateful_model
from test_causal_lm import OTHERS
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FlaubertConfig,
    FlaubertWithLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    ReformerConfig,
    ReformerModelWithLMHead,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    XLMConfig,
    XLMWithLMHeadModel,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from medusa import MedusaModel
from medusa.base.architecture_check import (
    TESTED_MODEL_TYPES,
    check_base,
    check_decodable,
    check_tree_verification,
    is_tested,
    worst_comparison,
)
from medusa.base.causal_lm import decoder_layers
from medusa.base.recurrent import MatrixState
from medusa.engine.weights.load import load_base

SMALL = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}


def with_a_rule_of_its_own():
    """A model whose first layer averages what it has read."""
    base = tiny_stateful_model("lfm2")

    class Average(nn.Module):
        def forward(self, hidden_states, cache, **kwargs):
            return cache.update_conv_state(hidden_states, 0).mean(dim=1, keepdim=True)

    base.model.layers[0].conv = Average()
    return base


REFUSED = {
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=61, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
        ),
        "T5ForConditionalGeneration is an encoder-decoder model; .* needs a decoder-only model",
    ),
    "a state in its modules": (
        lambda: tiny_stateful_model("recurrent_gemma"),
        "RecurrentGemmaForCausalLM keeps its recurrent state in its modules",
    ),
    "a state outside of the cache": (
        lambda: RwkvForCausalLM(RwkvConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2)),
        "RwkvForCausalLM keeps its recurrent state outside of transformers' cache",
    ),
    "a state in cache layers of its own": (
        lambda: tiny_stateful_model("qwen4_exp_text"),
        "Qwen4ExpForCausalLM keeps its states in DynamicIndexedLayer, which medusa does not know",
    ),
    "a state that a convolution of its own changes": (
        lambda: with_a_rule_of_its_own(),
        r"Lfm2ForCausalLM has layers that change their state by a rule of their own \(Average\)",
    ),
    "no position_ids": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2)),
        r"BloomForCausalLM.forward takes no position_ids \(it derives positions from the order of tokens\)",
    ),
    "alibi": (
        lambda: FalconForCausalLM(
            FalconConfig(
                vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, alibi=True
            )
        ),
        r"FalconForCausalLM biases attention by distance \(alibi=True\)",
    ),
    "no head": (
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=1)).model,
        "LlamaModel has no LM head, so it is not a causal .* load it with AutoModelForCausalLM",
    ),
    "classifier": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**SMALL, num_hidden_layers=1)),
        "LlamaForSequenceClassification has no LM head",
    ),
    "no cache (OpenAI-GPT)": (
        lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=61, n_embd=16, n_layer=1, n_head=2)),
        "OpenAIGPTLMHeadModel.forward takes no cache of transformers, so it keeps no keys and values",
    ),
    "a cache of its own (XLM)": (
        lambda: XLMWithLMHeadModel(XLMConfig(vocab_size=61, emb_dim=16, n_layers=1, n_heads=2)),
        "XLMWithLMHeadModel.forward takes no cache of transformers",
    ),
    "a cache of its own (Flaubert)": (
        lambda: FlaubertWithLMHeadModel(FlaubertConfig(vocab_size=61, emb_dim=16, n_layers=1, n_heads=2)),
        "FlaubertWithLMHeadModel.forward takes no cache of transformers",
    ),
    "buckets": (
        lambda: ReformerModelWithLMHead(
            ReformerConfig(
                vocab_size=61, hidden_size=16, attn_layers=["local"], is_decoder=True, axial_pos_embds=False
            )
        ),
        "ReformerModelWithLMHead.forward takes no cache of transformers",
    ),
    "attends to images": (
        lambda: MllamaForCausalLM(
            MllamaTextConfig(
                **SMALL,
                num_hidden_layers=2,
                num_key_value_heads=2,
                cross_attention_layers=[1],
                pad_token_id=0,
            )
        ),
        r"MllamaForCausalLM has layers that attend to images \(cross_attention_layers\)",
    ),
    "attends both ways": (
        lambda: BertLMHeadModel(BertConfig(**SMALL, num_hidden_layers=1, initializer_range=0.3)),
        "BertLMHeadModel .* gives a tree of draft tokens other logits than the same tokens in a row",
    ),
    "not causal": (
        lambda: BertForMaskedLM(BertConfig(**SMALL, num_hidden_layers=1)),
        "BertForMaskedLM cannot generate: it is no causal language model",
    ),
}


NEWEST = "a state in cache layers of its own"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_newest if kind == NEWEST else ()) for kind in REFUSED]
)
def test_a_base_that_cannot_verify_a_tree_is_refused_with_the_reason(kind):
    make, message = REFUSED[kind]
    base = make()
    with pytest.raises(ValueError, match=message):
        check_base(base)
    with pytest.raises(ValueError, match=message):
        MedusaModel.from_pretrained(base)


def test_a_wrapper_around_a_model_is_refused_with_what_to_pass_instead():
    base = tiny_model("llama")
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**GROUPED)), peft.LoraConfig(r=2))
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
    tuned = [
        peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**GROUPED)), kind(**options))
        for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig, peft.PromptEncoderConfig)
    ]
    for wrapper in tuned:
        with pytest.raises(TypeError, match=r"get_base_model\(\) would lose it; train an adapter"):
            MedusaModel(wrapper)
    wrapped = {
        r"OptimizedModule; pass the model that was compiled \(its _orig_mod\)": torch.compile(base),
        r"PeftModel; pass its get_base_model\(\), which keeps the adapter": adapted,
        r"DataParallel; pass the model inside": torch.nn.DataParallel(base),
    }
    for message, wrapper in wrapped.items():
        for make in (MedusaModel, MedusaModel.from_pretrained):
            with pytest.raises(TypeError, match=f"base must be a path, .*, got {message}"):
                make(wrapper)


def test_an_attention_implementation_that_is_changed_later_is_refused_at_the_next_call():
    base = LlamaForCausalLM(LlamaConfig(**GROUPED)).eval()
    model = MedusaModel(base)
    base.set_attn_implementation("flex_attention")
    for step in ("general", "static"):
        with pytest.raises(ValueError, match=r"'flex_attention' takes no tree mask.* or call set_attn_impl"):
            model.generate(random_prompts(1, 5), max_new_tokens=4, step=step)
    base.set_attn_implementation("eager")
    model.generate(random_prompts(1, 5), max_new_tokens=4)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_an_attention_implementation_without_masks_is_refused(attention, monkeypatch):
    base = tiny_model("llama")
    check_decodable(base)
    monkeypatch.setattr(base.config, "_attn_implementation", attention)
    message = f"'{attention}' takes no tree mask; load LlamaForCausalLM with attn_implementation='sdpa'"
    with pytest.raises(ValueError, match=message):
        MedusaModel(base)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_that_is_claimed_is_let_through(architecture):
    check_decodable(tiny_model(architecture))


TESTED = {**ARCHITECTURES, **OTHERS}


@pytest.mark.parametrize("kind", TESTED)
def test_the_trial_finds_no_fault_in_an_architecture_that_is_tested(kind):
    torch.manual_seed(1)
    base = TESTED[kind]().eval()
    assert base.config.model_type in TESTED_MODEL_TYPES and is_tested(base)
    check_tree_verification(base)


@pytest.mark.parametrize("model_type", DECODABLE)
def test_the_trial_finds_no_fault_in_a_type_that_keeps_a_state(model_type):
    assert is_tested(stateful_model(model_type))
    check_tree_verification(stateful_model(model_type))


def test_the_trial_notices_a_state_that_keeps_what_was_rejected(monkeypatch):
    monkeypatch.setattr(MatrixState, "commit", lambda state, kept, known: None)
    with pytest.raises(ValueError, match="gives a tree of draft tokens other logits than the same tokens"):
        check_tree_verification(stateful_model("bamba"))


@needs_newest
def test_every_type_that_is_called_tested_is_tested():
    types = {make().config.model_type for make in TESTED.values()}
    assert types | set(DECODABLE) == TESTED_MODEL_TYPES


def vision(**text):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {"vision_config": {**sizes, "image_size": 8, "patch_size": 4}, "text_config": {**GROUPED, **text}}


def test_a_prefix_that_attends_in_both_directions_is_found():
    torch.manual_seed(1)
    base = PaliGemmaForConditionalGeneration(
        PaliGemmaConfig(**vision(model_type="gemma"), image_token_id=60, projection_dim=32)
    ).eval()
    with pytest.raises(ValueError, match=r"'paligemma'.* gives a tree of draft tokens other logits than"):
        MedusaModel(base)


class IgnoresPositions(LlamaForCausalLM):
    """Code from elsewhere that takes positions from the order of tokens."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


class ForgetsItsWindow(LlamaModel):
    """Code from elsewhere that ignores the window of its configuration."""


def forgetful():
    base = LlamaForCausalLM(LlamaConfig(**GROUPED, sliding_window=4096))
    base.model = ForgetsItsWindow(base.config)
    return base


FAULTY = {"positions": lambda: IgnoresPositions(LlamaConfig(**GROUPED)), "window": forgetful}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FAULTY)
def test_the_trial_says_where_and_how_far_the_logits_differ_and_leaves_the_model_as_it_was(kind, dtype):
    torch.manual_seed(1)
    base = FAULTY[kind]().to(dtype).train()
    window = getattr(base.config, "sliding_window", None)
    worst = worst_comparison(base)
    assert not worst.agrees and worst.difference > 3 * worst.tolerance
    assert base.training and getattr(base.config, "sliding_window", None) == window
    with pytest.raises(ValueError, match=r"at (tree node|the \w+ token).* they differ by \d.*, and rounding"):
        check_base(base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rounding_alone_is_no_fault(architecture, dtype):
    torch.manual_seed(7)
    check_tree_verification(ARCHITECTURES[architecture]().to(dtype).eval())


def test_a_model_of_few_positions_is_tried_within_them():
    check_tree_verification(LlamaForCausalLM(LlamaConfig(**{**GROUPED, "max_position_embeddings": 9})).eval())


def test_the_layers_of_a_model_that_sees_are_those_of_its_text_model():
    base = LlavaForConditionalGeneration(LlavaConfig(**vision(), image_token_id=60)).eval()
    assert len(base.model.vision_tower.encoder.layers) == len(base.model.language_model.layers)
    assert decoder_layers(base) is base.model.language_model.layers


@pytest.mark.parametrize("name", DECODABLE)
def test_what_keeps_a_state_is_decodable_from_its_files_too(name, tmp_path):
    stateful_model(name).save_pretrained(tmp_path)
    check_decodable(load_base(tmp_path))
