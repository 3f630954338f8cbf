"""The text part of a model that reads images or sound too, such as Qwen2.5-VL: a wrapper around a decoder.

``transformers`` has mappings of their own for such models. Their text is decoded as that of any base. What
reads images and sound is let go: it takes memory, and decoding here reads tokens alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from medusa.base.causal_lm import CausalLM


def writes_text(config: PreTrainedConfig) -> bool:
    """Whether ``transformers`` has a model of this configuration that continues text."""
    kind = type(config)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    return kind in MODEL_FOR_MULTIMODAL_LM_MAPPING and not config.is_encoder_decoder


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of ``transformers`` that builds and loads the model of a configuration."""
    kind = type(config)
    is_wrapper = kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_wrapper else AutoModelForCausalLM


def empty_model(config: PreTrainedConfig, is_trusted: bool = False) -> CausalLM:
    """The model of a configuration, its weights and buffers without memory (on the device "meta")."""
    with torch.device("meta"):
        model = auto_class(config).from_config(
            copy.deepcopy(config), dtype=torch.float32, trust_remote_code=is_trusted
        )
    model.tie_weights()
    return model


class LetGo(nn.Module):
    """In the place of a part that reads images or sound."""

    def __init__(self, part: PreTrainedModel):
        super().__init__()
        self.config = part.config
        self.device = part.device  # some models ask for both before they know that there is no image
        self.dtype = part.dtype
        self.name = type(part).__name__

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        raise ValueError(
            f"a base that is named is loaded for text: {self.name}, which reads images or sound, is let go; "
            "give text alone, or load the model with transformers"
        )


def text_part(base: CausalLM) -> CausalLM:
    """``base`` without its models of images and sound; a model that has none stays as it is."""
    if base.config.get_text_config(decoder=True) is base.config:
        return base
    decoder = base.get_decoder()
    of_text = set(decoder.modules())
    for parent in list(base.modules()):
        for name, child in list(parent.named_children()):
            is_model = isinstance(child, PreTrainedModel) and child not in of_text
            if is_model and decoder not in set(child.modules()):
                setattr(parent, name, LetGo(child))
    return base
