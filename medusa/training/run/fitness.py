"""Whether a base can be trained on these documents: their tokens, their lengths, and packed rows."""

from __future__ import annotations

import torch

from medusa.base.causal_lm import CausalLM, context_length, switch_length
from medusa.training.config.options import ConfigurationError, DataOptions
from medusa.training.data.batching import collate
from medusa.training.data.documents import Document, Documents
from medusa.training.states.live import LiveStates

NUM_PACKED = 3
"""Documents of the row on which packing is tried."""
MOST_TOKENS = 512
"""Of each of them; a leak from one document into the next shows in its first tokens."""


def check_documents(base: CausalLM, documents: Documents, name: str) -> None:
    """Raise ConfigurationError when ``base`` cannot read ``documents``: a token has no row in its input
    embedding, or a document is longer than its context."""
    if not len(documents):
        return
    rows, largest = base.get_input_embeddings().weight.shape[0], int(documents.tokens.max())
    if largest >= rows:
        raise ConfigurationError(
            f"the tokenizer of {name!r} gives token id {largest}, and its input embedding has {rows} rows; "
            "base and tokenizer do not belong together: use the tokenizer that the base was saved with"
        )
    context, longest = context_length(base), int(documents.lengths.max())
    if context is not None and longest > context:
        raise ConfigurationError(
            f"max_length must be at most {context}, the context of {name!r}, and a document has {longest} "
            f"tokens; pass --max_length {context}"
        )


def check_packing(live: LiveStates, documents: Documents, options: DataOptions) -> None:
    """Raise ConfigurationError when documents that share a row see each other.

    Whether a restart of the position ids keeps documents apart is the architecture's own affair, and no
    property of it says so. So some documents are read alone and in one row, and their states compared.
    """
    if not options.packing or len(documents) < 2:
        return
    name, switch = type(live.base).__name__, switch_length(live.base)
    if switch is not None and options.max_length > switch:
        raise ConfigurationError(
            f"packing with {name} needs max_length of at most {switch}, got {options.max_length}: past that "
            "the base reads all documents of a batch with other rotary frequencies (LongRoPE); pass "
            f"--packing false, or --max_length {switch}"
        )
    chosen = (documents[index] for index in documents.spread(NUM_PACKED))
    some = Documents.of(Document(each.tokens[:MOST_TOKENS], each.is_label[:MOST_TOKENS]) for each in chosen)
    with torch.no_grad():
        packed = live.of(collate(some, [list(range(len(some)))]))[0]
        alone = [live.of(collate(some, [[index]]))[0] for index in range(len(some))]
    distances = []
    for index in range(1, len(some)):
        ours = packed[some.starts[index] : some.starts[index + 1]].float()
        theirs = alone[index].float()
        distances.append((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12))
    distance = float(torch.cat(distances).median())
    allowed = 1e-3 if packed.dtype in (torch.float32, torch.float64) else 0.1
    if distance > allowed:
        raise ConfigurationError(
            f"packing must keep documents apart, and {name} lets a document see those before it "
            f"in its row: packed, its states are {distance:.1%} away from those it has alone; pass "
            "--packing false"
        )
