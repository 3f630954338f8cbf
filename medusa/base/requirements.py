"""What a base model must be for a tree to be verified on it, as far as can be said without running it."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel

from medusa.base.attention import attention_windows, check_attention, is_code_of_transformers
from medusa.base.causal_lm import CausalLM, output_embedding


def check_is_model(base: object) -> None:
    """Raise TypeError, saying what to pass instead, unless ``base`` is a model of ``transformers`` itself."""
    if isinstance(base, PreTrainedModel):
        return
    kind = type(base).__name__
    if hasattr(base, "_orig_mod"):
        advice = "pass the model that was compiled (its _orig_mod), and step='compiled' for compiled steps"
    elif hasattr(base, "get_base_model"):
        advice = "pass its get_base_model(), which keeps the adapter"
    elif isinstance(getattr(base, "module", None), PreTrainedModel):
        advice = "pass the model inside (its module)"
    else:
        advice = "load one with AutoModelForCausalLM.from_pretrained"
    raise TypeError(f"base must be a path, a hub id or a loaded PreTrainedModel, got {kind}; {advice}")


def check_decodable(base: CausalLM, attends_here: bool = True) -> None:
    """Raise ValueError, with the reason, when a tree cannot be verified on ``base``, TypeError when ``base``
    is a wrapper around a model. The attention implementation counts only where ``attends_here``."""
    check_is_model(base)
    name, config = type(base).__name__, base.config.get_text_config(decoder=True)
    if base.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; tree verification needs a decoder-only model")
    output_embedding(base)
    if not base.can_generate():
        raise ValueError(f"{name} cannot generate: it is no causal language model; use AutoModelForCausalLM")
    if getattr(base, "_is_stateful", False):
        raise ValueError(
            f"{name} carries a recurrent state, and a state cannot forget rejected tokens; "
            "tree verification needs a model whose layers are all attention"
        )
    parameters = inspect.signature(type(base).forward).parameters
    if "past_key_values" not in parameters and is_code_of_transformers(base):
        raise ValueError(
            f"{name}.forward takes no past_key_values, so it keeps no keys and values of a prompt; "
            "tree verification needs a model with a key-value cache"
        )
    if "position_ids" not in parameters:
        raise ValueError(
            f"{name}.forward takes no position_ids (it derives positions from the order of tokens), "
            "so the nodes of a tree cannot be given theirs"
        )
    if attends_here:
        check_attention(base)
    if getattr(config, "alibi", False):
        raise ValueError(
            f"{name} biases attention by distance (alibi=True) and takes the distance from the order of "
            "tokens, so the nodes of a tree cannot be given theirs"
        )
    if getattr(config, "cross_attention_layers", None):
        raise ValueError(
            f"{name} has layers that attend to images (cross_attention_layers), and a tree is verified from "
            "its tokens alone; use its own generate"
        )
    attention_windows(base)
