"""Tiny random models in the forms that people name as a base, models of images among them."""

from __future__ import annotations

import copy

from conftest import GROUPED, tiny_model
from transformers import AutoConfig

from medusa.base.causal_lm import lm_head
from medusa.base.text_part import auto_class

VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
TEXT = {**GROUPED, "tie_word_embeddings": False}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def of_images(kind, text="llama", text_settings=None, vision=None, **settings):
    """A model of ``kind``, whose text part is one of ``text``."""
    config = AutoConfig.for_model(
        kind,
        text_config={"model_type": text, **TEXT, **(text_settings or {})},
        vision_config={**VISION, **(vision or {})},
        **{"tie_word_embeddings": False, **settings},
    )
    return auto_class(config).from_config(config)


CLIP, SIGLIP = ({"model_type": f"{kind}_vision_model"} for kind in ("clip", "siglip"))
QWEN = {"image_token_id": 60, "video_token_id": 59}
QWEN_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2}
MODELS = {
    "Mistral Small 3": lambda: of_images("mistral3", "mistral", vision={"model_type": "pixtral"}),
    "Ministral 3": lambda: of_images("mistral3", "ministral3", vision={"model_type": "pixtral"}),
    "Qwen2-VL": lambda: of_images(
        "qwen2_vl",
        "qwen2_vl_text",
        {"rope_parameters": AXES},
        {"embed_dim": 16, "hidden_size": 32, "depth": 1, "num_heads": 2, "patch_size": 2},
        **QWEN,
    ),
    "Qwen2.5-VL": lambda: of_images(
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        {"rope_parameters": AXES},
        {**QWEN_VISION, "fullatt_block_indexes": [0]},
        **QWEN,
    ),
    "Qwen3-VL": lambda: of_images(
        "qwen3_vl",
        "qwen3_vl_text",
        {"rope_parameters": {**AXES, "mrope_interleaved": True}},
        {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN,
    ),
    "LLaVA": lambda: of_images("llava", vision=CLIP, vision_feature_layer=-1),
    "LLaVA-NeXT": lambda: of_images("llava_next", "mistral", vision=CLIP, vision_feature_layer=-1),
    "SmolVLM": lambda: of_images("smolvlm"),
    "Idefics3": lambda: of_images("idefics3"),
    "InternVL": lambda: of_images("internvl", "qwen2", vision={"image_size": [8, 8], "patch_size": [4, 4]}),
    "Aya Vision": lambda: of_images(
        "aya_vision",
        "cohere2",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        SIGLIP,
    ),
    "LFM2-VL": lambda: of_images(
        "lfm2_vl",
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "block_multiple_of": 16},
        {"model_type": "siglip2_vision_model", "num_patches": 4},
        projector_hidden_size=16,
    ),
    "Gemma 3n": lambda: of_text(
        "gemma3n_text",
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "laurel_rank": 4},
        **{"num_kv_shared_layers": 0, "intermediate_size": [48, 48], "sliding_window": 8},
        **{"layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.5, 0.0]},
    ),
    "Granite 4.0 of attention": lambda: of_text(
        "granitemoehybrid",
        **{"layer_types": ["full_attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 48},
        **{"mamba_n_heads": 4, "mamba_d_head": 16},
    ),
    "experts": lambda: copy.deepcopy(tiny_model("mixtral-moe")),  # that one is shared
}


def of_text(kind, **settings):
    config = AutoConfig.for_model(kind, **{**TEXT, **settings})
    return auto_class(config).from_config(config)


def bytes_held(*models):
    """Memory of the weights and buffers of ``models``, rows of embeddings in their file among them."""
    found = {}
    for model in models:
        rows = lm_head(model)._buffers.get("rows")  # of an LM head that is packed: only read to train
        for tensor in (*model.parameters(), *model.buffers()):
            is_placeholder = tensor.numel() > 1 and not any(tensor.stride())
            if not is_placeholder and tensor is not rows:
                found[tensor.data_ptr()] = tensor.nbytes
    return sum(found.values())
