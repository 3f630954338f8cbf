"""Medusa heads for any Hugging Face causal LM: train them on the frozen base, decode several tokens per pass.

Shapes, everywhere in this package:

    B   rows of a batch              D   hidden size of the base model
    T   tokens of a sequence         V   vocabulary of the LM head
    K   heads                        N   nodes of a candidate tree, root included
    S   cache slots of a row         L   depth of a tree + 1

Depth counts from 1; depth 0 is the root token, the base model's own next token. Tensors are float
unless said otherwise: "(B, T) long" is a tensor of shape (B, T) and dtype torch.long.
"""

import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

try:
    import fcntl
except ImportError:
    _needed = "medusa needs Linux (on Windows: WSL), and Python has no fcntl here, which locks files there"
    if PurePath(sys.argv[0]).stem in ("medusa", "-m"):  # the command: no traceback
        raise SystemExit(f"error: {_needed}") from None
    raise ImportError(_needed) from None

if TYPE_CHECKING:  # what type checkers and editors see; _HOME says the same to Python
    from medusa.decoding.statistics import DecodingStatistics, MedusaOutput
    from medusa.drafters.references import SuffixCorpus
    from medusa.heads.adapter import Adapter, apply_adapter
    from medusa.heads.checkpoint import HeadsCheckpoint, load_heads, save_heads, save_tree
    from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
    from medusa.interop.custom_generate import custom_generate
    from medusa.model import MedusaModel
    from medusa.trees.candidate_tree import CandidateTree, best_tree

__version__ = "0.3.0"

_HOME = {
    "Adapter": "medusa.heads.adapter",
    "CandidateTree": "medusa.trees.candidate_tree",
    "DecodingStatistics": "medusa.decoding.statistics",
    "HeadsCheckpoint": "medusa.heads.checkpoint",
    "HeadsConfig": "medusa.heads.medusa_heads",
    "MedusaHeads": "medusa.heads.medusa_heads",
    "MedusaModel": "medusa.model",
    "MedusaOutput": "medusa.decoding.statistics",
    "SuffixCorpus": "medusa.drafters.references",
    "apply_adapter": "medusa.heads.adapter",
    "best_tree": "medusa.trees.candidate_tree",
    "custom_generate": "medusa.interop.custom_generate",
    "load_heads": "medusa.heads.checkpoint",
    "save_heads": "medusa.heads.checkpoint",
    "save_tree": "medusa.heads.checkpoint",
}
"""Public name -> the module it is imported from on first use, so that `import medusa` waits for no torch."""

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
