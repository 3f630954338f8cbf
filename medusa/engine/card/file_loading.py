"""Loads a GGUF file onto a card with its matrices in the bits that the file has.

Everything else, and matrices of types that no kernel here reads, is widened to the type of the base, as all
of a file is with ``engine="eager"``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from medusa.base.architecture_check import check_decodable
from medusa.base.causal_lm import CausalLM, lm_head
from medusa.base.gguf_file import TensorEntry, type_name
from medusa.base.loading import BaseSource, gguf_model
from medusa.console import log_console, megabytes
from medusa.engine.card.block_modules import QuantisedLinear, QuantisedLookup
from medusa.engine.card.stored_blocks import FORMS, StoredBlocks
from medusa.engine.weights.file_tensors import check_shapes, file_matrices


def load_blocks(source: BaseSource, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """The base of the GGUF file at ``source`` on ``device``, which computes in ``dtype``.

    Raises:
        ValueError: the file is damaged, or holds another model than it says, or trees cannot be verified on
            it.
    """
    file = source.gguf
    assert file is not None, "a source without a file"
    model = gguf_model()
    base = model.empty_model(file, source.config)
    weights = model.placed_weights(file, base)
    check_decodable(base)
    matrices = dict[str, tuple[nn.Module, StoredBlocks]]()
    for name, module, parts, order in file_matrices(file, base, weights, FORMS):
        if len(parts) > 1 or order.columns is not None or type(module) not in (nn.Linear, nn.Embedding):
            continue
        check_shapes(module, parts)
        rows = file.rows(parts[0].name)
        rows = rows if order.rows is None else rows[order.rows]
        matrices[name] = (module, StoredBlocks.of(rows.to(device), parts[0].type))
    widened = [name for name in weights if name not in matrices]
    model.fill(base, file, {name: weights[name] for name in widened}, dtype)
    is_tied = lm_head(base).weight is base.get_input_embeddings().weight
    base.tie_weights()
    model.check_filled(base, file, matrices)
    for parameter in base.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    blocks = {module: matrix for module, matrix in matrices.values()}
    embedding = base.get_input_embeddings()
    if is_tied and embedding in blocks:
        blocks[lm_head(base)] = blocks[embedding]
    _hold(base, blocks, dtype)
    for module in base.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    base.config.dtype = dtype
    _say_what_is_held(
        [matrix for _, matrix in matrices.values()],
        [file.tensors[source] for name in widened for source in weights[name].sources],
    )
    return base.eval()


def _hold(base: nn.Module, blocks: dict[nn.Module, StoredBlocks], dtype: torch.dtype) -> None:
    """Replace the modules of ``base`` that are in ``blocks``."""
    for parent in list(base.modules()):
        for name, child in list(parent.named_children()):
            matrix = blocks.get(child)
            if matrix is not None:
                kind: Any = QuantisedLookup if type(child) is nn.Embedding else QuantisedLinear
                setattr(parent, name, kind(child, matrix, dtype))


def _say_what_is_held(matrices: Iterable[StoredBlocks], widened: Iterable[TensorEntry]) -> None:
    """Tell what the blocks take, by type, and the types of large tensors that were widened."""
    held = Counter[str]()
    for matrix in matrices:
        held[matrix.type_name] += matrix.num_bytes
    parts = [f"{megabytes(num_bytes)} in {name}" for name, num_bytes in held.items()]
    others = sorted({type_name(entry.type) for entry in widened if len(entry.shape) > 1})
    if others:
        parts.append(f"tensors of type {', '.join(others)} widened")
    log_console().print(f"weights on the card: {'; '.join(parts)}", style="dim", soft_wrap=True)
