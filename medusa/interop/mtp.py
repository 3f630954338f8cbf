"""Layers for multi-token prediction in the layout of the base's own files: the tensors that take the place of
those with the same names there.

Read in ``transformers`` 5.23 (``MtpModel`` and ``conversion_mapping.py``). Most bases number them like
further layers of their own; Qwen3-Next and its like have one, and call it ``mtp``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from medusa.heads.mtp import UNSAID, MtpHead, own_head, without_weights
from medusa.interop.protocol import (
    ExportedFiles,
    ForeignFormat,
    ForeignHeads,
    ReadRequest,
    ToExport,
    check_belongs,
    named_base,
    tree_changes,
    vllm_command,
)

_AROUND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
_AROUND_MTP = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}
"""What stands around a layer, as ``transformers`` and as files call it."""


def stored_tensors(head: MtpHead) -> dict[str, Tensor]:
    """The weights of ``head`` as the base's files have them."""
    base = without_weights(head.config.base_config)
    first, is_mtp = base.config.num_hidden_layers, base.config.model_type in UNSAID
    around, stored = (_AROUND_MTP if is_mtp else _AROUND), {}
    layer: Any
    for number, layer in enumerate(head.layers):
        prefix = "mtp." if is_mtp else f"model.layers.{first + number}."
        block = f"mtp.layers.{number}." if is_mtp else prefix
        of_base = {f"model.layers.0.{name}": each for name, each in layer.mtp_block.state_dict().items()}
        for name, each in revert_weight_conversion(base, of_base).items():
            stored[block + name.removeprefix("model.layers.0.")] = each
        for name, each in layer.state_dict().items():
            module, _, rest = name.partition(".")
            if module in around:
                stored[f"{prefix}{around[module]}.{rest}"] = each
    return stored


def _export(request: ToExport) -> ExportedFiles:
    head = request.checkpoint.heads
    if not isinstance(head, MtpHead):
        raise ValueError(
            f"{request.source} holds other heads, and this format the layers that a base comes with; "
            "train them with --head-kind mtp"
        )
    check_belongs(request)
    config = {**head.config.base_config, "base_model_name_or_path": request.base_name}
    weights = stored_tensors(head)
    changes = [
        f"these {len(weights)} tensors take the place of those with the same names in the base's files",
        *tree_changes(request),
    ]
    if head.token_map is not None:
        changes.append(f"the token map of {len(head.token_map):,} tokens is left out: all tokens are scored")
    return ExportedFiles(config, weights, tuple(changes))


def _read(request: ReadRequest) -> ForeignHeads:
    head = own_head(request.base, request.max_depth, source=request.directory)
    return ForeignHeads(head.float(), request.base.dtype)


def _serve(directory: str, base: str, num_heads: int) -> str:
    return vllm_command("mtp", base, base, num_heads)


MTP = ForeignFormat(
    "mtp",
    "whatever reads the base's own files",
    read=_read,
    base_of=named_base,
    export=_export,
    serve=_serve,
)
