"""The base drafts for itself, cheaper: its first layers only, or its weights in low precision.

Both run on the base's own cache, so the prefix is never computed or stored twice: committed entries are
read, and the entries of drafted nodes lie where the verification pass overwrites them.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from medusa.base.causal_lm import CausalLM, verify, vocab_size
from medusa.drafters.levels import LevelDrafter
from medusa.drafters.protocol import DraftContext
from medusa.engine.views import missing_for_kernels, view_of
from medusa.trees.candidate_tree import CandidateTree


class SelfDrafter(LevelDrafter):
    """Runs ``cheaper``, a cheaper form of the base with the same keys and values, down the tree.

    Args:
        cheaper: from :func:`early_exit` or :func:`low_precision`.
    """

    def __init__(self, cheaper: CausalLM, tree: CandidateTree, beta: float = 1.0):
        super().__init__(tree, cheaper.device, beta)
        self.cheaper = cheaper

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.cheaper)

    def logits_after(self, context: DraftContext, tokens: Tensor, nodes: slice) -> Tensor:
        _, logits = verify(
            self.cheaper, tokens[:, nodes], self.topology, context.cache, first_node=nodes.start
        )
        return logits


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
    config = copy.deepcopy(base.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    with torch.device("meta"):
        shallow = type(base)(config)
    ours = base.state_dict(keep_vars=True)
    for name, parameter in shallow.named_parameters():  # loading gives what it assigns this parameter's flag
        parameter.requires_grad_(ours[name].requires_grad)
    shallow.load_state_dict({name: ours[name] for name in shallow.state_dict()}, assign=True)
    for name, buffer in list(shallow.named_buffers()):
        if buffer.is_meta:  # not saved with the weights, such as rotary frequencies
            owner, _, leaf = name.rpartition(".")
            setattr(shallow.get_submodule(owner), leaf, base.get_buffer(name))
    shallow.set_attn_implementation(text_attention(base))
    return shallow.eval()


def text_attention(base: CausalLM) -> str:
    """The attention implementation of the base's text layers."""
    return base.config.get_text_config(decoder=True)._attn_implementation


def low_precision(base: CausalLM) -> CausalLM:
    """``base`` with int8 weights (see :mod:`medusa.engine.products`).

    Raises:
        ValueError: ``base`` is not float32 on the CPU.
    """
    if (lacks := missing_for_kernels(base)) is not None:
        raise ValueError(f"low-precision drafting needs {lacks}")
    return view_of(base, int8=True)
