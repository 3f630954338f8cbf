"""What formats ask of heads to be written, what becomes of the rest, and how vLLM serves them."""

from __future__ import annotations

import json
import shlex

import torch
from torch import Tensor

from medusa.base.causal_lm import embedding_weight, output_embedding
from medusa.heads.medusa_heads import MedusaHeads
from medusa.interop.protocol import ToExport, check_fits


def checked_plain(request: ToExport, consumer: str) -> MedusaHeads:
    """The heads to export.

    Raises:
        ValueError: they are more than plain Medusa heads, or trained with an adapter, or for another base.
    """
    checkpoint, source = request.checkpoint, request.source
    heads = checkpoint.heads
    if not isinstance(heads, MedusaHeads):
        raise ValueError(
            f"{source} is an EAGLE-3 head, and this format holds plain Medusa heads; export it --to "
            "vllm-eagle3, or train others with --head-kind medusa --reads-path false"
        )
    config, more = heads.config, []
    if config.reads_path:
        more.append("reads_path is true: each head also reads the tokens before its guess")
    if config.context is not None:
        more.append("context is set: the heads read the text through a layer of their own")
    if config.fused_layers:
        layers = ", ".join(map(str, config.fused_layers))
        more.append(f"fused_layers is [{layers}]: the heads also read those layers of the base")
    if more:
        raise ValueError(
            f"{source} cannot be served by {consumer}, whose heads read the base's last hidden state and "
            f"nothing else. {'; '.join(more)}. Train heads for {consumer} with --reads-path false and "
            "without --fused-layers; they guess less well"
        )
    check_belongs(request, consumer)
    return heads


def check_belongs(request: ToExport, consumer: str) -> None:
    """Raise ValueError unless the heads sit on the base itself, and on this one."""
    checkpoint, source = request.checkpoint, request.source
    if checkpoint.adapter is not None:
        raise ValueError(
            f"{source} was trained with a LoRA adapter on the base (joint training), and {consumer} would "
            "run the base without it: other text, and fewer right guesses. Train heads without --joint"
        )
    base, config = request.base, checkpoint.heads.config
    check_fits(source, config.hidden_size, config.vocab_size, base)
    fingerprint = checkpoint.fingerprint
    if fingerprint is not None and (difference := fingerprint.difference(base)) is not None:
        raise ValueError(
            f"{source} was trained on another model ({checkpoint.base_model!r}) than the base "
            f"{request.base_name!r}: {difference}. Give the base that it was trained on: --base"
        )


def base_rows(request: ToExport, consumer: str) -> Tensor:
    """The rows (V, D) of the base's output embedding, for heads that score with them.

    Raises:
        ValueError: a matrix of rows is not all there is to it.
    """
    embedding = output_embedding(request.base)
    rows = embedding_weight(embedding).detach()
    if getattr(embedding, "bias", None) is not None:
        raise ValueError(
            f"the output embedding of {request.base_name!r} has a bias, which {consumer}'s heads have no "
            "place for; train heads with --unembedding full, which hold rows of their own"
        )
    if not rows.is_floating_point():
        raise ValueError(
            f"the output embedding of {request.base_name!r} is quantised ({rows.dtype}), and {consumer} "
            "needs its rows; give the base before it was quantised: --base"
        )
    return rows


def tree_changes(request: ToExport, consumer: str) -> list[str]:
    """What becomes of the trees of the heads."""
    checkpoint, changes = request.checkpoint, []
    if checkpoint.tree is not None:
        changes.append(
            f"the candidate tree of {checkpoint.tree.num_nodes} nodes is left out: {consumer} verifies a "
            f"chain of the {checkpoint.heads.num_heads} best guesses"
        )
    if checkpoint.tuned:
        changes.append(f"the trees tuned for {len(checkpoint.tuned)} runtimes are left out")
    return changes


def row_changes(request: ToExport, copies: int) -> list[str]:
    """What becomes of the unembedding of heads that score with the base's rows, when ``copies`` are
    written."""
    config = request.checkpoint.heads.config
    assert isinstance(request.checkpoint.heads, MedusaHeads), "checked_plain refuses others"
    if request.checkpoint.heads.config.unembedding == "full" or not copies:
        return []
    size = copies * config.vocab_size * config.hidden_size * torch.empty(0, dtype=request.dtype).itemsize
    written = f"{config.vocab_size:,} rows" + (f", once for each of {copies} heads" if copies > 1 else "")
    if config.token_map_size is None:
        return [f"the base's output embedding is written into the file: {written}, {megabytes(size)}"]
    return [
        f"the token map of {config.token_map_size:,} tokens is expanded to {written}, {megabytes(size)}; "
        "rows outside the map are their mean, which is never guessed, and cost time"
    ]


def vllm_command(method: str, directory: str, base: str, num_heads: int) -> str:
    """What serves an export with vLLM, which would guess the method from the directory's name."""
    said = json.dumps({"method": method, "model": directory, "num_speculative_tokens": num_heads})
    return shlex.join(["vllm", "serve", base, "--speculative-config", said])


def megabytes(size: float) -> str:
    """A number of bytes in words."""
    return f"{size / 1e6:,.1f} MB"
