"""What new heads of every kind begin with: a token map of the data, the weights of earlier heads."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TypeVar

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, logit_scale
from medusa.heads.checkpoint import load_heads
from medusa.heads.eagle3 import Eagle3Head, Heads
from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.training.config.configuration import TrainingConfiguration
from medusa.training.config.options import ConfigurationError
from medusa.training.data.batching import collate
from medusa.training.data.documents import Documents
from medusa.training.losses.alignment import needed_states
from medusa.training.states.live import LiveStates
from medusa.training.states.stored_states import StateFile

SCALE_DOCUMENTS = 16
"""Documents in which the sizes of states are measured."""

H = TypeVar("H", MedusaHeads, Eagle3Head)


def built_heads(
    kind: type[H], configuration: TrainingConfiguration, base: CausalLM, training: Documents
) -> H:
    """Heads with random weights, and the most frequent labels of ``training`` in their token map if any."""
    config = configuration.heads_config(base)
    if isinstance(config, HeadsConfig):
        config = replace(config, logit_scale=logit_scale(base))
    token_map = None
    if config.token_map_size is not None:
        most_frequent = training.most_frequent_labels(config.token_map_size, config.vocab_size)
        token_map = torch.from_numpy(most_frequent)
    with torch.random.fork_rng():
        torch.manual_seed(configuration.data.seed)
        return kind(config, token_map)  # type: ignore[arg-type]


def start_from(heads: Heads, source: str) -> None:
    """Copy the weights of the heads in ``source`` into ``heads``, all but the token map, whose size is free.

    Heads that fuse layers, read the text or have more residual blocks may start from heads that do not: they
    begin as those, since all of that begins as the identity.

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
    if ours["token_map_size"] and theirs["token_map_size"]:  # the tokens of a map are rows of the base
        ours["token_map_size"] = theirs["token_map_size"]
    if isinstance(heads, MedusaHeads) and isinstance(given.heads, MedusaHeads):
        if not given.heads.reads_layers:
            ours["fused_layers"] = ()
        if not given.heads.reads_text:
            ours["context"] = None
        ours["num_layers"] = min(ours["num_layers"], theirs["num_layers"])
    if ours != theirs:
        differing = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
        raise ConfigurationError(
            f"start_from: the heads in {source!r} are others than asked for: "
            + ", ".join(f"{name} is {theirs.get(name)}, not {ours.get(name)}" for name in differing)
        )
    heads.copy_weights(given.heads)


def sampled_states(
    live: LiveStates,
    documents: Documents,
    num_heads: int,
    layers: tuple[int, ...],
    stored: StateFile | None,
) -> Tensor:
    """States (P, (1 + L) * D) of some documents that are trained on: those that a label is predicted from.

    ``stored`` are the states of ``documents``, if any, more of them perhaps; the positions that come back are
    the same without them.
    """
    found = []
    for index in documents.spread(SCALE_DOCUMENTS):
        padded = collate(documents, [[index]])
        needed = needed_states(padded.is_label[0], padded.positions[0], num_heads)
        states = live.of(padded, layers)[0] if stored is None else stored.row(index)
        found.append(states[needed.to(states.device)])
    return torch.cat(found)
