"""The fingerprint of a base model, recorded with the heads that were trained on it.

A file name says little: the same name may hold a base or its fine-tuned child, and heads of the one guess
badly for the other. So a few weights of the LM head are recorded, and the architecture keys of the
configuration. Weights are compared up to rounding of casts, so every copy of a checkpoint passes.
"""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from medusa.base.causal_lm import CausalLM, HasQuantisedRows, embedding_rows, embedding_weight, lm_head
from medusa.options import differences

SAMPLE_ROWS = 16
"""Number of sampled rows of the LM head, spread over the vocabulary."""
SAMPLE_COLUMNS = 4
"""Number of first columns of each."""
TOLERANCE = 0.01
"""Relative distance of two samples. bfloat16 rounds by 0.2 %, 8-bit blocks of a GGUF file by 0.5 %; another
model is 140 % away, and a fine-tuned one as far as its LM head has moved."""
QUANTISED_TOLERANCE = 0.2
"""The distance where one of the two is a quantised file: four bits move a weight by up to a tenth."""
FINETUNED_DISTANCE = 0.7
"""Below this distance one model was trained from the other: those that have nothing to do with each other are
the square root of two apart."""
CONFIGURATION_KEYS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
READABLE_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Kinship:
    """How a base is related to the one that heads were trained on, as far as fingerprints tell."""

    kind: Literal["same", "quantised", "finetuned", "other", "unknown"]
    difference: str | None = None
    """How they differ, in words; None where nothing speaks for that."""

    @property
    def described(self) -> str:
        """What is to be expected of the heads, in a sentence."""
        return _EXPECTED[self.kind].format(self.difference)


_EXPECTED = {
    "same": "the base that they were trained on, as far as its LM head tells",
    "quantised": "the base that they were trained on, and one of the two is in a quantised file: nearly as "
    "many guesses are right",
    "finetuned": "trained further from the base that they were trained on, or this from that ({}): some "
    "guesses are lost; `medusa learn` begins from such heads",
    "other": "another model ({}): few guesses will be right; `medusa learn` makes heads for it",
    "unknown": "not known: the heads have no record of their base's weights, or its LM head cannot be read",
}


