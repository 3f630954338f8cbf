"""One pass over a tree gives each node what its path alone would give, on every architecture."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    SIZES,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    OracleDrafter,
    assert_exact,
    random_prompts,
    tiny_model,
)
from stateful_models import stateful_model
from torch import Tensor, nn
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)
from transformers.utils import generic

from medusa import CandidateTree, MedusaModel
from medusa.base.architecture_check import verification_error
from medusa.base.causal_lm import hidden_size, lm_head, vocab_size
from medusa.base.passes import (
    cache_argument,
    cache_of,
    hidden_states,
    layers_of,
    new_cache,
    prefill,
    takes_cache,
    verify,
)
from medusa.base.profile import context_length

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
LENGTHS = [3 * SLIDING_WINDOW, 5, SLIDING_WINDOW - 1, 1]


def tree_of(num_nodes: int, seed: int, max_width: int = 3) -> CandidateTree:
    """A random tree."""
    generator = torch.Generator().manual_seed(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < num_nodes:
        parent = paths[int(torch.randint(0, len(paths), (), generator=generator))]
        path = (*parent, int(torch.randint(0, max_width, (), generator=generator)))
        if path not in paths:
            paths.append(path)
    return CandidateTree.from_paths(paths)


def node_lineage(tree: CandidateTree, node: int) -> list[int]:
    return [tree.paths.index(tree.paths[node][:depth]) for depth in range(len(tree.paths[node]) + 1)]


def alone(base: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden states (T, D) and logits (T, V) of one sequence, computed by the model's own forward."""
    seen = []
    handle = base.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        logits = base(torch.tensor([tokens]), use_cache=False).logits
    finally:
        handle.remove()
    return seen[0][0], logits[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_every_node_gets_the_logits_of_its_path_run_alone(architecture, attention):
    """Ragged rows, one of them three sliding windows long."""
    base, tree = tiny_model(architecture), tree_of(num_nodes=10, seed=len(architecture))
    prompts = random_prompts(len(LENGTHS), max(LENGTHS))
    tokens = random_prompts(len(LENGTHS), tree.num_nodes, seed=1)
    base.set_attn_implementation(attention)
    try:
        cache = new_cache(base, len(LENGTHS))
        prefill(base, prompts, torch.tensor(LENGTHS), cache)
        hidden, logits = verify(base, tokens, tree.topology(), cache)
        assert hidden.shape == (4, 10, 32) and logits.shape == (4, 10, VOCAB_SIZE)
        for row, length in enumerate(LENGTHS):
            for node in range(tree.num_nodes):
                path = tokens[row, node_lineage(tree, node)].tolist()
                own_hidden, own_logits = alone(base, prompts[row, :length].tolist() + path)
                torch.testing.assert_close(logits[row, node], own_logits[-1], **TOLERANCE)
                torch.testing.assert_close(hidden[row, node], own_hidden[-1], **TOLERANCE)
    finally:
        base.set_attn_implementation("sdpa")


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral-sliding"])
@torch.no_grad()
def test_a_tree_may_be_run_in_parts(architecture):
    base, tree = tiny_model(architecture), tree_of(num_nodes=11, seed=2)
    prompts, tokens = random_prompts(3, 40), random_prompts(3, 11, seed=1)
    for lengths in ([40, 40, 40], [40, 7, 31]):
        caches = [new_cache(base, 3) for _ in range(2)]
        for cache in caches:
            prefill(base, prompts, torch.tensor(lengths), cache)
        _, whole = verify(base, tokens, tree.topology(), caches[0])
        parts = [
            verify(base, tokens[:, start:stop], tree.topology(), caches[1], first_node=start)[1]
            for start, stop in ((0, 1), (1, 5), (5, 11))
        ]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, **TOLERANCE)


