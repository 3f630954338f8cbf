"""The Medusa heads: last hidden state in, one row of logits per depth out.

Head d (d = 1 .. K) reads the hidden state h that the base model's own LM head reads at position t and
scores the token at t + d + 1. A head is residual blocks f_d followed by an unembedding. A head may also read
the path it continues, the d tokens x = [x_1 .. x_d] at t + 1 .. t + d; heads that do are sequentially
dependent (Hydra, arXiv 2402.05109). What is unembedded is then

    f_d(h)                                 without a path,
    f_d(h + P_d x)                         with it,
    f_d(h) + C_d ((A_d x) * (1 + G_d h))   with it, read in R dimensions (path_rank).

The last, a low-rank score of a token after its path that the state weighs, has a fraction of the parameters.
Heads may read the states of earlier layers beside the last (as EAGLE-3 does, arXiv 2503.01840):
:meth:`MedusaHeads.fuse` makes one of them, once for all heads. This module knows nothing of trees or files.

Shapes: D hidden, V vocabulary, K heads, L fused layers, V' scored tokens (V, or fewer with a token map).
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.base.causal_lm import CausalLM, embedding_rows, lm_head, rows_at
from medusa.console import counted
from medusa.heads.draft_vocab import MAX_LAYERS, MAX_SIZE, checked_layers
from medusa.heads.protocol import Heads
from medusa.options import check_counts

MAX_DEPTH = 256
"""Largest depth of heads: far above the depth of useful guesses."""
Unembedding = Literal["shared", "full", "token_map"]
_BLOCK_TENSOR = re.compile(r"blocks\.(?P<num_heads>\d+)\.(residual\.)?(?P<num_layers>\d+)\.")
"""Names of the tensors of blocks; each group counts what it is called after."""


@dataclass(frozen=True)
class HeadsConfig:
    """The configuration of a set of heads."""

    hidden_size: int
    """D of the base model."""
    vocab_size: int
    """V of the base model's LM head."""
    num_heads: int = 4
    """K: how many tokens beyond the next one are guessed."""
    num_layers: int = 1
    """Residual blocks per head."""
    unembedding: Unembedding = "shared"
    """shared: the base's own LM head. full: a (V, D) copy per head. token_map: the base's rows for the tokens
    in the map only."""
    token_map_size: int | None = None
    """V' of token_map."""
    reads_path: bool = False
    """Whether head d also reads the d tokens between its hidden state's own and the one it scores."""
    path_rank: int | None = None
    """R: the dimensions in which the path is read; None reads it in all D."""
    fused_layers: tuple[int, ...] = ()
    """The heads also read the base's states after that many of its decoder layers, 1 the first."""
    logit_scale: float = 1.0
    """The factor of the base's logits after its LM head (Granite, Cohere); used for the heads too."""

    def __post_init__(self) -> None:
        check_counts(self, MAX_SIZE, "hidden_size", "vocab_size")
        check_counts(self, MAX_DEPTH, "num_heads")
        check_counts(self, MAX_LAYERS, "num_layers")
        # a list, where it comes from a file
        object.__setattr__(self, "fused_layers", checked_layers(self.fused_layers))
        if not isinstance(self.reads_path, bool):
            raise ValueError(f"reads_path must be true or false, got {self.reads_path!r}")
        if self.path_rank is not None:
            check_counts(self, MAX_SIZE, "path_rank")
            if not self.reads_path:
                raise ValueError(f"path_rank goes with reads_path, got path_rank={self.path_rank} without it")
        scale = self.logit_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise ValueError(f"logit_scale must be a number above 0, got {reprlib.repr(scale)}")
        if self.unembedding not in get_args(Unembedding):
            raise ValueError(f"unembedding must be one of {get_args(Unembedding)}, got {self.unembedding!r}")
        if (self.unembedding == "token_map") != (self.token_map_size is not None):
            raise ValueError(
                "token_map_size goes with unembedding='token_map' and with no other, got "
                f"unembedding={self.unembedding!r}, token_map_size={self.token_map_size}"
            )
        if self.token_map_size is not None:
            check_counts(self, self.vocab_size, "token_map_size")


