"""What Text Generation Inference reads: config.json and medusa_lm_head.safetensors, in the reference code's
names.

    config.json   base_model_name_or_path, which the server loads; medusa_num_heads, medusa_num_layers; and no
                  ``architectures``: with that key the heads are left out

Heads of one layer may leave their rows out: the base's LM head then scores. Others hold rows for each head.
It verifies a chain of each head's best guess.
"""

from __future__ import annotations

import shlex

from medusa.files import read_json
from medusa.interop.medusa_reference import CONFIG_FILE, HEADS_FILES, NAMES, heads_of_tensors, named_base
from medusa.interop.plain_export import base_rows, checked_plain, row_changes, tree_changes
from medusa.interop.plain_heads import as_plain_heads, named, scale_of
from medusa.interop.protocol import ExportedFiles, ForeignFormat, ForeignHeads, ReadRequest, ToExport
from medusa.interop.tensor_files import read_tensors

WEIGHTS_FILE = HEADS_FILES[0]
NEEDED = ("base_model_name_or_path", "medusa_num_heads", "medusa_num_layers")
CONSUMER = "Text Generation Inference"


def export(request: ToExport) -> ExportedFiles:
    """Plain heads as Text Generation Inference reads them."""
    heads = checked_plain(request, CONSUMER)
    config = heads.config
    is_without_rows = config.unembedding == "shared" and config.num_layers == 1
    rows = None if config.unembedding == "full" or is_without_rows else base_rows(request, CONSUMER)
    said = {
        "base_model_name_or_path": request.base_name,
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "version": "2" if is_without_rows else "1",
        **scale_of(heads),
    }
    changes = [
        *tree_changes(request, CONSUMER),
        *row_changes(request, copies=0 if is_without_rows else heads.num_heads),
        f"the server loads the base from {request.base_name!r}, which config.json names",
    ]
    weights = named(as_plain_heads(heads, rows), NAMES, request.dtype)
    return ExportedFiles(said, WEIGHTS_FILE, weights, tuple(changes))


def read(request: ReadRequest) -> ForeignHeads:
    """The heads that Text Generation Inference makes of a directory.

    Raises:
        FileNotFoundError: config.json or the weights are missing.
        ValueError: the server would not load them, or would load something else than the file holds.
    """
    config_path, path = request.directory / CONFIG_FILE, request.directory / WEIGHTS_FILE
    config = read_json(config_path)
    if "architectures" in config:
        raise ValueError(
            f"{config_path} says architectures={config['architectures']!r}, and {CONSUMER} loads Medusa "
            "heads only where that key is not there; take it out"
        )
    if missing := [key for key in NEEDED if key not in config]:
        raise ValueError(f"{config_path} must say {' and '.join(missing)}, which {CONSUMER} reads; add them")
    tensors = read_tensors(path)
    has_rows = any(NAMES.unembedding_pattern.fullmatch(name) for name in tensors)
    if not has_rows and config["medusa_num_layers"] != 1:
        raise ValueError(
            f"{path} holds no {NAMES.unembedding_name(0, config['medusa_num_layers'])}, and {CONSUMER} "
            "scores with the base's LM head only where medusa_num_layers is 1, got "
            f"{config['medusa_num_layers']}"
        )
    return heads_of_tensors(request, path, tensors, NAMES)


def serve(directory: str, base: str, num_heads: int) -> str:
    """The command that serves an export."""
    return shlex.join(["text-generation-launcher", "--model-id", directory, "--speculate", str(num_heads)])


TGI = ForeignFormat("tgi", CONSUMER, read, named_base, export=export, serve=serve)