@torch.no_grad()
def test_logits_can_be_asked_of_some_nodes_only():
    base, tree = tiny_model("gemma3"), tree_of(num_nodes=9, seed=2)
    tokens = random_prompts(2, 9, seed=1)
    caches = [new_cache(base, 2) for _ in range(2)]
    for cache in caches:
        prefill(base, random_prompts(2, 6), torch.tensor([6, 4]), cache)
    hidden, logits = verify(base, tokens, tree.topology(), caches[0])
    select = torch.tensor([[8, 0], [3, 3]])
    some_hidden, some = verify(base, tokens, tree.topology(), caches[1], select=select)
    assert some.shape == (2, 2, VOCAB_SIZE)
    torch.testing.assert_close(some, logits[torch.tensor([[0], [1]]), select], **TOLERANCE)
    torch.testing.assert_close(some_hidden, hidden, **TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 7, 32, 512])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral-sliding"])
@torch.no_grad()
def test_a_prompt_read_in_chunks_is_the_prompt_read_at_once(architecture, chunk):
    base, lengths = tiny_model(architecture), [50, 3, 32, 1]
    prompts, cache = random_prompts(4, 50), new_cache(tiny_model(architecture), 4)
    hidden, logits = prefill(base, prompts, torch.tensor(lengths), cache, chunk=chunk)
    assert cache.lengths.tolist() == lengths and cache.longest == 50
    for row, length in enumerate(lengths):
        own_hidden, own_logits = alone(base, prompts[row, :length].tolist())
        torch.testing.assert_close(logits[row], own_logits[-1], **TOLERANCE)
        torch.testing.assert_close(hidden[row], own_hidden[-1], **TOLERANCE)


