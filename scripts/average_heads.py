"""Average heads with the heads that they were started from, so that they keep what both know.

    python scripts/average_heads.py --before runs/a/heads --after runs/b/heads --output runs/average
    python scripts/average_heads.py --before runs/a/heads --after runs/b/heads --output runs/average \
        --token-map-size 8192 --answers runs/*.jsonl

Heads that went on to train on new kinds of text guess those better and the old ones a little worse. Weights
between the two, (1 - share) * before + share * after, keep most of the new and lose nothing of the old
(Wortsman et al., arXiv 2109.01903, equation 2). Token map, trees and provenance are those of --after;
--token-map-size takes the tokens that are most frequent in --answers, those of all runs, instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from medusa import MedusaHeads, load_heads, save_heads
from medusa.base.loading import load_tokenizer
from medusa.cli.options import check_at_least, parse
from medusa.cli.reporting import exit_status
from medusa.heads.checkpoint import HeadsCheckpoint, weights_digest
from medusa.training.data.documents import Documents
from medusa.training.data.reading import read_examples
from medusa.training.data.rendering import Renderer, tokenise


@dataclass(frozen=True)
class AverageOptions:
    """The options of this program."""

    before: str
    """Heads that the others were started from: a directory, a hub id or the name of heads that ship."""
    after: str
    """Heads that were trained from those."""
    output: Path
    """Directory to create."""
    share: float = 0.6
    """Of --after, from 0 to 1. Choose it on text of both kinds: `medusa compare-heads`."""
    token_map_size: int | None = None
    """Tokens that the average may guess. Drafting takes longer with more."""
    answers: tuple[str, ...] = ()
    """Conversations of the base: what the tokens of that map are counted in."""
    base: str | None = None
    """Whose tokenizer counts them; none is the base that the heads were trained on."""
    dtype: Literal["float32", "float16"] = "float32"
    """In which the weights are written; they are computed in float32 all the same."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "share")
        if self.share > 1:
            raise ValueError(f"share must be from 0 to 1, got {self.share:g}")
        if (self.token_map_size is None) != (not self.answers):
            raise ValueError("token_map_size and answers go together")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit status."""
    options = parse(AverageOptions, arguments, description=__doc__)
    return exit_status(lambda: average(options), show_traceback=False)


def average(options: AverageOptions) -> None:
    """Write the average.

    Raises:
        FileExistsError: the output holds something.
        ValueError: the heads do not have the same weights, or belong to an adapted base.
    """
    given = load_heads(options.before), load_heads(options.after)
    averaged = averaged_heads(*given, options.share)
    if options.token_map_size is not None:
        tokenizer = load_tokenizer(options.base or averaged.base_model)
        averaged = with_frequent_tokens(averaged, tokenizer, options.answers, options.token_map_size)
    averaged.provenance["average"] = {
        "before": options.before,
        "before_sha256": weights_digest(options.before),
        "share": options.share,
    }
    save_heads(averaged, options.output, dtype=getattr(torch, options.dtype))
    print(f"wrote {options.output}: {options.share:g} of {options.after}, the rest of {options.before}")


def averaged_heads(before: HeadsCheckpoint, after: HeadsCheckpoint, share: float) -> HeadsCheckpoint:
    """``after`` with (1 - share) * before + share * after as its weights.

    Raises:
        ValueError: as :func:`average`.
    """
    if before.adapter is not None or after.adapter is not None:
        raise ValueError(
            "heads that were trained with an adapter belong to two different bases; average none"
        )
    ours, theirs = (asdict(each.heads.config) | {"token_map_size": None} for each in (after, before))
    if ours != theirs:
        differing = ", ".join(sorted(name for name in ours if ours[name] != theirs.get(name)))
        raise ValueError(f"heads must be of one configuration to be averaged, these differ in {differing}")
    old = dict(before.heads.named_parameters())
    with torch.no_grad():
        for name, weight in after.heads.named_parameters():
            weight.lerp_(old[name], 1 - share)
    return replace(after, provenance=dict(after.provenance))


def with_frequent_tokens(
    checkpoint: HeadsCheckpoint, tokenizer: Any, answers: Sequence[str], size: int
) -> HeadsCheckpoint:
    """The heads with the ``size`` tokens as their map that the model writes most often in ``answers``.

    Raises:
        ValueError, FileNotFoundError: the heads have no map of their own choice, or answers cannot be read.
    """
    heads = checkpoint.heads
    if not isinstance(heads, MedusaHeads) or heads.token_map is None:
        raise ValueError("token_map_size goes with Medusa heads that have a token map")
    renderer = Renderer(tokenizer)
    texts = (text for example in read_examples(answers) for text in renderer.render(example))
    documents = Documents.of(tokenise(tokenizer, texts))
    token_map = documents.most_frequent_labels(size, heads.config.vocab_size)
    mapped = MedusaHeads(replace(heads.config, token_map_size=size), token_map.tolist())
    mapped.copy_weights(heads)
    return replace(checkpoint, heads=mapped)


if __name__ == "__main__":
    sys.exit(main())
