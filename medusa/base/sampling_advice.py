"""The sampling that a base comes with: what its makers advise for it.

A directory has it in ``generation_config.json``. A GGUF file has it in keys ``general.sampling.*``, as
llama.cpp writes and reads them (``gguf-py/gguf/constants.py`` of gguf 0.19).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from medusa.base.gguf_file import GGUFFile, is_gguf

_GGUF_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Names of the options behind ``general.sampling.``."""
GGUF_SAMPLING = "general.sampling."


@dataclass(frozen=True)
class SamplingAdvice:
    """Sampling options by their names in ``transformers``; None where nothing is said."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def over(self, other: SamplingAdvice) -> SamplingAdvice:
        """These options, and those of ``other`` where nothing is said here."""
        return SamplingAdvice(**(other.told | self.told))

    @property
    def told(self) -> dict[str, Any]:
        """The options of which something is said."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.told.items())


def sampling_advice(base: Any) -> SamplingAdvice:
    """What ``base``, a model that was loaded, comes with."""
    config = base.generation_config
    names = [field.name for field in fields(SamplingAdvice)]
    advice = SamplingAdvice(**{name: getattr(config, name, None) for name in names})
    path = base.name_or_path
    if not path or not is_gguf(path):
        return advice
    metadata = GGUFFile.open(path).metadata
    in_file = {name: metadata.get(GGUF_SAMPLING + key) for name, key in _GGUF_KEYS.items()}
    return SamplingAdvice(**in_file).over(advice)