@torch.no_grad()
def test_what_the_cache_has_is_not_read_again():
    base, prompts = tiny_model("qwen3"), random_prompts(2, 20)
    cache = new_cache(base, 2)
    prefill(base, prompts, torch.tensor([12, 5]), cache)
    hidden, logits = prefill(base, prompts, torch.tensor([20, 7]), cache, chunk=3, keeps_features=True)
    for row, (start, length) in enumerate([(12, 20), (5, 7)]):
        own_hidden, own_logits = alone(base, prompts[row, :length].tolist())
        torch.testing.assert_close(logits[row], own_logits[-1], **TOLERANCE)
        torch.testing.assert_close(hidden[row], own_hidden[-1], **TOLERANCE)
        torch.testing.assert_close(cache.features[row, start:length], own_hidden[start:], **TOLERANCE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_states_are_what_the_output_embedding_reads_and_no_logits_are_computed(architecture):
    base, ids = tiny_model(architecture), random_prompts(2, 40)
    with torch.no_grad():
        expected = torch.stack([alone(base, row.tolist())[0] for row in ids])
    widths = []
    handle = lm_head(base).register_forward_hook(lambda _m, _a, out: widths.append(out.shape[1]))
    try:
        hidden = hidden_states(base, ids)
    finally:
        handle.remove()
    torch.testing.assert_close(hidden, expected, **TOLERANCE)
    assert hidden.requires_grad  # the caller's gradient mode
    assert widths == [0]
    with torch.no_grad():
        assert not hidden_states(base, ids).requires_grad


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_of_layers_stand_behind_the_last_one(architecture):
    base, ids = tiny_model(architecture), random_prompts(2, 40)
    after = copy.deepcopy(base)(input_ids=ids, output_hidden_states=True).hidden_states  # [n]: after n layers
    with_layer = hidden_states(base, ids, layers=(1,))
    torch.testing.assert_close(with_layer, torch.cat([hidden_states(base, ids), after[1]], -1), **TOLERANCE)
    last, second, first = hidden_states(base, ids, layers=(2, 1)).chunk(3, dim=-1)
    torch.testing.assert_close(torch.cat([last, first], -1), with_layer, **TOLERANCE)
    both = hidden_states(base, ids, layers=(1, 2))
    torch.testing.assert_close(layers_of(both, (1, 2), (2,)), torch.cat([last, second], -1), **TOLERANCE)
    cache, lengths = new_cache(base, 2), torch.tensor([40, 17])
    last, _ = prefill(base, ids, lengths, cache, chunk=9, layers=(1,), keeps_features=True)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(last[row], with_layer[row, length - 1], **TOLERANCE)
        torch.testing.assert_close(cache.features[row, :length], with_layer[row, :length], **TOLERANCE)


def test_layers_that_the_base_has_not_are_refused():
    with pytest.raises(ValueError, match=r"fused_layers must be in \[1, 2\], .*, got 3"):
        hidden_states(tiny_model("llama"), random_prompts(1, 3), layers=(1, 3))


@torch.no_grad()
def test_hidden_states_heed_the_attention_mask_and_the_positions():
    base, ids = tiny_model("llama"), random_prompts(1, 9)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = hidden_states(base, ids, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(padded[0, 3:], alone(base, ids[0, 3:].tolist())[0], **TOLERANCE)


def hooks_and_attributes(base: PreTrainedModel) -> dict[str, tuple]:
    """Everything that could stay attached to a model."""
    return {
        name: (
            sorted(vars(module)),
            *(len(value) for key, value in sorted(vars(module).items()) if "hooks" in key),
            module.forward.__func__,
            module.training,
        )
        for name, module in base.named_modules()
    }


def test_nothing_stays_attached_to_the_base():
    base = tiny_model("llama")
    before, config = hooks_and_attributes(base), base.config.to_dict()
    generation = base.generation_config.to_dict()
    model = MedusaModel(base)
    model.generate(random_prompts(1, 5), max_new_tokens=4, do_sample=True, seed=1)
    next(model.stream(random_prompts(1, 5), max_new_tokens=4))
    hidden_states(base, random_prompts(1, 5))
    with pytest.raises(IndexError):
        hidden_states(base, torch.tensor([[VOCAB_SIZE + 5]]))
    assert hooks_and_attributes(base) == before
    assert base.config.to_dict() == config
    assert base.generation_config.to_dict() == generation


class NamedByTransformersNow(nn.Module):
    def forward(self, input_ids, cache=None, use_cache=None):
        return input_ids


class NamedBefore(nn.Module):
    def forward(self, input_ids, past_key_values: DynamicCache | None = None):
        return input_ids


class NamedForStates(nn.Module):
    def forward(self, input_ids, cache_params=None):
        return input_ids


class HandsOn(NamedByTransformersNow):
    def forward(self, input_ids, **kwargs):
        return super().forward(input_ids, **kwargs)


class KeepsAnother(nn.Module):
    def forward(self, input_ids, cache: dict[str, Tensor] | None = None):
        return input_ids


class NamesNothing(nn.Module):
    def forward(self, *args, **kwargs):
        return args


@pytest.mark.parametrize(
    ("kind", "name", "is_named"),
    [
        (NamedByTransformersNow, "cache", True),
        (NamedBefore, "past_key_values", True),
        (NamedForStates, "cache_params", True),
        (HandsOn, "cache", True),
        (KeepsAnother, "past_key_values", False),
        (NamesNothing, "past_key_values", False),
    ],
)
def test_the_cache_is_called_what_the_forward_calls_it(kind, name, is_named):
    assert (cache_argument(kind()), takes_cache(kind())) == (name, is_named)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("model_type", ["llama", "gemma3", "mamba2", "qwen3_next"])
def test_no_name_that_transformers_is_about_to_drop_is_used(model_type, monkeypatch):
    is_stateful = model_type in ("mamba2", "qwen3_next")
    base = stateful_model(model_type) if is_stateful else tiny_model(model_type)
    told = []
    monkeypatch.setattr(generic.logger, "warning_once", told.append)
    prompt = random_prompts(1, 9)
    model = MedusaModel(base)
    model.generate(prompt, max_new_tokens=4)
    filled = {cache_argument(base): cache_of(base(prompt, use_cache=True))}
    with pytest.raises(ValueError, match=f"{cache_argument(base)} must be left out"):
        base.generate(prompt, custom_generate=model.decode, **filled)
    assert verification_error(base) is None and told == []


def test_sizes_are_read_from_the_output_embedding():
    base = tiny_model("gemma3")
    assert (hidden_size(base), vocab_size(base), context_length(base)) == (32, VOCAB_SIZE, 1024)
    assert lm_head(base) is base.lm_head


PLAIN = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
OLD = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
TOKENS = {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
GROUPS = {**PLAIN, "num_key_value_heads": 2}
HYBRID = {**GROUPS, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
OTHERS = {
    "learned positions": lambda: GPT2LMHeadModel(GPT2Config(**OLD, **TOKENS)),
    "learned positions with an offset": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            ffn_dim=48,
            word_embed_proj_dim=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            init_std=0.3,
            eos_token_id=None,
            pad_token_id=0,
        )
    ),
    "one key for all heads": lambda: FalconForCausalLM(
        FalconConfig(
            vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **TOKENS
        )
    ),
    "keys wider than values": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**PLAIN, "num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=32,  # as all real ones whole vectors: a sigmoid's last few numbers are others
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            first_k_dense_replace=1,
        )
    ),
    "capped attention": lambda: Gemma2ForCausalLM(
        Gemma2Config(**HYBRID, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=2.0)
    ),
    "a window in some layers": lambda: Qwen2ForCausalLM(
        Qwen2Config(**GROUPS, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "attention sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**HYBRID, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    ),
    "norms after attention": lambda: Olmo2ForCausalLM(Olmo2Config(**GROUPS)),
    "attention and MLP side by side": lambda: Cohere2ForCausalLM(Cohere2Config(**HYBRID)),
    "a window in every layer": lambda: Starcoder2ForCausalLM(Starcoder2Config(**GROUPS, sliding_window=4)),
    "layers without positions": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(**GROUPS, no_rope_layers=[1, 0], use_sliding_window=False)
    ),
    "one product for query, key and value": lambda: Phi3ForCausalLM(Phi3Config(**GROUPS)),
    "positions in a part of each head": lambda: Glm4ForCausalLM(Glm4Config(**GROUPS, head_dim=8)),
    "scaled embeddings": lambda: GemmaForCausalLM(GemmaConfig(**GROUPS, head_dim=8)),
    "many experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**GROUPS, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "layers that share keys and values": lambda: Gemma4ForCausalLM(
        Gemma4TextConfig(
            **{**GROUPS, "num_hidden_layers": 4},
            head_dim=8,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=6,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB_SIZE,
        )
    ),
    "three axes of positions": lambda: Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config={**GROUPS, "rope_parameters": AXES},
            vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 2},
            image_token_id=60,
            video_token_id=59,
        )
    ),
    "axes of positions in turns": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**GROUPS, "head_dim": 8, "rope_parameters": {**AXES, "mrope_interleaved": True}},
            vision_config={
                **{"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16},
                **{"out_hidden_size": 32, "patch_size": 2, "deepstack_visual_indexes": [0]},
                "num_position_embeddings": 16,
            },
            image_token_id=60,
            video_token_id=59,
        )
    ),
    "scaled logits": lambda: GraniteForCausalLM(
        GraniteConfig(**GROUPS, logits_scaling=3.0, embedding_multiplier=2.0)
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_designs_of_attention_decode_as_transformers_does(kind):
    torch.manual_seed(1)
    base = OTHERS[kind]().eval()
    prompt, options = random_prompts(1, 9), {"max_new_tokens": 20, "do_sample": False}
    reference = base.generate(prompt, **options, attention_mask=torch.ones_like(prompt))
    drafter = OracleDrafter(reference.tolist(), tree_of(num_nodes=12, seed=3), hit_rate=0.9)
    hows = {"step": "static"}, {"drafter": drafter}
    out = assert_exact(MedusaModel(base), prompt, *hows, expected=reference, **options)
    assert out.statistics.tokens_per_step > 1.3