class _ResidualBlock(nn.Module):
    """x + SiLU(Linear(x)), zero-initialised: untrained, it is the identity (arXiv 2401.10774, eq. 1)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def _residual_blocks(config: HeadsConfig) -> nn.Sequential:
    """The blocks of one head, (..., D) -> (..., D)."""
    return nn.Sequential(*(_ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))


class _PathBlocks(nn.Module):
    """Residual blocks of a head whose result a path is added to, read in ``rank`` dimensions."""

    def __init__(self, config: HeadsConfig, rank: int):
        super().__init__()
        self.residual = _residual_blocks(config)
        self.gate = nn.Linear(config.hidden_size, rank, bias=False)
        self.widen = nn.Linear(rank, config.hidden_size, bias=False)
        nn.init.normal_(self.gate.weight, std=0.1 * config.hidden_size**-0.5)
        nn.init.zeros_(self.widen.weight)  # untrained, a head does not see its path

    def forward(self, hidden: Tensor, path: Tensor) -> Tensor:
        """Features (..., D) of states (..., D) and their paths (..., R)."""
        return self.residual(hidden) + self.widen(path * (1 + self.gate(hidden)))


class MedusaHeads(Heads):
    """K heads over a frozen base model's LM head.

    The base's LM head is never a part of this module: callers pass it to :meth:`forward`, so it is neither
    trained nor saved nor copied. Heads that read their path see its tokens as rows of it.
    """

    kind: ClassVar[str] = "medusa"
    config_type: ClassVar[type[Any]] = HeadsConfig
    config: HeadsConfig

    def __init__(self, config: HeadsConfig, token_map: Sequence[int] | Tensor | None = None):
        if token_map is not None and config.unembedding != "token_map":
            raise ValueError(f"token_map goes with unembedding='token_map', got {config.unembedding!r}")
        super().__init__(config, token_map)
        rank = config.path_rank
        self.blocks = nn.ModuleList(
            _residual_blocks(config) if rank is None else _PathBlocks(config, rank)
            for _ in range(config.num_heads)
        )
        if config.unembedding == "full":
            self.unembed = nn.ParameterList(
                nn.Parameter(torch.empty(config.vocab_size, config.hidden_size).normal_(std=0.02))
                for _ in range(config.num_heads)
            )
        if config.reads_path:
            self.paths = nn.ParameterList(
                nn.Parameter(self._new_path(depth)) for depth in range(1, config.num_heads + 1)
            )
        if config.fused_layers:
            width = len(config.fused_layers) * config.hidden_size
            self.fusion = nn.Linear(width, config.hidden_size, bias=False)
            nn.init.zeros_(self.fusion.weight)  # untrained, the heads see only the last state
            self.register_buffer("layer_scale", torch.ones(width))

    def _new_path(self, depth: int) -> Tensor:
        """How a head of this depth reads its path at first, (D or R, depth * D)."""
        width = self.config.hidden_size
        if self.config.path_rank is None:
            return torch.zeros(width, depth * width)  # untrained, a head does not see its path
        return torch.empty(self.config.path_rank, depth * width).normal_(std=width**-0.5)

    layer_scale: Tensor
    """(L * D,): the size of each dimension of the states of the fused layers; they are read in this unit."""

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    @property
    def scores_base_rows(self) -> bool:
        return self.config.unembedding != "full"

    def in_words(self) -> str:
        config = self.config
        layers = counted(config.num_layers, "layer")
        return f"{counted(self.num_heads, 'head')} of {layers}, unembedding {config.unembedding}"

    @property
    def weights_name(self) -> str:
        return f"{self.config.unembedding!r} heads"

    def counts_in(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        blocks = [match for match in map(_BLOCK_TENSOR.match, weights) if match]
        return {name: len({block[name] for block in blocks}) for name in ("num_heads", "num_layers")}

    def initialise(self, base: CausalLM) -> None:
        """Start ``full`` heads as the base's own LM head, each with a copy of its rows (V, D)."""
        if self.config.unembedding == "full":
            with torch.no_grad():
                for rows in self.unembed:
                    rows.copy_(embedding_rows(lm_head(base)))

    def grown_from(self, earlier: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {"num_layers": min(self.config.num_layers, earlier["num_layers"])}
        return values if earlier["fused_layers"] else {**values, "fused_layers": ()}

    @torch.no_grad()
    def set_layer_scale(self, hidden: Tensor) -> None:
        """Measure the unit of the fused layers in the base's states (..., (1 + L) * D): the root mean square.

        Some dimensions of a residual stream are a hundred times the others.
        """
        below = hidden[..., self.config.hidden_size :].float().flatten(0, -2)
        size = below.square().mean(0).sqrt()
        self.layer_scale.copy_(torch.where(size > 0, size, 1.0))

    def fuse(self, hidden: Tensor) -> Tensor:
        """The input of all heads, (..., D), from the base's states: (..., (1 + L) * D), the last state
        first."""
        if not self.config.fused_layers:
            return hidden
        hidden = self._typed(hidden)
        size = self.config.hidden_size
        last = hidden[..., :size]
        below = hidden[..., size:] / self.layer_scale
        below = F.rms_norm(below.unflatten(-1, (-1, size)), (size,)).flatten(-2)
        return last + self.fusion(below)

    def guessing_states(self, hidden: Tensor, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """The states (B, T, D) that all heads read."""
        return self.fuse(hidden)

    def guesses_after(self, states: Tensor, path: Tensor, lm_head: nn.Module) -> Tensor:
        return self(states, lm_head, path)

    def forward(self, hidden: Tensor, lm_head: nn.Module, path: Tensor | None = None) -> Tensor:
        """Logits of every head: hidden (..., D), :meth:`fuse`'d -> (..., K, V').

        Column j is token ``token_map[j]`` when there is a map, token j otherwise. ``path`` (..., K) long, the
        K tokens after the hidden state's own, is for heads that read it. Logits are multiplied by
        ``logit_scale``, so that they are of the base's own size. Soft-capping that an architecture adds after
        its LM head is left out: it does not change the order of guesses.
        """
        rows = self._rows_of_path(path, lm_head)
        features = []
        for index in range(self.num_heads):
            path_rows = None if rows is None else rows[..., : index + 1, :]
            features.append(self._features_of(index, hidden, path_rows))
        if self.config.unembedding == "full":
            logits = [
                F.linear(head_features, head_rows)
                for head_features, head_rows in zip(features, self.unembed, strict=True)
            ]
            return self._scaled(torch.stack(logits, dim=-2))
        return self._scaled(self.unembedded(torch.stack(features, dim=-2), lm_head))

    def logits_of(self, index: int, hidden: Tensor, lm_head: nn.Module, path: Tensor | None = None) -> Tensor:
        """Logits of one head, at ``index`` (from 0): hidden (..., D), :meth:`fuse`'d -> (..., V').

        ``path`` (..., index + 1) long are the tokens after the hidden state's own, for heads that read them.
        Reads the parameters of that head and of no other, so training can go head by head and never hold the
        logits of all.
        """
        features = self._features_of(index, hidden, self._rows_of_path(path, lm_head))
        if self.config.unembedding == "full":
            return self._scaled(F.linear(features, self.unembed[index]))
        return self._scaled(self.unembedded(features, lm_head))

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def _rows_of_path(self, path: Tensor | None, lm_head: nn.Module) -> Tensor | None:
        """The tokens of ``path`` (..., d) long as heads read them: rows of the LM head at unit size, (..., d,
        D). None when these heads read no path."""
        if not self.config.reads_path:
            return None
        if path is None:
            raise ValueError("these heads read the tokens of their path (reads_path): pass path")
        return self._unit_rows(path, lm_head)

    def _unit_rows(self, tokens: Tensor, lm_head: nn.Module) -> Tensor:
        """Rows of the LM head for ``tokens`` (...), (..., D), at unit size."""
        rows = rows_at(lm_head, tokens)
        if not rows.is_floating_point():
            raise ValueError(
                f"heads that read tokens need the rows of the LM head, which is {rows.dtype}; "
                "leave the LM head unquantised"
            )
        rows = rows.to(next(self.blocks.parameters()).dtype)
        return F.rms_norm(rows, rows.shape[-1:])

    def _features_of(self, index: int, hidden: Tensor, path_rows: Tensor | None) -> Tensor:
        """The features (..., D) that the head at ``index`` unembeds."""
        hidden = self._typed(hidden)
        blocks = self.blocks[index]
        if path_rows is None:
            return blocks(hidden)
        path = self._read_path(index, path_rows.flatten(-2))
        return blocks(hidden + path) if self.config.path_rank is None else blocks(hidden, path)

    def _read_path(self, index: int, rows: Tensor) -> Tensor:
        return F.linear(rows, self.paths[index])

    def _typed(self, hidden: Tensor) -> Tensor:
        return hidden.to(next(self.blocks.parameters()).dtype)

    def parameters_of(self, index: int) -> list[nn.Parameter]:
        """The parameters that :meth:`logits_of` reads."""
        by_head = [getattr(self, name) for name in ("unembed", "paths") if hasattr(self, name)]
        return [*self.blocks[index].parameters(), *(parameters[index] for parameters in by_head)]
