"""What a run starts from: the base model, its documents, new heads."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)

from medusa.base.causal_lm import (
    CausalLM,
    hidden_size,
    hidden_states,
    output_embedding,
    vocab_size,
)
from medusa.base.requirements import check_decodable
from medusa.heads.checkpoint import load_heads
from medusa.heads.eagle import EagleConfig, EagleHead, Heads
from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.training.config.configuration import ConfigurationError, TrainingConfiguration
from medusa.training.config.options import BaseOptions
from medusa.training.data.batching import PaddedBatch, collate
from medusa.training.data.documents import Documents
from medusa.training.states.hidden_source import frozen_states

SCALE_DOCUMENTS = 16
"""Documents in which the sizes of states are measured: of features, of the layers that heads fuse."""


def load_base(options: BaseOptions, device: torch.device) -> CausalLM:
    """The base model on ``device``, frozen and in evaluation mode.

    Raises:
        ValueError: it is no causal language model, or no tree can be verified on it, so heads for it would be
            of no use.
    """
    kwargs: dict[str, Any] = {} if options.attention is None else {"attn_implementation": options.attention}
    kind = type(AutoConfig.from_pretrained(options.base))
    if kind in MODEL_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigurationError(
            f"base must be a causal language model, got {options.base!r}, a {kind.model_type} model; choose "
            "a decoder-only one, such as those of Llama or Qwen"
        )
    base: Any = AutoModelForCausalLM.from_pretrained(options.base, dtype=options.base_dtype, **kwargs)
    check_decodable(base)
    base = base.to(device).requires_grad_(False).eval()
    check_causal(base, options.base)
    return base


def check_causal(base: CausalLM, name: str) -> None:
    """Raise ConfigurationError when the states of ``base`` depend on tokens behind them, as an encoder's."""
    ids = torch.tensor([[0, 1, 0], [0, 1, 2]], device=base.device)
    positions = torch.arange(3, device=base.device).expand(2, 3)
    with torch.no_grad():
        first, second = hidden_states(base, ids, position_ids=positions)[:, :2]
    rounding = 8 * torch.finfo(first.dtype).eps * first.abs().max()
    if (first - second).abs().max() > rounding:
        raise ConfigurationError(
            f"base must be a causal language model, got {name!r}, a {type(base).__name__} whose states "
            "depend on tokens behind them; choose a decoder-only one"
        )


def load_tokenizer(options: BaseOptions) -> Any:
    return AutoTokenizer.from_pretrained(options.base)


def new_heads(configuration: TrainingConfiguration, base: CausalLM, training: Documents) -> Heads:
    """New heads on the base's device, in float32.

    They start as ``start_from`` says; without it Medusa heads start as the base's own output embedding.

    Raises:
        ConfigurationError: the heads to start from have other options.
    """
    config = configuration.heads.heads_config(hidden_size(base), vocab_size(base))
    with torch.random.fork_rng():
        torch.manual_seed(configuration.data.seed)
        if isinstance(config, EagleConfig):
            heads: Heads = EagleHead(config, _token_map(config, training))
        else:
            heads = MedusaHeads(config, _token_map(config, training))
    if configuration.heads.start_from is not None:
        start_from(heads, configuration.heads.start_from)
    elif isinstance(heads, EagleHead):
        heads.set_scales(*_features_and_embeddings(base, training))
    else:
        heads.initialise_from(output_embedding(base))
    if isinstance(heads, MedusaHeads) and heads.reads_layers and not heads.fusion.weight.any():
        heads.set_layer_scale(_some_states(base, training, heads.reads_layers))
    return heads.to(base.device, torch.float32).train()


def start_from(heads: Heads, source: str) -> None:
    """Copy the weights of the heads in ``source`` into ``heads``, all but the token map.

    Heads that fuse layers may start from heads that read the last state alone: they begin as those.

    Raises:
        ConfigurationError: those heads are of another configuration, or belong to an adapted base.
    """
    given = load_heads(source)
    if given.adapter is not None:
        raise ConfigurationError(
            f"start_from: the heads in {source!r} were trained together with an adapter and belong to the "
            "base that carries it; start from heads of the base itself"
        )
    ours, theirs = asdict(heads.config), asdict(given.heads.config)
    if isinstance(given.heads, MedusaHeads) and not given.heads.reads_layers:
        ours["fused_layers"] = ()
    if ours != theirs:
        differing = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
        raise ConfigurationError(
            f"start_from: the heads in {source!r} are others than asked for: "
            + ", ".join(f"{name} is {theirs.get(name)}, not {ours.get(name)}" for name in differing)
        )
    weights = given.heads.state_dict()
    heads.load_state_dict({name: kept for name, kept in weights.items() if name != "token_map"}, strict=False)


def _token_map(config: HeadsConfig | EagleConfig, training: Documents) -> torch.Tensor | None:
    if config.token_map_size is None:
        return None
    return torch.from_numpy(training.most_frequent_labels(config.token_map_size, config.vocab_size))


def _features_and_embeddings(base: CausalLM, training: Documents) -> tuple[torch.Tensor, torch.Tensor]:
    """The base's features and token embeddings (P, D) in some documents."""
    padded, is_inside = _some_rows(training)
    embeddings = base.get_input_embeddings()(padded.input_ids.to(base.device))
    return frozen_states(base, padded)[is_inside], embeddings[is_inside]


def _some_states(base: CausalLM, training: Documents, layers: tuple[int, ...]) -> torch.Tensor:
    """The base's states (P, (1 + L) * D) in some documents."""
    padded, is_inside = _some_rows(training)
    return frozen_states(base, padded, layers)[is_inside]


def _some_rows(training: Documents) -> tuple[PaddedBatch, torch.Tensor]:
    """Documents spread over all, and which places (B, T) bool of them are not padding."""
    chosen = training.spread(SCALE_DOCUMENTS)
    padded = collate(training, [[index] for index in chosen])
    lengths = torch.from_numpy(training.lengths[chosen])
    return padded, torch.arange(padded.input_ids.shape[1]) < lengths[:, None]


def column_of(heads: Heads) -> torch.Tensor | None:
    """(V,) long on the CPU: each token's logits column, -1 where it has none; None without a token map."""
    if heads.token_map is None:
        return None
    columns = torch.full((heads.config.vocab_size,), -1)
    columns[heads.token_map.cpu()] = torch.arange(len(heads.token_map))
    return columns


def map_coverage(heads: Heads, documents: Documents) -> float:
    """The part of the labels of ``documents`` that the heads can guess at all."""
    columns = column_of(heads)
    if columns is None or not documents.num_labels:
        return 1.0
    return float((columns.numpy()[documents.tokens[documents.is_label].astype(np.int64)] >= 0).mean())
