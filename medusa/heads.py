"""The Medusa heads: last hidden state in, one row of logits per depth out.

Head d (d = 1 .. K) reads the hidden state that the base model's own output embedding reads at
position t and scores the token at t + d + 1. A head is residual blocks followed by an
unembedding. This module knows nothing of trees, caches or files.

Shapes: D hidden, V vocabulary, K heads, V' scored tokens (V, or fewer with a token map).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Unembedding = Literal["shared", "full", "low_rank", "token_map"]
Project = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class HeadsConfig:
    """What defines a set of heads, apart from its weights."""

    hidden_size: int
    """D of the base model."""
    vocab_size: int
    """V of the base model's output embedding."""
    num_heads: int = 4
    """K: how many tokens beyond the next one are guessed."""
    num_layers: int = 1
    """Residual blocks per head."""
    unembedding: Unembedding = "shared"
    """shared: the base's own output embedding. full: a (V, D) copy per head. low_rank: the base's plus
    a trained rank-r correction per head. token_map: the base's rows for the tokens in the map only."""
    rank: int = 64
    """r of low_rank."""
    token_map_size: int | None = None
    """V' of token_map."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers", "rank"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if self.unembedding not in get_args(Unembedding):
            raise ValueError(f"unembedding must be one of {get_args(Unembedding)}, got {self.unembedding!r}")
        if (self.unembedding == "token_map") != (self.token_map_size is not None):
            raise ValueError(
                "token_map_size goes with unembedding='token_map' and with no other, got "
                f"unembedding={self.unembedding!r}, token_map_size={self.token_map_size}"
            )


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x)), zero-initialised: untrained, it is the identity (arXiv 2401.10774, eq. 1)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """K heads over a frozen base model's output embedding.

    The base's output embedding is never a part of this module: callers pass it to :meth:`forward`,
    so it is neither trained nor saved nor copied.
    """

    def __init__(self, config: HeadsConfig, token_map: Sequence[int] | Tensor | None = None):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        if config.unembedding == "full":
            self.unembed = nn.ParameterList(
                nn.Parameter(torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02))
                for _ in range(config.num_heads)
            )
        elif config.unembedding == "low_rank":
            self.down = nn.ParameterList(
                nn.Parameter(
                    torch.empty(config.rank, config.hidden_size).normal_(std=config.hidden_size**-0.5)
                )
                for _ in range(config.num_heads)
            )
            self.up = nn.ParameterList(
                nn.Parameter(torch.zeros(config.vocab_size, config.rank)) for _ in range(config.num_heads)
            )
        self.register_buffer("token_map", _checked_token_map(config, token_map))
        self._mapped_rows: _MappedRows | None = None

    token_map: Tensor | None
    """(V',) long: the token id that each scored column stands for; None when every token is scored."""

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    def initialise_from(self, output_embedding: nn.Module) -> None:
        """Start ``full`` heads from the base's unembedding (V, D), each as the base's own LM head."""
        if self.config.unembedding == "full":
            with torch.no_grad():
                for rows in self.unembed:
                    rows.copy_(embedding_weight(output_embedding))

    def features(self, hidden: Tensor) -> Tensor:
        """What each head's unembedding reads: hidden (..., D) -> (..., K, D)."""
        return torch.stack([block(hidden) for block in self.blocks], dim=-2)

    def forward(self, hidden: Tensor, output_embedding: nn.Module) -> Tensor:
        """Logits of every head: hidden (..., D) -> (..., K, V').

        Column j stands for token ``token_map[j]`` when there is a map, for token j otherwise.
        Scaling and soft-capping that an architecture adds after its output embedding are left out:
        they do not change the order of a head's guesses.
        """
        features = self.features(hidden.to(next(self.blocks.parameters()).dtype))
        return self.project(features, output_embedding)

    def project(self, features: Tensor, output_embedding: nn.Module) -> Tensor:
        """The unembedding alone: features (..., K, D) -> logits (..., K, V')."""
        if self.config.unembedding == "full":
            per_head = [F.linear(features[..., k, :], rows) for k, rows in enumerate(self.unembed)]
            return torch.stack(per_head, dim=-2)
        logits = self._base_logits(features, output_embedding)
        if self.config.unembedding == "low_rank":
            corrections = [self._correction(k, features[..., k, :]) for k in range(self.num_heads)]
            logits = logits + torch.stack(corrections, dim=-2)
        return logits

    def logits_of(self, index: int, hidden: Tensor, output_embedding: nn.Module) -> Tensor:
        """Logits of the head at ``index`` (from 0) alone: hidden (..., D) -> (..., V').

        Reads the parameters of that head and of no other, so training can go head by head and never
        hold the logits of all.
        """
        features = self.blocks[index](hidden.to(next(self.blocks.parameters()).dtype))
        if self.config.unembedding == "full":
            return F.linear(features, self.unembed[index])
        logits = self._base_logits(features, output_embedding)
        if self.config.unembedding == "low_rank":
            logits = logits + self._correction(index, features)
        return logits

    def parameters_of(self, index: int) -> list[nn.Parameter]:
        """The parameters that :meth:`logits_of` reads."""
        lists = [getattr(self, name) for name in ("unembed", "down", "up") if hasattr(self, name)]
        return [*self.blocks[index].parameters(), *(each[index] for each in lists)]

    def _base_logits(self, features: Tensor, output_embedding: nn.Module) -> Tensor:
        if self.config.unembedding == "token_map":
            rows, bias = self._rows_of(output_embedding)
            return F.linear(features.to(rows.dtype), rows, bias)
        weight = embedding_weight(output_embedding)
        return output_embedding(features.to(weight.dtype) if weight.is_floating_point() else features)

    def _correction(self, index: int, features: Tensor) -> Tensor:
        return F.linear(F.linear(features, self.down[index]), self.up[index])

    def token_ids(self, columns: Tensor) -> Tensor:
        """Token ids of logits columns, any shape, long."""
        return columns if self.token_map is None else self.token_map[columns]

    def _rows_of(self, output_embedding: nn.Module) -> tuple[Tensor, Tensor | None]:
        """The base's rows for the mapped tokens, gathered anew when the weights or the map have changed."""
        weight, bias = embedding_weight(output_embedding), getattr(output_embedding, "bias", None)
        assert self.token_map is not None
        if self._mapped_rows is None or not self._mapped_rows.are_of(weight, self.token_map):
            self._mapped_rows = _MappedRows(weight, self.token_map)
        return self._mapped_rows.rows, None if bias is None else bias.detach()[self.token_map]


class _MappedRows:
    """Rows of an output embedding, and how to tell that they are out of date."""

    def __init__(self, weight: Tensor, token_map: Tensor):
        # Views, since moving or casting a model swaps the data of its parameters and keeps the objects.
        self.sources = (weight.detach(), token_map.detach())
        self.versions = (_version(weight), _version(token_map))
        self.rows = weight.detach()[token_map]

    def are_of(self, weight: Tensor, token_map: Tensor) -> bool:
        """Whether nothing has moved, been cast or written to since."""
        same_data = all(
            kept.data_ptr() == now.data_ptr() and kept.dtype == now.dtype
            for kept, now in zip(self.sources, (weight, token_map), strict=True)
        )
        return same_data and self.versions == (_version(weight), _version(token_map))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class BaseSizes(Protocol):
    """A configuration of heads that says what base they are for."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def check_heads_fit(config: BaseSizes, hidden_size: int, vocab_size: int, base_name: str | None) -> None:
    """Raise ValueError unless heads of ``config`` can sit on a base of these sizes."""
    for name, theirs, ours in (
        ("hidden_size", config.hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
    ):
        if theirs != ours:
            raise ValueError(
                f"heads were trained for {name}={theirs}, base model {base_name!r} has {ours}; "
                "load the base model that the heads were trained on"
            )


def embedding_weight(output_embedding: nn.Module) -> Tensor:
    """The rows of an output embedding, (V, D)."""
    return cast(Tensor, output_embedding.weight)


def _checked_token_map(config: HeadsConfig, token_map: Sequence[int] | Tensor | None) -> Tensor | None:
    if config.unembedding != "token_map":
        if token_map is not None:
            raise ValueError(f"token_map goes with unembedding='token_map', got {config.unembedding!r}")
        return None
    assert config.token_map_size is not None  # HeadsConfig checked
    if token_map is None:  # filled by loading weights
        return torch.zeros(config.token_map_size, dtype=torch.long)
    ids = torch.as_tensor(token_map, dtype=torch.long)
    if ids.shape != (config.token_map_size,) or len(ids.unique()) != len(ids):
        raise ValueError(
            f"token_map must hold {config.token_map_size} different ids, got shape {tuple(ids.shape)}"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise ValueError(
            f"token_map ids must be in [0, {config.vocab_size}), got {int(ids.min())} to {int(ids.max())}"
        )
    return ids
