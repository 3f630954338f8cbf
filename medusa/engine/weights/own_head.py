"""The layers for multi-token prediction that come with a base, held as its engine holds weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from medusa.base.causal_lm import CausalLM, end_ids, vocab_size
from medusa.base.gguf_file import GGUFFile
from medusa.base.loading import gguf_model, gguf_path
from medusa.engine.views import packed_as
from medusa.engine.weights.file_tensors import held_tensors
from medusa.engine.weights.hold import Holder, Reads
from medusa.engine.weights.memory import released_pages
from medusa.engine.weights.stored import Arithmetic, StoredMatrix
from medusa.heads.checkpoint import HeadsCheckpoint
from medusa.heads.draft_vocab import likely_tokens
from medusa.heads.mtp import MtpHead, empty_own_head, num_mtp_layers, own_head, without_weights

OWN_DEPTH = 3
"""How deep the layers that come with a base draft as its heads: of Qwen3.5's one layer, 0.91 of the first
guesses and 0.75 of the second are right, as others publish."""


def load_own_head(base: CausalLM, max_depth: int | None = None) -> MtpHead:
    """The layers for multi-token prediction that come with ``base`` (:mod:`medusa.heads.mtp`), as its engine
    holds weights: in the bits of a GGUF file, of other files in int8; in the type of a base that is not
    packed. Of a large vocabulary they draft :func:`medusa.heads.draft_vocab.likely_tokens`.

    Args:
        max_depth: how deep they draft; None is as deep as they are many.

    Raises:
        ValueError: as :func:`medusa.heads.mtp.own_head`.
    """
    token_map = likely_tokens(vocab_size(base), end_ids(base))
    if packed_as(base) is None:
        return own_head(base, max_depth, token_map=token_map)
    path = gguf_path(base.name_or_path, {})
    reads: Reads = {}
    if path is None:
        head = own_head(base, max_depth, token_map=token_map, dtype=torch.bfloat16)
    else:
        head = empty_own_head(base, max_depth, token_map)
        reads = _filled(head, GGUFFile.open(path))
    Holder(Arithmetic(int8=True, in_whole_numbers=True), reads, released_pages()).hold(head)
    return head.float()


def load_own_heads(base: CausalLM) -> HeadsCheckpoint:
    """:func:`load_own_head` as heads, at least :data:`OWN_DEPTH` deep.

    Raises:
        ValueError: as there.
    """
    depth = max(num_mtp_layers(base.config), OWN_DEPTH)
    return HeadsCheckpoint(load_own_head(base, depth), base.name_or_path)


def _filled(head: MtpHead, file: GGUFFile) -> Reads:
    """What reads the matrices of ``head``, which has no memory yet, from ``file``; all else is filled.

    Raises:
        ValueError: the file has other tensors.
    """
    model = gguf_model()
    release = released_pages()
    reads: dict[int, Callable[[], Sequence[StoredMatrix]]] = {}
    of_layers = model.mtp_weights(file, without_weights(head.config.base_config), head.layers)
    parameters_of = [dict(layer.named_parameters()) for layer in head.layers]
    for layer, weights, parameters in zip(head.layers, of_layers, parameters_of, strict=False):
        held = held_tensors(file, layer, weights, None)
        reads.update((id(parameters[name]), partial(weight.read, release)) for name, weight in held.items())
        rest = {name: weight for name, weight in weights.items() if name not in held}
        model.fill(layer, file, rest, torch.float32)
        model.check_filled(layer, file, held)
    return reads
