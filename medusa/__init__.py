"""Medusa heads for any Hugging Face causal LM: train them on the frozen base, decode several tokens per pass.

Shapes, everywhere in this package:

    B   rows of a batch              D   hidden size of the base model
    T   tokens of a sequence         V   vocabulary of the output embedding
    K   heads                        N   nodes of a candidate tree, root included
    S   cache slots of a row         L   depth of a tree + 1

Depth counts from 1; depth 0 is the root token, the base model's own next token. Tensors are float
unless said otherwise.
"""

from medusa.decoding.statistics import DecodingStatistics, MedusaOutput
from medusa.heads.adapter import Adapter, apply_adapter
from medusa.heads.checkpoint import HeadsCheckpoint, load_heads, save_heads, save_tree
from medusa.heads.medusa_heads import HeadsConfig, MedusaHeads
from medusa.model import MedusaModel
from medusa.trees.candidate_tree import CandidateTree, best_tree

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "CandidateTree",
    "DecodingStatistics",
    "HeadsCheckpoint",
    "HeadsConfig",
    "MedusaHeads",
    "MedusaModel",
    "MedusaOutput",
    "apply_adapter",
    "best_tree",
    "load_heads",
    "save_heads",
    "save_tree",
]
