"""The interface of a kind of heads: everything that other rooms ask of them.

**Adding a kind**: a module in this folder with a subclass of :class:`Heads` and its configuration, and its
line in :data:`medusa.heads.checkpoint.KINDS`; CONTRIBUTING.md names the lines of the other rooms. Heads that
draft one token after the other subclass :class:`medusa.heads.autoregressive_head.AutoregressiveHead`.

Shapes: D hidden, V vocabulary, V' scored tokens, K heads, L fused layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM
from medusa.heads.draft_vocab import DraftVocab
from medusa.options import ForeignName
from medusa.trees.candidate_tree import CandidateTree


class Heads(DraftVocab):
    """Heads of any kind: they guess the tokens after the next one from states of the base."""

    kind: ClassVar[str]
    """The name of the kind, in ``config.json`` and as ``head_kind`` of a training run."""
    config_type: ClassVar[type[Any]]
    """The dataclass of their configuration. All have ``hidden_size``, ``vocab_size``, ``token_map_size`` and
    ``fused_layers``."""
    reads_features: ClassVar[bool] = False
    """Whether they read the base's states of the whole text, and not only the newest. They then keep what
    they have read, and drafting waits for the host, so steps of fixed shape do not run them."""
    exported_as: ClassVar[ForeignName | None] = None
    """The format of other projects that holds all heads of this kind; None where none does, or only some."""

    def __init__(self, config: Any, token_map: Sequence[int] | Tensor | None = None):
        """``config`` is of :attr:`config_type`; ``token_map`` as for :class:`DraftVocab`."""
        super().__init__(config.vocab_size, config.token_map_size, token_map)
        self.config = config

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """K: the depth of their guesses."""

    @property
    def fused_layers(self) -> tuple[int, ...]:
        """The base's decoder layers whose states :meth:`fuse` takes beside the last one."""
        return self.config.fused_layers

    @property
    def reads_per_chain(self) -> float:
        """How often a chain of K guesses reads each of their own weights."""
        return 1.0

    @abstractmethod
    def in_words(self) -> str:
        """A description for people: their number, their size, the rows that they score with."""

    @property
    def weights_name(self) -> str:
        """A name for what their file holds, in errors about its tensors."""
        return f"an {self.kind!r} head"

    def counts_in(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        """Counts of the configuration as names of ``weights`` tell them; empty where they tell none."""
        return {}

    def initialise(self, base: CausalLM) -> None:
        """Take from ``base`` what new heads begin with; by default nothing.

        Raises:
            ValueError: the base's files do not hold it.
        """

    def grown_from(self, earlier: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the configuration with which these heads begin as heads of the configuration ``earlier``
        are: those of parts that begin as the identity. By default there are none."""
        return {}

    def fuse(self, hidden: Tensor) -> Tensor:
        """The input of the heads (..., D) from the base's states (..., (1 + L) * D): by default the last
        ones."""
        return hidden

    @abstractmethod
    def guessing_states(self, hidden: Tensor, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """The states (B, T, ...) of finished texts from whose entry t :meth:`guesses_after` guesses what
        comes after token t + 1.

        Args:
            hidden: (B, T, (1 + L) * D), the base's.
            ids: (B, T) long.
            embed: the base's embeddings of tokens.
        """

    @abstractmethod
    def guesses_after(self, states: Tensor, path: Tensor, lm_head: nn.Module) -> Tensor:
        """Logits (P, K, V') of each depth at P positions.

        Args:
            states: (P, ...), of :meth:`guessing_states`.
            path: (P, K) long, the text's tokens after each position.
            lm_head: the base's.
        """


def check_tree_fits(tree: CandidateTree, heads: Heads | None) -> None:
    """Raise ValueError when ``tree`` asks for more depths than ``heads`` guess, or for more ranks than the
    tokens that they score; None guesses nothing."""
    num_heads = 0 if heads is None else heads.num_heads
    if tree.depth > num_heads:
        raise ValueError(
            f"tree has depth {tree.depth}, the heads are {num_heads}: a tree is at most as deep as they "
            f"guess; use tree.subtree({num_heads})"
        )
    widest = max(tree.width_by_depth, default=0)
    if heads is not None and widest > heads.num_columns:
        raise ValueError(
            f"tree asks for rank {widest - 1}, the heads score {heads.num_columns} tokens: every rank must "
            "be below that; choose a narrower tree"
        )
