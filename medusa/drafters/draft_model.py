"""A language model drafts: a separate, smaller one, or a cheaper form of the base.

The first is speculative sampling (arXiv 2211.17192). The base is cheaper with its first layers only, or with
its weights in low precision.

The forms of the base run on its own cache, so the prefix is never computed or stored twice: committed entries
are read, and the verification pass overwrites the entries of drafted nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medusa.base.architecture_check import check_decodable
from medusa.base.cache import TreeCache
from medusa.base.causal_lm import (
    CausalLM,
    copy_sharing_parameters,
    decoder_layers,
    lm_head_device,
    vocab_size,
)
from medusa.base.passes import new_cache, prefill, verify, with_rules
from medusa.base.recurrent import is_recurrent
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.protocol import DraftContext, Drafter
from medusa.engine.matrix_rule import matrix_rule
from medusa.engine.views import packed_unsupported_reason, view_of
from medusa.trees.candidate_tree import CandidateTree

MOST_PADDING = 0.05
"""Largest difference between the embedding rows of models of one family."""


class DraftModelDrafter(LevelDrafter):
    """Runs ``draft_model`` down the tree, with a cache of its own.

    Its cache holds committed tokens only: each step first commits the newly accepted tokens, so a rejected
    draft token needs no roll-back.

    Args:
        draft_model: a causal LM over the same tokens as the base.
        base_vocab_size: V of the base. The draft model may have more or fewer rows (padding of the
            embedding differs within a family); surplus is cut, missing tokens are never drafted.
    """

    def __init__(self, draft_model: CausalLM, base_vocab_size: int, tree: CandidateTree):
        check_decodable(draft_model)
        if is_recurrent(draft_model):
            raise ValueError(
                f"draft model must keep no recurrent state, which cannot forget its guesses, got "
                f"{type(draft_model).__name__}; choose one whose layers are all attention"
            )
        super().__init__(tree, lm_head_device(draft_model))
        self.draft_model = draft_model
        self._vocab_size = base_vocab_size
        self.cache: TreeCache | None = None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def reset(self, num_rows: int, after: Drafter | None = None) -> None:
        self.cache = new_cache(self.draft_model, num_rows)

    def keep_rows(self, rows: Tensor) -> None:
        assert self.cache is not None, "reset comes first"
        self.cache.keep_rows(rows)

    def logits_after(self, context: DraftContext, tokens: Tensor, nodes: slice) -> Tensor:
        assert self.cache is not None, "reset comes first"
        if nodes.start == 0:
            text = self._readable(context.tokens)
            _, logits = prefill(self.draft_model, text, context.lengths, self.cache)
            self.cache.uncommit_last()  # the root is node 0 of this tree
            logits = logits[:, None]
        else:
            level = self._readable(tokens[:, nodes])
            _, logits = verify(self.draft_model, level, self.topology, self.cache, first_node=nodes.start)
        return self._over_base_vocabulary(logits)

    def _readable(self, tokens: Tensor) -> Tensor:
        """``tokens`` with its last token in place of those that the draft model has no row for: they may only
        spoil its guess."""
        return tokens.clamp(max=vocab_size(self.draft_model) - 1)

    def _over_base_vocabulary(self, logits: Tensor) -> Tensor:
        surplus = logits.shape[-1] - self._vocab_size
        if surplus >= 0:
            return logits[..., : self._vocab_size]
        return torch.nn.functional.pad(logits, (0, -surplus), value=-torch.inf)


def check_same_tokens(base_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ValueError unless both tokenizers give every token the same id."""
    base = base_tokenizer.get_vocab()
    draft = draft_tokenizer.get_vocab()
    if base != draft:
        different = sorted({token for token, _ in base.items() ^ draft.items()})
        raise ValueError(
            f"draft model must share the base model's tokens, {len(different)} differ (for example "
            f"{different[0]!r}); choose a draft model of the same family"
        )


def check_draft_device(base: CausalLM, draft_model: CausalLM) -> None:
    """Raise ValueError unless the draft model ends on the device on which the base ends."""
    base_device = lm_head_device(base)
    draft_device = lm_head_device(draft_model)
    if draft_device != base_device:
        raise ValueError(
            f"draft model must be on {base_device}, as the LM head of the base is, got one on "
            f"{draft_device}; move it with draft_model.to({str(base_device)!r})"
        )


def check_draft_vocabulary(base: CausalLM, draft_model: CausalLM) -> None:
    """Raise ValueError unless the embeddings differ by no more than padding."""
    base_size = vocab_size(base)
    draft_size = vocab_size(draft_model)
    if abs(base_size - draft_size) > MOST_PADDING * base_size:
        raise ValueError(
            f"draft model has vocab_size={draft_size}, the base {base_size}: they cannot share a tokenizer; "
            "choose a draft model of the same family"
        )


class SelfDrafter(LevelDrafter):
    """Runs ``cheaper``, a cheaper form of the base with the same keys and values, down the tree.

    Args:
        cheaper: from :func:`early_exit` or :func:`low_precision`.
    """

    def __init__(self, cheaper: CausalLM, tree: CandidateTree):
        super().__init__(tree, lm_head_device(cheaper))
        self.cheaper = cheaper

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.cheaper)

    def logits_after(self, context: DraftContext, tokens: Tensor, nodes: slice) -> Tensor:
        if not is_recurrent(self.cheaper):
            _, logits = verify(
                self.cheaper, tokens[:, nodes], self.topology, context.cache, first_node=nodes.start
            )
            return logits
        # a state is kept for committed text alone, so each pass runs from the root down
        topology = self.topology.first(nodes.stop)
        _, logits = verify(self.cheaper, tokens[:, : nodes.stop], topology, context.cache)
        return logits[:, nodes]


class LowPrecisionDrafter(SelfDrafter):
    """Runs the base in int8."""

    context_only = False  # guesses read int8 keys of earlier guesses, the base's own once committed


def early_exit(base: CausalLM, num_layers: int) -> CausalLM:
    """The first ``num_layers`` layers of ``base``, its final norm and its LM head (arXiv 2404.16710).

    Shares every weight with ``base``; nothing is copied.

    Raises:
        ValueError: ``num_layers`` is not below the base's number of layers.
    """
    total = base.config.get_text_config(decoder=True).num_hidden_layers
    if not 1 <= num_layers < total:
        raise ValueError(f"num_layers of an early exit must be in [1, {total - 1}], got {num_layers}")
    shallow = copy_sharing_parameters(base)
    del decoder_layers(shallow)[num_layers:]
    text = shallow.config.get_text_config(decoder=True)  # one object, which all modules of the copy read
    text.num_hidden_layers = num_layers
    if vars(text).get("layer_types"):  # some compute theirs
        text.layer_types = text.layer_types[:num_layers]
    return shallow.eval()


def low_precision(base: CausalLM) -> CausalLM:
    """``base`` with int8 weights (see :mod:`medusa.engine.kernels`).

    Raises:
        ValueError: ``base`` is not float32 on the CPU.
    """
    requirement = packed_unsupported_reason(base)
    if requirement is not None:
        raise ValueError(f"low-precision drafting needs {requirement}")
    return with_rules(view_of(base, int8=True), matrix_rule)
