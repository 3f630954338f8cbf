"""The kinds of checkpoints that people name as a base, with random weights: tiny, or as wide as real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from conftest import GROUPED
from gguf import GGMLQuantizationType as Type
from quantised_directories import quantise_saved, write_directory
from quantised_files import write_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from medusa.base.causal_lm import lm_head
from medusa.base.text_part import auto_class

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Widths:
    """How wide the models are; all have two layers."""

    text: Mapping[str, Any]
    """The configuration of a text model."""
    axes: tuple[int, int, int]
    """Shares of time, height and width in the rotary frequencies of Qwen's models of images."""
    expert: int
    """The inner width of an expert."""
    per_layer: int
    """The width of what Gemma 3n adds to each layer."""

    @property
    def hidden(self) -> int:
        return self.text["hidden_size"]

    @property
    def inner(self) -> int:
        return self.text["intermediate_size"]


TINY = Widths({**GROUPED, "tie_word_embeddings": False}, (2, 1, 1), 48, 8)
WIDE = Widths(
    {
        **TINY.text,
        **{"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
        **{"num_key_value_heads": 4, "head_dim": 128, "initializer_range": 0.05},
    },
    (16, 24, 24),
    768,
    256,
)

# ------------------------------------------------------------------ models of transformers

VISION = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}
CLIP, SIGLIP = ({"model_type": f"{kind}_vision_model"} for kind in ("clip", "siglip"))
PIXTRAL = {"model_type": "pixtral"}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
Model = Callable[[Widths], PreTrainedModel]
Write = Callable[[Path, Widths], Path]


def of_text(kind: str, widths: Widths, **settings: Any) -> Any:
    config = AutoConfig.for_model(kind, **{**widths.text, **settings})
    return auto_class(config).from_config(config)


def of_images(kind: str, text: str, vision: Mapping[str, Any], **settings: Any) -> Model:
    """A model of ``kind``, whose text part is one of ``text``. Settings of the text part are one of them:
    ``text_settings``."""

    def made(widths: Widths) -> Any:
        config = AutoConfig.for_model(
            kind,
            text_config={"model_type": text, **widths.text, **settings.get("text_settings", {})},
            vision_config={**VISION, **vision},
            **{"tie_word_embeddings": False, **settings},
        )
        return auto_class(config).from_config(config)

    return made


def of_sound(kind: str, text: str, audio: Mapping[str, Any], **settings: Any) -> Model:
    """A model of ``kind`` that reads sound, whose text part is one of ``text``."""

    def made(widths: Widths) -> Any:
        config = AutoConfig.for_model(
            kind, text_config={"model_type": text, **widths.text}, audio_config=audio, **settings
        )
        return auto_class(config).from_config(config)

    return made


def of_qwen(
    kind: str, vision: Mapping[str, Any], experts: Callable[[Widths], Any] | None = None, **rotary: Any
) -> Model:
    """A model of Qwen that reads images: positions have three axes. ``experts``: settings of a mixture."""

    def made(widths: Widths) -> Any:
        axes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(widths.axes), **rotary}
        width = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
        return of_images(
            kind,
            f"{kind}_text",
            {"depth": 1, "num_heads": 2, "patch_size": 2, width: widths.hidden, **vision},
            text_settings={"rope_parameters": axes, **(experts(widths) if experts else {})},
            **{"image_token_id": 60, "video_token_id": 59},
        )(widths)

    return made


def lfm2_vl(widths: Widths) -> Any:
    layers = {
        "layer_types": ["conv", "full_attention"],
        "block_ff_dim": widths.inner,
        "block_multiple_of": 16,
    }
    vision = {"model_type": "siglip2_vision_model", "num_patches": 4}
    return of_images("lfm2_vl", "lfm2", vision, text_settings=layers, projector_hidden_size=16)(widths)


def ovis_2(widths: Widths) -> Any:
    vision = {"hidden_stride": 1, "num_visual_indicator_tokens": 5, "vocab_size": 32}
    tokens = {"image_token_id": 60, "visual_indicator_token_ids": [55, 56, 57, 58, 59]}
    sizes = {name: widths.text[name] for name in ("hidden_size", "vocab_size")}
    return of_images("ovis2", "qwen2", vision, **sizes, **tokens)(widths)


