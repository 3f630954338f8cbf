"""What the rounds of ``medusa learn`` and ``medusa learn --collected`` have in common: the heads that there
were before, which of them new ones begin as, and the mark that learned heads have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from medusa.assets import shipped_heads
from medusa.base.causal_lm import hidden_size, vocab_size
from medusa.base.known_models import heads_that_fit
from medusa.base.loading import BaseSource
from medusa.cli.options import NO_HEADS
from medusa.console import log_console
from medusa.files import read_json, write_json
from medusa.heads.calibration import AnsweredTokens
from medusa.heads.checkpoint import OWN_HEADS, PROVENANCE_FILE, load_heads
from medusa.heads.medusa_heads import MedusaHeads
from medusa.heads.mtp import can_draft_itself
from medusa.heads.protocol import Heads
from medusa.learning.learned_heads import LearnedHeads, LearnedVersion
from medusa.measurement.comparison import ranked
from medusa.model import MedusaModel
from medusa.training.round import Round

MIN_GAIN = 1.03
"""How much faster than what was in use heads must be: below is noise."""
WORTH_STARTING = 1.15
"""Tokens per step, with eight nodes, from which heads of another base are a start."""


def heads_in_use(base: str, source: BaseSource) -> str:
    """The heads with which ``base`` drafts now, or the name for none."""
    return heads_that_fit(base) or (OWN_HEADS if can_draft_itself(source.config) else NO_HEADS)


def widths(model: MedusaModel) -> dict[str, int]:
    """What new heads must know of the base."""
    return {
        "width": hidden_size(model.base),
        "vocabulary": vocab_size(model.base),
        "layers": model.base.config.get_text_config(decoder=True).num_hidden_layers,
    }


def best_start(model: MedusaModel, answered: Callable[[], Sequence[AnsweredTokens]]) -> str | None:
    """The heads to begin with: those of the base, else those of a base with the same widths, such as the one
    that it was made of, which guess its own answers well; None for new ones. ``answered`` makes rows with
    some of these."""
    own = heads_that_fit(model.base.name_or_path)
    if own is not None and _fitting([own], model):
        return own
    others = [str(each.in_use) for each in LearnedHeads.all() if each.in_use is not None]
    candidates = _fitting([*others, *shipped_heads()], model)
    if not candidates:
        return None
    rows = answered()
    longest = max(sum(row.is_label) for row in rows)
    if longest <= max(heads.num_heads for heads in candidates.values()):
        return None  # no answer tells how deep they guess
    counts = ranked(model, list(candidates.values()), rows, max_rank=8)
    gains = {name: count.held_out_tokens_per_step(8) for name, count in zip(candidates, counts, strict=True)}
    best = max(gains, key=gains.__getitem__)
    is_worth_it = gains[best] >= WORTH_STARTING
    log_console().print(
        f"heads of another base with the same widths, {best}, guess {gains[best]:.2f} tokens a step here: "
        f"{'the new ones begin as those' if is_worth_it else 'no start'}",
        soft_wrap=True,
    )
    return best if is_worth_it else None


def _fitting(names: Sequence[str], model: MedusaModel) -> dict[str, Heads]:
    """Those of the heads called ``names`` that new heads on this base can begin as."""
    num_layers = model.base.config.get_text_config(decoder=True).num_hidden_layers
    sizes = hidden_size(model.base), vocab_size(model.base)
    fitting = {}
    for name in names:
        checkpoint = load_heads(name)
        heads = checkpoint.heads
        if (
            heads.kind == MedusaHeads.kind
            and checkpoint.adapter is None
            and (heads.config.hidden_size, heads.config.vocab_size) == sizes
            and max(heads.fused_layers, default=0) <= num_layers
        ):
            fitting[name] = heads.to(model.device).eval()
    return fitting


def ended_version(
    lesson: Round, tokens_per_step: float, gain: float, speedup: float | None = None
) -> LearnedVersion:
    """The version that a round has made, with what was measured; ``speedup`` is None where nothing was
    timed."""
    provenance = read_json(lesson.heads / PROVENANCE_FILE)
    is_private = lesson.record["is_private"] or provenance.get("learned", {}).get("is_private", False)
    return LearnedVersion(
        number=lesson.number,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        learned_from=lesson.record["learned_from"],
        is_private=is_private,
        num_tokens=int(provenance["data"]["training labels"]),
        minutes=round(lesson.minutes_taken, 1),
        tokens_per_step=round(tokens_per_step, 3),
        speedup=None if speedup is None else round(speedup, 3),
        gain=round(gain, 3),
    )


def mark_learned(heads: Path, version: LearnedVersion) -> None:
    """Say in the heads' provenance how they came."""
    path = heads / PROVENANCE_FILE
    write_json(path, {**read_json(path), "learned": asdict(version)})