@dataclass(frozen=True)
class BaseFingerprint:
    """The fingerprint of a base model."""

    sample: tuple[float, ...] | None
    """Some weights of the LM head; None where it was quantised, offloaded or sharded."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """The values of :data:`CONFIGURATION_KEYS` in its configuration, in plain JSON values."""
    is_quantised: bool = False
    """Whether the LM head was that of a quantised file."""

    @classmethod
    def of(cls, base: CausalLM) -> BaseFingerprint:
        """The fingerprint of a loaded model; an adapter in its layers does not change it."""
        config = base.config.get_text_config(decoder=True)
        recorded = {key: getattr(config, key, None) for key in CONFIGURATION_KEYS}
        known = {key: value for key, value in recorded.items() if isinstance(value, (int, str))}
        head = lm_head(base)
        is_quantised = isinstance(head, HasQuantisedRows)
        rows = _sampled_rows(head)
        if rows is None:
            return cls(None, known, is_quantised)
        values = rows[:, :SAMPLE_COLUMNS].flatten().tolist()
        return cls(tuple(float(f"{value:.6g}") for value in values), known, is_quantised)

    def as_json(self) -> dict[str, Any]:
        """The form that :meth:`from_json` reads."""
        return {
            "sample": None if self.sample is None else list(self.sample),
            "configuration": dict(self.configuration),
            **({"quantised": True} if self.is_quantised else {}),
        }

    @classmethod
    def from_json(cls, raw: Any, origin: str) -> BaseFingerprint:
        """Read what :meth:`as_json` wrote; ``origin`` names the file in messages.

        Raises:
            ValueError: it is something else.
        """
        recorded = raw if isinstance(raw, dict) else {"sample": ()}  # which is no sample
        sample: Any = recorded.get("sample")
        configuration = recorded.get("configuration", {})
        is_listed = isinstance(sample, list) and len(sample) > 0
        is_sample = is_listed and all(type(value) in (int, float) and abs(value) < 1e30 for value in sample)
        if not (sample is None or is_sample) or not isinstance(configuration, dict):
            raise ValueError(
                f"{origin} must hold a sample, null or a list of numbers, and a configuration, an object; "
                f"got {reprlib.repr(raw)}"
            )
        is_quantised = recorded.get("quantised", False) is True
        return cls(None if sample is None else tuple(sample), configuration, is_quantised)

    def kinship(self, base: CausalLM) -> Kinship:
        """How ``base`` is related to this one."""
        other = BaseFingerprint.of(base)
        known = self.configuration.keys() & other.configuration.keys()
        differing = differences(
            {key: self.configuration[key] for key in known}, {key: other.configuration[key] for key in known}
        )
        if differing:
            return Kinship("other", differing[0])
        if self.sample is None or other.sample is None or len(self.sample) != len(other.sample):
            return Kinship("unknown")
        distance = math.dist(self.sample, other.sample) / max(math.hypot(*self.sample), 1e-12)
        is_rounded = self.is_quantised or other.is_quantised
        if distance <= (QUANTISED_TOLERANCE if is_rounded else TOLERANCE):
            return Kinship("quantised" if self.is_quantised != other.is_quantised else "same")
        is_finetuned = distance <= FINETUNED_DISTANCE
        difference = f"its LM head is {distance:.1%} away from theirs"
        return Kinship("finetuned" if is_finetuned else "other", difference)

    def difference(self, base: CausalLM) -> str | None:
        """How ``base`` is another model, in words; None where nothing speaks for that."""
        return self.kinship(base).difference


def _sampled_rows(head: nn.Module) -> Tensor | None:
    """:data:`SAMPLE_ROWS` rows of an LM head; None where its numbers cannot be read."""
    if isinstance(head, HasQuantisedRows):
        return head.rows_at(torch.linspace(0, len(embedding_weight(head)) - 1, SAMPLE_ROWS).long())
    weight = embedding_rows(head)
    # Subclasses are quantised or sharded, and shards may be empty.
    is_plain = type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2 and weight.numel() > 0
    if not is_plain or weight.is_meta or weight.dtype not in READABLE_TYPES:
        return None
    return weight[torch.linspace(0, len(weight) - 1, SAMPLE_ROWS).long().to(weight.device)]


def relative_distance(theirs: Tensor, ours: Tensor) -> float:
    """How far two matrices of weights are from each other, in the size of ``ours``; of other shapes, inf."""
    if theirs.shape != ours.shape:
        return math.inf
    return float((theirs.float() - ours.float()).norm() / ours.float().norm().clamp(min=1e-12))


def kinship_of(fingerprint: BaseFingerprint | None, base: CausalLM) -> Kinship:
    """How ``base`` is related to the base of heads with this fingerprint; None was not recorded."""
    return Kinship("unknown") if fingerprint is None else fingerprint.kinship(base)


def warn_of_another_base(fingerprint: BaseFingerprint | None, base: CausalLM, trained_on: str) -> None:
    """Warn when heads were trained on another model than ``base``; not where no fingerprint was recorded."""
    kinship = kinship_of(fingerprint, base)
    if kinship.difference is None:
        return
    name = repr(base.name_or_path)
    if kinship.kind == "finetuned":
        text = (
            f"the base {name} was trained further than the one that the heads were trained on "
            f"({trained_on!r}), or less far: {kinship.difference}. The text stays the base's own, and some "
            f"guesses are lost; `medusa learn {base.name_or_path}` trains the heads further"
        )
    else:
        text = (
            f"the heads were trained on another model ({trained_on!r}) than the base {name}: "
            f"{kinship.difference}. The text stays the base's own, but few guesses will be right; load the "
            "base that the heads were trained on, or train heads for this one"
        )
    warnings.warn(text, stacklevel=3)