def gemma_3n(widths: Widths) -> Any:
    return of_text(
        "gemma3n_text",
        widths,
        hidden_size_per_layer_input=widths.per_layer,
        vocab_size_per_layer_input=widths.text["vocab_size"],
        intermediate_size=[widths.inner] * 2,
        activation_sparsity_pattern=[0.5, 0.0],
        **{"laurel_rank": 4, "num_kv_shared_layers": 0, **SLIDING},
    )


def granite_4(widths: Widths) -> Any:
    return of_text(
        "granitemoehybrid",
        widths,
        shared_intermediate_size=widths.inner,
        mamba_d_head=2 * widths.hidden // 4,
        **{"layer_types": ["full_attention"] * 2, "num_local_experts": 0, "mamba_n_heads": 4},
    )


def with_yarn(widths: Widths) -> Any:
    """Longer than the positions of its configuration, as the card of Qwen2.5 says."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    return of_text("qwen2", widths, max_position_embeddings=16, rope_parameters=yarn)


def experts_of_qwen(widths: Widths) -> dict[str, Any]:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": widths.expert}


def deepseek_v2_lite(widths: Widths) -> Any:
    """Keys and values from one small state, a layer without experts, and experts that all tokens share."""
    return of_text(
        "deepseek_v2",
        widths,
        num_key_value_heads=widths.text["num_attention_heads"],
        **{"q_lora_rank": None, "kv_lora_rank": 16, "n_group": 1, "topk_group": 1},
        **{name: widths.text["head_dim"] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")},
        **{"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": widths.expert, "first_k_dense_replace": 1},
    )


def qwen_moe(widths: Widths) -> Any:
    shared = {"shared_expert_intermediate_size": 2 * widths.expert}
    return of_text("qwen2_moe", widths, **experts_of_qwen(widths), **shared)


def mixture(kind: str, **settings: Any) -> Model:
    def made(widths: Widths) -> Any:
        sizes = {"moe_intermediate_size": widths.expert, "intermediate_size": widths.expert}
        return of_text(kind, widths, **{**sizes, "num_experts_per_tok": 2, **settings})

    return made


OF_IMAGES: dict[str, Model] = {
    "Mistral Small 3": of_images("mistral3", "mistral", PIXTRAL),
    "Ministral 3": of_images("mistral3", "ministral3", PIXTRAL),
    "Qwen2-VL": of_qwen("qwen2_vl", {"embed_dim": 16}),
    "Qwen2.5-VL": of_qwen("qwen2_5_vl", {"fullatt_block_indexes": [0]}),
    "Qwen3-VL": of_qwen(
        "qwen3_vl", {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}, mrope_interleaved=True
    ),
    "LLaVA": of_images("llava", "llama", CLIP, vision_feature_layer=-1),
    "LLaVA-NeXT": of_images("llava_next", "mistral", CLIP, vision_feature_layer=-1),
    "SmolVLM": of_images("smolvlm", "llama", {}),
    "Idefics3": of_images("idefics3", "llama", {}),
    "InternVL": of_images("internvl", "qwen2", {"image_size": [8, 8], "patch_size": [4, 4]}),
    "Aya Vision": of_images("aya_vision", "cohere2", SIGLIP, text_settings=SLIDING),
    "LFM2-VL": lfm2_vl,
    "Gemma 3": of_images(
        "gemma3", "gemma3_text", SIGLIP, text_settings=SLIDING, mm_tokens_per_image=4, image_token_index=60
    ),
    "Ovis2": ovis_2,
    "Qwen3-VL 30B-A3B": of_qwen(
        "qwen3_vl_moe",
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        experts_of_qwen,
        mrope_interleaved=True,
    ),
    "Qwen2-Audio": of_sound(
        "qwen2_audio",
        "qwen2",
        {
            **{"model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_layers": 1},
            **{"encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8},
            "max_source_positions": 16,
        },
        audio_token_index=60,
    ),
    "Voxtral": of_sound(
        "voxtral",
        "llama",
        {
            **{"model_type": "voxtral_encoder", "hidden_size": 16, "intermediate_size": 64},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 8},
            "max_source_positions": 16,
        },
        audio_token_id=60,
    ),
}
OF_TEXT: dict[str, Model] = {
    "Gemma 3n": gemma_3n,
    "Granite 4.0 of attention": granite_4,
    "Qwen2.5 with YaRN": with_yarn,
    "Mixtral": mixture("mixtral", num_local_experts=4),
    "Qwen3 30B-A3B": mixture("qwen3_moe", num_experts=4, norm_topk_prob=True),
    "DeepSeek-V2-Lite": deepseek_v2_lite,
    "Qwen1.5-MoE": qwen_moe,
    "Apertus": lambda widths: of_text("apertus", widths),
    "Command R7B": lambda widths: of_text("cohere2", widths, **SLIDING),
}


# ------------------------------------------------------------------ forms of their files


def saved(model: Any, directory: Path) -> Path:
    model.bfloat16().save_pretrained(directory)
    return directory


def with_one_in_float32(directory: Path, widths: Widths) -> Path:
    model = of_text("llama", widths).bfloat16()
    model.model.layers[0].self_attn.v_proj.float().weight.data += 2.0**-20
    model.save_pretrained(directory)
    return directory


def in_a_bin_file(directory: Path, widths: Widths) -> Path:
    saved(of_text("llama", widths), directory)
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()
    return directory


def in_float16(directory: Path, widths: Widths) -> Path:
    of_text("llama", widths).half().save_pretrained(directory)
    return directory


def in_shards_of_bin_files(directory: Path, widths: Widths) -> Path:
    saved(of_text("llama", widths), directory)
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    files = {f"pytorch_model-0000{number}-of-00002.bin": names[number - 1 :: 2] for number in (1, 2)}
    for file, those in files.items():
        torch.save({name: tensors[name].clone() for name in those}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, those in files.items() for name in those}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory


def without_prefix(directory: Path, widths: Widths) -> Path:
    saved(of_text("llama", widths), directory)
    tensors = load_file(directory / WEIGHTS)
    renamed = {name.removeprefix("model."): each for name, each in tensors.items()}
    save_file(renamed, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def with_a_tied_head(directory: Path, widths: Widths) -> Path:
    saved(of_text("llama", widths, tie_word_embeddings=True), directory)
    tensors = load_file(directory / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def in_mxfp4(directory: Path, widths: Widths = TINY) -> Path:
    """A GPT-OSS whose experts have four bits a weight, as its own files have them."""
    inner = max(128, widths.expert)
    sizes = {"num_local_experts": 4, "hidden_size": max(128, widths.hidden), "intermediate_size": inner}
    saved(mixture("gpt_oss", **sizes, **SLIDING)(widths), directory)
    tensors = load_file(directory / WEIGHTS)
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, num_inputs, num_outputs = tensors.pop(name).shape
        blocks = experts, num_outputs, num_inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(117, 121, blocks, dtype=torch.uint8)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def quantised(form: str, architecture: str = "llama", is_tied: bool = False, **settings: Any) -> Write:
    """A directory in a form of :mod:`quantised_directories`."""

    def written(directory: Path, widths: Widths) -> Path:
        sizes = {} if widths is TINY else {name: widths.text[name] for name in WIDTH_SETTINGS}
        write_directory(directory, form, architecture, is_tied, **sizes, **settings)
        return directory

    return written


def quantised_vl(directory: Path, widths: Widths) -> Path:
    """A Qwen2.5-VL whose decoder layers are quantised, with its names of tensors as they were first saved."""
    if widths is TINY:  # groups are of 128 inputs
        sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "initializer_range": 0.05}
        widths = replace(TINY, text={**TINY.text, **sizes}, axes=(8, 12, 12))
    return quantise_saved(saved(OF_IMAGES["Qwen2.5-VL"](widths), directory))


WIDTH_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def gguf_file(
    architecture: str, matrices: Type, others: Type, is_tied: bool = False, **settings: Any
) -> Write:
    def written(directory: Path, widths: Widths) -> Path:
        sizes = {} if widths is TINY else {"hidden": widths.hidden, "vocab_size": widths.text["vocab_size"]}
        path = directory / "model.gguf"
        return write_model(path, architecture, matrices, others, is_tied=is_tied, **sizes, **settings)

    return written


def of_model(model: Model) -> Write:
    return lambda directory, widths: saved(model(widths), directory)


KINDS: dict[str, dict[str, Write]] = {
    "Models that read images too": {name: of_model(model) for name, model in OF_IMAGES.items()},
    "Models of text": {name: of_model(model) for name, model in OF_TEXT.items()},
    "Other files": {
        "bfloat16 with one tensor in float32": with_one_in_float32,
        "`pytorch_model.bin`": in_a_bin_file,
        "`pytorch_model.bin` in shards": in_shards_of_bin_files,
        "float16": in_float16,
        "names without `model.`": without_prefix,
        "tied, with an LM head": with_a_tied_head,
    },
    "Quantised directories": {
        "GPTQ, 4 bits": quantised("gptq"),
        "AWQ": quantised("awq"),
        "compressed-tensors, W4A16": quantised("w4a16"),
        "compressed-tensors, W8A8": quantised("w8a8"),
        "compressed-tensors, FP8": quantised("fp8, channels"),
        "FP8 in blocks": quantised("fp8, blocks"),
        "MXFP4, GPT-OSS": in_mxfp4,
        "AWQ, Qwen2.5, tied": quantised("awq", "qwen2", is_tied=True),
        "AWQ, Qwen2.5-VL": quantised_vl,
        "GPTQ, 8 bits": quantised("gptq, 8 bits"),
        "compressed-tensors, W4A16 with zeros, Phi-3": quantised("w4a16, zeros", "phi3", pad_token_id=0),
    },
    "GGUF files": {
        "Q4_K_M, Llama": gguf_file("llama", Type.Q4_K, Type.Q6_K),
        "Q5_K_M, Qwen3": gguf_file("qwen3", Type.Q5_K, Type.Q6_K),
        "Q8_0, Qwen2.5": gguf_file("qwen2", Type.Q8_0, Type.Q8_0),
        "IQ4_XS, Gemma 3, tied": gguf_file("gemma3", Type.IQ4_XS, Type.Q6_K, is_tied=True),
        "Q4_K_M, Qwen3 MoE": gguf_file("qwen3moe", Type.Q4_K, Type.Q6_K),
        "MXFP4, GPT-OSS": gguf_file("gpt-oss", Type.Q8_0, Type.Q8_0),
        "Q4_K_M, Phi-3": gguf_file("phi3", Type.Q4_K, Type.Q6_K),
        "Q5_K_M, Gemma 2, tied": gguf_file("gemma2", Type.Q5_K, Type.Q6_K, is_tied=True),
        "Q2_K, Llama": gguf_file("llama", Type.Q2_K, Type.Q3_K),
        "F16, Qwen3": gguf_file("qwen3", Type.F16, Type.F16),
        "Q4_0 in two files, Llama 3.1": gguf_file(
            "llama", Type.Q4_0, Type.Q6_K, has_rope_factors=True, num_files=2
        ),
    },
}
"""By section of docs/guides/checkpoints.md: what writes each kind into a directory, and gives its path."""


def bytes_held(*models: Any) -> int:
    """Memory of the weights and buffers of ``models``, rows of embeddings in their file among them."""
    found = {}
    for model in models:
        buffers = lm_head(model)._buffers  # rows of an LM head that is packed: only read to train
        rows = buffers.get("rows", buffers.get("file_rows"))
        for tensor in (*model.parameters(), *model.buffers()):
            is_placeholder = tensor.numel() > 1 and not any(tensor.stride())
            if not is_placeholder and tensor is not rows:
                found[tensor.data_ptr()] = tensor.nbytes
    return sum(found.values())
